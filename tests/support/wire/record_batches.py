"""Build record batches by kafka-python, which shares nothing with `kproxy_codec.record_batch`."""

from __future__ import annotations

from collections.abc import Sequence

from crc32c import crc32c
from kafka.record.default_records import DefaultRecordBatchBuilder


def build_batch(
    values: Sequence[bytes] = (b"value",),
    *,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    timestamp: int = 1_700_000_000_000,
    compression: int = 0,
    is_transactional: bool = False,
) -> bytearray:
    """One batch of `values` without keys; timestamps rise by one millisecond from record to record."""
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=compression,
        is_transactional=is_transactional,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        batch_size=1 << 30,
    )
    for position, value in enumerate(values):
        builder.append(position, timestamp=timestamp + position, key=None, value=value, headers=[])
    return bytearray(builder.build())


def with_attributes(batch: bytearray, attributes: int) -> bytearray:
    """`batch` with other attributes (compression, timestamp type, control bit) and a matching CRC."""
    changed = bytearray(batch)
    changed[21:23] = attributes.to_bytes(2, "big")
    changed[17:21] = crc32c(changed[21:]).to_bytes(4, "big")
    return changed
