"""The columns of everything that the audit reads and writes.

Columns that end in `_ms`, and `at`, `first_acked_at` and `last_acked_at`, are milliseconds since the epoch, except for
`p50_ms` to `max_ms`, which are durations; `window_start` and `window_end` are timestamps. Offsets are inclusive where
they are called first and last; `end_offset` is the high watermark, the offset behind the last record.
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
    """All of them nullable: files that others wrote promise nothing else."""
    return StructType([StructField(name, kind) for name, kind in columns.items()])


# A row of a trail, of whatever kind: kproxy.trail.rows says what they mean. What a kind has not is null.
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

# One row a batch header in the log; the records themselves stay unread.
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

# One row a partition, read after its log was. `topic_id` in hex, null where brokers have none.
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

# What is told of a partition, of one window of time or of all of it. An acknowledged record counts in the window of its
# row's last acknowledgement. Windows in which nothing was acknowledged have no row.
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
        # Of batches, all that were read of the log.
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
# What these say is that something cannot be known.
UNPROVEN_KINDS: Final = (GONE, UNCHECKED, GAP, TAIL)
# The others say that something is wrong, but for one, which says what is known to whoever audits.
WRONG_KINDS: Final = (LOST, OVERLAP, DUPLICATE, CORRUPT)

# `from_ms` to `to_ms` is when it was acknowledged, and of a gap or a tail the time that it leaves unproven, for all
# topics. `sequence` is that of a row of the trail concerned. `of_kind`: how many findings there are of this kind,
# however few are listed. What a kind has not is null.
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

# One row for each time that a broker owned a partition and acknowledged something.
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
