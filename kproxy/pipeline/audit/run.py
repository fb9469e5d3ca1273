"""A whole audit, once: the trail is read, then the logs, then where the logs begin; the tables are written.

The order matters. What the trail has up to its end was acknowledged before the ends of the logs are looked up, so it
must be there (what acks=1 acknowledged is given some seconds to be replicated); and what retention takes meanwhile is
known, because the beginnings are looked up last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame

from kproxy.errors import StartupError
from kproxy.pipeline.audit.coverage import Land
from kproxy.pipeline.audit.log_connection import LogReadFailed
from kproxy.pipeline.audit.log_ends import acknowledged_by_one, ends_behind
from kproxy.pipeline.audit.log_source import bounds_now, fix_ends, read_log
from kproxy.pipeline.audit.places import existing
from kproxy.pipeline.audit.report_facts import TRAIL_READ
from kproxy.pipeline.audit.report_words import utc
from kproxy.pipeline.audit.results import NAMES, Tables, read_results, write_results
from kproxy.pipeline.audit.scale import fitted, keep, stays_in_memory
from kproxy.pipeline.audit.schemas import BOUNDS_SCHEMA, LOG_SCHEMA
from kproxy.pipeline.audit.short_logs import read_short_log
from kproxy.pipeline.audit.tables import LATE_AFTER_MS, MAX_FINDINGS, WINDOW_MS, AuditRules, audit_tables
from kproxy.pipeline.audit.trail import TOPIC, parse_place, read_files, read_topic
from kproxy.pipeline.spark import as_spark_failure

# Spark's readers pass over names that begin so: whoever reads the results does not read what they were made from.
_WORK = "_work"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """What is audited, and where the tables go; the rest is as `AuditRules` has it.

    `bootstrap`: Kafka addresses whose logs are read, a proxy's or the brokers'. `trail`: topic:NAME, json:DIR or
    parquet:DIR; `trail_bootstrap`: where that topic is, where not there too. `compacted`: which topics are, None to ask
    the brokers. `output`: a directory, or any address that Spark writes to and all executors reach.
    """

    bootstrap: str
    trail: str
    output: str
    trail_bootstrap: str | None = None
    topics: tuple[str, ...] = ()
    from_ms: int | None = None
    to_ms: int | None = None
    window_ms: int = WINDOW_MS
    late_after_ms: int = LATE_AFTER_MS
    max_findings: int = MAX_FINDINGS
    compacted: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The tables and what they are about, as they were written. `rows`: how many were looked at."""

    tables: Tables
    about: Mapping[str, str]
    rows: int


def run_audit(
    session: Any,
    options: AuditOptions,
    *,
    about: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.time,
) -> AuditResult:
    """Audit once. Raises StartupError where there is nothing to read, SparkFailed, LogReadFailed.

    `about` is kept with the results, for who reads them. What is worked out on the way is in a directory beside them
    until the end.
    """
    with as_spark_failure("The audit failed"), work_in(session, f"{options.output.rstrip('/')}/{_WORK}") as land:
        # Before its end is fixed: reading may take longer than a proxy that lives is silent.
        read_at_ms = int(clock() * 1000)
        rows = land("rows", _read_trail(session, options))
        topics = options.topics or _topics_of(rows, options.bootstrap)
        log, bounds = _read_logs(session, options, topics, rows, land)
        rules = AuditRules(
            read_at_ms=read_at_ms,
            topics=options.topics,
            from_ms=options.from_ms,
            to_ms=options.to_ms,
            window_ms=options.window_ms,
            late_after_ms=options.late_after_ms,
            shipping_ms=parse_place(options.trail).shipping_ms,
            max_findings=options.max_findings,
        )
        words = {**(about or {}), TRAIL_READ: f"{utc(read_at_ms)} UTC"}
        amount, tables = judge(session, rows, log, bounds, rules, land, options.output, words)
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
    """Audit what was landed, and write the tables to `output`: the number of rows that was of, and the tables."""
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


def _read_trail(session: Any, options: AuditOptions) -> DataFrame:
    place = parse_place(options.trail)
    if place.kind != TOPIC:
        return read_files(session, place)
    bootstrap = options.trail_bootstrap or options.bootstrap
    try:
        ends = fix_ends(bootstrap, topics=(place.name,))
    except LogReadFailed as error:
        raise StartupError(f"The audit trail could not be read: {error}") from error
    return read_topic(session, place.name, bootstrap=bootstrap, ends=ends)


def _topics_of(rows: DataFrame, bootstrap: str) -> tuple[str, ...]:
    """The topics of the trail as far as there are any such."""
    named = rows.where("topic is not null").select("topic").distinct().collect()
    return existing(bootstrap, {row.topic for row in named})


def _read_logs(
    session: Any, options: AuditOptions, topics: tuple[str, ...], rows: DataFrame, land: Land
) -> tuple[DataFrame, DataFrame]:
    """The logs' headers and bounds; topics that are gone since the trail was written have none."""
    if not topics:
        return session.createDataFrame([], LOG_SCHEMA), session.createDataFrame([], BOUNDS_SCHEMA)
    told = acknowledged_by_one(rows)
    ends = ends_behind(told, lambda: fix_ends(options.bootstrap, topics=topics))
    log = read_short_log(session, options.bootstrap, topics=topics, end_offsets=ends)
    if log is None:
        log = land("log", read_log(session, options.bootstrap, topics=topics, end_offsets=ends))
    bounds = bounds_now(options.bootstrap, topics=topics, compacted=options.compacted)
    return log, session.createDataFrame(bounds, BOUNDS_SCHEMA)


@contextmanager
def work_in(session: Any, directory: str) -> Iterator[Land]:
    """Tables in Parquet files, which take no memory and of which only those columns are read that are asked for."""

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
