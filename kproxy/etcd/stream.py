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
"""

from __future__ import annotations

import asyncio
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
        # Cancelling a gRPC read ends the call, so a late read continues and is awaited again.
        self._reading: asyncio.Task[Any] | None = None
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
        self._channel = await self._members.open_channel(self._member.endpoint)
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
        if self._call is None:
            raise EtcdUnavailable(f"The {self._method} stream of {self._members.endpoints} is not open.")
        reading = self._reading
        if reading is None:
            reading = self._reading = asyncio.ensure_future(self._call.read())
        done, _ = await asyncio.wait((reading,), timeout=timeout_s)
        self._in_vain = not done
        if not done:
            return None
        self._reading = None
        response = await self._met(reading)
        if response is grpc.aio.EOF:
            # If etcd ended it with a status, that is the reason.
            await self._met(self._call)
            self._blame_member()
            raise EtcdUnavailable(f"etcd at {self._members.endpoints} ended {self._method}.")
        return response

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
        reading, self._reading = self._reading, None
        if reading is not None:
            await asyncio.wait((reading,))
            if not reading.cancelled():
                # Retrieving the error keeps asyncio from warning; it does not matter any more.
                reading.exception()
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
