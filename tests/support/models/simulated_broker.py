"""Simulate the process of one reference broker: its lease, its view and its replicas, without sockets and threads.

Its watch on etcd is four watchers, one for each prefix of its view: each reports in order of revision, as late as
`watch_delays` says, in no defined order relative to the others. A reload replaces everything on its way by a snapshot.

The decisions are the product's: BrokerLease, ClusterView, ReplicaManager, IsrKeeper, LogMaintenance, Partition, and Log
on a disk. The event loop, the clock, the link to etcd and its watch are simulated, and so is the work of
`kproxy.broker.server`, which connects these parts.

States
  running    `run` does the work that is due
  stopped    nothing runs and time passes (SIGSTOP, a virtual machine that is moved)
  dead       it was killed, or ended, and never runs again; its open files are in a directory that nobody reads

Its clock may stop the process at any place where it is read, for as long as `interrupt` takes.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, cast

from kproxy.broker.broker_lease import BrokerLease, IdInUse
from kproxy.broker.cluster import ClusterView, Topic
from kproxy.broker.config import BrokerConfig, LogOptions
from kproxy.broker.context import Bindings, Broker
from kproxy.broker.data_dir import DataDir
from kproxy.broker.fence_keeper import FenceKeeper
from kproxy.broker.keys import BrokerValue, Keys
from kproxy.broker.log_maintenance import LogMaintenance
from kproxy.broker.partition import ACKS_ALL, AppendResult, Partition, ReplicaSettings
from kproxy.broker.replica_manager import ReplicaManager
from kproxy.broker.replication.isr_keeper import IsrKeeper
from kproxy.broker.writer_fence import UNBOUND
from kproxy.etcd import EtcdError
from kproxy.etcd.lease import LeaseFence
from kproxy_codec import error_codes
from kproxy_codec.own import FenceBinding
from kproxy_codec.record_batch import parse_batch
from tests.support.models.simulated_etcd import EtcdStore, KeepAlives, Link, SimulatedEtcdClient
from tests.support.models.simulated_loop import SimulatedLoop

TOPIC, PARTITION_INDEX = "t", 0
PARTITION = (TOPIC.encode(), PARTITION_INDEX)
LEASE_TTL_S = 10
ISR_LAG_S = 10.0
PRODUCE_TIMEOUT_S = 30.0
KEEP_INTERVAL_S = 5.0
DRAIN_TIMEOUT_S = 3.0


class State(Enum):
    RUNNING = "running"
    STOPPED = "stopped"
    DEAD = "dead"


class SimulatedProcess:
    """One run of a broker. `now` is the model's time; `rate` is the speed of this broker's clock.

    `on_left_behind` is called if it stops in order, after it has waited in vain for followers to get all its records.
    """

    def __init__(
        self,
        node_id: int,
        directory: Path,
        store: EtcdStore,
        *,
        min_insync_replicas: int,
        log_options: LogOptions,
        hand_over_after_s: float,
        now: Callable[[], float],
        rate: float,
        on_left_behind: Callable[[], None],
    ) -> None:
        self.node_id = node_id
        self.directory = directory
        self.state = State.RUNNING
        self.failure = ""
        # (how many readings of the clock from now, what happens then)
        self._interruption: tuple[int, Callable[[], None]] | None = None
        self._now = now
        self._rate = rate
        self._store = store
        self._min_insync_replicas = min_insync_replicas
        self._log_options = log_options
        self.loop = SimulatedLoop(lambda: self.time)
        self.client = SimulatedEtcdClient(store)
        self.view = ClusterView(Keys("/p"))
        self.watches = True
        # Seconds by key prefix.
        self.watch_delays: dict[str, float] = {}
        # By key prefix: the revision up to which etcd has sent changes, and the arrival time of the last of them.
        self._told: dict[str, int] = {}
        self._arrives_at: dict[str, float] = {}
        # A reload begins another stream; changes on their way on an earlier one are dropped.
        self._stream = 0
        self._on_left_behind = on_left_behind
        self._data_dir = DataDir.open(directory, node_id)
        self.log_id = self._data_dir.log_id
        self.leases = ReplicaManager(
            self.client,
            self.view,
            self._data_dir,
            node_id,
            settings_of=self._settings_of,
            on_identity_lost=self._on_identity_lost,
            hand_over_after_s=hand_over_after_s,
        )
        self._isr_keeper = IsrKeeper(
            self.client,
            self.view,
            self.leases.partitions.values,
            isr_lag_s=ISR_LAG_S,
            on_deposed=self.leases.deposed,
        )
        nobody = cast(Any, None)
        self.broker = Broker(
            BrokerConfig(node_id, directory, ()),
            "cluster",
            self.view,
            self.leases,
            nobody,
            nobody,
            FenceKeeper(self.client, self.view, on_deposed=self.leases.deposed),
            nobody,
        )
        self.keeper = LogMaintenance(
            self.leases.hosted.values,
            flush_interval_s=KEEP_INTERVAL_S,
            retention_check_interval_s=KEEP_INTERVAL_S,
            now_ms=lambda: int(now() * 1000),
        )
        self._lease = BrokerLease(
            self.client,
            self.view.keys,
            BrokerValue(node_id, f"broker-{node_id}", 9092, 9093, self.log_id),
            ttl_s=LEASE_TTL_S,
            clock=self.clock,
            on_claimed=self._on_claimed,
        )
        self.loop.create_task(self._serve())

    # The broker as a server

    async def _serve(self) -> None:
        fence = await self._establish()
        self._load()
        parts = (self.leases.run(), self._isr_keeper.run(), self.keeper.run())
        keeping = [asyncio.create_task(part) for part in parts]
        try:
            while True:
                self.leases.begin(fence)
                reason = await self._lease.hold()
                self.leases.drop_all(reason)
                fence = await self._establish()
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)

    async def _establish(self) -> LeaseFence:
        while True:
            try:
                return await self._lease.establish(LEASE_TTL_S)
            except (IdInUse, EtcdError):
                await asyncio.sleep(1.0)

    def _settings_of(self, topic: Topic, partition_index: int) -> ReplicaSettings:
        return ReplicaSettings(self.node_id, self.clock, ISR_LAG_S, self._min_insync_replicas, self._log_options)

    def _on_claimed(self, key: str, value: bytes, fence: LeaseFence) -> None:
        self.view.apply_put(key, value, lease_id=fence.lease_id, revision=fence.claim_revision)

    def _on_identity_lost(self, reason: str) -> None:
        self._lease.declare_lost(reason)

    def begin_stop(self) -> None:
        """SIGTERM. The process is dead once it has shut down."""
        if not self.leases.stopping:
            self.loop.create_task(self._stop())

    async def _stop(self) -> None:
        self.leases.resign_all()
        began_at = self.loop.time()
        await self.leases.drain(DRAIN_TIMEOUT_S)
        if self.loop.time() >= began_at + DRAIN_TIMEOUT_S:
            self._on_left_behind()
        await self.keeper.flush(whatever_the_policy=True)
        await self.keeper.checkpoint()
        await self._lease.revoke()
        await self.leases.close()
        self._data_dir.close()
        self.state = State.DEAD

    # Its place in the simulated world

    def clock(self) -> float:
        """Seconds on this broker's clock. Reading it may take long: see `interrupt_at`."""
        if self._interruption is not None:
            left, happen = self._interruption
            if left > 0:
                self._interruption = (left - 1, happen)
            else:
                self._interruption = None
                happen()
        return self.time

    @property
    def time(self) -> float:
        return self._now() * self._rate

    def interrupt_at(self, readings: int, happen: Callable[[], None]) -> None:
        """At a reading of the clock, after `readings` others, the process stops and `happen` runs instead."""
        self._interruption = (readings, happen)

    def interrupt_never(self) -> None:
        self._interruption = None

    @property
    def next_timer(self) -> float | None:
        """The time of this process's next work, in the model's time."""
        when = self.loop.next_timer if self.state is State.RUNNING else None
        return None if when is None else when / self._rate

    def run(self) -> None:
        """Do all work that is possible now."""
        if self.state is State.RUNNING and not self.loop.is_running():
            if self.is_behind:
                self.watch()
            self.loop.run_ready()
            for error in self.loop.errors:
                self.failure = f"{error.get('message')}: {error.get('exception')!r}"

    def _load(self) -> None:
        snapshot = self._store.snapshot(self.view.prefixes)
        self._told = dict.fromkeys(self.view.prefixes, snapshot.revision)
        self.view.on_snapshot(snapshot)

    def reload(self, delay_s: float) -> None:
        """The present content of etcd arrives after `delay_s`, and replaces all changes on their way."""
        if not self._told or self.client.link is Link.CUT:
            return
        snapshot, arrives_at = self._store.snapshot(self.view.prefixes), self.loop.time() + delay_s
        self._stream += 1
        self._told = dict.fromkeys(self.view.prefixes, snapshot.revision)
        self._arrives_at = dict.fromkeys(self.view.prefixes, arrives_at)
        self.loop.call_at(arrives_at, self._tell, self._stream, self.view.on_snapshot, snapshot)

    def watch(self, revisions: int | None = None) -> None:
        """Apply changes in etcd: all of them if watches are up, otherwise the next `revisions`."""
        if self._told and (self.watches or revisions):
            least = min(self._told.values())
            self._send(self.view.prefixes, min(self._store.revision, least + (revisions or self._store.revision)))

    def watch_one(self, prefix: str, changes: int) -> None:
        """Apply the next `changes` under one prefix, whatever changed earlier under others."""
        if self._told:
            later = self._store.events_after(self._told[prefix])
            mine = [revision for revision, events in later if any(each.kv.key.startswith(prefix) for each in events)]
            if mine:
                self._send([prefix], mine[:changes][-1])

    def _send(self, prefixes: list[str], up_to: int) -> None:
        for revision, events in self._store.events_after(min(self._told[each] for each in prefixes), up_to):
            for prefix in prefixes:
                mine = [event for event in events if event.kv.key.startswith(prefix)]
                if mine and revision > self._told[prefix]:
                    arrives_at = self.loop.time() + self.watch_delays.get(prefix, 0.0)
                    arrives_at = self._arrives_at[prefix] = max(arrives_at, self._arrives_at.get(prefix, 0.0))
                    self.loop.call_at(arrives_at, self._tell, self._stream, self.view.on_events, mine, revision)
        for prefix in prefixes:
            self._told[prefix] = max(self._told[prefix], up_to)

    def _tell(self, stream: int, tell: Callable[..., None], *what: object) -> None:
        if stream == self._stream:
            tell(*what)

    @property
    def is_behind(self) -> bool:
        return bool(self._told) and min(self._told.values()) < self._store.revision

    @property
    def hears_at_once(self) -> bool:
        """Whether it runs, and nothing between it and etcd is delayed."""
        is_on_time = not any(self.watch_delays.values()) and max(self._arrives_at.values(), default=0.0) <= self.time
        keeps_alive = self.client.link is Link.FAST and self.client.keepalives is KeepAlives.ANSWERED
        return self.state is State.RUNNING and self._interruption is None and is_on_time and keeps_alive

    def hear_at_once(self) -> None:
        """End all delays of messages from etcd."""
        self.watch_delays.clear()
        self.client.keepalives = KeepAlives.ANSWERED

    def kill(self, graveyard: Path) -> None:
        """kill -9: the disk stays as it is; further writes of this process go to a copy."""
        self.state = State.DEAD
        moved = graveyard / f"{self.node_id}-{len(list(graveyard.iterdir()))}"
        self.directory.rename(moved)
        shutil.copytree(moved, self.directory)

    def bury(self) -> None:
        """Release all resources, at the end of the run."""
        self.state = State.DEAD
        self._interruption = None
        self.loop.finish()
        self.keeper.close()
        for partition in self.partitions():
            partition.close()
        self._data_dir.close()

    # Requests of clients and other brokers

    def partitions(self) -> list[Partition]:
        return list(self.leases.hosted.values())

    @property
    def partition(self) -> Partition | None:
        """The partition's replica, if it is open."""
        return self.leases.hosted.get(PARTITION)

    @property
    def leads(self) -> bool:
        """Whether it leads, by its own view and its fence."""
        partition = self.leases.led(*PARTITION)
        return partition is not None and partition.serves_reads()

    def is_fenced(self) -> bool:
        """Whether its fence is dead; reads the clock without an interruption."""
        fence = self._lease.fence
        return fence is None or self.time >= fence._deadline

    @property
    def lease_id(self) -> int:
        """The id of its lease by its own fence; 0 for none."""
        return 0 if self.is_fenced() or self._lease.fence is None else self._lease.fence.lease_id

    async def produce(self, records: bytearray, acks: int, bindings: Bindings) -> AppendResult:
        """The Produce API for one partition, from the checked batch on."""
        partition = self.leases.led(*PARTITION)
        if partition is None:
            return AppendResult(error_codes.NOT_LEADER_OR_FOLLOWER)
        bound = bindings.get(PARTITION, UNBOUND)
        if partition.writers.is_above(bound):
            await self.broker.fences.settle(partition, FenceBinding(TOPIC, PARTITION_INDEX, bound))
        view = memoryview(records)
        result = partition.append_as_leader(view, parse_batch(view), acks, bound)
        if (
            acks == ACKS_ALL
            and result.error_code == error_codes.NONE
            and not partition.is_committed(result.last_offset)
        ):
            error_code = await partition.wait_for_isr(result.last_offset, PRODUCE_TIMEOUT_S)
            if error_code != error_codes.NONE:
                return AppendResult(error_code)
        return result
