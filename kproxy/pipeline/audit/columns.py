"""Define the columns of the audit's result tables, and the kinds of findings. This module needs no Spark.

Columns that end in `_ms`, and `at`, `first_acked_at` and `last_acked_at`, are milliseconds since the epoch, except for
`p50_ms` to `max_ms`, which are durations; `window_start` and `window_end` are timestamps. First and last offsets are
inclusive; `end_offset` is the high watermark, the offset after the last record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from kproxy.pipeline.audit.report_facts import SUMMED, Finding

Columns = Mapping[str, str]
"""Names of columns, with their types in Spark's words. All may be null: foreign files may lack any value."""

# One row for each batch header in the log; the records themselves are not read.
HEADERS: Final[Columns] = {
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

# The counts of `Sums` that are of the log and not of a time. The counts of batches are of all batches that were read.
_OF_LOG: Final = ("unclaimed", "corrupt", "unchecked", "unsequenced")
# The counts of a partition, for one window of time or for all time. An acknowledged record counts in the window of the
# last acknowledgement in its trail row. Windows without acknowledgements have no row.
_COUNTS: Final[Columns] = {
    **dict.fromkeys((name for name in SUMMED if name not in _OF_LOG), "long"),
    "unproven": "boolean",
    "producers": "long",
    **dict.fromkeys(("p50_ms", "p95_ms", "p99_ms", "max_ms"), "double"),
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
    **dict.fromkeys((*_OF_LOG, "log_start_offset", "end_offset"), "long"),
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


class Kind(NamedTuple):
    """The names of one finding of a kind and of several. The kind is a fault, or unproven, or neither."""

    one: str
    many: str
    is_fault: bool = False
    is_unproven: bool = False


FINDING_KINDS: Final[Mapping[str, Kind]] = {
    LOST: Kind("loss", "losses", is_fault=True),
    OVERLAP: Kind("overlap", "overlaps", is_fault=True),
    DUPLICATE: Kind("duplicate", "duplicates", is_fault=True),
    CORRUPT: Kind("corrupt batch", "corrupt batches", is_fault=True),
    GONE: Kind("partition gone with its topic", "partitions gone with their topics", is_unproven=True),
    UNREAD: Kind("partition not read", "partitions not read", is_unproven=True),
    UNCHECKED: Kind("partition not checked", "partitions not checked", is_unproven=True),
    GAP: Kind("gap in a trail", "gaps in trails", is_unproven=True),
    TAIL: Kind("trail without an end", "trails without an end", is_unproven=True),
    # The user declared it.
    DELETED: Kind("deleted topic's partition", "deleted topics' partitions"),
}
UNPROVEN_KINDS: Final = tuple(kind for kind, names in FINDING_KINDS.items() if names.is_unproven)
WRONG_KINDS: Final = tuple(kind for kind, names in FINDING_KINDS.items() if names.is_fault)

# `from_ms` to `to_ms`: when the records were acknowledged; for a gap or a tail, the time that it leaves unproven for
# all topics. `sequence`: the number of a trail row. `of_kind`: the number of findings of this kind, listed or not.
# Columns that a kind lacks are null.
_TEXTS: Final = ("kind", "detail", "topic", "proxy", "incarnation")
_INTEGERS: Final = ("partition", "owner", "other_owner", "producer_epoch")
FINDINGS: Final[Columns] = {
    name: "string" if name in _TEXTS else "int" if name in _INTEGERS else "long"
    for name in (*Finding.__slots__, "of_kind")
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
TABLES: Final[Mapping[str, Columns]] = {
    "windows": WINDOWS,
    "partitions": PARTITIONS,
    "findings": FINDINGS,
    "owners": OWNERS,
    "throughput": THROUGHPUT,
    ABOUT: {"label": "string", "text": "string"},
}


def arrow_schema(names: Columns) -> Any:
    """Return the Arrow schema of columns with Spark's types."""
    import pyarrow as pa

    long, integer = pa.int64(), pa.int32()
    kinds = {
        "string": pa.string(), "int": integer, "long": long, "binary": pa.binary(), "boolean": pa.bool_(),
        "double": pa.float64(), "timestamp": pa.timestamp("us", "UTC"), "array<int>": pa.list_(integer),
    }  # fmt: skip
    return pa.schema([(name, kinds[kind]) for name, kind in names.items()])
