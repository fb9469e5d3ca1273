"""`kproxy pipeline audit`: check the sources, audit them, report.

States: CHECKING (nothing started) -> STARTING (Spark) -> AUDITING -> REPORTING -> DONE. The tables are on disk before
the report, so that it can be made again.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from kproxy import installed
from kproxy.errors import StartupError
from kproxy.pipeline.audit.log_client import EARLIEST, LATEST, LogClient, TopicPartition
from kproxy.pipeline.audit.log_connection import LogReadFailed
from kproxy.pipeline.audit.log_options import parse_bootstrap
from kproxy.pipeline.audit.report_facts import Facts
from kproxy.pipeline.audit.report_gather import gather
from kproxy.pipeline.audit.report_html import write_report
from kproxy.pipeline.audit.report_text import show_table
from kproxy.pipeline.audit.run import LOG_LOOKBACK_MS, TRAIL_LOOKBACK_MS, AuditJob, fitted, run_audit
from kproxy.pipeline.audit.trail import JSON, PARQUET, TOPIC, TrailPlace
from kproxy.pipeline.preflight import check_report
from kproxy.pipeline.progress import JobsProgress, Report
from kproxy.pipeline.session import SessionOptions, open_session
from kproxy.pipeline.spark import on_this_machine

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
        with open_session(spark, lambda jars: stage.say(f"first start: {jars} jars downloaded")) as opened:
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
    check_places(job.bootstrap, job.trail, job.trail_bootstrap or job.bootstrap, there)


def check_places(bootstrap: str, trail: TrailPlace, trail_bootstrap: str, topics: Sequence[str]) -> None:
    """Raise StartupError if nothing answers, there is no trail, or a topic is missing.

    A sentence now is better than Spark's stack trace in a minute.
    """
    here = _topics(bootstrap, "--bootstrap")
    missing = sorted(set(topics) - here.keys())
    if missing:
        raise StartupError(f"There is no topic {missing[0]} at --bootstrap {bootstrap}: see what --topics names.")
    if trail.kind == TOPIC:
        _check_topic(trail.name, trail_bootstrap)
    elif "://" not in trail.name:
        _check_files(trail)


def _check_topic(name: str, bootstrap: str) -> None:
    there = _topics(bootstrap, "--trail-bootstrap")
    partitions = [TopicPartition(name, index) for index in range(there.get(name, 0))]
    with _client(bootstrap, "--trail-bootstrap") as client:
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


def _topics(bootstrap: str, flag: str) -> dict[str, int]:
    """Return the number of partitions by topic."""
    with _client(bootstrap, flag) as client:
        try:
            return dict(client.partitions(None))
        except LogReadFailed as error:
            raise StartupError(f"No Kafka answers at {flag} {bootstrap}: {error}") from error


def _client(bootstrap: str, flag: str) -> LogClient:
    try:
        addresses = parse_bootstrap(bootstrap)
    except LogReadFailed as error:
        raise StartupError(f"{flag} {bootstrap} is no address: give HOST:PORT of a kproxy or of a broker.") from error
    return LogClient(addresses, timeout_s=PATIENCE_S, patience_s=PATIENCE_S)


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
