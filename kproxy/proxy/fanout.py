"""Split, send, take answers, retry, merge: the one mechanism behind Produce, Fetch and ListOffsets.

Decisions are made in `kproxy.routing`; this module carries them out for one client connection. An exchange enters by
`submit` and leaves by its `respond`, called exactly once.

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

import asyncio
from collections.abc import Callable, Mapping
from itertools import groupby

from codec.api_keys import PRODUCE
from codec.error_codes import (
    NOT_LEADER_OR_FOLLOWER,
    OUT_OF_ORDER_SEQUENCE_NUMBER,
    POLICY_VIOLATION,
    UNKNOWN_TOPIC_ID,
)
from codec.errors import CodecError
from codec.partitioned import (
    PartitionedApi,
    PartitionedRequest,
    PartitionedResponse,
    PlainAnswer,
    set_response_correlation_id,
)
from codec.primitives import Buffer
from kproxy.fencing.settlement import Settlement
from kproxy.observe.audit.noted import ConnectionAcks, Noted
from kproxy.proxy.connections import Connections
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.lane_timer import LaneTimer
from kproxy.proxy.last_writes import LastWrites, note_lost
from kproxy.proxy.lookups import OwnerLookups
from kproxy.proxy.owning import NOTHING_REFUSED, Owning, Respond
from kproxy.proxy.pieces import Piece, UnderWay, entries_of, ordered_pieces, under_way
from kproxy.proxy.second_looks import SecondLooks
from kproxy.proxy.upstream import FLUSH_S, Upstream
from kproxy.routing import retry
from kproxy.routing.identity import is_recognisable, lane_key
from kproxy.routing.lanes import Item, Lanes
from kproxy.routing.merge import Exchange, Matched, answers_in_order, match_results
from kproxy.routing.routes import Routes
from kproxy.routing.split import Entry, Selection, add_entry, split
from kproxy.routing.topology import NO_OWNER, Topology

# A broker that has not answered so long after a deadline is not going to: its own timer has run out as well.
HUNG_AFTER_S = 5.0
_NONE_HELD: set[Entry] = set()
_NOTHING_UNDER_WAY: UnderWay = {}
# A broker has a piece, and its answer does not come any more.
_MAY_STILL_BE_APPENDED = (retry.CONNECTION_LOST, retry.UNREADABLE)


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
        self._topology: Topology = context.topology
        self._connections = connections
        self._upstreams: Mapping[int, Upstream] = connections.by_broker
        self._on_undeliverable = on_undeliverable
        self._lanes = Lanes()
        self._busy_lanes = self._lanes.table
        # What of its acknowledgements is noted, where the proxy keeps a trail of them.
        self.acks = context.trail.connection(context.topology) if context.trail is not None else None
        self._routes: Routes[Upstream, Noted] = Routes(
            context.topology, self.acks.part if self.acks is not None else None
        )
        # What lanes let go in the course of an event; it is sent at the event's end.
        self._released: list[Item] = []
        self._open: dict[int, tuple[Exchange, Respond]] = {}
        self._sequence = 0
        # The newest exchange at the last call of `take_out`, and at the one before.
        self._seen_sequence = 0
        self._taken_out_to = 0
        self._seen_version = -1
        # Topic ids that were asked for before anybody knew the topic's name.
        self._nameless: set[bytes] = set()
        self._timer = LaneTimer(context, self._lanes, self._wake)
        self._looks = SecondLooks(context, self._dispatch)
        self._lookups = OwnerLookups(context)
        # What its client has claimed, once it has claimed anything.
        self.owning: Owning | None = None
        # Where topics have writer groups: what is to be settled when their writers end.
        self._settlement = context.own.settlement if context.own is not None and context.own.gated else None
        self._last_writes: LastWrites | None = None
        if self._settlement is not None:
            connections.before_open = self._lapses
        self._is_parted = False
        self._is_severed = False
        # Done when a closed fan-out has nothing left to send.
        self._emptied: asyncio.Future[None] | None = None

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
        self._sequence += 1
        exchange = Exchange(api, request, self._sequence, deadline)
        if look_until:
            exchange.look_until = look_until
        if silent:
            exchange.is_silent = silent
        self._open[exchange.sequence] = (exchange, respond)
        self._dispatch(exchange, refused)
        # What is under way first: with acks=0 a refusal ends the connection.
        for entry, error_code in refused.items():
            self._conclude(exchange, entry, error_code)
        if refused:
            self._finish_if_complete(exchange)

    # Sending

    def _dispatch(self, exchange: Exchange, refused: Mapping[Entry, int] = NOTHING_REFUSED) -> None:
        if self._topology.version != self._seen_version:
            self._follow_topology()
            if exchange.sequence not in self._open:
                # A connection was given up for it, and the client's ended with that.
                return
        if exchange.is_ordered and not self._busy_lanes and not refused and self._dispatch_proven(exchange):
            return
        held = self._hold_back(exchange) if self._lanes else _NONE_HELD
        if refused:
            held = held | refused.keys()
        pieces = split(exchange.request, self._topology, held)
        if len(pieces) > 1:
            self._context.counters["splits"] += 1
        whole = len(pieces) == 1 and not held
        for owner, selection in pieces.items():
            self._send(exchange, owner, selection, whole=whole, share=len(pieces))
        if self._lanes:
            self._timer.arm()
        if exchange.complete:
            self._finish(exchange)

    def _dispatch_proven(self, exchange: Exchange) -> bool:
        """The ordinary course: every route is proven and nothing waits, so that all of it follows what went before."""
        plan = self._routes.plan(exchange.api, exchange.request)
        if not plan:
            return False
        for part in plan:
            if part.connection.closed:
                return False
        if len(plan) == 1:
            upstream, _, plain, noted = plan[0]
            piece = Piece(self, exchange, upstream, None, self._topology.revision, plain, noted)
            upstream.forward(piece, exchange.request.frame)
            return True
        self._context.counters["splits"] += 1
        for upstream, selection, plain, noted in plan:
            self._send_part(exchange, upstream, selection, share=len(plan), plain=plain, noted=noted)
        return True

    def _send(self, exchange: Exchange, owner: int, selection: Selection, *, whole: bool, share: int) -> None:
        if self._is_parted and not self._is_wanted(exchange, selection):
            # The client's connection has ended in the course of this very event.
            return
        if owner == NO_OWNER:
            for entry in entries_of(selection):
                is_nameless = exchange.request.is_nameless(exchange.topic(entry))
                event = UNKNOWN_TOPIC_ID if is_nameless else retry.NOT_WRITTEN
                self._failed(exchange, entry, event, self._topology.revision, _NOTHING_UNDER_WAY)
            return
        upstream = self._connections.to(owner)
        if self.owning is not None and exchange.api.api_key == PRODUCE:
            if self._lapses():
                return
            self.owning.binder.before(upstream, exchange, selection, self.owning.holdings)
        if exchange.is_ordered:
            self._probe_new_routes(exchange, upstream, selection)
        if whole:
            upstream.forward(Piece(self, exchange, upstream, None, self._topology.revision), exchange.request.frame)
        else:
            self._send_part(exchange, upstream, selection, share=share)

    def _send_part(
        self,
        exchange: Exchange,
        upstream: Upstream,
        selection: Selection,
        *,
        share: int,
        plain: PlainAnswer | None = None,
        noted: Noted | None = None,
    ) -> None:
        correlation_id = upstream.next_correlation_id()
        buffers = exchange.splitter(share).part(selection, correlation_id)
        piece = Piece(self, exchange, upstream, selection, self._topology.revision, plain, noted)
        upstream.send(piece, correlation_id, buffers)

    def _probe_new_routes(self, exchange: Exchange, upstream: Upstream, selection: Selection) -> None:
        for topic_place, ordinals in selection:
            topic = exchange.request.topics[topic_place]
            if self._routes.all_proven(topic, ordinals, upstream):
                continue
            for ordinal in ordinals:
                if not self._routes.is_proven(topic.name, topic.partitions[ordinal], upstream):
                    self._lanes.probe(lane_key(exchange, (topic_place, ordinal)), exchange.sequence)

    def name_topics(self, request: PartitionedRequest) -> None:
        """Put names in the place of topic ids.

        Order is kept by what a partition is called, and a client may name its topic by id in one request and by name in
        the next, as franz-go does.
        """
        for topic in request.topics:
            name = self._topology.name_of(topic.wire)
            if name is not None:
                topic.name = name
            elif len(self._nameless) < self._context.limits.max_open_requests:
                self._nameless.add(topic.wire)

    def _name_the_nameless(self) -> None:
        """The topology may have learnt the names of topics that something waits for."""
        names = {each: name for each in self._nameless if (name := self._topology.name_of(each)) is not None}
        if not names:
            return
        self._nameless -= names.keys()
        waiting = [piece.exchange for upstream in self._upstreams.values() for piece in ordered_pieces(upstream)]
        for exchange in (*waiting, *(exchange for exchange, _ in self._open.values())):
            for topic in exchange.request.topics:
                if topic.name in names and exchange.request.is_nameless(topic):
                    topic.name = names[topic.wire]
                    for partition_index in topic.partitions:
                        self._lanes.rename((topic.wire, partition_index), (topic.name, partition_index))

    def _follow_topology(self) -> None:
        """The topology has changed: what is unanswered elsewhere than it would go now blocks its partition.

        Where many partitions change owners, most of them are none of this client's: what did not move is not looked at.
        """
        moved = self._topology.moved_since(self._seen_version)
        self._seen_version = self._topology.version
        self._routes.forget_outdated(moved)
        if moved is None and self._nameless:
            self._name_the_nameless()
        topics = {topic for topic, _ in moved} if moved is not None else None
        for owner, upstream in self._upstreams.items():
            for piece in ordered_pieces(upstream):
                if topics is not None and not piece.exchange.asks_of_any(topics):
                    continue
                for entry in piece.entries():
                    topic, partition_index = piece.exchange.partition(entry)
                    # An owner that has it once more is as good as another one: what it refused before, it takes now.
                    is_new = self._topology.owner_revision(topic, partition_index) > piece.routed_at
                    if is_new or piece.exchange.route(entry, self._topology) != owner:
                        self._lanes.block(lane_key(piece.exchange, entry), (piece.exchange.sequence,))
        if moved is None:
            self._connections.give_up_moved()

    def _hold_back(self, exchange: Exchange) -> set[Entry]:
        """The entries that must wait, put into their lanes."""
        held: set[Entry] = set()
        for entry in exchange.open_entries():
            key = lane_key(exchange, entry)
            if key in self._lanes:
                self._lanes.hold(key, Item(exchange, entry, NOT_LEADER_OR_FOLLOWER))
                held.add(entry)
        return held

    def _send_released(self) -> None:
        """The end of an event: what waited and may go now goes."""
        while self._released:
            released, self._released = self._released, []
            self._send_items(released)
        if self._lanes:
            self._timer.arm()

    def _send_items(self, items: list[Item]) -> None:
        """Send items that may go now: one piece for each exchange and broker."""
        if self._topology.version != self._seen_version:
            self._follow_topology()
        items.sort(key=lambda item: (item.exchange.sequence, item.entry))
        for sequence, group in groupby(items, key=lambda item: item.exchange.sequence):
            pieces: dict[int, Selection] = {}
            for item in group:
                exchange = item.exchange
                key = lane_key(exchange, item.entry)
                if sequence not in self._open or not exchange.is_open(item.entry):
                    self._settle(exchange, item.entry, appended=False)
                    continue
                if key in self._lanes and not self._lanes.is_probing(key, sequence):
                    # One before it found its route new, or no route at all.
                    self._lanes.hold(key, item)
                    continue
                owner = exchange.route(item.entry, self._topology)
                add_entry(pieces.setdefault(owner, []), *item.entry)
            for owner, selection in pieces.items():
                # What is sent again is one part among others, whatever became of those.
                self._send(exchange, owner, selection, whole=False, share=max(2, len(pieces)))
            self._finish_if_complete(exchange)

    def sent(self, piece: Piece) -> None:
        """A piece that has no answer (acks=0) is on its way: that is all that will be known of it."""
        for entry in piece.entries():
            piece.exchange.take(entry, b"")
            self._settle(piece.exchange, entry, appended=True)
        self._send_released()
        self._finish_if_complete(piece.exchange)

    # Taking answers

    def answered(self, piece: Piece, frame: memoryview) -> None:
        """A broker's answer to a piece."""
        exchange = piece.exchange
        if not self._busy_lanes and exchange.sequence in self._open and self._take_plain(piece, exchange, frame):
            return
        try:
            response = exchange.api.parse_response(frame, exchange.request.header.api_version)
            if piece.whole and not self._lanes and self._passes_through(exchange, response):
                if exchange.is_ordered and self.acks is not None:
                    self._note(piece, frame, match_results(exchange, piece.selection, response))
                self._pass_through(exchange, frame)
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
        failures = []
        for entry, error_code, topic, ordinal in matched:
            result = frame[topic.starts[ordinal] : topic.ends[ordinal]]
            if error_code:
                failures.append((entry, error_code, result))
            else:
                exchange.take(entry, result)
                self._succeeded(piece, entry)
        unanswered = under_way(self._upstreams.values()) if failures else _NOTHING_UNDER_WAY
        for entry, error_code, result in failures:
            if error_code == NOT_LEADER_OR_FOLLOWER:
                attempts = exchange.attempts.setdefault(entry, retry.Attempts())
                attempts.refused_by |= {piece.upstream.owner}
            self._failed(exchange, entry, error_code, piece.routed_at, unanswered, result)
        self._send_released()
        self._finish_if_complete(exchange)

    def _take_plain(self, piece: Piece, exchange: Exchange, frame: memoryview) -> bool:
        """The ordinary course: success for all that was asked, and no lane that wants to know of it."""
        plain = piece.plain or exchange.api.plain_answer(exchange.request, piece.selection)
        if plain is None:
            return False
        if piece.part is None:
            if exchange.throttle_time_ms or not plain.is_met(frame):
                return False
            if piece.noted is not None and not exchange.is_silent:
                piece.noted.note(exchange, frame)
            elif self.acks is not None:
                self._note_plain(self.acks, piece, plain, frame)
            self._pass_through(exchange, frame)
            return True
        results = plain.results(frame)
        if results is None:
            return False
        if piece.noted is not None and not exchange.is_silent:
            piece.noted.note(exchange, frame)
        elif self.acks is not None:
            self._note_plain(self.acks, piece, plain, frame)
        exchange.take_all(piece.part, results)
        if exchange.open_count == 0:
            self._finish(exchange)
        return True

    def _note_plain(self, acks: ConnectionAcks, piece: Piece, plain: PlainAnswer, frame: memoryview) -> None:
        """Note for the audit what a plain answer acknowledges to a piece that was not sent by a plan."""
        if piece.exchange.is_silent:
            return
        noted = acks.part(piece.upstream, piece.exchange.request, piece.selection, plain, piece.routed_at)
        if noted is not None:
            noted.note(piece.exchange, frame)

    def _note(self, piece: Piece, frame: memoryview, matched: Matched) -> None:
        """Note for the audit what an answer acknowledges to a client that is still waiting for it."""
        exchange = piece.exchange
        if self.acks is None or exchange.sequence not in self._open or not exchange.is_ordered:
            return
        for entry, error_code, topic, ordinal in matched:
            if not error_code:
                result = frame[topic.starts[ordinal] : topic.ends[ordinal]]
                self.acks.note(exchange, entry, piece.upstream.owner, piece.routed_at, result)

    def _passes_through(self, exchange: Exchange, response: PartitionedResponse) -> bool:
        return (
            not response.names_brokers
            and not response.error_code
            and exchange.sequence in self._open
            and exchange.throttle_time_ms == 0
            and answers_in_order(exchange.request, response)
        )

    def _pass_through(self, exchange: Exchange, frame: memoryview) -> None:
        """Hand an answer on as it came, the client's correlation_id in it."""
        set_response_correlation_id(frame, exchange.request.header.correlation_id)
        exchange.open_count = 0
        self._close_exchange(exchange)([] if exchange.is_silent else [frame])

    def _succeeded(self, piece: Piece, entry: Entry) -> None:
        exchange = piece.exchange
        if exchange.is_ordered and self._lanes.is_probing(lane_key(exchange, entry), exchange.sequence):
            self._routes.prove(*exchange.partition(entry), piece.upstream, piece.routed_at)
        self._settle(exchange, entry, appended=True)

    def _finish_if_complete(self, exchange: Exchange) -> None:
        if exchange.complete:
            self._finish(exchange)

    def _finish(self, exchange: Exchange) -> None:
        if exchange.sequence not in self._open or exchange.sequence in self._looks.waiting:
            return
        if exchange.look_until and self._looks.wants(exchange):
            return
        self._close_exchange(exchange)([] if exchange.is_silent else exchange.encode())

    def _close_exchange(self, exchange: Exchange) -> Respond:
        _, respond = self._open.pop(exchange.sequence)
        if self._emptied is not None and not self._open and not self._emptied.done():
            self._emptied.set_result(None)
        return respond

    # Failing and trying again

    def fail_piece(self, piece: Piece, event: int) -> None:
        """The same event for every entry of a piece."""
        if self._settlement is not None and event in _MAY_STILL_BE_APPENDED:
            note_lost(piece, self._settlement)
        unanswered = under_way(self._upstreams.values())
        for entry in piece.entries():
            self._failed(piece.exchange, entry, event, piece.routed_at, unanswered)
        self._send_released()
        self._finish_if_complete(piece.exchange)

    def _failed(
        self,
        exchange: Exchange,
        entry: Entry,
        event: int,
        routed_at: int,
        unanswered: UnderWay,
        result: Buffer | None = None,
    ) -> None:
        """Something other than success; `result` is the broker's own entry, for codes that are handed on."""
        key, sequence = lane_key(exchange, entry), exchange.sequence
        if not exchange.is_open(entry) or sequence not in self._open:
            # It was answered at its deadline, or its client is gone; only the lane still wants to know.
            self._settle(exchange, entry, appended=False)
            return
        rows = self._rows(exchange)
        safe, is_ambiguous = False, retry.is_ambiguous(rows, event)
        if is_ambiguous:
            exchange.ambiguous.add(entry)
            safe = self._context.knows_batches_again and is_recognisable(exchange, entry)
        is_probing = self._lanes.is_probing(key, sequence)
        # Where a refusal may come after an append, being behind another one does not make a second sending safe.
        behind = key in self._lanes and retry.is_held_back(event) and not is_probing and (safe or not is_ambiguous)
        attempts = exchange.attempts.setdefault(entry, retry.Attempts())
        if not behind:
            attempts.add(routed_at, self._topology.owner_revision(*exchange.partition(entry)))
        verdict = retry.decide(rows, event, exhausted=attempts.exhausted, resend_is_safe=safe)
        # Being out of order behind another one is not its own outcome, and producers end at that code.
        is_misled = behind and event == OUT_OF_ORDER_SEQUENCE_NUMBER
        error_code = NOT_LEADER_OR_FOLLOWER if is_misled else verdict.error_code
        item = Item(exchange, entry, error_code)
        pause = None if behind else self._timer.pause(item, attempts, routed_at)
        hangs = self._owner_hangs(exchange, entry)
        if (hangs or verdict.retry or behind) and retry.doubts_the_owner(event):
            self._lookups.ask(*exchange.partition(entry), routed_at)
        tries_again = pause is None or (verdict.retry and not hangs and pause.due < exchange.deadline)
        if tries_again and not self._is_over(exchange, entry) and not self._lanes.is_given_up(key, sequence):
            self._context.counters[f"retries.{event}"] += 1
            later = [each for each in unanswered.get(key, ()) if each > sequence]
            self._lanes.refused(key, item, pause, later)
            return
        self._conclude(exchange, entry, error_code, result if error_code == event else None)
        gives_up = event in rows or (is_probing and retry.is_tried_again_by_clients(event))
        self._settle(exchange, entry, appended=False, given_up=gives_up)

    def _owner_hangs(self, exchange: Exchange, entry: Entry) -> bool:
        """Whether sending again would wait behind a hung broker; a new owner's breaker counts, not the old one's."""
        breakers = self._context.breakers
        if not breakers.watching:
            return False
        return breakers.is_open(self._topology.address(exchange.route(entry, self._topology)))

    def _rows(self, exchange: Exchange) -> dict[int, retry.Row]:
        return retry.rows_of(exchange.api.api_key, exchange.request.acks, self._context.conduct)

    def _conclude(self, exchange: Exchange, entry: Entry, error_code: int, result: Buffer | None = None) -> None:
        final = retry.final_code(error_code, is_ambiguous=entry in exchange.ambiguous)
        if exchange.is_silent:
            exchange.take(entry, b"")
            self._on_undeliverable(exchange.partition(entry)[0], final)
            return
        self._context.tally.errors[exchange.api.api_key, final] += 1
        if result is not None and final == error_code:
            exchange.has_errors = True
            exchange.take(entry, result)
        else:
            exchange.give_error(entry, final)

    def _conclude_items(self, items: list[Item]) -> None:
        for item in items:
            self._conclude(item.exchange, item.entry, item.give_up_code)
            self._finish_if_complete(item.exchange)

    def _settle(self, exchange: Exchange, entry: Entry, *, appended: bool, given_up: bool = False) -> None:
        """Tell the lane, if there is one, and note what it lets go."""
        if self._lanes:
            key = lane_key(exchange, entry)
            release = self._lanes.settled(key, exchange.sequence, appended=appended, given_up=given_up)
            self._released += release.send
            self._conclude_items(release.give_up)

    # Time

    def _wake(self) -> None:
        self._send_items(self._lanes.ready(self._context.clock()))
        self._send_released()

    def expire(self, now: float) -> None:
        """Answer what has reached its deadline: done entries with their results, the rest with an error.

        Produce that a broker may have seen gets REQUEST_TIMED_OUT, what was never written NOT_LEADER_OR_FOLLOWER.
        """
        due = [exchange for exchange, _ in self._open.values() if exchange.deadline <= now]
        self._context.counters["deadlines"] += len(due)
        self._end(due)
        for upstream in list(self._upstreams.values()):
            oldest = upstream.oldest_unanswered()
            if isinstance(oldest, Piece) and oldest.exchange.deadline + HUNG_AFTER_S <= now:
                upstream.give_up("it does not answer")
        self._send_released()

    def take_out(self) -> None:
        """Called now and then: what has waited since the last call keeps no receive buffer from being used again."""
        since, self._taken_out_to, self._seen_sequence = self._taken_out_to, self._seen_sequence, self._sequence
        for sequence, (exchange, _) in self._open.items():
            if since < sequence <= self._taken_out_to:
                exchange.request.take_out()

    def _end(self, due: list[Exchange]) -> None:
        """Answer what of these exchanges is still open; their pieces that no broker has seen are taken back."""
        if not due:
            return
        sequences = {exchange.sequence for exchange in due}
        withdrawn = self._withdraw(lambda piece: piece.exchange.sequence in sequences)
        unwritten = {(piece.exchange.sequence, entry) for piece in withdrawn for entry in piece.entries()}
        unanswered = under_way(self._upstreams.values())
        for exchange in due:
            # It may have been answered with another one, whose end gave up what waited behind it.
            if exchange.sequence in self._open:
                self._end_one(exchange, unwritten, unanswered)
        self._settle_pieces(withdrawn)

    def _end_one(self, exchange: Exchange, unwritten: set[tuple[int, Entry]], unanswered: UnderWay) -> None:
        self._looks.stop(exchange)
        written = self._rows(exchange)[retry.CONNECTION_LOST].final or NOT_LEADER_OR_FOLLOWER
        for entry in exchange.open_entries():
            key = lane_key(exchange, entry)
            self._conclude_items(self._lanes.give_up(key, exchange.sequence, self._sequence, unanswered.get(key, ())))
            if exchange.is_open(entry):
                never_written = (exchange.sequence, entry) in unwritten
                self._conclude(exchange, entry, NOT_LEADER_OR_FOLLOWER if never_written else written)
        self._finish_if_complete(exchange)
        if exchange.sequence not in self._open:
            # Its pieces may wait for long; what they are still wanted for is order.
            exchange.request.let_go()

    def _withdraw(self, is_meant: Callable[[Piece], bool]) -> list[Piece]:
        """Take back pieces that no broker has seen."""
        return [
            ticket
            for upstream in self._upstreams.values()
            for ticket in upstream.withdraw(lambda ticket: isinstance(ticket, Piece) and is_meant(ticket))
            if isinstance(ticket, Piece)
        ]

    def _settle_pieces(self, withdrawn: list[Piece]) -> None:
        for piece in withdrawn:
            for entry in piece.entries():
                self._settle(piece.exchange, entry, appended=False)

    @property
    def open_count(self) -> int:
        """Exchanges that are not answered yet, or with acks=0 not sent."""
        return len(self._open)

    @property
    def has_open_exchanges(self) -> bool:
        return bool(self._open)

    def _is_over(self, exchange: Exchange, entry: Entry) -> bool:
        """Whether the client's connection has ended in a way that lets this not be sent any more."""
        if self._is_severed or not self._is_parted or self._settlement is None:
            return self._is_severed
        return exchange.api.api_key == PRODUCE and exchange.topic(entry).name in self._settlement.topics

    def _is_wanted(self, exchange: Exchange, selection: Selection) -> bool:
        return exchange.sequence in self._open and all(map(exchange.is_open, entries_of(selection)))

    def _lapses(self) -> bool:
        """Sever the client where what it claimed may be another's by now; whether it was.

        What was let through waits for a dial or a retry, and time may have passed without this process.
        """
        own, owning = self._context.own, self.owning
        if own is None or owning is None or owning.holdings.group is None or own.is_live():
            return False
        owning.holdings.sever("its claims may be others' by now: the proxy's lease in etcd is not certain to live")
        return True

    def part(self, *, severed: bool = False) -> None:
        """The client is gone: for topics with a writer group nothing is sent that has not been, whatever its acks.

        What brokers have got for these is held until it is answered. `severed`: nothing is sent for any topic.
        """
        if self._settlement is None and not severed:
            return
        self._is_parted = True
        self._is_severed = self._is_severed or severed
        is_over = self._is_over
        withdrawn = self._withdraw(lambda piece: any(is_over(piece.exchange, entry) for entry in piece.entries()))
        written = [piece for upstream in self._upstreams.values() for piece in ordered_pieces(upstream)]
        if self._settlement is not None:
            self._hold(self._settlement, written)
        sent = {(piece.exchange.sequence, entry) for piece in written for entry in piece.entries()}
        for exchange, _ in list(self._open.values()):
            if any(is_over(exchange, entry) for entry in exchange.open_entries()):
                self._part_from(exchange, sent)
        self._settle_pieces(withdrawn)

    def _hold(self, settlement: Settlement, written: list[Piece]) -> None:
        if self._context.versions.fenced:
            # These connections end, and it is the fences that count; but another process may not know of them yet.
            for piece in written:
                note_lost(piece, settlement)
            return
        if self._last_writes is None:
            self._last_writes = LastWrites(settlement, self)
        self._last_writes.hold(written)

    def _part_from(self, exchange: Exchange, sent: set[tuple[int, Entry]]) -> None:
        self._looks.stop(exchange)
        if not exchange.is_silent:
            del self._open[exchange.sequence]
            exchange.request.let_go()
            return
        for entry in exchange.open_entries():
            if (exchange.sequence, entry) not in sent:
                self._conclude(exchange, entry, POLICY_VIOLATION)
        self._finish_if_complete(exchange)

    def hurry(self) -> None:
        """Wait no longer for the answers to what was written last."""
        if self._last_writes is not None:
            self._last_writes.hurry()

    async def close(self) -> None:
        """The client is gone. What it would hear of is dropped, it will send that again itself; what it sent with
        acks=0 still goes, or is counted as lost. What is held (`part`) is waited for.
        """
        for exchange, _ in list(self._open.values()):
            if not exchange.is_silent:
                self._looks.stop(exchange)
                del self._open[exchange.sequence]
        self._lanes.drop(lambda exchange: not exchange.is_silent)
        self._settle_pieces(self._withdraw(lambda piece: not piece.exchange.is_silent))
        self._send_released()
        if self._last_writes is not None:
            await self._last_writes.settle(self._context.limits.own_unsettled_s)
        if self._open:
            self._emptied = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._emptied,), timeout=FLUSH_S)
        self._end([exchange for exchange, _ in self._open.values()])
        self._timer.close()
        await self._lookups.close()
