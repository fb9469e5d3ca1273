"""Decide on which connections the batches of a partition may be pipelined: on proven routes.

A route is a partition's path over one connection to a broker under one ownership. It is new until a batch on it has
succeeded. It is new again on another connection, at another owner, when the same owner returns, and when its broker
denies being the owner: a broker that refuses batch N, becomes the owner and then sees N+1 would append it if it lacks
the producer's state.

Invariants
1. A partition has at most one proven route.
2. A route that is proven under one ownership of the partition is forgotten at the next one, when its broker leaves or
   the connection ends (`forget_connection`), and when its broker refuses (`refuted`).
3. `generation` grows with every change that may make a kept route wrong: a partition is proven on another connection,
   or a route is forgotten. The compiled plain path (kproxy/plain/path.pxi) keeps no route after such a change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from kproxy.routing.in_flight import InFlight
from kproxy.routing.merge import Exchange
from kproxy.routing.split import Entry, Selection, add_entry, entries_of, split
from kproxy.routing.topology import NO_OWNER, Topology
from kproxy_codec.partitioned import TopicSpan


class Route(NamedTuple):
    """A partition's proven path: the connection's number, and the `owner_version` under which it holds."""

    connection: int
    version: int


class Routes:
    """The proven routes of one client connection."""

    __slots__ = ("_proven", "_topology", "generation")

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        # By topic and partition index.
        self._proven: dict[bytes, dict[int, Route]] = {}
        self.generation = 0

    def new_among(self, topic: TopicSpan, ordinals: Iterable[int], connection: int) -> list[int]:
        """The ordinals of a topic's partitions that may not be pipelined on a connection."""
        proven = self._proven.get(topic.name)
        if proven is None:
            return list(ordinals)
        new = []
        for ordinal in ordinals:
            route = proven.get(topic.partitions[ordinal])
            if route is None or route.connection != connection:
                new.append(ordinal)
        return new

    def prove(self, topic: bytes, partition_index: int, connection: int, routed_at: int) -> None:
        """Note the success of a batch that was sent on `connection` at the topology's version `routed_at`."""
        version = self._topology.owner_version(topic, partition_index)
        if version <= routed_at:
            proven = self._proven.setdefault(topic, {})
            if partition_index in proven:
                self.generation += 1
            proven[partition_index] = Route(connection, version)

    def proven_on(self, topic: bytes, partition_index: int) -> int | None:
        """The number of the connection on which a partition's route is proven."""
        route = self._proven.get(topic, {}).get(partition_index)
        return route.connection if route is not None else None

    def refuted(self, topic: bytes, partition_index: int, connection: int) -> None:
        """Note that the broker on this connection no longer takes the partition's batches."""
        if self.proven_on(topic, partition_index) == connection:
            self._forget(topic, partition_index)

    def is_outdated(self, moved: Iterable[tuple[bytes, int]] | None) -> bool:
        """Whether `forget_outdated` might have an effect."""
        if moved is None:
            return bool(self._proven)
        return any(partition_index in self._proven.get(topic, ()) for topic, partition_index in moved)

    def forget_outdated(self, moved: Iterable[tuple[bytes, int]] | None) -> None:
        """Forget outdated routes after a topology change.

        These are routes whose partition has a new ownership. `moved`: the partitions that may have moved
        (`Topology.moved_since`); None for all, and for other changes.
        """
        if moved is None:
            self.generation += 1
            moved = [(topic, partition_index) for topic, proven in self._proven.items() for partition_index in proven]
        for topic, partition_index in moved:
            route = self._proven.get(topic, {}).get(partition_index)
            if route is not None and self._topology.owner_version(topic, partition_index) != route.version:
                self._forget(topic, partition_index)

    def forget_connection(self, connection: int) -> None:
        """Forget the routes of a connection that ended, or whose broker left."""
        gone = [
            (topic, partition_index)
            for topic, proven in self._proven.items()
            for partition_index, route in proven.items()
            if route.connection == connection
        ]
        for partition in gone:
            self._forget(*partition)

    def _forget(self, topic: bytes, partition_index: int) -> None:
        self.generation += 1
        proven = self._proven[topic]
        del proven[partition_index]
        if not proven:
            del self._proven[topic]


class Router:
    """Finds the brokers for the requests of one client connection."""

    __slots__ = ("_in_flight", "_routes", "_topology")

    def __init__(self, topology: Topology, routes: Routes, in_flight: InFlight) -> None:
        self._topology = topology
        self._routes = routes
        self._in_flight = in_flight

    def broker_for(self, exchange: Exchange, entry: Entry) -> int:
        """The broker to send an entry to, or NO_OWNER."""
        topic, partition_index = exchange.partition(entry)
        is_owned = self._topology.owner(topic, partition_index) != NO_OWNER
        taken_by = NO_OWNER if is_owned else self.taken_by(topic, partition_index)
        return exchange.route(entry, self._topology, taken_by)

    def taken_by(self, topic: bytes, partition_index: int) -> int:
        """The broker that accepted a partition without a known owner, or NO_OWNER."""
        number = self._routes.proven_on(topic, partition_index)
        return NO_OWNER if number is None else self._in_flight.connections[number].broker

    def split(self, exchange: Exchange, held: Collection[Entry]) -> dict[int, Selection]:
        """The parts by broker of a request whose entries have not failed, without those in `held`."""
        return split(exchange.request, self._topology, held, self.taken_by)

    def split_again(self, exchange: Exchange, held: Collection[Entry]) -> dict[int, Selection]:
        """The same, where brokers may have refused entries."""
        pieces: dict[int, Selection] = {}
        for entry in entries_of(exchange.selection(None)):
            if entry not in held:
                add_entry(pieces.setdefault(self.broker_for(exchange, entry), []), *entry)
        return pieces
