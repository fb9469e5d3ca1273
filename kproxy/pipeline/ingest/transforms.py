"""Transform rows into messages and dead letters.

The steps below go from DataFrame to DataFrame: no reading, no writing, no session.

    placed -> encoded -> messages       to Kafka's sink
                      -> dead_letters   to files or a topic

They work on the DataFrame of one micro-batch (from `foreachBatch`), not on the stream: a stream can neither be sorted
nor have its rows numbered. Our columns begin with `_kproxy_`.

Order is kept by key: all rows of a key go to one producer in the order of the source, and so to one Kafka partition in
that order: by file (oldest first, then by name) and line, by source partition and offset, or by number. Rows without a
key have no order; if the job has neither a key nor `exactly_once`, rows stay in the tasks that read them.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DoubleType,
    FloatType,
    MapType,
    StructField,
    StructType,
    TimestampType,
)

from kproxy.errors import StartupError
from kproxy.pipeline.ingest.options import ALL_HEADERS, JSON_SCHEMA, MAX_NAME, IngestOptions
from kproxy.pipeline.ingest.values import RegisteredValues
from kproxy.pipeline.spark import cause_in

# The source's text that a reader could not parse; only for CSV and JSON.
CORRUPT: Final = "_kproxy_corrupt"
# For JSON: the document's text, and the names of its fields that the schema lacks, null if none.
TEXT: Final = "_kproxy_text"
NEW: Final = "_kproxy_new"
# The document's text, if documents are written as they are in the source.
DOCUMENT: Final = "_kproxy_document"
# For files: columns that their reader gives.
FILE: Final = "_kproxy_file"
MODIFIED: Final = "_kproxy_modified"
BLOCK: Final = "_kproxy_block"
# A row's name, the same at every read, and its micro-batch's name; users' expressions may use both.
ROW: Final = "_kproxy_row"
BATCH: Final = "_kproxy_batch"
# The sort key within a message key. For a Kafka record it has topic, partition, offset and timestamp.
ORDER: Final = "_kproxy_order"
# Spark's own columns of a Kafka record whose value was parsed.
RECORD: Final = "kafka"
# The source's columns as JSON, if other columns were selected.
WHOLE: Final = "_kproxy_whole"
# The message.
KEY: Final = "_kproxy_key"
VALUE: Final = "_kproxy_value"
HEADERS: Final = "_kproxy_headers"
TOPIC: Final = "_kproxy_topic"
# What tells a message from others, in whatever order its rows are read: for `exactly_once`.
NAME: Final = "_kproxy_name"
# Why a value does not fit the registry's schema, or null.
PROBLEM: Final = "_kproxy_problem"
# The reason why the row is a dead letter, or null.
REASON: Final = "_kproxy_reason"

REASONS: Final = ("corrupt", "new column", "not finite", "not of the schema", "no topic", "too large")
# Upper estimates of kafka-clients, or higher: a batch's header, a record's header, and each length.
RECORD_OVERHEAD: Final = 61 + 21 + 15
HEADER_OVERHEAD: Final = 10
# The longest `record` of a dead letter in a topic, so that its message fits.
RECORD_EXCERPT: Final = 64 << 10
# `monotonically_increasing_id` has the row's number within its task in these bits, and the task's number above them.
_NUMBER_BITS: Final = (1 << 33) - 1
_NESTED: Final = (StructType, ArrayType, MapType)
HEADER_TYPE: Final = "array<struct<key:string,value:binary>>"
# The header that tells the interceptor (`KeepTimestamps.java`) a timestamp, in milliseconds and decimal: Spark's Kafka
# sink has no column for it.
TIMESTAMP_HEADER: Final = "_kproxy_timestamp"
# To the microsecond, Spark's resolution; its default is milliseconds.
_JSON: Final = {
    "timeZone": "UTC",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
_WITH_NULLS: Final = {**_JSON, "ignoreNullFields": "false"}


def placed(rows: DataFrame) -> DataFrame:
    """Add ROW and ORDER to the `rows` of one micro-batch, unless they have them.

    Both depend only on the source, so a micro-batch that is read again has the same. Lines are counted within a block
    of their file, so blocks have a fixed size (`sources.BLOCK_BYTES`). Rows that are neither of files nor records have
    no name, and are in the order in which Spark reads them.
    """
    if ROW in rows.columns:
        return rows
    if FILE in rows.columns:
        # The id counts within a partition, which is one block, whatever the number of tasks is.
        counted = rows.withColumn(ORDER, F.monotonically_increasing_id().bitwiseAND(F.lit(_NUMBER_BITS)))
        name = F.concat(F.col(FILE), F.lit("#"), F.col(BLOCK), F.lit(":"), F.col(ORDER))
        return counted.withColumn(ROW, name).withColumn(ORDER, F.struct(MODIFIED, FILE, BLOCK, ORDER))
    place = ("topic", "partition", "offset", "timestamp")
    record = F.col(RECORD) if RECORD in rows.columns else None
    if record is None and {*place} <= {*rows.columns}:
        record = F.struct(*place)
    if record is not None:
        found = [record.getField(each) for each in place]
        return rows.withColumn(ROW, F.concat_ws("/", *found[:3])).withColumn(ORDER, F.struct(*found))
    number = F.struct(F.monotonically_increasing_id().alias("number"))
    return rows.withColumn(ROW, F.lit(None).cast("string")).withColumn(ORDER, number)


def numbered(rows: DataFrame) -> DataFrame:
    """Add ROW and ORDER to rows whose `value` is their number."""
    return rows.withColumns({ROW: F.col("value").cast("string"), ORDER: F.struct("value")})


def encoded(
    rows: DataFrame, options: IngestOptions, *, batch: str, registered: RegisteredValues | None = None
) -> DataFrame:
    """Add the message (KEY, VALUE, HEADERS, TOPIC) to `placed` rows, and REASON, null if it can be written.

    `batch` is the micro-batch's name. `registered` makes the values if their schema is in a registry. Raise
    StartupError for a column that does not exist, for SQL that is wrong, and for what the registry refuses.
    """
    chosen = _selected(rows.withColumn(BATCH, F.lit(batch)), options.select)
    parts = _Parts(chosen, options, registered)
    with_message = chosen.withColumns({KEY: parts.key, VALUE: parts.value, TOPIC: parts.topic, HEADERS: parts.headers})
    if registered is not None:
        made = F.col(VALUE)
        with_message = with_message.withColumns({VALUE: made["value"], PROBLEM: made["problem"]})
    return with_message.withColumn(REASON, _reason(with_message, options, parts.not_finite))


def _selected(rows: DataFrame, select: Sequence[str]) -> DataFrame:
    """Replace the source's columns by those of `select`, SQL expressions; empty: keep them."""
    if not select:
        return rows
    kept = rows.withColumn(WHOLE, json_of(columns_of(rows)))
    with _sql_of("--select", kept):
        # `*` includes our own columns.
        there = kept.selectExpr(*select).columns
        return kept.selectExpr(*select, *(name for name in kept.columns if _is_ours(name) and name not in there))


@contextlib.contextmanager
def _sql_of(flag: str, rows: DataFrame) -> Iterator[None]:
    try:
        yield
    except PySparkException as error:
        raise StartupError(
            f"{flag} is not valid SQL for these rows ({cause_in(str(error))}): the source has {_listed(rows)}."
        ) from error


def messages(rows: DataFrame, *, tasks: int, options: IngestOptions) -> DataFrame:
    """Return the writable `encoded` rows in the form of Kafka's sink; a key's rows in ORDER, in one of `tasks`."""
    good = rows.where(F.col(REASON).isNull())
    wanted = {"key": F.col(KEY), "value": F.col(VALUE), "topic": F.col(TOPIC)}
    headers = [F.col(HEADERS)] if options.headers else []
    if options.keeps_timestamps:
        told = F.encode(F.unix_millis(F.col(ORDER)["timestamp"]).cast("string"), "utf-8")
        headers.append(F.array(F.struct(F.lit(TIMESTAMP_HEADER).alias("key"), told.alias("value"))).cast(HEADER_TYPE))
    if headers:
        wanted["headers"] = F.concat(*headers)
    if options.keep_partitions:
        wanted["partition"] = F.col(ORDER)["partition"]
    # What Spark computes for a row, such as the time, may differ when it is read again.
    name = F.coalesce(F.encode(ROW, "utf-8"), F.col(VALUE))
    if options.exactly_once:
        wanted[NAME] = name
    columns = [column.alias(name) for name, column in wanted.items()]
    if not (options.key or options.exactly_once):
        # A task reads a partition of the source in order.
        return good.select(*columns)
    # Spread rows without a key over all tasks, rather than sending them all to one.
    place = [F.coalesce(F.col(KEY), name)]
    if options.keep_partitions:
        place = [F.col(ORDER)["topic"], F.col(ORDER)["partition"]]
    return good.repartition(tasks, *place).sortWithinPartitions(ORDER).select(*columns)


def dead_letters(rows: DataFrame, *, excerpt: int | None = None) -> DataFrame:
    """Return the `encoded` rows that cannot be written: reason, row, batch, key, bytes, record, record_cut.

    `record` is the source's text if it could not be parsed, else the columns as JSON (binary ones in base64), cut to
    `excerpt` characters if given.
    """
    dead = rows.where(F.col(REASON).isNotNull())
    record = record_of(rows)
    cut = F.lit(False) if excerpt is None else F.length(record) > excerpt
    return dead.select(
        F.col(REASON).alias("reason"),
        F.col(ROW).alias("row"),
        F.col(BATCH).alias("batch"),
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
    return F.lit(RECORD_OVERHEAD) + _length(F.col(KEY)) + _length(F.col(VALUE)) + headers


def json_of(names: Sequence[str]) -> Column:
    """Return JSON of these columns, nulls included."""
    return F.to_json(F.struct(*map(quoted, names)), _WITH_NULLS)


def columns_of(rows: DataFrame) -> list[str]:
    """Return the columns that do not begin with `_kproxy_`."""
    return [name for name in rows.columns if not _is_ours(name)]


def _is_ours(name: str) -> bool:
    return name.startswith("_kproxy_")


def _listed(rows: DataFrame) -> str:
    return ", ".join(columns_of(rows)) or "none"


def _find(rows: DataFrame, name: str) -> tuple[Column, DataType]:
    """Return the column, or the field `column.field`, and its type. Raise StartupError that lists the columns."""
    fields = {field.name: field.dataType for field in rows.schema.fields if not _is_ours(field.name)}
    if name in fields:
        return F.col(quoted(name)), fields[name]
    parent, _, child = name.partition(".")
    kind = fields.get(parent)
    if isinstance(kind, StructType) and child in kind.names:
        return F.col(quoted(parent)).getField(child), kind[child].dataType
    raise StartupError(f"there is no column {name}: the source has {_listed(rows)}.")


def quoted(name: str) -> str:
    """Quote a name for Spark's SQL; it may have any characters."""
    return "`" + re.sub("`", "``", name) + "`"


def _text(column: Column, kind: DataType) -> Column:
    """Return a column as text: nested ones as JSON, timestamps in UTC, others cast to string."""
    if isinstance(kind, _NESTED):
        return F.to_json(column, _JSON)
    if isinstance(kind, TimestampType):
        return F.concat(F.to_utc_timestamp(column, F.current_timezone()).cast("string"), F.lit("Z"))
    return column.cast("string")


def _bytes(column: Column, kind: DataType) -> Column:
    return column if isinstance(kind, BinaryType) else F.encode(_text(column, kind), "utf-8")


class _Parts:
    """The parts of the message of `rows`, and `not_finite`: whether they have a number that JSON cannot express."""

    def __init__(self, rows: DataFrame, options: IngestOptions, registered: RegisteredValues | None) -> None:
        self._rows = rows
        self._registered = registered
        self._json: list[tuple[Column, DataType]] = []
        self.key = self._key(options.key)
        self.value = self._value(options)
        self.headers = self._headers(options.headers)
        self.topic = F.lit(options.topic)
        if options.topic_column is not None:
            self.topic = _text(*_find(rows, options.topic_column))

    @property
    def not_finite(self) -> Column | None:
        return _any(_no_number(column, kind) for column, kind in self._json)

    def _alone(self, column: Column, kind: DataType) -> Column:
        # A number alone is written as text, which has names for NaN and the infinities.
        if isinstance(kind, _NESTED):
            self._json.append((column, kind))
        return _bytes(column, kind)

    def _together(self, names: Sequence[str]) -> tuple[list[Column], Column]:
        found = [_find(self._rows, name) for name in names]
        self._json += found
        columns = [column for column, _ in found]
        # Null fields are kept, so that equal values give equal keys.
        json = F.to_json(F.struct(*(each.alias(name) for each, name in zip(columns, names, strict=True))), _WITH_NULLS)
        return columns, F.encode(json, "utf-8")

    def _key(self, names: Sequence[str]) -> Column:
        if not names:
            return F.lit(None).cast("binary")
        if len(names) == 1:
            return self._alone(*_find(self._rows, names[0]))
        columns, json = self._together(names)
        return F.when(functools.reduce(operator.or_, (each.isNotNull() for each in columns)), json)

    def _value(self, options: IngestOptions) -> Column:
        # Kafka's columns of a record are not part of its value, unless named.
        names = options.value or [name for name in columns_of(self._rows) if name != RECORD]
        if self._registered is not None:
            return self._of_schema(self._registered, options, names)
        if options.value_column is not None:
            return self._alone(*_find(self._rows, options.value_column))
        return F.encode(DOCUMENT, "utf-8") if DOCUMENT in self._rows.columns else self._together(names)[1]

    def _of_schema(self, registered: RegisteredValues, options: IngestOptions, names: Sequence[str]) -> Column:
        if options.value_column is None:
            found = {name: _find(self._rows, name) for name in names}
            record = F.struct(*(column.alias(name) for name, (column, _) in found.items()))
            kind: DataType = StructType([StructField(name, each) for name, (_, each) in found.items()])
        else:
            record, kind = _find(self._rows, options.value_column)
        if not isinstance(kind, StructType):
            raise StartupError(f"--value-column {options.value_column} is not a STRUCT: name its columns with --value.")
        if options.value_format == JSON_SCHEMA:
            self._json.append((record, kind))
        return registered.column(record, kind, F.encode(F.to_json(record, _WITH_NULLS), "utf-8"))

    def _headers(self, headers: Sequence[tuple[str, str]]) -> Column:
        parts = []
        for name, text in headers:
            column = F.expr(text).cast(HEADER_TYPE) if name == ALL_HEADERS else F.expr(text)
            with _sql_of(f"--header {name}={text}", self._rows):
                kind = self._rows.select(column.alias(name)).schema[0].dataType
            if name == ALL_HEADERS:
                parts.append(F.coalesce(column, F.array().cast(HEADER_TYPE)))
            else:
                one = F.struct(F.lit(name).alias("key"), self._alone(column, kind).alias("value"))
                parts.append(F.array(one).cast(HEADER_TYPE))
        return F.concat(*parts) if parts else F.array().cast(HEADER_TYPE)


def _reason(rows: DataFrame, options: IngestOptions, not_finite: Column | None) -> Column:
    tests: Mapping[str, Column | None] = {
        "corrupt": F.col(CORRUPT).isNotNull() if CORRUPT in rows.columns else None,
        "new column": F.col(NEW).isNotNull() if NEW in rows.columns and not options.takes_new_columns else None,
        "not finite": not_finite,
        "not of the schema": F.col(PROBLEM).isNotNull() if PROBLEM in rows.columns else None,
        "no topic": None if options.topic_column is None else ~_is_topic(F.col(TOPIC)),
        "too large": message_bytes() > options.max_message_bytes,
    }
    found = [F.when(test, F.lit(name)) for name in REASONS if (test := tests[name]) is not None]
    return F.coalesce(*found)


def _any(tests: Iterable[Column | None]) -> Column | None:
    found = [test for test in tests if test is not None]
    return functools.reduce(operator.or_, found) if found else None


def _no_number(column: Column, kind: DataType) -> Column | None:
    """Return whether a number in it is NaN or infinite, never null; None if its type has no such numbers."""
    if isinstance(kind, (FloatType, DoubleType)):
        return F.coalesce(F.isnan(column) | (F.abs(column) == F.lit(float("inf"))), F.lit(False))
    if isinstance(kind, StructType):
        return _any(_no_number(column.getField(field.name), field.dataType) for field in kind.fields)
    if isinstance(kind, MapType):
        return _no_number(F.map_values(column), ArrayType(kind.valueType))
    if isinstance(kind, ArrayType) and _no_number(column, kind.elementType) is not None:
        inner = kind.elementType
        return F.coalesce(F.exists(column, lambda one: _no_number(one, inner)), F.lit(False))
    return None


def _is_topic(name: Column) -> Column:
    legal = name.rlike(rf"^[a-zA-Z0-9._-]{{1,{MAX_NAME}}}$") & ~name.isin(".", "..")
    return F.coalesce(legal, F.lit(False))


def _length(column: Column) -> Column:
    return F.coalesce(F.octet_length(column), F.lit(0))


def record_of(rows: DataFrame) -> Column:
    """Return the source's text of rows that could not be parsed, else their columns as JSON."""
    texts = [F.col(name) for name in (CORRUPT, DOCUMENT) if name in rows.columns]
    if NEW in rows.columns:
        # The columns are the fields of the schema.
        texts.append(F.when(F.col(REASON) == "new column", F.col(TEXT)))
    return F.coalesce(*texts, F.col(WHOLE) if WHOLE in rows.columns else json_of(columns_of(rows)))
