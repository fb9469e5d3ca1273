"""Run one audit: check the sources, read the trail and the logs, judge, report.

A small audit is done in this process (`in_process.py`), a larger one on Spark (`run_spark.py`); both call the same
judge. By default an audit begins in this process, and moves to Spark if it is too large or the user names a cluster.

The order matters. The trail is read up to a fixed end before the logs' ends are read, so its records must be in the
logs; records acknowledged with acks=1 get some seconds to be replicated. The logs' beginnings are read last, so that
records removed by retention meanwhile are known.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

from kproxy import installed
from kproxy.errors import StartupError
from kproxy.pipeline.audit.in_process import Results, audit_rows
from kproxy.pipeline.audit.judge import Batch, Bounds
from kproxy.pipeline.audit.log_client import (
    EARLIEST,
    LATEST,
    LogClient,
    LogReadFailed,
    Offsets,
    TopicPartition,
    Unread,
    parse_bootstrap,
)
from kproxy.pipeline.audit.logs import (
    TooLarge,
    bounds_now,
    ends_behind,
    ends_of,
    existing,
    offsets_at,
    read_headers,
)
from kproxy.pipeline.audit.report_facts import TRAIL_READ, UNSIGNED, Facts
from kproxy.pipeline.audit.report_gather import Limits, gather
from kproxy.pipeline.audit.report_html import write_report
from kproxy.pipeline.audit.report_machine import as_json, write_metrics
from kproxy.pipeline.audit.report_text import show_table, utc
from kproxy.pipeline.audit.rules import WINDOW_MS, AuditRules
from kproxy.pipeline.audit.trail_place import JSON, PARQUET, TOPIC, TrailPlace
from kproxy.pipeline.audit.trail_reader import read_files, read_topic
from kproxy.pipeline.audit.trail_rows import TrailRow
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
AUTO: Final = "auto"
LOCAL: Final = "local"
SPARK: Final = "spark"
NO_VERDICT: Final = 2
PATIENCE_S: Final = 5.0
_ENDINGS: Final = {JSON: ".jsonl", PARQUET: ".parquet"}


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


@dataclass(frozen=True, slots=True)
class Audited:
    """An audit in this process. `rows`: how many rows and batches were read."""

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

    `spark` None: the engine is LOCAL. `limits` bounds what is listed.
    """
    if _begins_here(job, spark):
        stage = display.stage("audit", "reading the trail")
        try:
            audited = audit_here(job, stage, is_bounded=job.engine == AUTO)
        except TooLarge:
            stage.finish("too large for one process")
        else:
            if job.output is not None:
                audited.results.write(job.output, audited.about)
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
            "--engine local runs in this process with files of this machine: drop --master, spark-submit and ://."
        )
    return job.engine == LOCAL or (job.engine == AUTO and not is_elsewhere and not is_cluster)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Switch off the garbage collector, which finds no cycles among a million rows and takes a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_without_collector()
def audit_here(job: AuditJob, stage: Stage | None = None, *, is_bounded: bool = False) -> Audited:
    """Audit in this process. Raise TooLarge beyond MOST_ROWS and the other bounds, if the audit `is_bounded`."""
    # Taken before the trail's end is fixed, because reading may take longer than a live proxy is silent.
    read_at_ms = int(time.time() * 1000)
    rows: list[TrailRow] = []
    signatures = job.trail.signatures()
    for row in _read_trail(job, signatures):
        rows.append(row)
        if is_bounded and len(rows) > MOST_ROWS:
            raise TooLarge
    ranges = [row for row in rows if row.kind == "range"]
    log: Mapping[TopicPartition, list[Batch]] = {}
    bounds: Mapping[TopicPartition, Bounds] = {}
    unread: Unread = {}
    with LogClient(job.bootstrap, job.kafka) as client:
        topics = there(client, job) if job.topics else existing(client, {row.topic or "" for row in ranges})
        if stage is not None:
            stage.say(f"reading the logs of {len(topics)} topics")
        if topics:
            ends = ends_behind(acknowledged_by_one(ranges), lambda: ends_of(client, topics, unread))
            first = None if job.from_ms is None else first_acknowledged(ranges, job.from_ms - LOG_LOOKBACK_MS)
            most_batches, most_bytes = (MOST_BATCHES, MOST_BYTES) if is_bounded else (None, None)
            log = read_headers(client, first, ends, most_batches, most_bytes, unread)
            bounds = bounds_now(client, topics, job.compacted, unread)
    results = audit_rows(rows, log, bounds, job.rules(read_at_ms), unread)
    words = {**about(job), TRAIL_READ: f"{utc(read_at_ms)} UTC"}
    if signatures is not None:
        words[UNSIGNED] = f"{signatures.refused:,}"
    return Audited(results, words, len(rows) + sum(map(len, log.values())))


def _read_trail(job: AuditJob, signatures: Signatures | None) -> Iterator[TrailRow]:
    if job.trail.kind != TOPIC:
        yield from read_files(job.trail, job.read_from_ms, signatures)
        return
    with LogClient(job.trail_bootstrap or job.bootstrap, job.kafka) as client:
        starts, ends = trail_offsets(client, job)
        yield from read_topic(client, starts, ends, signatures)


def trail_offsets(client: LogClient, job: AuditJob) -> tuple[Offsets, Offsets]:
    """Return the offsets of the trail's topic to read from and to. Raise StartupError."""
    try:
        ends = ends_of(client, (job.trail.name,))
        return {} if job.read_from_ms is None else offsets_at(client, job.read_from_ms, ends), ends
    except LogReadFailed as error:
        raise StartupError(f"The audit trail could not be read: {error}") from error


def acknowledged_by_one(ranges: Sequence[TrailRow]) -> dict[TopicPartition, int]:
    """Return, by partition, the offset after the last one that was acknowledged with acks=1 by the trail."""
    behind: dict[TopicPartition, int] = {}
    for row in ranges:
        if row.acks == 1 and row.topic is not None and row.partition is not None and row.spans:
            which = TopicPartition(row.topic, row.partition)
            behind[which] = max(behind.get(which, 0), row.spans[-2] + row.spans[-1])
    return behind


def first_acknowledged(ranges: Sequence[TrailRow], since_ms: int) -> dict[TopicPartition, int]:
    """Return, by partition, the lowest offset acknowledged at `since_ms` or later, by the trail."""
    first: dict[TopicPartition, int] = {}
    for row in ranges:
        if (row.last_acked_at or 0) >= since_ms and row.topic is not None and row.partition is not None and row.spans:
            which = TopicPartition(row.topic, row.partition)
            lowest = min(row.spans[::2])
            first[which] = min(first.get(which, lowest), lowest)
    return first


def there(client: LogClient, job: AuditJob) -> tuple[str, ...]:
    """Return the named topics without deleted ones that were not created anew."""
    deleted = set(job.topics) & set(job.deleted_topics)
    living = set(existing(client, deleted)) if deleted else set()
    return tuple(topic for topic in job.topics if topic not in deleted - living)


def check(job: AuditJob) -> None:
    """Check everything that needs no Spark. Raise StartupError."""
    if job.from_ms is not None and job.to_ms is not None and job.from_ms >= job.to_ms:
        raise StartupError("--from is not before --to: nothing lies between them.")
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

    Its one sentence saves the user Spark's stack trace a minute later.
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
        raise StartupError(f"No audit trail: {directory} is not a directory; give --trail {trail.kind}:DIR.")
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
        parse_bootstrap(bootstrap)
    except LogReadFailed as error:
        raise StartupError(f"{flag} {bootstrap} is not an address: give HOST:PORT of a kproxy or broker.") from error
    try:
        return LogClient(bootstrap, kafka, timeout_s=PATIENCE_S, patience_s=PATIENCE_S)
    except LogReadFailed as error:
        raise StartupError(str(error)) from error


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
