"""Run one audit: check the sources, read the trail and the logs, write the tables, report.

States of the command: CHECKING (nothing started) -> STARTING (Spark) -> AUDITING -> REPORTING -> DONE. The tables are
on disk before the report, so that it can be made again.

The order matters. The trail is read up to a fixed end before the ends of the logs are looked up, so its records must be
in the logs; records acknowledged with acks=1 get some seconds to be replicated. The logs' beginnings are looked up
last, so that what retention removes meanwhile is known.

Large audits use enough shuffle partitions for each task to work in memory, and keep tables that are read several times
in Parquet files. For small audits Spark would spend most of its time on compiling, replanning, empty tasks and files:
they are interpreted, in one partition, in memory.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses
from rich.console import Console

from kproxy import installed
from kproxy.config.parsing import is_topic_name
from kproxy.errors import StartupError
from kproxy.pipeline.audit.coverage import Land
from kproxy.pipeline.audit.log_client import EARLIEST, LATEST, LogClient, LogReadFailed, TopicPartition
from kproxy.pipeline.audit.log_options import Offsets, offsets_as_json, parse_bootstrap, parse_offsets
from kproxy.pipeline.audit.log_source import bounds_now, fix_ends, fix_starts, read_log, read_short_log
from kproxy.pipeline.audit.report_facts import TRAIL_READ, Facts, gather
from kproxy.pipeline.audit.report_html import write_report
from kproxy.pipeline.audit.report_text import show_table, utc
from kproxy.pipeline.audit.schemas import BOUNDS_SCHEMA, LOG_SCHEMA
from kproxy.pipeline.audit.tables import (
    NAMES,
    WINDOW_MS,
    AuditRules,
    Tables,
    audit_tables,
    read_results,
    write_results,
)
from kproxy.pipeline.audit.trail import JSON, PARQUET, TOPIC, TrailPlace, read_files, read_topic
from kproxy.pipeline.kafka_access import NO_OPTIONS, KafkaOptions
from kproxy.pipeline.preflight import check_report
from kproxy.pipeline.progress import JobsProgress, Report
from kproxy.pipeline.session import SessionOptions, open_session
from kproxy.pipeline.spark import as_spark_failure, in_one_process, on_this_machine

# Spark's readers ignore names that begin with `_`, so readers of the results do not read intermediate tables.
_WORK = "_work"
# With a time to judge from, the trail is read from this long before it: a proxy that was heard of then, and is silent
# since, may have acknowledged records that no row lists.
TRAIL_LOOKBACK_MS: Final = 86_400_000
# And logs are read from the first offset acknowledged this long before it: records of that time may be in the log
# twice, if the producer sent them again within its delivery.timeout.ms.
LOG_LOOKBACK_MS: Final = 120_000
TOPICS_TIMEOUT_S: Final = 5.0
ENDS_PATIENCE_S: Final = 5.0
_PAUSE_S: Final = 0.25
_BEHIND_LAST: Final = "element_at(spans, -2) + element_at(spans, -1)"
# Rows of the trail and batches of the log. Up to here compiling takes more time than it saves.
FEW: Final = 50_000
_SHUFFLE_PARTITIONS: Final = "spark.sql.shuffle.partitions"
_FOR_FEW: Final = {
    _SHUFFLE_PARTITIONS: "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
# About 60 MB, with two endpoints for each row.
_ROWS_PER_TASK: Final = 300_000
_MAX_PARTITIONS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditJob:
    """The options of an audit: its source, its tables, and its rules.

    Addresses are `H:P[,H:P...]`, times in milliseconds since the epoch, `window_ms` a window's length. `bootstrap`: a
    proxy or the brokers, whose logs are read; `trail_bootstrap`: the cluster of the trail's topic, if another. `topics`
    empty: all in the trail; `deleted_topics`: topics of these names were deleted on purpose. `compacted`: the compacted
    topics, None to ask the brokers. `output`: a directory, or any address that Spark writes to and all executors reach,
    for the tables; None for a temporary directory. `strict`: exit with 1 also if something is unproven. `kafka`:
    options of Kafka's clients for both clusters.
    """

    bootstrap: str
    trail: TrailPlace
    trail_bootstrap: str | None = None
    topics: tuple[str, ...] = ()
    deleted_topics: tuple[str, ...] = ()
    from_ms: int | None = None
    to_ms: int | None = None
    window_ms: int = WINDOW_MS
    compacted: tuple[str, ...] | None = None
    output: str | None = None
    report: Path | None = None
    strict: bool = False
    kafka: KafkaOptions = NO_OPTIONS


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The tables and their `about`, as written. `rows`: how many rows and batches were read."""

    tables: Tables
    about: Mapping[str, str]
    rows: int


def run_audit(session: Any, job: AuditJob, output: str, about: Mapping[str, str]) -> AuditResult:
    """Audit once, and write the tables to `output`.

    Raise StartupError if there is nothing to read, else SparkFailed or LogReadFailed. `about` is stored with the
    results. Intermediate tables are in a directory beside them until the end.
    """
    with as_spark_failure("The audit failed"), work_in(session, f"{output.rstrip('/')}/{_WORK}") as land:
        # Before the trail's end is fixed: reading may take longer than a live proxy is silent.
        read_at_ms = int(time.time() * 1000)
        rows = land("rows", _read_trail(session, job))
        topics = _there(job) if job.topics else _topics_of(rows, job)
        log, bounds = _read_logs(session, job, topics, rows, land)
        rules = AuditRules(
            read_at_ms=read_at_ms,
            topics=job.topics,
            deleted_topics=job.deleted_topics,
            from_ms=job.from_ms,
            read_from_ms=_read_from_ms(job),
            to_ms=job.to_ms,
            window_ms=job.window_ms,
            shipping_ms=job.trail.shipping_ms,
        )
        words = {**about, TRAIL_READ: f"{utc(read_at_ms)} UTC"}
        amount, tables = judge(session, rows, log, bounds, rules, land, output, words)
    return AuditResult(tables, words, amount)


def judge(
    session: Any,
    rows: DataFrame,
    log: DataFrame,
    bounds: DataFrame,
    rules: AuditRules,
    land: Land,
    output: str,
    about: Mapping[str, str],
) -> tuple[int, Tables]:
    """Audit the inputs and write the tables to `output`. Return the number of input rows, and the tables."""
    inputs = (rows, log, bounds)
    amount = rows.count() + log.count()
    in_memory = stays_in_memory(session, amount)
    with fitted(session, amount):
        if in_memory:
            rows, log, bounds = (keep("", frame) for frame in inputs)
        tables = audit_tables(rows, log, bounds, rules, keep if in_memory else land)
        if in_memory:
            tables = Tables(*(keep(name, getattr(tables, name)) for name in NAMES))
        write_results(tables, output, about)
    return amount, tables if in_memory else read_results(session, output)[0]


def _read_trail(session: Any, job: AuditJob) -> DataFrame:
    place, from_ms = job.trail, _read_from_ms(job)
    if place.kind != TOPIC:
        return read_files(session, place, from_ms=from_ms)
    bootstrap, topics, starts = job.trail_bootstrap or job.bootstrap, (place.name,), "earliest"
    try:
        ends = fix_ends(bootstrap, topics=topics, kafka=job.kafka)
        if from_ms is not None:
            starts = fix_starts(bootstrap, topics=topics, from_ms=from_ms, ends=ends, kafka=job.kafka)
    except LogReadFailed as error:
        raise StartupError(f"The audit trail could not be read: {error}") from error
    return read_topic(session, place.name, bootstrap=bootstrap, starts=starts, ends=ends, kafka=job.kafka)


def _read_from_ms(job: AuditJob) -> int | None:
    return None if job.from_ms is None else max(0, job.from_ms - TRAIL_LOOKBACK_MS)


def _there(job: AuditJob) -> tuple[str, ...]:
    """Return the named topics without deleted ones that were not created anew."""
    deleted = set(job.topics) & set(job.deleted_topics)
    living = set(existing(job.bootstrap, deleted, job.kafka)) if deleted else set()
    return tuple(topic for topic in job.topics if topic not in deleted - living)


def _topics_of(rows: DataFrame, job: AuditJob) -> tuple[str, ...]:
    """Return the trail's topics that exist."""
    named = rows.where("topic is not null").select("topic").distinct().collect()
    return existing(job.bootstrap, {row.topic for row in named}, job.kafka)


def existing(bootstrap: str, topics: Collection[str], kafka: Mapping[str, str] = NO_OPTIONS) -> tuple[str, ...]:
    """Return those of `topics` that exist, sorted.

    A topic that Metadata does not list may be hidden, so brokers are asked for it by name and must deny that it exists.
    Raise LogReadFailed, for example if a topic may not be read.
    """
    with LogClient(
        parse_bootstrap(bootstrap),
        timeout_s=TOPICS_TIMEOUT_S,
        patience_s=2 * TOPICS_TIMEOUT_S,
        kafka=kafka,
    ) as client:
        there = set(topics) & client.partitions(None).keys()
        hidden = [topic for topic in topics if topic not in there and is_topic_name(topic)]
        if hidden:
            there |= client.partitions_if_any(hidden).keys()
    return tuple(sorted(there))


def _read_logs(
    session: Any, job: AuditJob, topics: tuple[str, ...], rows: DataFrame, land: Land
) -> tuple[DataFrame, DataFrame]:
    """Return the logs' headers and bounds; topics deleted since the trail was written have none."""
    if not topics:
        return session.createDataFrame([], LOG_SCHEMA), session.createDataFrame([], BOUNDS_SCHEMA)
    acknowledged = acknowledged_by_one(rows)
    ends = ends_behind(acknowledged, lambda: fix_ends(job.bootstrap, topics=topics, kafka=job.kafka))
    starts = None
    if job.from_ms is not None:
        starts = starts_at_or_before(first_acknowledged(rows, job.from_ms - LOG_LOOKBACK_MS), ends)
    read: dict[str, Any] = {"topics": topics, "start_offsets": starts, "end_offsets": ends, "kafka": job.kafka}
    log = read_short_log(session, job.bootstrap, **read)
    if log is None:
        log = land("log", read_log(session, job.bootstrap, **read))
    bounds = bounds_now(job.bootstrap, topics=topics, compacted=job.compacted, kafka=job.kafka)
    return log, session.createDataFrame(bounds, BOUNDS_SCHEMA)


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
    """Set the session's settings for an audit of `rows` rows while the block runs."""
    wanted = _FOR_FEW if rows <= FEW else _for_many(session, rows)
    before = {name: session.conf.get(name) for name in wanted}
    try:
        for name, value in wanted.items():
            session.conf.set(name, value)
        yield
    finally:
        for name, value in before.items():
            session.conf.set(name, value)


def _for_many(session: Any, rows: int) -> Mapping[str, str]:
    """Return enough shuffle partitions, at least the session's number: Spark joins small ones, but splits none."""
    needed = min(rows // _ROWS_PER_TASK, _MAX_PARTITIONS)
    return {_SHUFFLE_PARTITIONS: str(max(int(session.conf.get(_SHUFFLE_PARTITIONS)), needed))}


def stays_in_memory(session: Any, rows: int) -> bool:
    """Return whether `keep` is right for so many rows; never if an executor may be lost with its memory."""
    return rows <= FEW and in_one_process(session.sparkContext.master)


def keep(_: str, frame: DataFrame) -> DataFrame:
    """Keep a table in memory until it is garbage: a `Land`. One partition needs no shuffle to group or join."""
    return frame.coalesce(1).localCheckpoint()


def acknowledged_by_one(rows: DataFrame) -> dict[TopicPartition, int]:
    """Return, by partition, the offset after the last one that the trail has as acknowledged with acks=1."""
    ranges = rows.where("kind = 'range' and acks = 1")
    behind = ranges.groupBy("topic", "partition").agg(F.max(F.expr(_BEHIND_LAST)).alias("behind"))
    return {TopicPartition(row.topic, row.partition): row.behind for row in behind.collect()}


def ends_behind(
    acknowledged: Offsets,
    ask: Callable[[], str],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Call `ask` until the ends (as of `log_source.fix_ends`) reach `acknowledged`, for at most ENDS_PATIENCE_S.

    Records acknowledged with acks=1 become readable a little later. Partitions that `ask` does not return are not
    awaited. Errors are those of `ask`.
    """
    deadline = clock() + ENDS_PATIENCE_S
    while True:
        text = ask()
        _, ends = parse_offsets(text, "endOffsets")
        if clock() >= deadline or all(ends.get(which, behind) >= behind for which, behind in acknowledged.items()):
            return text
        sleep(_PAUSE_S)


# The lowest first offset of a row's spans.
_FIRST_OFFSET: Final = "array_min(filter(spans, (each, index) -> index % 2 = 0))"


def first_acknowledged(rows: DataFrame, since_ms: int) -> dict[TopicPartition, int]:
    """Return, by partition, the lowest offset that the trail has as acknowledged at `since_ms` or later."""
    return first_offsets(rows.where((F.col("kind") == "range") & (F.col("last_acked_at") >= since_ms)))


def first_offsets(ranges: DataFrame) -> dict[TopicPartition, int]:
    """Return, by partition, the lowest offset in a trail's rows of kind `range`."""
    firsts = ranges.groupBy("topic", "partition").agg(F.min(F.expr(_FIRST_OFFSET)).alias("first"))
    return {TopicPartition(row.topic, row.partition): row.first for row in firsts.collect()}


def starts_at_or_before(first: Offsets, ends: str) -> str:
    """Return where to start reading, as JSON like `ends`: at the `first` offset needed, else at the end."""
    _, behind = parse_offsets(ends, "endOffsets")
    return offsets_as_json({which: min(first.get(which, end), end) for which, end in behind.items()})


NO_VERDICT: Final = 2
PATIENCE_S: Final = 5.0
_ENDINGS: Final = {JSON: ".jsonl", PARQUET: ".parquet"}


def run_audit_job(job: AuditJob, spark: SessionOptions, *, display: Report | None = None) -> int:
    """Run the audit and return the exit status. Raise StartupError if it cannot start, SparkFailed if Spark fails."""
    if spark.master is not None:
        _check_output(job, spark.master)
    check(job)
    display = display or Report()
    with display:
        stage = display.stage("Spark", "starting")
        with open_session(spark) as opened:
            session = opened.session
            where = session.sparkContext.master
            stage.finish(f"version {session.version}, {where}")
            _check_output(job, where)
            facts = audit(session, job, display)
    # Show the result before writing the report, which may fail.
    show_table(facts, Console(highlight=False))
    if job.report is not None:
        write_report(facts, job.report)
    if job.output is not None:
        display.say(f"Tables: {job.output}")
    if job.report is not None:
        display.say(f"Report: {job.report.resolve()}")
    return facts.verdict.exit_status(strict=job.strict)


def _check_output(job: AuditJob, master: str) -> None:
    if job.output is None and not on_this_machine(master):
        raise StartupError(
            f"On a cluster ({master}) the tables need a place that all its machines reach: give --output DIR."
        )


def check(job: AuditJob) -> None:
    """Check everything that needs no Spark. Raise StartupError."""
    if job.from_ms is not None and job.to_ms is not None and job.from_ms >= job.to_ms:
        raise StartupError("--from is not before --to: nothing lies between them.")
    check_report(job.report)
    there = tuple(topic for topic in job.topics if topic not in job.deleted_topics)
    check_places(job.bootstrap, job.trail, job.trail_bootstrap or job.bootstrap, there, job.kafka)


def check_places(
    bootstrap: str,
    trail: TrailPlace,
    trail_bootstrap: str,
    topics: Sequence[str],
    kafka: Mapping[str, str] = NO_OPTIONS,
) -> None:
    """Raise StartupError if nothing answers, there is no trail, or a topic is missing.

    A sentence now is better than Spark's stack trace in a minute.
    """
    here = _topics(bootstrap, "--bootstrap", kafka)
    missing = sorted(set(topics) - here.keys())
    if missing:
        raise StartupError(f"There is no topic {missing[0]} at --bootstrap {bootstrap}: see what --topics names.")
    if trail.kind == TOPIC:
        _check_topic(trail.name, trail_bootstrap, kafka)
    elif "://" not in trail.name:
        _check_files(trail)


def _check_topic(name: str, bootstrap: str, kafka: Mapping[str, str]) -> None:
    there = _topics(bootstrap, "--trail-bootstrap", kafka)
    partitions = [TopicPartition(name, index) for index in range(there.get(name, 0))]
    with _client(bootstrap, "--trail-bootstrap", kafka) as client:
        try:
            begin = client.list_offsets(partitions, EARLIEST)
            end = client.list_offsets(partitions, LATEST)
        except LogReadFailed as error:
            raise StartupError(f"The trail in topic {name} cannot be read: {error}") from error
    if begin == end:
        state = f"topic {name} at {bootstrap} is empty" if partitions else f"there is no topic {name} at {bootstrap}"
        raise StartupError(f"No audit trail: {state}; start the proxies with --audit-sink topic, or give --trail.")


def _check_files(trail: TrailPlace) -> None:
    directory, ending = Path(trail.name), _ENDINGS[trail.kind]
    if not directory.is_dir():
        raise StartupError(f"No audit trail: {directory} is no directory; give --trail {trail.kind}:DIR.")
    if not any(directory.glob(f"*{ending}")):
        raise StartupError(f"No audit trail: {directory} has no file *{ending}.")


def _topics(bootstrap: str, flag: str, kafka: Mapping[str, str]) -> dict[str, int]:
    """Return the number of partitions by topic."""
    with _client(bootstrap, flag, kafka) as client:
        try:
            return dict(client.partitions(None))
        except LogReadFailed as error:
            raise StartupError(f"No Kafka answers at {flag} {bootstrap}: {error}") from error


def _client(bootstrap: str, flag: str, kafka: Mapping[str, str]) -> LogClient:
    try:
        addresses = parse_bootstrap(bootstrap)
    except LogReadFailed as error:
        raise StartupError(f"{flag} {bootstrap} is no address: give HOST:PORT of a kproxy or of a broker.") from error
    try:
        return LogClient(addresses, timeout_s=PATIENCE_S, patience_s=PATIENCE_S, kafka=kafka)
    except LogReadFailed as error:
        raise StartupError(str(error)) from error


def audit(session: Any, job: AuditJob, display: Report) -> Facts:
    """Audit in an open session. Raise SparkFailed or StartupError."""
    with ExitStack() as stack:
        output = job.output
        if output is None:
            output = tempfile.mkdtemp(prefix="kproxy-audit-")
            stack.callback(shutil.rmtree, output, ignore_errors=True)
        stage = display.stage("audit", "reading the trail")
        with JobsProgress(session, stage):
            result = run_audit(session, job, output, about(job))
            with fitted(session, result.rows):
                facts = gather(result.tables, result.about)
        stage.finish(f"{facts.sums.acked:,} acknowledged records")
        return facts


def about(job: AuditJob) -> Mapping[str, str]:
    """Describe the audit for the foot of a report."""
    facts = {"logs": job.bootstrap, "trail": _text(job.trail)}
    if job.topics:
        facts["topics"] = ", ".join(job.topics)
    if job.deleted_topics:
        facts["deleted topics"] = ", ".join(job.deleted_topics)
    if job.from_ms is not None:
        facts["from"] = _time(job.from_ms)
        trail, logs = (timedelta(milliseconds=ms) for ms in (TRAIL_LOOKBACK_MS, LOG_LOOKBACK_MS))
        facts["read"] = f"trails from {trail} before, logs from the first offset acknowledged {logs} before"
    if job.to_ms is not None:
        facts["to"] = _time(job.to_ms)
    return facts | {
        "windows": f"{job.window_ms / 1000:g} s",
        "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC by kproxy {installed.version()}",
    }


def _text(place: TrailPlace) -> str:
    return f"{place.kind}:{place.name}"


def _time(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
