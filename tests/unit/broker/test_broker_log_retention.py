"""Retention removes segments by Kafka's retention.bytes and retention.ms."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kproxy.broker.config import LogOptions
from kproxy.broker.log import Log
from tests.support.brokers.broker_logs import append, append_values
from tests.support.wire.record_batches import build_batch
from tests.unit.broker.replicas import reopened

BATCH_BYTES = 1000
SEGMENT_BYTES = 2 * BATCH_BYTES
SEGMENTS = 5
END_OFFSET = 2 * SEGMENTS
NO_TIMESTAMP = -1


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """Five segments of two batches; the batch at offset n has the timestamp 1000 * n."""
    opened = Log.open(tmp_path / "t-0", options=LogOptions(segment_bytes=SEGMENT_BYTES))
    for offset in range(END_OFFSET):
        records = build_batch([b"x" * (BATCH_BYTES - 72)], timestamp=1000 * offset)
        assert abs(len(records) - BATCH_BYTES) < 3
        append(opened, records, leader_epoch=offset)
    assert len(list(opened.directory.glob("*.log"))) == SEGMENTS
    opened.flush()
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("retention_bytes", "start_offset"),
    [
        pytest.param(-1, 0, id="everything is kept"),
        pytest.param(SEGMENTS * SEGMENT_BYTES, 0, id="no more than may be"),
        pytest.param(4 * SEGMENT_BYTES - 50, 2, id="one too many"),
        pytest.param(4 * SEGMENT_BYTES + 50, 0, id="without it too little would be left"),
        pytest.param(SEGMENT_BYTES - 50, 8, id="all but the last"),
        pytest.param(0, 8, id="the last one stays"),
    ],
)
def test_retention_removes_segments_by_size(log: Log, retention_bytes: int, start_offset: int) -> None:
    log.options = LogOptions(SEGMENT_BYTES, retention_bytes=retention_bytes)
    assert log.remove_old_segments(10**12, END_OFFSET) == start_offset // 2
    assert (log.log_start_offset, log.log_end_offset) == (start_offset, END_OFFSET)


@pytest.mark.parametrize(
    ("now_ms", "start_offset"),
    [
        pytest.param(5000, 0, id="nothing is so old"),
        pytest.param(6000, 0, id="as old as may be"),
        pytest.param(6001, 2, id="the first segment's last record is too old"),
        pytest.param(7999, 2, id="in the second, only one record is"),
        pytest.param(13_001, 8, id="all but the last"),
    ],
)
def test_retention_removes_segments_by_time(log: Log, now_ms: int, start_offset: int) -> None:
    log.options = LogOptions(SEGMENT_BYTES, retention_ms=5000)
    assert log.remove_old_segments(now_ms, END_OFFSET) == start_offset // 2
    assert (log.log_start_offset, log.log_end_offset) == (start_offset, END_OFFSET)
    assert log.leader_epochs.entries()[0] == (min(start_offset, 9), start_offset)
    append_values(log, 10, leader_epoch=50)
    with reopened(log) as again:
        assert (again.log_start_offset, again.log_end_offset) == (start_offset, END_OFFSET + 1)


@pytest.mark.parametrize(("high_watermark", "start_offset"), [(0, 0), (1, 0), (2, 2), (9, 8), (10, 8)])
def test_retention_removes_only_committed_records(log: Log, high_watermark: int, start_offset: int) -> None:
    log.options = LogOptions(SEGMENT_BYTES, retention_ms=0, retention_bytes=0)
    log.remove_old_segments(10**12, high_watermark)
    assert log.log_start_offset == start_offset


def test_last_segment_is_removed_after_successor_is_flushed(log: Log) -> None:
    """Otherwise a power cut might leave no segment, and offsets would begin at 0 again."""
    log.options = LogOptions(SEGMENT_BYTES, retention_ms=5000)
    for removed in (SEGMENTS - 1, 0):
        assert log.remove_old_segments(14_001, END_OFFSET) == removed
        assert sorted(int(path.stem) for path in log.directory.glob("*.log")) == [END_OFFSET - 2, END_OFFSET]
    log.flush()
    assert log.remove_old_segments(14_001, END_OFFSET) == 1
    assert (log.log_start_offset, log.log_end_offset) == (END_OFFSET, END_OFFSET)
    assert log.leader_epochs.entries() == [(9, END_OFFSET)]
    append_values(log, 10, leader_epoch=50)
    with reopened(log) as again:
        assert (again.log_start_offset, again.log_end_offset) == (END_OFFSET, END_OFFSET + 1)


def test_follower_keeps_flushed_segment_its_leader_removed(log: Log) -> None:
    append_values(log, BATCH_BYTES, leader_epoch=50)
    log.advance_log_start(END_OFFSET)
    assert log.log_start_offset == END_OFFSET - 2
    log.flush()
    log.advance_log_start(END_OFFSET)
    assert log.log_start_offset == END_OFFSET


def test_broker_without_flushes_removes_segments_at_once(log: Log) -> None:
    log.options = LogOptions(SEGMENT_BYTES, flush="never", retention_ms=0)
    assert log.remove_old_segments(10**12, END_OFFSET) == SEGMENTS


def test_old_segment_waits_behind_a_younger_one(log: Log) -> None:
    log.truncate_to(0)
    for timestamp in (1000, 9_000_000, 1000):
        append_values(log, 1900, timestamp=timestamp)
    log.flush()
    log.options = LogOptions(SEGMENT_BYTES, retention_ms=5000)
    assert log.remove_old_segments(9_000_000, 3) == 1
    assert log.log_start_offset == 1


def test_records_without_timestamps_use_file_age(log: Log) -> None:
    log.truncate_to(0)
    append_values(log, 1900, 1900, timestamp=NO_TIMESTAMP)
    log.flush()
    log.options = LogOptions(SEGMENT_BYTES, retention_ms=5000)
    written_ms = min(path.stat().st_mtime_ns for path in log.directory.glob("*.log")) // 1_000_000
    assert log.remove_old_segments(written_ms + 4000, 2) == 0
    os.utime(min(log.directory.glob("*.log")), (0, 0))
    assert log.remove_old_segments(written_ms + 4000, 2) == 1


def test_emptied_log_has_nothing_more_to_remove(log: Log) -> None:
    log.options = LogOptions(SEGMENT_BYTES, retention_ms=0, retention_bytes=0)
    for removed in (SEGMENTS - 1, 1, 0):
        assert log.remove_old_segments(10**12, END_OFFSET) == removed
        log.flush()
    assert (log.size_in_bytes, log.read(END_OFFSET, 100)) == (0, b"")
    assert (log.max_timestamp(), log.find_timestamp(0)) == ((-1, -1), None)
