"""Each thing that is wrong or cannot be known, one row and one sentence."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses

from kproxy.pipeline.audit.schemas import CORRUPT, DUPLICATE, FINDINGS_SCHEMA, GAP, LOST, OVERLAP
from kproxy.pipeline.audit.spans import BUCKET, PARTITION, in_buckets, log_id

# Sequence numbers come again after so many records of a producer; what is further apart is no duplicate.
_LAP = (1 << 31) - 1


def duplicates(log: DataFrame) -> DataFrame:
    """Batches that stand in the log once more: LOG_SCHEMA and `first_base_offset`, of the copy before."""
    batches = log.where(
        "producer_id >= 0 and base_sequence >= 0 and not is_control and coalesce(crc_ok, true)"
    ).withColumn("batch_id", F.xxhash64(*PARTITION, "producer_id", "producer_epoch", "base_sequence"))
    copies = Window.partitionBy("batch_id").orderBy("base_offset")
    distance = F.col("base_offset") - F.col("first_base_offset")
    return (
        batches.withColumn("first_base_offset", F.lag("base_offset").over(copies))
        .where((distance > 0) & (distance < _LAP))
        .drop("batch_id")
    )


def duplicate_windows(duplicates: DataFrame, claims: DataFrame, *, bits: int) -> DataFrame:
    """By log_id and window_ms: records that stand in the log once more, where either copy was acknowledged then."""
    copies = duplicates.select(
        log_id().alias("log_id"),
        "base_offset",
        F.col("record_count").cast("long").alias("records"),
        F.explode(F.array("base_offset", "first_base_offset")).alias("start"),
    )
    probes = in_buckets(copies.withColumn("end", F.col("start") + 1), bits).select(
        *BUCKET, "base_offset", "records", F.col("start").alias("probe")
    )
    told = claims.select(*BUCKET, "start", "end", "window_ms").join(F.broadcast(probes), list(BUCKET))
    # One of the two is enough; where both were acknowledged it is the later one that should not have been.
    return (
        told.where("start <= probe and probe < end")
        .groupBy("log_id", "base_offset")
        .agg(F.max("window_ms").alias("window_ms"), F.max("records").alias("records"))
        .groupBy("log_id", "window_ms")
        .agg(F.sum("records").alias("duplicated"))
    )


def _as_findings(frame: DataFrame, kind: str, **columns: Column) -> DataFrame:
    columns["kind"] = F.lit(kind)
    nothing = F.lit(None)
    return frame.select(*(columns.get(f.name, nothing).cast(f.dataType).alias(f.name) for f in FINDINGS_SCHEMA.fields))


def of_duplicates(duplicates: DataFrame) -> DataFrame:
    names = ("topic", "partition", "producer_id", "producer_epoch")
    return _as_findings(
        duplicates,
        DUPLICATE,
        **{name: F.col(name) for name in names},
        first_offset=F.col("base_offset"),
        last_offset=F.col("last_offset"),
        records=F.col("record_count"),
        detail=F.format_string(
            "The batch at offset %d of %s/%d stands at offset %d already: sequence number %d of producer %d.",
            *map(F.col, ("base_offset", *PARTITION, "first_base_offset", "base_sequence", "producer_id")),
        ),
    )


def of_corrupt(log: DataFrame) -> DataFrame:
    return _as_findings(
        log.where("crc_ok = false"),
        CORRUPT,
        topic=F.col("topic"),
        partition=F.col("partition"),
        first_offset=F.col("base_offset"),
        last_offset=F.col("last_offset"),
        records=F.col("last_offset") - F.col("base_offset") + 1,
        detail=F.format_string(
            "The batch at offset %d of %s/%d does not match its checksum: its records cannot be relied on.",
            *map(F.col, ("base_offset", *PARTITION)),
        ),
    )


def of_unproven(unproven: DataFrame, kind: str) -> DataFrame:
    names = ("proxy", "incarnation", "sequence", "from_ms", "to_ms")
    missing = F.when(F.col("missing") == 1, F.lit("A row is")).otherwise(F.format_string("%d rows are", "missing"))
    lost_rows = F.format_string(
        "%s missing of the trail of %s: what it acknowledged then may not be in the trail.", missing, F.col("proxy")
    )
    cut_off = F.format_string(
        "The trail of %s has no end: the proxy was killed or cut off, and what it acknowledged last may not be in it.",
        F.col("proxy"),
    )
    return _as_findings(
        unproven.where(F.col("kind") == kind),
        kind,
        **{name: F.col(name) for name in names},
        detail=lost_rows if kind == GAP else cut_off,
    )


def concerned(islands: DataFrame, claims: DataFrame, *, bits: int) -> DataFrame:
    """Of each island the claims that it is about, cut to it. The islands are broadcast: they must be few."""
    island = islands.select(
        "kind", "log_id", "replaced", "start", "end", *(F.col(n).alias(f"island_{n}") for n in _ENDS)
    )
    pieces = in_buckets(island, bits).withColumnsRenamed({"start": "piece_start", "end": "piece_end"})
    both = claims.join(F.broadcast(pieces), list(BUCKET)).where("start < piece_end and piece_start < end")
    return both.select(
        *(c for c in both.columns if c not in ("start", "end")),
        F.greatest("start", "piece_start").alias("first"),
        F.least("end", "piece_end").alias("behind"),
    )


_ENDS = ("start", "end")
_ISLAND = (*PARTITION, "kind", "island_start", "island_end", "replaced")


def of_lost(concerned: DataFrame, bounds: DataFrame) -> DataFrame:
    """By island, owner and trail; a producer is named where it was the only one."""
    by = (*_ISLAND, "owner", "revision", "proxy", "incarnation")
    lost = (
        concerned.where(F.col("kind") == LOST)
        .groupBy(*by)
        .agg(
            F.min("first").alias("first"),
            F.max("behind").alias("behind"),
            F.sum(F.col("behind") - F.col("first")).alias("records"),
            F.min("sequence").alias("sequence"),
            F.min("first_acked_at").alias("from_ms"),
            F.max("last_acked_at").alias("to_ms"),
            F.min("acks").alias("acks"),
            *(_only_one(name) for name in ("producer_id", "producer_epoch")),
        )
        .join(F.broadcast(bounds), list(PARTITION), "left")
    )
    end = F.col("end_offset")
    last = F.col("behind") - 1
    told = F.format_string(
        "Broker %d acknowledged offsets %d to %d of %s/%d at revision %d, ",
        *(F.col("owner"), F.col("first"), last, *map(F.col, PARTITION), F.col("revision")),
    )
    why = (
        F.when(end.isNull(), F.lit("and there is no log of this partition."))
        .when(F.col("replaced"), F.lit("and the log has something else there."))
        .when(F.col("first") >= end, F.format_string("and the log ends before, at offset %d.", end))
        .otherwise(F.lit("and the log does not have them."))
    )
    names = (
        "owner",
        "revision",
        "proxy",
        "incarnation",
        "producer_id",
        "producer_epoch",
        "sequence",
        "from_ms",
        "to_ms",
    )
    return _as_findings(
        lost,
        LOST,
        **{name: F.col(name) for name in (*PARTITION, *names)},
        first_offset=F.col("first"),
        last_offset=last,
        # The same record may have been acknowledged twice.
        records=F.least(F.col("records"), F.col("behind") - F.col("first")),
        detail=F.concat(told, why, _acks_1()),
    )


def of_overlaps(concerned: DataFrame) -> DataFrame:
    """By island: the earliest ownership that gave the offsets out, and the latest."""
    names = (
        "revision", "owner", "first_acked_at", "proxy", "incarnation", "sequence", "producer_id", "producer_epoch",
    )  # fmt: skip
    claim = F.struct(*names)
    doubled = (
        concerned.where(F.col("kind") == OVERLAP)
        .groupBy(*_ISLAND)
        .agg(
            F.min(claim).alias("one"),
            F.max(claim).alias("other"),
            F.min("first_acked_at").alias("from_ms"),
            F.max("last_acked_at").alias("to_ms"),
            F.min("acks").alias("acks"),
        )
    )
    is_one_owner = F.col("one.owner") == F.col("other.owner")
    where = F.format_string(
        "Offsets %d to %d of %s/%d were given out by broker %d at revision %d ",
        *(F.col("island_start"), F.col("island_end") - 1, *map(F.col, PARTITION)),
        *(F.col("one.owner"), F.col("one.revision")),
    )
    two = F.format_string("and by broker %d at revision %d", F.col("other.owner"), F.col("other.revision"))
    who = F.when(is_one_owner, F.lit("twice")).otherwise(two)
    so = F.lit(": of two records at one offset the log has one at most.")
    of_one = ("owner", "revision", "proxy", "incarnation", "producer_id", "producer_epoch", "sequence")
    return _as_findings(
        doubled,
        OVERLAP,
        **{name: F.col(name) for name in (*PARTITION, "from_ms", "to_ms")},
        **{name: F.col(f"one.{name}") for name in of_one},
        other_owner=F.col("other.owner"),
        other_revision=F.col("other.revision"),
        first_offset=F.col("island_start"),
        last_offset=F.col("island_end") - 1,
        records=F.col("island_end") - F.col("island_start"),
        detail=F.concat(where, who, so, _acks_1()),
    )


def _only_one(name: str) -> Column:
    return F.when(F.min(name) == F.max(name), F.min(name)).alias(name)


def _acks_1() -> Column:
    warning = " They were written with acks=1, which an owner that dies may lose."
    return F.when(F.col("acks") == 1, F.lit(warning)).otherwise(F.lit(""))


def first_of(frame: DataFrame, limit: int, *order: str) -> DataFrame:
    """At most so many rows, and of each kind the first."""
    by_kind = Window.partitionBy("kind").orderBy(*order)
    return frame.withColumn("nth", F.row_number().over(by_kind)).where(F.col("nth") <= limit).drop("nth")
