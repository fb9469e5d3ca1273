"""Validate record batches before a broker appends them.

A produced batch is checked by the rules of Kafka's LogValidator. A replicated one must continue the log
and have a valid CRC; the leader has checked the rest. The records inside are not read, only covered by the CRC.

The error code matters: clients resend after CORRUPT_MESSAGE, and give up after INVALID_RECORD.
`tests/contract/test_produce_oracle.py` lists where Apache Kafka itself answers otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

from kproxy_codec import error_codes
from kproxy_codec.errors import CodecError, InvalidField, Truncated
from kproxy_codec.primitives import Buffer
from kproxy_codec.record_batch import MAGIC, MAGIC_OFFSET, NO_PRODUCER_ID, RecordBatch, parse_batch
from kproxy_codec.record_crc import crc_is_valid

# The default of Kafka's message.timestamp.after.max.ms.
MAX_AHEAD_MS = 3_600_000
_ZSTD = 4
_LEAST_VERSION_FOR_ZSTD = 7


class Refusal(NamedTuple):
    """Why a batch is not appended."""

    error_code: int
    error_message: str


def check_records(records: memoryview, api_version: int, max_message_bytes: int, now_ms: int) -> RecordBatch | Refusal:
    """Return the one batch in `records`, or the reason for refusing it; `now_ms` is the time of day."""
    try:
        batch = parse_batch(records)
    except Truncated as error:
        what = str(error) if records else "none came"
        return Refusal(error_codes.INVALID_RECORD, f"exactly one record batch per partition is wanted: {what}")
    except InvalidField as error:
        is_old = records[MAGIC_OFFSET] < MAGIC
        return Refusal(error_codes.INVALID_RECORD if is_old else error_codes.CORRUPT_MESSAGE, str(error))
    if len(records) > max_message_bytes:
        message = f"the batch has {len(records)} bytes; at most {max_message_bytes} are allowed"
        return Refusal(error_codes.MESSAGE_TOO_LARGE, message)
    if batch.end != len(records):
        return Refusal(error_codes.INVALID_RECORD, "exactly one record batch per partition is wanted, more came")
    if not crc_is_valid(records, batch):
        return Refusal(error_codes.CORRUPT_MESSAGE, "the batch's CRC does not match its bytes")
    return _check_header(batch, api_version, now_ms) or batch


def _check_header(batch: RecordBatch, api_version: int, now_ms: int) -> Refusal | None:
    if batch.record_count <= 0 or batch.last_offset_delta != batch.record_count - 1:
        message = f"{batch.record_count} records with a last offset delta of {batch.last_offset_delta}"
        return Refusal(error_codes.INVALID_RECORD, message)
    if batch.base_offset != 0:
        return Refusal(error_codes.INVALID_RECORD, f"a client's batch begins at offset 0, not {batch.base_offset}")
    if batch.is_control:
        return Refusal(error_codes.INVALID_RECORD, "a client may not write control batches")
    if batch.is_transactional:
        return Refusal(error_codes.INVALID_TXN_STATE, "transactions are not offered by this broker")
    if batch.is_log_append_time:
        return Refusal(error_codes.INVALID_TIMESTAMP, "a client may not set the log append time")
    if batch.max_timestamp > now_ms + MAX_AHEAD_MS:
        ahead_s = (batch.max_timestamp - now_ms) // 1000
        return Refusal(
            error_codes.INVALID_TIMESTAMP, f"a timestamp {ahead_s} s ahead; {MAX_AHEAD_MS // 1000} s are allowed"
        )
    if batch.compression > _ZSTD:
        return Refusal(error_codes.INVALID_RECORD, f"there is no compression type {batch.compression}")
    if batch.compression == _ZSTD and api_version < _LEAST_VERSION_FOR_ZSTD:
        message = f"zstd may be produced from version {_LEAST_VERSION_FOR_ZSTD} on, not in {api_version}"
        return Refusal(error_codes.UNSUPPORTED_COMPRESSION_TYPE, message)
    if batch.producer_id != NO_PRODUCER_ID and (
        batch.producer_id < 0 or min(batch.producer_epoch, batch.base_sequence) < 0
    ):
        return Refusal(error_codes.INVALID_RECORD, "a producer id without a usable epoch and sequence")
    return None


class ReplicatedBatchInvalid(ValueError):
    """A leader's records cannot continue the log."""


def check_replicated(records: Buffer, log_end_offset: int, leader_epoch: int) -> list[RecordBatch]:
    """Return the whole batches in a leader's `records`.

    They must continue a log that ends at `log_end_offset` with `leader_epoch`. A partial last batch is left out. Raises
    ReplicatedBatchInvalid.
    """
    batches: list[RecordBatch] = []
    position, next_offset = 0, log_end_offset
    while (batch := _whole_batch(records, position)) is not None:
        if batch.base_offset != next_offset or batch.last_offset_delta < 0:
            raise ReplicatedBatchInvalid(f"the leader sent offset {batch.base_offset}; expected {next_offset}")
        if batch.partition_leader_epoch < leader_epoch:
            what = f"leader epoch {batch.partition_leader_epoch} at offset {batch.base_offset}"
            raise ReplicatedBatchInvalid(f"{what} is lower than {leader_epoch}")
        if not crc_is_valid(records, batch):
            raise ReplicatedBatchInvalid(f"the CRC of the batch at offset {batch.base_offset} does not match")
        batches.append(batch)
        position, next_offset, leader_epoch = batch.end, batch.last_offset + 1, batch.partition_leader_epoch
    return batches


def _whole_batch(records: Buffer, position: int) -> RecordBatch | None:
    try:
        return parse_batch(records, position)
    except Truncated:
        return None
    except CodecError as error:
        raise ReplicatedBatchInvalid(str(error)) from error
