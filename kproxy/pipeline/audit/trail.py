"""Read a trail from its topic or files, one row for each trail row.

Text that is not a trail row is left out, such as the partial last line of a killed proxy. Its sequence number is then
missing, which the audit reports as a gap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses

from kproxy.config.audit import DEFAULT_TOPIC
from kproxy.errors import StartupError
from kproxy.pipeline.audit.schemas import TRAIL_SCHEMA
from kproxy.pipeline.kafka_access import NO_OPTIONS, spark_options
from kproxy.trail.parquet_sink import FILE_S

TOPIC: Final = "topic"
JSON: Final = "json"
PARQUET: Final = "parquet"
_KINDS: Final = ("begin", "range", "mark", "end")
_NEEDED_OF_RANGE: Final = ("topic", "partition", "owner", "revision", "producer_id")
# The time from closing a row until it can be read: some seconds; for Parquet also the time to fill a file.
SHIPPING_MS: Final = 5_000
_GATHERING_MS: Final = round(FILE_S * 1000)
# Limits far above real values, and far below those whose sums overflow.
_LAST_MS: Final = 1 << 47
_MOST_OFFSETS: Final = 1 << 60
_MOST_RECORDS: Final = 1 << 36
_MOST_BYTES: Final = 1 << 48
_AMOUNTS: Final = {
    "record_count": _MOST_RECORDS,
    "batches": _MOST_RECORDS,
    "bytes": _MOST_BYTES,
    "first_acked_at": _LAST_MS,
    "last_acked_at": _LAST_MS,
}
# A row has at most four times kproxy.trail.acknowledgements.MAX_SPANS numbers.
_MOST_IN_SPANS: Final = 10_000


class TrailPlace(NamedTuple):
    """The place of a trail: `kind` TOPIC, JSON or PARQUET; `name` of the topic or the directory."""

    kind: str
    name: str

    @property
    def shipping_ms(self) -> int:
        """The longest time from closing a row until it can be read there."""
        return SHIPPING_MS + (_GATHERING_MS if self.kind == PARQUET else 0)


def parse_trail(text: str) -> TrailPlace:
    """Parse `topic`, `topic:NAME`, `json:DIR` or `parquet:DIR`. Raise StartupError if it is none of them."""
    return parse_place(f"{TOPIC}:{DEFAULT_TOPIC}" if text == TOPIC else text)


def parse_place(text: str) -> TrailPlace:
    """Parse `topic:NAME`, `json:DIR` or `parquet:DIR`. Raise StartupError."""
    kind, _, name = text.partition(":")
    if kind not in (TOPIC, JSON, PARQUET) or not name:
        raise StartupError(f"{text!r} is no place of an audit trail: give topic:NAME, json:DIR or parquet:DIR.")
    return TrailPlace(kind, name)


def read_files(session: Any, place: TrailPlace, *, from_ms: int | None = None) -> DataFrame:
    """Return the rows closed from `from_ms` on, as TRAIL_SCHEMA and `shipped_at`, which is null for files.

    Raise StartupError if there are no files.
    """
    try:
        if place.kind == JSON:
            read = session.read.schema(TRAIL_SCHEMA).option("pathGlobFilter", "*.jsonl").json(place.name)
        else:
            files = session.read.option("pathGlobFilter", "*.parquet")
            # Fails if there are no files. Its schema is unused: other files may have more columns, or wider numbers.
            files.parquet(place.name)
            read = files.schema(TRAIL_SCHEMA).parquet(place.name)
    except AnalysisException as error:
        raise StartupError(
            f"There is no audit trail in {place.name}: is it the directory of `--audit-sink`?"
        ) from error
    rows = only_rows(read.withColumn("shipped_at", F.lit(None).cast("long")))
    return rows if from_ms is None else rows.where(F.col("at") >= from_ms)


def read_topic(
    session: Any,
    topic: str,
    *,
    bootstrap: str,
    ends: str,
    starts: str = "earliest",
    kafka: Mapping[str, str] = NO_OPTIONS,
) -> DataFrame:
    """Return TRAIL_SCHEMA and `shipped_at`, from `starts` up to `ends`, JSON as of `log_source.fix_ends`."""
    options = {
        **spark_options(kafka),
        "kafka.bootstrap.servers": bootstrap,
        "subscribe": topic,
        "startingOffsets": starts,
        "endingOffsets": ends,
        # Rows removed by retention during the read are missing from the trail, which the audit reports.
        "failOnDataLoss": "false",
    }
    return rows_of(session.read.format("kafka").options(**options).load())


def rows_of(messages: DataFrame) -> DataFrame:
    """Return the rows in pages: the `value` of Kafka's messages, whose `timestamp` is when each was shipped."""
    lines = messages.select(
        F.unix_millis("timestamp").alias("shipped_at"),
        F.explode(F.split(F.col("value").cast("string"), "\n")).alias("line"),
    )
    return only_rows(
        lines.select(F.from_json("line", TRAIL_SCHEMA).alias("row"), "shipped_at").select("row.*", "shipped_at")
    )


def only_rows(rows: DataFrame) -> DataFrame:
    """Return the valid rows.

    Other clients may write anything to the topic. Rows that no proxy writes must not make the audit fail, by numbers
    that overflow or that stand for too much data: they are left out, as partial rows are.
    """
    is_row = F.col("kind").isin(*_KINDS) & F.col("proxy").isNotNull() & F.col("incarnation").isNotNull()
    is_row &= _is_within("sequence", _MOST_OFFSETS) & _is_within("at", _LAST_MS)
    for name in ("interval_ms", "mark_ms"):
        is_row &= F.col(name).isNull() | _is_within(name, _LAST_MS)
    return rows.where(is_row & ((F.col("kind") != "range") | F.coalesce(_is_range(), F.lit(False))))


def _is_range() -> Column:
    spans = F.col("spans")
    length = F.size(spans)
    fits = (length >= 2) & (length % 2 == 0) & (length <= _MOST_IN_SPANS)
    # `array_min` and `array_max` ignore nulls.
    fits &= F.size(F.array_compact(spans)) == length
    fits &= (F.array_min(spans) >= 0) & (F.array_max(spans) <= _MOST_OFFSETS)
    # Spark does not compile lambdas, so the usual rows, with one span, avoid them.
    counts = F.filter(spans, lambda each, place: place % 2 == 1)
    fits &= F.when(length == 2, F.get(spans, F.lit(1))).otherwise(F.array_max(counts)) <= _MOST_RECORDS
    for name in _NEEDED_OF_RANGE:
        fits &= F.col(name).isNotNull()
    for name, most in _AMOUNTS.items():
        fits &= _is_within(name, most)
    return fits & ((F.col("producer_id") < 0) | (F.col("producer_epoch").isNotNull() & (F.col("first_sequence") >= 0)))


def _is_within(name: str, most: int) -> Column:
    return F.coalesce(F.col(name).between(0, most), F.lit(False))
