"""Serve one client's connection: read its requests, and write the answers in the same order.

One request is served at a time, as in Kafka's own broker.

States
  idle      no request is being served; a request that needs no wait is served within `buffer_updated`
  serving   one task works on a request that waits for something; requests behind it queue
  closing   the transport is closed or closing; the answer to a request still being served is dropped

Transitions
  idle -> serving      a request needs to wait, or the client does not read its answers
  serving -> idle      the queue is empty
  any -> closing       the client left or sent an invalid request, or the broker stops

Invariants
1. Answers leave in the order of the requests; a request begins only after the one before it is answered.
2. Reading pauses while more than MAX_QUEUED_BYTES wait, so the queue holds at most that and one more read.
3. No request begins while the client leaves more than the transport's high-water mark unread.
4. An error on one connection closes that connection, with one log line, and no other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import cast

import structlog

from kproxy.address import Address
from kproxy.broker.context import Answer, Bindings, Body, CloseConnection, Request
from kproxy_codec.errors import CodecError
from kproxy_codec.foreign import foreign_protocol
from kproxy_codec.framing import FrameReader, ReceiveArena, parse_request_header, response_header
from kproxy_codec.primitives import INT32

MAX_QUEUED_BYTES = 1 << 20
WRITE_HIGH_WATER_BYTES = 1 << 20
# Up to this size one copy costs less than several writes.
MAX_JOINED_BYTES = 64 << 10

Serve = Callable[[Request], Answer]
_logger = structlog.get_logger(__name__)


class ClientConnection(asyncio.BufferedProtocol):
    """The protocol of one accepted connection. `bindings` are the fences of its client's writes."""

    def __init__(
        self,
        serve: Serve,
        arena: ReceiveArena,
        max_frame_bytes: int,
        on_opened: Callable[[ClientConnection], bool],
        on_closed: Callable[[ClientConnection], None],
        on_queued: Callable[[], None] = lambda: None,
        *,
        explain: Callable[[CodecError], str] | None = None,
    ) -> None:
        """`on_opened` may return False: the connection is closed at once. `on_closed` is called once, when it is gone.
        `on_queued` is called when a request arrives behind one that is being served. `explain` returns the reason to
        log for malformed bytes; if it is None, a client of another protocol is answered in that protocol.
        """
        self._serve = serve
        self._reader = FrameReader(max_frame_bytes, arena)
        self._on_opened = on_opened
        self._on_closed = on_closed
        self._on_queued = on_queued
        self._explain = explain
        self.bindings: Bindings = {}
        self._transport: asyncio.Transport | None = None
        self._peer = ""
        self._closing = False
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._reading_paused = False
        self._writable: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None] | None = None

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        peer = transport.get_extra_info("peername")
        self._peer = str(Address(*peer[:2]) if isinstance(peer, tuple) else peer)
        if not self._on_opened(self):
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._closing = True
        self._queue.clear()
        if self.task is not None:
            self.task.cancel()
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._on_closed(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        try:
            frames = self._reader.buffer_updated(nbytes)
        except CodecError as error:
            self._refuse_bytes(error)
            return
        for frame in frames:
            if self._closing:
                return
            if self.task is None and self._writable is None:
                self._begin(frame)
            else:
                self._enqueue(frame)
        if self._queue and self.task is None and not self._closing:
            self._start(self._serve_queue())

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    # Serving

    def admit(self, max_frame_bytes: int) -> None:
        """Change the limit on the client's frames."""
        self._reader.admit(max_frame_bytes)

    def _begin(self, frame: memoryview) -> None:
        """Serve a request in this step if it needs no wait."""
        try:
            request = Request(frame, parse_request_header(frame), self.bindings)
            result = self._look_at(request)
        except (CodecError, CloseConnection) as error:
            self.refuse(str(error))
            return
        if isinstance(result, Awaitable):
            self._start(self._serve_waiting(request, result))
        else:
            self._answer(request, result)

    def _look_at(self, request: Request) -> Answer:
        try:
            return self._serve(request)
        except CloseConnection as error:
            self._answer(request, error.answer)
            raise

    def _start(self, work: Awaitable[None]) -> None:
        self.task = asyncio.ensure_future(self._guard(work))

    async def _guard(self, work: Awaitable[None]) -> None:
        """Run this connection's one task; its exceptions end only this connection."""
        try:
            await work
        except (CodecError, CloseConnection) as error:
            self.refuse(str(error))
        except Exception:  # the boundary: one connection's error must not reach others
            _logger.exception("request failed", client=self._peer)
            self.abort()
        finally:
            self.task = None

    async def _serve_waiting(self, request: Request, result: Awaitable[Body | None]) -> None:
        self._answer(request, await result)
        await self._serve_queue()

    async def _serve_queue(self) -> None:
        while True:
            if self._writable is not None:
                await self._writable
            if not self._queue or self._closing:
                return
            frame = self._queue.popleft()
            self._queued_bytes -= len(frame)
            request = Request(frame, parse_request_header(frame), self.bindings)
            result = self._look_at(request)
            self._answer(request, await result if isinstance(result, Awaitable) else result)
            self._resume_reading()

    def _enqueue(self, frame: memoryview) -> None:
        self._queue.append(frame)
        self._queued_bytes += len(frame)
        if self._queued_bytes > MAX_QUEUED_BYTES and not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()
        self._on_queued()

    def _resume_reading(self) -> None:
        if self._reading_paused and self._queued_bytes <= MAX_QUEUED_BYTES and self._transport is not None:
            self._reading_paused = False
            self._transport.resume_reading()

    def _answer(self, request: Request, body: Body | None) -> None:
        if body is None or self._transport is None:
            return
        api_key, api_version, correlation_id = request.header[:3]
        head = response_header(api_key, api_version, correlation_id)
        length = len(head) + sum(map(len, body))
        parts = [INT32.pack(length), head, *body]
        if length <= MAX_JOINED_BYTES:
            self._transport.write(b"".join(parts))
        else:
            self._transport.writelines(parts)

    # Ending

    def _refuse_bytes(self, error: CodecError) -> None:
        """Close after malformed bytes; answer a client of another protocol in that protocol."""
        if self._explain is not None:
            self.refuse(self._explain(error))
            return
        stranger = foreign_protocol(error)
        if stranger is None or self._closing or self._transport is None:
            self.refuse(str(error))
            return
        _logger.warning(
            "client speaks another protocol",
            most_a_minute=1,
            bounded_by="protocol",
            client=self._peer,
            protocol=stranger.protocol,
            reason=str(stranger),
        )
        if stranger.reply and self.task is None and self._writable is None:
            self._transport.write(stranger.reply)
        self.close()

    def refuse(self, reason: str) -> None:
        """Close, and log the reason once."""
        if not self._closing:
            _logger.warning("client connection closed", client=self._peer, reason=reason)
            self.close()

    def abort(self) -> None:
        """Close without waiting for the client to read its answers."""
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Begin no more requests, and close when all written answers have been sent."""
        self._closing = True
        if self._transport is not None:
            self._transport.close()
