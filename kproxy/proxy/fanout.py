"""Carry out the fan-out core's decisions for one client connection.

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
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Final

from kproxy.claims.unsettled import Hold
from kproxy.proxy.answer_order import Slot
from kproxy.proxy.broker_connection import FLUSH_S, Ticket, Upstream
from kproxy.proxy.claims import ClientClaims, Respond
from kproxy.proxy.connections import Connections
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.plain_path import PlainPath, PlainPiece
from kproxy.routing import actions
from kproxy.routing.actions import Action
from kproxy.routing.events import Adopted, Loss
from kproxy.routing.fanout import Fanout
from kproxy.routing.merge import Exchange
from kproxy.routing.retry import Conduct
from kproxy.routing.split import NOTHING_REFUSED, Entry, Selection
from kproxy.routing.topology import Address, Topology
from kproxy_codec.api_keys import PRODUCE
from kproxy_codec.partitioned import MAX_PARTITIONS, PartitionedApi, PartitionedRequest
from kproxy_codec.produce import PRODUCE_API

MAX_OPEN_PARTITIONS: Final = MAX_PARTITIONS
# A lookup takes two of etcd's transactions; a Kafka cluster is asked about whole topics.
MAX_LOOKUPS: Final = 256
_NO_TOPICS: Final = frozenset[bytes]()


class NoRoom(Exception):
    """A request for `partitions` must wait until others are answered."""

    def __init__(self, partitions: int) -> None:
        super().__init__(f"{partitions} partitions are too many for now")
        self.partitions = partitions


class ContextView:
    """State that the core reads besides its events (kproxy.routing.events.View)."""

    def __init__(self, context: ProxyContext, claims: ClientClaims) -> None:
        self._context = context
        self._claims = claims
        self.topology: Topology = context.topology
        self.max_nameless = context.limits.max_open_requests

    @property
    def conduct(self) -> Conduct:
        return self._context.conduct

    @property
    def knows_batches_again(self) -> bool:
        return self._context.knows_batches_again

    @property
    def gated(self) -> Collection[bytes]:
        own = self._context.own
        return own.unsettled.topics if own is not None and own.gated else _NO_TOPICS

    @property
    def fenced(self) -> bool:
        return self._context.versions.fenced

    @property
    def has_claims(self) -> bool:
        return self._claims.connection is not None

    def write_fence(self, topic: bytes, partition_index: int) -> int:
        return self._claims.write_fence(topic, partition_index)

    def is_hung(self, address: Address | None) -> bool:
        health = self._context.health
        return health.watching and health.is_open(address)


class PieceTicket:
    """The ticket of one of the core's pieces, which the core knows by its number."""

    __slots__ = ("_shell", "exchange", "expects_answer", "part", "piece", "upstream")

    def __init__(
        self, shell: FanoutShell, upstream: Upstream, piece: int, exchange: Exchange, part: Selection | None
    ) -> None:
        self._shell = shell
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
        self._shell.answered(self, frame)

    def sent(self) -> None:
        self._shell.left(self)

    def unconfirmed(self) -> None:
        self._shell.leave_unconfirmed(self.upstream)

    def lost(self, *, written: bool) -> None:
        self._shell.lost(self, Loss.WRITTEN if written else Loss.UNWRITTEN)


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
        self._connections = connections
        self._on_undeliverable = on_undeliverable
        # Notes its acknowledgements, if the proxy keeps a trail of them.
        self.acks = context.trail.connection(context.topology) if context.trail is not None else None
        self.claims = claims
        self._view = ContextView(context, claims)
        self.core = Fanout(self._view)
        self._upstreams: dict[int, Upstream] = {}
        self._numbers: dict[Upstream, int] = {}
        self.plain = PlainPath(self.core, self._upstreams, self.acks, context.counters, self._take_over)
        self.lookups = OwnerLookups(context)
        # The core's requests by sequence: where the answer goes, and the number of partitions.
        self._responds: dict[int, tuple[Respond, int]] = {}
        self._open_partitions = 0
        self._events: deque[tuple[Callable[..., list[Action]], tuple[object, ...]]] = deque()
        self._is_running = False
        # Pieces lost by ending connections, until the core knows; and connections with acks=0 batches in doubt.
        self._losses: dict[int, list[tuple[int, Loss]]] = {}
        self._doubted: set[int] = set()
        self._holds: dict[int, list[Hold]] = {}
        self._held = asyncio.Event()
        # Exists once `close` waits for open requests; set when none is left.
        self._emptied: asyncio.Event | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        # The topology's version at the last send.
        self._sent_at = -1
        # The sequence of the newest request: now, at the last call of `take_out`, and at the one before.
        self._newest = 0
        self._seen = 0
        self._taken_out_to = 0

    # Requests

    def admit(self, request: PartitionedRequest) -> None:
        """Raises NoRoom if a request has to wait; to be called before anything of it is changed."""
        # Nearly always nothing that counts is open. This is called for every request.
        if self._open_partitions or self.plain.open_partitions:
            partitions = request.partition_count
            if not self.has_room_for(partitions):
                raise NoRoom(partitions)

    def has_room_for(self, partitions: int) -> bool:
        """Whether a request for this many partitions may be begun."""
        taken = self._open_partitions + self.plain.open_partitions
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
        self._newest = slot.sequence
        self._give_up_moved()
        if self._topology.version != core.version:
            self._run()
        is_ordered = api is PRODUCE_API and request.acks != 0
        if is_ordered and not refused and core.is_quiet and (silent or deadline > self._context.clock()):
            if core.awaits:
                core.arrived(Exchange(api, request, slot.sequence, deadline))
            if self.plain.send(slot, request, deadline, self._topology.revision, is_silent=silent):
                return
        exchange = Exchange(api, request, slot.sequence, deadline)
        exchange.look_until = look_until
        exchange.is_silent = silent
        self._open(exchange, respond or slot.fill)
        self._bring(core.submitted, exchange, refused)

    def _open(self, exchange: Exchange, respond: Respond) -> None:
        partitions = exchange.request.partition_count
        self._responds[exchange.sequence] = (respond, partitions)
        if partitions > 1:
            self._open_partitions += partitions

    def _take_respond(self, sequence: int) -> Respond:
        respond, partitions = self._responds.pop(sequence)
        if partitions > 1:
            self._open_partitions -= partitions
        return respond

    @property
    def open_count(self) -> int:
        """Requests that are not answered yet, or with acks=0 not sent."""
        return self.core.open_count + self.plain.open_count

    # The plain path

    def _take_over(self, piece: PlainPiece) -> PieceTicket:
        """Have the core take over the plain path; return the ticket that replaces this one, which no upstream has."""
        return self._adopt((piece,))[piece]

    def _adopt(self, pieces: Iterable[PlainPiece] = ()) -> Mapping[Ticket, PieceTicket]:
        if not self.plain.open_count:
            return {}
        by_sequence: dict[int, list[PlainPiece]] = {}
        for piece in chain(pieces, self._plain_pieces()):
            by_sequence.setdefault(piece.slot.sequence, []).append(piece)
        records = []
        for sequence, parts in sorted(by_sequence.items()):
            slot = parts[0].slot
            exchange = slot.exchange
            if exchange is None:
                exchange = Exchange(PRODUCE_API, slot.request, sequence, slot.deadline)
                exchange.is_silent = slot.is_silent
            self._open(exchange, slot.fill)
            sent = [(part.planned.connection, part.planned.part) for part in parts]
            records.append((Adopted(exchange, slot.routed_at, sent), parts))
        numbers = iter(self.core.adopt([record for record, _ in records]))
        tickets: dict[Ticket, PieceTicket] = {
            part: PieceTicket(self, part.planned.upstream, next(numbers), record.exchange, part.planned.part)
            for record, parts in records
            for part in parts
        }
        for upstream in self._upstreams.values():
            upstream.replace(tickets)
        self.plain.open_count = self.plain.open_partitions = 0
        return tickets

    def _plain_pieces(self) -> Iterator[PlainPiece]:
        """The pieces in flight on the plain path."""
        if self.plain.open_count:
            for upstream in self._upstreams.values():
                for ticket in upstream.unanswered():
                    if isinstance(ticket, PlainPiece):
                        yield ticket

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
            self._connections.give_up_moved()

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
        number = self._numbers.get(upstream)
        if number is not None and not upstream.closed:
            self.core.opened(number)

    def answered(self, ticket: PieceTicket, frame: memoryview) -> None:
        """Handle a broker's answer to a piece."""
        if self.plain.open_count and not ticket.is_plain(frame):
            self._adopt()
        self._bring(self.core.answered, ticket.piece, frame)

    def left(self, ticket: PieceTicket) -> None:
        """Handle a piece without an answer (acks=0) that has left."""
        if ticket.upstream.closed:
            self.lost(ticket, Loss.LEFT)
        else:
            self._bring(self.core.left, (ticket.piece,))

    def lost(self, ticket: PieceTicket, loss: Loss) -> None:
        """Note a piece that is lost with its connection, whose end is about to be reported."""
        self._losses.setdefault(self._numbers[ticket.upstream], []).append((ticket.piece, loss))

    def leave_unconfirmed(self, upstream: Upstream) -> None:
        """Note that acks=0 batches that had left on a connection are in doubt."""
        self._doubted.add(self._numbers[upstream])

    def ended(self, upstream: Upstream) -> None:
        """Handle the end of a connection; all its pieces are known to be lost."""
        number = self._numbers.get(upstream)
        if number is None:
            return
        self._adopt()
        losses = self._losses.setdefault(number, [])

        def event(now: float, jitter: float) -> list[Action]:
            del self._losses[number], self._numbers[upstream], self._upstreams[number]
            is_unconfirmed = number in self._doubted
            self._doubted.discard(number)
            return self.core.lost(number, losses, now, jitter, is_unconfirmed=is_unconfirmed)

        # Requests that wait to be sent on it must not be sent before.
        self._events.appendleft((event, ()))
        if not self._is_running:
            self._run()

    def expire(self, now: float) -> None:
        """Answer requests that have reached their deadline."""
        is_plain_due = any(piece.slot.deadline <= now for piece in self._plain_pieces())
        if is_plain_due or (self.plain.open_count and self.core.is_due(now)):
            self._adopt()
        if self.core.is_idle:
            return
        oldest = {
            number: ticket.piece
            for number, upstream in self._upstreams.items()
            if isinstance(ticket := upstream.oldest_unanswered(), PieceTicket)
        }
        # Use the time that was checked above: requests due a moment later would have to enter first.
        self._bring(lambda _, jitter: self.core.tick(oldest, now, jitter))

    def take_out(self) -> None:
        """Copy requests out of receive buffers, so that these can be reused.

        These are the requests that have waited since the last call. It is called from time to time.
        """
        since, self._taken_out_to, self._seen = self._taken_out_to, self._seen, self._newest
        self.core.take_out(since, self._taken_out_to)
        for piece in self._plain_pieces():
            if since < piece.slot.sequence <= self._taken_out_to:
                piece.slot.request.take_out()

    # Actions

    def _send(self, action: actions.Send) -> None:
        connection, broker, piece, exchange, part, shares, fences = action
        self._give_up_moved()
        upstream = self._upstreams.get(connection)
        if upstream is None:
            upstream = self._upstreams[connection] = self._connections.to(broker)
            self._numbers[upstream] = connection
            if upstream.is_open:
                self.core.opened(connection)
        ticket = PieceTicket(self, upstream, piece, exchange, part)
        if exchange.api.api_key == PRODUCE and not upstream.closed:
            if self.claims.have_lapsed():
                self.core.unsent(piece)
                self.claims.lapse()
                return
            if fences:
                self.claims.binder.before(upstream, fences)
        if upstream.closed:
            # One of the actions before has ended it.
            self._losses[connection].append((piece, Loss.UNWRITTEN))
            return
        if part is None:
            upstream.forward(ticket, exchange.request.frame)
        else:
            correlation_id = upstream.next_correlation_id()
            upstream.send(ticket, correlation_id, exchange.splitter(shares).part(part, correlation_id))

    def _withdraw(self, action: actions.Withdraw) -> None:
        upstream = self._upstreams[action.connection]
        upstream.withdraw(lambda ticket: isinstance(ticket, PieceTicket) and ticket.piece in action.pieces)

    def _respond(self, action: actions.Respond) -> None:
        self._take_respond(action.sequence)(action.answer)

    def _drop(self, action: actions.Drop) -> None:
        self._take_respond(action.sequence)

    def _note(self, action: actions.Note) -> None:
        if self.acks is not None:
            self.acks.note(*action)

    def _hold(self, action: actions.Hold) -> None:
        if self._context.own is not None:
            begin = self._context.own.unsettled.begin
            self._holds[action.piece] = [begin(topic.decode(), index) for topic, index in action.partitions]

    def _let_go(self, action: actions.LetGo) -> None:
        for hold in self._holds.pop(action.piece, ()):
            if self._context.own is not None:
                self._context.own.unsettled.done(hold)
        if not self._holds:
            self._held.set()

    def _note_lost(self, action: actions.NoteLost) -> None:
        if self._context.own is not None:
            for topic, partition_index in action.partitions:
                self._context.own.unsettled.note_written_lost(topic.decode(), partition_index)

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

    def _close(self, action: actions.Close) -> None:
        upstream = self._upstreams[action.connection]
        if action.is_untrue:
            upstream.distrust(action.reason)
        else:
            upstream.give_up(action.reason)

    def _reread(self, action: actions.Reread) -> None:
        self.lookups.ask(*action)

    def _tell_undeliverable(self, action: actions.Undeliverable) -> None:
        self._on_undeliverable(*action)

    def _count(self, action: actions.Counted) -> None:
        self._context.counters[action.counter] += action.amount

    def _count_unconfirmed(self, action: actions.Unconfirmed) -> None:
        self._context.tally.leave_unconfirmed(*action)

    def _count_retry(self, action: actions.Retried) -> None:
        self._context.tally.retry(*action)

    def _count_failure(self, action: actions.Failed) -> None:
        self._context.tally.error(*action)

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
        if self._holds:
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


_CARRY_OUT: Final[Mapping[type[Action], Callable[[FanoutShell, Any], None]]] = {
    actions.Send: FanoutShell._send,
    actions.Withdraw: FanoutShell._withdraw,
    actions.Respond: FanoutShell._respond,
    actions.Drop: FanoutShell._drop,
    actions.Note: FanoutShell._note,
    actions.Hold: FanoutShell._hold,
    actions.LetGo: FanoutShell._let_go,
    actions.NoteLost: FanoutShell._note_lost,
    actions.Reread: FanoutShell._reread,
    actions.WakeAt: FanoutShell._wake_at,
    actions.Close: FanoutShell._close,
    actions.Undeliverable: FanoutShell._tell_undeliverable,
    actions.Unconfirmed: FanoutShell._count_unconfirmed,
    actions.Retried: FanoutShell._count_retry,
    actions.Failed: FanoutShell._count_failure,
    actions.Counted: FanoutShell._count,
}


class OwnerLookups:
    """Have the source read partitions' owners again, for one client connection; each lookup is a task.

    Invariants
    1. One task for each partition. If the owner is asked for again while its task waits, the task reads once more: the
       answer that it waits for may be older than the latest refusal.
    2. No task begins after `close`: nobody would wait for it.
    3. At most MAX_LOOKUPS tasks. The result comes by way of the topology. A partition that gets no task is asked for
       again after its next refusal.
    """

    def __init__(self, context: ProxyContext) -> None:
        self._context = context
        self._tasks: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        self._again: set[tuple[bytes, int]] = set()
        self._closed = False

    def ask(self, topic: bytes, partition_index: int, routed_at: int) -> None:
        """Have the source read an owner again, unless it has reported a new one since the revision `routed_at`."""
        partition = (topic, partition_index)
        if self._context.topology.owner_revision(topic, partition_index) > routed_at:
            return
        if partition in self._tasks:
            self._again.add(partition)
        elif len(self._tasks) < MAX_LOOKUPS and not self._closed:
            task = self._tasks[partition] = asyncio.ensure_future(self._refresh(partition))
            task.add_done_callback(lambda _: self._tasks.pop(partition, None))

    async def _refresh(self, partition: tuple[bytes, int]) -> None:
        topology = self._context.topology
        seen_revision = topology.owner_revision(*partition)
        is_wanted = True
        while is_wanted:
            self._again.discard(partition)
            topic, partition_index = partition
            # The source finds a topic id that the topology does not know.
            await self._context.source.refresh(topology.name_of(topic) or topic, partition_index, seen_revision)
            is_wanted = partition in self._again and topology.owner_revision(*partition) == seen_revision
        self._again.discard(partition)

    async def close(self) -> None:
        """Cancel all lookups, and begin none for acks=0 batches that are lost later."""
        self._closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
