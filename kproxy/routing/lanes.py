"""Keep a partition's batches in order while the outcome of an earlier batch is unresolved.

A lane is the queue of one partition's batches of one client connection. Normally there is none: on a proven route
(kproxy.routing.routes) the batches of a partition follow one another on one upstream connection, and the broker answers
that connection in order. A partition has a lane while its route is new and the first batch on it is unanswered; while
its batch N waits for its retry; while N is unresolved on an earlier route and N+1 goes elsewhere; while a broker may
have seen a batch that its client got an error for. An entry of another API has a lane of its own while it waits.

States of a lane
  blocked    items wait: some are still unanswered on an earlier route, or the back-off is not over. The back-off ends
             early (`hasten`) when the partition has another owner
  probing    one item is in flight on the new route, the others wait for its success
  gone       nothing waits and nothing is unresolved; the lane has left the table

Transitions
  (new)   -> blocked   `refused`, `put_off`, `block`, `give_up` or `probe`
  blocked -> probing   `probe`: a batch goes first on a new route; `ready`: nothing is outstanding, the back-off is
                       over, and the first item goes
  probing -> blocked   `refused` of the item in flight; `rename` into another lane; `settled`: all waiting items are
                       given up if the item was `given_up`, else (success, final refusal) released in order
  blocked -> gone      nothing waits or is outstanding any more. `settled` of a later batch that was appended after all
                       gives up all waiting items

Invariants
1. Items wait in the order of their requests (`Exchange.sequence`).
2. While a lane exists, nothing of its partition is sent except the one item that probes.
3. A new route is proven by one success before anything is pipelined on it: a broker that has just become the owner and
   has no producer state would accept any sequence number.
4. Batches that the client sent before it learned that an earlier batch was given up are not resent (`is_given_up`): a
   broker without the producer's state would take them for the first.
5. Each lane that waits only for a time has an entry with its `due` in a heap, so that no step scans all lanes.
   `scheduled` is the time of the latest entry. An entry is skipped if its lane is gone or is due at another time.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum, auto
from heapq import heappop, heappush
from typing import Final, NamedTuple

from kproxy.routing.identity import LaneKey
from kproxy.routing.merge import Exchange
from kproxy.routing.split import Entry


class Item(NamedTuple):
    """One entry of one exchange; `give_up_code` is its error code if it is not sent again."""

    exchange: Exchange
    entry: Entry
    give_up_code: int


class Release(NamedTuple):
    """The result of an event: items to send, in order, and items to answer with their `give_up_code`."""

    send: list[Item]
    give_up: list[Item]


_NOTHING = Release([], [])


class Pause(NamedTuple):
    """When a refused item may be resent, in seconds of the proxy's clock.

    `due` is for the same owner, `soonest` for another. `routed_at` is the topology's version it was sent at.
    """

    due: float
    soonest: float
    routed_at: int


class LaneState(IntEnum):
    """See the module's docstring."""

    BLOCKED = auto()
    PROBING = auto()
    GONE = auto()


_NEXT: Final[Mapping[LaneState, Sequence[LaneState]]] = {
    LaneState.BLOCKED: (LaneState.PROBING, LaneState.GONE),
    LaneState.PROBING: (LaneState.BLOCKED,),
    LaneState.GONE: (),
}


class _Lane:
    __slots__ = (
        "due",
        "given_up_behind",
        "given_up_to",
        "outstanding",
        "probing",
        "routed_at",
        "scheduled",
        "soonest",
        "state",
        "waiting",
    )

    def __init__(self) -> None:
        self.state = LaneState.BLOCKED
        self.waiting: list[Item] = []
        # The unresolved sequences, possibly with the item in flight; each outcome removes its own.
        self.outstanding: set[int] = set()
        self.probing: int | None = None
        self.due = 0.0
        self.soonest = 0.0
        self.scheduled: float | None = None
        self.routed_at = 0
        # Sequences in (given_up_behind, given_up_to] follow a batch that was given up.
        self.given_up_behind = 0
        self.given_up_to = 0

    def move(self, state: LaneState, probing: int | None = None) -> None:
        """Change the state; `probing` is the item in flight. Raises ValueError if there is no such transition."""
        if state not in _NEXT[self.state]:
            raise ValueError(f"a lane cannot go from {self.state.name.lower()} to {state.name.lower()}")
        self.state = state
        self.probing = probing


def _sequence(item: Item) -> int:
    return item.exchange.sequence


class Lanes:
    """The lanes of one client connection."""

    __slots__ = ("_by_due", "_ties", "table")

    def __init__(self) -> None:
        # Normally empty. Each request checks it, as an attribute because a call costs more.
        self.table: dict[LaneKey, _Lane] = {}
        # (due, tie-breaker, key) of the lanes that wait for a time.
        self._by_due: list[tuple[float, int, LaneKey]] = []
        self._ties = 0

    def __len__(self) -> int:
        return len(self.table)

    def __contains__(self, key: LaneKey) -> bool:
        return key in self.table

    def shrink(self) -> None:
        """Shrink the tables, if there are no lanes."""
        if not self.table:
            self.table.clear()

    def is_probing(self, key: LaneKey, sequence: int) -> bool:
        """Whether that exchange's batch is in flight as the probe of a new route."""
        lane = self.table.get(key)
        return lane is not None and lane.probing == sequence

    def is_given_up(self, key: LaneKey, sequence: int) -> bool:
        """Whether that exchange's batch must not be resent because an earlier one was given up."""
        lane = self.table.get(key)
        return lane is not None and lane.given_up_behind < sequence <= lane.given_up_to

    def probe(self, key: LaneKey, sequence: int) -> None:
        """Note that a batch goes first on a new route; has no effect if it is the lane's own item in flight."""
        lane = self.table.setdefault(key, _Lane())
        if lane.state is LaneState.BLOCKED:
            lane.move(LaneState.PROBING, sequence)

    def queue(self, key: LaneKey, item: Item) -> None:
        """Queue an item of a blocked partition.

        If it is the first, another item is in flight: the lane does not wait only for a time.
        """
        insort(self.table[key].waiting, item, key=_sequence)

    def block(self, key: LaneKey, outstanding: Iterable[int]) -> None:
        """Block a partition whose batches with these sequences are unresolved on another route."""
        self.table.setdefault(key, _Lane()).outstanding.update(outstanding)

    def refused(self, key: LaneKey, item: Item, pause: Pause | None, outstanding: Iterable[int]) -> None:
        """Queue an item to be resent after `pause`.

        `pause` is None if the item goes with those before it. `outstanding` are later items already in flight.
        """
        lane = self.table.get(key)
        if lane is None:
            lane = self.table[key] = _Lane()
            lane.outstanding.update(outstanding)
        lane.outstanding.discard(item.exchange.sequence)
        if lane.probing == item.exchange.sequence:
            lane.move(LaneState.BLOCKED)
        insort(lane.waiting, item, key=_sequence)
        if pause is not None:
            lane.due = max(lane.due, pause.due)
            lane.soonest = max(lane.soonest, pause.soonest)
            lane.routed_at = max(lane.routed_at, pause.routed_at)
        self._schedule(key, lane)

    def put_off(self, key: LaneKey, item: Item, now: float) -> None:
        """Begin a lane with an item that may go with the next `ready` items."""
        lane = self.table[key] = _Lane()
        lane.waiting.append(item)
        lane.due = lane.soonest = now
        self._schedule(key, lane)

    def hasten(self, has_moved: Callable[[Item, int], bool]) -> None:
        """End back-offs early, at `soonest`, for partitions whose owner changed since their item was sent."""
        for key, lane in self.table.items():
            if lane.waiting and lane.soonest < lane.due and has_moved(lane.waiting[0], lane.routed_at):
                lane.due = lane.soonest
                self._schedule(key, lane)

    def settled(self, key: LaneKey, sequence: int, *, appended: bool, given_up: bool) -> Release:
        """Record an item's final outcome: `appended`, `given_up` after retries, or finally refused by a broker."""
        lane = self.table.get(key)
        if lane is None:
            return _NOTHING
        was_probing = lane.probing == sequence
        if was_probing:
            lane.move(LaneState.BLOCKED)
        lane.outstanding.discard(sequence)
        given_up |= appended and bool(lane.waiting) and lane.waiting[0].exchange.sequence < sequence
        waiting: list[Item] = []
        if was_probing or given_up:
            waiting, lane.waiting = lane.waiting, []
        self._settle(key, lane)
        return Release([], waiting) if given_up else Release(waiting, [])

    def give_up(self, key: LaneKey, sequence: int, up_to: int, outstanding: Iterable[int]) -> list[Item]:
        """Give up a batch that is answered with an error, at its deadline or after its last attempt.

        The client does not know it yet. `up_to` is the newest request read so far, `outstanding` are this partition's
        sequences in flight. Returns the waiting items from that batch on, which are no longer sent.
        """
        lane = self.table.setdefault(key, _Lane())
        lane.outstanding.update(outstanding)
        lane.given_up_behind = min(lane.given_up_behind, sequence) if lane.given_up_to else sequence
        lane.given_up_to = up_to
        abandoned = [item for item in lane.waiting if item.exchange.sequence >= sequence]
        lane.waiting = lane.waiting[: len(lane.waiting) - len(abandoned)]
        self._settle(key, lane)
        return abandoned

    def ready(self, now: float, most: int) -> list[Item]:
        """Return the first items of at most `most` lanes that may probe now; they count as in flight from now on."""
        items: list[Item] = []
        while len(items) < most and (due := self.next_due()) is not None and due <= now:
            lane = self.table[heappop(self._by_due)[2]]
            lane.scheduled = None
            item = lane.waiting.pop(0)
            lane.move(LaneState.PROBING, item.exchange.sequence)
            items.append(item)
        return items

    def next_due(self) -> float | None:
        """When the next lane that waits only for a time may probe."""
        while self._by_due:
            due, _, key = self._by_due[0]
            lane = self.table.get(key)
            if lane is not None and lane.due == due and _waits_for_time(lane):
                return due
            heappop(self._by_due)
            if lane is not None and lane.scheduled == due:
                lane.scheduled = None
        return None

    def _schedule(self, key: LaneKey, lane: _Lane) -> None:
        """Note when a changed lane may probe; lanes that wait for more than a time are skipped then."""
        if lane.scheduled != lane.due:
            lane.scheduled = lane.due
            self._ties += 1
            heappush(self._by_due, (lane.due, self._ties, key))

    def rename(self, key: LaneKey, new_key: LaneKey) -> list[Item]:
        """Rename a partition; merge its lane with that of the new name, if any.

        The items in flight of both must be settled before the merged lane sends anything. Returns the items of one lane
        that waited behind a batch given up in the other: they are no longer sent.
        """
        old = self.table.pop(key, None)
        if old is None:
            return []
        lane = self.table.get(new_key)
        if lane is None:
            self.table[new_key] = old
            old.scheduled = None
            self._schedule(new_key, old)
            return []
        for each in (old, lane):
            if each.probing is not None:
                each.outstanding.add(each.probing)
                each.move(LaneState.BLOCKED)
        lane.outstanding |= old.outstanding
        waiting = sorted((*lane.waiting, *old.waiting), key=_sequence)
        lane.due, lane.soonest = max(lane.due, old.due), max(lane.soonest, old.soonest)
        lane.routed_at = max(lane.routed_at, old.routed_at)
        behind = [each.given_up_behind for each in (old, lane) if each.given_up_to]
        lane.given_up_behind = min(behind, default=0)
        lane.given_up_to = max(lane.given_up_to, old.given_up_to)
        abandoned: list[Item] = []
        lane.waiting = []
        for item in waiting:
            (abandoned if self.is_given_up(new_key, _sequence(item)) else lane.waiting).append(item)
        self._settle(new_key, lane)
        return abandoned

    def waiting(self) -> list[tuple[LaneKey, Item]]:
        """All waiting items."""
        return [(key, item) for key, lane in self.table.items() for item in lane.waiting]

    def take_away(self, key: LaneKey, is_meant: Callable[[Item], bool]) -> list[Item]:
        """Remove waiting items from a lane, and return them."""
        lane = self.table.get(key)
        if lane is None:
            return []
        taken = [item for item in lane.waiting if is_meant(item)]
        lane.waiting = [item for item in lane.waiting if not is_meant(item)]
        self._settle(key, lane)
        return taken

    def drop(self, is_dropped: Callable[[Exchange], bool]) -> None:
        """Remove the waiting items of some exchanges from every lane."""
        for key, lane in list(self.table.items()):
            lane.waiting = [item for item in lane.waiting if not is_dropped(item.exchange)]
            self._settle(key, lane)

    def _settle(self, key: LaneKey, lane: _Lane) -> None:
        """Schedule or remove a lane after part of it was resolved."""
        if lane.waiting:
            self._schedule(key, lane)
        elif not lane.outstanding and lane.state is LaneState.BLOCKED:
            lane.move(LaneState.GONE)
            del self.table[key]


def _waits_for_time(lane: _Lane) -> bool:
    return bool(lane.waiting) and lane.state is LaneState.BLOCKED and not lane.outstanding
