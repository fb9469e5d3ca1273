"""Which connection has shown that its broker takes a partition's batches: on that one they may be pipelined.

A route is a partition's way over one upstream connection under one ownership. It is new until a batch on it has
succeeded, and new again on another connection, at another owner, and when the same owner returns: a broker that refuses
batch N, becomes the owner and then sees N+1 would append it, if it knows nothing of the producer.

Invariants
1. A partition has at most one proven route.
2. What is proven at one revision of the partition's ownership is forgotten at the next.
3. No plan outlives a change of what is proven, or of which topic an id names.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from codec.partitioned import PartitionedApi, PartitionedRequest, PlainAnswer, TopicSpan
from kproxy.routing.split import Selection, add_entry
from kproxy.routing.topology import Topology

Connection = TypeVar("Connection")
Kept = TypeVar("Kept")
# So many partitions are in the plans that are kept.
MAX_PLANNED_PARTITIONS = 512


class Part(NamedTuple, Generic[Connection, Kept]):
    """What of a request goes over one connection, the answer to it when all goes well, and what is kept with it."""

    connection: Connection
    selection: Selection
    plain: PlainAnswer | None
    kept: Kept | None


Plan: TypeAlias = Sequence[Part[Connection, Kept]]


class Routes(Generic[Connection, Kept]):
    """The proven routes of one client connection. An upstream connection is any object, compared by identity.

    `keep` makes what is kept with a part, for as long as its plan is.
    """

    def __init__(
        self,
        topology: Topology,
        keep: Callable[[Connection, PartitionedRequest, Selection, PlainAnswer | None], Kept | None] | None = None,
    ) -> None:
        self._topology = topology
        self._keep = keep
        # By topic and partition index.
        self._proven: dict[bytes, dict[int, Connection]] = {}
        self._revisions: dict[tuple[bytes, int], int] = {}
        # Clients ask for the same again and again. By version, topics and partitions, as a request names them.
        self._plans: dict[Hashable, Plan[Connection, Kept]] = {}
        self._planned = 0

    def plan(self, api: PartitionedApi, request: PartitionedRequest) -> Plan[Connection, Kept]:
        """What of a request goes over which connection and may be pipelined there; nothing where some partition's route
        is new.
        """
        topics = request.topics
        if len(topics) == 1:
            shape: Hashable = (request.header.api_version, topics[0].wire, *topics[0].partitions)
        else:
            shape = (request.header.api_version, *[(topic.wire, *topic.partitions) for topic in topics])
        plan = self._plans.get(shape)
        if plan is None:
            plan = self._make_plan(api, request)
            if plan and request.partition_count <= MAX_PLANNED_PARTITIONS:
                if self._planned + request.partition_count > MAX_PLANNED_PARTITIONS:
                    # What a client asks changes with time; what it asked first must not be all that is remembered.
                    self._forget_plans()
                self._planned += request.partition_count
                self._plans[shape] = plan
        return plan

    def _make_plan(self, api: PartitionedApi, request: PartitionedRequest) -> Plan[Connection, Kept]:
        selections: dict[Connection, Selection] = {}
        for topic_place, topic in enumerate(request.topics):
            proven = self._proven.get(topic.name)
            if proven is None:
                return ()
            for ordinal, partition_index in enumerate(topic.partitions):
                connection = proven.get(partition_index)
                if connection is None:
                    return ()
                add_entry(selections.setdefault(connection, []), topic_place, ordinal)
        parts = []
        for connection, selection in selections.items():
            plain = api.plain_answer(request, selection)
            kept = self._keep(connection, request, selection, plain) if self._keep is not None else None
            parts.append(Part(connection, selection, plain, kept))
        return parts

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
            self._forget_plans()
            self._proven.setdefault(topic, {})[partition_index] = connection
            self._revisions[topic, partition_index] = revision

    def forget_outdated(self, moved: Iterable[tuple[bytes, int]] | None) -> None:
        """The topology has changed: routes whose partition has another owner, or has one again, are new.

        `moved`: the partitions that may have (`Topology.moved_since`); None for all.
        """
        if moved is None:
            self._forget_plans()
        for partition in list(self._revisions) if moved is None else moved:
            revision = self._revisions.get(partition)
            if revision is not None and self._topology.owner_revision(*partition) != revision:
                del self._revisions[partition]
                del self._proven[partition[0]][partition[1]]
                self._forget_plans()

    def _forget_plans(self) -> None:
        self._plans.clear()
        self._planned = 0
