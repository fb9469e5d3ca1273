"""Encode and decode the records of batches that this project itself writes, with kafka-python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from kproxy_codec.errors import InvalidField
from kproxy_codec.primitives import Buffer
from kproxy_codec.record_batch import MAGIC, NO_PRODUCER_ID, NO_SEQUENCE, RecordBatch

_FAILURES: tuple[type[Exception], ...] = (IndexError, ValueError, TypeError, OverflowError, AssertionError)

Pair = tuple[bytes, bytes | None]
"""A record's key and value; without a value it removes what its key names."""


def encode_batch(
    pairs: Sequence[Pair],
    timestamp_ms: int,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = -1,
    base_sequence: int = NO_SEQUENCE,
) -> bytearray:
    """Encode one batch, from offset 0 on, uncompressed; by default without a producer."""
    builder: Any = DefaultRecordBatchBuilder(
        magic=MAGIC,
        compression_type=0,
        is_transactional=False,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        # A smaller limit would leave records out.
        batch_size=1 << 30,
    )
    for offset, (key, value) in enumerate(pairs):
        builder.append(offset, timestamp_ms, key, value, [])
    return bytearray(builder.build())


def decode_batch(buffer: Buffer, batch: RecordBatch) -> Iterable[Pair]:
    """Decode the records of a batch whose CRC is valid. Raises InvalidField."""
    records: Any = DefaultRecordBatch(bytes(memoryview(buffer)[batch.position : batch.end]))
    try:
        return [(bytes(record.key), None if record.value is None else bytes(record.value)) for record in records]
    except _FAILURES as error:
        raise InvalidField(f"invalid records in the batch at offset {batch.base_offset}: {error}") from error
