"""The functions that executors run for an audit: call the pure judge with groups of rows, and add up its parts.

Input and output are Arrow tables. Processes of one job exchange parts as pickles. Executors have this package without
its dependencies, so this module needs only pyarrow.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from kproxy.pipeline.audit.columns import DELETED, GONE, HEADERS, LOG, UNREAD, WINDOWS, arrow_schema, ddl
from kproxy.pipeline.audit.findings import sum_up, window_row
from kproxy.pipeline.audit.judge import (
    Amounts,
    Batch,
    Bounds,
    JudgeRules,
    PartitionPart,
    Range,
    Repeat,
    judge_gone,
    judge_log,
    repeats,
)
from kproxy.pipeline.audit.log_client import PATIENCE_S, LogClient, LogReadFailed, TopicPartition, Unread
from kproxy.pipeline.audit.log_reader import LogRange, RangeReader, records_in
from kproxy.pipeline.audit.logs import crc_check
from kproxy.pipeline.audit.proof import Stamp, Unproven, is_unproven, trail_part
from kproxy.pipeline.audit.trail_rows import NEEDED_FIELDS, TrailRow, is_row
from kproxy.pipeline.kafka_access import KafkaOptions
from kproxy.routing.topology import Address
from kproxy.trail.signature import Signatures

TRAIL_PARTS: Final = "proxy string, incarnation string, first long, part binary"
REPEATS: Final = f"{ddl(HEADERS)}, first_base_offset long"
# A part of a window of time, or, where that is null, of a partition. `copy`: the base offset of a repeated batch of
# which a copy was acknowledged in the window; such a row has no part.
PARTS: Final = "topic string, partition int, window_ms long, copy long, records long, part binary"
# The values of a topic's records, and their timestamps.
PAGES: Final = "shipped_at long, page binary"
_PAGES_PER_CHUNK: Final = 100
_NO_BATCH: Final = (None,) * len(Batch._fields)
FLOWS: Final = "window_ms long, owner int, records long, bytes long"
JUDGED: Final = (
    "topic string, partition int, row binary, findings binary, found binary, owners binary, changes map<bigint,bigint>"
)


def _rows(table: Any, names: Iterable[str]) -> Iterator[tuple[Any, ...]]:
    return zip(*(table.column(name).to_pylist() for name in names), strict=True)


def _table(schema: str, rows: list[tuple[Any, ...]]) -> Any:
    """Return an Arrow table; `schema` in Spark's words."""
    import pyarrow as pa

    fields = arrow_schema(dict(each.split(" ") for each in schema.split(", ")))
    columns = list(zip(*rows, strict=True)) or [()] * len(fields)
    return pa.table([pa.array(column, each.type) for column, each in zip(columns, fields, strict=True)], fields)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Read the pieces of logs that a task's numbers name. `leaders`: those of the partitions when it was planned.

    Executors need kafka-python for it, which is sent to them, and crc32c, without which `crc_ok` is null.
    """

    bootstrap: str
    kafka: KafkaOptions
    pieces: Sequence[Sequence[LogRange]]
    leaders: Mapping[TopicPartition, Address]
    patience_s: float = PATIENCE_S

    def _ranges(self, numbers: Iterable[Any]) -> Iterator[tuple[LogClient, LogRange]]:
        with LogClient(self.bootstrap, self.kafka, patience_s=self.patience_s) as client:
            client.leaders.update(self.leaders)
            for wanted in (each for batch in numbers for n in batch.column(0).to_pylist() for each in self.pieces[n]):
                yield client, wanted

    def headers(self, numbers: Iterable[Any]) -> Iterator[Any]:
        """Yield LOG."""
        check = crc_check()
        for client, wanted in self._ranges(numbers):
            try:
                for headers in RangeReader(client, wanted, check).headers():
                    yield from _table(ddl(LOG), [(*wanted.which, *each, None) for each in headers]).to_batches()
            except LogReadFailed as error:
                yield from _table(ddl(LOG), [(*wanted.which, *_NO_BATCH, str(error))]).to_batches()

    def pages(self, numbers: Iterable[Any]) -> Iterator[Any]:
        """Yield PAGES. Raise LogReadFailed."""
        records = (record for client, wanted in self._ranges(numbers) for record in records_in(client, wanted))
        pages = ((record.timestamp, record.value or b"") for record in records)
        while chunk := list(islice(pages, _PAGES_PER_CHUNK)):
            yield from _table(PAGES, chunk).to_batches()


@dataclass(frozen=True, slots=True)
class SignedLines:
    """Keep the lines that are signed with one of `keys`."""

    keys: tuple[bytes, ...]

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow as pa

        accept = Signatures(self.keys).accept
        for batch in batches:
            lines = batch.column("line").to_pylist()
            yield batch.filter(pa.array([line is not None and accept(line.encode()) for line in lines], pa.bool_()))


def rows_of_proxies(batches: Iterable[Any]) -> Iterator[Any]:
    """Keep the rows of trails that a proxy may have written."""
    import pyarrow as pa

    for batch in batches:
        rows = zip(*(batch.column(name).to_pylist() for name in TrailRow.__slots__), strict=True)
        kept = [None not in row[:NEEDED_FIELDS] and is_row(TrailRow(*row)) for row in rows]
        yield batch.filter(pa.array(kept, pa.bool_()))


def part_of_trail(key: tuple[Any, ...], table: Any) -> Any:
    """Return TRAIL_PARTS of a group of rows of one trail, whose sequence numbers are close to each other."""
    proxy, incarnation, _ = (each.as_py() for each in key)
    part = trail_part(map(Stamp._make, _rows(table, Stamp._fields)))
    return _table(TRAIL_PARTS, [(proxy, incarnation, part.first, pickle.dumps(part))])


def repeats_among(key: tuple[Any, ...], table: Any) -> Any:
    """Return REPEATS of batches; a group has all batches of a producer, epoch and sequence number."""
    topic, partition, _ = (each.as_py() for each in key)
    found = repeats(map(Batch._make, _rows(table, Batch._fields)))
    return _table(REPEATS, [(topic, partition, *each.batch, each.first_base_offset) for each in found])


@dataclass(frozen=True, slots=True)
class BucketJudge:
    """Judge a bucket: a range of 2^`bits` offsets of a partition. `deleted`: topics declared deleted on purpose."""

    rules: JudgeRules
    bounds: Mapping[tuple[str, int], Bounds]
    deleted: frozenset[str]
    bits: int

    def __call__(self, key: tuple[Any, ...], trail: Any, log: Any) -> Any:
        """Return PARTS. `gone` in the key: "=" and a deleted topic's id, if any; UNREAD; empty for all other rows."""
        topic, partition, gone, bucket = (each.as_py() for each in key)
        rows = map(Range._make, _rows(trail, Range._fields))
        span = {"start": bucket << self.bits, "end": (bucket + 1) << self.bits}
        copies: Mapping[int, tuple[int, int]] = {}
        if gone:
            kind = UNREAD if gone == UNREAD else DELETED if topic in self.deleted else GONE
            windows, part = judge_gone(rows, gone[1:] or None, self.rules, kind, **span)
        else:
            batches, probes = [], []
            for first_base_offset, probe, *header in _rows(log, ("first_base_offset", "probe", *Batch._fields)):
                batch = Batch._make(header)
                if probe is None:
                    batches.append(batch)
                else:
                    probes.append((probe, Repeat(batch, first_base_offset)))
            bounds = self.bounds.get((topic, partition))
            windows, part, copies = judge_log(rows, batches, bounds, self.rules, probes=probes, **span)
        out: list[tuple[Any, ...]] = [
            (topic, partition, window, None, None, pickle.dumps(each)) for window, each in windows.items()
        ]
        out += [(topic, partition, window, base, records, None) for base, (window, records) in copies.items()]
        out.append((topic, partition, None, None, None, pickle.dumps((bucket, part))))
        return _table(PARTS, out)


@dataclass(frozen=True, slots=True)
class PartitionSum:
    """Add up the parts of a partition, and turn them into rows of the result tables."""

    rules: JudgeRules
    bounds: Mapping[tuple[str, int], Bounds]
    deleted: frozenset[str]
    is_unproven: bool
    unread: Unread

    def __call__(self, key: tuple[Any, ...], table: Any) -> Any:
        """Return JUDGED."""
        topic, partition = (each.as_py() for each in key)
        parts = sorted((pickle.loads(each) for each in table.column("part").to_pylist()), key=lambda each: each[0])  # noqa: S301 - of this job
        whole = PartitionPart()
        for _, part in parts:
            whole.add(part, self.rules.max_findings)
        bounds = self.bounds.get((topic, partition))
        why = self.unread.get(TopicPartition(topic, partition))
        row, findings, found, owners, changes = sum_up(
            topic, partition, whole, bounds, self.deleted, self.rules, unproven=self.is_unproven, unread=why
        )
        packed = (pickle.dumps(each) for each in (row, findings, found, owners))
        return _table(JUDGED, [(topic, partition, *packed, list(changes.items()))])


@dataclass(frozen=True, slots=True)
class WindowSum:
    """Add up the parts of a window of time, and turn them into a row. `unproven_partitions`: in all their windows."""

    length_ms: int
    missing: list[Unproven]
    unproven_partitions: frozenset[tuple[str, int]]

    def __call__(self, key: tuple[Any, ...], table: Any) -> Any:
        """Return WINDOWS: a row, or none if nothing was acknowledged in the window."""
        import pyarrow as pa

        topic, partition, window_ms = (each.as_py() for each in key)
        amounts = Amounts()
        extra = {"duplicated": 0, "ownership_changes": 0}
        for part, copy, records in _rows(table, ("part", "copy", "records")):
            if part is not None:
                amounts.add(pickle.loads(part))  # noqa: S301 - of this job
            else:
                extra["ownership_changes" if copy is None else "duplicated"] += records
        if not amounts.by_owner and not amounts.counts.total():
            return pa.Table.from_pylist([], arrow_schema(WINDOWS))
        amounts.counts.update(extra)
        unproven = (topic, partition) in self.unproven_partitions
        unproven |= is_unproven(window_ms, self.length_ms, self.missing)
        row = window_row(topic, partition, window_ms, self.length_ms, amounts, unproven=unproven)
        return pa.Table.from_pylist([row], arrow_schema(WINDOWS))


def flows(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield FLOWS: the records and bytes by window and owner of parts of windows."""
    for batch in batches:
        out = []
        for window_ms, part in _rows(batch, ("window_ms", "part")):
            by_owner = pickle.loads(part).by_owner  # noqa: S301 - of this job
            out += [(window_ms, owner, records, size) for owner, (records, size) in by_owner.items()]
        yield from _table(FLOWS, out).to_batches()


@dataclass(frozen=True, slots=True)
class Unpack:
    """Yield the rows that the only column of a frame has as pickles; a value is one row or a list of rows."""

    names: Mapping[str, str]

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow as pa

        for batch in batches:
            for packed in batch.column(0).to_pylist():
                rows = pickle.loads(packed)  # noqa: S301 - of this job
                rows = rows if isinstance(rows, list) else [rows]
                yield from pa.Table.from_pylist(rows, arrow_schema(self.names)).to_batches()
