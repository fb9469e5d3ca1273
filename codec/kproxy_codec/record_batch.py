"""Parse the header of a record batch, version 2 (magic 2, KIP-98).

The records after it are not parsed. A batch is 61 bytes of header and then its records, compressed or not.
`base_offset` and `partition_leader_epoch` are outside the CRC so that a broker can set them on a received batch;
everything from `attributes` on is covered. Positions are counted in the given buffer, sizes are bytes, timestamps are
milliseconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

from kproxy_codec.errors import InvalidField, Truncated
from kproxy_codec.primitives import INT32, INT64, Buffer

HEADER_BYTES = 61
# Bytes that `batch_length` does not count: those of base_offset and of batch_length itself.
LOG_OVERHEAD_BYTES = 12
MAGIC = 2
MAGIC_OFFSET = 16
NO_PRODUCER_ID = -1
NO_SEQUENCE = -1
NO_TIMESTAMP = -1

_HEADER = Struct(">qiibIhiqqqhii")
_LEADER_EPOCH_OFFSET = 12
ATTRIBUTES_OFFSET = 21
_COMPRESSION_MASK = 0x07
_LOG_APPEND_TIME = 0x08
_TRANSACTIONAL = 0x10
_CONTROL = 0x20
_MAX_SEQUENCE = 0x7FFF_FFFF


class RecordBatch(NamedTuple):
    """One batch's header and position."""

    position: int
    base_offset: int
    batch_length: int
    partition_leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size_in_bytes(self) -> int:
        """The size of the whole batch, header included."""
        return LOG_OVERHEAD_BYTES + self.batch_length

    @property
    def end(self) -> int:
        """The position after the batch."""
        return self.position + LOG_OVERHEAD_BYTES + self.batch_length

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def last_sequence(self) -> int:
        """The last record's sequence number; sequence numbers wrap from 2^31-1 to 0."""
        return add_sequence(self.base_sequence, self.last_offset_delta)

    @property
    def compression(self) -> int:
        """0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd."""
        return self.attributes & _COMPRESSION_MASK

    @property
    def is_log_append_time(self) -> bool:
        return bool(self.attributes & _LOG_APPEND_TIME)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & _TRANSACTIONAL)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & _CONTROL)


def add_sequence(sequence: int, increment: int) -> int:
    """`sequence` plus `increment` ≥ 0, wrapping after 2^31-1 as Kafka's DefaultRecordBatch does."""
    return (sequence + increment) & _MAX_SEQUENCE


def parse_header(buffer: Buffer, position: int = 0) -> RecordBatch:
    """Parse the header at `position`; records need not be in the buffer.

    Raises Truncated if the buffer ends before the header does, InvalidField for a magic other than 2 or a length
    shorter than a header.
    """
    available = len(buffer) - position
    if available > MAGIC_OFFSET and buffer[position + MAGIC_OFFSET] != MAGIC:
        magic = buffer[position + MAGIC_OFFSET]
        raise InvalidField(f"the batch at {position} has magic {magic}; only {MAGIC} is read")
    if available < HEADER_BYTES:
        raise Truncated(f"a batch header needs {HEADER_BYTES} bytes at {position}, {max(available, 0)} are left")
    batch = RecordBatch(position, *_HEADER.unpack_from(buffer, position))
    if batch.batch_length < HEADER_BYTES - LOG_OVERHEAD_BYTES:
        raise InvalidField(f"the batch at {position} announces {batch.batch_length} bytes, less than its header")
    return batch


def parse_batch(buffer: Buffer, position: int = 0) -> RecordBatch:
    """Parse the header of a batch that must be whole in the buffer.

    Raises as `parse_header` does, and Truncated if the buffer ends before the batch does. The CRC is not checked: see
    `kproxy_codec.record_crc`.
    """
    batch = parse_header(buffer, position)
    available = len(buffer) - position
    if batch.size_in_bytes > available:
        raise Truncated(f"the batch at {position} has {batch.size_in_bytes} bytes, {available} are left")
    return batch


def iterate_batches(buffer: Buffer, position: int = 0) -> Iterator[RecordBatch]:
    """The batches from `position` to the buffer's end, in order; raises as `parse_batch` does."""
    end = len(buffer)
    while position < end:
        batch = parse_batch(buffer, position)
        yield batch
        position = batch.end


def leader_epoch_of(buffer: Buffer) -> int:
    """The leader epoch of the batch at the start of a buffer, which must hold the batch's header."""
    leader_epoch: int = INT32.unpack_from(buffer, _LEADER_EPOCH_OFFSET)[0]
    return leader_epoch


def assign_offsets(buffer: bytearray | memoryview, batch: RecordBatch, base_offset: int, leader_epoch: int) -> None:
    """Write `base_offset` and `leader_epoch` into the batch in place; its CRC stays valid."""
    INT64.pack_into(buffer, batch.position, base_offset)
    INT32.pack_into(buffer, batch.position + _LEADER_EPOCH_OFFSET, leader_epoch)
