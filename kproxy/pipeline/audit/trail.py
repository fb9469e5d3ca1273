"""A trail as it is read: from the topic that pages are shipped to, or from files, to one row a row.

What is not a row of a trail, the torn last line of a killed proxy for one, is left out; its sequence number is then
missing, and that is told as every gap is.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses

from kproxy.errors import StartupError
from kproxy.pipeline.audit.schemas import TRAIL_SCHEMA
from kproxy.trail.parquet_sink import FILE_S

TOPIC: Final = "topic"
JSON: Final = "json"
PARQUET: Final = "parquet"
_KINDS: Final = ("begin", "range", "mark", "end")
_NEEDED_OF_RANGE: Final = ("topic", "partition", "owner", "revision", "producer_id")
# What a row may take from being closed to being read: some seconds, and in Parquet a file is filled first.
SHIPPING_MS: Final = 5_000
_GATHERING_MS: Final = round(FILE_S * 1000)
# Far beyond what there is, and far from where sums of it overflow.
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
    """Where a trail is: `kind` TOPIC, JSON or PARQUET; `name` of the topic or the directory."""

    kind: str
    name: str

    @property
    def shipping_ms(self) -> int:
        """What a row may take there from being closed to being read."""
        return SHIPPING_MS + (_GATHERING_MS if self.kind == PARQUET else 0)


def parse_place(text: str) -> TrailPlace:
    """`topic:NAME`, `json:DIR` or `parquet:DIR`. Raises StartupError."""
    kind, _, name = text.partition(":")
    if kind not in (TOPIC, JSON, PARQUET) or not name:
        raise StartupError(f"{text!r} is no place of an audit trail: give topic:NAME, json:DIR or parquet:DIR.")
    return TrailPlace(kind, name)


def read_files(session: Any, place: TrailPlace, *, from_ms: int | None = None) -> DataFrame:
    """TRAIL_SCHEMA and `shipped_at`, which files do not tell: of rows closed from `from_ms` on.

    Raises StartupError where there are none.
    """
    try:
        if place.kind == JSON:
            read = session.read.schema(TRAIL_SCHEMA).option("pathGlobFilter", "*.jsonl").json(place.name)
        else:
            files = session.read.option("pathGlobFilter", "*.parquet")
            # Fails where there are none. What it finds are one file's columns: others may have more, or wider numbers.
            files.parquet(place.name)
            read = files.schema(TRAIL_SCHEMA).parquet(place.name)
    except AnalysisException as error:
        raise StartupError(
            f"There is no audit trail in {place.name}: is it the directory of `--audit-sink`?"
        ) from error
    rows = only_rows(read.withColumn("shipped_at", F.lit(None).cast("long")))
    return rows if from_ms is None else rows.where(F.col("at") >= from_ms)


def read_topic(session: Any, topic: str, *, bootstrap: str, ends: str, starts: str = "earliest") -> DataFrame:
    """TRAIL_SCHEMA and `shipped_at`, from `starts` up to `ends`, JSON as of `log_source.fix_ends`."""
    options = {
        "kafka.bootstrap.servers": bootstrap,
        "subscribe": topic,
        "startingOffsets": starts,
        "endingOffsets": ends,
        # What retention takes while it is read is missing from the trail, and told.
        "failOnDataLoss": "false",
    }
    return rows_of(session.read.format("kafka").options(**options).load())


def rows_of(messages: DataFrame) -> DataFrame:
    """The rows of pages: `value` of Kafka's messages, `timestamp` when each was shipped."""
    lines = messages.select(
        F.unix_millis("timestamp").alias("shipped_at"),
        F.explode(F.split(F.col("value").cast("string"), "\n")).alias("line"),
    )
    return only_rows(
        lines.select(F.from_json("line", TRAIL_SCHEMA).alias("row"), "shipped_at").select("row.*", "shipped_at")
    )


def only_rows(rows: DataFrame) -> DataFrame:
    """Of what was read the rows that can be understood.

    Whoever may write to the topic can say anything there. What no proxy says must not make the audit fail, by numbers
    that cannot be reckoned with or that stand for more than there is room for: it is left out as what is torn is.
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
    # Nulls are neither least nor greatest.
    fits &= F.size(F.array_compact(spans)) == length
    fits &= (F.array_min(spans) >= 0) & (F.array_max(spans) <= _MOST_OFFSETS)
    # Lambdas are not compiled: the many rows that have one span go without.
    counts = F.filter(spans, lambda each, place: place % 2 == 1)
    fits &= F.when(length == 2, F.get(spans, F.lit(1))).otherwise(F.array_max(counts)) <= _MOST_RECORDS
    for name in _NEEDED_OF_RANGE:
        fits &= F.col(name).isNotNull()
    for name, most in _AMOUNTS.items():
        fits &= _is_within(name, most)
    return fits & ((F.col("producer_id") < 0) | (F.col("producer_epoch").isNotNull() & (F.col("first_sequence") >= 0)))


def _is_within(name: str, most: int) -> Column:
    return F.coalesce(F.col(name).between(0, most), F.lit(False))
