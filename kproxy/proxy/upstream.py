"""One broker connection, used by one client connection alone, so that the broker's own order per connection serves it.

States
  connecting   the dial is under way; what is sent is queued
  open         what is sent is written at once; answers come back in the order of their requests
  closed       nothing more is sent or answered

Transitions
  connecting -> open     the dial succeeded: the queue is written
  connecting -> closed   the dial failed, timed out, was given up or, for the broker hangs, not even begun: the queue is
                         lost unwritten
  open       -> closed   the broker closed, the connection broke, an answer was not the awaited one, it was given up,
                         `close` was called

Invariants
1. A ticket that expects an answer is told exactly once: `answered` or `lost`.
2. Answers are matched in order, and the correlation_id of each is verified: a broker that answers something else than
   was asked is not believed in anything, the connection is closed.
3. `lost(written=False)` is said only of what never reached the transport.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast

import structlog

from codec.errors import CodecError
from codec.framing import FrameReader, ReceiveArena
from codec.headers import response_correlation_id
from codec.partitioned import set_correlation_id
from codec.primitives import Buffer
from kproxy.proxy.outbox import Outbox
from kproxy.proxy.sockets import keep_alive
from kproxy.routing.topology import Address

log = structlog.get_logger(__name__)

# What may wait for a dial before the client is read more slowly.
MAX_QUEUED_BYTES = 1 << 20
FLUSH_S = 5.0
_MAX_CORRELATION_ID = 0x7FFF_FFFF


class Ticket(Protocol):
    """Somebody who waits for one answer."""

    expects_answer: bool

    def sent(self) -> None:
        """The request has been given to the transport; said only to tickets that expect no answer (acks=0)."""
        ...

    def answered(self, frame: memoryview) -> None:
        """The answer, a whole frame that is now the ticket's own."""
        ...

    def lost(self, *, written: bool) -> None:
        """There will be no answer; `written` says whether the broker may have seen the request."""
        ...


class Oldest(NamedTuple):
    """What a connection waits for first: the answer to a request or, None, that the kernel takes what is written."""

    correlation_id: int | None
    written: bool


class Upstream(asyncio.BufferedProtocol):
    """A connection to the broker `owner` at `address`; not `dials`: what is sent to it is lost unwritten.

    `before_open` is called before what waited for the dial is written: it may withdraw some of that.
    """

    def __init__(
        self,
        owner: int,
        address: Address,
        *,
        arena: ReceiveArena,
        max_answer_bytes: int,
        connect_timeout_s: float,
        on_pressure: Callable[[bool], None],
        dials: bool = True,
        before_open: Callable[[], object] = lambda: None,
    ) -> None:
        self.owner = owner
        self.address = address
        self.closed = False
        # What is bound on this connection (kproxy.proxy.binding): fences by topic and partition index.
        self.fences: dict[tuple[bytes, int], int] = {}
        self._reader = FrameReader(max_answer_bytes, arena)
        self._transport: asyncio.Transport | None = None
        self._outbox: Outbox | None = None
        self._in_flight: deque[tuple[int, Ticket]] = deque()
        self._queue: list[tuple[Ticket, int, Sequence[Buffer]]] = []
        self._next_correlation_id = 0
        self._queued_bytes = 0
        self._on_pressure = on_pressure
        self._before_open = before_open
        self._presses = False
        self._sends_unanswered = False
        self._ended = asyncio.get_running_loop().create_future()
        self._patience: asyncio.Timeout | None = None
        self._dial = asyncio.get_running_loop().create_task(self._connect(connect_timeout_s if dials else None))

    # Sending

    def next_correlation_id(self) -> int:
        self._next_correlation_id = (self._next_correlation_id + 1) & _MAX_CORRELATION_ID
        return self._next_correlation_id

    def forward(self, ticket: Ticket, frame: memoryview) -> None:
        """Send a whole request as it came, but for its correlation_id. Not to be called when closed."""
        correlation_id = self._next_correlation_id = (self._next_correlation_id + 1) & _MAX_CORRELATION_ID
        set_correlation_id(frame, correlation_id)
        if self._outbox is None or not ticket.expects_answer:
            self.send(ticket, correlation_id, [frame])
            return
        self._in_flight.append((correlation_id, ticket))
        self._outbox.put_one(frame)

    def send(self, ticket: Ticket, correlation_id: int, buffers: Sequence[Buffer]) -> None:
        """Send one request. Not to be called when closed."""
        if self._outbox is None:
            self._queue.append((ticket, correlation_id, buffers))
            self._queued_bytes += sum(map(len, buffers))
            self._press(self._queued_bytes > MAX_QUEUED_BYTES)
            return
        if ticket.expects_answer:
            self._in_flight.append((correlation_id, ticket))
        self._outbox.put(buffers)
        if not ticket.expects_answer:
            self._sends_unanswered = True
            ticket.sent()

    def unanswered(self) -> list[Ticket]:
        """Who waits, written or not, in order."""
        return [ticket for _, ticket in self._in_flight] + [ticket for ticket, _, _ in self._queue]

    def oldest_unanswered(self) -> Ticket | None:
        """Whose answer is the next to come."""
        return self._in_flight[0][1] if self._in_flight else None

    def oldest(self) -> Oldest | None:
        """What is waited for first; None where nothing is."""
        if self._in_flight:
            return Oldest(self._in_flight[0][0], written=True)
        if self._queue:
            return Oldest(self._queue[0][1], written=False)
        return Oldest(None, written=False) if self._presses and not self.closed else None

    @property
    def holds_unanswered(self) -> bool:
        """Whether something that has no answer (acks=0) may still be in this process."""
        return self._sends_unanswered and self._transport is not None and self._transport.get_write_buffer_size() > 0

    def withdraw(self, is_meant: Callable[[Ticket], bool]) -> list[Ticket]:
        """Take back what is meant and has not been written."""
        kept, withdrawn = [], []
        for queued in self._queue:
            if is_meant(queued[0]):
                withdrawn.append(queued[0])
                self._queued_bytes -= sum(map(len, queued[2]))
            else:
                kept.append(queued)
        if withdrawn:
            self._queue = kept
            self._press(self._queued_bytes > MAX_QUEUED_BYTES)
        return withdrawn

    async def _connect(self, timeout_s: float | None) -> None:
        if timeout_s is None:
            self._end()
            return
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s) as self._patience:
                await loop.create_connection(lambda: self, self.address.host, self.address.port)
        except (OSError, UnicodeError, TimeoutError) as error:
            # UnicodeError: a host that no name server can be asked about.
            log.info("broker cannot be reached", broker=self.owner, address=str(self.address), reason=_reason(error))
            self._end()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._before_open()
        if self.closed or self._dial.cancelling():
            cast(asyncio.Transport, transport).abort()
            return
        if self._patience is not None:
            # From here on the dial must not be cancelled: uvloop would close the handle and never say that it is lost.
            self._patience.reschedule(None)
        # uvloop's transports have the methods of asyncio.Transport but not its class.
        self._transport = cast(asyncio.Transport, transport)
        keep_alive(transport)
        self._outbox = Outbox(asyncio.get_running_loop(), self._transport)
        queue, self._queue = self._queue, []
        # What waited for the dial presses no longer; what is written now may.
        self._press(False)
        for ticket, correlation_id, buffers in queue:
            self.send(ticket, correlation_id, buffers)

    def pause_writing(self) -> None:
        self._press(True)

    def resume_writing(self) -> None:
        self._press(False)

    def _press(self, slow: bool) -> None:
        """Say once when this connection takes no more for now, and once when it does again."""
        if slow is not self._presses:
            self._presses = slow
            self._on_pressure(slow)

    # Receiving

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        in_flight = self._in_flight
        try:
            for frame in self._reader.buffer_updated(nbytes):
                if self.closed:
                    # Nobody waits any more; while the connection is being closed it is read all the same.
                    return
                answered_id = response_correlation_id(frame)
                if not in_flight or in_flight[0][0] != answered_id:
                    self._distrust_answer(answered_id)
                    return
                in_flight.popleft()[1].answered(frame)
        except CodecError as error:
            self.distrust(str(error))

    def _distrust_answer(self, answered_id: int) -> None:
        if self._in_flight:
            self.distrust(f"correlation_id {answered_id} where {self._in_flight[0][0]} was awaited")
        else:
            self.distrust(f"an answer ({answered_id}) that nobody asked for")

    def distrust(self, reason: str) -> None:
        """Close because of what the broker said."""
        log.warning("broker answered out of protocol", broker=self.owner, address=str(self.address), reason=reason)
        self._end()

    def give_up(self, reason: str) -> None:
        """Close because no answer is to be hoped for."""
        log.warning("broker connection given up", broker=self.owner, address=str(self.address), reason=reason)
        self._end()

    def drop(self) -> None:
        """Close because of the client: the broker has done nothing wrong."""
        self._end()

    # Ending

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: BaseException | None) -> None:
        if not self.closed and self._in_flight:
            log.info(
                "broker connection lost",
                broker=self.owner,
                address=str(self.address),
                unanswered=len(self._in_flight),
                reason=_reason(exc) if exc else "closed by the broker",
            )
        if not self._ended.done():
            self._ended.set_result(None)
        self._end()

    def _end(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._press(False)
        if self._transport is not None:
            self._transport.abort()
        queue, self._queue = self._queue, []
        in_flight, self._in_flight = self._in_flight, deque()
        for _, ticket in in_flight:
            ticket.lost(written=True)
        for ticket, _, _ in queue:
            ticket.lost(written=False)

    async def close(self) -> None:
        """End the connection: what was written and has no answer (acks=0) leaves this process and reaches the broker.

        What expects an answer is dropped: its client is gone and will send it again itself.
        """
        if self._sends_unanswered and self._transport is not None and self._outbox is not None and not self.closed:
            self.closed = True
            self._outbox.flush()
            # Not closed yet: answers that nobody reads would make the kernel reset the connection, and a reset drops
            # what is still on its way. The broker closes once it has read everything.
            if not self._transport.is_closing():
                # An OSError: the broker has reset the connection, and the event loop is about to say so.
                with contextlib.suppress(OSError):
                    self._transport.write_eof()
            await asyncio.wait((self._ended,), timeout=FLUSH_S)
        self.closed = True
        if self._transport is not None:
            self._transport.abort()
            await self._ended
        self._dial.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._dial


def _reason(error: BaseException) -> str:
    return "no answer to the dial in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
