"""What one client asks beside Produce, Fetch and ListOffsets: about the cluster, groups and transactions, and claims.

Each such request is a task until it is answered; how many there are is bounded by who reads them. AT_ONCE of them are
served at a time, the rest wait in the order in which they came (a Kafka broker serves one at a time of a connection):
not all that a client pipelines is held as answers. Whatever goes wrong with one closes the client's connection, for a
request without an answer would hold up all that follow it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import structlog

from kproxy.observe.tally import OTHER_VERSION, VERSION_BITS
from kproxy.proxy.answer_order import Slot
from kproxy.proxy.broker_connection import Upstream
from kproxy.proxy.claims import MAX_CLIENT_BYTES, ClientClaims
from kproxy.proxy.connections import Connections
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.control import ControlPlane, Unanswerable
from kproxy.proxy.fanout import FanoutShell
from kproxy.proxy.versions import NOT_SERVED, Ranges
from kproxy.routing.topology import Address
from kproxy_codec import api_keys
from kproxy_codec.errors import CodecError, FrameTooLarge
from kproxy_codec.headers import RequestHeader, client_id
from kproxy_codec.primitives import Buffer

AT_ONCE: Final = 8

log = structlog.get_logger(__name__)


class Client(Protocol):
    """The connection that the requests came on."""

    peer: str

    def refuse(self, error: Exception) -> None:
        """What it asks cannot be answered: close it."""
        ...

    def abandon(self) -> None:
        """Close it without waiting for answers."""
        ...

    def sever(self, reason: str) -> None:
        """What it had claimed is another's."""
        ...

    def adjust_reading(self) -> None:
        """More, or less, of it may be read than before."""
        ...


class ControlRequests:
    """Of one `client`; what it claims holds on `connections`, for what `fanout` sends."""

    def __init__(
        self,
        context: ProxyContext,
        client: Client,
        connections: Connections,
        fanout: FanoutShell,
        on_pressure: Callable[[bool], None],
        on_offered: Callable[[Ranges], None],
    ) -> None:
        self._context = context
        self._client = client
        self._connections = connections
        self._fanout = fanout
        self._plane = ControlPlane(context, on_pressure, on_offered)
        self._client_claims: ClientClaims | None = None
        # Whether a claim is being served; there is one at a time, and what comes behind it is to see what became of it.
        self.claims = False
        self._places = asyncio.Semaphore(AT_ONCE)
        self.tasks: set[asyncio.Task[None]] = set()

    def start(self, frame: memoryview, header: RequestHeader, slot: Slot, ranges: Ranges) -> None:
        """Serve one request, whose answer goes to `slot`; `ranges` are served. Raises FrameTooLarge."""
        if header.api_key == api_keys.OWN and api_keys.OWN in ranges:
            self.claims = True
        max_bytes = self._context.limits.max_control_request_bytes
        if len(frame) > max_bytes:
            raise FrameTooLarge(
                f"a {api_keys.name_of(header.api_key)} request of {len(frame)} bytes; at most {max_bytes} are admitted"
            )
        lowest, highest = ranges.get(header.api_key, NOT_SERVED)
        version = header.api_version if lowest <= header.api_version <= highest else OTHER_VERSION
        self._context.tally.requests[header.api_key << VERSION_BITS | version] += 1
        task = asyncio.get_running_loop().create_task(self._answer(frame, header, slot))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        if self.claims:
            self._client.adjust_reading()

    async def _answer(self, frame: memoryview, header: RequestHeader, slot: Slot) -> None:
        try:
            async with self._places:
                if header.api_key == api_keys.OWN:
                    answer = await self._own(frame, header)
                else:
                    answer = await self._plane.answer(frame, header)
            slot.fill(answer)
        except (CodecError, Unanswerable) as error:
            self._client.refuse(error)
        except Exception:  # the boundary: a request without an answer would hold up all that follow it
            log.exception("a request could not be answered", request=api_keys.name_of(header.api_key))
            self._client.abandon()

    async def _own(self, frame: memoryview, header: RequestHeader) -> list[Buffer]:
        """The answer to a claim. Raises CodecError, Unanswerable."""
        own = self._context.own
        if own is None:
            raise Unanswerable("there is nothing that keeps claims")
        if self._client_claims is None:
            # It stands in every claim, and a client may call itself anything.
            called = (client_id(frame) or b"")[:MAX_CLIENT_BYTES].decode(errors="replace")
            client = f"{called}@{self._client.peer}"
            self._client_claims = ClientClaims(self._context, own, self._connections, client, self._client.sever)
            self._fanout.claims = self._client_claims
        try:
            return await self._client_claims.answer(frame, header)
        finally:
            self.claims = False
            self._client.adjust_reading()

    def give_up_broker(self, address: Address) -> None:
        """The broker there hangs."""
        self._plane.give_up_broker(address)

    @property
    def upstreams(self) -> Iterable[Upstream]:
        """Connections to brokers, open or closed."""
        return self._plane.upstreams

    @property
    def upstream_count(self) -> int:
        """Open connections to brokers."""
        return self._plane.upstream_count

    def end(self) -> None:
        """The client is gone, and what it had claimed is free."""
        if self._client_claims is not None:
            self._client_claims.end()

    async def close(self) -> None:
        """Nobody waits for answers any more."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self._plane.close()
