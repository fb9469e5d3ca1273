"""Which partitions a claim gates, and letting their leaders know when nobody owns them any more.

Invariants
1. A claim of a gated partition that is gone is released at the partition's leader with the revision at which it went:
   by the member that held it or, where that one has gone too, by the first of those that live.
2. What a process that is no member cannot release itself it releases once it is one again, unless it is owned by then;
   at most MAX_UNRELEASED wait for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, NamedTuple

from kproxy.claims.table import OwnTable, TableRow
from kproxy_codec.own import WHOLE_GROUP, resource_partition

MAX_UNRELEASED: Final = 10_000


class Release(NamedTuple):
    """A partition that nobody owns any more, and the revision since which that is so."""

    topic: str
    partition_index: int
    revision: int


class Gates:
    """Topics whose writes are for owners alone: `writer_groups` names the group of each.

    `partitions_of` tells the indexes of a topic's partitions, as far as they are known.
    """

    def __init__(self, writer_groups: Mapping[str, str]) -> None:
        # By the names that requests have.
        self.by_topic = {topic.encode(): group for topic, group in writer_groups.items()}
        self.partitions_of: Callable[[str], Collection[int]] = lambda topic: ()

    def are_of(self, topic: str, group: str) -> bool:
        """Whether writes to a topic are for owners in this group alone."""
        return self.by_topic.get(topic.encode()) == group

    def partitions(self, group: str, resource: str) -> Iterable[tuple[str, int]]:
        """The partitions whose writes a claim gates."""
        if resource == WHOLE_GROUP:
            for topic in [topic.decode() for topic, writers in self.by_topic.items() if writers == group]:
                yield from ((topic, index) for index in self.partitions_of(topic))
        elif (partition := resource_partition(resource)) is not None and self.are_of(partition[0], group):
            yield partition


class Releasing:
    """Tells `tell` of what is to be released at its leader."""

    def __init__(self, table: OwnTable, gates: Gates) -> None:
        self.tell: Callable[[Release], None] = lambda release: None
        self._table = table
        self._gates = gates
        self._left: deque[Release] = deque(maxlen=MAX_UNRELEASED)

    def is_owned(self, topic: str, partition_index: int) -> bool:
        """Whether somebody owns a partition of a gated topic as its writer."""
        group = self._gates.by_topic.get(topic.encode(), "")
        row = self._table.owner(group, f"{topic}/{partition_index}")
        # Of what goes with a lease etcd tells in the order of the keys: a member's own goes before its claims.
        return row is not None and row.owner.proxy in self._table.members

    def release(self, rows: Iterable[TableRow], revision: int) -> None:
        """These claims are gone, as of `revision`."""
        for each in self._releases(rows, revision):
            self._tell_unless_owned(each)

    def leave(self, rows: Iterable[TableRow], revision: int) -> None:
        """These are gone, and this process cannot tell whether somebody else releases them."""
        self._left.extend(self._releases(rows, revision))

    def release_left(self) -> None:
        """This process is a member again."""
        left, self._left = self._left, deque(maxlen=MAX_UNRELEASED)
        for each in left:
            self._tell_unless_owned(each)

    def _releases(self, rows: Iterable[TableRow], revision: int) -> list[Release]:
        return [
            Release(*partition, revision)
            for row in rows
            for partition in self._gates.partitions(row.group, row.resource)
        ]

    def _tell_unless_owned(self, release: Release) -> None:
        if not self.is_owned(release.topic, release.partition_index):
            self.tell(release)
