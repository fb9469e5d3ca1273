"""Keep the connections to brokers that one client connection uses for one purpose.

There is one per broker, and more for concurrent reads (`place`), dialled when first needed. Each purpose has its own,
because a broker answers a connection's requests in order: a JoinGroup may wait for minutes, and must delay no others.

The core (kproxy.routing.fanout) names a connection and a piece by number. In `NumberedConnections` a number stands for
an `Upstream`, and a piece for its ticket there.

States of a number
  unknown   before the first `numbered`, and after `take`: numbers are never used again
  in use    its upstream sends or dials
  ending    the upstream is closed; its pieces are in `_losses`, or arrive there at once

Transitions
  unknown -> in use    `numbered`
  in use  -> ending    the upstream ends: `lost` for each piece, `leave_unconfirmed` for acks=0 batches in doubt
  ending  -> unknown   `take`, in the event that reports the end to the core

Invariants
1. A piece that could not be sent any more is lost with its connection, in that connection's event.
2. Connections to addresses that brokers have left are given up before the next send. Until then they may answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from kproxy.proxy.answer_memory import ClientMemory
from kproxy.proxy.answer_reader import Ticket
from kproxy.proxy.broker_connection import Upstream
from kproxy.proxy.broker_watch import BrokerWatch
from kproxy.proxy.context import ProxyContext
from kproxy.routing.actions import Close, Loss, Send, Withdraw
from kproxy.routing.merge import Exchange, is_success
from kproxy.routing.reads import FOUND_S
from kproxy.routing.split import Selection
from kproxy.routing.topology import Address
from kproxy.security.broker_auth import BrokerAuth
from kproxy_codec.api_keys import PRODUCE

if TYPE_CHECKING:
    from kproxy.proxy.client_session import ClientSession
    from kproxy.proxy.fanout import FanoutShell


class NoAddress(Exception):
    """The topology has no address of a broker."""


class Connections:
    """Connections by broker, for `client`; None: for the proxy itself.

    `by_place` has all by broker and place, closed ones too until they are replaced; treat it as read-only. With a
    `share` their large answers wait for room. Brokers are accessed by `access`; None: as the proxy.
    """

    __slots__ = ("_access", "_client", "_context", "_share", "by_place")

    def __init__(
        self,
        context: ProxyContext,
        client: ClientSession | None = None,
        share: ClientMemory | None = None,
        *,
        access: BrokerAuth | None = None,
    ) -> None:
        self._context = context
        self._access = access or context.broker_auth
        self._client = client
        self._share = share
        self.by_place: dict[tuple[int, int], Upstream] = {}

    def to(self, broker: int, place: int = 0) -> Upstream:
        """The open connection in this place to a broker's current address, or a new one. Raises NoAddress."""
        address = self._context.topology.address(broker)
        if address is None:
            raise NoAddress(f"the address of broker {broker} is unknown")
        upstream = self.by_place.get((broker, place))
        if upstream is not None:
            _give_up_unless_at(address, upstream)
            if not upstream.closed:
                return upstream
        upstream = self.by_place[broker, place] = self._dial(self._context.brokers.at(broker, address))
        return upstream

    def _dial(self, broker: BrokerWatch) -> Upstream:
        return Upstream(
            broker,
            max_answer_bytes=self._context.limits.max_answer_bytes,
            connect_timeout_s=self._context.limits.connect_timeout_s + self._access.extra_s,
            access=self._access,
            keeper=self,
            share=self._share,
        )

    def press(self, slow: bool) -> None:
        """Report that a connection accepts no more requests for now, or accepts them again."""
        if self._client is not None:
            self._client.broker_presses(slow)

    def opens(self, upstream: Upstream) -> None:
        """Note that a connection's queued requests are about to be written; this class withdraws none."""

    def in_turn(self, step: Callable[[], object]) -> None:
        """Run this step of a connection in its turn of the event loop."""
        self._context.turns.take(step)

    def puts_off(self, upstream: Upstream) -> bool:
        """Whether a large answer that has begun to arrive is not read until `read_on`; False in this class."""
        return False

    def ended(self, upstream: Upstream) -> None:
        """Note that a connection has ended and all its tickets were called; not called by `close`."""

    def hold_back(self, holds: bool) -> None:
        """Stop reading all connections, or resume."""
        for upstream in self.by_place.values():
            upstream.hold_back(holds)

    def yield_turn(self) -> None:
        """Read no more from any connection in this turn of the event loop."""
        resting = list(self.by_place.values())
        for upstream in resting:
            upstream.yield_turn(True)
        asyncio.get_running_loop().call_soon(_resume, resting)

    def give_up_moved(self) -> None:
        """Give up connections to brokers that have another address now; a broker that has left may still answer."""
        for (broker, _), upstream in list(self.by_place.items()):
            address = self._context.topology.address(broker)
            if address is not None:
                _give_up_unless_at(address, upstream)

    def give_up_at(self, address: Address) -> None:
        """Give up connections to a broker that hangs."""
        for upstream in list(self.by_place.values()):
            if upstream.address == address and not upstream.closed:
                upstream.give_up("its broker hangs", "timeout")

    def drop_all(self) -> None:
        """End all because of the client: nothing more is to be sent or answered."""
        for upstream in list(self.by_place.values()):
            upstream.drop()

    async def close(self) -> None:
        """End all connections; requests written with acks=0 still reach the brokers."""
        await asyncio.gather(*(upstream.close() for upstream in self.by_place.values()))
        # They refer to this object: no reference cycle is left.
        self.by_place.clear()


def _resume(resting: Iterable[Upstream]) -> None:
    for upstream in resting:
        upstream.yield_turn(False)


def _give_up_unless_at(address: Address, upstream: Upstream) -> None:
    if upstream.address != address and not upstream.closed:
        upstream.give_up("its broker has another address now")


# For the core


class PieceTicket:
    """The ticket of one of the core's pieces, which the core knows by its number."""

    __slots__ = ("_connections", "api_key", "exchange", "expects_answer", "may_wait_until", "part", "piece", "upstream")

    def __init__(
        self,
        connections: NumberedConnections,
        upstream: Upstream,
        piece: int,
        exchange: Exchange,
        part: Selection | None,
        may_wait_until: float = 0.0,
    ) -> None:
        self._connections = connections
        self.upstream = upstream
        self.piece = piece
        self.exchange = exchange
        self.api_key = exchange.api.api_key
        self.part = part
        self.expects_answer = exchange.request.acks != 0
        self.may_wait_until = may_wait_until

    @property
    def sequence(self) -> int:
        return self.exchange.sequence

    def is_plain(self, frame: memoryview) -> bool:
        """Whether an answer concerns no other request: it is full success for the piece, or answers a read."""
        return not self.exchange.is_ordered or is_success(self.exchange, self.part, frame)

    def answered(self, frame: memoryview) -> None:
        self._connections.shell.answered(self, frame)

    def sent(self) -> None:
        if self.upstream.closed:
            self._connections.lost(self, Loss.LEFT)
        else:
            self._connections.shell.left(self)

    def unconfirmed(self) -> None:
        self._connections.leave_unconfirmed(self.upstream)

    def lost(self, *, written: bool) -> None:
        self._connections.lost(self, Loss.WRITTEN if written else Loss.UNWRITTEN)


class NumberedConnections(Connections):
    """The connections of one client's core; until they are closed, `shell` gets the events."""

    __slots__ = ("_doubted", "_is_closed", "_losses", "shell", "unread", "upstreams", "version")

    def __init__(
        self,
        context: ProxyContext,
        client: ClientSession,
        shell: FanoutShell,
        share: ClientMemory,
        access: BrokerAuth | None,
    ) -> None:
        super().__init__(context, client, share, access=access)
        self.shell = shell
        self.upstreams: dict[int, Upstream] = {}
        # Pieces lost by ending connections, until the core knows; and connections with acks=0 batches in doubt.
        self._losses: dict[int, list[tuple[int, Loss]]] = {}
        self._doubted: tuple[int, ...] = ()
        # The connections with a large answer that is not read while the client has no read, and since when.
        self.unread: tuple[tuple[Upstream, float], ...] = ()
        # The topology's version at the last `follow`.
        self.version = -1
        self._is_closed = False

    def numbered(self, number: int, broker: int, reader: int = 0) -> Upstream:
        """The connection with this number; if there is none yet, the one to `broker` in this place for reads gets it.

        Raises NoAddress.
        """
        upstream = self.upstreams.get(number)
        if upstream is None:
            upstream = self.upstreams[number] = self.to(broker, reader)
            upstream.number = number
        return upstream

    def follow(self) -> None:
        """Give up connections to addresses that brokers have left; to be called before a send (invariant 2)."""
        version = self._context.topology.version
        if version != self.version:
            self.version = version
            self.give_up_moved()

    def opens(self, upstream: Upstream) -> None:
        # The dial of a connection that was given up and replaced may end after `close`.
        if not self._is_closed:
            self.shell.before_open(upstream)
            for ticket in upstream.queued():
                self._hand_over(ticket)

    def ended(self, upstream: Upstream) -> None:
        if not self._is_closed:
            self.shell.ended(upstream)

    # Sending

    def send(self, action: Send) -> None:
        """Write a piece, or queue it for the dial."""
        upstream = self.upstreams[action.connection]
        if upstream.closed:
            # An earlier action has ended the connection.
            self._losses[action.connection].append((action.piece, Loss.UNWRITTEN))
            return
        exchange, part = action.exchange, action.part
        may_wait_until = self._context.clock() + exchange.wait_s if exchange.wait_s else 0.0
        ticket = PieceTicket(self, upstream, action.piece, exchange, part, may_wait_until)
        if upstream.is_open:
            self._hand_over(ticket)
        if part is None:
            upstream.forward(ticket, exchange.request.frame)
        else:
            correlation_id = upstream.next_correlation_id()
            upstream.send(
                ticket, correlation_id, exchange.splitter(action.shares, action.least_bytes).part(part, correlation_id)
            )

    def _hand_over(self, ticket: Ticket) -> None:
        """Note that a piece of a request is written now."""
        if self._client is not None and ticket.api_key == PRODUCE:
            self._client.handed_over(ticket.sequence)

    def withdraw(self, action: Withdraw) -> None:
        """Take back pieces that wait for a dial."""
        upstream = self.upstreams[action.connection]
        upstream.withdraw(lambda ticket: isinstance(ticket, PieceTicket) and ticket.piece in action.pieces)

    def replace(self, tickets: Mapping[Ticket, Ticket]) -> None:
        """Replace tickets that wait for answers, or to be written."""
        for upstream in self.upstreams.values():
            upstream.replace(tickets)

    # Large answers to reads

    def puts_off(self, upstream: Upstream) -> bool:
        # An answer that the next read may not want must not take memory for long: it waits in the kernel.
        ticket = upstream.oldest_unanswered()
        if self.shell.is_reading or not isinstance(ticket, PieceTicket) or not ticket.exchange.is_read:
            return False
        self.unread += ((upstream, self._context.clock()),)
        return True

    def read_on(self) -> None:
        """Read the answers that were put off: the client has a read."""
        unread, self.unread = self.unread, ()
        for upstream, _ in unread:
            upstream.read_on()

    def drop_unread(self, now: float) -> None:
        """End connections whose answer was put off for too long."""
        old = [upstream for upstream, since in self.unread if now >= since + FOUND_S]
        self.unread = tuple(each for each in self.unread if each[0] not in old)
        for upstream in old:
            upstream.drop()

    # Waiting pieces

    def oldest_pieces(self) -> dict[int, int]:
        """By number, the piece whose answer comes next."""
        return {
            number: ticket.piece
            for number, upstream in self.upstreams.items()
            if isinstance(ticket := upstream.oldest_unanswered(), PieceTicket)
        }

    def receiving(self) -> set[int]:
        """The numbers of connections on which an answer has begun to arrive, or that are not read for now."""
        return {number for number, upstream in self.upstreams.items() if upstream.is_receiving}

    # Ending

    def end(self, action: Close) -> None:
        """End a connection."""
        upstream = self.upstreams[action.connection]
        if action.is_untrue:
            upstream.distrust(action.reason)
        elif action.reason:
            upstream.give_up(action.reason, "timeout")
        else:
            upstream.drop()

    def lost(self, ticket: PieceTicket, loss: Loss) -> None:
        """Note a piece that is lost with its connection, whose end is about to be reported."""
        self._losses.setdefault(ticket.upstream.number, []).append((ticket.piece, loss))

    def leave_unconfirmed(self, upstream: Upstream) -> None:
        """Note that acks=0 batches that had left on a connection are in doubt."""
        self._doubted = (*self._doubted, upstream.number)

    def note_end(self, number: int) -> None:
        """Note that a connection has ended, and that all its pieces are known to be lost."""
        self._losses.setdefault(number, [])

    def take(self, number: int) -> tuple[list[tuple[int, Loss]], bool]:
        """Forget a connection that has ended; return its lost pieces, and whether acks=0 batches are in doubt."""
        self.upstreams.pop(number).number = 0
        is_unconfirmed = number in self._doubted
        self._doubted = tuple(each for each in self._doubted if each != number)
        return self._losses.pop(number), is_unconfirmed

    async def close(self) -> None:
        await super().close()
        self._is_closed = True
        self.upstreams.clear()
        self.unread = ()
