"""One bidirectional call, on a connection of its own.

A stream that has gone quiet may sit on a connection that died without a word. gRPC finds that out after 9 s, about what
a lease lives, and would put the next stream on the same connection. With a channel of its own a stream that is
replaced is replaced with its connection; and an event flood on one does not hold up a keepalive on another.

States: OPEN --any failure, or close()--> ENDED. A failure is reported by whichever call meets it first, as an
EtcdError; whoever opened the stream awaits `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio

from kproxy.ownership.etcd.errors import EtcdUnavailable, cancelled_by_grpc, from_rpc_error
from kproxy.ownership.etcd.messages import PACKAGE, rpc


class EtcdStream:
    """An open call of `service`/`method`. One task at a time writes, one reads."""

    def __init__(
        self, channel: Any, endpoints: str, service: str, method: str, *, on_close: Callable[[EtcdStream], None]
    ) -> None:
        self._channel = channel
        self._endpoints = endpoints
        self._method = method
        self._on_close = on_close
        open_call = channel.stream_stream(
            f"/{PACKAGE}.{service}/{method}",
            request_serializer=getattr(rpc, f"{method}Request").SerializeToString,
            response_deserializer=getattr(rpc, f"{method}Response").FromString,
        )
        # `hasleader` makes a member that has lost its leader end the stream instead of staying silent.
        self._call = open_call(metadata=(("hasleader", "true"),), wait_for_ready=True)
        # Cancelling a gRPC read ends the call, so a read that was not in time goes on and is waited for again.
        self._reading: asyncio.Task[Any] | None = None

    async def write(self, request: Any, timeout_s: float) -> None:
        """Hand over a request; EtcdUnavailable if there is no connection, or no room, within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                with self._errors():
                    await self._call.write(request)
        except TimeoutError:
            raise EtcdUnavailable(f"etcd at {self._endpoints} took no {self._method} within {timeout_s:g} s.") from None

    async def read(self, timeout_s: float) -> Any | None:
        """The next response, or None where none came within `timeout_s`; nothing is lost by that."""
        reading = self._reading
        if reading is None:
            reading = self._reading = asyncio.ensure_future(self._call.read())
        done, _ = await asyncio.wait((reading,), timeout=timeout_s)
        if not done:
            return None
        with self._errors():
            response = reading.result()
        self._reading = None
        if response is grpc.aio.EOF:
            with self._errors():
                # Where etcd ended it with a status, that is the reason.
                await self._call
            raise EtcdUnavailable(f"etcd at {self._endpoints} ended {self._method}.")
        return response

    async def close(self) -> None:
        """End the call and its connections. May be called twice."""
        self._on_close(self)
        self._call.cancel()
        reading, self._reading = self._reading, None
        if reading is not None:
            await asyncio.wait((reading,))
            if not reading.cancelled():
                # Whatever it says is of no interest any more; asking keeps asyncio from warning.
                reading.exception()
        await self._channel.close(grace=None)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._method, self._endpoints, write=False) from error
        except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            raise EtcdUnavailable(f"etcd at {self._endpoints} ended {self._method}: {error}") from error
        except asyncio.CancelledError:
            if cancelled_by_grpc():
                raise EtcdUnavailable(f"The {self._method} stream of {self._endpoints} was closed.") from None
            raise
