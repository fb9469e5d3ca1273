"""Helpers for the tests of the broker's log."""

from __future__ import annotations

from kproxy.broker.log import Log
from kproxy_codec.record_batch import assign_offsets, iterate_batches, parse_batch
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
    """A batch of one record for each size."""
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
