"""Audit on Spark, and store the result tables.

The input is rows of trails, batch headers and log bounds. The offsets of a partition are cut into buckets, ranges that
any executor judges alone (`spark_tasks.py`, `judge.py`), so no partition is too large for a task; the parts of a window
of time, and those of a partition, are then added up by key. The results are one directory of Parquet files for each
table: a report can be made again from them, and any tool that reads Parquet can query them.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import reduce
from operator import or_
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses

from kproxy.pipeline.audit.columns import ABOUT, FINDINGS, OWNERS, PARTITIONS, THROUGHPUT, UNREAD, WINDOWS, ddl
from kproxy.pipeline.audit.findings import Findings, of_unproven
from kproxy.pipeline.audit.judge import Batch, Bounds, PartitionPart, Range
from kproxy.pipeline.audit.log_client import Unread
from kproxy.pipeline.audit.proof import Stamp, TrailName, TrailPart
from kproxy.pipeline.audit.rules import AuditRules
from kproxy.pipeline.audit.spark_tasks import (
    FLOWS,
    JUDGED,
    PARTS,
    REPEATS,
    TRAIL_PARTS,
    BucketJudge,
    PartitionSum,
    Unpack,
    WindowSum,
    flows,
    part_of_trail,
    repeats_among,
)
from kproxy.pipeline.spark import as_spark_failure

# Stores a named table, and returns it so that it can be read several times without being computed again.
Land = Callable[[str, DataFrame], DataFrame]

PARTITION: Final = ("topic", "partition")
_WINDOW: Final = (*PARTITION, "window_ms")
_BUCKET: Final = (*PARTITION, "gone", "bucket")
# 2^18 offsets are usually some thousands of batches, and a quarter of a million at worst.
BUCKET_BITS: Final = 18
# 2^18 rows of a trail are examined together.
_BLOCK_BITS: Final = 18
_BATCHES_PER_TASK: Final = 200_000


def audit_tables(
    rows: DataFrame,
    log: DataFrame,
    bounds: DataFrame,
    rules: AuditRules,
    land: Land,
    bits: int = BUCKET_BITS,
    unread: Unread | None = None,
) -> Tables:
    """Audit a whole trail.

    `rows` have TRAIL and `shipped_at`, in any order; `log` and `bounds` have their schemas. Rows and log are
    read several times. `land` stores intermediate tables that are read several times. `unread`: partitions whose logs
    could not be read, and why.
    """
    session, unread = rows.sparkSession, unread or {}
    not_read = session.createDataFrame([(*which, True) for which in unread], "topic string, partition int, out boolean")
    judge, missing = rules.prove(_trail_parts(rows))
    limits = {
        (each.topic, each.partition): Bounds(*(each[name] for name in Bounds._fields)) for each in bounds.collect()
    }
    deleted = frozenset(rules.deleted_topics)
    judged = _judged_rows(rows, rules, {topic: each.topic_id for (topic, _), each in limits.items()}, not_read)
    claims = judged.withColumn("bucket", F.explode(_buckets(bits)))
    batches = log.select(*PARTITION, *Batch._fields).join(F.broadcast(not_read), [*PARTITION], "left_anti")
    again = land("repeats", _repeats(batches, log.count()))
    of_buckets = BucketJudge(judge, limits, deleted, bits)
    parts = land(
        "parts",
        claims.groupBy(*_BUCKET)
        .cogroup(_in_log(batches, again, bits).groupBy(*_BUCKET))
        .applyInArrow(lambda key, trail, log: of_buckets(key, trail, log), PARTS)
        .unionByName(_empty_parts(session, limits.keys() | unread.keys())),
    )
    of_partitions = PartitionSum(judge, limits, deleted, bool(missing), unread)
    sums = land(
        "sums",
        parts.where("window_ms is null")
        .groupBy(*PARTITION)
        .applyInArrow(lambda key, part: of_partitions(key, part), JUDGED),
    )
    listed = Findings(judge.max_findings)
    for packed in sums.select("findings", "found").toLocalIterator():
        listed.note(pickle.loads(packed.findings), pickle.loads(packed.found))  # noqa: S301 - of this job
    for each in map(of_unproven, missing):
        listed.note([each], {each["kind"]: 1})
    findings = [tuple(row.values()) for row in listed.whole()]
    partitions = land("partitions", sums.select("row").mapInArrow(Unpack(PARTITIONS), ddl(PARTITIONS)))
    unchecked = partitions.where("unchecked > 0").select(*PARTITION).collect()
    of_windows = WindowSum(rules.window_ms, missing, frozenset((each.topic, each.partition) for each in unchecked))
    return Tables(
        windows=_with_all_parts(parts, sums)
        .groupBy(*_WINDOW)
        .applyInArrow(lambda key, part: of_windows(key, part), ddl(WINDOWS)),
        partitions=partitions,
        findings=session.createDataFrame(findings, ddl(FINDINGS)),
        owners=sums.select("owners").mapInArrow(Unpack(OWNERS), ddl(OWNERS)),
        throughput=_throughput(parts),
    )


def _trail_parts(rows: DataFrame) -> dict[TrailName, TrailPart]:
    stamps = rows.select("proxy", "incarnation", *Stamp._fields)
    by_block = stamps.groupBy("proxy", "incarnation", F.shiftright("sequence", _BLOCK_BITS))
    parts: dict[TrailName, TrailPart] = {}
    for each in sorted(by_block.applyInArrow(part_of_trail, TRAIL_PARTS).collect(), key=lambda each: each.first):
        part, name = pickle.loads(each.part), (each.proxy, each.incarnation)  # noqa: S301 - of this job
        if name in parts:
            parts[name].join(part)
        else:
            parts[name] = part
    return parts


def _judged_rows(
    rows: DataFrame, rules: AuditRules, living: Mapping[str, str | None], not_read: DataFrame
) -> DataFrame:
    """Return the rows to judge; `gone` as BucketJudge has it, by `AuditRules.is_gone`."""
    judged = F.col("kind") == "range"
    if rules.topics:
        judged &= F.col("topic").isin(*rules.topics)
    if rules.from_ms is not None:
        judged &= F.col("last_acked_at") >= rules.from_ms
    if rules.to_ms is not None:
        judged &= F.col("last_acked_at") < rules.to_ms
    session = rows.sparkSession
    there = session.createDataFrame(list(living.items()), "topic string, now string")
    there = there.withColumn("lives", F.lit(True))
    known = rows.where(judged).join(F.broadcast(there), "topic", "left")
    known = known.join(F.broadcast(not_read), [*PARTITION], "left")
    is_gone = F.coalesce(F.col("topic_id") != F.col("now"), F.lit(False))
    is_gone |= F.col("lives").isNull() & F.col("topic").isin(*rules.deleted_topics)
    gone = F.when(is_gone, F.concat(F.lit("="), F.coalesce("topic_id", F.lit(""))))
    gone = gone.when(F.col("out"), UNREAD).otherwise("")
    return known.select(*PARTITION, *Range._fields, gone.alias("gone"))


def _buckets(bits: int) -> Column:
    """Return the buckets that a row's spans have offsets in."""
    first = f"shiftright(spans[0], {bits})"
    last = f"shiftright(element_at(spans, -2) + greatest(element_at(spans, -1), 1L) - 1, {bits})"
    # Spark does not compile lambdas, so the usual rows, within one bucket, avoid them.
    one = f"size(spans) = 2 and {first} = {last}"
    several = (
        f"array_distinct(flatten(transform(sequence(0, size(spans) div 2 - 1), k -> sequence("
        f"shiftright(spans[2 * k], {bits}), "
        f"shiftright(spans[2 * k] + greatest(spans[2 * k + 1], 1L) - 1, {bits})))))"
    )
    return F.expr(f"case when {one} then array({first}) else {several} end")


def _repeats(batches: DataFrame, count: int) -> DataFrame:
    """Return REPEATS of all logs. Batches that may be copies of each other are in one group."""
    groups = max(1, count // _BATCHES_PER_TASK)
    group = F.pmod(F.xxhash64("producer_id", "producer_epoch", "base_sequence"), F.lit(groups)).alias("group")
    sequenced = batches.where("producer_id >= 0 and base_sequence >= 0")
    return sequenced.groupBy(*PARTITION, group).applyInArrow(repeats_among, REPEATS)


def _in_log(batches: DataFrame, again: DataFrame, bits: int) -> DataFrame:
    """Return the batches by bucket, and the repeated ones again (`probe`) by the buckets of both copies."""
    bucket = F.sequence(F.shiftright("base_offset", bits), F.shiftright("last_offset", bits))
    nothing = F.lit(None).cast("long")
    headers = batches.withColumn("first_base_offset", nothing).withColumn("probe", nothing)
    headers = headers.withColumn("bucket", F.explode(bucket))
    probes = again.withColumn("probe", F.explode(F.array("base_offset", "first_base_offset")))
    probes = probes.withColumn("bucket", F.shiftright("probe", bits))
    return headers.unionByName(probes).withColumn("gone", F.lit(""))


def _empty_parts(session: SparkSession, partitions: Iterable[tuple[str, int]]) -> DataFrame:
    """Return a part for each partition that exists: even one without rows and batches has a row in the results."""
    empty = bytearray(pickle.dumps((0, PartitionPart())))
    rows = [(topic, partition, None, None, None, empty) for topic, partition in partitions]
    return session.createDataFrame(rows, PARTS)


def _with_all_parts(parts: DataFrame, sums: DataFrame) -> DataFrame:
    """Return the parts of windows, with the counts that depend on all parts added to one of them.

    A repeated batch counts in the last window in which either copy was acknowledged: the later acknowledgement is the
    wrong one. A change of ownership counts where it began.
    """
    no_part, no_copy = F.lit(None).cast("binary").alias("part"), F.lit(None).cast("long").alias("copy")
    copies = parts.where("copy is not null").groupBy(*PARTITION, "copy")
    counted = copies.agg(F.max("window_ms").alias("window_ms"), F.max("records").alias("records"))
    changes = sums.select(*PARTITION, F.explode("changes").alias("window_ms", "records"))
    return (
        parts.where("window_ms is not null and part is not null")
        .unionByName(counted.select("*", no_part))
        .unionByName(changes.select("*", no_part, no_copy))
    )


def _throughput(parts: DataFrame) -> DataFrame:
    """Return THROUGHPUT: records and bytes by window and owner."""
    of_windows = parts.where("window_ms is not null and part is not null").select("window_ms", "part")
    summed = of_windows.mapInArrow(flows, FLOWS).groupBy("window_ms", "owner")
    added = summed.agg(F.sum("records").alias("records"), F.sum("bytes").alias("bytes"))
    return added.select(F.timestamp_millis("window_ms").alias("window_start"), "owner", "records", "bytes")


@dataclass(frozen=True, slots=True)
class Tables:
    """The result tables, not collected.

    `columns.py` has the columns. `windows`: one row for each topic, partition and window of time.
    `partitions`: the same over all time. `findings`: one row for each fault or unproven time. `owners`: what each
    broker acknowledged, from when to when, under which ownership revision. `throughput`: records and bytes by window
    and owner.
    """

    windows: DataFrame
    partitions: DataFrame
    findings: DataFrame
    owners: DataFrame
    throughput: DataFrame

    def listed(self) -> list[Mapping[str, Any]]:
        return [row.asDict() for row in self.findings.collect()]

    def rows(self, table: str, only: Collection[tuple[str, int]] | None = None) -> Iterator[Mapping[str, Any]]:
        frame = getattr(self, table)
        if only is not None:
            numbers = defaultdict(list)
            for topic, partition in only:
                numbers[topic].append(partition)
            # A filter, with which Parquet skips files; no join.
            those = [(F.col("topic") == topic) & F.col("partition").isin(*each) for topic, each in numbers.items()]
            frame = frame.where(reduce(or_, those, F.lit(False)))
        times = [name for name, kind in frame.dtypes if kind == "timestamp"]
        frame = frame.withColumns({name: F.unix_millis(name) for name in times})
        return (row.asDict() for row in frame.toLocalIterator())

    def extent(self) -> tuple[int, int] | None:
        begin, end = (F.unix_millis(each) for each in (F.min("window_start"), F.max("window_end")))
        found = self.windows.agg(begin, end).first()
        return None if found is None or found[0] is None else tuple(found)


NAMES = tuple(field.name for field in fields(Tables))
SCHEMAS: Final = dict(zip(NAMES, map(ddl, (WINDOWS, PARTITIONS, FINDINGS, OWNERS, THROUGHPUT)), strict=True))


def write_results(tables: Tables, directory: str, about: Mapping[str, str]) -> None:
    """Write all tables to `directory`, a path or any address that Spark writes to, replacing earlier ones.

    `about` describes the audit. Raise SparkFailed.
    """
    rows = [(label, text) for label, text in about.items()]
    described = tables.partitions.sparkSession.createDataFrame(rows, "label string, text string").coalesce(1)
    with as_spark_failure(f"The audit's results could not be written to {directory}"):
        for name, frame in (*((name, getattr(tables, name)) for name in NAMES), (ABOUT, described)):
            frame.write.mode("overwrite").parquet(_place(directory, name))


def read_results(session: SparkSession, directory: str) -> Tables:
    """Return the tables in `directory`."""
    # Without a schema Spark would first read a file of each table.
    return Tables(**{name: session.read.schema(SCHEMAS[name]).parquet(_place(directory, name)) for name in NAMES})


def _place(directory: str, name: str) -> str:
    return f"{directory.rstrip('/') or '/'}/{name}"
