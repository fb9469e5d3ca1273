"""What may still be written, through this process or one that died, by those who own it no more.

It matters before brokers that keep no fences: there a claim is granted only once nothing of its earlier writers is
under way, and what can never be known is waited for, for a time. This is bounded, not safe: a broker that hangs for
longer than that time may write what it read before, and who goes round the proxies is not seen at all.

States of a partition of a gated topic
  settled     nothing is known to be under way of anybody but its owner
  held        its writer's connection has ended, and what was written for it to a broker is not answered yet
  uncertain   something was written to a broker whose answer cannot come any more, or the process that wrote it died

Transitions
  settled   -> held        `begin`: the connection of a writer ends with something unanswered
  held      -> settled     `done`: answered, and nothing else of the partition is held
  any       -> uncertain   `note_written_lost`; `note_member_gone`; `note_all_gone`
  held, uncertain -> settled   `unsettled_s` after the last such event

Invariants
1. A partition is unsettled (held or uncertain) no longer than `unsettled_s` after the last thing that made it so.
2. Nothing but time settles what is uncertain: when the same batch is sent again and answered, the first copy may still
   come.
3. What was taken from a member is that member's to tell once it confirms to have seen it; until then it counts as what
   the member holds, and becomes uncertain if the member goes.
4. At most MAX_PARTITIONS are told apart. Beyond them a whole topic counts (`ALL`), beyond as many topics everything
   does (`EVERYTHING`). What is listed never says less than what is so.
5. `on_change` is told after each change of what `unsettled` says; of what time settles, at the next `look`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from math import inf
from typing import Final, TypeAlias

from kproxy_codec.own import WHOLE_GROUP, resource_partition

# Each is told to all the other processes, in one value in etcd.
MAX_PARTITIONS: Final = 1_000
ALL: Final = -1

Place: TypeAlias = tuple[str, int]
"""A partition by topic and index; all of a topic where the index is `ALL`."""

EVERYTHING: Final[Place] = ("", ALL)


def covers(listed: Collection[Place], topic: str, partition_index: int = ALL) -> bool:
    """Whether this partition, or with `ALL` any of its topic, is among what is listed as unsettled."""
    if (topic, partition_index) in listed or (topic, ALL) in listed or EVERYTHING in listed:
        return True
    return partition_index == ALL and any(each == topic for each, _ in listed)


class Hold:
    """One reason for a partition to be held, from `begin` to `done`."""

    __slots__ = ("place", "until")

    def __init__(self, place: Place, until: float) -> None:
        self.place = place
        self.until = until


class _Unsettled:
    """Why a place is unsettled, and until when, by the settlement's clock."""

    __slots__ = ("holds", "uncertain_until")

    def __init__(self) -> None:
        self.holds: set[Hold] = set()
        self.uncertain_until = -inf

    @property
    def until(self) -> float:
        return max(self.uncertain_until, max((hold.until for hold in self.holds), default=-inf))


class _MemberState:
    """What is known of another process: what it says is unsettled, and what it has not confirmed to have lost."""

    __slots__ = ("taken", "unsettled")

    def __init__(self) -> None:
        self.unsettled: Collection[Place] = ()
        # The revision at which each was taken from it.
        self.taken: dict[Place, int] = {}


class Settlement:
    """Of one process. `writer_groups`: the group whose owner alone writes, by topic; nothing else is of interest here.

    `clock` is in seconds, monotonic, and so is `unsettled_s`.
    """

    def __init__(self, writer_groups: Mapping[str, str], clock: Callable[[], float], *, unsettled_s: float) -> None:
        # By the names that requests have.
        self.topics = frozenset(topic.encode() for topic in writer_groups)
        self._writer_groups = writer_groups
        self._clock = clock
        self._unsettled_s = unsettled_s
        self._places: dict[Place, _Unsettled] = {}
        self._members: dict[str, _MemberState] = {}
        self.on_change: Callable[[], None] = lambda: None

    # What claims come to

    def places(self, group: str, resource: str) -> list[Place]:
        """What a claim lets its owner write: nothing where the group is no writer group."""
        if resource == WHOLE_GROUP:
            return [(topic, ALL) for topic, writers in self._writer_groups.items() if writers == group]
        partition = resource_partition(resource)
        return [partition] if partition is not None and self._writer_groups.get(partition[0]) == group else []

    def keeps_back(self, group: str, resource: str, listed: Collection[Place]) -> bool:
        """Whether a claim cannot be granted before brokers without fences, for what is `listed` as unsettled."""
        return any(covers(listed, *place) for place in self.places(group, resource))

    # What is unsettled

    def unsettled(self) -> list[Place]:
        """What no claim may be granted for, for all that this process knows; as of the last event or `look`."""
        return sorted(self._places)

    def look(self) -> None:
        """Let go of what time has settled; to be called now and then."""
        now = self._clock()
        over = [place for place, found in self._places.items() if found.until <= now]
        for place in over:
            del self._places[place]
        if over:
            self.on_change()

    # This process

    def begin(self, topic: str, partition_index: int) -> Hold:
        """Something written is unanswered, and its writer has gone. Ends by `done`, or by itself in time."""
        hold = Hold(_room_for((topic, partition_index), self._places), self._clock() + self._unsettled_s)
        is_new = hold.place not in self._places
        self._places.setdefault(hold.place, _Unsettled()).holds.add(hold)
        if is_new:
            self.on_change()
        return hold

    def done(self, hold: Hold) -> None:
        """It has been answered; no change where it was already."""
        found = self._places.get(hold.place)
        if found is not None and hold in found.holds:
            found.holds.remove(hold)
            self.look()

    def note_written_lost(self, topic: str, partition_index: int) -> None:
        """Something was written to a broker, and its answer cannot come any more."""
        self._is_uncertain([(topic, partition_index)])

    # Other processes

    def note_member(self, member: str, seen: int, unsettled: Collection[Place]) -> None:
        """What a process says of itself: it has acted upon every claim up to the revision `seen`, but for these."""
        state = self._members.setdefault(member, _MemberState())
        state.unsettled = unsettled
        state.taken = {place: revision for place, revision in state.taken.items() if revision > seen}

    def note_taken(self, member: str, group: str, resource: str, revision: int) -> None:
        """A claim of that process was replaced or deleted, at `revision`; not of interest where it is gone already."""
        state = self._members.get(member)
        if state is not None:
            for place in self.places(group, resource):
                state.taken[_room_for(place, state.taken)] = revision

    def note_member_gone(self, member: str, held: Iterable[tuple[str, str]]) -> None:
        """A process is gone that held these claims, by group and resource: nobody can say what it had under way."""
        state = self._members.pop(member, None) or _MemberState()
        claimed = [place for claim in held for place in self.places(*claim)]
        self._is_uncertain([*claimed, *state.taken, *state.unsettled])

    def note_all_gone(self) -> None:
        """All processes are gone, and nobody knows what they held."""
        self._is_uncertain([EVERYTHING])

    def note_restored(self) -> None:
        """etcd was restored to an earlier state: what is known of other processes is waited for."""
        for member in list(self._members):
            self.note_member_gone(member, ())

    def _is_uncertain(self, places: Iterable[Place]) -> None:
        until = self._clock() + self._unsettled_s
        before = len(self._places)
        for place in places:
            self._places.setdefault(_room_for(place, self._places), _Unsettled()).uncertain_until = until
        if len(self._places) > before:
            self.on_change()


def _room_for(place: Place, taken: Collection[Place]) -> Place:
    """What stands for a place among those that are taken, of which there is a bounded number."""
    if place in taken or len(taken) < MAX_PARTITIONS:
        return place
    topic = (place[0], ALL)
    return topic if topic in taken or len(taken) < 2 * MAX_PARTITIONS else EVERYTHING
