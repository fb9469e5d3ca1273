"""Transform rows into messages and dead letters.

All functions go from DataFrame to DataFrame: no reading, no writing, no session.

    placed -> encoded -> messages       to Kafka's sink
                      -> dead_letters   to files or a topic

They work on the DataFrame of one micro-batch (from `foreachBatch`), not on the stream: a stream can neither be sorted
nor have its rows numbered. Our columns begin with `_kproxy_`.

Order is kept by key: all rows of a key go to one producer in the order of the source, and so to one Kafka partition in
that order: by file (oldest first, then by name) and line, by source partition and offset, or by number. Rows without a
key have no order; if the job has no key, rows stay in the tasks that read them.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DoubleType,
    FloatType,
    MapType,
    StructType,
    TimestampType,
)

from kproxy.errors import StartupError
from kproxy.pipeline.ingest.java_classes import TIMESTAMP_HEADER
from kproxy.pipeline.ingest.options import MAX_NAME, IngestOptions

# The source's text that a reader could not parse; only for CSV and JSON.
CORRUPT: Final = "_kproxy_corrupt"
# For JSON: the document's text, and the names of its fields that the schema lacks, null if none.
TEXT: Final = "_kproxy_text"
NEW: Final = "_kproxy_new"
# The document's text, if documents are written as they are in the source.
DOCUMENT: Final = "_kproxy_document"
# For files, from their reader.
FILE: Final = "_kproxy_file"
MODIFIED: Final = "_kproxy_modified"
BLOCK: Final = "_kproxy_block"
# A row's name, the same at every reading, and the sort key within a message key.
ROW: Final = "_kproxy_row"
ORDER: Final = "_kproxy_order"
# Spark's own columns of a Kafka record whose value was parsed.
RECORD: Final = "kafka"
# The message.
KEY: Final = "_kproxy_key"
VALUE: Final = "_kproxy_value"
HEADERS: Final = "_kproxy_headers"
TOPIC: Final = "_kproxy_topic"
# Why the row is a dead letter; null if it is none.
REASON: Final = "_kproxy_reason"

REASONS: Final = ("corrupt", "new column", "not finite", "no key", "no topic", "too large")
# kafka-clients' upper estimates, or more: a batch's header, a record's, and each length.
RECORD_OVERHEAD: Final = 61 + 21 + 15
HEADER_OVERHEAD: Final = 10
# The longest `record` of a dead letter in a topic, so that its message fits.
RECORD_EXCERPT: Final = 64 << 10
# `monotonically_increasing_id` has the row's number within its task in these bits, and the task's number above them.
_NUMBER_BITS: Final = (1 << 33) - 1
_NESTED: Final = (StructType, ArrayType, MapType)
_HEADER_TYPE: Final = "array<struct<key:string,value:binary>>"
# To the microsecond, Spark's resolution; its default is milliseconds.
_JSON: Final = {
    "timeZone": "UTC",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
_WITH_NULLS: Final = {**_JSON, "ignoreNullFields": "false"}


def placed(rows: DataFrame) -> DataFrame:
    """Add ROW and ORDER to the `rows` of one micro-batch.

    Both depend only on the source, so a micro-batch that is read again has the same. Lines are counted within a block
    of their file, so blocks have a fixed size (`sources.BLOCK_BYTES`).
    """
    if FILE in rows.columns:
        # The id counts within a task, and a task reads one block.
        counted = rows.withColumn(ORDER, F.monotonically_increasing_id().bitwiseAND(F.lit(_NUMBER_BITS)))
        name = F.concat(F.col(FILE), F.lit("#"), F.col(BLOCK), F.lit(":"), F.col(ORDER))
        return counted.withColumn(ROW, name).withColumn(ORDER, F.struct(MODIFIED, FILE, BLOCK, ORDER))
    record = F.col(RECORD) if RECORD in rows.columns else None
    if record is None and {"topic", "partition", "offset"} <= set(rows.columns):
        record = F.struct("topic", "partition", "offset")
    if record is not None:
        topic, partition, offset = (record.getField(each) for each in ("topic", "partition", "offset"))
        name = F.concat_ws("/", topic, partition, offset)
        return rows.withColumn(ROW, name).withColumn(ORDER, F.struct(topic, partition, offset))
    return rows.withColumn(ROW, F.col("value").cast("string")).withColumn(ORDER, F.struct("value"))


def encoded(rows: DataFrame, options: IngestOptions, *, batch: str) -> DataFrame:
    """Add the message (KEY, VALUE, HEADERS, TOPIC) to `placed` rows, and REASON, null if it can be written.

    `batch` is the value of the batch header. Raise StartupError for a column that does not exist.
    """
    key = _key(rows, options.key)
    headers = _headers(rows, options, batch)
    columns = {
        KEY: F.lit(None).cast("binary") if key is None else key,
        VALUE: _value(rows, options),
        TOPIC: F.lit(options.topic) if options.topic_column is None else text_of(rows, options.topic_column),
        HEADERS: F.lit(None).cast(_HEADER_TYPE) if headers is None else headers,
    }
    with_message = rows.withColumns(columns)
    return with_message.withColumn(REASON, _reason(with_message, options))


def messages(rows: DataFrame, *, tasks: int, options: IngestOptions) -> DataFrame:
    """Return the writable `encoded` rows in the form of Kafka's sink; a key's rows in ORDER, in one of `tasks`."""
    good = rows.where(F.col(REASON).isNull())
    wanted = {"key": F.col(KEY), "value": F.col(VALUE), "topic": F.col(TOPIC)}
    headers = []
    if has_headers(options):
        headers.append(F.coalesce(F.col(HEADERS), F.array().cast(_HEADER_TYPE)))
    if options.keeps_timestamps:
        told = F.encode(F.unix_millis(_of_record(rows, "timestamp")).cast("string"), "utf-8")
        headers.append(F.array(F.struct(F.lit(TIMESTAMP_HEADER).alias("key"), told.alias("value"))).cast(_HEADER_TYPE))
    if headers:
        wanted["headers"] = F.concat(*headers)
    if options.keep_partitions:
        wanted["partition"] = _of_record(rows, "partition")
    columns = [column.alias(name) for name, column in wanted.items()]
    if not options.key:
        # A task reads a partition of the source, in its order.
        return good.select(*columns)
    # Spread rows without a key over all tasks, rather than sending them all to one.
    place = [F.coalesce(F.col(KEY), F.encode(ROW, "utf-8"))]
    if options.keep_partitions:
        place = [_of_record(rows, "topic"), _of_record(rows, "partition")]
    return good.repartition(tasks, *place).sortWithinPartitions(ORDER).select(*columns)


def dead_letters(rows: DataFrame, *, batch: str, excerpt: int | None = None) -> DataFrame:
    """Return the `encoded` rows that cannot be written: reason, row, batch, key, bytes, record, record_cut.

    `record` is the source's text if it could not be parsed, else the columns as JSON (binary ones in base64), cut to
    `excerpt` characters if given.
    """
    dead = rows.where(F.col(REASON).isNotNull())
    record = _whole(rows)
    cut = F.lit(False) if excerpt is None else F.length(record) > excerpt
    return dead.select(
        F.col(REASON).alias("reason"),
        F.col(ROW).alias("row"),
        F.lit(batch).alias("batch"),
        F.substring(F.col(KEY).cast("string"), 1, 1_000).alias("key"),
        message_bytes().alias("bytes"),
        (record if excerpt is None else F.substring(record, 1, excerpt)).alias("record"),
        cut.alias("record_cut"),
    )


def as_messages(letters: DataFrame, topic: str) -> DataFrame:
    """Return `dead_letters` as messages for a topic: JSON with the row's key."""
    value = F.to_json(F.struct(*letters.columns), {"ignoreNullFields": "false"})
    return letters.select(F.col("key"), value.alias("value"), F.lit(topic).alias("topic"))


def message_bytes() -> Column:
    """Return the largest size of an `encoded` row's message: alone in its batch, not compressed."""
    headers = F.aggregate(
        F.col(HEADERS),
        F.lit(0),
        lambda sum_, each: sum_ + HEADER_OVERHEAD + F.octet_length(each["key"]) + _length(each["value"]),
    )
    return F.lit(RECORD_OVERHEAD) + _length(F.col(KEY)) + _length(F.col(VALUE)) + F.coalesce(headers, F.lit(0))


def _of_record(rows: DataFrame, name: str) -> Column:
    """Return a column that Spark has for a Kafka source's record."""
    return F.col(RECORD).getField(name) if RECORD in rows.columns else F.col(name)


def column_of(rows: DataFrame, name: str) -> Column:
    """Return the column, or the field `column.field`. Raise StartupError that lists the columns if missing."""
    return _find(rows, name)[0]


def text_of(rows: DataFrame, name: str) -> Column:
    """Return a column as text: nested ones as JSON, timestamps in UTC, others cast to string."""
    column, kind = _find(rows, name)
    if isinstance(kind, _NESTED):
        return F.to_json(column, _JSON)
    if isinstance(kind, TimestampType):
        return F.concat(F.to_utc_timestamp(column, F.current_timezone()).cast("string"), F.lit("Z"))
    return column.cast("string")


def json_of(names: Sequence[str]) -> Column:
    """Return JSON of these columns, nulls included."""
    return F.to_json(F.struct(*map(quoted, names)), _WITH_NULLS)


def columns_of(rows: DataFrame) -> list[str]:
    """Return the source's own columns."""
    return [name for name in rows.columns if not name.startswith("_kproxy_")]


def _find(rows: DataFrame, name: str) -> tuple[Column, DataType]:
    fields = {field.name: field.dataType for field in rows.schema.fields if not field.name.startswith("_kproxy_")}
    if name in fields:
        return F.col(quoted(name)), fields[name]
    parent, _, child = name.partition(".")
    kind = fields.get(parent)
    if isinstance(kind, StructType) and child in kind.names:
        return F.col(quoted(parent)).getField(child), kind[child].dataType
    raise StartupError(f"there is no column {name}: the source has {', '.join(fields) or 'none'}.")


def quoted(name: str) -> str:
    """Quote a name for Spark's SQL; it may have any characters."""
    return "`" + re.sub("`", "``", name) + "`"


def _bytes_of(rows: DataFrame, name: str) -> Column:
    column, kind = _find(rows, name)
    return column if isinstance(kind, BinaryType) else F.encode(text_of(rows, name), "utf-8")


def _key(rows: DataFrame, names: Sequence[str]) -> Column | None:
    if not names:
        return None
    if len(names) == 1:
        return _bytes_of(rows, names[0])
    # Null fields stay in it, so that equal values give equal keys; the key is null only if all are null.
    columns = [column_of(rows, name) for name in names]
    together = F.struct(*(column.alias(name) for column, name in zip(columns, names, strict=True)))
    text = F.to_json(together, _WITH_NULLS)
    any_there = functools.reduce(operator.or_, (column.isNotNull() for column in columns))
    return F.when(any_there, F.encode(text, "utf-8"))


def _value(rows: DataFrame, options: IngestOptions) -> Column:
    if options.value_column is not None:
        return _bytes_of(rows, options.value_column)
    if DOCUMENT in rows.columns:
        return F.encode(DOCUMENT, "utf-8")
    together = F.struct(*(column_of(rows, name).alias(name) for name in _value_columns(rows, options)))
    json = F.to_json(together, {**_JSON, "ignoreNullFields": str(options.drop_nulls).lower()})
    return F.encode(json, "utf-8")


def _value_columns(rows: DataFrame, options: IngestOptions) -> Sequence[str]:
    # Kafka's columns of a record are not part of its value, unless named.
    return options.value_columns or [name for name in columns_of(rows) if name != RECORD]


def _headers(rows: DataFrame, options: IngestOptions, batch: str) -> Column | None:
    if not has_headers(options):
        return None
    named: dict[str, Column] = {name: F.encode(F.lit(text), "utf-8") for name, text in options.constant_headers}
    named |= {name: _bytes_of(rows, column) for name, column in options.headers}
    if options.batch_header is not None:
        named[options.batch_header] = F.encode(F.lit(batch), "utf-8")
    if options.row_header is not None:
        named[options.row_header] = F.encode(ROW, "utf-8")
    ours = F.array(*(F.struct(F.lit(name).alias("key"), value.alias("value")) for name, value in named.items()))
    ours = ours.cast(_HEADER_TYPE)
    if not options.copy_headers:
        return ours
    copied = column_of(rows, f"{RECORD}.headers" if RECORD in rows.columns else "headers")
    return F.concat(F.coalesce(copied.cast(_HEADER_TYPE), F.array().cast(_HEADER_TYPE)), ours)


def has_headers(options: IngestOptions) -> bool:
    """Whether messages have headers."""
    mine = (options.headers, options.constant_headers, options.batch_header, options.row_header)
    return options.copy_headers or any(mine)


def _reason(rows: DataFrame, options: IngestOptions) -> Column:
    tests: Mapping[str, Column | None] = {
        "corrupt": F.col(CORRUPT).isNotNull() if CORRUPT in rows.columns else None,
        "new column": F.col(NEW).isNotNull() if NEW in rows.columns and not options.takes_new_columns else None,
        "not finite": _not_finite(rows, options) if options.not_finite == "dead-letter" else None,
        "no key": F.col(KEY).isNull() if options.require_key else None,
        "no topic": None if options.topic_column is None else ~_is_topic(F.col(TOPIC)),
        "too large": message_bytes() > options.max_message_bytes,
    }
    reason: Any = F.lit(None).cast("string")
    for name in reversed(REASONS):
        test = tests[name]
        if test is not None:
            reason = F.when(test, F.lit(name)).otherwise(reason)
    return reason


def _not_finite(rows: DataFrame, options: IngestOptions) -> Column | None:
    """Whether a column that becomes JSON has NaN or an infinity; None if no column can have one."""
    named = [*options.key, *(column for _, column in options.headers)]
    made = options.value_column is None and DOCUMENT not in rows.columns
    whole = _value_columns(rows, options) if made else ()
    if options.value_column is not None:
        named.append(options.value_column)
    # A single column is written as text, which has names for them. Keys of several columns and nested columns are JSON.
    nested = [name for name in named if isinstance(_find(rows, name)[1], _NESTED)]
    several = options.key if len(options.key) > 1 else ()
    found = [_find(rows, name) for name in dict.fromkeys((*whole, *nested, *several))]
    tests = [_has_no_number(column, kind) for column, kind in found if _has_fractions(kind)]
    return functools.reduce(operator.or_, tests) if tests else None


def _has_fractions(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return any(_has_fractions(field.dataType) for field in kind.fields)
    if isinstance(kind, ArrayType):
        return _has_fractions(kind.elementType)
    if isinstance(kind, MapType):
        return _has_fractions(kind.valueType)
    return isinstance(kind, (FloatType, DoubleType))


def _has_no_number(column: Column, kind: DataType) -> Column:
    """Whether any number in it is NaN or infinite; its type `_has_fractions`. Never null."""
    if isinstance(kind, StructType):
        fields = [field for field in kind.fields if _has_fractions(field.dataType)]
        each = [_has_no_number(column.getField(field.name), field.dataType) for field in fields]
        return functools.reduce(operator.or_, each)
    if isinstance(kind, ArrayType):
        inner = kind.elementType
        return F.coalesce(F.exists(column, lambda one: _has_no_number(one, inner)), F.lit(False))
    if isinstance(kind, MapType):
        value = kind.valueType
        return F.coalesce(F.exists(F.map_values(column), lambda one: _has_no_number(one, value)), F.lit(False))
    return F.coalesce(F.isnan(column) | (F.abs(column) == F.lit(float("inf"))), F.lit(False))


def _is_topic(name: Column) -> Column:
    legal = name.rlike(rf"^[a-zA-Z0-9._-]{{1,{MAX_NAME}}}$") & ~name.isin(".", "..")
    return F.coalesce(legal, F.lit(False))


def _length(column: Column) -> Column:
    return F.coalesce(F.octet_length(column), F.lit(0))


def _whole(rows: DataFrame) -> Column:
    texts = [F.col(name) for name in (CORRUPT, DOCUMENT) if name in rows.columns]
    if NEW in rows.columns:
        # The columns are the fields of the schema.
        texts.append(F.when(F.col(REASON) == "new column", F.col(TEXT)))
    return F.coalesce(*texts, json_of(columns_of(rows)))
