"""Keep the in-sync replicas of led partitions current in etcd, and detect followers that are gone.

The next leader reads the in-sync replicas when it takes over.

A change of one partition's ISR
  wanted     ReplicationManager.wanted_isr returns the ISR that the partition should have
  proposed   the partition has noted it, and the transaction is under way: additions count from here on
  settled    the transaction's answer has etcd's ISR, which counts from here on

Invariants
1. The transaction is guarded by the lease key's create revision, so that only the owner writes, and by the state's
   mod_revision, so that it changes the state on which it was decided.
2. A transaction without an answer settles nothing: the proposal stands, and is put again until etcd has answered. Its
   guard makes a second one harmless; and since it names logs, a broker that comes back with another disk does not
   change its meaning.
3. At most one change of a partition is under way, at most CONCURRENT_CHANGES of all. A round continues where it had to
   stop, so that no partition is checked twice before every other one is.
4. A round checks the partitions whose ISR may have to change by now (`is_isr_due`), and all when a broker or its
   follower (FollowerPresence) comes or goes. So thousands of partitions with a full ISR cost almost nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from functools import partial

import structlog

from kproxy.broker.cluster import Change, ClusterView, Kind
from kproxy.broker.keys import ReplicaKey, StateValue, decode_value, encode_value, node_ids
from kproxy.broker.partition import Partition
from kproxy.broker.replication.partition_replication import WAITER_SWEEP_INTERVAL_S, Isr, Role
from kproxy.etcd import EtcdClient, EtcdError, create_revision_is, get_op, mod_revision_is, put_op


@dataclass(slots=True, eq=False)
class _Follower:
    """One follower. `back_at` is when it last stopped being gone, on the loop's clock."""

    times_gone: int = 0
    back_at: float = float("-inf")
    timer: asyncio.TimerHandle | None = None


class FollowerPresence:
    """Detect lost followers by their broken connections, as reported by the replication listener. Times are in seconds.

    A process that dies breaks its connections at once, while its lease lasts for seconds. Until then leaders would wait
    for it: it is in sync, but confirms nothing.

    States of a follower, by broker
      unknown    it has never connected; this has no consequences
      present    it has a connection
      broken     it has had none for less than the grace; most followers reconnect
      gone       it has had none for longer; or it has reconnected, but not yet for long enough

    Transitions
      unknown, broken, gone -> present   it connects; from gone only after a time, see 2
      present -> broken                  its last connection ends
      broken -> gone                     the grace is over

    Invariants
    1. Only `gone` has consequences, and only those that the lease or the lag would have later as well.
    2. A follower that was gone counts as present only once it has been connected for a time. That time doubles from the
       grace with each time that it was gone, up to `longest_s`, and starts over when it has been present for longer
       than `longest_s`. So a follower whose connection breaks often changes the ISR more and more rarely.
    """

    def __init__(self, grace_s: float, longest_s: float) -> None:
        self.gone: set[int] = set()
        self._subscribers: list[Callable[[], None]] = []
        self._grace_s = grace_s
        self._longest_s = longest_s
        self._followers: dict[int, _Follower] = {}

    def subscribe(self, subscriber: Callable[[], None]) -> None:
        """Call `subscriber` when `gone` changes."""
        self._subscribers.append(subscriber)

    def connected(self, node_id: int) -> None:
        """Note that a broker's follower is authenticated."""
        follower = self._followers.setdefault(node_id, _Follower())
        self._cancel(follower)
        if node_id in self.gone:
            wait_s = min(self._grace_s * 2 ** min(follower.times_gone - 1, 16), self._longest_s)
            follower.timer = asyncio.get_running_loop().call_later(wait_s, self._is_back, node_id, follower)

    def broken(self, node_id: int) -> None:
        """Note that a follower's last connection has ended."""
        follower = self._followers[node_id]
        self._cancel(follower)
        if node_id not in self.gone:
            loop = asyncio.get_running_loop()
            follower.timer = loop.call_later(self._grace_s, self._has_gone, node_id, follower)

    def close(self) -> None:
        """Cancel all timers."""
        for follower in self._followers.values():
            self._cancel(follower)

    def _cancel(self, follower: _Follower) -> None:
        if follower.timer is not None:
            follower.timer.cancel()
            follower.timer = None

    def _has_gone(self, node_id: int, follower: _Follower) -> None:
        was_steady = asyncio.get_running_loop().time() - follower.back_at > self._longest_s
        follower.times_gone = 1 if was_steady else follower.times_gone + 1
        self.gone.add(node_id)
        self._notify()

    def _is_back(self, node_id: int, follower: _Follower) -> None:
        follower.back_at = asyncio.get_running_loop().time()
        self.gone.discard(node_id)
        self._notify()

    def _notify(self) -> None:
        for subscriber in self._subscribers:
            subscriber()


CONCURRENT_CHANGES = 64
_logger = structlog.get_logger(__name__)


@dataclass(eq=False)
class IsrKeeper:
    """Keeps the ISR of the partitions led by this broker; the caller owns the coroutine `run`.

    `presence` reports broken connections. `on_deposed` is called when a partition's lease key is no longer ours
    according to etcd.
    """

    client: EtcdClient
    view: ClusterView
    led: Callable[[], Iterable[Partition]]
    _: KW_ONLY
    isr_lag_s: float
    on_deposed: Callable[[Partition], None]
    presence: FollowerPresence | None = None

    def __post_init__(self) -> None:
        self.shrinks = self.expansions = 0
        # Often enough for the lag threshold, and to add a follower soon after it catches up.
        self._interval_s = min(self.isr_lag_s / 4, 0.25)
        self._wake = asyncio.Event()
        self._swept_at = float("-inf")
        self._changing: dict[Partition, asyncio.Task[None]] = {}
        # The rest of this round, and whether another one is needed, for some partitions or for all.
        self._to_look_at: deque[Partition] = deque()
        self._is_round_due = True
        self._is_all_due = True
        self._gone = self.presence.gone if self.presence is not None else frozenset()
        if self.presence is not None:
            self.presence.subscribe(self._begin_round)
        self.view.subscribe(self._on_change)

    def _on_change(self, change: Change) -> None:
        # Other changes in etcd affect no ISR, and a check for each of thousands of changes would delay the watch.
        if change.kind in (Kind.BROKER, Kind.SNAPSHOT):
            self._begin_round()

    def _begin_round(self) -> None:
        self._is_all_due = True
        self._wake.set()

    async def run(self) -> None:
        """Propose ISRs and expire waiting producers, until cancelled."""
        try:
            while True:
                self._look()
                self._sweep()
                try:
                    async with asyncio.timeout(self._interval_s):
                        await self._wake.wait()
                except TimeoutError:
                    self._is_round_due = True
                self._wake.clear()
        finally:
            tasks = list(self._changing.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _look(self) -> None:
        if not self._to_look_at and self._is_all_due:
            self._is_all_due = self._is_round_due = False
            self._to_look_at.extend(self.led())
        elif not self._to_look_at and self._is_round_due:
            self._is_round_due = False
            self._to_look_at.extend(partition for partition in self.led() if partition.replication.is_isr_due)
        while self._to_look_at and len(self._changing) < CONCURRENT_CHANGES:
            partition = self._to_look_at.popleft()
            if partition in self._changing:
                continue
            replication = partition.replication
            wanted = replication.proposed or replication.wanted_isr(self.view.brokers, self._gone)
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
        replication, keys = partition.replication, self.view.keys
        lease_key = keys.lease(partition.topic, partition.partition_index)
        state_key = keys.state(partition.topic, partition.partition_index)
        value = encode_value(StateValue(replication.leader_epoch, sorted(members), partition.topic_id))
        guards = [
            create_revision_is(lease_key, partition.leadership.fencing_token),
            mod_revision_is(state_key, replication.isr.revision),
        ]
        try:
            result = await self.client.txn(guards, [put_op(state_key, value)], [get_op(lease_key), get_op(state_key)])
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
            self.view.apply_put(state_key, value, lease_id=0, revision=result.revision)
            log = _logger.warning if before - members else _logger.info
            log("ISR changed", **partition.log_fields, isr=node_ids(members), before=node_ids(before))
            return
        lease, stored = result.found
        if lease is None or lease.create_revision != partition.leadership.fencing_token or stored is None:
            self.on_deposed(partition)
            return
        try:
            state = decode_value(stored.value, StateValue)
        except ValueError as error:
            _logger.error("ISR in etcd unreadable", **partition.log_fields, reason=str(error))
            return
        replication.isr_settled(Isr(frozenset(state.isr), stored.mod_revision))

    def _sweep(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._swept_at < WAITER_SWEEP_INTERVAL_S:
            return
        self._swept_at = now
        for partition in self.led():
            partition.replication.expire_waiters()
