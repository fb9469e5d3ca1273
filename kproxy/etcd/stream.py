"""One bidirectional call, on a connection of its own.

A silent stream may be on a connection that died silently. gRPC detects that after 9 s, about the TTL of a lease, and
would put the next stream on the same connection. With a channel of its own, a stream is replaced together with its
connection; and a flood of events on one stream does not delay a keepalive on another.

States: NEW --the first write--> OPEN --any failure, or close()--> ENDED. The first call that meets a failure raises an
EtcdError; the creator of the stream awaits `close`.

Invariants
1. A stream goes to the first member in order when it opens, and stays there. A stream that fails, that takes no
   request, or that is closed while an answer is overdue, is a failure of its member: the next stream goes to another.
2. Before a further request on a silent stream its member is asked for its status, over another connection. So a hung
   member is detected sooner than by waiting, and a member without news keeps its stream.
3. It is opened with the present token. A token that etcd refuses is not used again.
4. A task of its own reads ahead, AHEAD responses at most: on a busy event loop a response costs two turns, not the five
   of starting a read, waiting for it and waking up. Cancelling a read of gRPC would end the call.
5. What neither the reader nor WINDOW_BYTES holds stays in etcd, which combines the changes that wait into few messages.
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
# Small, because etcd cannot combine what it has sent; a longer message is let through whatever its length.
WINDOW_BYTES = 16_384


class EtcdStream:
    """A call of `service`/`method`.

    One task at a time writes, one reads, and not before the first write.
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
        """Send a request.

        Raises EtcdUnavailable if there is no connection, or no room, within `timeout_s`.
        """
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
            raise EtcdUnavailable(f"etcd at {where} took no {self._method} within {timeout_s:g} s.") from None

    async def _open(self) -> None:
        self._token = await self._tokens.get()
        self._member = self._members.in_order()[0]
        self._channel = await self._members.open_channel(self._member.endpoint, window_bytes=WINDOW_BYTES)
        open_call = self._channel.stream_stream(
            f"/{PACKAGE}.{self._service}/{self._method}",
            request_serializer=getattr(rpc, f"{self._method}Request").SerializeToString,
            response_deserializer=getattr(rpc, f"{self._method}Response").FromString,
        )
        # If nothing listens it fails at once, and the next stream goes elsewhere.
        self._call = open_call(metadata=metadata(self._token), wait_for_ready=False)

    async def _look_at_member(self) -> None:
        if self._member is not None:
            try:
                await self._member.look(CONNECT_TIMEOUT_S)
            except CallFailed as failure:
                raise failure.as_etcd_error(self._method, self._members.endpoints, write=False) from failure

    async def read(self, timeout_s: float) -> Any | None:
        """The next response, or None if none came within `timeout_s`.

        No response is lost by that.
        """
        # `close` may come while this waits.
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
            # If etcd ended it with a status, that is the reason.
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
        """etcd refused a request on this stream, in `words`: if the token may be the reason, do not use it again."""
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
                # Retrieving the error keeps asyncio from warning; it does not matter any more.
                reader.exception()
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(grace=None)

    def _blame_member(self) -> None:
        if self._member is not None:
            self._members.failed(self._member)
        self._in_vain = False

    async def _met(self, step: Awaitable[_Result]) -> _Result:
        """The result of `step`. Convert a failure to an EtcdError, and blame the member or the token for it."""
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
