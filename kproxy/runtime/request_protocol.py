"""Exchange one request at a time with a broker (`exchange`), as an asyncio protocol.

Every connection to a broker begins with this protocol, and connections for small requests keep it. The proxy's own
traffic continues on kproxy.proxy.broker_connection.

States: connected --the other side or `abort` ends it, or an answer is malformed--> ended. The first reason is kept, and
raised by every later `exchange`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from kproxy_codec.correlation import AwaitedAnswers
from kproxy_codec.errors import CodecError, FrameTooLarge
from kproxy_codec.foreign import answered_in
from kproxy_codec.framing import FrameReader, frame_message, is_unreferenced, request_header

# Longer answers are received into one buffer that is reused: new memory would cost more than reading them.
_SHARED_BYTES = 64 << 10


class ConnectionEnded(ConnectionError):
    """The other side has ended the connection, or speaks another protocol."""


class RequestProtocol(asyncio.BufferedProtocol):
    """One connection. `explain` makes its errors readable; `needs_tls` is the advice for a server that speaks TLS.

    `ended` is set once the connection has ended.
    """

    def __init__(
        self, client_id: bytes, max_answer_bytes: int, explain: Callable[[OSError], OSError], needs_tls: str
    ) -> None:
        self._client_id = client_id
        self._explain = explain
        self._needs_tls = needs_tls
        self._frames = FrameReader(max_answer_bytes, most_shared=_SHARED_BYTES)
        self._long = bytearray()
        self._awaited: AwaitedAnswers[asyncio.Future[memoryview]] = AwaitedAnswers(self._frames, most=1)
        self._waiting: asyncio.Future[memoryview] | None = None
        self._lost: OSError | CodecError | None = None
        self._transport: asyncio.Transport | None = None
        self.ended = asyncio.Event()

    async def exchange(
        self, api_key: int, api_version: int, body: bytes, max_answer_bytes: int | None = None
    ) -> memoryview:
        """Send an encoded body; return the whole answer, of at most `max_answer_bytes`. Raises OSError, CodecError."""
        self.check()
        if self._transport is None:
            raise RuntimeError("it is not connected")
        correlation_id = self._awaited.next_id()
        waiting = asyncio.get_running_loop().create_future()
        self._awaited.sent(correlation_id, waiting)
        self._waiting = waiting
        if max_answer_bytes is not None:
            self._frames.admit(max_answer_bytes)
        self._transport.write(
            frame_message(request_header(api_key, api_version, correlation_id, self._client_id), body)
        )
        answer: memoryview = await waiting
        return answer

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def check(self) -> None:
        """If the connection has ended, raise the reason: OSError or CodecError."""
        if self._lost is not None:
            raise self._lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._frames.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for waiting, frame in self._awaited.receive(nbytes):
                if not waiting.done():
                    waiting.set_result(frame)
        except CodecError as error:
            spoken = answered_in(error.first_bytes) if isinstance(error, FrameTooLarge) else None
            hint = f": {self._needs_tls}" if spoken is not None and spoken.startswith("TLS") else ""
            self._end(ConnectionEnded(f"it speaks {spoken}{hint}") if spoken else error)
            return
        if self._frames.announced > _SHARED_BYTES and not self._frames.has_own:
            if self._frames.announced > len(self._long) or not is_unreferenced(self._long):
                self._long = bytearray(self._frames.announced)
            self._frames.move_to(self._long)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(self._explain(exc) if isinstance(exc, OSError) else ConnectionEnded("it closed the connection"))

    def _end(self, error: OSError | CodecError) -> None:
        if self._lost is None:
            self._lost = error
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(self._lost)
            # Retrieve the error, in case nobody waits for the answer any more.
            self._waiting.exception()
        self.abort()
        self.ended.set()
