"""`kproxy pipeline audit --follow`: audit a trail as it is written.

Each micro-batch is audited as it comes, and faults are reported at once.

States: RUNNING --no micro-batch for a while--> SILENT --a micro-batch--> RUNNING; --stop--> ENDED. A failure of Spark,
or of the brokers for longer than the log source's patience, also ends it. Started again with its checkpoint, it
continues from there.

Invariants
1. A micro-batch's rows are on disk before logs are read, and logs are read up to their end at that time: every record
   that the rows acknowledge must be there.
2. The headers kept with a micro-batch begin at its first record's offset, so both can be dropped together.
3. The input is bounded: the rows of the last `horizon_ms`, within which offsets assigned twice are found, and the
   headers of the same part of the logs.
4. A repeated micro-batch overwrites the results of the first attempt.
5. Windows of time are written once, `SETTLE_MS` after their end. Later rows are in no window, but their records are
   looked for in the logs.
6. With a time to judge from, the trail is read from `horizon_ms` before it, by the timestamps of its pages. Brokers may
   set these by another clock. If a trail's first row comes late, rows are reported missing.
7. Proxies that fall silent cause no micro-batch. While none comes, and at the end, the known rows are judged again by
   the current time. Rows that are known to be unread do not count as silence.

The inputs are trail rows and batch headers. The rows are those of the kept micro-batches, the headers those of the logs
for them. They are on disk, below the checkpoint: `rows/batch=N`, `log/batch=N`, `starts/batch=N` (the offsets from
which the logs were read), and `work` during a judgement. Each reading goes to the end of its log and replaces what
earlier readings have from its start on: the log may have been truncated since, or its topic created anew.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, Observation, Window
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses
from rich.console import Console
from rich.text import Text

from kproxy.errors import StartupError
from kproxy.pipeline.audit.follow_state import (
    LISTED,
    REPORTED_KINDS,
    Alarm,
    FollowState,
    Kept,
    Place,
    StateFiles,
    new_alerts,
    trail_key,
    trail_of,
    unreported,
)
from kproxy.pipeline.audit.log_client import LogReadFailed
from kproxy.pipeline.audit.log_source import bounds_now, fix_ends, read_log, read_short_log
from kproxy.pipeline.audit.run import (
    LOG_LOOKBACK_MS,
    AuditJob,
    check,
    existing,
    first_offsets,
    fitted,
    keep,
    stays_in_memory,
)
from kproxy.pipeline.audit.schemas import BOUNDS_SCHEMA, FINDINGS_SCHEMA, LOG_SCHEMA, LOST, TRAIL_SCHEMA, UNPROVEN_KINDS
from kproxy.pipeline.audit.tables import AuditRules, Tables, audit_tables
from kproxy.pipeline.audit.trail import JSON, TOPIC, only_rows, rows_of
from kproxy.pipeline.ingest.job import Stop, stopped_by_signals
from kproxy.pipeline.kafka_access import spark_options
from kproxy.pipeline.progress import Report
from kproxy.pipeline.session import SessionOptions, open_session
from kproxy.pipeline.spark import SparkFailed, as_spark_failure

PAGES_PER_BATCH: Final = 5_000
FILES_PER_BATCH: Final = 100
SETTLE_MS: Final = 30_000
# Records acknowledged with acks=1 become readable a moment later: read the logs again before reporting a loss.
SECOND_LOOK_S: Final = 3.0
# Silence after which proxies are judged again, plus the time that a row takes: a live proxy writes marks more often.
SILENCE_S: Final = 30.0
# At the end; shorter than the silence after which a proxy is reported missing.
SILENCE_AT_END_S: Final = 10.0
_POLL_S: Final = 0.25


def run_follow_job(
    job: AuditJob,
    following: FollowOptions,
    spark: SessionOptions,
    *,
    display: Report | None = None,
    output: Console | None = None,
    stop: Stop | None = None,
) -> int:
    """Follow the trail until interrupted; return the exit status. Raise StartupError or SparkFailed."""
    if job.output is None:
        raise StartupError("--follow writes results as they come: give --output DIR.")
    if job.to_ms is not None or job.report is not None:
        raise StartupError("--follow has no end: leave --to and --report out.")
    if job.trail.kind == JSON:
        raise StartupError("--follow needs files that are whole when they appear, or a topic: give another --trail.")
    check(job)
    display, stop = display or Report(), stop or Stop()
    with display:
        stage = display.stage("Spark", "starting")
        with open_session(spark) as opened:
            session = opened.session
            stage.finish(f"version {session.version}, {session.sparkContext.master}")
            stage = display.stage("audit", "waiting for the first rows")
            lines = _Lines(display, output or Console(highlight=False))
            # Installed after Spark's start, which sets signal handlers of its own.
            with stopped_by_signals(stop):
                state = follow(
                    session,
                    pages_of(session, job, following),
                    job,
                    following,
                    parse=_parser(job, following),
                    bound=_bound(job),
                    alarm=lines.alarm,
                    on_state=lambda state: stage.say(_progress(state)),
                    stop=stop,
                )
            stage.finish(_progress(state))
    return 1 if state.failures or (job.strict and state.unproven) else 0


def pages_of(session: Any, job: AuditJob, following: FollowOptions) -> DataFrame:
    """Return the trail as a stream: the messages of a topic, or the rows of files."""
    if job.trail.kind != TOPIC:
        reader = session.readStream.schema(TRAIL_SCHEMA).option("pathGlobFilter", "*.parquet")
        return reader.option("maxFilesPerTrigger", FILES_PER_BATCH).parquet(job.trail.name)
    options = {
        **spark_options(job.kafka),
        "kafka.bootstrap.servers": job.trail_bootstrap or job.bootstrap,
        "subscribe": job.trail.name,
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": str(PAGES_PER_BATCH),
        # Rows removed by retention are missing from the trail, which the audit reports.
        "failOnDataLoss": "false",
    }
    if (read_from_ms := following.read_from_ms(job)) is not None:
        options |= {"startingTimestamp": str(read_from_ms), "startingOffsetsByTimestampStrategy": "latest"}
    return session.readStream.format("kafka").options(**options).load()


def _bound(job: AuditJob) -> BatchBound:
    if job.trail.kind == TOPIC:
        return BatchBound(PAGES_PER_BATCH, F.count(F.lit(1)))
    return BatchBound(FILES_PER_BATCH, F.approx_count_distinct(F.input_file_name()))


def _parser(job: AuditJob, following: FollowOptions) -> Callable[[DataFrame], DataFrame]:
    if job.trail.kind == TOPIC:
        return rows_of
    # A topic is read from that time on; files are read whole.
    is_read = F.col("at") >= (following.read_from_ms(job) or 0)
    return lambda rows: only_rows(rows.withColumn("shipped_at", F.lit(None).cast("long"))).where(is_read)


class _Lines:
    """Print alarms on stdout, each when it is found."""

    def __init__(self, display: Report, output: Console) -> None:
        # If stdout is a terminal, print through the progress display, which moves its bars out of the way.
        self._console = display.progress if output.is_terminal else output

    def alarm(self, sentence: str, fails: bool) -> None:
        style, word = ("bold red", "ALARM") if fails else ("yellow", "UNPROVEN")
        now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} "
        self._console.print(Text.assemble(now, (word, style), f" {sentence}"), soft_wrap=True)


def _progress(state: FollowState) -> str:
    found = "nothing wrong" if not state.failures else f"{state.failures:,} alarms"
    unproven = f", {state.unproven:,} times unproven" if state.unproven else ""
    return f"{state.acked:,} records acknowledged, {found}{unproven}"


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """Options for following a trail. `checkpoint`: a directory, kept between runs; times in milliseconds."""

    checkpoint: str
    every_ms: int = 5_000
    horizon_ms: int = 600_000

    def read_from_ms(self, job: AuditJob) -> int | None:
        """Return the time from which the trail is read; None for all of it."""
        return None if job.from_ms is None else max(0, job.from_ms - self.horizon_ms)


@dataclass(frozen=True, slots=True)
class BatchBound:
    """Spark's bound of a micro-batch: at most `most` messages or files, counted by the aggregate `counted`."""

    most: int
    counted: Column


def follow(
    session: Any,
    pages: DataFrame,
    job: AuditJob,
    following: FollowOptions,
    *,
    parse: Callable[[DataFrame], DataFrame],
    bound: BatchBound,
    alarm: Alarm,
    on_state: Callable[[FollowState], None],
    stop: Stop,
) -> FollowState:
    """Audit the streaming `pages` until `stop`; return the final state.

    Raise SparkFailed or LogReadFailed. `parse` turns a micro-batch of pages into the trail's rows; `bound` is Spark's
    bound of a micro-batch. `alarm` is called for each finding and `on_state` after each micro-batch, both on any
    thread.
    """
    assert job.output is not None  # noqa: S101 - the command has seen to it
    follower = Follower(session, job, following, parse, bound, alarm, on_state)
    with as_spark_failure("The audit ended"):
        query = (
            pages.writeStream.foreachBatch(follower.judge)
            .option("checkpointLocation", f"{following.checkpoint}/spark")
            .trigger(processingTime=f"{following.every_ms} milliseconds")
            .start()
        )
        try:
            while not query.awaitTermination(_POLL_S):
                if stop.at_once or (stop.wanted and not query.status["isTriggerActive"]):
                    break
                follower.check_silence()
        except PySparkException as error:
            # An error of our Python code came back through Java in a long text; raise the original.
            raise follower.error or error from error
        finally:
            query.stop()
        if not stop.at_once:
            follower.check_silence(is_end=True)
    return follower.state


class Follower:
    """Judge one micro-batch after another, each on the thread of Spark's call."""

    def __init__(
        self,
        session: Any,
        job: AuditJob,
        following: FollowOptions,
        parse: Callable[[DataFrame], DataFrame],
        bound: BatchBound,
        alarm: Alarm,
        on_state: Callable[[FollowState], None],
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        assert job.output is not None  # noqa: S101 - as above
        self.error: SparkFailed | None = None
        self._session = session
        self._job = job
        self._following = following
        self._parse = parse
        self._bound = bound
        self._wall_ms = wall_ms
        self._alarm = alarm
        self._on_state = on_state
        place = Place(session, following.checkpoint)
        self._inputs = FollowInputs(session, job, place)
        self._output = Place(session, job.output)
        self._states = StateFiles(place)
        # Earlier findings count at the end, even if no micro-batch comes.
        self.state = self._states.newest()
        self._read_at_ms = 0
        # Micro-batches are judged on Spark's thread, silence on the caller's.
        self._judging = threading.Lock()
        # False while a micro-batch is judged and after that failed: the next attempt repeats it.
        self._is_whole = True
        self._looked = time.monotonic()
        self._silence_s = self._patience_s = SILENCE_S + job.trail.shipping_ms / 1000

    def judge(self, pages: DataFrame, batch: int) -> None:
        """Judge a micro-batch, for foreachBatch. An error is kept in `error` and ends the query."""
        with self._judging:
            # Set first: judging may take longer than a live proxy is silent.
            self._read_at_ms = self._wall_ms()
            self._is_whole = False
            try:
                if self.state.batch != batch - 1:
                    self.state = self._states.before(batch)
                self._judge(pages, batch)
            except (SparkFailed, LogReadFailed) as error:
                self.error = SparkFailed(str(error))
                raise
            self._is_whole = True
            self._looked, self._silence_s = time.monotonic(), self._patience_s

    def check_silence(self, *, is_end: bool = False) -> None:
        """Judge again if no micro-batch came for a while; the interval doubles while none comes."""
        silence_s = min(self._silence_s, SILENCE_AT_END_S) if is_end else self._silence_s
        if self._judging.locked() or time.monotonic() - self._looked < silence_s:
            return
        self.judge_again()
        self._silence_s *= 2

    def judge_again(self) -> None:
        """Judge the known rows by the current time: proxies heard of then may be silent since."""
        with self._judging:
            self._looked = time.monotonic()
            if not self._is_whole or not self.state.kept:
                return
            self._read_at_ms = self._wall_ms()
            self._report(self._findings(self._tables()), UNPROVEN_KINDS, "append")
            self._inputs.tidy()
            self._states.save(self.state)
            self._on_state(self.state)

    def _judge(self, pages: DataFrame, batch: int) -> None:
        state = self.state
        with as_spark_failure("The trail could not be read"):
            seen = Observation()
            observed = pages.observe(seen, self._bound.counted.alias("pages"))
            new = self._inputs.take(self._parse(observed), batch)
            # Spark divides its bound among partitions and rounds, so a full micro-batch may have fewer.
            state.is_behind = seen.get["pages"] >= self._bound.most * 0.9
            self._note(new, batch)
        tables = self._tables()
        findings = self._findings(tables)
        if any(finding["kind"] == LOST for finding in unreported(state, findings)):
            time.sleep(SECOND_LOOK_S)
            self._inputs.read_log(state, new, batch)
            tables = self._tables()
            findings = self._findings(tables)
        self._report(findings, REPORTED_KINDS, "overwrite")
        self._write(tables, batch)
        self._inputs.tidy()
        self._forget()
        state.batch = batch
        self._states.save(state)
        self._on_state(state)

    def _note(self, new: DataFrame, batch: int) -> None:
        """Add the micro-batch to the state and read the logs that it needs."""
        trails = (
            new.dropDuplicates(["proxy", "incarnation", "sequence"])
            .groupBy("proxy", "incarnation")
            .agg(
                F.max("sequence").alias("last"),
                F.max(F.coalesce("last_acked_at", "at")).alias("until"),
                F.coalesce(F.sum(F.when(judged(self._job), F.col("record_count"))), F.lit(0)).alias("records"),
            )
            .collect()
        )
        # Rows dated in the future by a wrong clock must not move the horizon beyond all other rows.
        until_ms = min(max((row["until"] for row in trails), default=0), self._read_at_ms)
        last = {trail_key(row["proxy"], row["incarnation"]): row["last"] for row in trails}
        self.state.kept = [*self.state.kept, Kept(batch, until_ms, last)]
        self.state.acked += sum(row["records"] for row in trails)
        self._inputs.read_log(self.state, new, batch)

    def _tables(self) -> Tables:
        rules = AuditRules(
            read_at_ms=self._read_at_ms,
            topics=self._job.topics,
            from_ms=self._job.from_ms,
            read_from_ms=self._following.read_from_ms(self._job),
            window_ms=self._job.window_ms,
            shipping_ms=self._job.trail.shipping_ms,
            max_findings=LISTED,
            is_all=not self.state.is_behind,
            deleted_topics=self._job.deleted_topics,
        )
        return self._inputs.audited(self.state, rules)

    def _findings(self, tables: Tables) -> list[dict[str, Any]]:
        """Return the listed findings; trail rows have the sequence numbers of their proxies."""
        with as_spark_failure("The audit failed"):
            rows = [row.asDict() for row in tables.findings.collect()]
        for row in rows:
            key = trail_key(row["proxy"] or "", row["incarnation"] or "")
            if row["sequence"] is not None:
                row["sequence"] += self.state.forgotten.get(key, 0)
        return rows

    def _report(self, findings: list[dict[str, Any]], kinds: Collection[str], mode: str) -> None:
        state = self.state
        new, alerts = new_alerts(state, findings, kinds)
        for each in alerts:
            self._alarm(each.sentence, each.fails)
        if new:
            place = self._output.below(f"findings/batch={state.kept[-1].batch}")
            with as_spark_failure(f"The results could not be written to {self._output.path}"):
                listed = self._session.createDataFrame(new, FINDINGS_SCHEMA)
                listed.coalesce(1).write.mode(mode).parquet(place)

    def _write(self, tables: Tables, batch: int) -> None:
        state = self.state
        with as_spark_failure(f"The results could not be written to {self._output.path}"):
            settled_ms = max((kept.until_ms for kept in state.kept), default=0) - SETTLE_MS
            settled_ms -= settled_ms % self._job.window_ms
            if settled_ms > state.settled_ms:
                start = F.unix_millis("window_start")
                for name in ("windows", "throughput"):
                    settled = getattr(tables, name).where((start >= state.settled_ms) & (start < settled_ms))
                    settled.coalesce(1).write.mode("overwrite").parquet(self._output.below(f"{name}/batch={batch}"))
                state.settled_ms = settled_ms

    def _forget(self) -> None:
        """Drop the micro-batches before the horizon, the oldest first."""
        state = self.state
        newest_ms = max((kept.until_ms for kept in state.kept), default=0)
        until_ms = min(newest_ms - self._following.horizon_ms, state.settled_ms - self._job.window_ms)
        while state.kept and state.kept[0].until_ms < until_ms:
            forgotten, *state.kept = state.kept
            for key, last in forgotten.last.items():
                state.forget(key, last + 1)
            self._inputs.forget(forgotten.batch)


_STARTS = "topic string, partition int, read_from long"


def judged(job: AuditJob, *, lookback_ms: int = 0) -> Column:
    """Return whether a row acknowledges records to be judged, or some at most `lookback_ms` earlier."""
    condition = F.col("kind") == "range"
    if job.topics:
        condition &= F.col("topic").isin(*job.topics)
    if job.from_ms is not None:
        condition &= F.col("last_acked_at") >= job.from_ms - lookback_ms
    return condition


class FollowInputs:
    """The stored inputs. Not for concurrent use. Its methods raise SparkFailed or LogReadFailed."""

    def __init__(self, session: Any, job: AuditJob, place: Place) -> None:
        self._session = session
        self._job = job
        self._place = place
        self._landings = 0

    def take(self, rows: DataFrame, batch: int) -> DataFrame:
        """Store a micro-batch's rows and return them as stored."""
        place = self._place.below(f"rows/batch={batch}")
        rows.write.mode("overwrite").parquet(place)
        return self._session.read.parquet(place)

    def read_log(self, state: FollowState, new: DataFrame, batch: int) -> None:
        """Store the headers up to the logs' current ends.

        Start at the first offset of the batch, or at the end of the last reading, whichever is lower.
        """
        ranges = self._needed(new)
        needed: dict[str, dict[str, int]] = {}
        for which, first in first_offsets(ranges).items():
            needed.setdefault(which.topic, {})[str(which.partition)] = first
        # Topics deleted since have no log.
        there = existing(self._job.bootstrap, needed, self._job.kafka) if needed else ()
        needed = {topic: needed[topic] for topic in there}
        if not needed:
            self._place.delete(f"log/batch={batch}")
            self._place.delete(f"starts/batch={batch}")
            return
        ends = _decode(fix_ends(self._job.bootstrap, topics=sorted(needed), kafka=self._job.kafka))
        # Partitions that the batch does not mention start at their end, so nothing of them is read.
        starts = {
            topic: {**ends[topic], **_starts(state.read_to.get(topic, {}), needed[topic], ends[topic])}
            for topic in needed
        }
        topics, begin, end = sorted(needed), _encode(starts), _encode(ends)
        cluster = (self._session, self._job.bootstrap)
        read: dict[str, Any] = {"topics": topics, "start_offsets": begin, "end_offsets": end, "kafka": self._job.kafka}
        log = read_short_log(*cluster, **read)
        if log is None:
            log = read_log(*cluster, **read)
        begun = [
            (topic, int(partition), starts[topic][partition])
            for topic, firsts_needed in needed.items()
            for partition in firsts_needed
            if partition in ends[topic]
        ]
        with as_spark_failure("The logs could not be read"):
            frame = self._session.createDataFrame(begun, _STARTS).coalesce(1)
            frame.write.mode("overwrite").parquet(self._place.below(f"starts/batch={batch}"))
            log.write.mode("overwrite").parquet(self._place.below(f"log/batch={batch}"))
        for topic, firsts_needed in needed.items():
            read_to = {partition: ends[topic][partition] for partition in firsts_needed if partition in ends[topic]}
            state.read_to[topic] = {**state.read_to.get(topic, {}), **read_to}

    def audited(self, state: FollowState, rules: AuditRules) -> Tables:
        """Audit all kept micro-batches."""
        batches = [kept.batch for kept in state.kept]
        # Every kept micro-batch has rows.
        rows = self._numbered(state, self._kept("rows", batches).drop("batch"))
        log = self._land("log", self._newest_of_log(batches))
        bounds = self._bounds(rows)
        amount = rows.count() + log.count()
        with fitted(self._session, amount):
            if not stays_in_memory(self._session, amount):
                return audit_tables(rows, log, bounds, rules, self._land)
            tables = audit_tables(keep("rows", rows), keep("log", log), keep("bounds", bounds), rules, keep)
            # Computed while the settings apply. A following audit does not use the other tables.
            windows, findings, throughput = (
                keep(name, getattr(tables, name)) for name in ("windows", "findings", "throughput")
            )
            return replace(tables, windows=windows, findings=findings, throughput=throughput)

    def tidy(self) -> None:
        """Delete the intermediate tables."""
        self._place.delete("work")

    def forget(self, batch: int) -> None:
        self._place.delete(f"rows/batch={batch}")
        self._place.delete(f"log/batch={batch}")
        self._place.delete(f"starts/batch={batch}")

    def _newest_of_log(self, batches: list[int]) -> DataFrame:
        """Return the headers; where a log was read twice, those of the later reading."""
        there = [batch for batch in batches if self._place.has(self._place.below(f"log/batch={batch}"))]
        if not there:
            return self._session.createDataFrame([], LOG_SCHEMA)
        on = ["topic", "partition", "batch"]
        later = Window.partitionBy("topic", "partition").orderBy("batch").rowsBetween(1, Window.unboundedFollowing)
        again = self._kept("starts", there).select(*on, F.min("read_from").over(later).alias("read_again_from"))
        log = self._kept("log", there).join(F.broadcast(again), on, "left")
        log = log.where("read_again_from is null or base_offset < read_again_from")
        # A record batch that spans the start of a later reading is in both.
        header = F.max_by(F.struct(*LOG_SCHEMA.names), "batch").alias("header")
        return log.groupBy("topic", "partition", "base_offset").agg(header).select("header.*")

    def _bounds(self, rows: DataFrame) -> DataFrame:
        """Return the bounds of all existing topics in the rows; even an empty log has bounds."""
        named = {row["topic"] for row in self._needed(rows).select("topic").distinct().collect()}
        topics = existing(self._job.bootstrap, named, self._job.kafka) if named else ()
        if not topics:
            return self._session.createDataFrame([], BOUNDS_SCHEMA)
        bounds = bounds_now(self._job.bootstrap, topics=topics, compacted=self._job.compacted, kafka=self._job.kafka)
        return self._session.createDataFrame(bounds, BOUNDS_SCHEMA)

    def _needed(self, rows: DataFrame) -> DataFrame:
        return rows.where(judged(self._job, lookback_ms=LOG_LOOKBACK_MS))

    def _land(self, name: str, frame: DataFrame) -> DataFrame:
        """Write a table to disk until the judgement ends, so that Spark's plans stay small."""
        self._landings += 1
        place = self._place.below(f"work/{self._landings}-{name}")
        frame.write.mode("overwrite").parquet(place)
        return self._session.read.schema(frame.schema).parquet(place)

    def _kept(self, name: str, batches: list[int]) -> DataFrame:
        places = [self._place.below(f"{name}/batch={batch}") for batch in batches]
        return self._session.read.option("basePath", self._place.below(name)).parquet(*places)

    def _numbered(self, state: FollowState, rows: DataFrame) -> DataFrame:
        """Renumber the rows as if the dropped ones had never existed, so that they are not missing."""
        if not state.forgotten:
            return rows
        forgotten = [(*trail_of(key), count) for key, count in state.forgotten.items()]
        before = self._session.createDataFrame(forgotten, "proxy string, incarnation string, forgotten long")
        joined = rows.join(F.broadcast(before), ["proxy", "incarnation"], "left")
        sequence = F.col("sequence") - F.coalesce("forgotten", F.lit(0))
        return joined.withColumn("sequence", sequence).drop("forgotten").where("sequence >= 0")


def _starts(read_to: Mapping[str, int], needed: Mapping[str, int], ends: Mapping[str, int]) -> dict[str, int]:
    """Return where to start reading: no later than the last reading's end, so that nothing is skipped."""
    return {
        partition: min(first, read_to.get(partition, first), ends[partition])
        for partition, first in needed.items()
        if partition in ends
    }


def _encode(offsets: Mapping[str, Mapping[str, int]]) -> str:
    return json.dumps(offsets, separators=(",", ":"))


def _decode(offsets: str) -> dict[str, dict[str, int]]:
    decoded: dict[str, dict[str, int]] = json.loads(offsets)
    return decoded
