"""The audit as a job: looks for its sources, has them audited in one session, and says what was found.

States: CHECKING (nothing started) -> STARTING (Spark) -> AUDITING -> REPORTING -> DONE. The tables are on disk before
anything is said of them, so that what is said can be said again.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from kproxy import installed
from kproxy.errors import StartupError
from kproxy.pipeline.audit.places import check_places
from kproxy.pipeline.audit.report_facts import Facts
from kproxy.pipeline.audit.report_gather import gather
from kproxy.pipeline.audit.report_html import write_report
from kproxy.pipeline.audit.report_text import show_table
from kproxy.pipeline.audit.run import LOG_LOOKBACK_MS, TRAIL_LOOKBACK_MS, AuditOptions, fitted, run_audit
from kproxy.pipeline.audit.tables import WINDOW_MS
from kproxy.pipeline.audit.trail import TrailPlace
from kproxy.pipeline.preflight import check_report
from kproxy.pipeline.progress import JobsProgress, Report
from kproxy.pipeline.session import SessionOptions, open_session
from kproxy.pipeline.spark_settings import on_this_machine

NO_VERDICT: Final = 2


@dataclass(frozen=True, slots=True)
class AuditJob:
    """Addresses are `H:P[,H:P...]`, times in milliseconds since the epoch, `window_ms` a window's length.

    `topics` empty: all that the trail speaks of; `deleted_topics`: topics of these names were deleted on purpose.
    `output`: the directory for the tables, None for one that is deleted. `strict`: what is unproven counts as wrong.
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


def run_audit_job(job: AuditJob, spark: SessionOptions, *, said: Report | None = None) -> int:
    """Run it; the exit status. Raises StartupError where it cannot start, SparkFailed where Spark fails."""
    if spark.master is not None:
        _check_output(job, spark.master)
    check(job)
    said = said or Report()
    with said:
        stage = said.stage("Spark", "starting")
        with open_session(spark, lambda jars: stage.say(f"first start: {jars} jars downloaded")) as opened:
            session = opened.session
            where = session.sparkContext.master
            stage.finish(f"version {session.version}, {where}")
            _check_output(job, where)
            facts = audit(session, job, said)
    # First what was found, and then what may fail yet.
    show_table(facts, Console(highlight=False))
    if job.report is not None:
        write_report(facts, job.report)
    if job.output is not None:
        said.say(f"Tables: {job.output}")
    if job.report is not None:
        said.say(f"Report: {job.report.resolve()}")
    return facts.verdict.exit_status(strict=job.strict)


def _check_output(job: AuditJob, master: str) -> None:
    if job.output is None and not on_this_machine(master):
        raise StartupError(
            f"On a cluster ({master}) the tables need a place that all its machines reach: give --output DIR."
        )


def check(job: AuditJob) -> None:
    """All that can be known before Spark is started. Raises StartupError."""
    if job.from_ms is not None and job.to_ms is not None and job.from_ms >= job.to_ms:
        raise StartupError("--from is not before --to: nothing lies between them.")
    check_report(job.report)
    there = tuple(topic for topic in job.topics if topic not in job.deleted_topics)
    check_places(job.bootstrap, job.trail, job.trail_bootstrap or job.bootstrap, there)


def audit(session: Any, job: AuditJob, said: Report) -> Facts:
    """Audit in a session that is there. Raises SparkFailed, StartupError."""
    with ExitStack() as stack:
        output = job.output
        if output is None:
            output = tempfile.mkdtemp(prefix="kproxy-audit-")
            stack.callback(shutil.rmtree, output, ignore_errors=True)
        stage = said.stage("audit", "reading the trail")
        with JobsProgress(session, stage):
            result = run_audit(
                session,
                AuditOptions(
                    bootstrap=job.bootstrap,
                    trail=_text(job.trail),
                    trail_bootstrap=job.trail_bootstrap,
                    topics=job.topics,
                    deleted_topics=job.deleted_topics,
                    from_ms=job.from_ms,
                    to_ms=job.to_ms,
                    window_ms=job.window_ms,
                    compacted=job.compacted,
                    output=output,
                ),
                about=about(job),
            )
            with fitted(session, result.rows):
                facts = gather(result.tables, result.about)
        stage.finish(f"{facts.sums.acked:,} acknowledged records")
        return facts


def about(job: AuditJob) -> Mapping[str, str]:
    """What was audited, for the foot of a report."""
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
