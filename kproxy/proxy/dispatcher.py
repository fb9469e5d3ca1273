"""Sending: to which broker the parts of a request go, over which connection, and in which turn.

Invariants
1. On a new route one batch goes first, and the next follow its success (kproxy.routing.routes).
2. Nothing overtakes what waits in a lane (kproxy.proxy.order), and what is sent again has come out of one.
3. When the topology has changed, the change is followed before anything is sent (kproxy.proxy.following).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from codec.api_keys import PRODUCE
from codec.error_codes import UNKNOWN_TOPIC_ID
from codec.partitioned import PlainAnswer
from kproxy.observe.audit.noted import Noted
from kproxy.proxy.connections import Connections
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.failures import Failures
from kproxy.proxy.following import Following
from kproxy.proxy.open_exchanges import OpenExchanges
from kproxy.proxy.order import Order
from kproxy.proxy.owning import NOTHING_REFUSED
from kproxy.proxy.pieces import Piece, PieceKeeper, UnderWay, entries_of
from kproxy.proxy.standing import Standing
from kproxy.proxy.upstream import Upstream
from kproxy.routing import retry
from kproxy.routing.identity import lane_key
from kproxy.routing.lanes import Item
from kproxy.routing.merge import Exchange
from kproxy.routing.routes import Routes
from kproxy.routing.split import Entry, Selection, add_entry, split
from kproxy.routing.topology import NO_OWNER

_NONE_HELD: set[Entry] = set()


class Dispatcher:
    """Sends what one client connection asks on `connections`; the `keeper` learns what becomes of it."""

    def __init__(
        self,
        context: ProxyContext,
        connections: Connections,
        exchanges: OpenExchanges,
        order: Order,
        under_way: UnderWay,
        routes: Routes[Upstream, Noted],
        standing: Standing,
        failures: Failures,
        keeper: PieceKeeper,
    ) -> None:
        self._context = context
        self._topology = context.topology
        self._connections = connections
        self._exchanges = exchanges
        self._order = order
        self._lanes = order.lanes
        self._busy_lanes = order.lanes.table
        self._under_way = under_way
        self._routes = routes
        self._standing = standing
        self._failures = failures
        self._keeper = keeper
        self.following = Following(context, connections, exchanges, order.lanes, under_way, routes)

    def dispatch(self, exchange: Exchange, refused: Mapping[Entry, int] = NOTHING_REFUSED) -> None:
        """Send all of an exchange that is not `refused`, or let it wait its turn."""
        if self._topology.version != self.following.version:
            self.following.catch_up()
            if exchange not in self._exchanges:
                # A connection was given up for it, and the client's ended with that.
                return
        if exchange.is_ordered and not self._busy_lanes and not refused and self._dispatch_proven(exchange):
            return
        held = self._order.hold_back(exchange) if self._lanes else _NONE_HELD
        if refused:
            held = held | refused.keys()
        pieces = split(exchange.request, self._topology, held)
        if len(pieces) > 1:
            self._context.counters["splits"] += 1
        whole = len(pieces) == 1 and not held
        for owner, selection in pieces.items():
            self._send(exchange, owner, selection, whole=whole, share=len(pieces))
        if self._lanes:
            self._order.timer.arm()
        self._exchanges.finish_if_complete(exchange)

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
            piece = Piece(self._keeper, exchange, upstream, None, self._topology.revision, plain, noted)
            if self._under_way.sequences is not None:
                self._under_way.add(piece)
            upstream.forward(piece, exchange.request.frame)
            return True
        self._context.counters["splits"] += 1
        for upstream, selection, plain, noted in plan:
            self._send_part(exchange, upstream, selection, share=len(plan), plain=plain, noted=noted)
        return True

    def _send(self, exchange: Exchange, owner: int, selection: Selection, *, whole: bool, share: int) -> None:
        if self._standing.is_parted and not self._is_wanted(exchange, selection):
            # The client's connection has ended in the course of this very event.
            return
        if owner == NO_OWNER:
            for entry in entries_of(selection):
                is_nameless = exchange.request.is_nameless(exchange.topic(entry))
                event = UNKNOWN_TOPIC_ID if is_nameless else retry.NOT_WRITTEN
                self._failures.failed(exchange, entry, event, self._topology.revision)
            return
        upstream = self._connections.to(owner)
        owning = self._standing.owning
        if owning is not None and exchange.api.api_key == PRODUCE:
            if self._standing.lapses():
                return
            owning.binder.before(upstream, exchange, selection, owning.holdings)
        if exchange.is_ordered:
            self._probe_new_routes(exchange, upstream, selection)
        if whole:
            piece = Piece(self._keeper, exchange, upstream, None, self._topology.revision)
            self._under_way.add(piece)
            upstream.forward(piece, exchange.request.frame)
        else:
            self._send_part(exchange, upstream, selection, share=share)

    def _is_wanted(self, exchange: Exchange, selection: Selection) -> bool:
        return exchange in self._exchanges and all(map(exchange.is_open, entries_of(selection)))

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
        piece = Piece(self._keeper, exchange, upstream, selection, self._topology.revision, plain, noted)
        self._under_way.add(piece)
        upstream.send(piece, correlation_id, buffers)

    def _probe_new_routes(self, exchange: Exchange, upstream: Upstream, selection: Selection) -> None:
        for topic_place, ordinals in selection:
            topic = exchange.request.topics[topic_place]
            if self._routes.all_proven(topic, ordinals, upstream):
                continue
            for ordinal in ordinals:
                if not self._routes.is_proven(topic.name, topic.partitions[ordinal], upstream):
                    self._lanes.probe(lane_key(exchange, (topic_place, ordinal)), exchange.sequence)

    # What has waited

    def send_due(self) -> None:
        """A lane may be due."""
        self._send_items(self._lanes.ready(self._context.clock()))
        self.send_released()

    def send_released(self) -> None:
        """The end of an event: what waited and may go now goes."""
        while released := self._order.take_released():
            self._send_items(released)
        if self._lanes:
            self._order.timer.arm()

    def _send_items(self, items: list[Item]) -> None:
        """Send items that may go now: one piece for each exchange and broker."""
        if self._topology.version != self.following.version:
            self.following.catch_up()
        items.sort(key=lambda item: (item.exchange.sequence, item.entry))
        for sequence, group in groupby(items, key=lambda item: item.exchange.sequence):
            pieces: dict[int, Selection] = {}
            for item in group:
                exchange = item.exchange
                key = lane_key(exchange, item.entry)
                if exchange not in self._exchanges or not exchange.is_open(item.entry):
                    self._order.settle(exchange, item.entry, appended=False)
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
            self._exchanges.finish_if_complete(exchange)
