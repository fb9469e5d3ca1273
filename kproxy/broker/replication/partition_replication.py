"""Track the replication of one partition: the replica's role, its followers' progress, and the high watermark.

Producers with acks=all wait here until the high watermark has passed their records.

States
  follower   copies from a leader, if one is known
  leader     tracks its followers' progress and moves the high watermark
  resigned   a leader that stops leading: followers catch up, writes are refused
  closed     the state no longer changes; every waiter has been answered

Transitions
  follower -> leader     `become_leader`: a take-over transaction named us, with its epoch and ISR
  follower -> follower   `become_follower`: another leader, or another epoch
  leader   -> resigned   `resign`: the broker stops, or another broker is to lead
  resigned -> leader     `resume`: the followers did not catch up in time, or no other broker can lead
  any      -> closed     `close`. A leader never becomes a follower: its state in memory is dropped, and the log is
                         opened again. `become_leader` and `become_follower` raise WrongRole unless it follows.

Invariants
1. The high watermark never moves back, and never passes the log end offset of any in-sync replica. In sync are the
   replicas in etcd's ISR and those proposed: an expansion counts from the moment it is proposed, a shrink only once its
   transaction succeeded. So every replica that may be elected has all records below it.
2. A leader's high watermark does not move while etcd's ISR has fewer than min_insync_replicas members.
3. A replica's progress counts only in the epoch in which it was reported, and only for the reported log: a broker that
   returns with another disk is another replica (ReplicaKey), and late reports of the old one do not count.
4. A waiter is answered once: 0 when the high watermark has passed its offset; NOT_ENOUGH_REPLICAS_AFTER_APPEND when the
   ISR has become too small; REQUEST_TIMED_OUT when its time is over or leadership ends. Never 6
   (NOT_LEADER_OR_FOLLOWER): its records are in the log.
5. No waiter is older than MAX_WAITER_AGE_S.
6. A follower that waits at the log's end costs nothing until the log grows, and counts as caught up while its
   connection sends requests.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kproxy.broker.keys import ReplicaKey, node_ids
from kproxy.etcd.lease import Clock
from kproxy_codec import error_codes

NO_LEADER = -1
UNKNOWN_OFFSET = -1
MAX_WAITER_AGE_S = 60.0
WAITER_SWEEP_INTERVAL_S = 5.0


class Role(Enum):
    """The role of a replica."""

    FOLLOWER = "follower"
    LEADER = "leader"
    RESIGNED = "resigned"
    CLOSED = "closed"


class WrongRole(Exception):
    """An attempt to change the role of a replica that is not a follower."""


_LEADING = (Role.LEADER, Role.RESIGNED)


class Isr(NamedTuple):
    """The in-sync replicas in etcd; `revision` is the mod_revision that guards their next change."""

    members: frozenset[ReplicaKey]
    revision: int


class FollowerContact:
    """The time of a follower's last request on one connection (`open_fetches`), by the partitions' clock."""

    __slots__ = ("_clock", "heard_at")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.heard_at = clock()

    def heard(self) -> None:
        self.heard_at = self._clock()


class _Progress:
    """A follower's progress, as its fetches report. Times are the clock's. `replica` is None before its first fetch.

    `contact` is set while the follower has the whole log and waits: each of its requests shows that it has caught up.
    """

    __slots__ = ("_caught_up_at", "contact", "fetched_at", "leader_end_at_fetch", "log_end_offset", "replica")

    def __init__(self, now: float, replica: ReplicaKey | None = None) -> None:
        self.replica = replica
        self.log_end_offset = UNKNOWN_OFFSET
        # A follower in sync at the start has the whole threshold for its first fetch.
        self._caught_up_at = now
        self.contact: FollowerContact | None = None
        self.fetched_at = now
        self.leader_end_at_fetch = UNKNOWN_OFFSET

    @property
    def caught_up_at(self) -> float:
        return self._caught_up_at if self.contact is None else max(self._caught_up_at, self.contact.heard_at)

    def caught_up(self, at: float) -> None:
        self._caught_up_at = max(self._caught_up_at, at)


@dataclass(slots=True, eq=False)
class _Waiter:
    """A producer that waits for the high watermark to pass `offset`."""

    offset: int
    deadline: float
    done: asyncio.Future[int]

    def __lt__(self, other: _Waiter) -> bool:
        return self.offset < other.offset

    def answer(self, error_code: int) -> None:
        if not self.done.done():
            self.done.set_result(error_code)


class ReplicationManager:
    """One partition's replication on one broker.

    It reads only the end of the log, through `log_end`. `counted_end` is the end of our own log for the high watermark:
    `log_end`, or less if records must be on the disk first. `isr_lag_s` is how long a follower may lag (Kafka's
    replica.lag.time.max.ms). `on_high_watermark` is called after a leader's high watermark has moved.
    """

    def __init__(
        self,
        replica: ReplicaKey,
        *,
        high_watermark: int,
        log_end: Callable[[], int],
        counted_end: Callable[[], int] | None = None,
        on_high_watermark: Callable[[], None],
        min_insync_replicas: int,
        isr_lag_s: float,
        clock: Clock,
    ) -> None:
        self.role = Role.FOLLOWER
        self.leader_id = NO_LEADER
        self.leader_epoch = -1
        self.epoch_start_offset = 0
        self.high_watermark = high_watermark
        self.min_insync_replicas = min_insync_replicas
        self.isr = Isr(frozenset(), 0)
        self.proposed: frozenset[ReplicaKey] | None = None
        self._isr_due_at = float("-inf")
        self.replica = replica
        self._log_end = log_end
        self._counted_end = counted_end or log_end
        self._on_high_watermark = on_high_watermark
        self._isr_lag_s = isr_lag_s
        self._clock = clock
        self._followers: dict[int, _Progress] = {}
        self._waiters: list[_Waiter] = []

    # Roles

    @property
    def is_leading(self) -> bool:
        """Whether it leads, or has resigned and still serves its followers."""
        return self.role in _LEADING

    def check_follows(self) -> None:
        """Raise WrongRole unless the replica is a follower."""
        if self.role is not Role.FOLLOWER:
            raise WrongRole(f"a {self.role.value} replica of leader epoch {self.leader_epoch} cannot change its role")

    def become_leader(self, leader_epoch: int, epoch_start_offset: int, replicas: Iterable[int], isr: Isr) -> None:
        """Lead; the followers' progress is still unknown. Raises WrongRole."""
        self.check_follows()
        now = self._clock()
        self.role, self.leader_id, self.leader_epoch = Role.LEADER, self.replica.node_id, leader_epoch
        self.epoch_start_offset = epoch_start_offset
        self._followers = {node_id: _Progress(now) for node_id in replicas if node_id != self.replica.node_id}
        self.isr, self.proposed, self._isr_due_at = isr, None, float("-inf")
        self.log_appended()

    def become_follower(self, leader_id: int, leader_epoch: int) -> None:
        """Follow that leader; NO_LEADER if there is none. Raises WrongRole."""
        self.check_follows()
        self.leader_id, self.leader_epoch = leader_id, leader_epoch

    def resign(self) -> None:
        """Lead only until followers have caught up."""
        if self.role is Role.LEADER:
            self.role = Role.RESIGNED

    def resume(self) -> None:
        """Lead again: no other broker takes over."""
        if self.role is Role.RESIGNED:
            self.role = Role.LEADER
            self._isr_due_at = float("-inf")

    def close(self) -> None:
        """Answer every waiter: this replica is no longer reliable."""
        self.role = Role.CLOSED
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.answer(error_codes.REQUEST_TIMED_OUT)

    # In-sync replicas

    @property
    def in_sync(self) -> frozenset[ReplicaKey]:
        """Every replica that is in etcd's ISR or may soon be: no other can be elected."""
        return self.isr.members if self.proposed is None else self.isr.members | self.proposed

    def is_in_sync(self, node_id: int) -> bool:
        """Return whether a log of that broker is in etcd's ISR."""
        return any(replica.node_id == node_id for replica in self.isr.members)

    @property
    def has_enough_in_sync(self) -> bool:
        return len(self.isr.members) >= self.min_insync_replicas

    def replica_fetched(self, replica: ReplicaKey, fetch_offset: int) -> None:
        """Note that a follower fetched from `fetch_offset`: it has everything below."""
        progress = self._followers[replica.node_id]
        now, log_end = self._clock(), self._log_end()
        if progress.replica != replica or fetch_offset < progress.log_end_offset:
            self._isr_due_at = float("-inf")
        if progress.replica is None:
            progress.replica = replica
        elif progress.replica != replica:
            progress = self._followers[replica.node_id] = _Progress(now, replica)
        if fetch_offset >= log_end:
            progress.caught_up(now)
        elif fetch_offset >= progress.leader_end_at_fetch >= 0:
            # It has everything up to the end at its last request, so it was caught up then (as in Apache Kafka).
            progress.caught_up(progress.fetched_at)
        progress.fetched_at, progress.leader_end_at_fetch = now, log_end
        if progress.log_end_offset != fetch_offset:
            progress.log_end_offset = fetch_offset
            self.log_appended()

    def follower_waits(self, node_id: int, contact: FollowerContact) -> None:
        """Note that the follower that fetched last, to the end of the log, waits there."""
        self._followers[node_id].contact = contact

    def follower_waits_no_more(self, node_id: int, contact: FollowerContact) -> None:
        """Note that there is more for a waiting follower, or that it waits no longer."""
        progress = self._followers.get(node_id)
        if progress is not None and progress.contact is contact:
            progress.contact = None
            progress.caught_up(contact.heard_at)

    def follower_answered(self, node_id: int, contact: FollowerContact) -> None:
        """Note that a follower, whose last request is that of `contact`, is sent the records that it lacks."""
        progress = self._followers.get(node_id)
        if progress is not None:
            progress.fetched_at, progress.leader_end_at_fetch = contact.heard_at, self._log_end()

    def is_follower(self, replica_id: int) -> bool:
        """Return whether that broker keeps a replica that follows this leader."""
        return replica_id in self._followers

    def follower_progress(self) -> dict[int, tuple[int, float]]:
        """Return each follower's last reported log end offset, and for how many seconds it has lagged."""
        now = self._clock()
        return {each: (has.log_end_offset, now - has.caught_up_at) for each, has in self._followers.items()}

    def log_appended(self) -> None:
        """Move the high watermark as far as possible after an in-sync log has grown."""
        if not self.is_leading or not self.has_enough_in_sync:
            return
        lowest = self._counted_end()
        for replica in self.in_sync:
            if replica != self.replica:
                lowest = min(lowest, self._log_end_in(replica))
        if lowest > self.high_watermark:
            self.high_watermark = lowest
            self._answer_waiters()
            self._on_high_watermark()

    def _log_end_in(self, replica: ReplicaKey) -> int:
        progress = self._followers.get(replica.node_id)
        return progress.log_end_offset if progress is not None and progress.replica == replica else UNKNOWN_OFFSET

    def leader_told(self, high_watermark: int) -> None:
        """Adopt the leader's high watermark, limited to our own log."""
        self.high_watermark = max(self.high_watermark, min(high_watermark, self._log_end()))

    def wanted_isr(self, live: Collection[int], gone: Collection[int] = ()) -> frozenset[ReplicaKey] | None:
        """Compute the ISR to propose to etcd; None if it is right.

        Also None while a proposal is running. `live` are the live brokers, `gone` those among them whose connection has
        broken. A replica leaves the ISR if its broker is dead, it has lagged too long, or it lacks committed records;
        also if it is gone and enough others remain for the high watermark to move. A replica joins once it has
        everything below the high watermark and below the beginning of this epoch.
        """
        if self.role is not Role.LEADER or self.proposed is not None:
            return None
        wanted = self._in_sync_of(live)
        without_gone = frozenset(each for each in wanted if each.node_id not in gone)
        if len(without_gone) >= self.min_insync_replicas:
            wanted = without_gone
        if wanted != self.isr.members:
            return wanted
        self._isr_due_at = self._isr_right_until(live)
        return None

    @property
    def is_isr_due(self) -> bool:
        """Whether `wanted_isr` may differ from its last None, with the same brokers live and gone."""
        return self._isr_due_at <= self._clock()

    def _isr_right_until(self, live: Collection[int]) -> float:
        """Return until when the ISR, which is right now, needs no look: -inf while a live follower may join it."""
        in_sync = node_ids(self.isr.members)
        right_until = float("inf")
        for node_id, progress in self._followers.items():
            if node_id not in live:
                continue
            if node_id not in in_sync or progress.replica not in (None, *self.isr.members):
                return float("-inf")
            right_until = min(right_until, progress.caught_up_at + self._isr_lag_s)
        return right_until

    def _in_sync_of(self, live: Collection[int]) -> frozenset[ReplicaKey]:
        caught_up_since = self._clock() - self._isr_lag_s
        wanted = {self.replica}
        for node_id, progress in self._followers.items():
            if node_id not in live or progress.caught_up_at < caught_up_since:
                continue
            replica = progress.replica
            if replica is None:
                # A follower in sync at the start has its threshold for its first fetch.
                wanted.update(each for each in self.isr.members if each.node_id == node_id)
                continue
            least = self.high_watermark
            if replica not in self.isr.members:
                least = max(least, self.epoch_start_offset)
            if progress.log_end_offset >= least:
                wanted.add(replica)
        return frozenset(wanted)

    def isr_proposed(self, members: frozenset[ReplicaKey]) -> None:
        """Note that `members` are being put into etcd."""
        self.proposed, self._isr_due_at = members, float("-inf")

    def isr_settled(self, isr: Isr) -> None:
        """Apply etcd's ISR, whether or not it is the proposal."""
        self.isr, self.proposed = isr, None
        self.log_appended()
        if not self.has_enough_in_sync:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                waiter.answer(error_codes.NOT_ENOUGH_REPLICAS_AFTER_APPEND)

    def followers_behind(self, live: Collection[int]) -> bool:
        """Return whether a live in-sync follower lacks part of the log."""
        log_end = self._log_end()
        return any(
            self._log_end_in(replica) < log_end
            for replica in self.isr.members
            if replica != self.replica and replica.node_id in live
        )

    # Waiters

    async def wait_for_isr(self, offset: int, timeout_s: float) -> int:
        """Wait at most `timeout_s` until every in-sync replica has `offset`; return the producer's error code."""
        if self.high_watermark > offset:
            return error_codes.NONE
        if self.is_leading and not self.has_enough_in_sync:
            return error_codes.NOT_ENOUGH_REPLICAS_AFTER_APPEND
        waiter = self._add_waiter(offset, timeout_s)
        if waiter is None:
            return error_codes.REQUEST_TIMED_OUT
        try:
            async with asyncio.timeout(min(timeout_s, MAX_WAITER_AGE_S)):
                return await waiter.done
        except TimeoutError:
            return error_codes.REQUEST_TIMED_OUT
        finally:
            # The wait may have been abandoned; the sweep removes it from the heap.
            waiter.done.cancel()

    def _add_waiter(self, offset: int, timeout_s: float) -> _Waiter | None:
        if not self.is_leading or timeout_s <= 0:
            return None
        deadline = self._clock() + min(timeout_s, MAX_WAITER_AGE_S)
        waiter = _Waiter(offset, deadline, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiters, waiter)
        return waiter

    @property
    def waiting(self) -> int:
        """The number of waiters, including abandoned ones until the next sweep."""
        return len(self._waiters)

    def _answer_waiters(self) -> None:
        waiters = self._waiters
        while waiters and waiters[0].offset < self.high_watermark:
            heapq.heappop(waiters).answer(error_codes.NONE)

    def expire_waiters(self) -> None:
        """Answer expired waiters and drop abandoned ones. Called every WAITER_SWEEP_INTERVAL_S."""
        now = self._clock()
        left = []
        for waiter in self._waiters:
            if waiter.deadline <= now:
                waiter.answer(error_codes.REQUEST_TIMED_OUT)
            elif not waiter.done.done():
                left.append(waiter)
        heapq.heapify(left)
        self._waiters = left
