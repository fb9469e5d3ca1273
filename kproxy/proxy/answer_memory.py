"""Limit the memory for brokers' answers in one process: at the limit, stop reading brokers' connections.

A large answer (more than LARGE_BYTES) announces its length in its first bytes. It gets room for all its bytes before
more are read. It holds that room while anything refers to its bytes: while it arrives, waits to be merged and for its
turn, and until its client's transport has the last byte. Smaller answers are read at once, because acknowledgements are
small and must always get through. Small answers that a client does not read count as a newcomer's (below); from
HOLD_BACK_BYTES on, this client's broker connections alone are not read.

States of a large answer
  waiting   its length is known, its connection is not read
  held      it has its room
  gone      nothing refers to it any more; or its connection ended while it waited

Transitions
  waiting -> held   there is room for its kind, and no answer of its kind has waited for longer. Once one has waited for
                    LONG_S, every other room goes to the last: its client probably still waits. Or its client finishes
  any     -> gone   its client has taken it; its own or its client's connection has ended; it is not wanted any more

There are two kinds of clients, each with a quarter of the limit, so that clients that read do not wait for clients that
never do. A proven client takes its answers: it has taken a large answer before, or has a part of one and waits for the
rest of it from another broker. All others are newcomers, and so is a client that takes too little at the moment.

If proven clients hold a part each and none could get the rest, one client at a time finishes: it gets, above the limit,
room for one answer from each of its connections that held none when it began. These complete what it waits for first.
The next client may finish when all of them are gone.

Invariants
1. Large answers of each kind hold a quarter of the limit and one answer more, besides those of the one client that
   finishes. Small answers hold, for each client, HOLD_BACK_BYTES and the bytes that it had requested before
   (limits.max_in_flight_bytes).
2. Requests always have half of the limit: `Budget.limit` is the part that answers leave, and at least half.
3. No answer waits forever. While one waits, each client that holds room of the same kind must move its bytes, from the
   broker or to the client, at the pace of `Arrival` (kproxy.proxy.memory_budget), or its connection is closed,
   whatever the cause. Once an answer has waited for LONG_S the higher pace counts. So room becomes free eventually, and
   the answer that came first or the one that came last gets it, in turn.
4. The room of an answer is given back once, by the end of its buffer, and by nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kproxy.plain import compiled
from kproxy.proxy.memory_budget import Arrival, Budget
from kproxy_codec.primitives import Buffer

if TYPE_CHECKING:
    from kproxy.proxy.broker_connection import Upstream
    from kproxy.proxy.client_session import ClientSession

# More than the longest answer to an accepted produce request (4,096 partitions of some 35 bytes).
LARGE_BYTES = 256 << 10
HOLD_BACK_BYTES = 256 << 10
LONG_S = 10.0


class AnswerBuffer(bytearray):
    """The memory of one answer; it is free again when nothing refers to this object."""

    __slots__ = ("_finishes", "_kind", "_share", "_waiter")

    def __init__(self, size: int, share: ClientMemory, waiter: Upstream, *, finishes: bool = False) -> None:
        if compiled is None:
            super().__init__(size)
        else:
            compiled.resize(self, size)
        self._share = share
        self._waiter = waiter
        self._finishes = finishes
        self._kind = share.take(size, waiter)

    def __del__(self) -> None:
        # Without `_kind` the allocation failed, and there is nothing to give back.
        if hasattr(self, "_kind"):
            share = self._share
            share.room.on_its_thread(partial(share.give_back, len(self), self._waiter, self._kind))
            if self._finishes:
                share.room.on_its_thread(share.room.finished)


class AnswerMemory:
    """The answers held for all clients of one process; `clock` in seconds."""

    def __init__(self, budget: Budget, clock: Callable[[], float]) -> None:
        self._budget = budget
        self._clock = clock
        self._half = budget.total // 2
        # Keyed by whether the client is proven.
        self._held = {False: 0, True: 0}
        # In order of arrival: the client's share, the answer's size, and its waiting time's start.
        self._waiting: dict[Upstream, tuple[ClientMemory, int, float]] = {}
        self._is_waking = False
        self._takes_last = False
        # The client that finishes, how many answers it got for that, and the connections that get no more.
        self._finisher: ClientMemory | None = None
        self._finishing = 0
        self._served: set[Upstream] = set()
        # The event loop that reads answers; known from the first answer on.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        # When a client's connection was last closed for its memory. One at a time, as that may be enough.
        self.cut_at = -1.0

    @property
    def held(self) -> int:
        """Bytes held by all answers."""
        return self._held[False] + self._held[True]

    @property
    def is_wanted(self) -> bool:
        """Whether an answer waits."""
        return bool(self._waiting)

    def waited_s(self, kinds: Collection[bool]) -> float | None:
        """How long the oldest answer of these kinds has waited; None if none waits."""
        for share, _, since in self._waiting.values():
            if share.is_proven in kinds:
                return self._clock() - since
        return None

    def take(self, waiter: Upstream, share: ClientMemory, size: int) -> AnswerBuffer | None:
        """Return room for an answer of `size` bytes; None if `waiter` must wait for `give_room`."""
        if self._loop is None:
            self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        if not self._waiting and self._has_room(share.is_proven):
            return AnswerBuffer(size, share, waiter)
        self._waiting[waiter] = share, size, self._clock()
        self.wake()
        return None

    def leave(self, waiter: Upstream) -> None:
        """Remove a waiter whose connection has ended."""
        if self._waiting.pop(waiter, None) is not None:
            self.wake()

    def on_its_thread(self, give_back: Callable[[], object]) -> None:
        """Call `give_back` on the event loop's thread: Python's cycle collector may run on any thread."""
        if self._loop is None or threading.get_ident() == self._thread:
            give_back()
            return
        # A RuntimeError: the event loop is closed, so no answer waits for room.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(give_back)

    def change(self, more: int, kind: bool) -> None:
        """Count bytes that are held or given back."""
        budget = self._budget
        self._held[kind] += more
        budget.leave_to_requests(budget.total - min(self.held, self._half))
        if more < 0:
            self.wake()

    def follow_total(self) -> None:
        """Follow a change of the budget's total."""
        self._half = self._budget.total // 2
        self.change(0, True)
        self.wake()

    def wake(self) -> None:
        """Schedule room for waiters that may have it; also call it periodically, as clients become proven."""
        if self._waiting and not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_soon(self._wake_one)

    def _has_room(self, kind: bool) -> bool:
        return not self._held[kind] or self._held[kind] < self._half / 2

    def _wake_one(self) -> None:
        """Give room to one waiter; other events run before the next one."""
        self._is_waking = False
        kinds = {kind for kind in (True, False) if self._has_room(kind)}
        in_order: Iterable[tuple[Upstream, tuple[ClientMemory, int, float]]] = self._waiting.items()
        if self._takes_last and (self.waited_s((True, False)) or 0.0) >= LONG_S:
            in_order = reversed(self._waiting.items())
        for waiter, (share, _, _) in in_order:
            if share.is_proven in kinds:
                self._let_go(waiter)
                return
            if self._may_finish(waiter, share):
                self._let_go(waiter, finishes=True)
                return

    def _may_finish(self, waiter: Upstream, share: ClientMemory) -> bool:
        if self._finisher is None:
            return share.may_finish and waiter not in share.sources
        return self._finisher is share and share.may_finish and waiter not in self._served

    def _let_go(self, waiter: Upstream, *, finishes: bool = False) -> None:
        share, size, _ = self._waiting[waiter]
        room = AnswerBuffer(size, share, waiter, finishes=finishes)
        if finishes:
            if self._finisher is None:
                self._finisher = share
                self._served = set(share.sources)
            self._finishing += 1
            self._served.add(waiter)
        del self._waiting[waiter]
        self._takes_last = not self._takes_last
        waiter.give_room(room)
        self.wake()

    def finished(self) -> None:
        """Note that one of the finishing client's answers is gone."""
        self._finishing -= 1
        if not self._finishing:
            self._finisher = None
            self._served = set()
            self.wake()


@dataclass(slots=True, eq=False)
class ClientMemory:
    """One client's part of the memory."""

    room: AnswerMemory
    _client: ClientSession
    # Bytes with room, by whether this client was proven then; and other bytes that it does not read.
    _in_rooms: list[int] = field(default_factory=lambda: [0, 0], init=False)
    _untaken: int = field(default=0, init=False)
    # The connections of the answers with room, each with its number of answers.
    sources: dict[Upstream, int] = field(default_factory=dict, init=False)
    _has_taken: bool = field(default=False, init=False)
    # Bytes of large answers, including complete ones.
    arrived_bytes: int = field(default=0, init=False)
    _arrival: Arrival = field(default_factory=Arrival, init=False)
    # Unequal to the first count: a window begins only when there is something to judge.
    _pauses: int = field(default=1, init=False)

    @property
    def held(self) -> int:
        """All bytes that count for this client."""
        return self._in_rooms[False] + self._in_rooms[True] + self._untaken

    @property
    def is_proven(self) -> bool:
        """Whether it takes its answers; see the module's text."""
        return self.may_finish or (self._has_taken and not self._untaken)

    @property
    def may_finish(self) -> bool:
        """Whether it has some of its answers and may need the rest."""
        return not self._untaken and self._in_rooms[False] + self._in_rooms[True] > 0

    def take(self, size: int, source: Upstream) -> bool:
        """Count an answer that got room; return its kind."""
        kind = self.is_proven
        self.sources[source] = self.sources.get(source, 0) + 1
        self._count(size)
        self._in_rooms[kind] += size
        self.room.change(size, kind)
        return kind

    def give_back(self, size: int, source: Upstream, kind: bool) -> None:
        """Count an answer that is gone."""
        self.sources[source] -= 1
        if not self.sources[source]:
            del self.sources[source]
        self._in_rooms[kind] -= size
        self._has_taken = True
        self.room.change(-size, kind)

    @staticmethod
    def has_room(buffer: Buffer) -> bool:
        """Whether an unwritten answer has room of its own, in which its bytes are counted."""
        return isinstance(buffer, memoryview) and isinstance(buffer.obj, AnswerBuffer)

    def leave_untaken(self, size: int) -> None:
        """Set the number of bytes without room of their own that the client does not read."""
        before = self._untaken
        if size == before:
            return
        self._count(size - before)
        self._untaken = size
        # They count as a newcomer's, as the client may be one.
        self.room.change(size - before, kind=False)
        if (size >= HOLD_BACK_BYTES) is not (before >= HOLD_BACK_BYTES):
            self._client.hold_back(size >= HOLD_BACK_BYTES)

    def _count(self, more: int) -> None:
        if more > 0 and not self.held:
            self._pauses += 1

    def is_stuck(self, now: float, taken_bytes: int) -> bool:
        """Whether this client holds room that others wait for, and makes no progress.

        `taken_bytes` is the number that the client has read so far. Returns True for only one client per `now`.
        """
        waited_s = self.room.waited_s(self._kinds()) if self.room.is_wanted else None
        if waited_s is None:
            self._pauses += 1
            return False
        moved, pressed = self.arrived_bytes + taken_bytes, waited_s >= LONG_S
        if self.room.cut_at >= now or not self._arrival.is_too_slow(
            now, began=0.0, arrived=moved, pauses=self._pauses, pressed=pressed
        ):
            return False
        self.room.cut_at = now
        return True

    def _kinds(self) -> set[bool]:
        """The kinds of which it holds room."""
        kinds = {bool(kind) for kind, size in enumerate(self._in_rooms) if size}
        return kinds | {False} if self._untaken else kinds
