"""Track writes of earlier claimants that may still reach a broker, through this process or through a dead one.

Only brokers without fences need this. With such brokers a claim is granted once no write of an earlier claimant is in
flight, and the wait for an answer that can never come ends after a time. The wait is bounded, not safe: a broker that
hangs for longer may still write requests it has read, and writes that bypass the proxies are not seen.

States of a partition of a gated topic
  settled     no writes are known to be in flight, except those of its claimant
  held        its writer's connection has ended, and a broker has not answered its last write
  uncertain   a write was sent to a broker whose answer can no longer come, or the process that sent it died

Transitions
  settled   -> held        `begin`: the connection of a writer ends with a write unanswered
  held      -> settled     `done`: answered, and nothing else of the partition is held
  any       -> uncertain   `note_written_lost`; `note_member_gone`; `note_all_gone`
  held, uncertain -> settled   `unsettled_s` after the last such event

Invariants
1. A partition is unsettled (held or uncertain) no longer than `unsettled_s` after the last event that made it so.
2. Only time settles an uncertain partition: after a batch was sent again and answered, its first copy may still arrive.
3. Once a member has confirmed the loss of a partition, its own list has that partition as long as it is unsettled.
   Until then the partition counts as claimed by the member, and becomes uncertain if the member goes.
4. At most MAX_PARTITIONS are listed one by one. Further ones are listed as whole topics (`ALL`) and, after another
   MAX_PARTITIONS, as `EVERYTHING`. The list may have too many partitions, never too few.
5. `on_change` is called after each change of `places`; for partitions that time settles, at the next `expire`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final, TypeAlias

from kproxy_codec.own import WHOLE_GROUP, resource_partition

# Each process publishes its list to all others, in one value in etcd.
MAX_PARTITIONS: Final = 1_000
ALL: Final = -1

Place: TypeAlias = tuple[str, int]
"""A partition by topic and index; the index `ALL` stands for all partitions of the topic."""

EVERYTHING: Final[Place] = ("", ALL)


def covers(listed: Collection[Place], topic: str, partition_index: int = ALL) -> bool:
    """Whether `listed` has the partition or, for `ALL`, any partition of the topic."""
    if (topic, partition_index) in listed or (topic, ALL) in listed or EVERYTHING in listed:
        return True
    return partition_index == ALL and any(each == topic for each, _ in listed)


@dataclass(slots=True, eq=False)
class Hold:
    """One reason for a partition to be held, from `begin` to `done`."""

    place: Place
    until: float


@dataclass(slots=True, eq=False)
class _Unsettled:
    """The reasons why a place is unsettled, and the time of its end, by the clock of InflightWrites."""

    holds: set[Hold] = field(default_factory=set)
    uncertain_until: float = -inf

    @property
    def until(self) -> float:
        return max(self.uncertain_until, max((hold.until for hold in self.holds), default=-inf))


@dataclass(slots=True, eq=False)
class _MemberState:
    """Another process's places: those that it lists as unsettled, and those whose loss it has not confirmed."""

    unsettled: Collection[Place] = ()
    # The revision at which each place was taken from the process.
    taken: dict[Place, int] = field(default_factory=dict)


class InflightWrites:
    """The unsettled partitions that one process knows, only of topics in `writer_groups`.

    `writer_groups` has, by topic, the group whose claimants may write to it. `clock` is monotonic, in seconds like
    `unsettled_s`.
    """

    def __init__(self, writer_groups: Mapping[str, str], clock: Callable[[], float], *, unsettled_s: float) -> None:
        # Topics by their names as bytes, as in requests.
        self.topics = frozenset(topic.encode() for topic in writer_groups)
        self._writer_groups = writer_groups
        self._clock = clock
        self.unsettled_s = unsettled_s
        self._places: dict[Place, _Unsettled] = {}
        self._members: dict[str, _MemberState] = {}
        self.on_change: Callable[[], None] = lambda: None

    # Claims

    def places_of(self, group: str, resource: str) -> list[Place]:
        """Return the places that a claim lets its claimant write to; none if the group is not a writer group."""
        if resource == WHOLE_GROUP:
            return [(topic, ALL) for topic, writers in self._writer_groups.items() if writers == group]
        partition = resource_partition(resource)
        return [partition] if partition is not None and self._writer_groups.get(partition[0]) == group else []

    def blocks(self, group: str, resource: str, listed: Collection[Place]) -> bool:
        """Whether unsettled places in `listed` forbid granting a claim in front of brokers without fences."""
        return any(covers(listed, *place) for place in self.places_of(group, resource))

    # The list

    def places(self) -> list[Place]:
        """Return the places for which no claim may be granted, as of the last event or `expire`."""
        return sorted(self._places)

    def expire(self) -> None:
        """Remove places that time has settled. The caller repeats this."""
        now = self._clock()
        over = [place for place, found in self._places.items() if found.until <= now]
        for place in over:
            del self._places[place]
        if over:
            self.on_change()

    # This process

    def begin(self, topic: str, partition_index: int) -> Hold:
        """Hold a partition: a write is unanswered and its writer has gone. `done` or time ends the hold."""
        hold = Hold(_place_within_bound((topic, partition_index), self._places), self._clock() + self.unsettled_s)
        is_new = hold.place not in self._places
        self._places.setdefault(hold.place, _Unsettled()).holds.add(hold)
        if is_new:
            self.on_change()
        return hold

    def done(self, hold: Hold) -> None:
        """End a hold, because the write was answered. A second call changes nothing."""
        found = self._places.get(hold.place)
        if found is not None and hold in found.holds:
            found.holds.remove(hold)
            self.expire()

    def note_written_lost(self, topic: str, partition_index: int) -> None:
        """Record that a write reached a broker whose answer cannot come any more."""
        self._mark_uncertain([(topic, partition_index)])

    # Other processes

    def note_member(self, member: str, seen: int, unsettled: Collection[Place]) -> None:
        """Record a process's published state: it has acted upon every claim up to `seen`, except for these places."""
        state = self._members.setdefault(member, _MemberState())
        state.unsettled = unsettled
        state.taken = {place: revision for place, revision in state.taken.items() if revision > seen}

    def note_taken(self, member: str, group: str, resource: str, revision: int) -> None:
        """Record that a claim of a process was replaced or deleted at `revision`, unless the process is gone."""
        state = self._members.get(member)
        if state is not None:
            for place in self.places_of(group, resource):
                state.taken[_place_within_bound(place, state.taken)] = revision

    def note_member_gone(self, member: str, held: Iterable[tuple[str, str]]) -> None:
        """Record the end of a process that held these claims (group, resource): its writes are uncertain."""
        state = self._members.pop(member, None) or _MemberState()
        claimed = [place for claim in held for place in self.places_of(*claim)]
        self._mark_uncertain([*claimed, *state.taken, *state.unsettled])

    def note_all_gone(self) -> None:
        """Record that all processes are gone, and that their claims are unknown."""
        self._mark_uncertain([EVERYTHING])

    def note_restored(self) -> None:
        """Record that etcd was restored to an earlier state: all known writes of other processes become uncertain."""
        for member in list(self._members):
            self.note_member_gone(member, ())

    def _mark_uncertain(self, places: Iterable[Place]) -> None:
        until = self._clock() + self.unsettled_s
        before = len(self._places)
        for place in places:
            self._places.setdefault(_place_within_bound(place, self._places), _Unsettled()).uncertain_until = until
        if len(self._places) > before:
            self.on_change()


class LastWrites:
    """The writes of one client connection that may be in flight when it ends, in `unsettled` if there is one.

    A write is named by its piece, the part of a request at one broker (kproxy.routing.in_flight).
    """

    __slots__ = ("_holds", "_is_hurried", "_over", "_unsettled")

    def __init__(self, unsettled: InflightWrites | None) -> None:
        self._unsettled = unsettled
        self._holds: dict[int, list[Hold]] = {}
        # Set while `wait` is waiting.
        self._over: asyncio.Event | None = None
        self._is_hurried = False

    def hold(self, piece: int, partitions: Iterable[tuple[bytes, int]]) -> None:
        """Hold the partitions of a piece until it is answered or lost."""
        if self._unsettled is not None:
            self._holds[piece] = [self._unsettled.begin(topic.decode(), index) for topic, index in partitions]

    def let_go(self, piece: int) -> None:
        """End the hold of a piece, if there is one."""
        for hold in self._holds.pop(piece, ()):
            if self._unsettled is not None:
                self._unsettled.done(hold)
        if not self._holds:
            self._end_wait()

    def note_lost(self, partitions: Iterable[tuple[bytes, int]]) -> None:
        """Record that writes reached a broker whose answer cannot come any more."""
        if self._unsettled is not None:
            for topic, partition_index in partitions:
                self._unsettled.note_written_lost(topic.decode(), partition_index)

    async def wait(self, timeout_s: float) -> None:
        """Wait until nothing is held, `timeout_s` has passed, or `stop_waiting` is called."""
        if self._holds and not self._is_hurried:
            self._over = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._over.wait()

    def stop_waiting(self) -> None:
        """End `wait`, now or later."""
        self._is_hurried = True
        self._end_wait()

    def _end_wait(self) -> None:
        if self._over is not None:
            self._over.set()


def _place_within_bound(place: Place, taken: Collection[Place]) -> Place:
    """Return the place or, once `taken` is full, its whole topic, then everything (invariant 4)."""
    if place in taken or len(taken) < MAX_PARTITIONS:
        return place
    topic = (place[0], ALL)
    return topic if topic in taken or len(taken) < 2 * MAX_PARTITIONS else EVERYTHING
