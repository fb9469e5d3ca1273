"""How much of the source is still to be read: files by their list and Spark's, records by offsets."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses

from kproxy.pipeline.ingest.options import FileSource
from kproxy.pipeline.spark import SparkFailed, as_spark_failure

# Files are listed for it, which may take as long as reading them does.
LEAST_PAUSE_S: Final = 5.0
PAUSE_FACTOR: Final = 5


class Behind(NamedTuple):
    """So many `files` or `records`."""

    left: int
    unit: str


class FilesLeft:
    """Files that are there and of which no micro-batch has been begun; asked of Spark now and then, not each time."""

    def __init__(
        self, session: SparkSession, source: FileSource, checkpoint: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._session = session
        self._source = source
        self._log = f"{checkpoint}/sources/0"
        self._clock = clock
        self._not_before = 0.0
        self._known: Behind | None = None

    def look(self, *, at_once: bool = False) -> Behind | None:
        """As of some seconds ago; None where it is not known. `at_once` asks whenever it was asked last."""
        began = self._clock()
        if began < self._not_before and not at_once:
            return self._known
        try:
            with as_spark_failure("The files cannot be listed"):
                self._known = Behind(self._count(), "files")
        except SparkFailed:
            # Nothing has been read yet, so that there is no list; or files went while they were listed.
            self._known = None
        ended = self._clock()
        self._not_before = ended + max(LEAST_PAUSE_S, PAUSE_FACTOR * (ended - began))
        return self._known

    def _count(self) -> int:
        names = {
            name: value
            for name, value in self._source.options.items()
            if name in ("pathGlobFilter", "recursiveFileLookup")
        }
        there = self._session.read.format("binaryFile").options(**names).load(self._source.path)
        paths = there.select(_same(F.col("path")).alias("path"))
        return int(paths.join(self._begun(), "path", "left_anti").count())

    def _begun(self) -> DataFrame:
        """Spark's list: a version in the first line of each file, then a line of JSON for each file that it took."""
        lines = self._session.read.text(self._log).where(F.col("value").startswith("{"))
        path = F.url_decode(F.replace(F.get_json_object("value", "$.path"), F.lit("+"), F.lit("%2B")))
        return lines.select(_same(path).alias("path")).distinct()


def _same(path: Column) -> Column:
    """`file:/x` and `file:///x` are one."""
    return F.regexp_replace(path, "^([A-Za-z][A-Za-z0-9+.-]*):/+", "$1:/")


def records_behind(progress: Mapping[str, Any] | None) -> Behind | None:
    """From a query's last progress, of a Kafka source; None where it does not tell. Pure."""
    total = None
    for source in () if progress is None else progress["sources"]:
        latest, end = _offsets(source["latestOffset"]), _offsets(source["endOffset"])
        if latest is None or end is None:
            continue
        total = total or 0
        for topic, partitions in latest.items():
            done = end.get(topic, {})
            total += sum(max(0, offset - done.get(partition, 0)) for partition, offset in partitions.items())
    return None if total is None else Behind(total, "records")


def _offsets(value: Any) -> dict[str, dict[str, int]] | None:
    """A source's offsets as its progress has them: text or object, by topic and partition."""
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        return None
    return found
