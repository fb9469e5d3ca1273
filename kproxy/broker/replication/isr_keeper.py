"""Keep the in-sync replicas of led partitions in etcd.

The next leader reads them when it takes over.

A change of one partition's ISR
  wanted     ReplicationManager.wanted_isr says what it should be
  proposed   noted in the partition, the transaction is under way: additions count from here on
  settled    the transaction's answer says what etcd has: that counts from here on

Invariants
1. The transaction is guarded by the lease key's create revision, so that only the owner writes, and by the state's
   mod_revision, so that it changes the state on which it was decided.
2. A transaction without an answer settles nothing: the proposal stands, and is put again until etcd has answered. Its
   guard makes a second one harmless; and since it names logs, a broker that comes back with another disk does not
   change its meaning.
3. At most one change of a partition is under way, at most CONCURRENT_CHANGES of all. A round continues where it had to
   stop, so that no partition is looked at twice before every other one was.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import structlog

from kproxy.broker.cluster import ClusterView
from kproxy.broker.keys import ReplicaKey, StateValue, decode_value, encode_value, node_ids
from kproxy.broker.partition import Partition
from kproxy.broker.replication.follower_presence import FollowerPresence
from kproxy.broker.replication.partition_replication import WAITER_SWEEP_INTERVAL_S, Isr, Role
from kproxy.etcd import EtcdClient, EtcdError, create_revision_is, get_op, mod_revision_is, put_op

CONCURRENT_CHANGES = 16
_logger = structlog.get_logger(__name__)


class IsrKeeper:
    """Keeps the ISR of the partitions that this broker leads; the caller owns the coroutine `run`."""

    def __init__(
        self,
        client: EtcdClient,
        view: ClusterView,
        led: Callable[[], Iterable[Partition]],
        *,
        isr_lag_s: float,
        on_deposed: Callable[[Partition], None],
        presence: FollowerPresence | None = None,
    ) -> None:
        """`presence` tells whose connection has broken.

        `on_deposed` is called when etcd says that a partition's lease key is no longer ours.
        """
        self.shrinks = self.expansions = 0
        self._client = client
        self._view = view
        self._led = led
        self._on_deposed = on_deposed
        # Often enough to keep the lag threshold, and for a follower that has caught up to count soon.
        self._interval_s = min(isr_lag_s / 4, 0.25)
        self._wake = asyncio.Event()
        self._swept_at = float("-inf")
        self._changing: dict[Partition, asyncio.Task[None]] = {}
        # The rest of this round.
        self._to_look_at: deque[Partition] = deque()
        self._gone = presence.gone if presence is not None else frozenset()
        if presence is not None:
            presence.subscribe(self._wake.set)
        view.subscribe(lambda _: self._wake.set())

    async def run(self) -> None:
        """Propose ISRs and expire waiting producers, until cancelled."""
        try:
            while True:
                self._look()
                self._sweep()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            tasks = list(self._changing.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _look(self) -> None:
        if not self._to_look_at:
            self._to_look_at.extend(self._led())
        while self._to_look_at and len(self._changing) < CONCURRENT_CHANGES:
            partition = self._to_look_at.popleft()
            if partition in self._changing:
                continue
            replication = partition.replication
            wanted = replication.proposed or replication.wanted_isr(self._view.brokers, self._gone)
            if wanted is not None and replication.role is Role.LEADER:
                replication.isr_proposed(wanted)
                task = asyncio.create_task(self._change(partition, wanted), name=f"isr {partition.topic}")
                self._changing[partition] = task
                task.add_done_callback(partial(self._changed, partition))

    def _changed(self, partition: Partition, _: asyncio.Task[None]) -> None:
        del self._changing[partition]
        if partition.replication.proposed is None:
            self._wake.set()

    async def _change(self, partition: Partition, members: frozenset[ReplicaKey]) -> None:
        replication, keys = partition.replication, self._view.keys
        lease_key = keys.lease(partition.topic, partition.partition_index)
        state_key = keys.state(partition.topic, partition.partition_index)
        stored = self._view.stored_state(partition.topic, partition.partition_index)
        value = encode_value(
            StateValue(
                replication.leader_epoch,
                sorted(members),
                partition.topic_id,
                stored.replicas if stored is not None else None,
            )
        )
        guards = [
            create_revision_is(lease_key, partition.leadership.fencing_token),
            mod_revision_is(state_key, replication.isr.revision),
        ]
        try:
            result = await self._client.txn(guards, [put_op(state_key, value)], [get_op(lease_key), get_op(state_key)])
        except EtcdError as error:
            _logger.warning("ISR not changed", **partition.log_fields, wanted=node_ids(members), reason=str(error))
            return
        if replication.role is Role.CLOSED:
            return
        if result.succeeded:
            before = replication.isr.members
            self.shrinks += bool(before - members)
            self.expansions += bool(members - before)
            replication.isr_settled(Isr(members, result.revision))
            self._view.apply_put(state_key, value, lease_id=0, revision=result.revision)
            log = _logger.warning if before - members else _logger.info
            log("ISR changed", **partition.log_fields, isr=node_ids(members), before=node_ids(before))
            return
        lease_kvs, state_kvs = result.responses[0].kvs, result.responses[1].kvs
        if not lease_kvs or lease_kvs[0].create_revision != partition.leadership.fencing_token or not state_kvs:
            self._on_deposed(partition)
            return
        try:
            state = decode_value(state_kvs[0].value, StateValue)
        except ValueError as error:
            _logger.error("ISR in etcd unreadable", **partition.log_fields, reason=str(error))
            return
        replication.isr_settled(Isr(frozenset(state.isr), state_kvs[0].mod_revision))

    def _sweep(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._swept_at < WAITER_SWEEP_INTERVAL_S:
            return
        self._swept_at = now
        for partition in self._led():
            partition.replication.expire_waiters()
