"""Check the produce and read requests of one client connection, and carry out the core's decisions about them.

The core is kproxy.routing.fanout. Events reach the core one after another: events caused by the actions of one wait
until these are carried out. Before any event except a success on the plain path (kproxy.proxy.plain_path) all requests
in flight there enter the core.

Invariants
1. If the topology has changed, that is the next event.
2. Claims are checked to be live when something is written and again when a dial completes: no past event guarantees it.
   The fences of a batch, which the core names with it, are bound before it where its connection has not bound them.
3. Open requests have at most MAX_OPEN_PARTITIONS partitions together, or as many as a single request has. So an event,
   such as the end of a broker's connection, concerns no more, and its duration is bounded. Requests for one partition
   do not count: their number is bounded by itself.

A request that names a partition twice, or more than 4,096 partitions, gets INVALID_REQUEST.

Produce. Versions 3–13 are served. Versions 0–2 are offered, because librdkafka drops compression otherwise, and refused
when sent, by closing the connection as Kafka does. acks other than -1, 0 and 1 get INVALID_REQUIRED_ACKS.

The deadline of a produce request counts from its first byte: a request that is past it when its last byte arrives is
not sent. For a client that waits for no answer (acks=0) it counts from the last byte, as such a client has no timer.

acks=0 has no answer. With `confirm_acks0` brokers are asked for acks=1 all the same and their answers end here. So the
proxy knows which batches were refused, sends them to the new owner, keeps their order, and counts losses exactly. For
topics with a writer group this is always so.

Fetch. There are no fetch sessions (KIP-227): answers name session 0, and a request that continues a session gets
FETCH_SESSION_ID_NOT_FOUND. If one broker leads all partitions of a fetch, that broker waits for data. Otherwise all
brokers are asked without waiting, and again until there is enough or the fetch's time is over.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

from kproxy.claims.unsettled import LastWrites
from kproxy.plain import compiled
from kproxy.proxy.answer_order import AnswerOrder, Slot
from kproxy.proxy.answer_reader import Ticket
from kproxy.proxy.apis import Ranges
from kproxy.proxy.broker_connection import FLUSH_S, Upstream
from kproxy.proxy.claims import ClientClaims, Respond, refused_writes
from kproxy.proxy.connections import Connections
from kproxy.proxy.context import ClientView, ProxyContext
from kproxy.proxy.numbered_connections import NumberedConnections, PieceTicket, Tickets
from kproxy.proxy.plain_path import PlainPath, PlainPiece
from kproxy.proxy.sources import OwnerLookups
from kproxy.routing import actions
from kproxy.routing.actions import Action
from kproxy.routing.fanout import Fanout
from kproxy.routing.merge import Exchange
from kproxy.routing.retry import deadline_s
from kproxy.routing.split import NOTHING_REFUSED, Entry
from kproxy_codec.api_keys import FETCH, LIST_OFFSETS, PRODUCE
from kproxy_codec.error_codes import FETCH_SESSION_ID_NOT_FOUND, INVALID_REQUEST, INVALID_REQUIRED_ACKS
from kproxy_codec.errors import InvalidField
from kproxy_codec.fetch import NO_SESSION, FetchApi, response_ends
from kproxy_codec.framing import RequestHeader, parse_request_header, response_header
from kproxy_codec.list_offsets import LIST_OFFSETS_API
from kproxy_codec.partitioned import MAX_PARTITIONS, PartitionedApi, PartitionedRequest, encode_topics, with_length
from kproxy_codec.primitives import Buffer
from kproxy_codec.produce import PRODUCE_API, parse_produce, set_acks

FETCH_API = FetchApi()
MAX_FETCH_WAIT_S = 300.0
# Time for a broker's answer beyond the time that a read itself may wait.
READ_GRACE_S = 30.0

_ACKS = (-1, 1, 0)
MAX_OPEN_PARTITIONS: Final = MAX_PARTITIONS


class NoRoom(Exception):
    """A request for `partitions` must wait until others are answered."""

    def __init__(self, partitions: int) -> None:
        super().__init__(f"{partitions} partitions are too many for now")
        self.partitions = partitions


class FanoutShell:
    """Runs the core of one client connection on `connections`.

    `claims` is what the client has claimed. `on_undeliverable` gets lost acks=0 parts.
    """

    def __init__(
        self,
        context: ProxyContext,
        connections: Connections,
        claims: ClientClaims,
        on_undeliverable: Callable[[bytes, int], None],
    ) -> None:
        self._context = context
        self._topology = context.topology
        self._on_undeliverable = on_undeliverable
        # Notes its acknowledgements, if the proxy keeps a trail of them.
        self.acks = context.trail.connection(context.topology) if context.trail is not None else None
        self.claims = claims
        self._view = ClientView(context, claims)
        self.core = Fanout(self._view)
        self._numbered = NumberedConnections(connections, Tickets(self._answered, self._left))
        self.upstreams: Mapping[int, Upstream] = self._numbered.upstreams
        self.plain = PlainPath(self.core, self.upstreams, self.acks, context.counters, self.take_over)
        self.lookups = OwnerLookups(context)
        # The core's requests by sequence: where the answer goes.
        self._responds: dict[int, Respond] = {}
        self._events: deque[tuple[Callable[..., list[Action]], tuple[object, ...]]] = deque()
        self._is_running = False
        self._last_writes = LastWrites(context.own.unsettled if context.own is not None else None)
        self._held = asyncio.Event()
        # Exists once `close` waits for open requests; set when none is left.
        self._emptied: asyncio.Event | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        # The topology's version at the last send.
        self._sent_at = -1
        # The sequence of the newest request at the last call of `take_out`, and at the one before.
        self._seen = 0
        self._taken_out_to = 0

    # Requests

    def produce(self, frame: memoryview, header: RequestHeader, now: float, slot: Slot) -> int | None:
        """Serve one produce request whose first byte came at `now`.

        Returns the bytes that its answer may have beyond the request's own size, or None if it has no answer (acks=0).
        Raises CodecError, and NoRoom if it has to wait.
        """
        context = self._context
        request = parse_produce(frame, header)
        acks = request.acks
        if acks not in _ACKS or request.is_too_large or request.repeats_a_partition():
            if acks == 0:
                raise InvalidField("an acks=0 request names a partition twice, or too many of them")
            refusal = INVALID_REQUEST if acks in _ACKS else INVALID_REQUIRED_ACKS
            context.tally.error(PRODUCE, refusal, partitions=request.partition_count)
            slot.fill(refuse(PRODUCE_API, request, refusal))
            return 0
        self.admit(request)
        began = context.clock() if acks == 0 else now
        deadline = began + deadline_s(request.timeout_ms, context.limits.deadline_cap_ms)
        if request.by_id:
            self.name_topics(request)
        refused = NOTHING_REFUSED
        if context.own is not None and context.own.gated:
            refused = refused_writes(context.own, self.claims.connection, request)
            if refused:
                context.counters["own.gated"] += len(refused)
        if acks == 0 and (context.confirm_acks0 or self._is_gated(request)):
            set_acks(request, 1)
        self.submit(PRODUCE_API, request, slot, deadline=deadline, silent=acks == 0, refused=refused)
        return None if acks == 0 else 0

    def _is_gated(self, request: PartitionedRequest) -> bool:
        """Whether a topic has a writer group: its next claimant must know when the last of this is written."""
        own = self._context.own
        return own is not None and any(topic.name in own.gated for topic in request.topics)

    def fetch(self, frame: memoryview, header: RequestHeader, now: float, slot: Slot) -> int | None:
        """Serve one fetch request; return the bytes that its answer may have.

        Raises CodecError, NoRoom.
        """
        request = FETCH_API.parse_request(frame, header)
        if request.session_id != NO_SESSION:
            head, tail = response_ends(header.api_version, 0, [], FETCH_SESSION_ID_NOT_FOUND)
            answer_header = response_header(header.api_key, header.api_version, header.correlation_id)
            self._context.tally.error(FETCH, FETCH_SESSION_ID_NOT_FOUND)
            slot.fill(with_length([answer_header + head, *encode_topics([], flexible=request.flexible), tail]))
            return 0
        if request.is_too_large or request.repeats_a_partition():
            self._context.tally.error(FETCH, INVALID_REQUEST, partitions=request.partition_count)
            slot.fill(refuse(FETCH_API, request, INVALID_REQUEST))
            return 0
        self.admit(request)
        refused = NOTHING_REFUSED
        respond: Respond = slot.fill
        if self.claims.connection is not None:
            refused, respond = self.claims.read(request, slot.fill)
            self._context.counters["own.fetch_gated"] += len(refused)
        wait_s = min(max(request.max_wait_ms, 0) / 1000, MAX_FETCH_WAIT_S)
        deadline = now + wait_s + READ_GRACE_S
        self.submit(
            FETCH_API, request, slot, deadline=deadline, respond=respond, look_until=now + wait_s, refused=refused
        )
        return min(max(request.max_bytes, 0), self._context.limits.max_answer_bytes)

    def list_offsets(self, frame: memoryview, header: RequestHeader, now: float, slot: Slot) -> int | None:
        """Serve one ListOffsets request; its answer is as small as itself.

        Raises CodecError, NoRoom.
        """
        request = LIST_OFFSETS_API.parse_request(frame, header)
        if request.is_too_large or request.repeats_a_partition():
            self._context.tally.error(LIST_OFFSETS, INVALID_REQUEST, partitions=request.partition_count)
            slot.fill(refuse(LIST_OFFSETS_API, request, INVALID_REQUEST))
            return 0
        self.admit(request)
        self.submit(LIST_OFFSETS_API, request, slot, deadline=now + READ_GRACE_S)
        return 0

    def admit(self, request: PartitionedRequest) -> None:
        """Raises NoRoom if a request has to wait; to be called before anything of it is changed."""
        # Nearly always nothing that counts is open. This is called for every request.
        if self.core.open_partitions or self.plain.open_partitions:
            partitions = request.partition_count
            if not self.has_room_for(partitions):
                raise NoRoom(partitions)

    def has_room_for(self, partitions: int) -> bool:
        """Whether a request for this many partitions may be begun."""
        taken = self.core.open_partitions + self.plain.open_partitions
        return not taken or taken + partitions <= MAX_OPEN_PARTITIONS

    def name_topics(self, request: PartitionedRequest) -> None:
        """Replace topic ids by names."""
        self.core.name_topics(request)

    def submit(
        self,
        api: PartitionedApi,
        request: PartitionedRequest,
        slot: Slot,
        *,
        deadline: float,
        respond: Respond | None = None,
        look_until: float = 0.0,
        silent: bool = False,
        refused: Mapping[Entry, int] = NOTHING_REFUSED,
    ) -> None:
        """Begin a request whose answer goes to `slot`, or to `respond` if given.

        `silent` if its client is never answered (acks=0). `refused` are entries that are not to be sent, with the error
        code of each. `deadline` and `look_until` are on the proxy's clock, in seconds; until `look_until` a read that
        spans brokers is asked again if it found too little data.
        """
        api.admit(request)
        core = self.core
        self.plain.newest = slot.sequence
        self._give_up_moved()
        if self._topology.version != core.version:
            self._run()
        is_ordered = api is PRODUCE_API and request.acks != 0
        if is_ordered and not refused and core.is_quiet and (silent or deadline > self._context.clock()):
            if core.awaits:
                core.arrived(Exchange(api, request, slot.sequence, deadline))
            if self.plain.send(slot, request, deadline, self._topology.version, is_silent=silent):
                return
        exchange = Exchange(api, request, slot.sequence, deadline)
        exchange.look_until = look_until
        exchange.is_silent = silent
        self._responds[exchange.sequence] = respond or slot.fill
        self._bring(core.submitted, exchange, refused)

    @property
    def follows(self) -> bool:
        """Whether the core and the connections have followed the topology."""
        return self._topology.version == self.core.version == self._sent_at

    @property
    def open_count(self) -> int:
        """Requests that are not answered yet, or with acks=0 not sent."""
        return self.core.open_count + self.plain.open_count

    # The plain path

    def take_over(self, piece: PlainPiece) -> PieceTicket:
        """Have the core take over the plain path; return the ticket that replaces this one, which no upstream has."""
        return self._adopt((piece,))[piece]

    def _adopt(self, pieces: Iterable[PlainPiece] = ()) -> Mapping[Ticket, PieceTicket]:
        if not self.plain.open_count:
            return {}
        leaving = self.plain.leave(pieces)
        for record, parts in leaving:
            self._responds[record.exchange.sequence] = parts[0].slot.fill
        numbers = iter(self.core.adopt([record for record, _ in leaving]))
        tickets: dict[Ticket, PieceTicket] = {
            part: PieceTicket(self._numbered, part.planned.upstream, next(numbers), record.exchange, part.planned.part)
            for record, parts in leaving
            for part in parts
        }
        self._numbered.replace(tickets)
        return tickets

    # Events

    def _bring(self, event: Callable[..., list[Action]], *arguments: object) -> None:
        """Queue an event; it is called with these arguments, the time and a jitter."""
        self._events.append((event, arguments))
        if not self._is_running:
            self._run()

    def _run(self) -> None:
        """Bring all waiting events, and before each one a change of the topology."""
        self._is_running = True
        core, clock, random = self.core, self._context.clock, self._context.random.random
        try:
            while True:
                if self._topology.version != core.version:
                    self._follow()
                    todo = core.topology_changed(clock(), random())
                elif self._events:
                    event, arguments = self._events.popleft()
                    todo = event(*arguments, clock(), random())
                else:
                    break
                for action in todo:
                    _CARRY_OUT[type(action)](self, action)
        finally:
            self._is_running = False
        if core.lanes.table and not self._is_closed:
            self._topology.on_next_change(self._topology_changed)
        if self._emptied is not None and not core.open_count:
            self._emptied.set()

    def _follow(self) -> None:
        if self.plain.open_count and self.core.is_concerned:
            self._adopt()

    def _give_up_moved(self) -> None:
        """Before a send, give up connections to addresses that brokers have left. Until then these may answer."""
        if self._topology.version != self._sent_at:
            self._sent_at = self._topology.version
            self._numbered.give_up_moved()

    def _topology_changed(self) -> None:
        # ChangeSignal may come in groups: handle them together.
        asyncio.get_running_loop().call_soon(self._run_unless_running)

    def _run_unless_running(self) -> None:
        if not self._is_running and not self._is_closed:
            self._run()

    def before_open(self, upstream: Upstream) -> None:
        """Handle a successful dial: the waiting requests are about to be written."""
        if self._view.gated and self.claims.have_lapsed():
            self.claims.lapse()
        number = self._numbered.number(upstream)
        if number is not None and not upstream.closed:
            self.core.opened(number)

    def _answered(self, ticket: PieceTicket, frame: memoryview) -> None:
        if self.plain.open_count and not ticket.is_plain(frame):
            self._adopt()
        self._bring(self.core.answered, ticket.piece, frame)

    def _left(self, ticket: PieceTicket) -> None:
        self._bring(self.core.left, (ticket.piece,))

    def ended(self, upstream: Upstream) -> None:
        """Handle the end of a connection; all its pieces are known to be lost."""
        number = self._numbered.number(upstream)
        if number is None:
            return
        self._adopt()
        self._numbered.end(number)

        def event(now: float, jitter: float) -> list[Action]:
            losses, is_unconfirmed = self._numbered.take(number)
            return self.core.lost(number, losses, now, jitter, is_unconfirmed=is_unconfirmed)

        # Requests that wait to be sent on it must not be sent before.
        self._events.appendleft((event, ()))
        if not self._is_running:
            self._run()

    def expire(self, now: float) -> None:
        """Answer requests that have reached their deadline."""
        is_plain_due = any(piece.slot.deadline <= now for piece in self.plain.pieces())
        if is_plain_due or (self.plain.open_count and self.core.is_due(now)):
            self._adopt()
        if self.core.is_idle:
            return
        oldest = self._numbered.oldest_pieces()
        # Use the time that was checked above: requests due a moment later would have to enter first.
        self._bring(lambda _, jitter: self.core.tick(oldest, now, jitter))

    def take_out(self) -> None:
        """Copy requests out of receive buffers, so that these can be reused.

        These are the requests that have waited since the last call. It is called from time to time.
        """
        since, self._taken_out_to, self._seen = self._taken_out_to, self._seen, self.plain.newest
        self.core.take_out(since, self._taken_out_to)
        for piece in self.plain.pieces():
            if since < piece.slot.sequence <= self._taken_out_to:
                piece.slot.take_out()

    # Actions

    def _send(self, action: actions.Send) -> None:
        self._give_up_moved()
        upstream = self._numbered.to(action.connection, action.broker)
        if upstream.is_open:
            self.core.opened(action.connection)
        if action.exchange.api.api_key == PRODUCE and not upstream.closed:
            if self.claims.have_lapsed():
                self.core.unsent(action.piece)
                self.claims.lapse()
                return
            if action.fences:
                self.claims.binder.before(upstream, action.fences)
        self._numbered.send(action)

    def _respond(self, action: actions.Respond) -> None:
        self._responds.pop(action.sequence)(action.answer)

    def _drop(self, action: actions.Drop) -> None:
        del self._responds[action.sequence]

    def _note(self, action: actions.Note) -> None:
        if self.acks is not None:
            self.acks.note(*action)

    def _let_go(self, action: actions.LetGo) -> None:
        self._last_writes.let_go(action.piece)
        if not self._last_writes:
            self._held.set()

    def _wake_at(self, action: actions.WakeAt) -> None:
        if self._is_closed:
            return
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, action.at - self._context.clock()), self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._give_up_moved()
        self._bring(self.core.woken)

    # The client's end

    def part(self, *, severed: bool = False) -> None:
        """Handle the client's end; `severed`: nothing more is sent for any topic."""
        if severed or self._view.gated:
            self._adopt()
            self._bring(self.core.severed if severed else self.core.parted)

    def hurry(self) -> None:
        """Stop waiting for answers to the last requests; unanswered ones stay unsettled for their time."""
        self._held.set()

    async def close(self) -> None:
        """End after the client has gone: send its acks=0 requests or count them as lost, and wait for held pieces."""
        self._adopt()
        self._bring(self.core.closing)
        if self._last_writes:
            await _until(self._held, self._context.limits.own_unsettled_s)
        if self.core.open_count:
            self._emptied = asyncio.Event()
            await _until(self._emptied, FLUSH_S)
        self._bring(self.core.ended)
        self._is_closed = True
        self._topology.forget(self._topology_changed)
        if self._timer is not None:
            self._timer.cancel()
        await self.lookups.close()


# Methods, and single calls.
_CARRY_OUT: Final[Mapping[type[Action], Callable[[FanoutShell, Any], None]]] = {
    actions.Send: FanoutShell._send,
    actions.Withdraw: lambda shell, action: shell._numbered.withdraw(action),
    actions.Respond: FanoutShell._respond,
    actions.Drop: FanoutShell._drop,
    actions.Note: FanoutShell._note,
    actions.Hold: lambda shell, action: shell._last_writes.hold(*action),
    actions.LetGo: FanoutShell._let_go,
    actions.NoteLost: lambda shell, action: shell._last_writes.note_lost(action.partitions),
    actions.Reread: lambda shell, action: shell.lookups.ask(*action),
    actions.WakeAt: FanoutShell._wake_at,
    actions.Close: lambda shell, action: shell._numbered.close(action),
    actions.Undeliverable: lambda shell, action: shell._on_undeliverable(*action),
    actions.Unconfirmed: lambda shell, action: shell._context.tally.leave_unconfirmed(*action),
    actions.Retried: lambda shell, action: shell._context.tally.retry(*action),
    actions.Failed: lambda shell, action: shell._context.tally.error(*action),
    actions.Counted: lambda shell, action: shell._context.counters.update({action.counter: action.amount}),
}


async def _until(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return


class CompiledPath(Protocol):
    """The compiled plain path of one client connection (kproxy.plain)."""

    def take(self, frame: memoryview, first_byte_at: float, ranges: Ranges) -> bool:
        """Begin a request; False leaves it, with nothing changed, to FanoutShell."""
        ...


def plain_path(context: ProxyContext, fanout: FanoutShell, answers: AnswerOrder) -> CompiledPath | None:
    """The compiled plain path of a client; None where it is not built or switched off."""
    if compiled is None:
        return None

    def parse(frame: memoryview, correlation_id: int) -> PartitionedRequest:
        request = parse_produce(frame, parse_request_header(frame)._replace(correlation_id=correlation_id))
        if request.by_id:
            fanout.name_topics(request)
        return request

    def make_exchange(request: PartitionedRequest, sequence: int, deadline: float) -> Exchange:
        return Exchange(PRODUCE_API, request, sequence, deadline)

    path: CompiledPath = compiled.CompiledPath(fanout, answers, context, fanout.take_over, parse, make_exchange)
    return path


def refuse(api: PartitionedApi, request: PartitionedRequest, error_code: int) -> list[Buffer]:
    """Build an answer that gives every partition the same error, once."""
    header = request.header
    topics: dict[bytes, dict[int, None]] = {}
    for topic in request.topics:
        topics.setdefault(topic.wire, {}).update(dict.fromkeys(topic.partitions))
    errors = [
        (wire, [api.error_entry(header.api_version, index, error_code) for index in partitions], len(partitions))
        for wire, partitions in topics.items()
    ]
    head, tail = api.response_ends(header.api_version, 0, [])
    return with_length(
        [
            response_header(header.api_key, header.api_version, header.correlation_id) + head,
            *encode_topics(errors, flexible=request.flexible, by_id=request.by_id),
            tail,
        ]
    )
