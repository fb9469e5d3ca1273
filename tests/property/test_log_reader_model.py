"""The reader of a log's ranges returns every batch once, on generated logs that change while it reads.

The log is a model that answers as brokers do: from the batch with the requested offset on, cut at `max_bytes` except
for the first batch, and with gaps from compaction. Its beginning may advance between two answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.pipeline.audit.judge import Batch
from kproxy.pipeline.audit.log_client import EARLIEST, LogClient, LogReadFailed, Patience, TopicPartition
from kproxy.pipeline.audit.log_reader import LogRange, RangeReader
from kproxy.pipeline.audit.logs import cut
from kproxy_codec import error_codes
from kproxy_codec.fetch import PartitionFetched
from kproxy_codec.record_batch import assign_offsets, parse_batch
from kproxy_codec.record_crc import crc_is_valid
from tests.support.rules import examples
from tests.support.wire.record_batches import build_batch

T0 = TopicPartition("t", 0)
PATIENCE_S = 30.0
# (gap before a batch, its number of records)
SHAPES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=12)


class ModelLog(LogClient):
    """A log of one partition, in place of a cluster; time passes only in waits."""

    def __init__(self, shapes: Sequence[tuple[int, int]], *, gap_at_end: int = 0) -> None:
        self._now = 0.0
        super().__init__("h:1")
        self.batches: list[bytearray] = []
        self.log_start = 0
        self.end = 0
        self.moves: list[int] = []
        for gap, count in shapes:
            batch = build_batch([b"v" * 10] * count)
            assign_offsets(batch, parse_batch(batch), self.end + gap, 0)
            self.batches.append(batch)
            self.end += gap + count
        self.end += gap_at_end

    def patience(self) -> Patience:
        return Patience(PATIENCE_S, lambda: self._now, self._pass)

    def _pass(self, seconds: float) -> None:
        self._now += seconds

    def fetch(self, which: TopicPartition, offset: int, max_bytes: int, patience: Patience) -> PartitionFetched:
        if self.moves:
            self.log_start = max(self.log_start, self.moves.pop(0))
        if not self.log_start <= offset <= self.end:
            return PartitionFetched(which.partition, error_codes.OFFSET_OUT_OF_RANGE)
        # Found by the headers, as brokers do.
        behind = next((n for n, each in enumerate(self.batches) if last_offset(each) >= offset), len(self.batches))
        found = b"".join(self.batches[behind:])
        least = len(self.batches[behind]) if found else 0
        return PartitionFetched(which.partition, 0, self.end, self.log_start, None, found[: max(max_bytes, least)])

    def list_offsets(self, partitions: object, timestamp: int) -> dict[TopicPartition, int]:
        return {T0: self.log_start if timestamp == EARLIEST else self.end}

    def read(self, ranges: Sequence[LogRange], max_bytes: int = 1 << 20) -> list[Batch]:
        found = []
        for wanted in ranges:
            for rows in RangeReader(self, wanted, crc_is_valid, max_bytes).headers():
                found += rows
        return found


def last_offset(batch: bytearray) -> int:
    return int.from_bytes(batch[:8], "big") + int.from_bytes(batch[23:27], "big", signed=True)


def ranges_of(log: ModelLog, most: int) -> list[LogRange]:
    return [each for piece in cut({T0: log.log_start}, {T0: log.end}, most) for each in piece]


def headers(rows: Sequence[Batch]) -> list[tuple[int, int, int]]:
    return [row[:3] for row in rows]


@settings(max_examples=examples(300))
@given(SHAPES, st.integers(0, 3), st.integers(1, 12), st.integers(1, 400))
def test_every_batch_is_read_once_at_any_cut(
    shapes: list[tuple[int, int]], gap_at_end: int, most: int, max_bytes: int
) -> None:
    log = ModelLog(shapes, gap_at_end=gap_at_end)
    expected = [(b.base_offset, b.last_offset, b.record_count) for b in map(parse_batch, log.batches)]
    rows = log.read(ranges_of(log, most), max_bytes)
    assert headers(rows) == expected
    assert all(row[-1] is True for row in rows)


@settings(max_examples=examples(300))
@given(SHAPES, st.integers(1, 12), st.integers(1, 400), st.lists(st.integers(0, 40), max_size=8), st.randoms())
def test_retained_batches_are_read_once_despite_retention(
    shapes: list[tuple[int, int]], most: int, max_bytes: int, moves: list[int], random: object
) -> None:
    log = ModelLog(shapes)
    ranges = ranges_of(log, most)
    # The start of the log only rises, and tasks run in any order.
    log.moves = [min(move, log.end) for move in moves]
    random.shuffle(ranges)  # type: ignore[attr-defined]
    found = sorted(headers(log.read(ranges, max_bytes)))
    assert len(set(found)) == len(found)
    every = [(b.base_offset, b.last_offset, b.record_count) for b in map(parse_batch, log.batches)]
    assert set(found) <= set(every)
    assert {each for each in every if each[1] >= log.log_start} <= set(found)


def test_read_from_within_a_batch_includes_it() -> None:
    log = ModelLog([(0, 4), (0, 4)])
    log.log_start = 2
    assert headers(log.read(ranges_of(log, 3))) == [(0, 3, 4), (4, 7, 4)]


def flip(batch: bytearray, place: int) -> None:
    batch[place] ^= 0x01


# In the records, in their number, and in three bytes of the last offset: once larger, once smaller.
@pytest.mark.parametrize("place", [65, 60, 26, 24])
@pytest.mark.parametrize("which", [0, 1, 3])
@pytest.mark.parametrize("max_bytes", [1, 100, 1 << 20])
def test_corrupt_batch_is_reported_and_hides_no_other(place: int, which: int, max_bytes: int) -> None:
    log = ModelLog([(0, 4)] * 4)
    flip(log.batches[which], place)
    rows = log.read([LogRange(T0, 0, 16, is_first=True)], max_bytes)
    assert [(row[0], row[-1]) for row in rows] == [(4 * n, n != which) for n in range(4)]


def test_missing_check_reports_no_crc() -> None:
    log = ModelLog([(0, 4)])
    flip(log.batches[0], 65)
    (rows,) = RangeReader(log, LogRange(T0, 0, 4, is_first=True), None).headers()
    assert rows[0][-1] is None


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (16, 1, "magic 1; only 2 is read"),
        (11, 5, "announces 5 bytes, less than its header"),
        (8, 0x40, "its length field is too large"),
    ],
)
def test_invalid_batch_ends_the_read_with_its_place(place: int, value: int, said: str) -> None:
    log = ModelLog([(0, 4)] * 2)
    log.batches[1][place] = value
    if place == 11:
        log.batches[1][8:11] = bytes(3)
    with pytest.raises(LogReadFailed, match=f"^topic t, partition 0 cannot be read at offset 4: .*{said}"):
        log.read([LogRange(T0, 0, 8, is_first=True)])


def test_shortened_log_does_not_count_as_read() -> None:
    log = ModelLog([(0, 4)])
    said = "topic t, partition 0 was to be read up to offset 9 and ends at 4 now: .*; given up after 3[0-9] s"
    with pytest.raises(LogReadFailed, match=said):
        log.read([LogRange(T0, 0, 9, is_first=True)])
    with pytest.raises(LogReadFailed, match="up to offset 9 and ends at 4 now"):
        log.read([LogRange(T0, 6, 9, is_first=False)])
