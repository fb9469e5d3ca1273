"""One bidirectional call, on a connection of its own.

A stream that has gone quiet may sit on a connection that died without a word. gRPC finds that out after 9 s, about what
a lease lives, and would put the next stream on the same connection. With a channel of its own a stream that is
replaced is replaced with its connection; and an event flood on one does not hold up a keepalive on another.

States: NEW --the first write--> OPEN --any failure, or close()--> ENDED. A failure is reported by whichever call meets
it first, as an EtcdError; whoever opened the stream awaits `close`.

Invariants
1. A stream goes to the member whose turn it is when it opens, and stays there. One that fails, that takes nothing, or
   that is closed while an answer is waited for in vain, is a failure of its member: the next stream goes to another.
2. Whoever asks again on a stream that has said nothing, asks its member first how it is, over another connection: so a
   member that hangs is found out sooner than by waiting, and one with nothing to say is left in peace.
3. It is opened with the token of that moment. A token that etcd refuses is not used again.
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
    """A call of `service`/`method`. One task at a time writes, one reads, and not before the first write."""

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
        # Cancelling a gRPC read ends the call, so a read that was not in time goes on and is waited for again.
        self._reading: asyncio.Task[Any] | None = None
        self._in_vain = False

    async def write(self, request: Any, timeout_s: float) -> None:
        """Hand over a request; EtcdUnavailable if there is no connection, or no room, within `timeout_s`."""
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
        # Where nobody listens it fails at once, and the next stream goes elsewhere.
        self._call = open_call(metadata=metadata(self._token), wait_for_ready=False)

    async def _look_at_member(self) -> None:
        if self._member is not None:
            try:
                await self._member.look(CONNECT_TIMEOUT_S)
            except CallFailed as failure:
                raise failure.as_etcd_error(self._method, self._members.endpoints, write=False) from failure

    async def read(self, timeout_s: float) -> Any | None:
        """The next response, or None where none came within `timeout_s`; nothing is lost by that."""
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
            # Where etcd ended it with a status, that is the reason.
            await self._met(self._call)
            self._blame_member()
            raise EtcdUnavailable(f"etcd at {self._members.endpoints} ended {self._method}.")
        return response

    def refused(self, words: str) -> None:
        """etcd refused what was asked on this stream, in `words`: where the token may be why, it is not used again."""
        # Before 3.6 a watch with a token that ran out is said not to be permitted.
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
                # Whatever it says is of no interest any more; asking keeps asyncio from warning.
                reading.exception()
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(grace=None)

    def _blame_member(self) -> None:
        if self._member is not None:
            self._members.failed(self._member)
        self._in_vain = False

    async def _met(self, step: Awaitable[_Result]) -> _Result:
        """What `step` gives; a failure as an EtcdError, with what has to be remembered of it."""
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
