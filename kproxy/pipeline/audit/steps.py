"""Turn rows of trails and headers of batches into the result tables of an audit, on any engine's bags.

The offsets of each partition are cut into buckets, which are judged one by one (`judge.py`); the parts of a window of
time, and those of a partition, are then added up. In this process a bucket is a whole partition. On Spark it is a range
of offsets, so that no partition is too large for a task. Executors have the standard library and
kproxy.pipeline.session.PACKAGES alone, so this module needs no other package.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from typing import Any, Final, NamedTuple

from kproxy.pipeline.audit.bags import Bag, Here
from kproxy.pipeline.audit.columns import ABOUT, DELETED, GONE, UNREAD
from kproxy.pipeline.audit.findings import Findings, Row, Summed, of_unproven, sum_up, window_row
from kproxy.pipeline.audit.judge import (
    Amounts,
    Batch,
    Bounds,
    PartitionPart,
    Repeat,
    Windows,
    judge_gone,
    judge_log,
    repeats,
)
from kproxy.pipeline.audit.log_client import TopicPartition
from kproxy.pipeline.audit.logs import Chunk
from kproxy.pipeline.audit.proof import TrailName, TrailPart, Unproven, is_unproven, joined, merge
from kproxy.pipeline.audit.rules import AuditRules
from kproxy.pipeline.audit.trail_rows import TrailRow

# A bucket of 2^62 offsets is a whole partition.
WHOLE_BITS: Final = 62
# 2^18 rows of a trail are examined together.
_BLOCK_BITS: Final = 18

Parts = Mapping[TrailName, TrailPart]
Pairs = Iterator[tuple[Any, Any]]
"""What a bag groups: keys and values."""
Groups = Iterable[tuple[Any, Iterable[Any]]]
"""Keys, each with its values."""


@dataclass(slots=True)
class Results:
    """The rows of the result tables, by the names in `columns.py`.

    `windows`: one row for each topic, partition and window of time. `partitions`: the same over all time. `findings`:
    one row for each fault or unproven time. `owners`: what each broker acknowledged, from when to when, under which
    ownership revision. `throughput`: records and bytes by window and owner.
    """

    windows: Bag = field(default_factory=Here)
    partitions: Bag = field(default_factory=Here)
    findings: Bag = field(default_factory=Here)
    owners: Bag = field(default_factory=Here)
    throughput: Bag = field(default_factory=Here)

    def tables(self, about: Mapping[str, str]) -> Iterator[tuple[str, Bag]]:
        """Yield the tables that are stored, by name. `about` describes the audit."""
        for name in self.__slots__:
            yield name, getattr(self, name)
        yield ABOUT, Here({"label": label, "text": text} for label, text in about.items())


def in_ms(time: datetime) -> int:
    return round(time.timestamp() * 1000)


class Bucket(NamedTuple):
    """A range of a partition's offsets. `kind`: DELETED, GONE or UNREAD for rows whose log is not there, "" for others.

    `topic_id`: of a deleted topic, else "".
    """

    topic: str
    partition: int
    number: int
    kind: str = ""
    topic_id: str = ""


class Judged(NamedTuple):
    """The judgement of a bucket; `copies` as from `judge_log`."""

    which: TopicPartition
    number: int
    windows: Windows
    part: PartitionPart
    copies: Mapping[int, tuple[int, int]]


def audit_rows(
    rows: Iterable[TrailRow],
    log: Mapping[TopicPartition, list[Batch]],
    bounds: Mapping[TopicPartition, Bounds],
    rules: AuditRules,
    unread: Mapping[TopicPartition, str] | None = None,
    parts: Parts | None = None,
) -> Results:
    """Audit in this process. The parameters are those of `audit_bags`."""
    return audit_bags(Here(rows), Here(Chunk(which, each) for which, each in log.items()), bounds, rules, unread, parts)


def audit_bags(
    rows: Bag,
    log: Bag,
    bounds: Mapping[TopicPartition, Bounds],
    rules: AuditRules,
    unread: Mapping[TopicPartition, str] | None = None,
    parts: Parts | None = None,
    bits: int = WHOLE_BITS,
    groups: int = 1,
) -> Results:
    """Audit TrailRows, in any order, and Chunks of headers. Both are read several times.

    `unread`: partitions whose logs could not be read, and why. `parts`: the trails, if `rows` are not all their rows.
    A bucket has 2^`bits` offsets; repeated batches of a partition are found in `groups` groups.
    """
    judge, missing = rules.prove(_trail_parts(rows) if parts is None else parts)
    steps = _Steps(judge, missing, bounds, unread or {}, bits, groups)
    repeated = log.over(steps.sequenced).grouped().over(_repeats).kept("repeats")
    items = rows.over(steps.claims).plus(log.over(steps.batches)).plus(repeated.over(steps.probes))
    judged = items.grouped().over(steps.judged).kept("judged")
    # Even a partition without rows and batches has a row in the results.
    every = judged.over(lambda judged: ((each.which, (each.number, each.part)) for each in judged)).plus(
        [(which, (0, PartitionPart())) for which in {*bounds, *steps.unread}]
    )
    sums = every.grouped().over(steps.sums).kept("sums")
    windows = judged.over(_windows).plus(judged.over(_copies).grouped().over(_windows_of_copies))
    unchecked = frozenset(sums.over(lambda sums: (each.which for each in sums if each.row["unchecked"])))
    findings = Findings(judge.max_findings)
    for each in sums:
        findings.note(each.findings, each.found)
    for row in map(of_unproven, missing):
        findings.note([row], {row["kind"]: 1})
    return Results(
        windows=windows.plus(sums.over(_changes)).grouped().over(partial(steps.window_rows, unchecked)).kept("windows"),
        partitions=sums.over(lambda sums: (each.row for each in sums)),
        findings=Here(findings.whole()),
        owners=sums.over(lambda sums: (row for each in sums for row in each.owners)),
        throughput=judged.over(_flows).grouped().over(_throughput),
    )


def _trail_parts(rows: Bag) -> Parts:
    parts: dict[TrailName, TrailPart] = {}
    for name, part in sorted(rows.over(parts_by_block).grouped().over(_joined), key=lambda each: each[1].first):
        merge(parts, name, part)
    return parts


def parts_by_block(rows: Iterable[TrailRow]) -> Pairs:
    """Yield the summaries (parts) of consecutive rows, by trail and block."""
    parts: dict[tuple[str, str, int], TrailPart] = {}
    for row in rows:
        block, part = (row.proxy, row.incarnation, row.sequence >> _BLOCK_BITS), row.part()
        before = parts.get(block)
        if before is not None and part.continues(before):
            before.add(part)
            continue
        if before is not None:
            yield block, before
        parts[block] = part
    yield from parts.items()


def _joined(blocks: Groups) -> Pairs:
    return (((proxy, incarnation), joined(parts)) for (proxy, incarnation, _), parts in blocks)


@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps that need the rules and the bounds of the logs."""

    rules: AuditRules
    missing: list[Unproven]
    bounds: Mapping[TopicPartition, Bounds]
    unread: Mapping[TopicPartition, str]
    bits: int
    groups: int

    def _numbers(self, first: int, last: int) -> range:
        """Return the numbers of the buckets with these offsets."""
        return range(first >> self.bits, (max(first, last) >> self.bits) + 1)

    def _numbers_of(self, row: TrailRow) -> Iterable[int]:
        if len(row.spans) == 2:
            first, count = row.spans
            return self._numbers(first, first + count - 1)
        return {number for first, count in row.ranges for number in self._numbers(first, first + count - 1)}

    def claims(self, rows: Iterable[TrailRow]) -> Pairs:
        """Yield the rows to judge, by each bucket with offsets of theirs."""
        living = {which.topic: each.topic_id for which, each in self.bounds.items()}
        unread = self.unread
        for row in rows:
            if row.kind != "range" or not self.rules.judges(row.topic, row.last_acked_at):
                continue
            kind = topic_id = ""
            if self.rules.is_gone(row.topic, row.topic_id, living):
                kind, topic_id = DELETED if row.topic in self.rules.deleted_topics else GONE, row.topic_id or ""
            elif unread and row.which in unread:
                kind = UNREAD
            for number in self._numbers_of(row):
                yield Bucket(row.topic, row.partition, number, kind, topic_id), row

    def batches(self, chunks: Iterable[Chunk]) -> Pairs:
        """Yield the batches, by each bucket with offsets of theirs."""
        for which, batch in self._read(chunks):
            for number in self._numbers(batch.base_offset, batch.last_offset):
                yield Bucket(*which, number), batch

    def sequenced(self, chunks: Iterable[Chunk]) -> Pairs:
        """Yield the batches with sequence numbers; those that may be copies of each other are in one group."""
        for which, batch in self._read(chunks):
            if batch.producer_id >= 0 and batch.base_sequence >= 0:
                sequence = batch.producer_id, batch.producer_epoch, batch.base_sequence
                yield (which, hash(sequence) % self.groups), batch

    def _read(self, chunks: Iterable[Chunk]) -> Iterator[tuple[TopicPartition, Batch]]:
        return ((chunk.which, batch) for chunk in chunks if chunk.which not in self.unread for batch in chunk.batches)

    def probes(self, repeated: Iterable[tuple[TopicPartition, Repeat]]) -> Pairs:
        """Yield the repeated batches by the buckets of both copies."""
        for which, repeat in repeated:
            for at in (repeat.batch.base_offset, repeat.first_base_offset):
                yield Bucket(*which, at >> self.bits), (at, repeat)

    def judged(self, buckets: Groups) -> Iterator[Judged]:
        for bucket, items in buckets:
            which = TopicPartition(bucket.topic, bucket.partition)
            found: dict[type, list[Any]] = defaultdict(list)
            for item in items:
                found[type(item)].append(item)
            span = bucket.number << self.bits, (bucket.number + 1) << self.bits
            copies: Mapping[int, tuple[int, int]] = {}
            if bucket.kind:
                windows, part = judge_gone(found[TrailRow], bucket.topic_id or None, self.rules, bucket.kind, *span)
            else:
                bounds = self.bounds.get(which)
                windows, part, copies = judge_log(
                    found[TrailRow], found[Batch], bounds, self.rules, *span, found[tuple]
                )
            yield Judged(which, bucket.number, windows, part, copies)

    def sums(self, partitions: Groups) -> Iterator[Summed]:
        for which, parts in partitions:
            whole = PartitionPart()
            for _, part in sorted(parts, key=itemgetter(0)):
                whole.add(part, self.rules.max_findings)
            unproven, unread = bool(self.missing), self.unread.get(which)
            yield sum_up(which, whole, self.bounds.get(which), self.rules, unproven=unproven, unread=unread)

    def window_rows(self, unchecked: Collection[TopicPartition], windows: Groups) -> Iterator[Row]:
        """Yield the rows of windows in which something was acknowledged. `unchecked`: partitions with such batches."""
        length_ms = self.rules.window_ms
        for (which, begin), items in windows:
            amounts, more = Amounts(), Counter[str]()
            for item in items:
                if isinstance(item, Amounts):
                    amounts.add(item)
                else:
                    more.update(item)
            if amounts.by_owner or amounts.counts.total():
                amounts.counts.update(more)
                unproven = which in unchecked or is_unproven(begin, length_ms, self.missing)
                yield window_row(which, begin, length_ms, amounts, unproven=unproven)


def _repeats(groups: Groups) -> Iterator[tuple[TopicPartition, Repeat]]:
    return ((which, each) for (which, _), batches in groups for each in repeats(batches))


def _windows(judged: Iterable[Judged]) -> Pairs:
    return (((each.which, window), amounts) for each in judged for window, amounts in each.windows.items())


def _copies(judged: Iterable[Judged]) -> Pairs:
    return (((each.which, base), found) for each in judged for base, found in each.copies.items())


def _windows_of_copies(copies: Groups) -> Pairs:
    """Count a repeated batch in the last window in which a copy was acknowledged: the later one is the wrong one."""
    for (which, _), found in copies:
        window, records = max(found)
        yield (which, window), {"duplicated": records}


def _changes(sums: Iterable[Summed]) -> Pairs:
    """Count a change of ownership in the window where it began."""
    for each in sums:
        for window, changes in each.changes.items():
            yield (each.which, window), {"ownership_changes": changes}


def _flows(judged: Iterable[Judged]) -> Pairs:
    for each in judged:
        for window, amounts in each.windows.items():
            for owner, flow in amounts.by_owner.items():
                yield (window, owner), flow


def _throughput(flows: Groups) -> Iterator[Row]:
    for (window, owner), amounts in flows:
        records, size = map(sum, zip(*amounts, strict=True))
        begin = datetime.fromtimestamp(window / 1000, UTC)
        yield {"window_start": begin, "owner": owner, "records": records, "bytes": size}
