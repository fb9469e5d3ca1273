"""How one client connection follows the topology: what a change means for what is under way and for proven routes.

Invariants
1. Before anything is sent, the connection has caught up with the topology: who sends compares `version`.
2. A partition whose unanswered batches went elsewhere than it would go now is blocked until these are answered
   (kproxy.routing.lanes).
3. One partition has one lane, whatever clients call its topic: by id or by name.
"""

from __future__ import annotations

from collections.abc import Mapping

from codec.partitioned import PartitionedRequest
from kproxy.observe.audit.noted import Noted
from kproxy.proxy.connections import Connections
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.open_exchanges import OpenExchanges
from kproxy.proxy.pieces import UnderWay, ordered_pieces
from kproxy.proxy.upstream import Upstream
from kproxy.routing.identity import lane_key
from kproxy.routing.lanes import Lanes
from kproxy.routing.routes import Routes


class Following:
    """`version` is the topology's that the connection has caught up with."""

    def __init__(
        self,
        context: ProxyContext,
        connections: Connections,
        exchanges: OpenExchanges,
        lanes: Lanes,
        under_way: UnderWay,
        routes: Routes[Upstream, Noted],
    ) -> None:
        self._topology = context.topology
        self._max_nameless = context.limits.max_open_requests
        self._connections = connections
        self._upstreams: Mapping[int, Upstream] = connections.by_broker
        self._exchanges = exchanges
        self._lanes = lanes
        self._under_way = under_way
        self._routes = routes
        self.version = -1
        # Topic ids that were asked for before anybody knew the topic's name.
        self._nameless: set[bytes] = set()

    def catch_up(self) -> None:
        """The topology has changed: what is unanswered elsewhere than it would go now blocks its partition.

        Where many partitions change owners, most of them are none of this client's: what did not move is not looked at.
        """
        moved = self._topology.moved_since(self.version)
        self.version = self._topology.version
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

    def name_topics(self, request: PartitionedRequest) -> None:
        """Put names in the place of topic ids.

        Order is kept by what a partition is called, and a client may name its topic by id in one request and by name in
        the next, as franz-go does.
        """
        for topic in request.topics:
            name = self._topology.name_of(topic.wire)
            if name is not None:
                topic.name = name
            elif len(self._nameless) < self._max_nameless:
                self._nameless.add(topic.wire)

    def _name_the_nameless(self) -> None:
        """The topology may have learnt the names of topics that something waits for."""
        names = {each: name for each in self._nameless if (name := self._topology.name_of(each)) is not None}
        if not names:
            return
        self._nameless -= names.keys()
        self._under_way.forget()
        waiting = [piece.exchange for upstream in self._upstreams.values() for piece in ordered_pieces(upstream)]
        for exchange in (*waiting, *self._exchanges.all()):
            for topic in exchange.request.topics:
                if topic.name in names and exchange.request.is_nameless(topic):
                    topic.name = names[topic.wire]
                    for partition_index in topic.partitions:
                        self._lanes.rename((topic.wire, partition_index), (topic.name, partition_index))
