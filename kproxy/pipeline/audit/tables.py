"""Audit a trail's rows against logs, and store the result tables.

The inputs are rows, batch headers and log bounds. The results are one directory of Parquet files for each table. Every
report is made from these tables, so that it can be made again from the files, and any tool that reads Parquet can query
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses

from kproxy.errors import StartupError
from kproxy.pipeline.audit import coverage, findings, measures, proof
from kproxy.pipeline.audit.coverage import Land
from kproxy.pipeline.audit.intervals import BUCKET_BITS, PARTITION, claims, held, log_id
from kproxy.pipeline.audit.schemas import (
    DELETED,
    FINDINGS_SCHEMA,
    GAP,
    GONE,
    OWNERS_SCHEMA,
    PARTITIONS_SCHEMA,
    TAIL,
    THROUGHPUT_SCHEMA,
    WINDOWS_SCHEMA,
)
from kproxy.pipeline.audit.trail import SHIPPING_MS
from kproxy.pipeline.spark import as_spark_failure

_WINDOW = (*PARTITION, "window_ms")

# Defaults.
WINDOW_MS: Final = 10_000
LATE_AFTER_MS: Final = 60_000
MAX_FINDINGS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRules:
    """The rules of an audit: records acknowledged from `from_ms` to before `to_ms`; None for no limit.

    `read_at_ms`: when the trail was read; `read_from_ms`: only rows shipped from then on were read, None for all.
    `topics`: () for all in the trail. `window_ms`: the length of a window. A row that is shipped more than
    `late_after_ms` after it was closed is late; a live proxy's rows take up to `shipping_ms` until they can be read. At
    most `max_findings` of a kind are listed; the counts are of all. `is_all` False: there are later rows, which are
    not missing. `deleted_topics`: topics that the user says were deleted on purpose.
    """

    read_at_ms: int
    topics: tuple[str, ...] = ()
    from_ms: int | None = None
    read_from_ms: int | None = None
    to_ms: int | None = None
    window_ms: int = WINDOW_MS
    late_after_ms: int = LATE_AFTER_MS
    shipping_ms: int = SHIPPING_MS
    max_findings: int = MAX_FINDINGS
    is_all: bool = True
    deleted_topics: tuple[str, ...] = ()
    bucket_bits: int = BUCKET_BITS


@dataclass(frozen=True, slots=True)
class _Trail:
    """The tables that the audit derives from the trail alone."""

    judged: DataFrame
    cells: DataFrame
    latencies: DataFrame
    unproven: DataFrame


def audit_tables(rows: DataFrame, log: DataFrame, bounds: DataFrame, rules: AuditRules, land: Land) -> Tables:
    """Audit a whole trail.

    `rows` have TRAIL_SCHEMA and `shipped_at`, in any order; `log` and `bounds` have their schemas. All three are read
    several times. `land` stores intermediate tables that are read several times.
    """
    trail = _trail(rows, rules, land)
    if "topic_id" not in bounds.columns:
        bounds = bounds.withColumn("topic_id", F.lit(None).cast("string"))
    here, elsewhere = _by_topic_id(trail.judged, bounds, rules)
    given_out = claims(here, length_ms=rules.window_ms, bits=rules.bucket_bits)
    by_id = ("topic_id", "now", "is_declared")
    gone = land("gone", measures.records(elsewhere, *by_id, length_ms=rules.window_ms, bits=rules.bucket_bits))
    segments = land("segments", coverage.segments(given_out, held(log, bits=rules.bucket_bits), bounds, land))
    doubled = land("duplicates", findings.duplicates(log))
    batches = land("batches", findings.batch_counts(log))
    owners = measures.owners(trail.cells)
    changes = measures.ownership_changes(owners, length_ms=rules.window_ms)
    by_log = trail.cells.select(*PARTITION).unionByName(bounds.select(*PARTITION)).distinct()
    logs = land("logs", by_log.withColumn("log_id", log_id()))
    windows = _windows(trail, segments, doubled, batches, given_out, gone, changes, logs, rules)
    return Tables(
        windows=windows,
        partitions=_partitions(trail, segments, doubled, batches, gone, changes, logs, bounds),
        findings=_findings(trail, segments, doubled, batches, gone, given_out, log, bounds, rules, land),
        owners=owners,
        throughput=measures.throughput(trail.cells),
    )


def _by_topic_id(ranges: DataFrame, bounds: DataFrame, rules: AuditRules) -> tuple[DataFrame, DataFrame]:
    """Split the rows into those of existing topics and those of deleted ones, by topic id.

    A topic of the same name with another id is another topic: their offsets are unrelated. Rows without an id count as
    the existing topic's. If no topic has the name, the user must have declared it deleted (`is_declared`), else it
    counts as existing. `now` is the id of the existing topic of that name, if any.
    """
    living = bounds.select("topic", F.col("topic_id").alias("now"), F.lit(True).alias("lives")).distinct()
    is_declared = F.col("topic").isin(*rules.deleted_topics)
    known = ranges.join(F.broadcast(living), "topic", "left").withColumn("is_declared", is_declared)
    is_other = F.coalesce(F.col("topic_id") != F.col("now"), F.lit(False))
    is_other |= F.col("lives").isNull() & F.col("is_declared")
    extra = ("now", "lives", "is_declared")
    return known.where(~is_other).drop(*extra), known.where(is_other)


def _by_declaration(gone: DataFrame, *keys: str) -> DataFrame:
    """Count by `keys` the records in topics declared deleted (`deleted`) and in others (`gone`)."""
    records = F.col("records")
    return gone.groupBy(*keys).agg(
        F.sum(F.when(F.col("is_declared"), records).otherwise(0)).alias("deleted"),
        F.sum(F.when(F.col("is_declared"), 0).otherwise(records)).alias("gone"),
    )


def _trail(rows: DataFrame, rules: AuditRules, land: Land) -> _Trail:
    pieces = land("pieces", proof.pieces(rows))
    trails = land("trails", proof.trails(pieces))
    judged = F.col("kind") == "range"
    if rules.topics:
        judged &= F.col("topic").isin(*rules.topics)
    if rules.from_ms is not None:
        judged &= F.col("last_acked_at") >= rules.from_ms
    if rules.to_ms is not None:
        judged &= F.col("last_acked_at") < rules.to_ms
    ranges = proof.each_once(rows.where(judged), pieces)
    end = proof.audit_end(trails, read_at_ms=rules.read_at_ms, to_ms=rules.to_ms, shipping_ms=rules.shipping_ms)
    missing = proof.gaps(rows, pieces, trails, read_from_ms=rules.read_from_ms)
    unproven = proof.unproven(missing, proof.tails(trails, end, is_all=rules.is_all), end, from_ms=rules.from_ms)
    cells = measures.cells(ranges, trails, length_ms=rules.window_ms, late_after_ms=rules.late_after_ms)
    return _Trail(
        judged=ranges,
        cells=land("cells", cells),
        latencies=land("latencies", measures.latencies(ranges, length_ms=rules.window_ms)),
        unproven=land("unproven", unproven),
    )


def _windows(
    trail: _Trail,
    segments: DataFrame,
    doubled: DataFrame,
    batches: DataFrame,
    given_out: DataFrame,
    gone: DataFrame,
    changes: DataFrame,
    logs: DataFrame,
    rules: AuditRules,
) -> DataFrame:
    by_window = ["log_id", "window_ms"]
    copies = findings.duplicate_windows(doubled, given_out, bits=rules.bucket_bits)
    counts = (
        coverage.window_counts(segments)
        .join(copies, by_window, "full")
        .join(F.broadcast(logs), "log_id")
        .drop("log_id")
    )
    amounts = measures.amounts(trail.cells, *_WINDOW)
    percentiles = measures.percentiles(trail.latencies, *_WINDOW)
    joined = amounts.join(counts, list(_WINDOW), "left").join(percentiles, list(_WINDOW), "left")
    joined = joined.join(_by_declaration(gone, *_WINDOW), list(_WINDOW), "left")
    joined = joined.join(changes, list(_WINDOW), "left").join(
        F.broadcast(_unproven_windows(trail, rules)), "window_ms", "left"
    )
    # The window of an unchecked batch is not known, so it counts in all windows of its partition.
    joined = joined.join(F.broadcast(batches.select(*PARTITION, "unchecked")), list(PARTITION), "left").withColumn(
        "unproven", _is_unproven()
    )
    complete = _added_up(joined).select(
        "*",
        F.timestamp_millis("window_ms").alias("window_start"),
        F.timestamp_millis(F.col("window_ms") + rules.window_ms).alias("window_end"),
    )
    return _shaped(complete, WINDOWS_SCHEMA)


def _added_up(counts: DataFrame) -> DataFrame:
    """Add `acked`."""
    present, lost, removed, deleted, gone = (
        F.coalesce(name, F.lit(0)) for name in ("present", "lost", "removed", "deleted", "gone")
    )
    return counts.withColumn("acked", present + lost + removed + deleted + gone)


def _unproven_windows(trail: _Trail, rules: AuditRules) -> DataFrame:
    begins = trail.cells.select("window_ms").distinct()
    meets = (F.col("from_ms") < F.col("window_ms") + rules.window_ms) & (F.col("to_ms") >= F.col("window_ms"))
    intervals = F.broadcast(trail.unproven.select("from_ms", "to_ms"))
    return begins.join(intervals, meets, "left_semi").withColumn("unproven", F.lit(True))


def _is_unproven() -> Column:
    """Return whether it is unproven: by trails, unchecked batches, or an undeclared deletion of a topic."""
    return F.coalesce("unproven", F.lit(False)) | (F.coalesce("unchecked", F.lit(0)) + F.coalesce("gone", F.lit(0)) > 0)


def _partitions(
    trail: _Trail,
    segments: DataFrame,
    doubled: DataFrame,
    batches: DataFrame,
    gone: DataFrame,
    changes: DataFrame,
    logs: DataFrame,
    bounds: DataFrame,
) -> DataFrame:
    on = list(PARTITION)
    copies = doubled.groupBy(*on).agg(F.sum(F.col("record_count").cast("long")).alias("duplicated"))
    joined = (
        logs.join(coverage.partition_counts(segments), "log_id", "left")
        .join(measures.amounts(trail.cells, *on), on, "left")
        .join(copies, on, "left")
        .join(_by_declaration(gone, *on), on, "left")
        .join(measures.percentiles(trail.latencies, *on), on, "left")
        .join(changes.groupBy(*on).agg(F.sum("ownership_changes").alias("ownership_changes")), on, "left")
        .join(bounds, on, "left")
        .join(batches, on, "left")
        # The missing rows of a trail may be of any partition.
        .crossJoin(F.broadcast(trail.unproven.agg((F.count("*") > 0).alias("unproven"))))
        .withColumn("unproven", _is_unproven())
    )
    return _shaped(_added_up(joined), PARTITIONS_SCHEMA)


_UNKNOWN = ("p50_ms", "p95_ms", "p99_ms", "max_ms", "log_start_offset", "end_offset")


def _shaped(frame: DataFrame, schema: object) -> DataFrame:
    """Return the columns of `schema`; counts, flags and lists that are missing are 0, false or empty, not null."""
    columns = []
    for field in schema.fields:  # type: ignore[attr-defined]  # pyspark's types are not followed
        column = F.col(field.name).cast(field.dataType)
        if field.name == "owners":
            column = F.coalesce(column, F.array().cast(field.dataType))
        elif field.name == "unproven":
            column = F.coalesce(column, F.lit(False))
        elif field.dataType.typeName() == "long" and field.name not in _UNKNOWN:
            column = F.coalesce(column, F.lit(0).cast("long"))
        columns.append(column.alias(field.name))
    return frame.select(*columns)


def _findings(
    trail: _Trail,
    segments: DataFrame,
    doubled: DataFrame,
    batches: DataFrame,
    gone: DataFrame,
    given_out: DataFrame,
    log: DataFrame,
    bounds: DataFrame,
    rules: AuditRules,
    land: Land,
) -> DataFrame:
    """Return at most `max_findings` of each kind. The islands listed are bounded, so they can be broadcast."""
    limit = rules.max_findings
    islands = land("islands", coverage.islands(segments))
    first_islands = findings.first_of(islands, limit, "log_id", "start")
    about = findings.concerned(first_islands, given_out, bits=rules.bucket_bits)
    by_offset = ("topic", "partition", "first_offset")
    duplicates, corrupt = findings.of_duplicates(doubled), findings.of_corrupt(log)
    not_of_offsets = (
        findings.of_other_topics(gone, GONE)
        .unionByName(findings.of_other_topics(gone, DELETED))
        .unionByName(findings.of_unchecked(batches))
        .unionByName(findings.of_unproven(trail.unproven, GAP))
        .unionByName(findings.of_unproven(trail.unproven, TAIL))
    )
    everything = (
        findings.of_lost(about, bounds)
        .unionByName(findings.of_overlaps(about))
        .unionByName(findings.first_of(duplicates, limit, *by_offset))
        .unionByName(findings.first_of(corrupt, limit, *by_offset))
        .unionByName(not_of_offsets)
    )
    told = findings.first_of(everything.drop("of_kind"), limit, *by_offset, "from_ms")
    counted = findings.with_numbers(told, findings.numbers(islands, duplicates, corrupt, not_of_offsets))
    return counted.select(*FINDINGS_SCHEMA.names)


# The description of the audit, a row for each label and text. Written last: a directory that has it is complete.
ABOUT = "about"
_ABOUT_SCHEMA = "label string, text string"


@dataclass(frozen=True, slots=True)
class Tables:
    """The result tables, not collected.

    `kproxy/pipeline/audit/schemas.py` has the columns. `windows`: one row for each topic, partition and window of time.
    `partitions`: the same over all time. `findings`: one row for each fault or unproven time. `owners`: what each
    broker acknowledged, from when to when, under which ownership revision. `throughput`: records and bytes by window
    and owner.
    """

    windows: DataFrame
    partitions: DataFrame
    findings: DataFrame
    owners: DataFrame
    throughput: DataFrame


NAMES = tuple(field.name for field in fields(Tables))
SCHEMAS: Final = {
    "windows": WINDOWS_SCHEMA,
    "partitions": PARTITIONS_SCHEMA,
    "findings": FINDINGS_SCHEMA,
    "owners": OWNERS_SCHEMA,
    "throughput": THROUGHPUT_SCHEMA,
}


def write_results(tables: Tables, directory: str, about: Mapping[str, str]) -> None:
    """Write all tables to `directory`, a path or any address that Spark writes to, replacing earlier ones.

    `about` describes the audit. Raise SparkFailed.
    """
    with as_spark_failure(f"The audit's results could not be written to {directory}"):
        session = tables.partitions.sparkSession
        for name in NAMES:
            getattr(tables, name).write.mode("overwrite").parquet(_place(directory, name))
        rows = [(label, text) for label, text in about.items()]
        session.createDataFrame(rows, _ABOUT_SCHEMA).coalesce(1).write.mode("overwrite").parquet(
            _place(directory, ABOUT)
        )


def read_results(session: SparkSession, directory: str) -> tuple[Tables, dict[str, str]]:
    """Return the tables in `directory` and their `about`. Raise StartupError unless all are there."""
    try:
        # Without a schema Spark would read a file of each table first.
        read = {name: session.read.schema(SCHEMAS[name]).parquet(_place(directory, name)) for name in NAMES}
        about = session.read.schema(_ABOUT_SCHEMA).parquet(_place(directory, ABOUT)).collect()
    except AnalysisException as error:
        raise StartupError(
            f"{directory} has no audit's results: give a directory that `kproxy pipeline audit --output` wrote to."
        ) from error
    return Tables(**read), {row.label: row.text for row in about}


def _place(directory: str, name: str) -> str:
    return f"{directory.rstrip('/') or '/'}/{name}"
