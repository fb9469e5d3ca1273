"""The broker connections of one client connection for one purpose.

There is one per broker, dialled when first needed. Purposes are kept apart, because a broker answers a connection's
requests one after another: a JoinGroup that waits for minutes must not delay produce requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from kproxy.proxy.answer_room import Share
from kproxy.proxy.broker_connection import Upstream
from kproxy.proxy.context import ProxyContext
from kproxy.routing.topology import Address
from kproxy.security.broker_access import BrokerAccess


class NoAddress(Exception):
    """The topology has no address of a broker."""


class Client(Protocol):
    """The client connection that they serve."""

    def broker_presses(self, slow: bool) -> None:
        """A broker connection takes no more for now, or does again."""
        ...


class Connections:
    """Connections by broker, for `client`; None: for the proxy itself.

    `by_broker` has all, closed ones too until they are replaced; treat it as read-only. With a `share` their large
    answers wait for room. Brokers are accessed by `access`; None: as the proxy.
    """

    __slots__ = ("_access", "_client", "_context", "_share", "by_broker")

    def __init__(
        self,
        context: ProxyContext,
        client: Client | None = None,
        share: Share | None = None,
        *,
        access: BrokerAccess | None = None,
    ) -> None:
        self._context = context
        self._access = access or context.dialler.access
        self._client = client
        self._share = share
        self.by_broker: dict[int, Upstream] = {}

    def to(self, broker: int) -> Upstream:
        """The open connection to a broker's current address, or a new one. Raises NoAddress."""
        address = self._context.topology.address(broker)
        if address is None:
            raise NoAddress(f"broker {broker} has no address")
        upstream = self.by_broker.get(broker)
        if upstream is not None:
            _give_up_unless_at(address, upstream)
            if not upstream.closed:
                return upstream
        upstream = self.by_broker[broker] = self._dial(broker, address)
        return upstream

    def _dial(self, broker: int, address: Address) -> Upstream:
        return Upstream(
            broker,
            address,
            dialler=self._context.dialler,
            arena=self._context.arena,
            clock=self._context.clock,
            max_answer_bytes=self._context.limits.max_answer_bytes,
            connect_timeout_s=self._context.limits.connect_timeout_s + self._access.extra_s,
            access=self._access,
            dials=not self._context.health.refuses(address),
            keeper=self,
            share=self._share,
        )

    def press(self, slow: bool) -> None:
        """Report that one of them takes no more for now, or does again."""
        if self._client is not None:
            self._client.broker_presses(slow)

    def opens(self, upstream: Upstream) -> None:
        """Do nothing: what waits for one of them is sent."""

    def in_turn(self, step: Callable[[], object]) -> None:
        """Take this step of one of them in its turn of the event loop."""
        self._context.turns.take(step)

    def ended(self, upstream: Upstream) -> None:
        """Do nothing: those who wait for answers have been told."""

    def hold_back(self, holds: bool) -> None:
        """Stop reading all of them, or resume."""
        for upstream in self.by_broker.values():
            upstream.hold_back(holds)

    def rest(self) -> None:
        """Read none of them in this turn of the event loop any more."""
        resting = list(self.by_broker.values())
        for upstream in resting:
            upstream.rest(True)
        asyncio.get_running_loop().call_soon(_resume, resting)

    def give_up_moved(self) -> None:
        """Give up connections to brokers that have another address now; a broker that has left may still answer."""
        for broker, upstream in list(self.by_broker.items()):
            address = self._context.topology.address(broker)
            if address is not None:
                _give_up_unless_at(address, upstream)

    def give_up_at(self, address: Address) -> None:
        """Give up connections to a broker that hangs."""
        for upstream in list(self.by_broker.values()):
            if upstream.address == address and not upstream.closed:
                upstream.give_up("its broker hangs")

    def drop_all(self) -> None:
        """End all because of the client: nothing more is to be sent or answered."""
        for upstream in list(self.by_broker.values()):
            upstream.drop()

    @property
    def open_count(self) -> int:
        return sum(not upstream.closed for upstream in self.by_broker.values())

    async def close(self) -> None:
        """End them all; requests written with acks=0 still reach the brokers."""
        await asyncio.gather(*(upstream.close() for upstream in self.by_broker.values()))
        # They refer to this object: no reference cycle is left.
        self.by_broker.clear()


def _resume(resting: Iterable[Upstream]) -> None:
    for upstream in resting:
        upstream.rest(False)


def _give_up_unless_at(address: Address, upstream: Upstream) -> None:
    if upstream.address != address and not upstream.closed:
        upstream.give_up("its broker has another address now")
