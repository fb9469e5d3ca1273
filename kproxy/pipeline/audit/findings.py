"""Turn faults and unproven times into findings, one row each."""

from __future__ import annotations

from functools import reduce

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses

from kproxy.pipeline.audit.intervals import BUCKET, PARTITION, in_buckets, log_id
from kproxy.pipeline.audit.schemas import (
    CORRUPT,
    DELETED,
    DUPLICATE,
    FINDINGS_SCHEMA,
    GAP,
    LOST,
    OVERLAP,
    UNCHECKED,
)

# A producer's sequence numbers repeat after this many records; batches further apart are not duplicates.
_LAP = (1 << 31) - 1


def duplicates(log: DataFrame) -> DataFrame:
    """Return repeated batches: LOG_SCHEMA and `first_base_offset`, the previous copy's."""
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
    """Count by log_id and window_ms the repeated records of which either copy was acknowledged then."""
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
    # If both copies were acknowledged, the later acknowledgement is the wrong one.
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
            "The batch at offset %d of %s/%d is already at offset %d: sequence number %d of producer %d.",
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
            "The batch at offset %d of %s/%d does not match its checksum: its records may be corrupt.",
            *map(F.col, ("base_offset", *PARTITION)),
        ),
    )


def batch_counts(log: DataFrame) -> DataFrame:
    """Count batches by partition.

    `corrupt`: wrong checksum. `unchecked`: checksum not checked. `unsequenced`: without sequence numbers, so that
    duplicates among them cannot be found.
    """
    is_sequenced = (F.col("producer_id") >= 0) & (F.col("base_sequence") >= 0)
    return log.groupBy(*PARTITION).agg(
        F.count_if(F.col("crc_ok") == F.lit(False)).alias("corrupt"),
        F.count_if(F.col("crc_ok").isNull()).alias("unchecked"),
        F.count_if(~is_sequenced & ~F.col("is_control") & F.coalesce("crc_ok", F.lit(True))).alias("unsequenced"),
    )


def of_unchecked(batch_counts: DataFrame) -> DataFrame:
    """Return a finding for each partition with unchecked batches."""
    return _as_findings(
        batch_counts.where("unchecked > 0"),
        UNCHECKED,
        **{name: F.col(name) for name in PARTITION},
        detail=F.format_string(
            "%s/%d: %s not checked, because crc32c is not installed where the log was read. The log may be corrupt.",
            *map(F.col, PARTITION),
            F.when(F.col("unchecked") == 1, F.lit("the checksum of one batch was")).otherwise(
                F.format_string("the checksums of %d batches were", "unchecked")
            ),
        ),
    )


def of_other_topics(gone: DataFrame, kind: str) -> DataFrame:
    """Return a finding for each partition and id of a deleted topic; of kind DELETED if the user declared it."""
    by = (*PARTITION, "topic_id", "now")
    theirs = (
        gone.where(F.col("is_declared") == F.lit(kind == DELETED))
        .groupBy(*by)
        .agg(F.sum("records").alias("records"), F.min("from_ms").alias("from_ms"), F.max("to_ms").alias("to_ms"))
    )
    was = F.when(F.col("topic_id").isNotNull(), F.format_string("its id was %s, and ", "topic_id")).otherwise("")
    none = F.lit("no topic has that name now")
    now = F.when(F.col("now").isNotNull(), F.format_string("the topic of that name now has %s", "now")).otherwise(none)
    unsaid = F.format_string(
        " It is unknown whether they were in the log until then. If the deletion was on purpose, give "
        "--deleted-topic %s.",
        F.col("topic"),
    )
    told = F.format_string(
        "%d records of %s/%d were acknowledged in a topic that has been deleted: %s%s.",
        *(F.col("records"), *map(F.col, PARTITION), was, now),
    )
    return _as_findings(
        theirs,
        kind,
        **{name: F.col(name) for name in (*PARTITION, "records", "from_ms", "to_ms")},
        detail=told if kind == DELETED else F.concat(told, unsaid),
    )


def of_unproven(unproven: DataFrame, kind: str) -> DataFrame:
    names = ("proxy", "incarnation", "sequence", "from_ms", "to_ms")
    missing = F.when(F.col("missing") == 1, F.lit("A row is")).otherwise(F.format_string("%d rows are", "missing"))
    lost_rows = F.format_string(
        "%s missing from the trail of %s: the trail may lack records that the proxy acknowledged then.",
        missing,
        F.col("proxy"),
    )
    cut_off = F.format_string(
        "The trail of %s has no end: the proxy was killed or cut off, and its last acknowledgements may be missing.",
        F.col("proxy"),
    )
    not_yet = F.format_string(
        "The trail of %s continues: its last rows before the end of this audit had not arrived when the audit read "
        "it. Run the audit again later.",
        F.col("proxy"),
    )
    without_end = F.when(F.col("lives"), not_yet).otherwise(cut_off)
    return _as_findings(
        unproven.where(F.col("kind") == kind),
        kind,
        **{name: F.col(name) for name in names},
        detail=lost_rows if kind == GAP else without_end,
    )


def concerned(islands: DataFrame, claims: DataFrame, *, bits: int) -> DataFrame:
    """Return the claims within each island, cut to it. The islands are broadcast, so they must be few."""
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


_NO_LOG = "and there is no log of this partition. If its topic was deleted on purpose, give --deleted-topic %s."


def of_lost(concerned: DataFrame, bounds: DataFrame) -> DataFrame:
    """Return a finding for each island, owner and trail; it names the producer if there was only one."""
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
        F.when(end.isNull(), F.format_string(_NO_LOG, F.col("topic")))
        .when(F.col("replaced"), F.lit("and the log has other records there."))
        .when(F.col("first") >= end, F.format_string("and the log ends earlier, at offset %d.", end))
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
        # A record may have been acknowledged twice.
        records=F.least(F.col("records"), F.col("behind") - F.col("first")),
        detail=F.concat(told, why, _acks_1()),
    )


def of_overlaps(concerned: DataFrame) -> DataFrame:
    """Return a finding for each island, with the first ownership that assigned the offsets and the last other one.

    The other one is of another owner, if there is any.
    """
    names = (
        "revision", "owner", "first_acked_at", "proxy", "incarnation", "sequence", "producer_id", "producer_epoch",
    )  # fmt: skip
    claim = F.struct(*names)
    doubled = (
        concerned.where(F.col("kind") == OVERLAP)
        .groupBy(*_ISLAND)
        .agg(
            F.min(claim).alias("one"),
            F.max(claim).alias("latest"),
            F.min_by(claim, "owner").alias("lowest"),
            F.max_by(claim, "owner").alias("highest"),
            F.min("first_acked_at").alias("from_ms"),
            F.max("last_acked_at").alias("to_ms"),
            F.min("acks").alias("acks"),
        )
        .withColumn("other", _of_another_owner("latest", "highest", "lowest"))
    )
    is_one_owner = F.col("one.owner") == F.col("other.owner")
    where = F.format_string(
        "Offsets %d to %d of %s/%d were assigned by broker %d at revision %d ",
        *(F.col("island_start"), F.col("island_end") - 1, *map(F.col, PARTITION)),
        *(F.col("one.owner"), F.col("one.revision")),
    )
    two = F.format_string("and by broker %d at revision %d", F.col("other.owner"), F.col("other.revision"))
    again = F.format_string("and again at revision %d", F.col("other.revision"))
    once_more = F.when(F.col("one.revision") == F.col("other.revision"), F.lit("twice")).otherwise(again)
    who = F.when(is_one_owner, once_more).otherwise(two)
    so = F.lit(". The log keeps at most one of two records at an offset.")
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


def _of_another_owner(*claims: str) -> Column:
    """Return the first of `claims` with another owner than `one`, else the first."""
    others = [F.when(F.col(f"{claim}.owner") != F.col("one.owner"), F.col(claim)) for claim in claims]
    return F.coalesce(*others, F.col(claims[0]))


def _only_one(name: str) -> Column:
    return F.when(F.min(name) == F.max(name), F.min(name)).alias(name)


def _acks_1() -> Column:
    warning = " They were written with acks=1, so they may be lost if the owner dies before replication."
    return F.when(F.col("acks") == 1, F.lit(warning)).otherwise(F.lit(""))


def first_of(frame: DataFrame, limit: int, *order: str) -> DataFrame:
    """Return at most `limit` rows of each kind, in `order`."""
    by_kind = Window.partitionBy("kind").orderBy(*order)
    return frame.withColumn("nth", F.row_number().over(by_kind)).where(F.col("nth") <= limit).drop("nth")


def numbers(*kinds: DataFrame) -> DataFrame:
    """Count the rows by `kind`, as `found`."""
    counts = [frame.groupBy("kind").agg(F.count("*").alias("found")) for frame in kinds]
    return reduce(DataFrame.unionByName, counts)


def with_numbers(listed: DataFrame, numbers: DataFrame) -> DataFrame:
    """Add `of_kind`, the number of findings of the kind, to the `listed` ones, which must be few."""
    here = F.count("*").over(Window.partitionBy("kind"))
    joined = listed.join(F.broadcast(numbers), "kind", "left")
    return joined.withColumn("of_kind", F.greatest("found", here)).drop("found")
