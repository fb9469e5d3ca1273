"""Run one audit on Spark: its tasks read the pieces of the trail and of the logs, and judge the buckets.

Data that is read several times is kept in files, in a directory beside the results, until the audit ends. There are
enough tasks for each to fit into memory.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException
from pyspark.sql.pandas.types import from_arrow_schema

from kproxy.errors import StartupError
from kproxy.pipeline.audit.bags import Bag, Step, by_task, groups_in, pickles_of, uncollected, values_in
from kproxy.pipeline.audit.columns import TABLES, arrow_schema
from kproxy.pipeline.audit.log_client import LogReadFailed
from kproxy.pipeline.audit.log_reader import LogRange
from kproxy.pipeline.audit.report_facts import Facts
from kproxy.pipeline.audit.report_gather import Limits, gather
from kproxy.pipeline.audit.run import AuditJob, audit_with
from kproxy.pipeline.audit.steps import Results
from kproxy.pipeline.audit.trail_place import JSON, PATTERNS, TrailPlace
from kproxy.pipeline.audit.trail_rows import closed_since, rows_of_lines, rows_of_parquet
from kproxy.pipeline.progress import JobsProgress, Report
from kproxy.pipeline.session import SessionOptions, open_session, ship_package
from kproxy.pipeline.spark import as_spark_failure, cloned, in_one_process, on_this_machine
from kproxy.trail.parquet_sink import SCHEMA
from kproxy.trail.signature import Signatures

# Spark ignores names that begin with `_`, so a reader of the results does not read what is kept.
_WORK = "_work"
# 2^18 offsets are usually some thousands of batches, and a quarter of a million at worst.
BUCKET_BITS: Final = 18
_BATCHES_PER_GROUP: Final = 200_000
_ITEMS_PER_TASK: Final = 200_000
_MAX_TASKS: Final = 10_000
# What a task reads of what is kept: some hundred thousand rows of a trail.
_BYTES_PER_TASK: Final = 16 << 20


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
    """Audit in an open session. Errors are those of `audit_on_spark`."""
    stage = display.stage("audit", "reading the trail")
    with ExitStack() as stack:
        output = job.output
        if output is None:
            output = tempfile.mkdtemp(prefix="kproxy-audit-")
            stack.callback(shutil.rmtree, output, ignore_errors=True)
        stack.enter_context(JobsProgress(session, stage))
        stack.enter_context(as_spark_failure("The audit failed"))
        engine = stack.enter_context(spark_in(session, f"{output.rstrip('/')}/{_WORK}"))
        with _readers_errors():
            audited = audit_with(engine, job, job.trail.signatures())
        if job.output is not None:
            write_results(session, audited.results, job.output, audited.about)
        facts = gather(audited.results, audited.about, limits)
    stage.finish(f"{facts.sums.acked:,} acknowledged records")
    return facts


@contextmanager
def _readers_errors() -> Iterator[None]:
    """Raise a task's LogReadFailed, which Spark wraps in its own error, as LogReadFailed."""
    try:
        yield
    except Py4JJavaError as error:
        if found := re.search("LogReadFailed: (.+)", str(error)):
            raise LogReadFailed(found[1]) from error
        raise


@contextmanager
def spark_in(session: Any, directory: str) -> Iterator[OnSpark]:
    """Yield an engine that keeps values in `directory`, which is removed at the end."""
    _remove(session, directory)
    try:
        yield OnSpark(session, directory)
    finally:
        _remove(session, directory)


def _remove(session: Any, directory: str) -> None:
    path, files = _file_system(session, directory)
    files.delete(path, True)


def _file_system(session: Any, directory: str) -> tuple[Any, Any]:
    """Return the path and its file system."""
    path = session._jvm.org.apache.hadoop.fs.Path(directory)
    return path, path.getFileSystem(session._jsc.hadoopConfiguration())


class OnSpark:
    """Read and judge in Spark's tasks."""

    def __init__(self, session: Any, directory: str) -> None:
        self.session = session
        self.directory = directory
        # The number of tasks after a shuffle.
        self.tasks = session.sparkContext.defaultParallelism

    def bag(self, values: Sequence[Any]) -> RddBag:
        """Return a bag with a part for each of `values`."""
        return RddBag(self, self.session.sparkContext.parallelize(values, max(1, len(values))))

    def read(self, pieces: Sequence[Sequence[LogRange]], step: Step) -> Bag:
        return self.bag(pieces).over(step).kept("read")

    def files(self, place: TrailPlace, from_ms: int | None, signatures: Signatures | None) -> Bag:
        """Read files at any address that Spark reads."""
        reader = self.session.read.option("pathGlobFilter", PATTERNS[place.kind])
        step: Step = rows_of_parquet
        try:
            if place.kind == JSON:
                files, step = reader.text(place.name), partial(rows_of_lines, signatures)
            else:
                # Fails if there are no files. Its schema is unused: others may have more columns, or wider numbers.
                reader.parquet(place.name)
                files = reader.schema(from_arrow_schema(SCHEMA)).parquet(place.name)
        except AnalysisException as error:
            raise StartupError(
                f"There is no audit trail in {place.name}: is it the directory of `--audit-sink`?"
            ) from error
        return RddBag(self, files.rdd).over(step).over(partial(closed_since, from_ms)).kept("read")

    def buckets(self, rows: int, batches: int) -> tuple[int, int]:
        self.tasks = min(max(self.tasks, (rows + batches) // _ITEMS_PER_TASK), _MAX_TASKS)
        return BUCKET_BITS, max(1, batches // _BATCHES_PER_GROUP)

    def parts_for(self, place: str) -> int:
        """Return the number of tasks that read what is kept at `place`."""
        path, files = _file_system(self.session, place)
        cores: int = self.session.sparkContext.defaultParallelism
        size: int = files.getContentSummary(path).getLength()
        return max(cores, size // _BYTES_PER_TASK)


class RddBag:
    """A bag of Spark, of the values of one or more RDDs. Values and steps go to executors as pickles.

    What is kept or grouped crosses as bytes, many values in one pickle (`bags.py`): Spark's own pickler takes several
    times as long for each value, and a group behind a union would pickle each value three times.
    """

    def __init__(self, engine: OnSpark, *rdds: Any) -> None:
        self.engine = engine
        self._rdds = rdds

    @property
    def rdd(self) -> Any:
        return self._rdds[0].context.union(list(self._rdds))

    def over(self, step: Step) -> RddBag:
        return RddBag(self.engine, *(rdd.mapPartitions(partial(uncollected, step)) for rdd in self._rdds))

    def grouped(self) -> RddBag:
        # Few are enough for the summaries, whose parts are few.
        tasks = min(self.engine.tasks, self.rdd.getNumPartitions())
        pickles = self.over(partial(by_task, tasks)).rdd
        return RddBag(self.engine, pickles.partitionBy(tasks, int)).over(groups_in)

    def kept(self, name: str) -> RddBag:
        pickles = self.over(pickles_of).rdd
        place = f"{self.engine.directory}/{name}-{pickles.id()}"
        pickles.saveAsPickleFile(place, batchSize=1)
        parts = self.engine.parts_for(place)
        return RddBag(self.engine, pickles.context.pickleFile(place, parts).coalesce(parts)).over(values_in)

    def plus(self, others: Iterable[Any]) -> RddBag:
        if not isinstance(others, RddBag):
            others = RddBag(self.engine, self._rdds[0].context.parallelize(list(others), 1))
        return RddBag(self.engine, *self._rdds, *others._rdds)

    def __iter__(self) -> Iterator[Any]:
        return values_in(self.over(pickles_of).rdd.collect())


def write_results(session: Any, results: Results, directory: str, about: Mapping[str, str]) -> None:
    """Write all tables to `directory`, a path or any address that Spark writes to, replacing earlier ones.

    Raise SparkFailed.
    """
    with as_spark_failure(f"The audit's results could not be written to {directory}"):
        for name, bag in results.tables(about):
            columns = tuple(TABLES[name])
            rows = bag.rdd if isinstance(bag, RddBag) else session.sparkContext.parallelize(list(bag), 1)
            schema = from_arrow_schema(arrow_schema(TABLES[name]))
            values = rows.map(lambda row, columns=columns: tuple(map(row.get, columns)))
            frame = session.createDataFrame(values, schema, verifySchema=False)
            frame.write.mode("overwrite").parquet(f"{directory.rstrip('/') or '/'}/{name}")
