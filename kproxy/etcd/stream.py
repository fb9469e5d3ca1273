"""Run one bidirectional gRPC call (a watch or a keepalive) on a connection of its own.

The connection of a silent stream may be dead. gRPC detects this after 9 s, about the TTL of a lease, and would put the
next stream on the same connection. With a channel of its own, a stream is replaced together with its connection; and a
flood of events on one stream does not delay a keepalive on another.

States: NEW --the first write--> OPEN --any failure, or close()--> ENDED. The first call that meets a failure raises an
EtcdError; the creator of the stream awaits `close`.

Invariants
1. A stream goes to the first member in order when it opens, and stays there. If it fails, accepts no request, or is
   closed while an answer is overdue, its member counts as failed: the next stream goes to another.
2. Before another request on a silent stream, its member is asked for its status over another connection. So a hung
   member is detected sooner than by waiting, and a live member without events keeps its stream.
3. It is opened with the present token. A token that etcd refuses is not used again.
4. A task of its own reads ahead, AHEAD responses at most: on a busy event loop a response then costs two turns; to
   start a read, wait and wake up costs five. Cancelling a read of gRPC would end the call.
5. Beyond AHEAD responses and WINDOW_BYTES, responses stay in etcd, which combines waiting changes into few messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import grpc.aio

from kproxy.etcd.errors import EtcdUnavailable, cancelled_by_grpc, from_rpc_error, is_token_refused
from kproxy.etcd.members import CONNECT_TIMEOUT_S, CallFailed, metadata
from kproxy.etcd.messages import PACKAGE, rpc

if TYPE_CHECKING:
    from kproxy.etcd.credentials import Token
    from kproxy.etcd.members import Member, Members

_Result = TypeVar("_Result")

# Responses that wait for their reader.
AHEAD = 8
# Small, because etcd cannot combine changes that it has sent. A longer message is still received.
WINDOW_BYTES = 16_384


class EtcdStream:
    """A call of `service`/`method`.

    One task at a time may write and one may read. The first read follows the first write.
    """

    def __init__(
        self, members: Members, token: Token, service: str, method: str, *, on_close: Callable[[EtcdStream], None]
    ) -> None:
        self._members = members
        self._tokens = token
        self._service = service
        self._method = method
        self._on_close = on_close
        self._member: Member | None = None
        self._token = ""
        self._channel: Any = None
        self._call: Any = None
        self._arrived: deque[Any] = deque()
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._in_vain = False

    async def write(self, request: Any, timeout_s: float) -> None:
        """Send a request. Raises EtcdUnavailable if there is no connection, or no room, within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                if self._call is None:
                    await self._open()
                elif self._in_vain:
                    await self._look_at_member()
                await self._met(self._call.write(request))
        except TimeoutError:
            self._in_vain = True
            where = self._members.endpoints
            raise EtcdUnavailable(f"etcd at {where} accepted no {self._method} within {timeout_s:g} s.") from None

    async def _open(self) -> None:
        self._token = await self._tokens.get()
        self._member = self._members.in_order()[0]
        self._channel = await self._members.open_channel(self._member.endpoint, window_bytes=WINDOW_BYTES)
        open_call = self._channel.stream_stream(
            f"/{PACKAGE}.{self._service}/{self._method}",
            request_serializer=getattr(rpc, f"{self._method}Request").SerializeToString,
            response_deserializer=getattr(rpc, f"{self._method}Response").FromString,
        )
        # If nothing listens the call fails at once, and the next stream goes to another member.
        self._call = open_call(metadata=metadata(self._token), wait_for_ready=False)

    async def _look_at_member(self) -> None:
        if self._member is not None:
            try:
                await self._member.look(CONNECT_TIMEOUT_S)
            except CallFailed as failure:
                raise failure.as_etcd_error(self._method, self._members.endpoints, write=False) from failure

    async def read(self, timeout_s: float) -> Any | None:
        """The next response, or None if none came within `timeout_s`. A timeout loses no response."""
        # Keep both: `close` may be called while this method waits.
        call, reader = self._call, self._reader
        if call is None:
            raise EtcdUnavailable(f"The {self._method} stream of {self._members.endpoints} is not open.")
        if reader is None:
            reader = self._reader = asyncio.create_task(self._read_ahead(call), name="etcd-stream-read")
        if not self._arrived and not reader.done():
            self._news.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
            except TimeoutError:
                self._in_vain = True
                return None
        self._in_vain = False
        if not self._arrived:
            await self._met(reader)
            # If etcd ended the call with a status, raise it.
            await self._met(call)
            self._blame_member()
            raise EtcdUnavailable(f"etcd at {self._members.endpoints} ended {self._method}.")
        self._room.set()
        return self._arrived.popleft()

    async def _read_ahead(self, call: Any) -> None:
        """Read until the call ends, for whatever reason."""
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                self._arrived.append(response)
                self._news.set()
                if len(self._arrived) >= AHEAD:
                    self._room.clear()
                    await self._room.wait()
        finally:
            self._news.set()

    def refused(self, words: str) -> None:
        """Note that etcd refused a request, with this text. If the token may be the reason, do not use it again."""
        # Before 3.6 etcd answers "permission denied" to a watch with an expired token.
        if is_token_refused(words) or "permission denied" in words:
            self._tokens.refused(self._token)

    async def close(self) -> None:
        """End the call and its connections. May be called twice."""
        self._on_close(self)
        if self._in_vain:
            self._blame_member()
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
            await asyncio.wait((reader,))
            if not reader.cancelled():
                # Retrieve the error, which no longer matters, so that asyncio does not warn.
                reader.exception()
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(grace=None)

    def _blame_member(self) -> None:
        if self._member is not None:
            self._members.failed(self._member)
        self._in_vain = False

    async def _met(self, step: Awaitable[_Result]) -> _Result:
        """Await `step`. Convert a failure to an EtcdError, and record it against the member or the token."""
        try:
            return await step
        except grpc.aio.AioRpcError as error:
            if not is_token_refused(error.details() or ""):
                self._blame_member()
            self.refused(error.details() or "")
            raise from_rpc_error(error, self._method, self._members.endpoints, write=False) from error
        except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            self._blame_member()
            raise EtcdUnavailable(f"etcd at {self._members.endpoints} ended {self._method}: {error}") from error
        except asyncio.CancelledError:
            if cancelled_by_grpc():
                raise EtcdUnavailable(f"The {self._method} stream of {self._members.endpoints} was closed.") from None
            raise
