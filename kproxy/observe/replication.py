"""The reference brokers' replicas as a person or a program reads them: pages of plain structures, ready for JSON."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import msgspec

from kproxy.observe.table import MAX_PAGE_ROWS, TablePage, TableQuery, parse_place

NO_LEADER = -1


class ReplicaRow(msgspec.Struct, frozen=True):
    """One partition that was ever led. `leader` is a live broker's id or NO_LEADER; `replicas` come in their order."""

    topic: str
    partition: int
    leader: int
    leader_epoch: int
    replicas: list[int]
    isr: list[int]
    min_insync_replicas: int

    @property
    def place(self) -> tuple[bytes, int]:
        """Where it stands among the rows."""
        return self.topic.encode(), self.partition

    @property
    def missing(self) -> list[int]:
        """The replicas that are not in sync."""
        return [each for each in self.replicas if each not in self.isr]

    @property
    def is_under_min_isr(self) -> bool:
        """Whether acks=all is refused."""
        return len(self.isr) < self.min_insync_replicas


class Replication(msgspec.Struct, frozen=True):
    """What etcd said at `revision`: the live brokers, and all rows by place."""

    revision: int
    brokers: list[int]
    rows: Sequence[ReplicaRow]


class ReplicationPage(msgspec.Struct, frozen=True, kw_only=True):
    """`next` is the `after` of the next page, None on the last. `brokers` are the ids of those that are alive."""

    revision: int
    brokers: list[int]
    partitions: list[ReplicaRow]
    next: str | None = None


def replication_page(known: Replication, query: TableQuery) -> ReplicationPage:
    """The page that is asked for. ValueError as for `table_page`."""
    if not 1 <= query.limit <= MAX_PAGE_ROWS:
        raise ValueError(f"limit is a number from 1 to {MAX_PAGE_ROWS}")
    start = bisect_right(known.rows, parse_place(query.after), key=lambda row: row.place) if query.after else 0
    rows = known.rows[start:]
    if query.topic is not None:
        rows = [row for row in rows if row.topic == query.topic]
    shown = list(rows[: query.limit])
    after = f"{shown[-1].topic}/{shown[-1].partition}" if len(rows) > query.limit else None
    return ReplicationPage(revision=known.revision, brokers=known.brokers, partitions=shown, next=after)


def with_replicas(table: TablePage, rows: Iterable[ReplicaRow]) -> TablePage:
    """The table with what is known of its partitions' replicas."""
    known = {(row.topic, row.partition): row for row in rows}
    topics = []
    for topic in table.topics:
        partitions = []
        for each in topic.partitions:
            row = known.get((topic.name, each.partition))
            if row is not None:
                each = msgspec.structs.replace(
                    each, replicas=row.replicas, isr=row.isr, min_insync_replicas=row.min_insync_replicas
                )
            partitions.append(each)
        topics.append(msgspec.structs.replace(topic, partitions=partitions))
    return msgspec.structs.replace(table, topics=topics)
