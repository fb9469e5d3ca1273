"""Which connection has shown that its broker takes a partition's batches: on that one they may be pipelined.

A route is a partition's way over one upstream connection under one ownership. It is new until a batch on it has
succeeded, and new again on another connection, at another owner, and when the same owner returns: a broker that refuses
batch N, becomes the owner and then sees N+1 would append it, if it knows nothing of the producer.

Invariants
1. A partition has at most one proven route.
2. What is proven at one revision of the partition's ownership is forgotten at the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from codec.partitioned import TopicSpan
from kproxy.routing.split import Selection, add_entry
from kproxy.routing.topology import Topology

Connection = TypeVar("Connection")


class Routes(Generic[Connection]):
    """The proven routes of one client connection. An upstream connection is any object, compared by identity."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        # By topic and partition index.
        self._proven: dict[bytes, dict[int, Connection]] = {}
        self._revisions: dict[tuple[bytes, int], int] = {}

    def sole(self, topics: Sequence[TopicSpan]) -> Connection | None:
        """The one connection on which every partition of a request may be pipelined; None where there is no such."""
        sole: Connection | None = None
        for topic in topics:
            proven = self._proven.get(topic.name)
            if proven is None:
                return None
            for partition_index in topic.partitions:
                connection = proven.get(partition_index)
                if connection is not sole or connection is None:
                    if sole is not None or connection is None:
                        return None
                    sole = connection
        return sole

    def split(self, topics: Sequence[TopicSpan]) -> dict[Connection, Selection] | None:
        """What of a request goes over which connection; None where some partition's route is new."""
        pieces: dict[Connection, Selection] = {}
        for topic_place, topic in enumerate(topics):
            proven = self._proven.get(topic.name)
            if proven is None:
                return None
            for ordinal, partition_index in enumerate(topic.partitions):
                connection = proven.get(partition_index)
                if connection is None:
                    return None
                selection = pieces.get(connection)
                if selection is None:
                    pieces[connection] = [(topic_place, [ordinal])]
                else:
                    add_entry(selection, topic_place, ordinal)
        return pieces

    def all_proven(self, topic: TopicSpan, ordinals: Iterable[int], connection: Connection) -> bool:
        """Whether these partitions of a request may be pipelined on `connection`."""
        proven = self._proven.get(topic.name)
        if proven is None:
            return False
        partitions = topic.partitions
        for ordinal in ordinals:  # noqa: SIM110 -- on the path of every request, and a generator costs twice as much
            if proven.get(partitions[ordinal]) is not connection:
                return False
        return True

    def is_proven(self, topic: bytes, partition_index: int, connection: Connection) -> bool:
        return self._proven.get(topic, {}).get(partition_index) is connection

    def prove(self, topic: bytes, partition_index: int, connection: Connection, routed_at: int) -> None:
        """A batch that was sent on `connection` when the topology was at revision `routed_at` has succeeded."""
        revision = self._topology.owner_revision(topic, partition_index)
        if revision <= routed_at:
            self._proven.setdefault(topic, {})[partition_index] = connection
            self._revisions[topic, partition_index] = revision

    def forget_outdated(self, moved: Iterable[tuple[bytes, int]] | None) -> None:
        """The topology has changed: routes whose partition has another owner, or has one again, are new.

        `moved`: the partitions that may have (`Topology.moved_since`); None for all.
        """
        for partition in list(self._revisions) if moved is None else moved:
            revision = self._revisions.get(partition)
            if revision is not None and self._topology.owner_revision(*partition) != revision:
                del self._revisions[partition]
                del self._proven[partition[0]][partition[1]]
