"""Decode the rows of a trail, and skip those that no proxy wrote. Both engines use this module.

Anyone may write to the trail's topic. Rows that no proxy writes must not make the audit fail, by numbers that overflow
or that stand for too much data: they are skipped, like partial rows. Their sequence numbers are then missing, which the
audit reports as a gap.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from operator import attrgetter
from typing import Any, Final

from kproxy.pipeline.audit.log_client import TopicPartition
from kproxy.pipeline.audit.proof import TrailPart
from kproxy.trail.signature import Signatures, digest

KINDS: Final = ("begin", "range", "mark", "end")
# What rows of another kind have; a range has all that is typed without None (`is_row`).
_ABSENT: Final[Any] = None
# Limits far above real values, and far below those whose sums overflow.
LAST_MS: Final = 1 << 47
MOST_OFFSETS: Final = 1 << 60
MOST_RECORDS: Final = 1 << 36
MOST_BYTES: Final = 1 << 48
# A row has at most four times kproxy.trail.acknowledgements.MAX_SPANS numbers.
MOST_IN_SPANS: Final = 10_000


@dataclass(slots=True)
class TrailRow:
    """A row of any kind, as kproxy.trail.rows describes; a field that a kind lacks is None.

    `shipped_at`: when it came to its topic. `digest`: that of its line, None where lines are not kept.
    """

    kind: str
    proxy: str
    incarnation: str
    sequence: int
    at: int
    interval_ms: int | None = None
    mark_ms: int | None = None
    topic: str = _ABSENT
    topic_id: str | None = None
    partition: int = _ABSENT
    owner: int = _ABSENT
    revision: int = _ABSENT
    acks: int | None = None
    connection: int | None = None
    producer_id: int = _ABSENT
    producer_epoch: int = _ABSENT
    first_sequence: int = _ABSENT
    record_count: int = _ABSENT
    batches: int = _ABSENT
    bytes: int = _ABSENT
    first_acked_at: int = _ABSENT
    last_acked_at: int = _ABSENT
    spans: list[int] = _ABSENT
    latency_us: list[int] | None = None
    previous: str | None = None
    shipped_at: int | None = None
    digest: str | None = field(default=None, compare=False)

    @property
    def which(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    @property
    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the first offset and the number of records of each span."""
        return zip(self.spans[::2], self.spans[1::2], strict=True)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the row as a tuple: the default pickle of a dataclass takes three times as long."""
        return TrailRow, _fields_of(self)

    def part(self) -> TrailPart:
        """Return the part of the trail that is this row."""
        kind, sequence, at = self.kind, self.sequence, self.at
        begin_at = at if kind == "begin" else None
        mark, end = sequence if kind == "mark" else None, sequence if kind == "end" else None
        digest = None if self.previous is None else self.digest
        times = self.interval_ms, self.mark_ms
        return TrailPart(sequence, sequence, at, at, begin_at, *times, mark, end, [], self.previous, digest)


_fields_of: Final = attrgetter(*(each.name for each in fields(TrailRow)))
_NEEDED: Final = {"kind", "proxy", "incarnation", "sequence", "at"}
_BY_NAME: Final = {"str": str, "int": int, "list[int]": list, "None": type(None)}
_TYPES: Final = {
    name: [_BY_NAME[each] for each in text.split(" | ")] for name, text in TrailRow.__annotations__.items()
}


@cache
def decoder() -> Callable[[bytes], TrailRow]:
    """Return msgspec's decoder, which takes a sixth of the time, or `decode` where msgspec is not installed."""
    try:
        import msgspec
    except ImportError:
        return decode
    return msgspec.json.Decoder(TrailRow).decode


def decode(line: bytes) -> TrailRow:
    """Decode a row. Raise ValueError or TypeError if it lacks a field, or has one of another type."""
    given = json.loads(line)
    known = {name: given[name] for name in _TYPES if name in given}
    for name, value in known.items():
        if type(value) not in _TYPES[name] or (type(value) is list and any(type(each) is not int for each in value)):
            raise TypeError(name)
    return TrailRow(**known)


def rows_in(page: bytes, shipped_at: int | None = None, signatures: Signatures | None = None) -> Iterator[TrailRow]:
    """Yield the rows in lines of JSON; skip rows that no proxy writes and rows that are not signed."""
    read = decoder()
    for line in page.split(b"\n"):
        if signatures is not None and line and not signatures.accept(line):
            continue
        try:
            row = read(line)
        except (ValueError, TypeError, RecursionError):
            continue
        row.shipped_at, row.digest = shipped_at, digest(line)
        if is_row(row):
            yield row


def rows_of_pages(signatures: Signatures | None, pages: Iterable[tuple[bytes, int | None]]) -> Iterator[TrailRow]:
    """Yield the rows in pages, each with the time when it came to its topic."""
    for page, shipped_at in pages:
        yield from rows_in(page, shipped_at, signatures)


def rows_of_files(rows: Iterable[Mapping[str, Any]]) -> Iterator[TrailRow]:
    """Yield the rows of Parquet files that a proxy may have written."""
    for row in rows:
        known = {name: row[name] for name in _TYPES if row.get(name) is not None}
        if known.keys() >= _NEEDED and is_row(found := TrailRow(**known)):
            yield found


def rows_of_lines(signatures: Signatures | None, lines: Iterable[Any]) -> Iterator[TrailRow]:
    """Yield the rows in the lines of JSON files, which are Spark's rows."""
    return rows_of_pages(signatures, ((line.value.encode(), None) for line in lines))


def rows_of_parquet(rows: Iterable[Any]) -> Iterator[TrailRow]:
    """Yield the rows of Parquet files, which are Spark's rows."""
    return rows_of_files(row.asDict() for row in rows)


def closed_since(from_ms: int | None, rows: Iterable[TrailRow]) -> Iterator[TrailRow]:
    return (row for row in rows if from_ms is None or row.at >= from_ms)


@dataclass(slots=True)
class Acked:
    """What rows acknowledge, by partition.

    `first`: the lowest offset, since the time that was asked for. `behind_one`: the offset after the last one that was
    acknowledged with acks=1, else 0. `rows`: the number of all rows.
    """

    first: dict[TopicPartition, int] = field(default_factory=dict)
    behind_one: dict[TopicPartition, int] = field(default_factory=dict)
    rows: int = 0

    def add(self, other: Acked) -> None:
        for which, first in other.first.items():
            self.first[which] = min(first, self.first.get(which, first))
        for which, behind in other.behind_one.items():
            self.behind_one[which] = max(behind, self.behind_one.get(which, 0))
        self.rows += other.rows


def acked_in(rows: Iterable[TrailRow], since_ms: int = 0) -> Acked:
    found = Acked()
    for row in rows:
        found.rows += 1
        if row.kind == "range":
            behind = row.spans[-2] + row.spans[-1] if row.acks == 1 else 0
            found.behind_one[row.which] = max(behind, found.behind_one.get(row.which, 0))
            if row.last_acked_at >= since_ms:
                found.first[row.which] = min(*row.spans[::2], found.first.get(row.which, MOST_OFFSETS))
    return found


def is_row(row: TrailRow) -> bool:
    """Return whether a proxy may have written the row."""
    if row.kind not in KINDS or not 0 <= row.sequence <= MOST_OFFSETS or not 0 <= row.at <= LAST_MS:
        return False
    if any(value is not None and not 0 <= value <= LAST_MS for value in (row.interval_ms, row.mark_ms)):
        return False
    return row.kind != "range" or _is_range(row)


def _is_range(row: TrailRow) -> bool:
    spans = row.spans
    if not spans or len(spans) % 2 or len(spans) > MOST_IN_SPANS or min(spans) < 0 or max(spans) > MOST_OFFSETS:
        return False
    if max(spans[1::2]) > MOST_RECORDS:
        return False
    limits = (
        (row.record_count, MOST_RECORDS),
        (row.batches, MOST_RECORDS),
        (row.bytes, MOST_BYTES),
        (row.first_acked_at, LAST_MS),
        (row.last_acked_at, LAST_MS),
    )
    if None in (row.topic, row.partition, row.owner, row.revision, row.producer_id, *(value for value, _ in limits)):
        return False
    if not all(0 <= value <= most for value, most in limits):
        return False
    return row.producer_id < 0 or (None not in (row.producer_epoch, row.first_sequence) and row.first_sequence >= 0)
