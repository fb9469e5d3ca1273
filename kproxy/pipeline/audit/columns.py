"""The columns of the tables that the audit makes, and the kinds of findings. This module needs no Spark.

Columns that end in `_ms`, and `at`, `first_acked_at` and `last_acked_at`, are milliseconds since the epoch, except for
`p50_ms` to `max_ms`, which are durations; `window_start` and `window_end` are timestamps. First and last offsets are
inclusive; `end_offset` is the high watermark, the offset after the last record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

Columns = Mapping[str, str]
"""Names of columns, with their types in Spark's words. All may be null: foreign files may lack any value."""

# One row for each batch header in the log; the records themselves are not read.
LOG: Final[Columns] = {
    "topic": "string",
    "partition": "int",
    "base_offset": "long",
    "last_offset": "long",
    "record_count": "int",
    "producer_id": "long",
    "producer_epoch": "int",
    "base_sequence": "int",
    "is_control": "boolean",
    "crc_ok": "boolean",
}

# One row for each partition, read after its log. `topic_id` is in hex, or null if brokers have none.
BOUNDS: Final[Columns] = {
    "topic": "string",
    "partition": "int",
    "log_start_offset": "long",
    "end_offset": "long",
    "is_compacted": "boolean",
    "topic_id": "string",
}

# The counts of a partition, for one window of time or for all time. An acknowledged record counts in the window of the
# last acknowledgement in its trail row. Windows without acknowledgements have no row.
_COUNTS: Final[Columns] = {
    "acked": "long",
    "present": "long",
    "lost": "long",
    "removed": "long",
    "deleted": "long",
    "gone": "long",
    "unread": "long",
    "duplicated": "long",
    "overlapped": "long",
    "unproven": "boolean",
    "late": "long",
    "producers": "long",
    "batches": "long",
    "bytes": "long",
    "p50_ms": "double",
    "p95_ms": "double",
    "p99_ms": "double",
    "max_ms": "double",
    "ownership_changes": "long",
    "owners": "array<int>",
}

WINDOWS: Final[Columns] = {
    "topic": "string",
    "partition": "int",
    "window_start": "timestamp",
    "window_end": "timestamp",
    **_COUNTS,
}


PARTITIONS: Final[Columns] = {
    "topic": "string",
    "partition": "int",
    **_COUNTS,
    "unclaimed": "long",
    # Counts of batches, among all batches that were read.
    "corrupt": "long",
    "unchecked": "long",
    "unsequenced": "long",
    "log_start_offset": "long",
    "end_offset": "long",
}

# The kinds of findings, the worst first.
LOST: Final = "lost"
OVERLAP: Final = "overlap"
DUPLICATE: Final = "duplicate"
CORRUPT: Final = "corrupt"
GAP: Final = "gap"
TAIL: Final = "tail"
DELETED: Final = "deleted"
GONE: Final = "gone"
UNCHECKED: Final = "unchecked"
UNREAD: Final = "unread"
FINDING_KINDS: Final = (LOST, OVERLAP, DUPLICATE, CORRUPT, GONE, UNREAD, UNCHECKED, GAP, TAIL, DELETED)
# Kinds that report something unproven.
UNPROVEN_KINDS: Final = (GONE, UNREAD, UNCHECKED, GAP, TAIL)
# Kinds that report a fault: all others except DELETED, which the user declared.
WRONG_KINDS: Final = (LOST, OVERLAP, DUPLICATE, CORRUPT)

# `from_ms` to `to_ms`: when the records were acknowledged; for a gap or a tail, the time that it leaves unproven for
# all topics. `sequence`: the number of a trail row. `of_kind`: the number of findings of this kind, listed or not.
# Columns that a kind lacks are null.
FINDINGS: Final[Columns] = {
    "kind": "string",
    "topic": "string",
    "partition": "int",
    "first_offset": "long",
    "last_offset": "long",
    "records": "long",
    "owner": "int",
    "revision": "long",
    "other_owner": "int",
    "other_revision": "long",
    "proxy": "string",
    "incarnation": "string",
    "producer_id": "long",
    "producer_epoch": "int",
    "sequence": "long",
    "from_ms": "long",
    "to_ms": "long",
    "of_kind": "long",
    "detail": "string",
}

# One row for each ownership of a partition under which a broker acknowledged records.
OWNERS: Final[Columns] = {
    "topic": "string",
    "partition": "int",
    "owner": "int",
    "revision": "long",
    "first_acked_at": "long",
    "last_acked_at": "long",
    "records": "long",
    "bytes": "long",
}

THROUGHPUT: Final[Columns] = {"window_start": "timestamp", "owner": "int", "records": "long", "bytes": "long"}

# The description of the audit, a row per label and text. It is written last: a directory that has it is complete.
ABOUT: Final = "about"


def ddl(names: Columns) -> str:
    """Return columns as a schema in Spark's words."""
    return ", ".join(f"{name} {kind}" for name, kind in names.items())


def arrow_schema(names: Columns) -> Any:
    """Return the Arrow schema of columns with Spark's types."""
    import pyarrow as pa

    long, integer = pa.int64(), pa.int32()
    kinds = {
        "string": pa.string(), "int": integer, "long": long, "binary": pa.binary(), "boolean": pa.bool_(),
        "double": pa.float64(), "timestamp": pa.timestamp("us", "UTC"), "array<int>": pa.list_(integer),
        "map<bigint,bigint>": pa.map_(long, long),
    }  # fmt: skip
    return pa.schema([(name, kinds[kind]) for name, kind in names.items()])
