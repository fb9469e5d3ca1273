"""Take what brokers say to pieces: answers, or that there will be none.

Each of these is an event: it changes all exchanges and lanes that it concerns, and then `end_event` is called, which
sends what may go now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from codec.error_codes import NOT_LEADER_OR_FOLLOWER
from codec.errors import CodecError
from codec.partitioned import PartitionedResponse, PlainAnswer
from kproxy.observe.audit.noted import ConnectionAcks, Noted
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.failures import Failures
from kproxy.proxy.last_writes import note_lost
from kproxy.proxy.open_exchanges import OpenExchanges
from kproxy.proxy.order import Order
from kproxy.proxy.pieces import Piece, UnderWay
from kproxy.proxy.standing import Standing
from kproxy.proxy.upstream import Upstream
from kproxy.routing import retry
from kproxy.routing.identity import lane_key
from kproxy.routing.merge import Exchange, Matched, answers_in_order, match_results
from kproxy.routing.routes import Routes
from kproxy.routing.split import Entry

# A broker has a piece, and its answer does not come any more.
_MAY_STILL_BE_APPENDED = (retry.CONNECTION_LOST, retry.UNREADABLE)
# Batches are in doubt that left in this time before a connection's end, or up to twice as long, in seconds.
WINDOW_S: Final = 1.0
MAX_PARTITIONS: Final = 4096

Batches = dict[tuple[bytes, int], tuple[int, int]]
"""By topic and partition index: how many batches, and the topology's revision that the last of them was sent at."""


class _Recent:
    """What was sent on one connection since `since`, and in the window before."""

    __slots__ = ("before", "now", "since")

    def __init__(self, since: float) -> None:
        self.since = since
        self.now: Batches = {}
        self.before: Batches = {}

    def advance(self, now: float) -> None:
        """Begin a new window where this one is over."""
        elapsed = now - self.since
        if elapsed >= WINDOW_S:
            self.before = self.now if elapsed < 2 * WINDOW_S else {}
            self.now = {}
            self.since = now


class Unconfirmed:
    """What one client connection has sent with acks=0 in the last moments; `clock` in seconds.

    Nobody says whether such a batch was appended. A broker that refuses one closes the connection, as Apache Kafka
    does; one that is killed or cut off does so as well. Bytes that left this process shortly before may have arrived or
    not. Brokers close within milliseconds, so bytes that left long before are not in doubt.

    Invariant: of each connection at most MAX_PARTITIONS partitions are known by name for each WINDOW_S.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._recent: dict[Upstream, _Recent] = {}

    def note(self, piece: Piece, entry: Entry) -> None:
        """A batch has left this process."""
        now = self._clock()
        recent = self._recent.get(piece.upstream)
        if recent is None:
            self._recent = {upstream: known for upstream, known in self._recent.items() if not upstream.closed}
            recent = self._recent[piece.upstream] = _Recent(now)
        recent.advance(now)
        partition = piece.exchange.partition(entry)
        count, _ = recent.now.get(partition, (0, 0))
        if count or len(recent.now) < MAX_PARTITIONS:
            recent.now[partition] = (count + 1, piece.routed_at)

    def take(self, upstream: Upstream) -> Batches:
        """What is in doubt now that this connection has ended."""
        recent = self._recent.pop(upstream, None)
        if recent is None:
            return {}
        recent.advance(self._clock())
        doubted = dict(recent.before)
        for partition, (count, routed_at) in recent.now.items():
            doubted[partition] = (doubted.get(partition, (0, 0))[0] + count, routed_at)
        return doubted


class Answers:
    """The keeper of one client connection's pieces (kproxy.proxy.pieces.PieceKeeper); `acks` notes for the audit."""

    def __init__(
        self,
        context: ProxyContext,
        exchanges: OpenExchanges,
        order: Order,
        under_way: UnderWay,
        routes: Routes[Upstream, Noted],
        standing: Standing,
        failures: Failures,
        acks: ConnectionAcks | None,
        end_event: Callable[[], None],
    ) -> None:
        self._context = context
        self._unconfirmed = Unconfirmed(context.clock)
        self._exchanges = exchanges
        self._open = exchanges.table
        self._order = order
        self._lanes = order.lanes
        self._busy_lanes = order.lanes.table
        self._under_way = under_way
        self._routes = routes
        self._settlement = standing.settlement
        self._failures = failures
        self._acks = acks
        self._end_event = end_event

    def sent(self, piece: Piece) -> None:
        """A piece that has no answer (acks=0) has left: that is all that will be known of it."""
        for entry in piece.entries():
            piece.exchange.take(entry, b"")
            self._unconfirmed.note(piece, entry)
            self._order.settle(piece.exchange, entry, appended=True)
        self._end_event()
        self._exchanges.finish_if_complete(piece.exchange)

    def unconfirmed(self, piece: Piece) -> None:
        """What was sent on a connection with acks=0 a moment ago may not have arrived, or was refused by closing it.

        That is what Kafka's brokers do, so that the owners are looked up anew.
        """
        for (topic, partition_index), (count, routed_at) in self._unconfirmed.take(piece.upstream).items():
            self._context.tally.leave_unconfirmed(self._context.topology.name_of(topic) or topic, count)
            self._failures.lookups.ask(topic, partition_index, routed_at)

    def answered(self, piece: Piece, frame: memoryview) -> None:
        """A broker's answer to a piece."""
        exchange = piece.exchange
        if self._under_way.sequences is not None:
            self._under_way.remove(piece)
        if not self._busy_lanes and exchange.sequence in self._open and self._take_plain(piece, exchange, frame):
            return
        try:
            response = exchange.api.parse_response(frame, exchange.request.header.api_version)
            if piece.whole and not self._lanes and self._passes_through(exchange, response):
                if exchange.is_ordered and self._acks is not None:
                    self._note(piece, frame, match_results(exchange, piece.selection, response))
                self._exchanges.pass_through(exchange, frame)
                return
            matched = [] if response.error_code else match_results(exchange, piece.selection, response)
        except CodecError as error:
            piece.upstream.distrust(str(error))
            self.fail_piece(piece, retry.UNREADABLE)
            return
        exchange.note(response)
        if response.error_code:
            self.fail_piece(piece, response.error_code)
            return
        self._note(piece, frame, matched)
        self._take_results(piece, frame, matched)

    def fail_piece(self, piece: Piece, event: int) -> None:
        """The same event for every entry of a piece."""
        if self._settlement is not None and event in _MAY_STILL_BE_APPENDED:
            note_lost(piece, self._settlement)
        self._under_way.remove(piece)
        for entry in piece.entries():
            piece.exchange.note_sent(entry, piece.upstream.owner)
            self._failures.failed(piece.exchange, entry, event, piece.routed_at)
        self._end_event()
        self._exchanges.finish_if_complete(piece.exchange)

    # The ordinary course

    def _take_plain(self, piece: Piece, exchange: Exchange, frame: memoryview) -> bool:
        """Success for all that was asked, and no lane that wants to know of it; False where it is anything else."""
        plain = piece.plain or exchange.api.plain_answer(exchange.request, piece.selection)
        if plain is None:
            return False
        if piece.part is None:
            if exchange.throttle_time_ms or not plain.is_met(frame):
                return False
            if piece.noted is not None and not exchange.is_silent:
                piece.noted.note(exchange, frame)
            elif self._acks is not None:
                self._note_plain(self._acks, piece, plain, frame)
            self._exchanges.pass_through(exchange, frame)
            return True
        results = plain.results(frame)
        if results is None:
            return False
        if piece.noted is not None and not exchange.is_silent:
            piece.noted.note(exchange, frame)
        elif self._acks is not None:
            self._note_plain(self._acks, piece, plain, frame)
        exchange.take_all(piece.part, results)
        if exchange.open_count == 0:
            self._exchanges.finish(exchange)
        return True

    def _passes_through(self, exchange: Exchange, response: PartitionedResponse) -> bool:
        return (
            not response.names_brokers
            and not response.error_code
            and exchange in self._exchanges
            and exchange.throttle_time_ms == 0
            and answers_in_order(exchange.request, response)
        )

    # Entry by entry

    def _take_results(self, piece: Piece, frame: memoryview, matched: Matched) -> None:
        """Successes first: what they release is known before anything is judged to have failed."""
        exchange = piece.exchange
        failures = []
        for entry, error_code, topic, ordinal in matched:
            result = frame[topic.starts[ordinal] : topic.ends[ordinal]]
            if error_code:
                failures.append((entry, error_code, result))
            else:
                exchange.take(entry, result)
                self._succeeded(piece, entry)
        for entry, error_code, result in failures:
            exchange.note_sent(entry, piece.upstream.owner)
            if error_code == NOT_LEADER_OR_FOLLOWER:
                attempts = exchange.attempts(entry)
                attempts.refused_by |= {piece.upstream.owner}
            self._failures.failed(exchange, entry, error_code, piece.routed_at, result)
        self._end_event()
        self._exchanges.finish_if_complete(exchange)

    def _succeeded(self, piece: Piece, entry: Entry) -> None:
        exchange = piece.exchange
        if exchange.is_ordered and self._lanes.is_probing(lane_key(exchange, entry), exchange.sequence):
            self._routes.prove(*exchange.partition(entry), piece.upstream, piece.routed_at)
        self._order.settle(exchange, entry, appended=True)

    # For the audit

    def _note_plain(self, acks: ConnectionAcks, piece: Piece, plain: PlainAnswer, frame: memoryview) -> None:
        """Note what a plain answer acknowledges to a piece that was not sent by a plan."""
        if piece.exchange.is_silent:
            return
        noted = acks.part(piece.upstream, piece.exchange.request, piece.selection, plain, piece.routed_at)
        if noted is not None:
            noted.note(piece.exchange, frame)

    def _note(self, piece: Piece, frame: memoryview, matched: Matched) -> None:
        """Note what an answer acknowledges to a client that is still waiting for it."""
        exchange = piece.exchange
        if self._acks is None or exchange not in self._exchanges or not exchange.is_ordered:
            return
        for entry, error_code, topic, ordinal in matched:
            if not error_code:
                result = frame[topic.starts[ordinal] : topic.ends[ordinal]]
                self._acks.note(exchange, entry, piece.upstream.owner, piece.routed_at, result)
