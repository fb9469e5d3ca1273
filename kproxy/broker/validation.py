"""What a broker checks of a produced batch before it is appended; the rules are those of Kafka's LogValidator.

The records inside stay unread: the CRC says that they are what the producer sent, and no more is promised.
"""

from __future__ import annotations

from typing import NamedTuple

from codec import error_codes
from codec.errors import InvalidField, Truncated
from codec.record_batch import NO_PRODUCER_ID, RecordBatch, crc_is_valid, parse_batch

_ZSTD = 4
_LEAST_VERSION_FOR_ZSTD = 7


class Refusal(NamedTuple):
    """Why a batch is not appended."""

    error_code: int
    error_message: str


def check_records(records: memoryview, api_version: int, max_message_bytes: int) -> RecordBatch | Refusal:
    """The one batch that `records` is, or why it is refused."""
    try:
        batch = parse_batch(records)
    except Truncated as error:
        if not records:
            return Refusal(error_codes.INVALID_RECORD, "exactly one record batch per partition is wanted, none came")
        return Refusal(error_codes.CORRUPT_MESSAGE, str(error))
    except InvalidField as error:
        return Refusal(error_codes.INVALID_RECORD, str(error))
    if len(records) > max_message_bytes:
        message = f"the batch has {len(records)} bytes; at most {max_message_bytes} are taken"
        return Refusal(error_codes.MESSAGE_TOO_LARGE, message)
    if batch.end != len(records):
        return Refusal(error_codes.INVALID_RECORD, "exactly one record batch per partition is wanted, more came")
    if not crc_is_valid(records, batch):
        return Refusal(error_codes.CORRUPT_MESSAGE, "the batch's CRC does not match its bytes")
    return _check_header(batch, api_version) or batch


def _check_header(batch: RecordBatch, api_version: int) -> Refusal | None:
    if batch.record_count <= 0 or batch.last_offset_delta != batch.record_count - 1:
        message = f"{batch.record_count} records with a last offset delta of {batch.last_offset_delta}"
        return Refusal(error_codes.INVALID_RECORD, message)
    if batch.is_control:
        return Refusal(error_codes.INVALID_RECORD, "a client may not write control batches")
    if batch.is_transactional:
        return Refusal(error_codes.INVALID_TXN_STATE, "transactions are not offered by this broker")
    if batch.is_log_append_time:
        return Refusal(error_codes.INVALID_TIMESTAMP, "a client may not set the log append time")
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
