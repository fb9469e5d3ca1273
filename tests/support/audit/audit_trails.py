"""Make rows of trails to ship, and read the trails that arrived."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from kproxy.trail.rows import Begin, End, Mark, Range, Row, decode_page, encode_page
from kproxy.trail.topic_sink import PARTITIONS
from tests.support.clients.kafka_io import read_topic

PROXY, INCARNATION = "proxy.test:9092", "00c0ffee00c0ffee"
BEGAN_MS = 1_700_000_000_000


def some_rows(count: int, first_sequence: int = 0) -> list[Row]:
    """A row of every kind and then ranges; all of them if `count` is large enough. They differ in every field."""
    rows: list[Row] = []
    for sequence in range(first_sequence, first_sequence + count):
        stamp = (PROXY, INCARNATION, sequence, BEGAN_MS + sequence)
        if sequence == 0:
            rows.append(Begin(**_stamped(stamp), interval_ms=1000, mark_ms=10_000))
        elif sequence % 3 == 1:
            rows.append(Mark(**_stamped(stamp)))
        else:
            rows.append(_range(stamp))
    return rows


def the_end(sequence: int) -> Row:
    return End(**_stamped((PROXY, INCARNATION, sequence, BEGAN_MS + sequence)))


def _stamped(stamp: tuple[str, str, int, int]) -> dict[str, object]:
    return dict(zip(("proxy", "incarnation", "sequence", "at"), stamp, strict=True))


def _range(stamp: tuple[str, str, int, int]) -> Range:
    sequence = stamp[2]
    return Range(
        **_stamped(stamp),
        topic='a "topic"',
        topic_id=None if sequence % 2 else "0" * 32,
        partition=sequence % 5,
        owner=1,
        revision=(1 << 40) + sequence,
        acks=-1,
        connection=sequence,
        peer="[::1]:4000",
        client_id="klüger",
        principal=None,
        producer_id=(1 << 40) + sequence,
        producer_epoch=3,
        first_sequence=sequence,
        base_offset=(1 << 41) + sequence,
        record_count=2,
        batches=2,
        bytes=200,
        first_acked_at=stamp[3] - 5,
        last_acked_at=stamp[3],
        spans=[(1 << 41) + sequence, 1, (1 << 42) + sequence, 1],
        latency_us=[1, 2_000_000] if sequence % 2 else [],
    )


def paged(rows: Sequence[Row], rows_a_page: int) -> list[bytes]:
    return [encode_page(rows[at : at + rows_a_page]) for at in range(0, len(rows), rows_a_page)]


def rows_in(pages: Iterable[bytes]) -> list[Row]:
    """All rows, in the order of the pages."""
    return [row for page in pages for row in decode_page(page)]


def rows_in_files(directory: Path) -> list[Row]:
    """The rows of files of JSON lines, in the order of the files' names."""
    pages = [file.read_bytes() for file in sorted(directory.glob("*.jsonl"))]
    rows = rows_in(pages)
    # The decoder takes rows without newlines between them as well.
    assert sum(page.count(b"\n") for page in pages) == len(rows)
    return rows


def trails_in_topic(bootstrap: str, topic: str) -> dict[str, list[Row]]:
    """By incarnation, each row once, in their order; each trail must be in one partition, in order."""
    trails: dict[str, dict[int, Row]] = {}
    places: dict[str, int] = {}
    for record in read_topic(bootstrap, topic, PARTITIONS, at_least=1):
        for row in rows_in([record.value or b""]):
            assert record.key == row.incarnation.encode()
            assert places.setdefault(row.incarnation, record.partition) == record.partition
            trails.setdefault(row.incarnation, {})[row.sequence] = row
    return {incarnation: [rows[n] for n in sorted(rows)] for incarnation, rows in trails.items()}


def is_whole(rows: Sequence[Row]) -> bool:
    """Whether a trail has its begin, its end and all rows between them."""
    numbered = [row.sequence for row in rows] == list(range(len(rows)))
    return numbered and isinstance(rows[0], Begin) and isinstance(rows[-1], End)
