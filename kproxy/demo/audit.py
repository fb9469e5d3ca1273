"""The demo's last stage: what the proxy acknowledged, by its own trail, against what the brokers have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kproxy.config.proxy import DEFAULT_TOPIC
from kproxy.pipeline.progress import Report

if TYPE_CHECKING:
    from kproxy.pipeline.audit.report_facts import Facts

# An idle proxy tells that it is idle every 10 s at least; a row is shipped within moments.
TRAIL_TIMEOUT_S: Final = 20.0
# Of so few rows each of Spark's steps is over sooner than it is planned anew or compiled.
_SETTINGS: Final = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
}


def audit_demo(
    session: Any, report: Report, *, bootstrap: str, topic: str, written_ms: int, output: Path, html: Path | None
) -> Facts | None:
    """What is found; None where the proxy's trail does not tell of the demo's records. Raises SparkFailed.

    `written_ms` is when the last record had been acknowledged. Blocks.
    """
    from kproxy.pipeline.audit.awaiting import await_trails
    from kproxy.pipeline.audit.job import AuditJob, audit
    from kproxy.pipeline.audit.report_html import write_report
    from kproxy.pipeline.audit.trail import TOPIC, TrailPlace

    stage = report.stage("trail", "waiting for the last of it")
    if not await_trails(bootstrap, DEFAULT_TOPIC, written_ms, TRAIL_TIMEOUT_S):
        stage.finish(f"the proxy ships none to the topic {DEFAULT_TOPIC}, or not all of it: no audit")
        return None
    stage.finish("tells of all that was acknowledged")
    # Settings of its own: the session may be somebody else's.
    session = session.newSession()
    for name, value in _SETTINGS.items():
        session.conf.set(name, value)
    job = AuditJob(
        bootstrap=bootstrap,
        trail=TrailPlace(TOPIC, DEFAULT_TOPIC),
        topics=(topic,),
        to_ms=written_ms,
        window_ms=1_000,
        output=str(output),
    )
    facts = audit(session, job, report)
    if facts.verdict.empty:
        return None
    if html is not None:
        write_report(facts, html)
    return facts
