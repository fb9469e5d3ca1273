"""The demo's last stage: audit the records that the proxy acknowledged against the brokers' logs.

It waits until the trails cover all records that were acknowledged before the end; only then can the audit prove all.
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

from kproxy.config.audit import DEFAULT_TOPIC
from kproxy.pipeline.progress import Report
from kproxy.trail.rows import Begin, End, Mark, Row, decode_page

if TYPE_CHECKING:
    from kproxy.pipeline.audit.report_facts import Facts


POLL_MS: Final = 200
# A trail from which nothing came for so long, beyond what it promised, is a dead proxy's: nothing more comes of it.
SILENCE_MS: Final = 5_000
_FOREVER_MS: Final = 1 << 62


@dataclass(slots=True)
class _Trail:
    """What is known of one incarnation: `told_ms`, before which all is told, and `heard_ms`, its last row's time."""

    interval_ms: int = 0
    mark_ms: int = 0
    told_ms: int = 0
    heard_ms: int = 0

    def hear(self, row: Row) -> None:
        self.heard_ms = max(self.heard_ms, row.at)
        match row:
            case Begin():
                self.interval_ms, self.mark_ms = row.interval_ms, row.mark_ms
                told_ms = row.at
            case Mark():
                told_ms = row.at
            case End():
                told_ms = _FOREVER_MS
            case _:
                told_ms = row.at - self.interval_ms
        self.told_ms = max(self.told_ms, told_ms)

    def is_dead(self, now_ms: int) -> bool:
        return now_ms - self.heard_ms > self.interval_ms + self.mark_ms + SILENCE_MS


class Trails:
    """Those in a topic, as far as their rows have been heard."""

    def __init__(self) -> None:
        self._trails: dict[tuple[str, str], _Trail] = {}

    def hear(self, page: bytes | None) -> None:
        try:
            rows = decode_page(page or b"")
        except msgspec.DecodeError:
            # Written by somebody else. The audit counts what it cannot read; here it tells nothing.
            return
        for row in rows:
            self._trails.setdefault((row.proxy, row.incarnation), _Trail()).hear(row)

    def tell_all_before(self, until_ms: int, now_ms: int) -> bool:
        """Whether there is a trail, and each that lives tells of everything before `until_ms`."""
        living = [trail for trail in self._trails.values() if not trail.is_dead(now_ms)]
        return bool(living) and all(trail.told_ms >= until_ms for trail in living)


def await_trails(
    bootstrap: str,
    topic: str,
    until_ms: int,
    timeout_s: float,
    wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
) -> bool:
    """Wait until the trails in `topic` tell of everything before `until_ms`; False where they do not in time.

    Blocks. A proxy that is killed meanwhile is waited for until it counts as dead; the audit will say what is missing.
    """
    # It logs what it also raises.
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    deadline = time.monotonic() + timeout_s
    trails = Trails()
    try:
        consumer = KafkaConsumer(bootstrap_servers=bootstrap, client_id="kproxy-audit", enable_auto_commit=False)
        try:
            partitions = [TopicPartition(topic, index) for index in consumer.partitions_for_topic(topic) or ()]
            if not partitions:
                return False
            consumer.assign(partitions)
            consumer.seek_to_beginning(*partitions)
            while not trails.tell_all_before(until_ms, wall_ms()):
                if time.monotonic() > deadline:
                    return False
                for records in consumer.poll(timeout_ms=POLL_MS).values():
                    for record in records:
                        trails.hear(record.value)
            return True
        finally:
            consumer.close()
    except KafkaError:
        return False


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
