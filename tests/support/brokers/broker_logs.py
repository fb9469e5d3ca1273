"""Helpers for the tests of the broker's log."""

from __future__ import annotations

import shutil
from pathlib import Path

from kproxy.broker.log import Log
from kproxy_codec.record_batch import RecordBatch, assign_offsets, iterate_batches, parse_batch
from tests.support.wire.record_batches import build_batch


def append(log: Log, records: bytearray, *, leader_epoch: int = 0) -> int:
    """Append as a leading partition does; return the base offset assigned."""
    view = memoryview(records)
    batch = parse_batch(view)
    base_offset = log.log_end_offset
    assign_offsets(view, batch, base_offset, leader_epoch)
    log.append(view, batch)
    log.producers.update(batch, base_offset)
    return base_offset


def append_values(log: Log, *sizes: int, timestamp: int = 1000, leader_epoch: int = 0) -> None:
    """Append a batch of one record for each size."""
    for size in sizes:
        append(log, build_batch([b"x" * size], timestamp=timestamp), leader_epoch=leader_epoch)


def offsets(data: bytes) -> list[int]:
    """The base offsets of whole batches."""
    return [batch.base_offset for batch in iterate_batches(data)]


def read_all(log: Log) -> bytes:
    """Every batch of the log, across its segments."""
    found, offset = b"", log.log_start_offset
    while data := log.read(offset, 1 << 30):
        found += data
        offset = list(iterate_batches(data))[-1].last_offset + 1
    return found


def leader_batches(base_offset: int, *counts: int, leader_epoch: int = 0, **fields: int) -> bytearray:
    """Batches of these numbers of records, as a leader at `base_offset` would send; `fields` as in `build_batch`."""
    data = bytearray()
    for count in counts:
        records = build_batch([b"v%d" % (base_offset + each) for each in range(count)], **fields)
        assign_offsets(records, parse_batch(records), base_offset, leader_epoch)
        data += records
        base_offset += count
    return data


def headers(log: Log) -> list[RecordBatch]:
    return list(iterate_batches(read_all(log)))


def copied(directory: Path, into: Path, *, is_told: bool = True) -> Path:
    """Copy the files with their times; `is_told`: also those that save the log from being read."""
    into.mkdir(parents=True)
    for path in directory.iterdir():
        if is_told or path.suffix not in (".index", ".snapshot"):
            shutil.copy2(path, into)
    return into


def assert_reads_alike(log: Log, whole: Log) -> None:
    """Check that a log opened by its snapshot equals one that was read completely."""
    assert (log.log_start_offset, log.log_end_offset) == (whole.log_start_offset, whole.log_end_offset)
    assert (log.truncated_bytes, log.size_in_bytes) == (whole.truncated_bytes, whole.size_in_bytes)
    assert (log.high_watermark_checkpoint, log.leadership) == (whole.high_watermark_checkpoint, whole.leadership)
    assert log.leader_epochs.entries() == whole.leader_epochs.entries()
    assert log.max_timestamp() == whole.max_timestamp()
    assert read_all(log) == read_all(whole)
    for batch in headers(whole):
        assert log.read(batch.last_offset, 1) == whole.read(batch.last_offset, 1)
        assert log.find_timestamp(batch.max_timestamp) == whole.find_timestamp(batch.max_timestamp)
        if batch.producer_id >= 0:
            following = batch._replace(base_sequence=batch.base_sequence + batch.record_count)
            for each in (batch, following):
                assert log.producers.judge(each) == whole.producers.judge(each)
