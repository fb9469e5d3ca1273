"""Turn acknowledged offsets and those in the log into intervals.

Intervals are half-open, [start, end), and within buckets. A bucket is a range of one partition's offsets. No interval
spans two buckets, so that any executor can judge a bucket alone, however long the partition is.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses

# 2^20 offsets: about ten thousand batches usually, a million at worst.
BUCKET_BITS: Final = 20
PARTITION: Final = ("topic", "partition")
# Topic names are expensive to sort and to shuffle, so a 64-bit hash stands for topic and partition.
BUCKET: Final = ("log_id", "bucket")
ROW_KEY: Final = ("proxy", "incarnation", "sequence")
_SEQUENCES: Final = 1 << 31


def log_id() -> Column:
    return F.xxhash64(*PARTITION)


def in_buckets(intervals: DataFrame, bits: int) -> DataFrame:
    """Split `intervals` (columns `start` and `end`) at the boundaries of buckets, and drop empty ones."""
    whole = intervals.where("start < end")
    first, last = F.shiftright("start", bits), F.shiftright(F.col("end") - 1, bits)
    return (
        whole.withColumn("bucket", F.explode(F.when(first == last, F.array(first)).otherwise(F.sequence(first, last))))
        .withColumn("start", F.greatest("start", F.shiftleft("bucket", bits)))
        .withColumn("end", F.least("end", F.shiftleft(F.col("bucket") + 1, bits)))
    )


def _spans(spans: Column) -> Column:
    """Turn [offset, count, offset, count, …] into structs with `before`, the number of records in earlier spans."""

    def span(k: Column | int, before: Column) -> Column:
        place = F.lit(k) * 2 if isinstance(k, int) else k * 2
        return F.struct(
            F.get(spans, place).alias("start"), F.get(spans, place + 1).alias("count"), before.alias("before")
        )

    # Nullable, as the sums are: both arrays must have the same type.
    nothing_before = F.get(spans, F.lit(0)) * 0
    first = F.array(span(0, nothing_before))

    def with_next(done: Column, k: Column) -> Column:
        last = F.element_at(done, -1)
        return F.concat(done, F.array(span(k, last["before"] + last["count"])))

    # Spark does not compile lambdas, so the usual rows, with one span, avoid them.
    several = F.aggregate(F.sequence(F.lit(1), F.shiftright(F.size(spans), 1) - 1), first, with_next)
    return F.when(F.size(spans) == 2, first).otherwise(several)


def window_ms(at: Column, length_ms: int) -> Column:
    """Return the start of the window of time that contains `at`."""
    return at - F.pmod(at, F.lit(length_ms))


def claims(rows: DataFrame, *, length_ms: int, bits: int = BUCKET_BITS) -> DataFrame:
    """Return the acknowledged offsets in the trail's rows, an interval for each span.

    `same` is equal for two intervals in which the same offset is the same record: a batch that was sent again and got
    its first offset. That needs a producer id; without one no two acknowledgements are of one record, not even two in
    one row. `identity` identifies the same record in the log (`held`); 0 without a producer id.
    """
    spans = rows.where("kind = 'range'").select(
        *PARTITION,
        *ROW_KEY,
        "owner",
        "revision",
        "acks",
        "producer_id",
        "producer_epoch",
        "first_sequence",
        "first_acked_at",
        "last_acked_at",
        F.explode(_spans(F.col("spans"))).alias("span"),
    )
    start = F.col("span.start")
    record = _record(start - F.col("span.before") - F.col("first_sequence"))
    is_idempotent = F.col("producer_id") >= 0
    intervals = spans.select(
        "*",
        log_id().alias("log_id"),
        window_ms(F.col("last_acked_at"), length_ms).alias("window_ms"),
        F.when(is_idempotent, record).otherwise(F.xxhash64(*ROW_KEY, "span.before", start)).alias("same"),
        F.when(is_idempotent, _short(record)).otherwise(0).alias("identity"),
        start.alias("start"),
        (start + F.col("span.count")).alias("end"),
    )
    return in_buckets(intervals.drop("span", "first_sequence"), bits)


def held(log: DataFrame, *, bits: int = BUCKET_BITS) -> DataFrame:
    """Return the offsets in the log, an interval for each batch, without control batches and corrupt ones.

    A batch with fewer records than offsets counts as if it had the first ones.
    """
    batches = log.where("not is_control and coalesce(crc_ok, true)")
    start = F.col("base_offset")
    intervals = batches.select(
        log_id().alias("log_id"),
        start.alias("start"),
        (start + F.least(F.col("record_count"), F.col("last_offset") + 1 - start)).alias("end"),
        F.when(F.col("producer_id") >= 0, _short(_record(start - F.col("base_sequence"))))
        .otherwise(0)
        .alias("identity"),
    )
    return in_buckets(intervals, bits)


def _record(offset_less_sequence: Column) -> Column:
    """Identify a record by offset minus sequence number: both rise together, except that sequence numbers wrap."""
    return F.xxhash64("producer_id", "producer_epoch", F.pmod(offset_less_sequence, F.lit(_SEQUENCES)))


def _short(record: Column) -> Column:
    """Reduce to 31 bits, never 0, so that sums fit in a long."""
    return F.shiftrightunsigned(record, 34) + 1
