"""Split, send, take answers, retry, merge: the one mechanism behind Produce, Fetch and ListOffsets.

Decisions are made in `kproxy.routing`; here they are carried out for one client connection. An exchange enters by
`submit` and leaves by its `respond`, called exactly once. What it passes through on its way:

  dispatcher      which parts of it go to which broker (`following`: after the topology has changed, too)
  order           what of it waits in lanes until something before it is resolved
  answers         what brokers say to its pieces, and `failures` what is done about what is no success
  open_exchanges  its results, and its end
  standing        whether its client is still one to send for

This module is where it begins and where time and the client's end reach it.

Invariants
1. A partition's entry is at any time in one place: a piece that is under way, a lane, or done.
2. What is sent again goes through a lane; nothing of that partition overtakes it (kproxy.routing.lanes).
3. On a new route one batch goes first, and the next follow its success (kproxy.routing.routes).
4. When the topology has changed and a partition is to go elsewhere than its unanswered batches went, it waits for them.
5. What was answered at its deadline is not sent afterwards; what a broker may have seen keeps its lane until it is
   answered or its connection is closed, and what the client sent behind it meanwhile is given up with it.
6. Once the client is gone nothing more is sent for topics with a writer group, and once it is severed nothing at all.
7. An event (an answer, a lost connection, a deadline) changes all lanes it concerns before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from codec.error_codes import NOT_LEADER_OR_FOLLOWER, POLICY_VIOLATION
from codec.partitioned import PartitionedApi, PartitionedRequest
from kproxy.fencing.settlement import Settlement
from kproxy.observe.audit.noted import Noted
from kproxy.proxy.answers import Answers
from kproxy.proxy.connections import Connections
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.dispatcher import Dispatcher
from kproxy.proxy.failures import Failures
from kproxy.proxy.last_writes import LastWrites, note_lost
from kproxy.proxy.open_exchanges import NoRoom, OpenExchanges
from kproxy.proxy.order import Order
from kproxy.proxy.owning import NOTHING_REFUSED, Owning, Respond
from kproxy.proxy.pieces import Piece, UnderWay, ordered_pieces, pieces_of, withdraw
from kproxy.proxy.standing import Standing
from kproxy.proxy.upstream import FLUSH_S, Upstream
from kproxy.routing.identity import lane_key
from kproxy.routing.merge import Exchange
from kproxy.routing.routes import Routes
from kproxy.routing.split import Entry

# A broker that has not answered so long after a deadline is not going to: its own timer has run out as well.
HUNG_AFTER_S = 5.0


class Fanout:
    """The exchanges of one client connection.

    It sends on `connections`; `on_undeliverable` learns of acks=0 parts that cannot be sent.
    """

    def __init__(
        self,
        context: ProxyContext,
        connections: Connections,
        on_undeliverable: Callable[[bytes, int], None],
    ) -> None:
        self._context = context
        self._upstreams: Mapping[int, Upstream] = connections.by_broker
        # What of its acknowledgements is noted, where the proxy keeps a trail of them.
        self.acks = context.trail.connection(context.topology) if context.trail is not None else None
        routes: Routes[Upstream, Noted] = Routes(context.topology, self.acks.part if self.acks is not None else None)
        self._standing = Standing(context)
        self._exchanges = OpenExchanges(context, self._look_again, on_undeliverable)
        self._order = Order(context, self._exchanges, self._wake)
        self._under_way = UnderWay(self._upstreams)
        self._failures = Failures(context, self._exchanges, self._order, self._under_way, self._standing)
        self._answers = Answers(
            context,
            self._exchanges,
            self._order,
            self._under_way,
            routes,
            self._standing,
            self._failures,
            self.acks,
            self._end_event,
        )
        self._dispatcher = Dispatcher(
            context,
            connections,
            self._exchanges,
            self._order,
            self._under_way,
            routes,
            self._standing,
            self._failures,
            self._answers,
        )
        self._last_writes: LastWrites | None = None
        if self._standing.settlement is not None:
            connections.before_open = self._standing.lapses

    def submit(
        self,
        api: PartitionedApi,
        request: PartitionedRequest,
        *,
        deadline: float,
        respond: Respond,
        look_until: float = 0.0,
        silent: bool = False,
        refused: Mapping[Entry, int] = NOTHING_REFUSED,
    ) -> None:
        """Begin an exchange; `silent` where its client is never answered (acks=0).

        `refused` are entries that are not to be sent, with the error code of each.

        `deadline` and `look_until`, the time until which a read that spans brokers asks again for want of data, are on
        the proxy's clock, in seconds.
        """
        api.admit(request)
        exchange = self._exchanges.begin(api, request, deadline, respond)
        if look_until:
            exchange.look_until = look_until
        if silent:
            exchange.is_silent = silent
        elif deadline <= self._context.clock():
            self._end_unsent(exchange)
            return
        self._dispatcher.dispatch(exchange, refused)
        # What is under way first: with acks=0 a refusal ends the connection.
        for entry, error_code in refused.items():
            self._exchanges.conclude(exchange, entry, error_code)
        if refused:
            self._exchanges.finish_if_complete(exchange)

    def admit(self, request: PartitionedRequest) -> None:
        """Raises NoRoom where a request has to wait; to be called before anything of it is changed."""
        if self._exchanges.open_partitions and not self._exchanges.has_room_for(request.partition_count):
            raise NoRoom(request.partition_count)

    def has_room_for(self, partitions: int) -> bool:
        """Whether a request that had to wait may be begun."""
        return self._exchanges.has_room_for(partitions)

    def name_topics(self, request: PartitionedRequest) -> None:
        """Put names in the place of topic ids."""
        self._dispatcher.following.name_topics(request)

    @property
    def owning(self) -> Owning | None:
        """What its client has claimed, once it has claimed anything."""
        return self._standing.owning

    @owning.setter
    def owning(self, owning: Owning) -> None:
        self._standing.owning = owning

    @property
    def open_count(self) -> int:
        """Exchanges that are not answered yet, or with acks=0 not sent."""
        return len(self._exchanges.table)

    @property
    def has_open_exchanges(self) -> bool:
        return bool(self._exchanges.table)

    # What its parts are told to call

    def _look_again(self, exchange: Exchange) -> None:
        self._dispatcher.dispatch(exchange)

    def _wake(self) -> None:
        self._dispatcher.send_due()

    def _end_event(self) -> None:
        self._dispatcher.send_released()

    # Time

    def expire(self, now: float) -> None:
        """Answer what has reached its deadline: done entries with their results, the rest with an error.

        Produce that a broker may have seen gets REQUEST_TIMED_OUT, what was never written NOT_LEADER_OR_FOLLOWER.
        """
        due = [exchange for exchange in self._exchanges.all() if exchange.deadline <= now]
        self._context.counters["deadlines"] += len(due)
        self._end(due)
        for upstream in list(self._upstreams.values()):
            oldest = upstream.oldest_unanswered()
            if isinstance(oldest, Piece) and oldest.exchange.deadline + HUNG_AFTER_S <= now:
                upstream.give_up("it does not answer")
        self._end_event()

    def _end_unsent(self, exchange: Exchange) -> None:
        """Its deadline was over before it could be begun: no broker gets anything of it."""
        self._context.counters["deadlines"] += 1
        self._end_one(exchange, {(exchange.sequence, entry) for entry in exchange.open_entries()})
        self._end_event()

    def take_out(self) -> None:
        """Called now and then: what has waited since the last call keeps no receive buffer from being used again."""
        self._exchanges.take_out()
        if not self._order.lanes:
            self._under_way.forget()

    def _end(self, due: list[Exchange]) -> None:
        """Answer what of these exchanges is still open; their pieces that no broker has seen are taken back."""
        if not due:
            return
        sequences = {exchange.sequence for exchange in due}
        withdrawn = withdraw(self._upstreams.values(), lambda piece: piece.exchange.sequence in sequences)
        for piece in (*withdrawn, *pieces_of(self._upstreams.values(), sequences)):
            for entry in piece.entries():
                piece.exchange.note_sent(entry, piece.upstream.owner)
        unwritten = {(piece.exchange.sequence, entry) for piece in withdrawn for entry in piece.entries()}
        for piece in withdrawn:
            self._under_way.remove(piece)
        for exchange in due:
            # It may have been answered with another one, whose end gave up what waited behind it.
            if exchange in self._exchanges:
                self._end_one(exchange, unwritten)
        self._order.settle_pieces(withdrawn)

    def _end_one(self, exchange: Exchange, unwritten: set[tuple[int, Entry]]) -> None:
        exchanges, lanes = self._exchanges, self._order.lanes
        exchanges.looks.stop(exchange)
        written = self._failures.unanswered_code(exchange)
        for entry in exchange.open_entries():
            key = lane_key(exchange, entry)
            exchanges.give_up(lanes.give_up(key, exchange.sequence, exchanges.newest, self._under_way.of(key)))
            if exchange.is_open(entry):
                never_written = (exchange.sequence, entry) in unwritten
                exchanges.conclude(exchange, entry, NOT_LEADER_OR_FOLLOWER if never_written else written)
        exchanges.finish_if_complete(exchange)
        if exchange not in exchanges:
            # Its pieces may wait for long; what they are still wanted for is order.
            exchange.request.let_go()

    # The client's end

    def part(self, *, severed: bool = False) -> None:
        """The client is gone: for topics with a writer group nothing is sent that has not been, whatever its acks.

        What brokers have got for these is held until it is answered. `severed`: nothing is sent for any topic.
        """
        if not self._standing.part(severed=severed):
            return
        is_over, upstreams = self._standing.is_over, self._upstreams.values()
        withdrawn = withdraw(upstreams, lambda piece: any(is_over(piece.exchange, entry) for entry in piece.entries()))
        written = [piece for upstream in upstreams for piece in ordered_pieces(upstream)]
        if self._standing.settlement is not None:
            self._hold(self._standing.settlement, written)
        sent = {(piece.exchange.sequence, entry) for piece in written for entry in piece.entries()}
        for exchange in self._exchanges.all():
            if any(is_over(exchange, entry) for entry in exchange.open_entries()):
                self._part_from(exchange, sent)
        self._order.settle_pieces(withdrawn)
        self._under_way.forget()

    def _hold(self, settlement: Settlement, written: list[Piece]) -> None:
        if self._context.versions.fenced:
            # These connections end, and it is the fences that count; but another process may not know of them yet.
            for piece in written:
                note_lost(piece, settlement)
            return
        if self._last_writes is None:
            self._last_writes = LastWrites(settlement, self._answers)
        self._last_writes.hold(written)

    def _part_from(self, exchange: Exchange, sent: set[tuple[int, Entry]]) -> None:
        if not exchange.is_silent:
            self._exchanges.drop(exchange)
            exchange.request.let_go()
            return
        for entry in exchange.open_entries():
            if (exchange.sequence, entry) not in sent:
                self._exchanges.conclude(exchange, entry, POLICY_VIOLATION)
        self._exchanges.finish_if_complete(exchange)

    def hurry(self) -> None:
        """Wait no longer for the answers to what was written last."""
        if self._last_writes is not None:
            self._last_writes.hurry()

    async def close(self) -> None:
        """The client is gone. What it would hear of is dropped, it will send that again itself; what it sent with
        acks=0 still goes, or is counted as lost. What is held (`part`) is waited for.
        """
        for exchange in self._exchanges.all():
            if not exchange.is_silent:
                self._exchanges.drop(exchange)
        self._order.lanes.drop(lambda exchange: not exchange.is_silent)
        self._order.settle_pieces(withdraw(self._upstreams.values(), lambda piece: not piece.exchange.is_silent))
        self._under_way.forget()
        self._end_event()
        if self._last_writes is not None:
            await self._last_writes.settle(self._context.limits.own_unsettled_s)
        await self._exchanges.emptied(FLUSH_S)
        self._end(self._exchanges.all())
        self._order.timer.close()
        await self._failures.lookups.close()
