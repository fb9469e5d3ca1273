"""Split, send, take answers, retry, merge: the one mechanism behind Produce, Fetch and ListOffsets.

Decisions are made in `kproxy.routing`; this module carries them out for one client connection. An exchange enters by
`submit` and leaves by its `respond`, called exactly once, or never where the request has no answer (acks=0).

Invariants
1. A partition's entry is at any time in one place: a piece that is under way, a lane, or done.
2. What is sent again goes through a lane; nothing of that partition overtakes it (kproxy.routing.lanes).
3. When the topology has changed and a partition is to go elsewhere than its unanswered batches went, it waits for them.
4. What was answered at its deadline is not sent afterwards; what a broker may have seen keeps its lane until it is
   answered or its connection is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeAlias

from codec.error_codes import NOT_LEADER_OR_FOLLOWER
from codec.errors import CodecError
from codec.partitioned import (
    PartitionedApi,
    PartitionedRequest,
    PartitionedResponse,
    encode_part,
    set_correlation_id,
    set_response_correlation_id,
)
from codec.primitives import Buffer
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.upstream import Upstream
from kproxy.routing import retry
from kproxy.routing.identity import is_recognisable, lane_key
from kproxy.routing.lanes import Item, Lanes
from kproxy.routing.merge import Exchange, answers_in_order, match_results
from kproxy.routing.split import Entry, Selection, add_entry, route, split
from kproxy.routing.topology import NO_OWNER, Topology

# Pauses of a read that spans brokers and waits for data, in seconds: soon at first, then easy on the brokers.
LOOK_PAUSES_S = (0.005, 0.01, 0.02, 0.04)
_NONE_HELD: set[Entry] = set()

Respond: TypeAlias = Callable[[list[Buffer]], None]


class Piece:
    """What one broker is asked on behalf of one exchange; the ticket of its answer."""

    __slots__ = ("exchange", "expects_answer", "fanout", "selection", "upstream", "whole")

    def __init__(
        self, fanout: Fanout, exchange: Exchange, upstream: Upstream, selection: Selection, *, whole: bool
    ) -> None:
        self.fanout = fanout
        self.exchange = exchange
        self.upstream = upstream
        self.selection = selection
        self.whole = whole
        self.expects_answer = exchange.request.acks != 0

    def sent(self) -> None:
        self.fanout.sent(self)

    def answered(self, frame: memoryview) -> None:
        self.fanout.answered(self, frame)

    def lost(self, *, written: bool) -> None:
        self.fanout.fail_piece(self, retry.CONNECTION_LOST if written else retry.NOT_WRITTEN)

    def entries(self) -> Iterable[Entry]:
        return _entries(self.selection)


def _entries(selection: Selection) -> Iterable[Entry]:
    for topic_place, ordinals in selection:
        for ordinal in ordinals:
            yield topic_place, ordinal


class Fanout:
    """The exchanges of one client connection.

    `upstream_of` gives the connection to a broker; `on_undeliverable` learns of acks=0 parts that cannot be sent.
    """

    def __init__(
        self,
        context: ProxyContext,
        upstream_of: Callable[[int], Upstream],
        upstreams: dict[int, Upstream],
        on_undeliverable: Callable[[bytes, int], None],
    ) -> None:
        self._context = context
        self._topology: Topology = context.topology
        self._upstream_of = upstream_of
        self._upstreams = upstreams
        self._on_undeliverable = on_undeliverable
        self._lanes = Lanes()
        self._open: dict[int, tuple[Exchange, Respond]] = {}
        self._sequence = 0
        self._settled_version = -1
        self._timer: asyncio.TimerHandle | None = None
        self._looks: dict[int, asyncio.TimerHandle] = {}
        self._refreshes: set[asyncio.Task[None]] = set()
        self._closed = False

    def submit(
        self,
        api: PartitionedApi,
        request: PartitionedRequest,
        *,
        deadline: float,
        respond: Respond,
        look_until: float = 0.0,
    ) -> None:
        """Begin an exchange.

        `deadline` and `look_until`, the time until which a read that spans brokers asks again for want of data, are on
        the proxy's clock, in seconds.
        """
        api.admit(request)
        self._sequence += 1
        exchange = Exchange(api, request, self._sequence, deadline)
        exchange.look_until = look_until
        self._open[exchange.sequence] = (exchange, respond)
        self._dispatch(exchange)

    # Sending

    def _dispatch(self, exchange: Exchange) -> None:
        if self._topology.version != self._settled_version:
            self._block_strays()
        held = self._hold_back(exchange) if self._lanes else _NONE_HELD
        pieces = split(exchange.request, self._topology, held)
        if len(pieces) > 1:
            self._context.counters["splits"] += 1
        whole = len(pieces) == 1 and not held
        for owner, selection in pieces.items():
            self._send(exchange, owner, selection, whole=whole, share=len(pieces))
        if exchange.complete:
            self._finish(exchange)

    def _send(self, exchange: Exchange, owner: int, selection: Selection, *, whole: bool, share: int) -> None:
        if owner == NO_OWNER:
            for entry in _entries(selection):
                self._failed(exchange, entry, retry.NOT_WRITTEN)
            return
        request = exchange.request
        upstream = self._upstream_of(owner)
        correlation_id = upstream.next_correlation_id()
        buffers: list[Buffer]
        if whole:
            set_correlation_id(request.frame, correlation_id)
            buffers = [request.frame]
        else:
            topics = [(request.topics[topic_place], ordinals) for topic_place, ordinals in selection]
            buffers = encode_part(request, topics, exchange.api.piece_preamble(request, share), correlation_id)
        upstream.send(Piece(self, exchange, upstream, selection, whole=whole), correlation_id, buffers)

    def _block_strays(self) -> None:
        """The topology has changed: what is unanswered elsewhere than it would go now blocks its partition."""
        self._settled_version = self._topology.version
        for owner, upstream in self._upstreams.items():
            for ticket in upstream.unanswered():
                if not isinstance(ticket, Piece):
                    continue
                for entry in ticket.entries():
                    topic, partition_index = ticket.exchange.partition(entry)
                    if route(self._topology, topic, partition_index) != owner:
                        self._lanes.block(lane_key(ticket.exchange, entry), (ticket.exchange.sequence,))

    def _hold_back(self, exchange: Exchange) -> set[Entry]:
        """The entries that must wait, put into their lanes."""
        held: set[Entry] = set()
        for entry in exchange.open_entries():
            key = lane_key(exchange, entry)
            if key in self._lanes:
                self._lanes.hold(key, Item(exchange, entry, NOT_LEADER_OR_FOLLOWER))
                held.add(entry)
        return held

    def _unanswered_behind(self, key: object, sequence: int) -> set[int]:
        """The later exchanges that have this lane's partition under way."""
        return {
            ticket.exchange.sequence
            for upstream in self._upstreams.values()
            for ticket in upstream.unanswered()
            if isinstance(ticket, Piece)
            and ticket.exchange.sequence > sequence
            and any(lane_key(ticket.exchange, entry) == key for entry in ticket.entries())
        }

    def sent(self, piece: Piece) -> None:
        """A piece that has no answer (acks=0) is on its way: that is all that will be known of it."""
        for entry in piece.entries():
            piece.exchange.take(entry, [])
            self._settle(piece.exchange, entry, appended=True)
        self._finish_if_complete(piece.exchange)

    # Taking answers

    def answered(self, piece: Piece, frame: memoryview) -> None:
        """A broker's answer to a piece."""
        exchange = piece.exchange
        header = exchange.request.header
        try:
            response = exchange.api.parse_response(frame, header.api_version)
            if piece.whole and not self._lanes and self._passes_through(exchange, response):
                self._pass_through(exchange, frame)
                return
            results = match_results(exchange, piece.selection, response)
        except CodecError as error:
            self.fail_piece(piece, retry.UNREADABLE)
            piece.upstream.distrust(str(error))
            return
        exchange.note(response)
        for entry, error_code, topic, ordinal in results:
            code = error_code or response.error_code
            if code:
                self._failed(exchange, entry, code, [frame[topic.starts[ordinal] : topic.ends[ordinal]]])
            else:
                exchange.take(entry, [frame[topic.starts[ordinal] : topic.ends[ordinal]]])
                self._settle(exchange, entry, appended=True)
        self._finish_if_complete(exchange)

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
        _, respond = self._open.pop(exchange.sequence)
        respond([frame])

    def _finish_if_complete(self, exchange: Exchange) -> None:
        if exchange.complete:
            self._finish(exchange)

    def _finish(self, exchange: Exchange) -> None:
        if exchange.sequence not in self._open or exchange.sequence in self._looks:
            return
        if self._looks_again(exchange):
            return
        _, respond = self._open.pop(exchange.sequence)
        if exchange.request.acks != 0:
            respond(exchange.encode())

    def _looks_again(self, exchange: Exchange) -> bool:
        """Whether a read that found too little is asked once more, after a pause."""
        pause = LOOK_PAUSES_S[min(exchange.looks, len(LOOK_PAUSES_S) - 1)]
        if exchange.has_errors or self._context.clock() + pause >= exchange.look_until:
            return False
        if exchange.api.holds_enough(exchange.request, exchange.payload_bytes):
            return False
        loop = asyncio.get_running_loop()
        self._looks[exchange.sequence] = loop.call_later(pause, self._look, exchange)
        return True

    def _look(self, exchange: Exchange) -> None:
        del self._looks[exchange.sequence]
        exchange.reset()
        self._dispatch(exchange)

    # Failing and trying again

    def fail_piece(self, piece: Piece, event: int) -> None:
        """The same event for every entry of a piece."""
        for entry in piece.entries():
            self._failed(piece.exchange, entry, event)
        self._finish_if_complete(piece.exchange)

    def _failed(self, exchange: Exchange, entry: Entry, event: int, result: list[Buffer] | None = None) -> None:
        """Something other than success; `result` is the broker's own entry, for codes that are handed on."""
        key = lane_key(exchange, entry)
        if not exchange.is_open(entry) or exchange.sequence not in self._open:
            # It was answered at its deadline, or its client is gone; only the lane still wants to know.
            self._settle(exchange, entry, appended=False, given_up=True)
            return
        now = self._context.clock()
        behind = key in self._lanes and retry.is_held_back(event) and not self._lanes.is_probing(key, exchange.sequence)
        attempts = exchange.attempts.get(entry, 0) + (0 if behind else 1)
        exchange.attempts[entry] = attempts
        rows = self._rows(exchange)
        safe = retry.is_ambiguous(rows, event) and is_recognisable(exchange, entry)
        verdict = retry.decide(rows, event, attempts, resend_is_safe=safe)
        due = now + retry.backoff_s(max(attempts, 1), self._context.random.random())
        if (verdict.retry or behind) and due < exchange.deadline:
            self._context.counters[f"retries.{event}"] += 1
            self._ask_for_the_owner(exchange, entry)
            behind_it = self._unanswered_behind(key, exchange.sequence)
            self._lanes.refused(key, Item(exchange, entry, verdict.error_code), due, behind_it)
            self._arm()
            return
        self._conclude(exchange, entry, verdict.error_code, result if verdict.error_code == event else None)
        self._settle(exchange, entry, appended=False, given_up=event in rows)

    def _rows(self, exchange: Exchange) -> dict[int, retry.Row]:
        return retry.rows_of(exchange.api.api_key, exchange.request.acks, self._context.conduct)

    def _conclude(self, exchange: Exchange, entry: Entry, error_code: int, result: list[Buffer] | None = None) -> None:
        if exchange.request.acks == 0:
            exchange.take(entry, [])
            self._on_undeliverable(exchange.partition(entry)[0], error_code)
        elif result is not None:
            exchange.has_errors = True
            exchange.take(entry, result)
        else:
            exchange.give_error(entry, error_code)

    def _settle(self, exchange: Exchange, entry: Entry, *, appended: bool, given_up: bool = False) -> None:
        """Tell the lane, if there is one, and do what it says."""
        if not self._lanes:
            return
        key = lane_key(exchange, entry)
        release = self._lanes.settled(key, exchange.sequence, appended=appended, given_up=given_up)
        for item in release.give_up:
            self._conclude(item.exchange, item.entry, item.give_up_code)
            self._finish_if_complete(item.exchange)
        self._send_items(release.send)
        self._arm()

    def _send_items(self, items: list[Item]) -> None:
        """Send items that may go now: one piece for each exchange and broker."""
        by_exchange: dict[int, tuple[Exchange, dict[int, Selection]]] = {}
        for item in sorted(items, key=lambda item: (item.exchange.sequence, item.entry)):
            exchange = item.exchange
            if exchange.sequence not in self._open:
                continue
            _, pieces = by_exchange.setdefault(exchange.sequence, (exchange, {}))
            topic, partition_index = exchange.partition(item.entry)
            owner = route(self._topology, topic, partition_index)
            add_entry(pieces.setdefault(owner, []), *item.entry)
        for exchange, pieces in by_exchange.values():
            for owner, selection in pieces.items():
                # What is sent again is one part among others, whatever became of those.
                self._send(exchange, owner, selection, whole=False, share=max(2, len(pieces)))
            self._finish_if_complete(exchange)

    def _ask_for_the_owner(self, exchange: Exchange, entry: Entry) -> None:
        """Have the source look again, unless it has said something new since this was routed."""
        if len(self._refreshes) >= self._context.limits.max_open_requests:
            return
        topic, partition_index = exchange.partition(entry)
        seen_revision = self._topology.owner_revision(topic, partition_index)
        task = asyncio.ensure_future(self._refresh(topic, partition_index, seen_revision))
        self._refreshes.add(task)
        task.add_done_callback(self._refreshes.discard)

    async def _refresh(self, topic: bytes, partition_index: int, seen_revision: int) -> None:
        await self._context.source.refresh(topic, partition_index, seen_revision)

    # Time

    def _arm(self) -> None:
        due = self._lanes.next_due()
        if due is None or self._closed:
            return
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, due - self._context.clock()), self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._send_items(self._lanes.ready(self._context.clock()))
        self._arm()

    def expire(self, now: float) -> None:
        """Answer what has reached its deadline: done entries with their results, the rest with an error.

        Produce that a broker may have seen gets REQUEST_TIMED_OUT, what was never written NOT_LEADER_OR_FOLLOWER.
        """
        for exchange, _ in list(self._open.values()):
            if exchange.deadline > now:
                continue
            self._context.counters["deadlines"] += 1
            self._stop_looking(exchange)
            for item in self._lanes.drop(exchange):
                self._conclude(exchange, item.entry, item.give_up_code)
            for entry in self._withdraw(exchange):
                self._conclude(exchange, entry, NOT_LEADER_OR_FOLLOWER)
            unanswered = self._rows(exchange)[retry.CONNECTION_LOST].final
            for entry in exchange.open_entries():
                self._conclude(exchange, entry, unanswered or NOT_LEADER_OR_FOLLOWER)
            self._finish_if_complete(exchange)

    def _stop_looking(self, exchange: Exchange) -> None:
        look = self._looks.pop(exchange.sequence, None)
        if look is not None:
            look.cancel()

    def _withdraw(self, exchange: Exchange) -> list[Entry]:
        """Take back the pieces of an exchange that no broker has seen; what would wait behind them goes on."""
        withdrawn: list[Entry] = []
        for upstream in self._upstreams.values():
            for ticket in upstream.unanswered():
                if isinstance(ticket, Piece) and ticket.exchange is exchange and upstream.withdraw(ticket):
                    withdrawn.extend(ticket.entries())
        for entry in withdrawn:
            self._settle(exchange, entry, appended=False, given_up=True)
        return withdrawn

    @property
    def has_open_exchanges(self) -> bool:
        return bool(self._open)

    async def close(self) -> None:
        """The client is gone: waiting retries are dropped, it will send them again itself."""
        self._closed = True
        for timer in (self._timer, *self._looks.values()):
            if timer is not None:
                timer.cancel()
        self._open.clear()
        refreshes = list(self._refreshes)
        for task in refreshes:
            task.cancel()
        await asyncio.gather(*refreshes, return_exceptions=True)
