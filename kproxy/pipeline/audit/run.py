"""Run one audit: check the sources, read the trail and the logs, judge, report.

A small audit runs in this process, a larger one on Spark (`run_spark.py`). Both run the same steps (`steps.py`), on an
`Engine` of their own. By default an audit begins in this process, and moves to Spark if it is too large or the user
names a cluster.

The order matters. The trail is read up to a fixed end before the logs' ends are read, so its records must be in the
logs; records acknowledged with acks=1 get some seconds to be replicated. The logs' beginnings are read last, so that
records removed by retention meanwhile are known.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from rich.console import Console

from kproxy import installed
from kproxy.errors import StartupError
from kproxy.pipeline.audit.bags import Bag, Here, Step, without_collector
from kproxy.pipeline.audit.judge import Bounds
from kproxy.pipeline.audit.log_client import (
    EARLIEST,
    LATEST,
    LogClient,
    LogReadFailed,
    TopicPartition,
    Unread,
    parse_bootstrap,
)
from kproxy.pipeline.audit.log_reader import LogRange
from kproxy.pipeline.audit.logs import (
    Chunk,
    LogTask,
    bounds_now,
    ends_behind,
    ends_of,
    existing,
    offsets_at,
    plan,
    tallied,
)
from kproxy.pipeline.audit.report_facts import TRAIL_READ, UNSIGNED, Facts
from kproxy.pipeline.audit.report_gather import Limits, gather
from kproxy.pipeline.audit.report_html import write_report
from kproxy.pipeline.audit.report_machine import as_json, write_metrics
from kproxy.pipeline.audit.report_text import show_table, utc
from kproxy.pipeline.audit.rules import WINDOW_MS, AuditRules
from kproxy.pipeline.audit.steps import WHOLE_BITS, Results, audit_bags
from kproxy.pipeline.audit.table_files import write_tables
from kproxy.pipeline.audit.trail_place import PATTERNS, TOPIC, TrailPlace
from kproxy.pipeline.audit.trail_reader import files_of, read_files
from kproxy.pipeline.audit.trail_rows import Acked, acked_in, rows_of_pages
from kproxy.pipeline.kafka_access import NO_OPTIONS, KafkaOptions
from kproxy.pipeline.preflight import check_report
from kproxy.pipeline.progress import Report, Stage
from kproxy.pipeline.session import is_submitted
from kproxy.pipeline.spark import pyspark_home
from kproxy.trail.signature import Signatures

if TYPE_CHECKING:
    from kproxy.pipeline.session import SessionOptions

# With a time to judge from, the trail is read from this long before it: a proxy that wrote rows then, and is silent
# since, may have acknowledged records that no row lists.
TRAIL_LOOKBACK_MS: Final = 86_400_000
# Logs are read from the first offset acknowledged this long before that time: its records may be in the log twice, if
# the producer sent them again within its delivery.timeout.ms.
LOG_LOOKBACK_MS: Final = 120_000
# The most rows judged in this process by default: about fifteen seconds of work, and less than a GiB.
MOST_ROWS: Final = 300_000
MOST_BATCHES: Final = 300_000
# The most bytes of batches, which are fetched whole to compute their checksums.
MOST_BYTES: Final = 1 << 30
# A page of a trail has up to some hundreds of rows.
PAGES_PER_PIECE: Final = 2_000
AUTO: Final = "auto"
LOCAL: Final = "local"
SPARK: Final = "spark"
NO_VERDICT: Final = 2
PATIENCE_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditJob:
    """The options of an audit: its source, its tables, and its rules.

    Addresses are `H:P[,H:P...]`, times in milliseconds since the epoch, `window_ms` a window's length. `bootstrap`: a
    proxy or the brokers, whose logs are read; `trail_bootstrap`: the cluster of the trail's topic, if another. `topics`
    empty: all in the trail; `deleted_topics`: topics of these names were deleted on purpose. `compacted`: the compacted
    topics, None to ask the brokers. `output`: a directory, or any address that Spark writes to and all executors reach,
    for the tables; None for none. `allow_unproven`: exit with 0 if nothing is wrong and something is unproven. `kafka`:
    options of Kafka's clients for both clusters. `engine`: LOCAL or SPARK, or AUTO to choose by size. `json`: print
    JSON and not a table. `metrics`: a file for a textfile collector.
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
    allow_unproven: bool = False
    json: bool = False
    metrics: Path | None = None
    kafka: KafkaOptions = NO_OPTIONS
    engine: str = AUTO

    @property
    def read_from_ms(self) -> int | None:
        """The time from which the trail is read; None for all of it."""
        return None if self.from_ms is None else max(0, self.from_ms - TRAIL_LOOKBACK_MS)

    def rules(self, read_at_ms: int, lookback_ms: int = TRAIL_LOOKBACK_MS) -> AuditRules:
        """Return the rules of an audit that reads the trail at `read_at_ms`, from `lookback_ms` before `from_ms`."""
        return AuditRules(
            read_at_ms=read_at_ms,
            topics=self.topics,
            deleted_topics=self.deleted_topics,
            from_ms=self.from_ms,
            read_from_ms=None if self.from_ms is None else max(0, self.from_ms - lookback_ms),
            to_ms=self.to_ms,
            window_ms=self.window_ms,
            shipping_ms=self.trail.shipping_ms,
        )


class TooLarge(Exception):
    """There is more to read than one process takes."""


class Engine(Protocol):
    """Reads and computes the data of an audit: in this process, or on Spark."""

    def read(self, pieces: Sequence[Sequence[LogRange]], step: Step) -> Bag:
        """Return what `step` yields for pieces of logs: TrailRows or Chunks. They are computed once."""
        ...

    def files(self, place: TrailPlace, from_ms: int | None, signatures: Signatures | None) -> Bag:
        """Return the rows of a trail in files, closed from `from_ms` on. They are computed once. Raise StartupError."""
        ...

    def buckets(self, rows: int, batches: int) -> tuple[int, int]:
        """Return how fine to cut so many rows and batches: `bits` and `groups` of `audit_bags`."""
        ...


@dataclass(frozen=True, slots=True)
class InProcess:
    """Read and judge in this process. If it `is_bounded`, raise TooLarge beyond MOST_ROWS and the other bounds."""

    is_bounded: bool = False

    def read(self, pieces: Sequence[Sequence[LogRange]], step: Step) -> Bag:
        return Here(self._limited(step(pieces)))

    def files(self, place: TrailPlace, from_ms: int | None, signatures: Signatures | None) -> Bag:
        return Here(self._limited(read_files(place, from_ms, signatures)))

    def buckets(self, rows: int, batches: int) -> tuple[int, int]:
        return WHOLE_BITS, 1

    def _limited(self, items: Iterable[Any]) -> Iterator[Any]:
        rows = batches = size = 0
        for item in items:
            if isinstance(item, Chunk):
                batches, size = batches + len(item.batches), size + item.size
            else:
                rows += 1
            if self.is_bounded and (rows > MOST_ROWS or batches > MOST_BATCHES or size > MOST_BYTES):
                raise TooLarge
            yield item


class Audited(NamedTuple):
    """`rows`: how many rows and batches were read."""

    results: Results
    about: Mapping[str, str]
    rows: int


def run_audit_job(job: AuditJob, spark: SessionOptions, *, display: Report | None = None) -> int:
    """Run the audit and return the exit status.

    Raise StartupError if it cannot start, LogReadFailed if brokers cannot be read, SparkFailed if Spark fails.
    """
    check(job)
    display = display or Report()
    with display:
        facts = audit(job, spark, display)
    status = facts.verdict.exit_status(allow_unproven=job.allow_unproven)
    # Print the result first, because writing the report may fail.
    if job.json:
        print(as_json(facts, status))  # noqa: T201 - the command's output
    else:
        show_table(facts, Console(highlight=False))
    if job.metrics is not None:
        write_metrics(facts, status, job.metrics)
    if job.report is not None:
        write_report(facts, job.report)
    if job.output is not None:
        display.say(f"Tables: {job.output}")
    if job.report is not None:
        display.say(f"Report: {job.report.resolve()}")
    return status


def audit(job: AuditJob, spark: SessionOptions | None, display: Report, limits: Limits | None = None) -> Facts:
    """Audit here, or on Spark if the audit is large or a cluster is named. Errors are those of `run_audit_job`.

    `spark` None: the engine is LOCAL. `limits` bounds what an audit in this process lists.
    """
    if _begins_here(job, spark):
        stage = display.stage("audit", "reading the trail")
        try:
            audited = audit_here(job, stage, is_bounded=job.engine == AUTO)
        except TooLarge:
            stage.finish("too large for one process")
        else:
            if job.output is not None:
                write_tables(audited.results, job.output, audited.about)
            facts = gather(audited.results, audited.about, limits)
            stage.finish(f"{facts.sums.acked:,} acknowledged records")
            return facts
    assert spark is not None  # noqa: S101 - as above
    pyspark_home()
    from kproxy.pipeline.audit.run_spark import audit_on_spark

    return audit_on_spark(job, spark, display)


def _begins_here(job: AuditJob, spark: SessionOptions | None) -> bool:
    is_elsewhere = any("://" in place for place in (job.trail.name, job.output or ""))
    is_cluster = spark is not None and (spark.master is not None or is_submitted())
    if job.engine == LOCAL and (is_elsewhere or is_cluster):
        raise StartupError(
            "--engine local reads files of this machine in this process: omit --master, spark-submit and ://."
        )
    return job.engine == LOCAL or (job.engine == AUTO and not is_elsewhere and not is_cluster)


@without_collector()
def audit_here(job: AuditJob, stage: Stage | None = None, *, is_bounded: bool = False) -> Audited:
    """Audit in this process. Errors are those of `InProcess` and `audit_with`."""
    signatures = job.trail.signatures()
    results, words, rows = audit_with(InProcess(is_bounded), job, signatures, stage)
    if signatures is not None:
        words = {**words, UNSIGNED: f"{signatures.refused:,}"}
    return Audited(results, words, rows)


def audit_with(engine: Engine, job: AuditJob, signatures: Signatures | None, stage: Stage | None = None) -> Audited:
    """Read the trail and the logs, and judge. Raise LogReadFailed or StartupError."""
    # Taken before the trail's end is fixed, because reading may take longer than a live proxy is silent.
    read_at_ms = int(time.time() * 1000)
    rows = _read_trail(engine, job, signatures)
    since_ms = 0 if job.from_ms is None else job.from_ms - LOG_LOOKBACK_MS
    acked = Acked()
    for part in rows.over(lambda rows: [acked_in(rows, since_ms)]):
        acked.add(part)
    log: Bag = Here()
    bounds: Mapping[TopicPartition, Bounds] = {}
    unread: Unread = {}
    batches = 0
    with LogClient(job.bootstrap, job.kafka) as client:
        topics = there(client, job) if job.topics else existing(client, {which.topic for which in acked.behind_one})
        if topics:
            if stage is not None:
                stage.say(f"reading the logs of {len(topics)} topics")
            ends = ends_behind(acked.behind_one, lambda: ends_of(client, topics, unread))
            pieces = plan(client, None if job.from_ms is None else acked.first, ends, unread=unread)
            log = engine.read(pieces, LogTask(job.bootstrap, job.kafka, client.leaders).headers)
            for which, count, reason in log.over(tallied):
                batches += count
                unread |= {} if reason is None else {which: reason}
            bounds = bounds_now(client, topics, job.compacted, unread)
    bits, groups = engine.buckets(acked.rows, batches)
    results = audit_bags(rows, log, bounds, job.rules(read_at_ms), unread, bits=bits, groups=groups)
    words = {**about(job), TRAIL_READ: f"{utc(read_at_ms)} UTC"}
    return Audited(results, words, acked.rows + batches)


def _read_trail(engine: Engine, job: AuditJob, signatures: Signatures | None) -> Bag:
    from_ms = job.read_from_ms
    if job.trail.kind != TOPIC:
        return engine.files(job.trail, from_ms, signatures)
    bootstrap = job.trail_bootstrap or job.bootstrap
    with LogClient(bootstrap, job.kafka) as client:
        try:
            ends = ends_of(client, (job.trail.name,))
            starts = None if from_ms is None else offsets_at(client, from_ms, ends)
        except LogReadFailed as error:
            raise StartupError(f"The audit trail could not be read: {error}") from error
        pieces = plan(client, starts, ends, PAGES_PER_PIECE)
        task = LogTask(bootstrap, job.kafka, client.leaders)
    return engine.read(pieces, lambda pieces: rows_of_pages(signatures, task.pages(pieces)))


def there(client: LogClient, job: AuditJob) -> tuple[str, ...]:
    """Return the named topics, without deleted ones that were not recreated."""
    deleted = set(job.topics) & set(job.deleted_topics)
    living = set(existing(client, deleted)) if deleted else set()
    return tuple(topic for topic in job.topics if topic not in deleted - living)


def check(job: AuditJob) -> None:
    """Check everything that needs no Spark. Raise StartupError."""
    if job.from_ms is not None and job.to_ms is not None and job.from_ms >= job.to_ms:
        raise StartupError("--from is not before --to: give an earlier --from or a later --to.")
    check_report(job.report)
    if job.engine == SPARK:
        pyspark_home()
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

    Without this check Spark would fail a minute later with a stack trace.
    """
    with _cluster(bootstrap, "--bootstrap", kafka) as (_, here):
        missing = sorted(set(topics) - here.keys())
        if missing:
            raise StartupError(f"There is no topic {missing[0]} at --bootstrap {bootstrap}: correct --topics.")
    if trail.kind == TOPIC:
        _check_topic(trail.name, trail_bootstrap, kafka)
    elif "://" not in trail.name:
        _check_files(trail)


def _check_topic(name: str, bootstrap: str, kafka: Mapping[str, str]) -> None:
    with _cluster(bootstrap, "--trail-bootstrap", kafka) as (client, there):
        partitions = [TopicPartition(name, index) for index in range(there.get(name, 0))]
        try:
            begin, end = (client.list_offsets(partitions, where) for where in (EARLIEST, LATEST))
        except LogReadFailed as error:
            raise StartupError(f"The trail in topic {name} cannot be read: {error}") from error
    if begin == end:
        state = f"topic {name} at {bootstrap} is empty" if partitions else f"there is no topic {name} at {bootstrap}"
        raise StartupError(f"No audit trail: {state}; start the proxies with --audit-sink topic, or give --trail.")


def _check_files(trail: TrailPlace) -> None:
    if not Path(trail.name).is_dir():
        raise StartupError(f"No audit trail: {trail.name} is not a directory; give --trail {trail.kind}:DIR.")
    if not files_of(trail):
        raise StartupError(f"No audit trail: {trail.name} has no file {PATTERNS[trail.kind]}.")


@contextmanager
def _cluster(bootstrap: str, flag: str, kafka: Mapping[str, str]) -> Iterator[tuple[LogClient, Mapping[str, int]]]:
    """Yield a client and the number of partitions by topic."""
    try:
        parse_bootstrap(bootstrap)
    except LogReadFailed as error:
        raise StartupError(f"{flag} {bootstrap} is not an address: give HOST:PORT of a kproxy or broker.") from error
    try:
        client = LogClient(bootstrap, kafka, timeout_s=PATIENCE_S, patience_s=PATIENCE_S)
    except LogReadFailed as error:
        raise StartupError(str(error)) from error
    with client:
        try:
            topics = client.partitions(None)
        except LogReadFailed as error:
            raise StartupError(f"No Kafka answers at {flag} {bootstrap}: {error}") from error
        yield client, topics


def about(job: AuditJob) -> Mapping[str, str]:
    """Describe the audit for the foot of a report."""
    facts = {"logs": job.bootstrap, "trail": f"{job.trail.kind}:{job.trail.name}"}
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


def _time(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
