"""How much of clients' requests is held at a time in all: the bound of one process, kept by not reading.

It is `limit`, what brokers' answers leave of `total` (kproxy.proxy.answer_room), a half of it at least.

Counted are the buffers of frames that are arriving, whole frames that wait to be begun, and requests that are not
answered yet. The sum is one integer that sessions add to; while it is at its limit they read nothing, but for what they
have begun to read in that moment (LAST_READ_BYTES).

States of a session
  free      it reads as it likes
  waiting   it has found the limit reached and has stopped reading
  passing   it may read, limit or no limit, until the frame that is arriving is whole or its connection closed

Transitions
  free    -> waiting   `wait`: it finds the limit reached
  waiting -> free      there is room again: those who wait are let go one by one, the longest waiting first
  waiting -> passing   there is none, frames that are arriving hold the most of it, and nobody passes: the first of
                       those in the midst of a frame does
  passing -> free      `leave`; or in PASS_S nothing much came of it and less than a half more than the limit is held:
                       the next one passes, and this one, which is still read, waits again with its next bytes
  any     -> free      `leave`: the session ends

Invariants
1. At most one session passes, and only while requests that are whole hold less than half of the limit. Did none pass,
   the limit could be full of halves of frames, and nobody would ever read the rest of any.
2. The sum exceeds the limit by no more than a half of it, one frame, and what sessions have begun to read in that
   moment.
3. Whoever waits is let go in the end: requests end at their deadline, and a frame that arrives too slowly while others
   wait is cut off (kproxy.proxy.arrival).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Protocol

# While the limit is reached a session still gets so much from a socket that is being read already.
LAST_READ_BYTES = 4096
# What has arrived already is read at once. Who passes for longer brings so much in each PASS_S.
PASS_S = 0.02
PASS_BYTES = 4096


class Waiter(Protocol):
    """A session that waits."""

    @property
    def is_amid_frame(self) -> bool:
        """Whether a frame has begun to arrive and is not whole."""
        ...

    @property
    def arrived_bytes(self) -> int:
        """How much of it has arrived."""
        ...

    def read_on(self) -> None:
        """There is room, or the pass: read, and `leave` or `wait` again."""
        ...


class Budget:
    """`held` of `limit` bytes, `arriving` of them by frames that are not whole; sessions change both themselves."""

    __slots__ = ("_is_waking", "_pass_timer", "arriving", "held", "limit", "passing", "total", "waiting")

    def __init__(self, total: int) -> None:
        self.total = total
        self.limit = total
        self.held = 0
        self.arriving = 0
        # In the order of their coming.
        self.waiting: OrderedDict[Waiter, None] = OrderedDict()
        self.passing: Waiter | None = None
        self._is_waking = False
        self._pass_timer: asyncio.TimerHandle | None = None

    @property
    def presses(self) -> bool:
        """Whether there is no room and somebody wants some."""
        return self.held >= self.limit and bool(self.waiting)

    def leave_to_requests(self, limit: int) -> None:
        """Answers leave so much from now on."""
        grows, self.limit = limit > self.limit, limit
        if grows and self.waiting:
            self.wake()

    def wait(self, waiter: Waiter, *, again: bool) -> None:
        """`waiter` does not read any more; `again` where it has been let go and its frame is still not whole."""
        self.waiting[waiter] = None
        if again:
            self.waiting.move_to_end(waiter, last=False)
        self.wake()

    def leave(self, waiter: Waiter) -> None:
        """Forget a session that has ended, has no frame that is arriving any more, or finds room."""
        self.waiting.pop(waiter, None)
        if self.passing is waiter:
            self._end_pass()
        if self.waiting:
            self.wake()

    def wake(self) -> None:
        """See who may go on, soon: to be called when there is less held than before, and somebody waits."""
        if not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_soon(self._wake_one)

    def _wake_one(self) -> None:
        """One at a time: what it reads counts before the next is let go."""
        self._is_waking = False
        if self.held < self.limit:
            waiter = next(iter(self.waiting), None)
        elif self.passing is None and self.held - self.arriving < self.limit / 2:
            waiter = next((each for each in self.waiting if each.is_amid_frame), None)
            if waiter is not None:
                self._let_pass(waiter)
        else:
            return
        if waiter is not None:
            del self.waiting[waiter]
            waiter.read_on()
            if self.waiting:
                self.wake()

    def _let_pass(self, waiter: Waiter) -> None:
        self.passing = waiter
        self._pass_timer = asyncio.get_running_loop().call_later(
            PASS_S, self._see_to_pass, waiter, waiter.arrived_bytes
        )

    def _see_to_pass(self, waiter: Waiter, arrived_bytes: int) -> None:
        """Whoever stands still does not keep the others waiting, as long as the next one may bring something more."""
        gets_on = waiter.arrived_bytes - arrived_bytes >= PASS_BYTES
        if gets_on or self.held >= self.limit * 3 / 2:
            self._let_pass(waiter)
        else:
            self._end_pass()
            if self.waiting:
                self.wake()

    def _end_pass(self) -> None:
        self.passing = None
        if self._pass_timer is not None:
            self._pass_timer.cancel()
            self._pass_timer = None
