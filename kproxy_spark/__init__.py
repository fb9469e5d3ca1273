"""Use kproxy in programs on Spark: write rows to topics, audit them, and read logs and trails as tables.

    kproxy_spark.start(rows, topic="orders", bootstrap_servers="127.0.0.1:9092", key="id", checkpoint="/data/ck")
    kproxy_spark.audit(bootstrap_servers="127.0.0.1:9092").verdict
    kproxy_spark.register(spark)

Wrong input raises StartupError, another failure SparkFailed or LogReadFailed. Readers of tables raise LogReadFailed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from kproxy.config import DEFAULT_LISTEN
from kproxy.config.parsing import parse_duration_ms
from kproxy.errors import StartupError
from kproxy.pipeline.audit.log_client import LogReadFailed
from kproxy.pipeline.audit.report_facts import Finding, Partition, Sums
from kproxy.pipeline.spark import SparkFailed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from kproxy.pipeline.ingest.sink import BatchDone

__all__ = [
    "Audited",
    "Finding",
    "LogReadFailed",
    "Partition",
    "SparkFailed",
    "StartupError",
    "Sums",
    "audit",
    "register",
    "start",
]

# The most partitions that `Audited` lists; its counts include all.
MOST_PARTITIONS = 10_000


def start(
    rows: DataFrame,
    *,
    topic: str | None = None,
    topic_column: str | None = None,
    bootstrap_servers: str = DEFAULT_LISTEN,
    checkpoint: str = "",
    trigger: str | None = None,
    partitions: int | None = None,
    select: Sequence[str] = (),
    key: str | Sequence[str] = (),
    value: str | Sequence[str] = (),
    value_column: str | None = None,
    value_format: Literal["avro", "protobuf", "json-schema"] | None = None,
    value_schema: str | None = None,
    registry: str | None = None,
    registry_user: str | None = None,
    registry_password: str | None = None,
    subject: str | None = None,
    headers: Mapping[str, str] | None = None,
    dead_letters: str | None = None,
    max_message_bytes: int = 1 << 20,
    tasks: int | None = None,
    exactly_once: bool = False,
    kafka_options: Mapping[str, str] | None = None,
    on_batch: Callable[[BatchDone], None] = lambda done: None,
) -> StreamingQuery | BatchDone:
    """Write `rows` as `kproxy pipeline ingest` writes those of its sources. The options are its flags.

    For a stream, which needs a `checkpoint`, return the running query. By default it ends after the available rows;
    with `trigger="10s"` it continues. `on_batch` is called after each micro-batch, on another thread. Rows that are not
    a stream are written once; return their counts. `value_schema` is the schema's text, or `latest`.
    """
    if not hasattr(rows, "_jdf"):
        raise StartupError("kproxy_spark.start needs a session with its own driver, not Spark Connect.")
    from kproxy.pipeline.ingest import job
    from kproxy.pipeline.ingest.options import FRAME, IngestOptions

    options = IngestOptions(
        FRAME,
        checkpoint,
        topic=topic,
        topic_column=topic_column,
        bootstrap=bootstrap_servers,
        trigger=trigger,
        partitions=partitions,
        select=tuple(select),
        key=_names(key),
        value=_names(value),
        value_column=value_column,
        value_format=value_format,
        value_schema=value_schema,
        registry=registry,
        registry_user=registry_user,
        registry_password=registry_password,
        subject=subject,
        headers=tuple((headers or {}).items()),
        dead_letters=dead_letters,
        max_message_bytes=max_message_bytes,
        tasks=tasks,
        exactly_once=exactly_once,
        kafka_options=dict(kafka_options or {}),
    )
    if rows.isStreaming:
        return job.start(rows.sparkSession, options, rows=rows, on_batch=on_batch)
    done = job.write(rows, options)
    on_batch(done)
    return done


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


@dataclass(frozen=True, slots=True)
class Audited:
    """The result of an audit. `exit_status` is that of the command: 0 proven, 1 faults, 3 unproven.

    `counts` include everything. `findings` and `partitions` begin with the worst; there are at most 50 findings,
    `findings_not_listed` more, and at most MOST_PARTITIONS partitions. `about` names the inputs.
    """

    verdict: str
    summary: str
    exit_status: int
    counts: Sums
    findings: tuple[Finding, ...]
    findings_not_listed: int
    partitions: tuple[Partition, ...]
    about: Mapping[str, str]

    @property
    def extents(self) -> dict[tuple[str, int], tuple[int | None, int | None]]:
        """The offsets at which each partition's log began and ended, by topic and number; None if it was not read."""
        return {(each.topic, each.partition): (each.log_start_offset, each.end_offset) for each in self.partitions}


def audit(
    spark: SparkSession | None = None,
    *,
    bootstrap_servers: str = DEFAULT_LISTEN,
    trail: str = "topic",
    trail_bootstrap_servers: str | None = None,
    trail_keys: Sequence[str | Path] = (),
    topics: Sequence[str] = (),
    deleted_topics: Sequence[str] = (),
    compacted: Sequence[str] | None = None,
    from_ms: int | None = None,
    to_ms: int | None = None,
    window: str = "10s",
    output: str | None = None,
    kafka_options: Mapping[str, str] | None = None,
) -> Audited:
    """Audit as `kproxy pipeline audit` does: in the session `spark`, or in this process. The options are its flags.

    Times are milliseconds since the epoch. On a cluster the tables need an `output`.
    """
    from kproxy.pipeline.audit.report_gather import Limits
    from kproxy.pipeline.audit.report_text import headline, summary
    from kproxy.pipeline.audit.run import LOCAL, SPARK, AuditJob, check
    from kproxy.pipeline.audit.run import audit as audited
    from kproxy.pipeline.audit.trail_place import parse_trail
    from kproxy.pipeline.kafka_access import KafkaOptions
    from kproxy.pipeline.progress import Report

    job = AuditJob(
        bootstrap=bootstrap_servers,
        trail=parse_trail(trail, [Path(each) for each in trail_keys]),
        trail_bootstrap=trail_bootstrap_servers,
        topics=tuple(topics),
        deleted_topics=tuple(deleted_topics),
        compacted=None if compacted is None else tuple(compacted),
        from_ms=from_ms,
        to_ms=to_ms,
        window_ms=parse_duration_ms(window, "window"),
        output=output,
        kafka=KafkaOptions(kafka_options or {}),
        engine=LOCAL if spark is None else SPARK,
    )
    check(job)
    report, limits = Report(progress=Console(quiet=True)), Limits(partitions=MOST_PARTITIONS, drawn=0)
    if spark is None:
        facts = audited(job, None, report, limits)
    else:
        from kproxy.pipeline.audit.run_spark import audit_in_copy

        facts = audit_in_copy(spark, job, report, limits)
    return Audited(
        verdict=headline(facts.verdict),
        summary=summary(facts.verdict),
        exit_status=facts.verdict.exit_status(),
        counts=facts.sums,
        findings=facts.findings,
        findings_not_listed=facts.hidden_findings,
        partitions=facts.partitions,
        about=facts.about,
    )


def register(spark: Any) -> None:
    """Let `spark` read `kproxy_log` and `kproxy_trail`, whether it is a session of Spark Connect or not."""
    from kproxy.pipeline.data_sources import SOURCES

    for source in SOURCES:
        spark.dataSource.register(source)
