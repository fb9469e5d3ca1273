"""Simulate a network without sockets: bytes on a connection take simulated time, and stay in order.

One end of a connection is the proxy's: a transport like asyncio's, with the protocol of the product's code. The other
is a client's or a broker's (`FarEnd`), which are part of the simulation and receive bytes as they come.

The kernel accepts bytes that the proxy writes at once, unless the connection is stalled, and they arrive later. An
`abort` loses the bytes on their way to the other end, so that none of them arrives after those of a later connection.
Bytes to the proxy may arrive in two pieces. Times are multiples of a tenth of a microsecond, so that rounding
does not make two worlds different.
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import Context
from heapq import heappop, heappush
from typing import Any, Final, Protocol

from kproxy_codec.primitives import Buffer
from tests.simulation.dice import Dice, What
from tests.support.models.simulated_loop import NeverRests, SimulatedLoop

TICKS_PER_S: Final = 10_000_000
# The limit of callbacks in one moment, more than any needs.
MOST_AT_ONCE: Final = 50_000
# As asyncio's: above it a transport asks for a pause.
HIGH_WATER_BYTES: Final = 64 << 10


class _Call:
    """A scheduled callback; asyncio's handle, reduced to the methods in use."""

    __slots__ = ("_when", "args", "callback", "context", "is_cancelled")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None, when: float = 0.0
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self.is_cancelled = False
        self._when = when

    def cancel(self) -> None:
        self.is_cancelled = True
        self.callback, self.args = _do_nothing, ()

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self._when


def _do_nothing() -> None:
    """The callback of a cancelled call."""


class NetworkLoop(SimulatedLoop):
    """An event loop whose clock stands still while anything can run; `dial` implements `create_connection`."""

    def __init__(self) -> None:
        self.now = 0.0
        self._ticks = 0
        self._calls: deque[_Call] = deque()
        self._later: list[tuple[int, int, _Call]] = []
        self._count = 0
        self.dial: Callable[..., Any] | None = None
        super().__init__(lambda: self.now)

    def time(self) -> float:
        return self.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        call = _Call(callback, args, context)
        self._calls.append(call)
        return call

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        call = _Call(callback, args, context, when)
        ticks = int(when * TICKS_PER_S + 0.5)
        if ticks <= self._ticks:
            # A timer less than half a tick away runs in the next tick: otherwise time would never reach it.
            ticks = self._ticks + (when > self.now)
        self._count = count = self._count + 1
        heappush(self._later, (ticks, count, call))
        return call

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        if self.dial is None:
            raise ConnectionRefusedError("there is no network")
        connected: tuple[asyncio.Transport, asyncio.BaseProtocol] = await self.dial(protocol_factory, host, port)
        return connected

    def run(self, until: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Let time pass until `until`, or until `is_over`, which is called before time passes."""
        outer, self._running = events._get_running_loop(), True
        events._set_running_loop(self)
        try:
            self._go(int(until * TICKS_PER_S), is_over)
        finally:
            self._running = False
            events._set_running_loop(outer)

    def _go(self, until_ticks: int, is_over: Callable[[], bool]) -> None:
        calls, later = self._calls, self._later
        while True:
            for _ in range(MOST_AT_ONCE):
                if not calls:
                    break
                call = calls.popleft()
                if not call.is_cancelled:
                    try:
                        if call.context is None:
                            call.callback(*call.args)
                        else:
                            call.context.run(call.callback, *call.args)
                    except Exception as error:  # noqa: BLE001 - whoever runs the loop looks at them
                        self.errors.append({"message": "escaped into the event loop", "exception": error})
            else:
                raise NeverRests(f"it does not come to rest at {self.now}: {calls[0].callback!r}")
            if is_over():
                return
            if not later or later[0][0] > until_ticks:
                self._ticks = max(self._ticks, until_ticks)
                self.now = self._ticks / TICKS_PER_S
                return
            self._ticks = ticks = later[0][0]
            self.now = ticks / TICKS_PER_S
            while later and later[0][0] == ticks:
                calls.append(heappop(later)[2])

    @property
    def open_tasks(self) -> list[asyncio.Task[Any]]:
        return [task for task in self._tasks if not task.done()]


class FarEnd(Protocol):
    """The simulated end of a connection."""

    def got(self, data: bytes, written_at: float) -> None:
        """Receive data that the proxy wrote at `written_at`."""
        ...

    def ended(self, *, reset: bool) -> None:
        """The proxy sends nothing more; with `reset` it reads nothing more either."""
        ...

    def fed(self, total: int, now: float) -> None:
        """The proxy continues to read, up to `total` bytes since the start."""
        ...


_END: Final = object()
_RESET: Final = object()


class SimulatedTransport(asyncio.Transport):
    """The proxy's end of one connection; it keeps what it `sent` with the times.

    `key` names the connection in draws. A message takes `latency_s` and up to `jitter_s` more; a share of `cuts` of the
    messages to the proxy come in two pieces.
    """

    def __init__(
        self,
        loop: NetworkLoop,
        dice: Dice,
        key: int,
        far: FarEnd,
        *,
        latency_s: float,
        jitter_s: float,
        cuts: float,
        peername: tuple[str, int],
    ) -> None:
        super().__init__({"peername": peername})
        self.key = key
        self.sent: list[tuple[float, bytes]] = []
        self.is_lost = False
        self._loop = loop
        self._dice = dice
        self._far = far
        self._latency_s = latency_s
        self._jitter_s = jitter_s
        self._cuts = cuts
        self._protocol: Any = None
        # For bytes to the other end: those written in this moment, and the latest arrival time.
        self._parcel: list[bytes] = []
        self._parcel_at = -1.0
        self._out_at = 0.0
        self._is_stalled = False
        self._buffer: list[tuple[bytes, float]] = []
        self._buffered_bytes = 0
        self._presses = False
        self._is_closing = False
        self._has_ended = False
        self._is_dead = False
        # For bytes from the other end: the latest arrival time, and the rest.
        self._in_at = 0.0
        self._is_paused = False
        self._inbound: deque[object] = deque()
        self._fed_bytes = 0
        self._far_ended = False

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        protocol.connection_made(self)

    # To the other end

    def write(self, data: Buffer) -> None:
        if self._is_closing or self._has_ended or not len(data):
            return
        written = bytes(data)
        self.sent.append((self._loop.now, written))
        if self._is_stalled:
            self._buffer.append((written, self._loop.now))
            self._buffered_bytes += len(written)
            if self._buffered_bytes > HIGH_WATER_BYTES and not self._presses:
                self._presses = True
                self._protocol.pause_writing()
        else:
            self._ship(written, self._loop.now)

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        self.write(b"".join(list_of_data))

    def _arrival(self) -> float:
        now = self._loop.now
        at = now + (self._latency_s + self._jitter_s * self._dice.at(What.JITTER, self.key, now))
        if at > self._out_at:
            self._out_at = at
        return self._out_at

    def _ship(self, data: bytes, written_at: float) -> None:
        now = self._loop.now
        if self._parcel_at == now:
            self._parcel.append(data)
            return
        self._parcel_at = now
        self._parcel = [data]
        self._loop.call_at(self._arrival(), self._deliver, self._parcel, written_at)

    def _deliver(self, parcel: list[bytes], written_at: float) -> None:
        if not self._is_dead:
            self._far.got(parcel[0] if len(parcel) == 1 else b"".join(parcel), written_at)

    def _deliver_end(self) -> None:
        if not self._is_dead:
            self._far.ended(reset=False)

    def write_eof(self) -> None:
        if not self._has_ended and not self._is_closing:
            self._has_ended = True
            self._send_end()

    def can_write_eof(self) -> bool:
        return True

    def _send_end(self) -> None:
        if not self._is_stalled:
            self._loop.call_at(self._arrival(), self._deliver_end)

    def get_write_buffer_size(self) -> int:
        return self._buffered_bytes

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        if not self._buffer:
            self._send_end()
            self._lose(None)

    def abort(self) -> None:
        self._is_closing = True
        self._buffer, self._buffered_bytes = [], 0
        if not self._is_dead and not self.is_lost:
            self._is_dead = True
            self._loop.call_soon(self._far_is_reset)
        self._lose(None)

    def _far_is_reset(self) -> None:
        self._far.ended(reset=True)

    def _lose(self, error: Exception | None) -> None:
        if not self.is_lost:
            self.is_lost = True
            self._loop.call_soon(self._protocol.connection_lost, error)

    def stall(self) -> None:
        """Let the kernel accept no more bytes."""
        self._is_stalled = True

    def flow(self) -> None:
        """Let the kernel accept bytes again."""
        if not self._is_stalled:
            return
        self._is_stalled = False
        buffer, self._buffer, self._buffered_bytes = self._buffer, [], 0
        if self._is_dead:
            return
        for data, written_at in buffer:
            self._ship(data, written_at)
        if self._has_ended or self._is_closing:
            self._send_end()
        if self._is_closing:
            self._lose(None)
        elif self._presses:
            self._presses = False
            self._protocol.resume_writing()

    # From the other end, which calls these methods

    def send(self, data: bytes) -> None:
        """Send bytes to the proxy."""
        if self._far_ended or self._is_dead:
            return
        now = self._loop.now
        if self._cuts and (drawn := self._dice.at(What.CUT, self.key, now)) < self._cuts and len(data) > 1:
            at = 1 + int(self._dice.at(What.CUT_AT, self.key, now) * (len(data) - 1))
            self._send_piece(data[:at], 0.0)
            self._send_piece(data[at:], drawn / self._cuts * 0.002)
        else:
            self._send_piece(data, 0.0)

    def _send_piece(self, data: object, more_s: float) -> None:
        now = self._loop.now
        at = now + (self._latency_s + self._jitter_s * self._dice.at(What.JITTER, -self.key, now))
        if at < self._in_at:
            at = self._in_at
        self._in_at = at = at + more_s
        self._loop.call_at(at, self._arrive, data)

    def end(self) -> None:
        """Close the other end, which sends nothing more."""
        if not self._far_ended:
            self._far_ended = True
            self._send_piece(_END, 0.0)

    def reset(self) -> None:
        """Reset the connection from the other end: bytes on their way to it are lost, its own bytes still arrive."""
        if not self._far_ended:
            self._far_ended = True
            self._send_piece(_RESET, 0.0)
        self._is_dead = True

    def _arrive(self, what: object) -> None:
        if self.is_lost:
            return
        if self._is_paused or self._inbound:
            self._inbound.append(what)
        elif type(what) is bytes:
            self._feed(what)
        else:
            self._take(what)

    def _take(self, what: object) -> None:
        if isinstance(what, bytes):
            self._feed(what)
        elif what is _RESET:
            self._is_closing = True
            self._buffer, self._buffered_bytes = [], 0
            self._lose(ConnectionResetError("the other end is gone"))
        elif not self._is_closing:
            if not self._protocol.eof_received():
                self.close()
        elif self._buffer:
            self.abort()

    def _feed(self, data: bytes) -> None:
        protocol = self._protocol
        while data:
            if self.is_lost or self._is_closing:
                return
            if self._is_paused:
                self._inbound.appendleft(data)
                return
            buffer = protocol.get_buffer(-1)
            count, room = len(data), len(buffer)
            if count <= room:
                buffer[:count] = data
                data = b""
            else:
                count = room
                buffer[:] = data[:room]
                data = data[room:]
            self._fed_bytes += count
            self._far.fed(self._fed_bytes, self._loop.now)
            protocol.buffer_updated(count)

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._loop.call_soon(self._take_inbound)

    def is_reading(self) -> bool:
        return not self._is_paused

    def _take_inbound(self) -> None:
        while self._inbound and not self._is_paused and not self.is_lost:
            self._take(self._inbound.popleft())
