"""Measure the trail: amounts, latencies, owners and their changes.

A cell has the totals of one producer in one partition, one window of time and one ownership. All numbers here are
computed from cells; nothing else of the trail is kept.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses

from kproxy.pipeline.audit.intervals import PARTITION, in_buckets, window_ms

_OWNERSHIP: Final = (*PARTITION, "owner", "revision")
_WINDOW: Final = (*PARTITION, "window_ms")
# 50 latency bins for each factor of e, for an error of at most 1 %.
_BINS: Final = 50
_PERCENTILES: Final = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99}


def cells(rows: DataFrame, trails: DataFrame, *, length_ms: int, late_after_ms: int) -> DataFrame:
    """Sum up the rows that are ranges by partition, window, ownership and producer.

    A record is late if its row was closed later than its trail promises, or shipped (`shipped_at`, known only for a
    topic) more than `late_after_ms` after it was closed.
    """
    promised = trails.select("proxy", "incarnation", F.col("interval_ms").alias("promised_ms"))
    ranges = rows.where("kind = 'range'").drop("interval_ms").join(F.broadcast(promised), ["proxy", "incarnation"])
    # Producers without an id are distinguished by their connections. The hash is never negative, as ids are not.
    connection = F.shiftrightunsigned(F.xxhash64("proxy", "incarnation", "connection"), 1)
    closed_late = F.col("at") - F.col("first_acked_at") > F.col("promised_ms")
    shipped_late = F.coalesce(F.col("shipped_at") - F.col("at") > late_after_ms, F.lit(False))
    is_idempotent = F.col("producer_id") >= 0
    return ranges.groupBy(
        *_OWNERSHIP,
        window_ms(F.col("last_acked_at"), length_ms).alias("window_ms"),
        is_idempotent.alias("is_idempotent"),
        F.when(is_idempotent, F.col("producer_id")).otherwise(connection).alias("producer"),
    ).agg(
        F.sum("record_count").alias("records"),
        F.sum("batches").alias("batches"),
        F.sum("bytes").alias("bytes"),
        F.sum(F.when(closed_late | shipped_late, F.col("record_count")).otherwise(0)).alias("late"),
        F.min("first_acked_at").alias("first_acked_at"),
        F.max("last_acked_at").alias("last_acked_at"),
    )


def records(ranges: DataFrame, *by: str, length_ms: int, bits: int) -> DataFrame:
    """Count `records` by topic, partition, window_ms and the columns `by`, with their times of acknowledgement.

    Each offset counts once, in the window of the first row by offset that has it: a record that its producer sent again
    is not another record.
    """
    logs = (*PARTITION, *by)
    spans = F.arrays_zip(
        F.filter("spans", lambda _, place: place % 2 == 0).alias("start"),
        F.filter("spans", lambda _, place: place % 2 == 1).alias("count"),
    )
    times = ("first_acked_at", "last_acked_at")
    told = ranges.select(*logs, *times, F.inline(spans)).withColumn("end", F.col("start") + F.col("count"))
    earlier = Window.partitionBy(*logs, "bucket").orderBy("start", "first_acked_at")
    said = F.max("end").over(earlier.rowsBetween(Window.unboundedPreceding, -1))
    # Spark's greatest ignores nulls: the first row has no earlier one.
    new = F.greatest(F.lit(0), F.col("end") - F.greatest("start", said))
    begin = window_ms(F.col("last_acked_at"), length_ms).alias("window_ms")
    each_once = in_buckets(told, bits).select(*logs, *times, begin, new.alias("new"))
    return each_once.groupBy(*PARTITION, "window_ms", *by).agg(
        F.sum("new").alias("records"),
        F.min("first_acked_at").alias("from_ms"),
        F.max("last_acked_at").alias("to_ms"),
    )


def owners(cells: DataFrame) -> DataFrame:
    """Return a table of OWNERS_SCHEMA."""
    return cells.groupBy(*_OWNERSHIP).agg(
        F.min("first_acked_at").alias("first_acked_at"),
        F.max("last_acked_at").alias("last_acked_at"),
        F.sum("records").alias("records"),
        F.sum("bytes").alias("bytes"),
    )


def ownership_changes(owners: DataFrame, *, length_ms: int) -> DataFrame:
    """Count changes of owner: topic, partition, window_ms, ownership_changes.

    A change counts in the window of the new owner's first acknowledgement. The same owner at another revision is not a
    change: a late answer may have a former revision of its owner.
    """
    in_time = Window.partitionBy(*PARTITION).orderBy("first_acked_at", "revision", "owner")
    later = owners.withColumn("before", F.lag("owner").over(in_time)).where("before != owner")
    began = window_ms(F.col("first_acked_at"), length_ms).alias("window_ms")
    return later.groupBy(*PARTITION, began).agg(F.count("*").alias("ownership_changes"))


def amounts(cells: DataFrame, *keys: str) -> DataFrame:
    """Sum up by `keys`: records, batches, bytes, late, producers, owners."""
    return cells.groupBy(*keys).agg(
        *(F.sum(name).alias(name) for name in ("records", "batches", "bytes", "late")),
        F.count_distinct("is_idempotent", "producer").alias("producers"),
        F.sort_array(F.collect_set("owner")).alias("owners"),
    )


def throughput(cells: DataFrame) -> DataFrame:
    """Return a table of THROUGHPUT_SCHEMA."""
    summed = cells.groupBy("window_ms", "owner").agg(F.sum("records").alias("records"), F.sum("bytes").alias("bytes"))
    return summed.select(F.timestamp_millis("window_ms").alias("window_start"), "owner", "records", "bytes")


def latencies(rows: DataFrame, *, length_ms: int) -> DataFrame:
    """Count the samples in each bin: topic, partition, window_ms, bin, samples, max_us.

    Bins can be summed over windows and audits; percentiles cannot.
    """
    samples = rows.where("kind = 'range'").select(
        *PARTITION,
        window_ms(F.col("last_acked_at"), length_ms).alias("window_ms"),
        F.explode("latency_us").alias("us"),
    )
    number = F.floor(F.log(F.greatest(F.col("us"), F.lit(1))) * _BINS).cast("int")
    return samples.groupBy(*_WINDOW, number.alias("bin")).agg(
        F.count("*").alias("samples"), F.max("us").alias("max_us")
    )


def percentiles(latencies: DataFrame, *keys: str) -> DataFrame:
    """Return p50_ms, p95_ms, p99_ms and max_ms of the samples by `keys`."""
    bins = latencies.groupBy(*keys, "bin").agg(F.sum("samples").alias("samples"), F.max("max_us").alias("max_us"))
    upwards = Window.partitionBy(*keys).orderBy("bin")
    everything = Window.partitionBy(*keys)
    so_far = bins.select(
        *keys,
        "bin",
        "max_us",
        F.sum("samples").over(upwards.rowsBetween(Window.unboundedPreceding, Window.currentRow)).alias("so_far"),
        F.sum("samples").over(everything).alias("all"),
    )
    middle_ms = F.exp((F.col("bin") + 0.5) / _BINS) / 1000

    def percentile(share: float) -> Column:
        """Return the middle of the lowest bin with this share of the samples below its end."""
        return F.min(F.when(F.col("so_far") >= F.ceil(F.col("all") * share), middle_ms))

    max_ms = F.max("max_us") / 1000
    # The middle of the highest bin may be above every sample.
    return so_far.groupBy(*keys).agg(
        *(F.least(percentile(share), max_ms).alias(name) for name, share in _PERCENTILES.items()),
        max_ms.alias("max_ms"),
    )
