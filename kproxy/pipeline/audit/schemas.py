"""The columns of all tables that the audit reads and writes.

Columns that end in `_ms`, and `at`, `first_acked_at` and `last_acked_at`, are milliseconds since the epoch, except for
`p50_ms` to `max_ms`, which are durations; `window_start` and `window_end` are timestamps. First and last offsets are
inclusive; `end_offset` is the high watermark, the offset after the last record.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

_STRING: Final = StringType()
_INT: Final = IntegerType()
_LONG: Final = LongType()
_BOOL: Final = BooleanType()
_MS: Final = DoubleType()
_TIME: Final = TimestampType()


def _columns(columns: dict[str, DataType]) -> StructType:
    """Return a schema of nullable columns: files written by others may lack any value."""
    return StructType([StructField(name, kind) for name, kind in columns.items()])


# A row of a trail, of any kind, as kproxy.trail.rows describes. Columns that a kind lacks are null.
TRAIL_SCHEMA: Final = _columns(
    {
        "kind": _STRING,
        "proxy": _STRING,
        "incarnation": _STRING,
        "sequence": _LONG,
        "at": _LONG,
        "interval_ms": _LONG,
        "mark_ms": _LONG,
        "topic": _STRING,
        "topic_id": _STRING,
        "partition": _INT,
        "owner": _INT,
        "revision": _LONG,
        "acks": _INT,
        "connection": _LONG,
        "peer": _STRING,
        "client_id": _STRING,
        "principal": _STRING,
        "producer_id": _LONG,
        "producer_epoch": _INT,
        "first_sequence": _INT,
        "base_offset": _LONG,
        "record_count": _LONG,
        "batches": _LONG,
        "bytes": _LONG,
        "first_acked_at": _LONG,
        "last_acked_at": _LONG,
        "spans": ArrayType(_LONG),
        "latency_us": ArrayType(_LONG),
    }
)

# One row for each batch header in the log; the records themselves are not read.
LOG_SCHEMA: Final = _columns(
    {
        "topic": _STRING,
        "partition": _INT,
        "base_offset": _LONG,
        "last_offset": _LONG,
        "record_count": _INT,
        "producer_id": _LONG,
        "producer_epoch": _INT,
        "base_sequence": _INT,
        "leader_epoch": _INT,
        "max_timestamp": _LONG,
        "bytes": _INT,
        "is_control": _BOOL,
        "is_transactional": _BOOL,
        "crc_ok": _BOOL,
    }
)

# One row for each partition, read after its log. `topic_id` in hex, null if brokers have none.
BOUNDS_SCHEMA: Final = _columns(
    {
        "topic": _STRING,
        "partition": _INT,
        "log_start_offset": _LONG,
        "end_offset": _LONG,
        "is_compacted": _BOOL,
        "topic_id": _STRING,
    }
)

# The counts of a partition, for one window of time or for all of it. An acknowledged record counts in the window of its
# row's last acknowledgement. Windows without acknowledgements have no row.
_COUNTS: Final[dict[str, DataType]] = {
    "acked": _LONG,
    "present": _LONG,
    "lost": _LONG,
    "removed": _LONG,
    "deleted": _LONG,
    "gone": _LONG,
    "duplicated": _LONG,
    "overlapped": _LONG,
    "unproven": _BOOL,
    "late": _LONG,
    "producers": _LONG,
    "batches": _LONG,
    "bytes": _LONG,
    "p50_ms": _MS,
    "p95_ms": _MS,
    "p99_ms": _MS,
    "max_ms": _MS,
    "ownership_changes": _LONG,
    "owners": ArrayType(_INT),
}

WINDOWS_SCHEMA: Final = _columns(
    {"topic": _STRING, "partition": _INT, "window_start": _TIME, "window_end": _TIME, **_COUNTS}
)

PARTITIONS_SCHEMA: Final = _columns(
    {
        "topic": _STRING,
        "partition": _INT,
        **_COUNTS,
        "unclaimed": _LONG,
        # Counts of batches, of all that were read of the log.
        "corrupt": _LONG,
        "unchecked": _LONG,
        "unsequenced": _LONG,
        "log_start_offset": _LONG,
        "end_offset": _LONG,
    }
)

# The kinds of findings, the worst first.
LOST: Final = "lost"
OVERLAP: Final = "overlap"
DUPLICATE: Final = "duplicate"
CORRUPT: Final = "corrupt"
DELETED: Final = "deleted"
GONE: Final = "gone"
UNCHECKED: Final = "unchecked"
GAP: Final = "gap"
TAIL: Final = "tail"
FINDING_KINDS: Final = (LOST, OVERLAP, DUPLICATE, CORRUPT, GONE, UNCHECKED, GAP, TAIL, DELETED)
# Kinds that report something unproven.
UNPROVEN_KINDS: Final = (GONE, UNCHECKED, GAP, TAIL)
# Kinds that report a fault: all others except DELETED, which the user declared.
WRONG_KINDS: Final = (LOST, OVERLAP, DUPLICATE, CORRUPT)

# `from_ms` to `to_ms`: when the records were acknowledged; for a gap or a tail, the time that it leaves unproven, for
# all topics. `sequence`: that of a row of the trail. `of_kind`: the number of findings of this kind, listed or not.
# Columns that a kind lacks are null.
FINDINGS_SCHEMA: Final = _columns(
    {
        "kind": _STRING,
        "topic": _STRING,
        "partition": _INT,
        "first_offset": _LONG,
        "last_offset": _LONG,
        "records": _LONG,
        "owner": _INT,
        "revision": _LONG,
        "other_owner": _INT,
        "other_revision": _LONG,
        "proxy": _STRING,
        "incarnation": _STRING,
        "producer_id": _LONG,
        "producer_epoch": _INT,
        "sequence": _LONG,
        "from_ms": _LONG,
        "to_ms": _LONG,
        "of_kind": _LONG,
        "detail": _STRING,
    }
)

# One row for each ownership of a partition under which a broker acknowledged records.
OWNERS_SCHEMA: Final = _columns(
    {
        "topic": _STRING,
        "partition": _INT,
        "owner": _INT,
        "revision": _LONG,
        "first_acked_at": _LONG,
        "last_acked_at": _LONG,
        "records": _LONG,
        "bytes": _LONG,
    }
)

THROUGHPUT_SCHEMA: Final = _columns({"window_start": _TIME, "owner": _INT, "records": _LONG, "bytes": _LONG})
