"""The broker connections of one client's core, by the core's numbers, and the pieces on them.

The core (kproxy.routing.fanout) names a connection and a piece by number. Here a number stands for an `Upstream`, and a
piece for its ticket there.

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

from collections.abc import Mapping
from typing import Protocol

from kproxy.proxy.answer_reader import Ticket
from kproxy.proxy.answer_room import Share
from kproxy.proxy.broker_connection import Upstream
from kproxy.proxy.connections import Client, Connections
from kproxy.proxy.context import ProxyContext
from kproxy.routing.actions import Close, Loss, Send, Withdraw
from kproxy.routing.merge import Exchange
from kproxy.routing.split import Selection
from kproxy.security.broker_access import BrokerAccess


class Shell(Protocol):
    """Takes the events of pieces and of connections."""

    def answered(self, ticket: PieceTicket, frame: memoryview) -> None:
        """A broker has answered a piece."""
        ...

    def left(self, ticket: PieceTicket) -> None:
        """A piece has left this process, and no answer will come (acks=0)."""
        ...

    def before_open(self, upstream: Upstream) -> None:
        """A dial has succeeded: the waiting requests are about to be written."""
        ...

    def ended(self, upstream: Upstream) -> None:
        """A connection has ended; all its pieces are known to be lost."""
        ...


class PieceTicket:
    """The ticket of one of the core's pieces, which the core knows by its number."""

    __slots__ = ("_connections", "exchange", "expects_answer", "part", "piece", "upstream")

    def __init__(
        self,
        connections: NumberedConnections,
        upstream: Upstream,
        piece: int,
        exchange: Exchange,
        part: Selection | None,
    ) -> None:
        self._connections = connections
        self.upstream = upstream
        self.piece = piece
        self.exchange = exchange
        self.part = part
        self.expects_answer = exchange.request.acks != 0

    @property
    def may_wait_until(self) -> float:
        return self.exchange.look_until if self.part is None else 0.0

    def is_plain(self, frame: memoryview) -> bool:
        """Whether an answer concerns no other request: it is full success for the piece, or answers a read."""
        if not self.exchange.is_ordered:
            return True
        plain = self.exchange.api.plain_answer(self.exchange.request, self.exchange.selection(self.part))
        return plain is not None and plain.is_met(frame)

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

    __slots__ = ("_doubted", "_is_closed", "_losses", "shell", "upstreams", "version")

    def __init__(
        self, context: ProxyContext, client: Client, shell: Shell, share: Share, access: BrokerAccess | None
    ) -> None:
        super().__init__(context, client, share, access=access)
        self.shell = shell
        self.upstreams: dict[int, Upstream] = {}
        # Pieces lost by ending connections, until the core knows; and connections with acks=0 batches in doubt.
        self._losses: dict[int, list[tuple[int, Loss]]] = {}
        self._doubted: tuple[int, ...] = ()
        # The topology's version at the last `follow`.
        self.version = -1
        self._is_closed = False

    def numbered(self, number: int, broker: int) -> Upstream:
        """The connection with this number; if there is none yet, the one to `broker` gets it. Raises NoAddress."""
        upstream = self.upstreams.get(number)
        if upstream is None:
            upstream = self.upstreams[number] = self.to(broker)
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

    def ended(self, upstream: Upstream) -> None:
        if not self._is_closed:
            self.shell.ended(upstream)

    # Sending

    def send(self, action: Send) -> None:
        """Write a piece, or queue it for the dial."""
        upstream = self.upstreams[action.connection]
        if upstream.closed:
            # One of the actions before has ended it.
            self._losses[action.connection].append((action.piece, Loss.UNWRITTEN))
            return
        exchange, part = action.exchange, action.part
        ticket = PieceTicket(self, upstream, action.piece, exchange, part)
        if part is None:
            upstream.forward(ticket, exchange.request.frame)
        else:
            correlation_id = upstream.next_correlation_id()
            upstream.send(ticket, correlation_id, exchange.splitter(action.shares).part(part, correlation_id))

    def withdraw(self, action: Withdraw) -> None:
        """Take back pieces that wait for a dial."""
        upstream = self.upstreams[action.connection]
        upstream.withdraw(lambda ticket: isinstance(ticket, PieceTicket) and ticket.piece in action.pieces)

    def replace(self, tickets: Mapping[Ticket, Ticket]) -> None:
        """Replace tickets that wait for answers, or to be written."""
        for upstream in self.upstreams.values():
            upstream.replace(tickets)

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
        else:
            upstream.give_up(action.reason)

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
