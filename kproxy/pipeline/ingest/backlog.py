"""Count the files or records of the source that are still to be read."""

from __future__ import annotations

import ast
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses

from kproxy.pipeline.ingest.options import FileSource
from kproxy.pipeline.spark import SparkFailed, as_spark_failure

# The least pause between counts, in seconds, and as a multiple of a count's duration: listing files may take long.
LEAST_PAUSE_S: Final = 5.0
PAUSE_FACTOR: Final = 5


class Backlog(NamedTuple):
    """How many are left; `unit` is `files` or `records`."""

    left: int
    unit: str


class FilesLeft:
    """Count the files that no micro-batch has begun to read; Spark is asked only now and then."""

    def __init__(
        self, session: SparkSession, source: FileSource, checkpoint: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._session = session
        self._source = source
        self._checkpoint = checkpoint
        self._clock = clock
        self._not_before = 0.0

    def look(self, *, at_once: bool = False) -> Backlog | None:
        """Count now. None if it is too soon since the last count (unless `at_once`) or the number is not known."""
        began = self._clock()
        if began < self._not_before and not at_once:
            return None
        try:
            with as_spark_failure("The files cannot be listed"):
                found = Backlog(self._count(), "files")
        except SparkFailed:
            # Nothing was read yet, so Spark has no list; or files disappeared during the listing.
            found = None
        ended = self._clock()
        self._not_before = ended + max(LEAST_PAUSE_S, PAUSE_FACTOR * (ended - began))
        return found

    def _count(self) -> int:
        names = {
            name: value
            for name, value in self._source.options.items()
            if name in ("pathGlobFilter", "recursiveFileLookup")
        }
        there = self._session.read.format("binaryFile").options(**names).load(self._source.path)
        paths = there.select(_same(F.col("path")).alias("path"))
        begun = taken(self._session, self._checkpoint).select(_same(F.col("path")).alias("path")).distinct()
        return int(paths.join(begun, "path", "left_anti").count())


def taken(session: SparkSession, checkpoint: str) -> DataFrame:
    """Return the files that Spark has begun: path, log_offset (where micro-batches begin and end).

    They are in Spark's log: each of its files has a version in the first line, then a line of JSON for each file.
    """
    lines = session.read.text(f"{checkpoint}/sources/0").where(F.col("value").startswith("{"))
    path = F.url_decode(F.replace(F.get_json_object("value", "$.path"), F.lit("+"), F.lit("%2B")))
    log_offset = F.get_json_object("value", "$.batchId").cast("long")
    return lines.select(path.alias("path"), log_offset.alias("log_offset"))


def _same(path: Column) -> Column:
    """Normalize a path: `file:/x` and `file:///x` are the same."""
    return F.regexp_replace(path, "^([A-Za-z][A-Za-z0-9+.-]*):/+", "$1:/")


def records_behind(progress: Mapping[str, Any] | None, last: int = 0) -> Backlog | None:
    """Return the backlog of a Kafka source by the query's last progress, None if that lacks it. Pure.

    `last` is the number of the last micro-batch written; progress of an earlier one is out of date.
    """
    if progress is None or progress["batchId"] < last:
        return None
    total = None
    for source in progress["sources"]:
        latest, end = _offsets(source["latestOffset"]), _offsets(source["endOffset"])
        if latest is None or end is None:
            continue
        total = total or 0
        for topic, partitions in latest.items():
            done = end.get(topic, {})
            total += sum(max(0, offset - done.get(partition, 0)) for partition, offset in partitions.items())
    return None if total is None else Backlog(total, "records")


def _offsets(value: Any) -> dict[str, dict[str, int]] | None:
    """Parse a source's offsets in its progress: an object, its JSON, or (PySpark 4.1) its Python repr.

    None for anything else: an unknown backlog must not end the job.
    """
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except ValueError:
            try:
                found = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                return None
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        return None
    return found
