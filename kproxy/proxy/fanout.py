"""Carry out the decisions about the Produce, Fetch and ListOffsets requests of one client connection.

The core (kproxy.routing.fanout) decides. Events reach it one after another: events caused by the actions of one wait
until these are carried out. Requests in flight on the plain path (kproxy.proxy.plain_path) enter the core before an
event that may concern them. kproxy.proxy.partitioned_requests checks requests and begins them here.

Invariants
1. After a change of the topology, the core's next event is that change.
2. Claims are checked to be live when something is written to a topic with a writer group, and again when a dial
   completes, because no past event guarantees it. The core names the fences of a batch; those that its connection has
   not bound yet are bound before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, Final

from kproxy.claims.inflight_writes import LastWrites
from kproxy.proxy.access import ClientAccess
from kproxy.proxy.answer_memory import ClientMemory
from kproxy.proxy.answer_reader import Ticket
from kproxy.proxy.broker_connection import FLUSH_S, Upstream
from kproxy.proxy.claims import ClientClaims, Respond
from kproxy.proxy.connections import NumberedConnections, PieceTicket
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.plain_path import PlainPiece, PlainRequests
from kproxy.proxy.sources import OwnerLookups
from kproxy.routing import actions
from kproxy.routing.actions import Action
from kproxy.routing.fanout import Fanout
from kproxy.routing.identity import LaneKey
from kproxy.routing.merge import Exchange
from kproxy.routing.open_exchanges import OpenExchanges
from kproxy.routing.split import NOTHING_REFUSED, Entry
from kproxy.security.broker_auth import BrokerAuth
from kproxy_codec.api_keys import PRODUCE
from kproxy_codec.fetch import FetchApi, as_fetch
from kproxy_codec.framing import parse_request_header
from kproxy_codec.partitioned import PartitionedRequest

if TYPE_CHECKING:
    from kproxy.proxy.client_session import ClientSession

# How long after the client's last byte a batch may wait for a dial.
SENDS_S: Final = 0.5


class FanoutShell:
    """Runs the core of `client`'s connection, on broker connections of its own.

    Their large answers wait for room in `share`. `to_brokers`: the identity at brokers; None: the proxy's.
    """

    __slots__ = (
        "_client",
        "_context",
        "_emptied",
        "_events",
        "_is_closed",
        "_is_running",
        "_last_writes",
        "_responds",
        "_seen",
        "_sends_until",
        "_taken_out_to",
        "_timer",
        "_topology",
        "access",
        "acks",
        "claims",
        "connections",
        "core",
        "lookups",
        "plain",
    )

    def __init__(
        self,
        context: ProxyContext,
        client: ClientSession,
        share: ClientMemory,
        to_brokers: BrokerAuth | None = None,
        access: ClientAccess | None = None,
    ) -> None:
        # The client's permissions for the compiled plain path; None: all.
        self.access = access
        self._context = context
        self._topology = context.topology
        self._client = client
        # Records its acknowledgements, if the proxy keeps a trail.
        self.acks = context.trail.connection(context.topology) if context.trail is not None else None
        self.connections = NumberedConnections(context, client, self, share, to_brokers)
        self.lookups = OwnerLookups(context)
        self.claims = ClientClaims(context, self.connections, client, self.lookups)
        self.core = Fanout(self.claims)
        self.plain = PlainRequests(self.upstreams)
        # The receivers of the core's answers, by sequence.
        self._responds: dict[int, Respond] = {}
        # Few at a time; an empty deque takes 760 bytes.
        self._events: list[tuple[Callable[..., list[Action]], tuple[object, ...]]] = []
        self._is_running = False
        self._last_writes = LastWrites(context.own.unsettled if context.own is not None else None)
        # Set once no request is open; created when `close` waits for that.
        self._emptied: asyncio.Event | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        # When waiting for a dial ends: some time after the client's last byte.
        self._sends_until = inf
        # The sequence of the newest request at the last call of `take_out`, and at the one before.
        self._seen = 0
        self._taken_out_to = 0

    @property
    def upstreams(self) -> Mapping[int, Upstream]:
        """The broker connections by number."""
        return self.connections.upstreams

    # Requests

    def name_topics(self, request: PartitionedRequest) -> None:
        """Replace topic ids by names."""
        self.core.name_topics(request)

    def submit(self, exchange: Exchange, respond: Respond, refused: Mapping[Entry, int] = NOTHING_REFUSED) -> None:
        """Begin a request; `respond` gets its answer. Entries in `refused` are not sent: each gets its error code."""
        self._responds[exchange.sequence] = respond
        self._bring(self.core.submitted, exchange, refused)

    @property
    def gate(self) -> tuple[Mapping[LaneKey, Any], Mapping[Hashable, Any], OpenExchanges, NumberedConnections]:
        """What the plain path checks before each request: the core's `gate`, and the connections."""
        return *self.core.gate, self.connections

    @property
    def follows(self) -> bool:
        """Whether the core and the connections have followed the topology."""
        return self._topology.version == self.core.version == self.connections.version

    def follow(self) -> None:
        """Make the core and the connections follow the topology before a request is begun."""
        self.connections.follow()
        if self._topology.version != self.core.version:
            self._run()

    @property
    def open_count(self) -> int:
        """Requests that are not answered yet, or with acks=0 not sent."""
        return self.core.open_count + self.plain.open_count

    @property
    def is_idle(self) -> bool:
        """Whether time alone changes nothing."""
        return not self.plain.open_count and self.core.is_idle

    @property
    def is_reading(self) -> bool:
        """Whether a read of the client waits for answers now."""
        return self.core.is_reading or self.plain.is_reading

    # The plain path

    def take_reads(self) -> None:
        """Serve no more reads on the plain path, and move a read in flight there to the core."""
        if self.plain.path is not None and self.plain.path.forget_read():
            self._adopt()

    def read_of(self, frame: memoryview, correlation_id: int, sequence: int) -> Exchange:
        """The read that the plain path has sent as `frame`."""
        api, header = FetchApi(), parse_request_header(frame)
        request = api.parse_request(frame, header._replace(correlation_id=correlation_id))
        if request.by_id:
            self.name_topics(request)
        return Exchange(api, request, sequence, inf)

    def _learn(self, action: actions.Proven) -> None:
        read, path = action.read, self.plain.path
        if path is None:
            return
        # The permissions may have changed while the read waited; and a dry run tells of each read that has none.
        if self.access is None or all(self.access.may_read(topic.name) for topic in read.request.topics):
            most = min(max(as_fetch(read.request).max_bytes, 0), self._context.limits.max_answer_bytes)
            upstream = self.upstreams[action.connection]
            path.learn(read.request, upstream, action.connection, action.routed_at, read.wait_s, most)

    def take_over(self, piece: PlainPiece) -> PieceTicket:
        """Move the plain path's requests to the core; return the ticket that replaces this one."""
        return self._adopt((piece,))[piece]

    def _adopt(self, pieces: Iterable[PlainPiece] = ()) -> Mapping[Ticket, PieceTicket]:
        if not self.plain.open_count:
            return {}
        leaving = self.plain.leave(pieces)
        self._context.counters["plain.left"] += len(leaving)
        for record, parts in leaving:
            self._responds[record.exchange.sequence] = parts[0].slot.fill
        numbers = iter(self.core.adopt([record for record, _ in leaving]))
        tickets: dict[Ticket, PieceTicket] = {
            part: PieceTicket(self.connections, part.upstream, next(numbers), record.exchange, part.part)
            for record, parts in leaving
            for part in parts
        }
        self.connections.replace(tickets)
        return tickets

    # Events

    def _bring(self, event: Callable[..., list[Action]], *arguments: object) -> None:
        """Queue an event, to be called with these arguments, the time and a jitter."""
        self._events.append((event, arguments))
        if not self._is_running:
            self._run()

    def _run(self) -> None:
        """Process all waiting events, and before each one a change of the topology."""
        self._is_running = True
        core, clock, random = self.core, self._context.clock, self._context.random.random
        try:
            while True:
                if self._topology.version != core.version:
                    if self.plain.open_count and (core.is_concerned or self.plain.is_reading):
                        self._adopt()
                    todo = core.topology_changed(clock(), random())
                elif self._events:
                    event, arguments = self._events.pop(0)
                    todo = event(*arguments, clock(), random())
                else:
                    break
                for action in todo:
                    _CARRY_OUT[type(action)](self, action)
        finally:
            self._is_running = False
        if self.connections.unread and core.is_reading:
            self.connections.read_on()
        if core.is_idle:
            self._responds.clear()
            core.shrink()
        if core.lanes.table and not self._is_closed:
            self._topology.on_next_change(self._topology_changed)
        if self._emptied is not None and not core.open_count:
            self._emptied.set()

    def _topology_changed(self) -> None:
        # Topology changes may come in groups: handle them together.
        asyncio.get_running_loop().call_soon(self._context.turns.take, self._run_unless_running)

    def _run_unless_running(self) -> None:
        if not self._is_running and not self._is_closed:
            self._run()

    def before_open(self, upstream: Upstream) -> None:
        """Handle a successful dial before the waiting requests are written."""
        if self.claims.gated and self.claims.have_lapsed():
            self.claims.lapse()
        if upstream.number and not upstream.closed:
            self.core.opened(upstream.number)

    def answered(self, ticket: PieceTicket, frame: memoryview) -> None:
        """Handle a broker's answer to a piece."""
        if self.plain.open_count and not ticket.is_plain(frame):
            self._adopt()
        self._bring(self.core.answered, ticket.piece, frame)

    def left(self, ticket: PieceTicket) -> None:
        """Handle a piece without an answer that has been sent."""
        self._bring(self.core.left, (ticket.piece,))

    def ended(self, upstream: Upstream) -> None:
        """Handle the end of a connection; all its pieces are known to be lost."""
        number = upstream.number
        if not number:
            return
        self._adopt()
        self.connections.note_end(number)

        def event(now: float, jitter: float) -> list[Action]:
            losses, is_unconfirmed = self.connections.take(number)
            return self.core.lost(number, losses, now, jitter, is_unconfirmed=is_unconfirmed)

        # Requests that wait to be sent on it must not be sent first.
        self._events.insert(0, (event, ()))
        if not self._is_running:
            self._run()

    def expire(self, now: float) -> None:
        """Answer requests that have reached their deadline."""
        is_plain_due = any(piece.slot.deadline <= now for piece in self.plain.pieces())
        if is_plain_due or (self.plain.open_count and self.core.is_due(now)):
            self._adopt()
        if self.core.is_idle:
            return
        self.connections.drop_unread(now)
        if now >= self._sends_until:
            self._adopt()
            self._bring(self.core.give_up_unwritten)
        oldest = self.connections.oldest_pieces()
        # Use the time checked above: a request due a moment later would need to enter first.
        self._bring(lambda _, jitter: self.core.tick(oldest, now, jitter))

    def take_out(self, newest: int) -> None:
        """Copy requests out of receive buffers, so that these can be reused.

        These requests have waited since the last periodic call. `newest` is the sequence of the client's newest
        request.
        """
        since, self._taken_out_to, self._seen = self._taken_out_to, self._seen, newest
        self.core.take_out(since, self._taken_out_to)
        for piece in self.plain.pieces():
            if since < piece.slot.sequence <= self._taken_out_to:
                piece.slot.take_out()

    # Actions

    def _send(self, action: actions.Send) -> None:
        self.connections.follow()
        upstream = self.connections.numbered(action.connection, action.broker, action.reader)
        if upstream.is_open:
            self.core.opened(action.connection)
        if action.exchange.api.api_key == PRODUCE and not upstream.closed:
            if self.claims.have_lapsed() and self.claims.gates(action.exchange.request):
                self.core.unsent(action.piece)
                self.claims.lapse()
                return
            if action.fences:
                self.claims.binder.before(upstream, action.fences)
        self.connections.send(action)

    def _respond(self, action: actions.Respond) -> None:
        self._responds.pop(action.sequence)(action.answer)

    def _drop(self, action: actions.Drop) -> None:
        del self._responds[action.sequence]

    def _note(self, action: actions.Note) -> None:
        if self.acks is not None:
            self.acks.note(*action)

    def _failed(self, action: actions.Failed) -> None:
        tally, (*counted, topic) = self._context.tally, action
        tally.error(*counted)
        # Clients may invent topics that the table does not have.
        if self._topology.partition_indexes(topic):
            tally.topic_error(self._topology.name_of(topic) or topic)

    def _wake_at(self, action: actions.WakeAt) -> None:
        if self._is_closed:
            return
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, action.at - self._context.clock()), self._wake)

    def _wake(self) -> None:
        self._timer = None
        self.connections.follow()
        self._bring(self.core.woken, self.connections.receiving())

    # The client's end

    def part(self, *, severed: bool = False) -> None:
        """Handle the client's end; `severed`: nothing more is sent for any topic."""
        if severed or self.claims.gated:
            self._adopt()
            self._bring(self.core.severed if severed else self.core.parted)

    def stop_retries(self) -> None:
        """Handle the end of the client's data: it may be gone, and send its batches again itself."""
        self._sends_until = self._context.clock() + SENDS_S
        self.core.stop_retries()
        if self.core.lanes.table:
            self._adopt()
            self._bring(self.core.give_up_retries)

    def hurry(self) -> None:
        """Stop waiting for the last answers; their writes stay unsettled until their time is over."""
        self._last_writes.stop_waiting()

    async def close(self) -> None:
        """End after the client has gone: send its acks=0 requests or count them as lost, and wait for held pieces."""
        self.plain.forget()
        self._adopt()
        self._bring(self.core.closing)
        await self._last_writes.wait(self._context.limits.own_unsettled_s)
        if self.core.open_count:
            self._emptied = asyncio.Event()
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._emptied.wait()
        self._bring(self.core.ended)
        self._is_closed = True
        self._topology.forget(self._topology_changed)
        if self._timer is not None:
            self._timer.cancel()
        await self.lookups.close()

    def take_apart(self) -> None:
        """Break all reference cycles, once this and its connections are closed."""
        del self.core, self.claims, self.connections, self.plain


# How each action is carried out: by a method of the shell, or by one call.
_CARRY_OUT: Final[Mapping[type[Action], Callable[[FanoutShell, Any], None]]] = {
    actions.Send: FanoutShell._send,
    actions.Withdraw: lambda shell, action: shell.connections.withdraw(action),
    actions.Respond: FanoutShell._respond,
    actions.Drop: FanoutShell._drop,
    actions.Note: FanoutShell._note,
    actions.Proven: FanoutShell._learn,
    actions.Hold: lambda shell, action: shell._last_writes.hold(*action),
    actions.LetGo: lambda shell, action: shell._last_writes.let_go(action.piece),
    actions.NoteLost: lambda shell, action: shell._last_writes.note_lost(action.partitions),
    actions.Reread: lambda shell, action: shell.lookups.ask(*action),
    actions.WakeAt: FanoutShell._wake_at,
    actions.Close: lambda shell, action: shell.connections.end(action),
    actions.Undeliverable: lambda shell, action: shell._client.undeliverable(*action),
    actions.Unconfirmed: lambda shell, action: shell._context.tally.leave_unconfirmed(*action),
    actions.Retried: lambda shell, action: shell._context.tally.retry(*action),
    actions.Failed: FanoutShell._failed,
    actions.Counted: lambda shell, action: shell._context.counters.update({action.counter: action.amount}),
}
