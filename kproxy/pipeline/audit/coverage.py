"""Compare acknowledged offsets with those in the log.

This takes one sweep over the offsets, with running sums. An interval is two endpoints. The running sums over the
endpoints of a bucket give how often each offset was acknowledged, and whether the log has it. Endpoints that cancel
out, where batches meet without a gap, are removed first, so that a sound partition keeps about two for each window of
time.
"""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses

from kproxy.pipeline.audit.intervals import BUCKET, log_id
from kproxy.pipeline.audit.schemas import LOST, OVERLAP

# Stores a named table, and returns it so that it can be read several times without being computed again.
Land = Callable[[str, DataFrame], DataFrame]

_SUMS = ("acked", "owned", "held", "identity")
_JUDGED = ("present", "lost", "removed", "overlapped")


def segments(claims: DataFrame, held: DataFrame, bounds: DataFrame, land: Land) -> DataFrame:
    """Return segments of offsets within which nothing changes, of all partitions in the trail or the log.

    Columns of a segment [offset, end): `acked`, how many acknowledged it; `present`, `lost`, `removed`, `overlapped`
    and `unclaimed`, how many of its offsets are in that state; `replaced`, whether the log has another record there;
    `owned`, equal for equal owners. `weight`, `window_ms` and the sums `*_before` are for `window_counts`.
    """
    marks = _marks(claims, held)
    quick = land("sweep", _sweep(marks))
    # Two acknowledgements of one offset may be of one record, sent again. Telling that apart needs a sort of all
    # acknowledgements, so it is done only in buckets with such an offset.
    doubtful = quick.where("acked > 1").select(*BUCKET).distinct()
    again = marks.join(F.broadcast(doubtful), list(BUCKET), "left_semi")
    sure = quick.join(F.broadcast(doubtful), list(BUCKET), "left_anti")
    return _judged(sure.unionByName(_sweep(_without_resent(again))), bounds)


def _marks(claims: DataFrame, held: DataFrame) -> DataFrame:
    owner = F.shiftrightunsigned(F.xxhash64("owner", "revision"), 34)
    nothing = F.lit(None).cast("long")
    extent = (*BUCKET, "start", "end", "identity")
    acked = claims.select(*extent, "same", "window_ms", F.col("first_acked_at").alias("at"), owner.alias("owned"))
    stored = held.select(*extent, *(nothing.alias(name) for name in ("same", "window_ms", "at", "owned")))
    return acked.unionByName(stored)


def _without_resent(marks: DataFrame) -> DataFrame:
    """Remove from each interval the part that an earlier interval of the same records covers."""
    earlier = Window.partitionBy(*BUCKET, "same").orderBy("start", "at")
    said = F.max("end").over(earlier.rowsBetween(Window.unboundedPreceding, -1))
    return marks.repartition(*BUCKET).withColumn("start", F.greatest("start", said)).where("start < end")


def _sweep(marks: DataFrame) -> DataFrame:
    reduced = _without_cancelled(_endpoints(marks.drop("same", "at").repartition(*BUCKET)))
    along = Window.partitionBy(*BUCKET).orderBy("offset")
    so_far = along.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    # Of several endpoints at one offset only the last has a length, and its sums include all of them.
    return reduced.select(
        *BUCKET,
        "offset",
        "window_ms",
        F.col("acked").alias("weight"),
        F.coalesce(F.lead("offset").over(along), F.col("offset")).alias("end"),
        *(F.sum(name).over(so_far).alias(name) for name in _SUMS),
    )


def _endpoints(marks: DataFrame) -> DataFrame:
    one, minus_one = F.lit(1).cast("long"), F.lit(-1).cast("long")
    ends = F.inline(
        F.array(
            F.struct(F.col("start").alias("offset"), one.alias("sign")),
            F.struct(F.col("end").alias("offset"), minus_one.alias("sign")),
        )
    )
    both = marks.select(*BUCKET, "window_ms", "owned", "identity", ends)
    sign, is_claim = F.col("sign"), F.col("owned").isNotNull()
    # The identities of an acknowledgement and of the log cancel out if they are of one record.
    identity = F.col("identity") * sign
    return both.select(
        *BUCKET,
        "offset",
        "window_ms",
        F.when(is_claim, sign).otherwise(0).alias("acked"),
        F.when(is_claim, F.col("owned") * sign).otherwise(0).alias("owned"),
        F.when(is_claim, 0).otherwise(sign).alias("held"),
        F.when(is_claim, identity).otherwise(-identity).alias("identity"),
    )


def _without_cancelled(endpoints: DataFrame) -> DataFrame:
    """Sum up endpoints by offset and window, and drop those that change nothing."""
    sums = [F.sum(name).alias(name) for name in _SUMS]
    by_window = endpoints.groupBy(*BUCKET, "offset", "window_ms").agg(*sums)
    # The window matters only where acknowledgements begin or end.
    needed = by_window.withColumn("window_ms", F.when(F.col("acked") != 0, F.col("window_ms")))
    changes = " or ".join(f"{name} != 0" for name in _SUMS)
    return needed.groupBy(*BUCKET, "offset", "window_ms").agg(*sums).where(changes)


def _judged(swept: DataFrame, bounds: DataFrame) -> DataFrame:
    """Add the counts by state. Without bounds a partition no longer exists: all its acknowledged records are lost."""
    limits = bounds.select(log_id().alias("log_id"), "log_start_offset", "end_offset", "is_compacted")
    length = F.col("end") - F.col("offset")
    acked, held, overlapped = F.col("acked") > 0, F.col("held") > 0, F.col("acked") > 1
    # If an offset was acknowledged for two records, one of them is missing, and nobody knows which.
    present = acked & held & ((F.col("identity") == 0) | overlapped)
    absent = acked & ~present
    # Spark's least and greatest ignore nulls: without bounds nothing is known to be removed.
    start = F.coalesce("log_start_offset", F.lit(0))
    # Compaction leaves holes, but removes nothing after a log's end and replaces no record by another.
    leaves_holes = F.coalesce("is_compacted", F.lit(False)) & ~held
    reach = F.when(leaves_holes, F.greatest(start, "end_offset")).otherwise(start)
    gone = F.greatest(F.lit(0), F.least(F.col("end"), reach) - F.col("offset"))
    judged = swept.join(F.broadcast(limits), "log_id", "left").select(
        *swept.columns,
        _where(present, length).alias("present"),
        _where(absent, length - gone).alias("lost"),
        _where(absent, gone).alias("removed"),
        _where(overlapped, length).alias("overlapped"),
        _where(~acked & held, length).alias("unclaimed"),
        (absent & held).alias("replaced"),
    )
    before = Window.partitionBy(*BUCKET).orderBy("offset").rowsBetween(Window.unboundedPreceding, -1)
    sums = [F.coalesce(F.sum(name).over(before), F.lit(0)).alias(f"{name}_before") for name in _JUDGED]
    return judged.select("*", *sums)


def _where(condition: Column, value: Column) -> Column:
    return F.when(condition, value).otherwise(F.lit(0).cast("long"))


def window_counts(segments: DataFrame) -> DataFrame:
    """Count by `log_id` and `window_ms` the records acknowledged then that are present, lost, removed, overlapped.

    A count within an interval is the sum before its end minus the sum before its start, so no interval is looked up. An
    offset assigned twice counts in the window of each acknowledgement.
    """
    told = segments.where("window_ms is not null")
    counts = [F.sum(-F.col("weight") * F.col(f"{name}_before")).alias(name) for name in _JUDGED]
    return told.groupBy("log_id", "window_ms").agg(*counts)


def partition_counts(segments: DataFrame) -> DataFrame:
    """Count by `log_id` the offsets in each state, each once."""
    return segments.groupBy("log_id").agg(*(F.sum(name).alias(name) for name in (*_JUDGED, "unclaimed")))


def islands(segments: DataFrame) -> DataFrame:
    """Return the lost and the overlapped offsets, contiguous segments of one kind and the same owners joined.

    Columns: kind, log_id, `start`, `end`, `replaced`. They are few, unless most of the log is faulty.
    """
    extent = ("log_id", "start", "end", "owned", "replaced")
    # The offsets removed by retention come first.
    lost = segments.where("lost > 0").withColumn("start", F.col("end") - F.col("lost"))
    overlapped = segments.where("overlapped > 0").withColumn("start", F.col("offset"))
    both = lost.select(*extent, F.lit(LOST).alias("kind")).unionByName(
        overlapped.select(*extent, F.lit(OVERLAP).alias("kind"))
    )
    alike = Window.partitionBy("log_id", "kind", "owned", "replaced").orderBy("start")
    goes_on = F.lag("end").over(alike) == F.col("start")
    number = F.sum("is_new").over(alike.rowsBetween(Window.unboundedPreceding, Window.currentRow))
    return (
        both.withColumn("is_new", F.when(goes_on, 0).otherwise(1))
        .withColumn("number", number)
        .groupBy("log_id", "kind", "owned", "replaced", "number")
        .agg(F.min("start").alias("start"), F.max("end").alias("end"))
        .drop("number", "owned")
    )
