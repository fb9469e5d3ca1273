"""Make the tables of the admin page, for JSON: routes, replicas of reference brokers, claims, orders to free.

A page is made in one step, and is therefore consistent at its `revision`. Readers of several pages compare revisions.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

import msgspec

from kproxy.routing.topology import Ownership, Topology

# A page is made between two requests of clients: this many rows take about 10 ms.
MAX_PAGE_ROWS = 10_000


class ProxyRow(msgspec.Struct, frozen=True):
    """One proxy that clients see; `this` is true for the proxy that answers."""

    id: int
    host: str
    port: int
    this: bool = False


@dataclass(frozen=True, slots=True)
class TableView:
    """The live table. `age_s` is the time since its source last answered, infinite before the first answer.

    `source` is the source of owners: etcd, kafka or static. `registration`: the state of this proxy's own entry, empty
    if it does not register.
    """

    topology: Topology
    age_s: float
    stale: bool
    source: str = "etcd"
    proxies: Sequence[ProxyRow] = ()
    registration: str = ""


class TableQuery(msgspec.Struct, frozen=True):
    """A requested page: at most `limit` owned partitions after `after` (`topic/partition`), of one topic if named."""

    topic: str | None = None
    after: str | None = None
    limit: int = MAX_PAGE_ROWS


class PartitionRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One owned partition.

    `revision` is the source's own, of the partition's last change; it is not a leader epoch.

    `kproxy table` adds the rest from the page `/replication`; None: not known.
    """

    partition: int
    owner: int
    revision: int
    replicas: list[int] | None = None
    isr: list[int] | None = None
    min_insync_replicas: int | None = None


class TopicRows(msgspec.Struct, frozen=True):
    name: str
    partitions: list[PartitionRow]


class BrokerRow(msgspec.Struct, frozen=True):
    id: int
    host: str
    port: int


class TablePage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of partitions. `next` is the `after` of the next page, None on the last.

    `age_s` None: the source has not answered yet.
    """

    source: str = "etcd"
    revision: int
    age_s: float | None
    stale: bool
    brokers: list[BrokerRow]
    proxies: list[ProxyRow] = []
    registration: str = ""
    topics: list[TopicRows]
    next: str | None = None


def table_page(
    view: TableView, *, topic: str | None = None, after: str | None = None, limit: int = MAX_PAGE_ROWS
) -> TablePage:
    """Return the page of up to `limit` owned partitions after `after` (`topic/partition`), of one topic if named.

    Raises ValueError if `after` is not of that form or `limit` is out of [1, MAX_PAGE_ROWS].
    """
    if not 1 <= limit <= MAX_PAGE_ROWS:
        raise ValueError(f"limit must be a number from 1 to {MAX_PAGE_ROWS}")
    start = parse_place(after) if after is not None else (b"", -1)
    wanted = topic.encode() if topic is not None else None
    rows = list(islice(_rows(view.topology, wanted, start), limit + 1))
    more = len(rows) > limit
    rows = rows[:limit]
    topics: list[TopicRows] = []
    for row in rows:
        name = row.topic.decode("utf-8", "replace")
        if not topics or topics[-1].name != name:
            topics.append(TopicRows(name, []))
        topics[-1].partitions.append(PartitionRow(row.partition_index, row.owner, row.revision))
    return TablePage(
        source=view.source,
        revision=view.topology.revision,
        age_s=round(view.age_s, 3) if math.isfinite(view.age_s) else None,
        stale=view.stale,
        brokers=[
            BrokerRow(broker_id, each.host, each.port) for broker_id, each in sorted(view.topology.brokers.items())
        ],
        proxies=list(view.proxies),
        registration=view.registration,
        topics=topics,
        next=f"{topics[-1].name}/{rows[-1].partition_index}" if more else None,
    )


def _rows(topology: Topology, topic: bytes | None, after: tuple[bytes, int]) -> Iterator[Ownership]:
    if topic is None:
        return topology.ownerships(after)
    # The rows of one topic are consecutive.
    return takewhile(lambda row: row.topic == topic, topology.ownerships(max(after, (topic, -1))))


def parse_place(text: str) -> tuple[bytes, int]:
    """Parse `topic/partition`. Raises ValueError."""
    topic, slash, partition = text.rpartition("/")
    if not slash or not topic or not (partition.isascii() and partition.isdigit() and len(partition) <= 9):
        raise ValueError("after must be topic/partition, the `next` of the previous page")
    return topic.encode(), int(partition)


def merge_pages(pages: Sequence[TablePage]) -> TablePage:
    """Join consecutive pages; age and staleness are the last page's."""
    topics: list[TopicRows] = []
    for page in pages:
        for topic in page.topics:
            if topics and topics[-1].name == topic.name:
                topics[-1] = TopicRows(topic.name, topics[-1].partitions + topic.partitions)
            else:
                topics.append(topic)
    return msgspec.structs.replace(pages[-1], topics=topics, next=None)


NO_LEADER = -1


class ReplicaRow(msgspec.Struct, frozen=True):
    """A partition that was ever led.

    `leader` is a live broker's id or NO_LEADER; `replicas` are in assigned order.
    """

    topic: str
    partition: int
    leader: int
    leader_epoch: int
    replicas: list[int]
    isr: list[int]
    min_insync_replicas: int

    @property
    def place(self) -> tuple[bytes, int]:
        """The row's position in the order of rows."""
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
    """The state in etcd at `revision`: live brokers, and all rows by place."""

    revision: int
    brokers: list[int]
    rows: Sequence[ReplicaRow]


class ReplicationPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of replicas. `next` is the `after` of the next page, None on the last.

    `brokers` are the ids of live brokers.
    """

    revision: int
    brokers: list[int]
    partitions: list[ReplicaRow]
    next: str | None = None


def replication_page(known: Replication, query: TableQuery) -> ReplicationPage:
    """Return the requested page. Raises ValueError as `table_page`."""
    if not 1 <= query.limit <= MAX_PAGE_ROWS:
        raise ValueError(f"limit must be a number from 1 to {MAX_PAGE_ROWS}")
    start = bisect_right(known.rows, parse_place(query.after), key=lambda row: row.place) if query.after else 0
    rows = known.rows[start:]
    if query.topic is not None:
        rows = [row for row in rows if row.topic == query.topic]
    shown = list(rows[: query.limit])
    after = f"{shown[-1].topic}/{shown[-1].partition}" if len(rows) > query.limit else None
    return ReplicationPage(revision=known.revision, brokers=known.brokers, partitions=shown, next=after)


def with_replicas(table: TablePage, rows: Iterable[ReplicaRow]) -> TablePage:
    """Add the known replicas to the partitions of a table."""
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


# Names have at most 1 KiB, six times that if JSON escapes them: a page stays below 16 MiB.
MAX_CLAIM_ROWS = 1_000
# The longest shown client id, in characters.
MAX_CLIENT_TEXT = 256
MAX_ORDER_BYTES = 32 << 10
# The most shown topics with a writer group.
MAX_WRITER_GROUPS = 100
WHOLE_GROUP_TEXT = "(whole group)"


class NotOffered(Exception):
    """A page (of the Own API, of replicas) is not offered here; the message states the reason."""


class ClaimRow(msgspec.Struct, frozen=True):
    """One claim in force.

    `resource` is empty for the whole group, as in Own's answers.

    `proxy` is the process that claimed, by its lease in etcd, and `address` its advertised address, empty if its entry
    is gone; `connection` is a number within it, `client` the client id. `since`: in ms since 1970.
    """

    group: str
    resource: str
    generation: int
    fence: int
    proxy: str
    address: str
    connection: int
    client: str
    since: int

    @property
    def place(self) -> tuple[str, str]:
        return self.group, self.resource

    @property
    def owner(self) -> tuple[str, int]:
        return self.proxy, self.connection


class MemberRow(msgspec.Struct, frozen=True):
    """A process that can hold claims for clients. `seen` is the revision up to which it has acted upon every claim.

    `unsettled`: the number of partitions to which records of earlier writers may still be in flight through it.
    """

    proxy: str
    address: str
    seen: int
    unsettled: int


class ClaimsPage(msgspec.Struct, frozen=True, kw_only=True):
    """Claims by group and resource.

    `next` is the `after` of the next page, None on the last.

    `writer_groups`: the first of those configured at any member, each as `TOPIC=GROUP`; `differ`: the members are not
    all configured alike.
    """

    revision: int
    members: list[MemberRow] = []
    writer_groups: list[str] = []
    differ: bool = False
    claims: list[ClaimRow]
    next: str | None = None


class ClaimsQuery(msgspec.Struct, frozen=True):
    """A requested page: at most `limit` claims after `after` (`next` of the page before), of one group if named."""

    group: str | None = None
    after: str | None = None
    limit: int = MAX_CLAIM_ROWS


class FreeOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The claims to free; `resources` None: all claims in the group."""

    group: str
    resources: list[str] | None = None


class FreeOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a FreeOrder.

    `freed` had owners, whose connections are severed. `missing` had no owners of their own, but perhaps one of the
    `whole` group. `changed` got another owner meanwhile. `more`: there are more claims than one order frees.
    """

    freed: list[ClaimRow] = []
    missing: list[str] = []
    changed: list[str] = []
    whole: ClaimRow | None = None
    more: bool = False


def merge_claims(pages: Sequence[ClaimsPage]) -> ClaimsPage:
    """Join consecutive pages."""
    return msgspec.structs.replace(pages[-1], claims=[claim for page in pages for claim in page.claims], next=None)
