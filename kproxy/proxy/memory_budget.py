"""Bound the bytes of requests that one process holds, by not reading; cut off frames that arrive too slowly.

`limit` is the part of `total` that brokers' answers leave (kproxy.proxy.answer_memory), at least half of it.

The sum counts the buffers of frames that are arriving, whole frames that wait to be begun, and requests that are not
answered yet. It is one integer that sessions add to. While it is at its limit, sessions only finish the reads that have
begun at that moment (LAST_READ_BYTES).

States of a session
  free      it may read
  waiting   it has found the limit reached and has stopped reading
  passing   it may read beyond the limit, until the arriving frame is whole or its connection closed

Transitions
  free    -> waiting   `wait`: it finds the limit reached
  waiting -> free      there is room again; sessions are released one by one, the longest waiting first
  waiting -> passing   there is no room, arriving frames hold most of it, and no session passes: the first session with
                       a partial frame does
  passing -> free      `leave`; or little arrived in PASS_S, and the sum is below 1.5 times the limit: the next session
                       passes, and this one, which is still read, waits again with its next bytes
  any     -> free      `leave`: the session ends

Invariants
1. At most one session passes. A pass begins only while whole requests hold less than half of the limit: then partial
   frames fill the budget, and would block every reader.
2. The sum exceeds the limit by no more than half of it, one frame, and the reads that have begun at that moment.
3. Every waiting session is eventually released: requests end at their deadline, and a frame that arrives too slowly
   while others wait is cut off (`Arrival`).

`Arrival` judges whole windows of time in which the session read without a pause. After back-pressure of any kind a new
window begins. An idle connection, which has no partial frame, is never judged.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from ctypes import Structure, c_int64
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from kproxy.proxy.request_reader import RequestReader

# Limit of bytes that a session still reads from a socket when the limit is reached.
LAST_READ_BYTES = 4096
# A session that passes for longer must receive PASS_BYTES in each PASS_S.
PASS_S = 0.02
PASS_BYTES = 4096


class Budget(Structure):
    """`held` of `limit` bytes, `arriving` of them by frames that are not whole; sessions change both themselves.

    The compiled plain path has the same fields (kproxy/plain/counters.pxi).
    """

    __slots__ = ("_is_waking", "_pass_timer", "passing", "total", "waiting")

    held: int
    arriving: int
    limit: int
    _fields_ = [("held", c_int64), ("arriving", c_int64), ("limit", c_int64)]

    def __init__(self, total: int) -> None:
        super().__init__(limit=total)
        self.total = total
        # In the order of arrival; never replaced.
        self.waiting: OrderedDict[RequestReader, None] = OrderedDict()
        self.passing: RequestReader | None = None
        self._is_waking = False
        self._pass_timer: asyncio.TimerHandle | None = None

    @property
    def presses(self) -> bool:
        """Whether there is no room and a session waits."""
        return self.held >= self.limit and bool(self.waiting)

    def leave_to_requests(self, limit: int) -> None:
        """Set the limit that brokers' answers leave."""
        grows, self.limit = limit > self.limit, limit
        if grows and self.waiting:
            self.wake()

    def wait(self, waiter: RequestReader, *, again: bool) -> None:
        """Queue a session that stopped reading; `again`: it was released and its frame is still partial."""
        self.waiting[waiter] = None
        if again:
            self.waiting.move_to_end(waiter, last=False)
        self.wake()

    def leave(self, waiter: RequestReader) -> None:
        """Forget a session that has ended, has no partial frame any more, or finds room."""
        self.waiting.pop(waiter, None)
        if self.passing is waiter:
            self._end_pass()
        if self.waiting:
            self.wake()

    def wake(self) -> None:
        """Schedule the release of sessions that may read; call it when less is held and a session waits."""
        if not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_soon(self._wake_one)

    def _wake_one(self) -> None:
        """Release one session; the bytes that it reads count before the next is released."""
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

    def _let_pass(self, waiter: RequestReader) -> None:
        self.passing = waiter
        self._pass_timer = asyncio.get_running_loop().call_later(
            PASS_S, self._see_to_pass, waiter, waiter.arrived_bytes
        )

    def _see_to_pass(self, waiter: RequestReader, arrived_bytes: int) -> None:
        """End the pass of a session that receives too little, unless too much is held for another to pass."""
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


class Pace(NamedTuple):
    """At least `bytes_per_s` on average over every window of `window_s`."""

    bytes_per_s: int
    window_s: float


USUAL: Final = Pace(1 << 10, 10.0)
PRESSED: Final = Pace(256 << 10, 2.0)
"""While other sessions wait for memory."""


class Arrival:
    """Judge the pace of one connection's frames, at every tick."""

    __slots__ = ("_began", "_bytes", "_pauses", "_since")

    def __init__(self) -> None:
        self._began = -1.0
        self._pauses = 0
        self._since = 0.0
        self._bytes = 0

    def is_too_slow(self, now: float, *, began: float, arrived: int, pauses: int, pressed: bool) -> bool:
        """Whether the frame that began to arrive at `began`, with `arrived` bytes so far, is too slow.

        `pauses` grows when the connection is not read; `began` and `now` are seconds of one clock.
        """
        if pauses != self._pauses:
            self._began, self._since, self._bytes, self._pauses = began, now, arrived, pauses
        elif began != self._began:
            self._began, self._since, self._bytes = began, began, 0
        pace = PRESSED if pressed else USUAL
        elapsed = now - self._since
        if elapsed < pace.window_s:
            return False
        if arrived - self._bytes < pace.bytes_per_s * elapsed:
            return True
        self._since, self._bytes = now, arrived
        return False
