"""Audit the demo's acknowledged records against the brokers' logs.

This is the demo's last stage. It waits until the trails cover all records that were acknowledged before the end; only
then can the audit prove all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaError

from kproxy.config.proxy import DEFAULT_TOPIC
from kproxy.pipeline.progress import Report
from kproxy.trail.rows import Begin, End, Mark, Row, decode_page

if TYPE_CHECKING:
    from kproxy.pipeline.audit.report_facts import Facts


POLL_MS: Final = 200
# A trail that is silent for this long beyond its promise belongs to a dead proxy, and ends there.
SILENCE_MS: Final = 5_000
_FOREVER_MS: Final = 1 << 62


@dataclass(slots=True)
class _Trail:
    """The trail of one incarnation: complete before `complete_ms`; `heard_ms` is the time of its last row."""

    interval_ms: int = 0
    mark_ms: int = 0
    complete_ms: int = 0
    heard_ms: int = 0

    def add(self, row: Row) -> None:
        self.heard_ms = max(self.heard_ms, row.at)
        match row:
            case Begin():
                self.interval_ms, self.mark_ms = row.interval_ms, row.mark_ms
                complete_ms = row.at
            case Mark():
                complete_ms = row.at
            case End():
                complete_ms = _FOREVER_MS
            case _:
                complete_ms = row.at - self.interval_ms
        self.complete_ms = max(self.complete_ms, complete_ms)

    def is_dead(self, now_ms: int) -> bool:
        return now_ms - self.heard_ms > self.interval_ms + self.mark_ms + SILENCE_MS


class TrailCoverage:
    """The times that the trails in a topic cover, by the rows read so far."""

    def __init__(self) -> None:
        self._trails: dict[tuple[str, str], _Trail] = {}

    def add_page(self, page: bytes | None) -> None:
        try:
            rows = decode_page(page or b"")
        except msgspec.DecodeError:
            # Another client wrote it. The audit handles such pages; here they are ignored.
            return
        for row in rows:
            self._trails.setdefault((row.proxy, row.incarnation), _Trail()).add(row)

    def cover(self, until_ms: int, now_ms: int) -> bool:
        """Return whether there is a live trail, and all live ones are complete before `until_ms`."""
        living = [trail for trail in self._trails.values() if not trail.is_dead(now_ms)]
        return bool(living) and all(trail.complete_ms >= until_ms for trail in living)


def await_trails(
    bootstrap: str,
    topic: str,
    until_ms: int,
    timeout_s: float,
    wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
) -> bool:
    """Wait until the trails in `topic` are complete before `until_ms`.

    Return False if they are not in time. Blocks. A proxy that is killed meanwhile is awaited until it counts as dead;
    the audit reports missing rows.
    """
    # kafka-python also logs the errors that it raises.
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    deadline = time.monotonic() + timeout_s
    trails = TrailCoverage()
    try:
        consumer = KafkaConsumer(bootstrap_servers=bootstrap, client_id="kproxy-audit", enable_auto_commit=False)
        try:
            partitions = [TopicPartition(topic, index) for index in consumer.partitions_for_topic(topic) or ()]
            if not partitions:
                return False
            consumer.assign(partitions)
            consumer.seek_to_beginning(*partitions)
            while not trails.cover(until_ms, wall_ms()):
                if time.monotonic() > deadline:
                    return False
                for records in consumer.poll(timeout_ms=POLL_MS).values():
                    for record in records:
                        trails.add_page(record.value)
            return True
        finally:
            consumer.close()
    except KafkaError:
        return False


# An idle proxy writes a mark at least every 10 s; a row is shipped within moments.
TRAIL_TIMEOUT_S: Final = 20.0
# With so few rows, replanning and compiling take longer than Spark's steps.
_SETTINGS: Final = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
}


def audit_demo(
    session: Any, report: Report, *, bootstrap: str, topic: str, written_ms: int, output: Path, html: Path | None
) -> Facts | None:
    """Audit the demo's topic.

    None if the proxy's trail does not have its records. Blocks. Raise SparkFailed. `written_ms`: when the last record
    had been acknowledged.
    """
    from kproxy.pipeline.audit.job import audit
    from kproxy.pipeline.audit.report_html import write_report
    from kproxy.pipeline.audit.run import AuditJob
    from kproxy.pipeline.audit.trail import TOPIC, TrailPlace

    stage = report.stage("trail", "waiting for the last of it")
    if not await_trails(bootstrap, DEFAULT_TOPIC, written_ms, TRAIL_TIMEOUT_S):
        stage.finish(f"the proxy ships none to the topic {DEFAULT_TOPIC}, or not all of it: no audit")
        return None
    stage.finish("tells of all that was acknowledged")
    # A new session for the settings, as the caller may own this one.
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
