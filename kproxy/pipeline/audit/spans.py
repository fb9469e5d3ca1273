"""Offsets that were given out, and offsets that the log holds, as half-open intervals [start, end) within buckets.

A bucket is a piece of one partition's offsets. No interval goes across buckets, so that each can be judged alone, by
any executor, however long the partition is.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses

# 2^20 offsets: some ten thousand batches in the usual case, a million in the worst.
BUCKET_BITS: Final = 20
PARTITION: Final = ("topic", "partition")
# A topic's name is long to sort by and to send about: 64 bits of a hash stand for it and the partition.
BUCKET: Final = ("log_id", "bucket")
ROW_KEY: Final = ("proxy", "incarnation", "sequence")
_SEQUENCES: Final = 1 << 31


def log_id() -> Column:
    return F.xxhash64(*PARTITION)


def in_buckets(intervals: DataFrame, bits: int) -> DataFrame:
    """`intervals` with `start` and `end`, cut at the boundaries of buckets; empty ones are left out."""
    whole = intervals.where("start < end")
    first, last = F.shiftright("start", bits), F.shiftright(F.col("end") - 1, bits)
    return (
        whole.withColumn("bucket", F.explode(F.when(first == last, F.array(first)).otherwise(F.sequence(first, last))))
        .withColumn("start", F.greatest("start", F.shiftleft("bucket", bits)))
        .withColumn("end", F.least("end", F.shiftleft(F.col("bucket") + 1, bits)))
    )


def _spans(spans: Column) -> Column:
    """[offset, count, offset, count, …] as structs, each with `before`: how many records the spans before it have."""

    def span(k: Column | int, before: Column) -> Column:
        place = F.lit(k) * 2 if isinstance(k, int) else k * 2
        return F.struct(
            F.get(spans, place).alias("start"), F.get(spans, place + 1).alias("count"), before.alias("before")
        )

    # A column that may be null, as the sums are: both arrays must have one type.
    nothing_before = F.get(spans, F.lit(0)) * 0
    first = F.array(span(0, nothing_before))

    def with_next(done: Column, k: Column) -> Column:
        last = F.element_at(done, -1)
        return F.concat(done, F.array(span(k, last["before"] + last["count"])))

    # Lambdas are not compiled: the many rows that have one span go without.
    several = F.aggregate(F.sequence(F.lit(1), F.shiftright(F.size(spans), 1) - 1), first, with_next)
    return F.when(F.size(spans) == 2, first).otherwise(several)


def window_ms(at: Column, length_ms: int) -> Column:
    """The begin of the window of time that `at` is in."""
    return at - F.pmod(at, F.lit(length_ms))


def claims(rows: DataFrame, *, length_ms: int, bits: int = BUCKET_BITS) -> DataFrame:
    """What the trail's rows say was acknowledged, an interval a span.

    `same` is alike for two intervals where the same offset in both of them is the same record: a batch that was sent
    again and got its first offset. That takes a producer id; without one no two acknowledgements are of one record,
    not even two in one row.
    `identity` is the same for what the log holds; 0 where there is none.
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
    """What the log holds, an interval a batch: neither what brokers wrote themselves nor what fails its checksum.

    A batch that has fewer records than offsets counts as if its first offsets were the ones it has.
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
    """Sequence numbers wrap, and go on with the offsets otherwise: where the difference is the same, the record is."""
    return F.xxhash64("producer_id", "producer_epoch", F.pmod(offset_less_sequence, F.lit(_SEQUENCES)))


def _short(record: Column) -> Column:
    """31 bits, never 0, so that sums of them stay in a long."""
    return F.shiftrightunsigned(record, 34) + 1
