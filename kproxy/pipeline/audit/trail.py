"""Read a trail from its topic or files, one row for each trail row.

Text that is not a trail row is skipped, such as the partial last line of a killed proxy. The row's sequence number is
then missing, which the audit reports as a gap.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses

from kproxy.errors import StartupError
from kproxy.pipeline.audit.log_client import Offsets
from kproxy.pipeline.audit.schemas import TRAIL_SCHEMA
from kproxy.pipeline.audit.spark_tasks import SignedLines
from kproxy.pipeline.audit.trail_place import JSON, TrailPlace
from kproxy.pipeline.audit.trail_rows import KINDS, LAST_MS, MOST_BYTES, MOST_IN_SPANS, MOST_OFFSETS, MOST_RECORDS
from kproxy.pipeline.kafka_access import NO_OPTIONS, spark_options

_NEEDED_OF_RANGE: Final = ("topic", "partition", "owner", "revision", "producer_id")
_AMOUNTS: Final = {
    "record_count": MOST_RECORDS,
    "batches": MOST_RECORDS,
    "bytes": MOST_BYTES,
    "first_acked_at": LAST_MS,
    "last_acked_at": LAST_MS,
}


def read_files(session: Any, place: TrailPlace, *, from_ms: int | None = None) -> DataFrame:
    """Return the rows closed from `from_ms` on, as TRAIL_SCHEMA and `shipped_at`, which is null for files.

    Raise StartupError if there are no files.
    """
    try:
        if place.kind == JSON:
            texts = session.read.option("pathGlobFilter", "*.jsonl").text(place.name)
            lines = texts.select(F.lit(None).cast("long").alias("shipped_at"), F.col("value").alias("line"))
            rows = _rows_in(lines, place.keys)
        else:
            files = session.read.option("pathGlobFilter", "*.parquet")
            # Fails if there are no files. Its schema is unused: other files may have more columns, or wider numbers.
            files.parquet(place.name)
            read = files.schema(TRAIL_SCHEMA).parquet(place.name)
            rows = only_rows(read.withColumn("shipped_at", F.lit(None).cast("long")))
    except AnalysisException as error:
        raise StartupError(
            f"There is no audit trail in {place.name}: is it the directory of `--audit-sink`?"
        ) from error
    return rows if from_ms is None else rows.where(F.col("at") >= from_ms)


def read_topic(
    session: Any,
    topic: str,
    *,
    bootstrap: str,
    starts: Offsets,
    ends: Offsets,
    kafka: Mapping[str, str] = NO_OPTIONS,
    keys: Sequence[bytes] = (),
) -> DataFrame:
    """Return TRAIL_SCHEMA and `shipped_at`, from `starts`, the topic's beginning if empty, up to `ends`."""
    options = {
        **spark_options(kafka),
        "kafka.bootstrap.servers": bootstrap,
        "subscribe": topic,
        "startingOffsets": _as_json(starts) if starts else "earliest",
        "endingOffsets": _as_json(ends),
        # Rows removed by retention during the read are missing from the trail, which the audit reports.
        "failOnDataLoss": "false",
    }
    return rows_of(session.read.format("kafka").options(**options).load(), keys)


def _as_json(offsets: Offsets) -> str:
    """Return the offsets in the form of Spark's Kafka source."""
    by_topic: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in offsets.items():
        by_topic.setdefault(topic, {})[str(partition)] = offset
    return json.dumps(by_topic)


def rows_of(messages: DataFrame, keys: Sequence[bytes] = ()) -> DataFrame:
    """Return the rows in pages: the `value` of Kafka's messages, whose `timestamp` is when each was shipped."""
    lines = messages.select(
        F.unix_millis("timestamp").alias("shipped_at"),
        F.explode(F.split(F.col("value").cast("string"), "\n")).alias("line"),
    )
    return _rows_in(lines, keys)


def _rows_in(lines: DataFrame, keys: Sequence[bytes]) -> DataFrame:
    """Return the rows in lines, with `keys` only the signed ones."""
    if keys:
        lines = lines.mapInArrow(SignedLines(tuple(keys)), lines.schema)
    return only_rows(
        lines.select(F.from_json("line", TRAIL_SCHEMA).alias("row"), "shipped_at").select("row.*", "shipped_at")
    )


def only_rows(rows: DataFrame) -> DataFrame:
    """Return the valid rows.

    Other clients may write anything to the topic. Rows that no proxy writes must not make the audit fail, by numbers
    that overflow or that stand for too much data: they are left out, as partial rows are.
    """
    is_row = F.col("kind").isin(*KINDS) & F.col("proxy").isNotNull() & F.col("incarnation").isNotNull()
    is_row &= _is_within("sequence", MOST_OFFSETS) & _is_within("at", LAST_MS)
    for name in ("interval_ms", "mark_ms"):
        is_row &= F.col(name).isNull() | _is_within(name, LAST_MS)
    return rows.where(is_row & ((F.col("kind") != "range") | F.coalesce(_is_range(), F.lit(False))))


def _is_range() -> Column:
    spans = F.col("spans")
    length = F.size(spans)
    fits = (length >= 2) & (length % 2 == 0) & (length <= MOST_IN_SPANS)
    # `array_min` and `array_max` ignore nulls.
    fits &= F.size(F.array_compact(spans)) == length
    fits &= (F.array_min(spans) >= 0) & (F.array_max(spans) <= MOST_OFFSETS)
    # Spark does not compile lambdas, so the usual rows, with one span, avoid them.
    counts = F.filter(spans, lambda each, place: place % 2 == 1)
    fits &= F.when(length == 2, F.get(spans, F.lit(1))).otherwise(F.array_max(counts)) <= MOST_RECORDS
    for name in _NEEDED_OF_RANGE:
        fits &= F.col(name).isNotNull()
    for name, most in _AMOUNTS.items():
        fits &= _is_within(name, most)
    return fits & ((F.col("producer_id") < 0) | (F.col("producer_epoch").isNotNull() & (F.col("first_sequence") >= 0)))


def _is_within(name: str, most: int) -> Column:
    return F.coalesce(F.col(name).between(0, most), F.lit(False))
