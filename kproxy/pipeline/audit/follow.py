"""The audit that stays: each micro-batch of the trail is judged as it comes, and what is wrong is told at once.

States: RUNNING --stop--> ENDED; a failure of Spark's, or of the brokers for longer than the log source has patience,
ends it too. Started again with its checkpoint it goes on where it was.

Invariants
1. A micro-batch's rows are on disk before logs are read, and logs are read up to where they end after that: what is
   acknowledged in the rows must be there.
2. The headers beside a batch's rows begin where the first of its records should be. So both can be forgotten together.
3. What is looked at is bounded: the rows of the last `horizon_ms`, in which offsets given out twice are found, and the
   headers of as much of the logs.
4. A repeated micro-batch writes its results over those of the first attempt.
5. Windows of time are written once, when `SETTLE_MS` have passed since their end. What comes later is in no window; it
   is looked for in the logs all the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses

from kproxy.pipeline.audit.follow_state import Alarm, FollowState, Kept, Place, StateFiles, trail_key
from kproxy.pipeline.audit.job import AuditJob
from kproxy.pipeline.audit.log_source import LogReadFailed, fix_ends, read_bounds, read_log
from kproxy.pipeline.audit.results import Tables
from kproxy.pipeline.audit.schemas import FINDINGS_SCHEMA, GAP, LOST, TAIL
from kproxy.pipeline.audit.tables import AuditRules, audit_tables
from kproxy.pipeline.ingest.run import Stop
from kproxy.pipeline.spark import SparkFailed, as_spark_failure

SETTLE_MS: Final = 30_000
# An acknowledgement by one replica is in the log that others read a moment later: what seems lost is looked for again.
SECOND_LOOK_S: Final = 3.0
# Of each kind so many findings are told of a micro-batch; the counts are of all.
TOLD_OF_A_BATCH: Final = 100
PAGES_PER_BATCH: Final = 5_000
_FIRST_OFFSET: Final = "array_min(filter(spans, (each, index) -> index % 2 = 0))"
_POLL_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Following:
    """How a trail is followed. `checkpoint`: a directory, kept from run to run; times in milliseconds."""

    checkpoint: str
    every_ms: int = 5_000
    horizon_ms: int = 600_000


def follow(
    session: Any,
    pages: DataFrame,
    job: AuditJob,
    following: Following,
    *,
    parse: Callable[[DataFrame], DataFrame],
    alarm: Alarm,
    told: Callable[[FollowState], None],
    stop: Stop,
) -> FollowState:
    """Audit the streaming `pages` until it is to `stop`; the state at the end. Raises SparkFailed.

    `parse` makes the trail's rows of a micro-batch of pages. `alarm` hears of each finding, `told` of each micro-batch,
    both on another thread.
    """
    assert job.output is not None  # noqa: S101 - the command has seen to it
    follower = Follower(session, job, following, parse, alarm, told)
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
        except PySparkException as error:
            # What came of Python code went through Java, and says so at length; this is what was raised.
            raise follower.error or error from error
        finally:
            query.stop()
    return follower.state


class Follower:
    """Judges one micro-batch after another, each on the thread that Spark calls it on."""

    def __init__(
        self,
        session: Any,
        job: AuditJob,
        following: Following,
        parse: Callable[[DataFrame], DataFrame],
        alarm: Alarm,
        told: Callable[[FollowState], None],
    ) -> None:
        assert job.output is not None  # noqa: S101 - as above
        self.state = FollowState()
        self.error: SparkFailed | None = None
        self._session = session
        self._job = job
        self._following = following
        self._parse = parse
        self._alarm = alarm
        self._told = told
        self._place = Place(session, following.checkpoint)
        self._output = Place(session, job.output)
        self._states = StateFiles(self._place)
        self._landings = 0
        self._read_at_ms = 0

    def judge(self, pages: DataFrame, batch: int) -> None:
        """For foreachBatch. What goes wrong is kept in `error` and ends the query."""
        # Working through a micro-batch may take longer than a proxy that lives is silent.
        self._read_at_ms = time.time_ns() // 1_000_000
        try:
            if self.state.batch != batch - 1:
                self.state = self._states.before(batch)
            self._judge(pages, batch)
        except (SparkFailed, LogReadFailed) as error:
            self.error = SparkFailed(str(error))
            raise

    def _judge(self, pages: DataFrame, batch: int) -> None:
        state = self.state
        with as_spark_failure("The trail could not be read"):
            self._parse(pages).write.mode("overwrite").parquet(self._place.below(f"rows/batch={batch}"))
            new = self._session.read.parquet(self._place.below(f"rows/batch={batch}"))
            self._note(new, batch)
        tables = self._tables()
        findings = self._findings(tables)
        if any(finding["kind"] == LOST for finding in findings):
            time.sleep(SECOND_LOOK_S)
            self._read_log(new, batch)
            tables = self._tables()
            findings = self._findings(tables)
        self._write(tables, findings, batch)
        self._place.delete("work")
        self._forget()
        state.batch = batch
        self._states.save(state)
        self._told(state)

    def _note(self, new: DataFrame, batch: int) -> None:
        """What of the batch is needed later on, one row a trail."""
        trails = (
            new.dropDuplicates(["proxy", "incarnation", "sequence"])
            .groupBy("proxy", "incarnation")
            .agg(
                F.max("sequence").alias("last"),
                F.max(F.coalesce("last_acked_at", "at")).alias("until"),
                F.coalesce(F.sum("record_count"), F.lit(0)).alias("records"),
            )
            .collect()
        )
        until_ms = max((row["until"] for row in trails), default=0)
        last = {trail_key(row["proxy"], row["incarnation"]): row["last"] for row in trails}
        self.state.kept = [*self.state.kept, Kept(batch, until_ms, last)]
        self.state.acked += sum(row["records"] for row in trails)
        self._read_log(new, batch)

    def _read_log(self, new: DataFrame, batch: int) -> None:
        """The headers from the first record of the batch on, or from where logs were read to; to where they end now."""
        ranges = new.where("kind = 'range'")
        if self._job.topics:
            ranges = ranges.where(F.col("topic").isin(*self._job.topics))
        needed: dict[str, dict[str, int]] = {}
        firsts = ranges.groupBy("topic", "partition").agg(F.min(F.expr(_FIRST_OFFSET)).alias("first"))
        for row in firsts.collect():
            needed.setdefault(row["topic"], {})[str(row["partition"])] = row["first"]
        if not needed:
            self._place.delete(f"log/batch={batch}")
            return
        ends = _decode(fix_ends(self._job.bootstrap, topics=sorted(needed)))
        # Of partitions that the batch does not speak of nothing is read.
        starts = {topic: {**ends[topic], **self._starts(topic, needed[topic], ends[topic])} for topic in needed}
        log = read_log(
            self._session,
            self._job.bootstrap,
            topics=sorted(needed),
            start_offsets=_encode(starts),
            end_offsets=_encode(ends),
        )
        with as_spark_failure("The logs could not be read"):
            log.write.mode("overwrite").parquet(self._place.below(f"log/batch={batch}"))
        for topic, firsts_needed in needed.items():
            read = {partition: ends[topic][partition] for partition in firsts_needed if partition in ends[topic]}
            self.state.read_to[topic] = {**self.state.read_to.get(topic, {}), **read}

    def _starts(self, topic: str, needed: Mapping[str, int], ends: Mapping[str, int]) -> dict[str, int]:
        """Where to begin: no later than where logs were read to, so that nothing in between is passed over."""
        read_to = self.state.read_to.get(topic, {})
        return {
            partition: min(first, read_to.get(partition, first), ends[partition])
            for partition, first in needed.items()
            if partition in ends
        }

    def _tables(self) -> Tables | None:
        """Of all that is looked at; None where there is nothing but what proxies say of themselves."""
        batches = [kept.batch for kept in self.state.kept]
        rows, log = self._kept("rows", batches), self._kept("log", batches)
        if rows is None or log is None:
            return None
        # Where a log was read twice the later one counts.
        newest = log.groupBy("topic", "partition", "base_offset").agg(
            F.max_by(F.struct(*(name for name in log.columns if name != "batch")), "batch").alias("header")
        )
        topics = [row["topic"] for row in newest.select("header.topic").distinct().collect()]
        bounds = read_bounds(self._session, self._job.bootstrap, topics=sorted(topics), compacted=self._job.compacted)
        return audit_tables(
            self._numbered(rows.drop("batch")),
            self._land("log", newest.select("header.*")),
            self._land("bounds", bounds),
            AuditRules(
                read_at_ms=self._read_at_ms,
                topics=self._job.topics,
                from_ms=self._job.from_ms,
                window_ms=self._job.window_ms,
                max_findings=TOLD_OF_A_BATCH,
            ),
            self._land,
        )

    def _land(self, name: str, frame: DataFrame) -> DataFrame:
        """Kept on disk until the next micro-batch, or the next look: what Spark plans stays small."""
        self._landings += 1
        place = self._place.below(f"work/{self._landings}-{name}")
        frame.write.mode("overwrite").parquet(place)
        return self._session.read.schema(frame.schema).parquet(place)

    def _kept(self, name: str, batches: list[int]) -> DataFrame | None:
        places = [self._place.below(f"{name}/batch={batch}") for batch in batches]
        there = [place for place in places if self._place.has(place)]
        if not there:
            return None
        return self._session.read.option("basePath", self._place.below(name)).parquet(*there)

    def _numbered(self, rows: DataFrame) -> DataFrame:
        """Rows numbered as if those that are forgotten had never been: they are not missing."""
        if not self.state.forgotten:
            return rows
        forgotten = [(*key.split(" "), count) for key, count in self.state.forgotten.items()]
        before = self._session.createDataFrame(forgotten, "proxy string, incarnation string, forgotten long")
        joined = rows.join(F.broadcast(before), ["proxy", "incarnation"], "left")
        sequence = F.col("sequence") - F.coalesce("forgotten", F.lit(0))
        return joined.withColumn("sequence", sequence).drop("forgotten").where("sequence >= 0")

    # What comes of it

    def _findings(self, tables: Tables | None) -> list[dict[str, Any]]:
        """Those that were not told before."""
        if tables is None:
            return []
        with as_spark_failure("The audit failed"):
            rows = [row.asDict() for row in tables.findings.collect()]
        for row in rows:
            key = trail_key(row["proxy"] or "", row["incarnation"] or "")
            if row["sequence"] is not None:
                row["sequence"] += self.state.forgotten.get(key, 0)
        return [row for row in rows if _told_as(row) not in self.state.told]

    def _write(self, tables: Tables | None, findings: list[dict[str, Any]], batch: int) -> None:
        state = self.state
        for row in findings:
            if state.tell_once(_told_as(row)):
                fails = row["kind"] not in (GAP, TAIL)
                state.failures += fails
                state.unproven += not fails
                self._alarm(f"{_where(row)}{row['detail']}", fails)
        with as_spark_failure(f"The results could not be written to {self._output.path}"):
            if findings:
                told = self._session.createDataFrame(findings, FINDINGS_SCHEMA)
                told.coalesce(1).write.mode("overwrite").parquet(self._output.below(f"findings/batch={batch}"))
            settled_ms = max((kept.until_ms for kept in state.kept), default=0) - SETTLE_MS
            settled_ms -= settled_ms % self._job.window_ms
            if tables is not None and settled_ms > state.settled_ms:
                start = F.unix_millis("window_start")
                for name in ("windows", "throughput"):
                    settled = getattr(tables, name).where((start >= state.settled_ms) & (start < settled_ms))
                    settled.coalesce(1).write.mode("overwrite").parquet(self._output.below(f"{name}/batch={batch}"))
                state.settled_ms = settled_ms

    def _forget(self) -> None:
        """Batches that lie before the horizon, from the first one on."""
        state = self.state
        newest_ms = max((kept.until_ms for kept in state.kept), default=0)
        until_ms = min(newest_ms - self._following.horizon_ms, state.settled_ms - self._job.window_ms)
        while state.kept and state.kept[0].until_ms < until_ms:
            forgotten, *state.kept = state.kept
            for key, last in forgotten.last.items():
                # Only what is still spoken of: a trail that ended has nothing to be numbered.
                state.forgotten[key] = max(last + 1, state.forgotten.get(key, 0))
            self._place.delete(f"rows/batch={forgotten.batch}")
            self._place.delete(f"log/batch={forgotten.batch}")
        spoken_of = {key for kept in state.kept for key in kept.last}
        state.forgotten = {key: count for key, count in state.forgotten.items() if key in spoken_of}


def _told_as(row: Mapping[str, Any]) -> str:
    names = ("kind", "topic", "partition", "first_offset", "proxy", "incarnation", "sequence")
    return " ".join(str(row[name]) for name in names)


def _where(row: Mapping[str, Any]) -> str:
    if row["topic"] is None:
        return ""
    return f"{row['kind']}: {row['topic']}/{row['partition']} offsets {row['first_offset']} to {row['last_offset']}: "


def _encode(offsets: Mapping[str, Mapping[str, int]]) -> str:
    return json.dumps(offsets, separators=(",", ":"))


def _decode(offsets: str) -> dict[str, dict[str, int]]:
    decoded: dict[str, dict[str, int]] = json.loads(offsets)
    return decoded
