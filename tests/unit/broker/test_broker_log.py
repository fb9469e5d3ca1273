"""The broker's log on a real disk: reading back, torn writes, refusals."""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kproxy.broker.config import LogOptions
from kproxy.broker.log import Log
from kproxy.broker.producer_state import BatchVerdict
from kproxy.broker.segment import LogFailed
from kproxy_codec.record_batch import assign_offsets, parse_batch
from tests.support.brokers.broker_logs import append, append_values, offsets
from tests.support.wire.record_batches import build_batch
from tests.unit.broker.replicas import reopened

OPTIONS = LogOptions(segment_bytes=20_000)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    opened = Log.open(tmp_path / "t-0", options=OPTIONS)
    yield opened
    opened.close()


@pytest.mark.parametrize("max_bytes", [0, 1, 60, 61, 8_999])
@pytest.mark.parametrize("offset", [0, 1])
def test_first_batch_is_whole_at_any_limit(log: Log, offset: int, max_bytes: int) -> None:
    append_values(log, 9_000, 9_000)
    assert offsets(log.read(offset, max_bytes)) == [offset]
    assert len(log.read(offset, max_bytes)) > 9_000


def test_reads_stay_within_max_bytes(log: Log) -> None:
    append_values(log, *[400] * 10)
    assert len(log.read(0, 1000)) == 1000


def test_every_offset_is_found_across_segments(tmp_path: Path) -> None:
    source = random.Random(7)
    log = Log.open(tmp_path / "t-0", options=OPTIONS)
    expected: dict[int, int] = {}
    for _ in range(300):
        count = source.randint(1, 5)
        base = append(log, build_batch([b"v" * source.randint(0, 1500)] * count))
        expected.update(dict.fromkeys(range(base, base + count), base))
    assert len(list(log.directory.glob("*.log"))) > 10

    def check(log: Log) -> None:
        assert log.log_end_offset == len(expected)
        for offset, base in expected.items():
            assert parse_batch(log.read(offset, 1)).base_offset == base

    check(log)
    with reopened(log) as again:
        check(again)


def test_reads_walk_the_whole_log_without_a_gap(log: Log) -> None:
    append_values(log, *[700] * 100)
    seen: list[int] = []
    offset = 0
    while data := log.read(offset, 3000):
        whole = _whole_batches(data)
        seen += whole
        offset = whole[-1] + 1
    assert seen == list(range(100))


def _whole_batches(data: bytes) -> list[int]:
    position, found = 0, []
    while position + 61 <= len(data):
        size = 12 + int.from_bytes(data[position + 8 : position + 12], "big")
        if position + size > len(data):
            break
        found.append(int.from_bytes(data[position : position + 8], "big"))
        position += size
    return found


def test_failed_partial_write_leaves_no_trace(log: Log) -> None:
    append_values(log, 100)
    size = log.size_in_bytes
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 500, limits[1]))  # the next write stops after 500 bytes
    try:
        with pytest.raises(OSError, match="File too large"):
            append_values(log, 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (log.size_in_bytes, log.log_end_offset) == (size, 1)
    assert next(log.directory.glob("*.log")).stat().st_size == size
    append_values(log, 5000)
    assert offsets(log.read(0, 1 << 20)) == [0, 1]


def test_undone_append_leaves_disk_index_and_timestamps(log: Log) -> None:
    append_values(log, 5000, timestamp=1000)
    view = memoryview(build_batch([b"x" * 5000], timestamp=9000))
    batch = parse_batch(view)
    assign_offsets(view, batch, 1, 0)
    log.append(view, batch)
    log.undo_append()
    assert (log.log_end_offset, log.max_timestamp()) == (1, (1000, 0))
    append_values(log, 10, timestamp=2000)
    assert offsets(log.read(1, 1 << 20)) == [1]
    with reopened(log) as again:
        assert (again.truncated_bytes, again.log_end_offset) == (0, 2)


def test_closed_log_refuses_everything(log: Log, tmp_path: Path) -> None:
    other = Log.open(tmp_path / "t-1")
    append_values(other, 10)
    other.close()
    with pytest.raises(LogFailed):
        append_values(other, 10)
    with pytest.raises(LogFailed):
        other.read(0, 100)


@pytest.mark.parametrize(
    ("asked", "found"), [(0, (1000, 0)), (1000, (1000, 0)), (1001, (2000, 1)), (5999, (6000, 5)), (6001, None)]
)
def test_timestamp_finds_first_batch_that_reaches_it(log: Log, asked: int, found: tuple[int, int] | None) -> None:
    for step in range(1, 7):
        append_values(log, 6000, timestamp=step * 1000)
    assert log.find_timestamp(asked) == found


def test_decreasing_timestamps_hide_no_batch(log: Log) -> None:
    for timestamp in (5000, 1000, 7000, 2000):
        append_values(log, 100, timestamp=timestamp)
    assert log.find_timestamp(1500) == (5000, 0)
    assert log.find_timestamp(6000) == (7000, 2)
    assert log.max_timestamp() == (7000, 2)


def test_producer_state_is_rebuilt_from_the_log(log: Log) -> None:
    def idempotent(sequence: int, count: int = 2) -> bytearray:
        return build_batch([b"v"] * count, producer_id=9, producer_epoch=0, base_sequence=sequence)

    for sequence in (0, 2, 4):
        append(log, idempotent(sequence))
    with reopened(log) as again:
        assert again.producers.judge(parse_batch(idempotent(2))) == (BatchVerdict.DUPLICATE, 2, 3, "")
        assert again.producers.judge(parse_batch(idempotent(6))).verdict is BatchVerdict.ACCEPTED
        assert again.producers.judge(parse_batch(idempotent(7))).verdict is BatchVerdict.OUT_OF_ORDER


def sizes_of(log: Log) -> Sequence[int]:
    return [path.stat().st_size for path in sorted(log.directory.glob("*.log"))]


def test_segments_roll_before_they_exceed_their_size(log: Log) -> None:
    append_values(log, *[9000] * 6)
    assert max(sizes_of(log)) <= 20_000
    assert len(sizes_of(log)) == 3
    append_values(log, 50_000)
    assert max(sizes_of(log)) > 50_000, "a batch larger than a segment still goes in, alone"
