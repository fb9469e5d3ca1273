"""Run one audit on Spark: read the trail and the logs, write the tables, and reduce them to a report's facts.

Tables that are read several times are kept in Parquet files, and there are enough shuffle partitions for each task to
work in memory. The result tables are on disk before the report, so that it can be made again.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses

from kproxy.errors import StartupError
from kproxy.pipeline.audit.columns import BOUNDS, LOG, ddl
from kproxy.pipeline.audit.log_client import LogClient, Offsets, TopicPartition, Unread
from kproxy.pipeline.audit.logs import bounds_now, ends_behind, ends_of, existing, plan
from kproxy.pipeline.audit.report_facts import TRAIL_READ, Facts
from kproxy.pipeline.audit.report_gather import Limits, gather
from kproxy.pipeline.audit.report_text import utc
from kproxy.pipeline.audit.run import LOG_LOOKBACK_MS, AuditJob, about, there, trail_offsets
from kproxy.pipeline.audit.spark_tasks import PAGES, Pieces
from kproxy.pipeline.audit.tables import (
    Land,
    audit_tables,
    read_results,
    write_results,
)
from kproxy.pipeline.audit.trail import read_files, rows_of
from kproxy.pipeline.audit.trail_place import TOPIC
from kproxy.pipeline.progress import JobsProgress, Report
from kproxy.pipeline.session import SessionOptions, open_session, ship_package
from kproxy.pipeline.spark import as_spark_failure, cloned, in_one_process, on_this_machine

# Spark ignores names that begin with `_`, so a reader of the results does not read intermediate tables.
_WORK = "_work"
_BEHIND_LAST: Final = "element_at(spans, -2) + element_at(spans, -1)"
_UNREAD: Final = ("topic", "partition", "unread")
_SHUFFLE_PARTITIONS: Final = "spark.sql.shuffle.partitions"
# About 60 MB, with two endpoints for each row.
_ROWS_PER_TASK: Final = 300_000
_MAX_PARTITIONS: Final = 10_000
# A page of a trail has up to some hundreds of rows.
PAGES_PER_PIECE: Final = 2_000


def audit_on_spark(job: AuditJob, spark: SessionOptions, display: Report) -> Facts:
    """Audit in a session of its own. Raise SparkFailed, StartupError or LogReadFailed."""
    if spark.master is not None:
        _check_output(job, spark.master)
    stage = display.stage("Spark", "starting")
    with open_session(spark) as opened:
        session = opened.session
        where = session.sparkContext.master
        stage.finish(f"version {session.version}, {where}")
        _check_output(job, where)
        return audit_in(session, job, display)


def _check_output(job: AuditJob, master: str) -> None:
    if job.output is None and not on_this_machine(master):
        raise StartupError(
            f"On a cluster ({master}) the tables need a place that all its machines reach: give --output DIR."
        )


def audit_in_copy(session: Any, job: AuditJob, display: Report, limits: Limits) -> Facts:
    """Audit in a copy of a program's session, whose settings stay as they are. Errors are those of `audit_on_spark`."""
    if not hasattr(session, "_jsparkSession"):
        raise StartupError("an audit needs a session with its own driver, not Spark Connect: leave the session out.")
    where = session.sparkContext.master
    _check_output(job, where)
    if not in_one_process(where):
        ship_package(session)
    return audit_in(cloned(session), job, display, limits)


def audit_in(session: Any, job: AuditJob, display: Report, limits: Limits | None = None) -> Facts:
    """Audit in an open session. Errors are those of `audit_on_spark`.

    Intermediate tables are in a directory beside the results until the end.
    """
    stage = display.stage("audit", "reading the trail")
    with ExitStack() as stack:
        output = job.output
        if output is None:
            output = tempfile.mkdtemp(prefix="kproxy-audit-")
            stack.callback(shutil.rmtree, output, ignore_errors=True)
        stack.enter_context(JobsProgress(session, stage))
        stack.enter_context(as_spark_failure("The audit failed"))
        land = stack.enter_context(work_in(session, f"{output.rstrip('/')}/{_WORK}"))
        # Before the trail's end is fixed: reading may take longer than a live proxy is silent.
        read_at_ms = int(time.time() * 1000)
        rows = land("rows", _read_trail(session, job))
        with LogClient(job.bootstrap, job.kafka) as client:
            log, bounds, unread = _read_logs(session, client, job, rows, land)
        words = {**about(job), TRAIL_READ: f"{utc(read_at_ms)} UTC"}
        with fitted(session, rows.count() + log.count()):
            write_results(audit_tables(rows, log, bounds, job.rules(read_at_ms), land, unread=unread), output, words)
            facts = gather(read_results(session, output), words, limits)
    stage.finish(f"{facts.sums.acked:,} acknowledged records")
    return facts


def _read_trail(session: Any, job: AuditJob) -> DataFrame:
    if job.trail.kind != TOPIC:
        return read_files(session, job.trail, from_ms=job.read_from_ms)
    bootstrap = job.trail_bootstrap or job.bootstrap
    with LogClient(bootstrap, job.kafka) as client:
        starts, ends = trail_offsets(client, job)
        pieces = Pieces(bootstrap, job.kafka, plan(client, starts or None, ends, PAGES_PER_PIECE), client.leaders)
    pages = _numbers(session, pieces).mapInArrow(lambda numbers: pieces.pages(numbers), PAGES)
    return rows_of(pages, job.trail.keys)


def _numbers(session: Any, pieces: Pieces) -> DataFrame:
    """Return the number of each piece, in a task of its own."""
    count = len(pieces.pieces)
    numbers: DataFrame = session.range(0, count, 1, max(1, count))
    return numbers


def _read_logs(
    session: Any, client: LogClient, job: AuditJob, rows: DataFrame, land: Land
) -> tuple[DataFrame, DataFrame, Unread]:
    """Return the logs' headers and bounds; topics deleted since the trail was written have none."""
    unread: Unread = {}
    if job.topics:
        topics = there(client, job)
    else:
        named = rows.where("topic is not null").select("topic").distinct().collect()
        topics = existing(client, {row.topic for row in named})
    if not topics:
        return session.createDataFrame([], ddl(LOG)), session.createDataFrame([], ddl(BOUNDS)), unread
    ends = ends_behind(acknowledged_by_one(rows), lambda: ends_of(client, topics, unread))
    first = None if job.from_ms is None else first_acknowledged(rows, job.from_ms - LOG_LOOKBACK_MS)
    log = land("log", read_log(session, client, job, first, ends, unread=unread))
    unread |= {TopicPartition(*row[:2]): row[2] for row in log.where("unread is not null").select(*_UNREAD).collect()}
    bounds = bounds_now(client, topics, job.compacted, unread)
    return log, session.createDataFrame([(*which, *each) for which, each in bounds.items()], ddl(BOUNDS)), unread


def read_log(
    session: Any,
    client: LogClient,
    job: AuditJob,
    first: Offsets | None,
    ends: Offsets,
    most: int | None = None,
    unread: Unread | None = None,
) -> DataFrame:
    """Return LOG: the headers of the batches that `plan` names, read by a task for each piece."""
    pieces = Pieces(job.bootstrap, job.kafka, plan(client, first, ends, most, unread), client.leaders)
    return _numbers(session, pieces).mapInArrow(lambda numbers: pieces.headers(numbers), ddl(LOG))


@contextmanager
def work_in(session: Any, directory: str) -> Iterator[Land]:
    """Yield a `Land` that writes tables to Parquet files, which need no memory and are read by column."""

    def land(name: str, frame: DataFrame) -> DataFrame:
        place = f"{directory}/{name}"
        frame.write.mode("overwrite").parquet(place)
        return session.read.schema(frame.schema).parquet(place)

    try:
        yield land
    finally:
        jvm = session._jvm
        path = jvm.org.apache.hadoop.fs.Path(directory)
        path.getFileSystem(session._jsc.hadoopConfiguration()).delete(path, True)


@contextmanager
def fitted(session: Any, rows: int) -> Iterator[None]:
    """Use enough shuffle partitions for `rows` rows while the block runs: Spark merges small ones, but splits none."""
    before = session.conf.get(_SHUFFLE_PARTITIONS)
    needed = min(rows // _ROWS_PER_TASK, _MAX_PARTITIONS)
    session.conf.set(_SHUFFLE_PARTITIONS, str(max(int(before), needed)))
    try:
        yield
    finally:
        session.conf.set(_SHUFFLE_PARTITIONS, before)


def acknowledged_by_one(rows: DataFrame) -> dict[TopicPartition, int]:
    """Return, by partition, the offset after the last one that the trail has as acknowledged with acks=1."""
    ranges = rows.where("kind = 'range' and acks = 1")
    behind = ranges.groupBy("topic", "partition").agg(F.max(F.expr(_BEHIND_LAST)).alias("behind"))
    return {TopicPartition(row.topic, row.partition): row.behind for row in behind.collect()}


# The lowest first offset of a row's spans.
_FIRST_OFFSET: Final = "array_min(filter(spans, (each, index) -> index % 2 = 0))"


def first_acknowledged(rows: DataFrame, since_ms: int) -> dict[TopicPartition, int]:
    """Return, by partition, the lowest offset that the trail has as acknowledged at `since_ms` or later."""
    ranges = rows.where((F.col("kind") == "range") & (F.col("last_acked_at") >= since_ms))
    firsts = ranges.groupBy("topic", "partition").agg(F.min(F.expr(_FIRST_OFFSET)).alias("first"))
    return {TopicPartition(row.topic, row.partition): row.first for row in firsts.collect()}
