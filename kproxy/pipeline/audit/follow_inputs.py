"""The inputs of a following audit: trail rows and batch headers.

The rows are those of the kept micro-batches, the headers those of the logs for them. They are on disk, below the
checkpoint: `rows/batch=N`, `log/batch=N`, `starts/batch=N` (the offsets from which the logs were read), and `work`
during a judgement. Each reading goes to the end of its log and replaces what earlier readings have from its start on:
the log may have been truncated since, or its topic created anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses

from kproxy.pipeline.audit.follow_state import FollowState, Place, trail_of
from kproxy.pipeline.audit.job import AuditJob
from kproxy.pipeline.audit.log_source import bounds_now, fix_ends, read_log, read_short_log
from kproxy.pipeline.audit.run import LOG_LOOKBACK_MS, existing, first_offsets, fitted, keep, stays_in_memory
from kproxy.pipeline.audit.schemas import BOUNDS_SCHEMA, LOG_SCHEMA
from kproxy.pipeline.audit.tables import AuditRules, Tables, audit_tables
from kproxy.pipeline.spark import as_spark_failure

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
        there = existing(self._job.bootstrap, needed) if needed else ()
        needed = {topic: needed[topic] for topic in there}
        if not needed:
            self._place.delete(f"log/batch={batch}")
            self._place.delete(f"starts/batch={batch}")
            return
        ends = _decode(fix_ends(self._job.bootstrap, topics=sorted(needed)))
        # Partitions that the batch does not mention start at their end, so nothing of them is read.
        starts = {
            topic: {**ends[topic], **_starts(state.read_to.get(topic, {}), needed[topic], ends[topic])}
            for topic in needed
        }
        topics, begin, end = sorted(needed), _encode(starts), _encode(ends)
        read = (self._session, self._job.bootstrap)
        log = read_short_log(*read, topics=topics, start_offsets=begin, end_offsets=end)
        if log is None:
            log = read_log(*read, topics=topics, start_offsets=begin, end_offsets=end)
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
        there = self._there("log", batches)
        if not there:
            return self._session.createDataFrame([], LOG_SCHEMA)
        log = self._kept("log", there)
        # Checkpoints of earlier releases have no `starts`.
        if begun := self._there("starts", there):
            on = ["topic", "partition", "batch"]
            later = Window.partitionBy("topic", "partition").orderBy("batch").rowsBetween(1, Window.unboundedFollowing)
            again = self._kept("starts", begun).select(*on, F.min("read_from").over(later).alias("read_again_from"))
            log = log.join(F.broadcast(again), on, "left")
            log = log.where("read_again_from is null or base_offset < read_again_from")
        # A record batch that spans the start of a later reading is in both.
        header = F.max_by(F.struct(*LOG_SCHEMA.names), "batch").alias("header")
        return log.groupBy("topic", "partition", "base_offset").agg(header).select("header.*")

    def _bounds(self, rows: DataFrame) -> DataFrame:
        """Return the bounds of all existing topics in the rows; even an empty log has bounds."""
        named = {row["topic"] for row in self._needed(rows).select("topic").distinct().collect()}
        topics = existing(self._job.bootstrap, named) if named else ()
        if not topics:
            return self._session.createDataFrame([], BOUNDS_SCHEMA)
        bounds = bounds_now(self._job.bootstrap, topics=topics, compacted=self._job.compacted)
        return self._session.createDataFrame(bounds, BOUNDS_SCHEMA)

    def _needed(self, rows: DataFrame) -> DataFrame:
        return rows.where(judged(self._job, lookback_ms=LOG_LOOKBACK_MS))

    def _land(self, name: str, frame: DataFrame) -> DataFrame:
        """Write a table to disk until the judgement ends, so that Spark's plans stay small."""
        self._landings += 1
        place = self._place.below(f"work/{self._landings}-{name}")
        frame.write.mode("overwrite").parquet(place)
        return self._session.read.schema(frame.schema).parquet(place)

    def _there(self, name: str, batches: list[int]) -> list[int]:
        """Return those micro-batches that have a directory `name`."""
        return [batch for batch in batches if self._place.has(self._place.below(f"{name}/batch={batch}"))]

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
