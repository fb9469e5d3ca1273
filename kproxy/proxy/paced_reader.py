"""Read one client and begin its requests only while there is room.

The bounds are the connection's bytes in flight and open requests, the memory of all connections
(kproxy.proxy.memory_budget), the open partitions (`PartitionedRequests.has_room_for`), the pace of the client and of
the brokers, and the time in this turn of the event loop. Nothing is begun while a claim is being served.

Invariants
1. Beyond a limit no more is begun or read. Further requests of the same read wait in `_backlog`, and are begun before
   the next read. So do requests that cannot be begun within TURN_S, and those after a read that brought MANY_REQUESTS
   and LARGE_READ_BYTES: other connections have their turn first.
2. Waiting requests are begun in an event of their own, never during an answer.
3. The code that stops reading also resumes it: each bound that changes calls `adjust_reading` or `go_on`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from kproxy.proxy.context import ProxyContext
from kproxy.proxy.control_plane import ControlRequests
from kproxy.proxy.partitioned_requests import PartitionedRequests
from kproxy.proxy.request_reader import RequestReader
from kproxy.runtime.tasks import TURN_S
from kproxy_codec.errors import CodecError


class PacedReader(RequestReader):
    """The part of a client session that decides when more is read and begun."""

    __slots__ = (
        "_broker_pressure",
        "_client_pressure",
        "_control",
        "_draining",
        "_pauses",
        "_pressed_at",
        "_requests",
        "_rests",
        "_takes_backlog",
        "_transport",
        "_wanted_partitions",
    )

    _control: ControlRequests
    _requests: PartitionedRequests
    _begin_again: Callable[[memoryview, float], None]
    _end_if_drained: Callable[[], None]

    def __init__(self, context: ProxyContext) -> None:
        super().__init__(context)
        self._transport: asyncio.Transport | None = None
        # Whether no more is read for good.
        self._draining = False
        self._broker_pressure = 0
        self._client_pressure = False
        self._pressed_at = 0.0
        self._takes_backlog = False
        # Partitions of the backlog's first request, if it waits for room for them.
        self._wanted_partitions = 0
        # Whether other connections have their event-loop turn before more is begun.
        self._rests = False
        # How often reading was stopped.
        self._pauses = 0

    def pause_writing(self) -> None:
        self._client_pressure, self._pressed_at = True, self._clock()
        if self._answers.outbox is not None:
            self._answers.outbox.pause()
        self.adjust_reading()

    def resume_writing(self) -> None:
        self._client_pressure = False
        if self._answers.outbox is not None:
            self._answers.outbox.resume()
        self.adjust_reading()

    def slow(self, now: float) -> tuple[float, str]:
        """For how long the client has kept the proxy waiting, and with what: as in overview.ClientLine."""
        if self._client_pressure:
            return now - self._pressed_at, "reading"
        return (now - self._first_byte_at, "sending") if self.is_amid_frame and self._reading else (0.0, "")

    def broker_presses(self, slow: bool) -> None:
        """Stop reading while a broker accepts no more, then resume."""
        self._broker_pressure += 1 if slow else -1
        self.adjust_reading()

    def _has_room(self) -> bool:
        return (
            self._answers.in_flight_bytes < self._max_bytes
            and self._answers.open_count < self._max_requests
            and not self._client_pressure
            and not self._broker_pressure
            and not self._control.is_claiming
            and not self._rests
            and not (self._wanted_partitions and not self._requests.has_room_for(self._wanted_partitions))
        )

    def go_on(self) -> None:
        """Continue reading, or end, after a request is done."""
        if not self.closed:
            self.adjust_reading()
            self._end_if_drained()

    def adjust_reading(self) -> None:
        """Read while there is room; waiting requests come first."""
        if self._transport is None or self.closed:
            return
        has_room = self._has_room()
        if has_room and self._backlog and not self._takes_backlog:
            self._takes_backlog = True
            asyncio.get_running_loop().call_soon(self._take_backlog)
        may_read = has_room and not self._backlog and not self._draining
        if may_read and self._budget.held >= self._budget.limit and self._budget.passing is not self:
            may_read = False
            self._budget.wait(self, again=self._is_let_go)
        if may_read is self._reading:
            return
        self._reading = may_read
        self._answers.is_waited_for = not may_read
        if may_read:
            self._transport.resume_reading()
        else:
            self._pauses += 1
            self._transport.pause_reading()

    def _wait(self, frames: Iterable[memoryview], first_byte_at: float) -> None:
        """Let requests wait behind those that wait already."""
        if self._backlog is None:
            self._backlog = deque()
        self._backlog.extend((frame, first_byte_at) for frame in frames)

    def read_on(self) -> None:
        """Resume reading: the budget has room again, or this session may pass."""
        self._is_let_go = True
        self.adjust_reading()
        if not self._reading:
            # There is another reason not to read.
            self._budget.leave(self)

    def _rest(self) -> None:
        """Start no more requests in this turn of the event loop."""
        self._rests = True
        self.adjust_reading()
        asyncio.get_running_loop().call_soon(self._rest_is_over)

    def _rest_is_over(self) -> None:
        self._rests = False
        self.go_on()

    def _take_backlog(self) -> None:
        """Begin waiting requests while there is room, in an event of its own."""
        began = self._clock()
        try:
            while not self.closed and self._backlog and self._has_room() and self._clock() - began <= TURN_S:
                frame, first_byte_at = self._backlog.popleft()
                self._budget.held -= len(frame)
                if self._wanted_partitions:
                    self._begin_again(frame, first_byte_at)
                else:
                    self._begin(frame, first_byte_at)
        except CodecError as error:
            self.refuse(error)
        if not self._backlog:
            self._backlog = None
        self._takes_backlog = False
        self.go_on()

    def _let_go(self) -> None:
        """Release everything except acks=0 requests, which are kept until they are settled."""
        self._budget.arriving -= self._arriving_bytes
        slots = self._answers.slots
        held = self._arriving_bytes + sum(len(frame) for frame, _ in self._backlog or ())
        self._arriving_bytes = 0
        for slot in slots:
            held += slot.frame_bytes
            slot.frame_bytes = 0
        slots.clear()
        self._budget.held -= held
        self._budget.leave(self)
