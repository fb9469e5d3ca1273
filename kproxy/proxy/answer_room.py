"""How much of brokers' answers is held at a time: the bound of one process, kept by not reading brokers' connections.

A large answer (more than LARGE_BYTES) says in its first bytes how long it is. It gets room for all of it before more of
it is read, and takes that for as long as anything refers to its bytes: while it arrives, waits for others to be merged
with and for its turn, and until its client's transport has taken the last of it. Smaller ones are read as they come,
for acknowledgements are small and must always get through. What of these a client does not take counts as well, and
while that is more than HOLD_BACK_BYTES its own brokers are not read: nobody else's.

States of a large answer
  waiting   its length is known, its connection is not read
  held      it has its room
  gone      nothing refers to it any more; or its connection ended while it waited

Transitions
  waiting -> held   there is room for those of its kind, and nobody of its kind has waited for longer; when somebody has
                    waited for LONG_S every other one goes to who came last, and surely still wants it
  held    -> gone   its client has taken it; its client's connection has ended; nobody wanted it any more

There are two kinds of clients, each with a quarter of the limit, so that those who read do not wait for those who never
do. Proven is a client that takes what it is answered: it has taken a large answer before, or has a part of one and
waits for the rest of it from another broker. All others are newcomers, and so is one that takes too little at the time.

Where proven ones hold a part each, and nobody could get the rest, one client at a time finishes: whatever is held, it
gets room for one answer on each of its connections from which it held none when it began. These are the rest of what
it waits for first. The next one may when all of them are gone.

Invariants
1. Large answers of either kind hold a quarter of the limit and one answer more, and beside these one client's that
   finishes; small ones HOLD_BACK_BYTES of each client and what it had asked for before (limits.max_in_flight_bytes).
2. Requests have half of the limit whatever becomes of answers: `Budget.limit` is what answers leave, and never less.
3. Nobody waits for ever. While somebody waits, whoever holds something of the same kind brings it forward, from the
   broker or to the client, at the pace of `Arrival` (kproxy.proxy.memory_budget), or its connection is closed,
   whatever keeps it; when somebody has waited for LONG_S, at the higher pace. So room is made in the end, and who came
   first gets it, or who came last, in turn.
4. What an answer takes is given back once, by the end of its buffer, and by nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Protocol

from kproxy.proxy.memory_budget import Arrival, Budget

# Above the longest answer to a produce request that is admitted (4,096 partitions of some 35 bytes).
LARGE_BYTES = 256 << 10
HOLD_BACK_BYTES = 256 << 10
LONG_S = 10.0


class Waiter(Protocol):
    """A broker's connection with a large answer that has begun to arrive."""

    def give_room(self, room: AnswerBuffer) -> None:
        """Read it into `room`."""
        ...


class AnswerBuffer(bytearray):
    """The room of one answer: it is free again when nothing refers to this."""

    __slots__ = ("_finishes", "_kind", "_share", "_waiter")

    def __init__(self, size: int, share: Share, waiter: Waiter, *, finishes: bool = False) -> None:
        super().__init__(size)
        self._share = share
        self._waiter = waiter
        self._finishes = finishes
        self._kind = share.take(size, waiter)

    def __del__(self) -> None:
        # It has none where there was no memory to be had for it.
        if hasattr(self, "_kind"):
            share = self._share
            share.room.on_its_thread(partial(share.give_back, len(self), self._waiter, self._kind))
            if self._finishes:
                share.room.on_its_thread(share.room.finished)


class AnswerRoom:
    """What is held of answers, of all clients of one process; `clock` in seconds."""

    __slots__ = (
        "_budget",
        "_clock",
        "_finisher",
        "_finishing",
        "_half",
        "_held",
        "_is_waking",
        "_loop",
        "_served",
        "_takes_last",
        "_thread",
        "_waiting",
        "cut_at",
    )

    def __init__(self, budget: Budget, clock: Callable[[], float]) -> None:
        self._budget = budget
        self._clock = clock
        self._half = budget.total // 2
        # By whether they are proven.
        self._held = {False: 0, True: 0}
        # In the order of their coming: whose it is, how large, and since when.
        self._waiting: dict[Waiter, tuple[Share, int, float]] = {}
        self._is_waking = False
        self._takes_last = False
        # Who finishes, how many answers there are that it has got so, and on which connections it gets none.
        self._finisher: Share | None = None
        self._finishing = 0
        self._served = set[Waiter]()
        # Where answers are taken; known from the first of them on.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        # When a client's connection was closed last for the room that it took. One at a time: others may do then.
        self.cut_at = -1.0

    @property
    def held(self) -> int:
        """Bytes in all."""
        return self._held[False] + self._held[True]

    @property
    def is_wanted(self) -> bool:
        """Whether anybody waits."""
        return bool(self._waiting)

    def waited_s(self, kinds: Collection[bool]) -> float | None:
        """How long somebody of these kinds has waited by now; None where nobody does."""
        for share, _, since in self._waiting.values():
            if share.is_proven in kinds:
                return self._clock() - since
        return None

    def take(self, waiter: Waiter, share: Share, size: int) -> AnswerBuffer | None:
        """Room for an answer of `size` bytes; None: `waiter` is told when there is."""
        if self._loop is None:
            self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        if not self._waiting and self._has_room(share.is_proven):
            return AnswerBuffer(size, share, waiter)
        self._waiting[waiter] = share, size, self._clock()
        self.wake()
        return None

    def leave(self, waiter: Waiter) -> None:
        """Its connection has ended."""
        if self._waiting.pop(waiter, None) is not None:
            self.wake()

    def on_its_thread(self, give_back: Callable[[], object]) -> None:
        """An answer is gone: Python's cycle collector may find that on any thread."""
        if self._loop is None or threading.get_ident() == self._thread:
            give_back()
            return
        # A RuntimeError: the event loop has been closed, and nobody waits for room any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(give_back)

    def change(self, more: int, kind: bool) -> None:
        """So much more, or less, is held."""
        budget = self._budget
        self._held[kind] += more
        budget.leave_to_requests(budget.total - min(self.held, self._half))
        if more < 0:
            self.wake()

    def wake(self) -> None:
        """See who may go on, soon: also to be called now and then, for those who have become proven."""
        if self._waiting and not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_soon(self._wake_one)

    def _has_room(self, kind: bool) -> bool:
        return not self._held[kind] or self._held[kind] < self._half / 2

    def _wake_one(self) -> None:
        """One at a time: others have their turn of the event loop between."""
        self._is_waking = False
        kinds = {kind for kind in (True, False) if self._has_room(kind)}
        in_order: Iterable[tuple[Waiter, tuple[Share, int, float]]] = self._waiting.items()
        if self._takes_last and (self.waited_s((True, False)) or 0.0) >= LONG_S:
            in_order = reversed(self._waiting.items())
        for waiter, (share, _, _) in in_order:
            if share.is_proven in kinds:
                self._let_go(waiter)
                return
            if self._may_finish(waiter, share):
                self._let_go(waiter, finishes=True)
                return

    def _may_finish(self, waiter: Waiter, share: Share) -> bool:
        if self._finisher is None:
            return share.may_finish and waiter not in share.sources
        return self._finisher is share and share.may_finish and waiter not in self._served

    def _let_go(self, waiter: Waiter, *, finishes: bool = False) -> None:
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
        """One answer is gone of those that were let in for somebody to finish."""
        self._finishing -= 1
        if not self._finishing:
            self._finisher = None
            self._served = set()
            self.wake()


class Share:
    """One client's part of it. `on_hold_back` is told when its brokers are not to be read, and when they are again."""

    __slots__ = (
        "_arrival",
        "_has_taken",
        "_in_rooms",
        "_on_hold_back",
        "_pauses",
        "_untaken",
        "arrived_bytes",
        "room",
        "sources",
    )

    def __init__(self, room: AnswerRoom, on_hold_back: Callable[[bool], None]) -> None:
        self.room = room
        self._on_hold_back = on_hold_back
        # What has room, by whether this client was proven then; and what is beside it that it does not take.
        self._in_rooms = {False: 0, True: 0}
        self._untaken = 0
        # Where what has room comes from, each as often as there is an answer of it.
        self.sources = Counter[Waiter]()
        self._has_taken = False
        # Of large answers, whole ones too.
        self.arrived_bytes = 0
        self._arrival = Arrival()
        # Other than what it is judged by first: windows begin when there is something to be judged.
        self._pauses = 1

    @property
    def held(self) -> int:
        """All that counts of this client."""
        return self._in_rooms[False] + self._in_rooms[True] + self._untaken

    @property
    def is_proven(self) -> bool:
        """Whether it takes what it is answered, as far as is known."""
        return self.may_finish or (self._has_taken and not self._untaken)

    @property
    def may_finish(self) -> bool:
        """Whether it has a part of something, of which it may need the rest."""
        return not self._untaken and self._in_rooms[False] + self._in_rooms[True] > 0

    def take(self, size: int, source: Waiter) -> bool:
        """An answer has room; of which kind."""
        kind = self.is_proven
        self.sources[source] += 1
        self._count(size)
        self._in_rooms[kind] += size
        self.room.change(size, kind)
        return kind

    def give_back(self, size: int, source: Waiter, kind: bool) -> None:
        """It is gone."""
        self.sources[source] -= 1
        if not self.sources[source]:
            del self.sources[source]
        self._in_rooms[kind] -= size
        self._has_taken = True
        self.room.change(-size, kind)

    def leave_untaken(self, size: int) -> None:
        """The client does not take so much of what has no room of its own."""
        before = self._untaken
        if size == before:
            return
        self._count(size - before)
        self._untaken = size
        # It counts with newcomers' answers, who may be of that kind.
        self.room.change(size - before, kind=False)
        if (size >= HOLD_BACK_BYTES) is not (before >= HOLD_BACK_BYTES):
            self._on_hold_back(size >= HOLD_BACK_BYTES)

    def _count(self, more: int) -> None:
        if more > 0 and not self.held:
            self._pauses += 1

    def is_stuck(self, now: float, taken_bytes: int) -> bool:
        """Whether others wait for what is held here and it does not move; `taken_bytes` by the client so far.

        It is said of one client for each `now`.
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
        """The kinds whose room it takes."""
        kinds = {kind for kind, size in self._in_rooms.items() if size}
        return kinds | {False} if self._untaken else kinds
