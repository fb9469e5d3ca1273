"""The demo's Spark job: CSV files to Kafka, and Kafka to the judge."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from kproxy.demo.flights import COLUMNS, KEY_COLUMN, NULL, ROW_NUMBER, Flights
from kproxy.demo.judge import Judge
from kproxy.pipeline.kafka_access import NO_OPTIONS, spark_options
from kproxy.pipeline.spark import as_spark_failure


def flights_schema() -> StructType:
    """Return the columns of the CSV files. A stream needs a schema, and inference would read the data twice."""
    columns = [StructField(ROW_NUMBER, IntegerType())]
    for name, is_number in COLUMNS.items():
        columns.append(StructField(name, IntegerType() if is_number else StringType()))
    return StructType(columns)


def messages(flights: DataFrame, *, topic: str, partitions: int) -> DataFrame:
    """Return Kafka messages (key, value, topic) for `flights`, those of a key in the order of `n`.

    All rows of a key are in one of `partitions` Spark partitions, and so in one task, which passes them to one producer
    in the order of `n`; Kafka keeps that order. Rows without a tail number have a null key and no order.
    """
    ordered = flights.repartition(partitions, KEY_COLUMN).sortWithinPartitions(ROW_NUMBER)
    value = F.to_json(F.struct(*ordered.columns), {"ignoreNullFields": "false"})
    return ordered.select(F.col(KEY_COLUMN).alias("key"), value.alias("value"), F.lit(topic).alias("topic"))


def arrivals(records: DataFrame) -> DataFrame:
    """Return the columns that the judge needs, unsorted and not decoded."""
    return records.select("partition", "offset", "key", "value")


PROGRESS_POLL_S = 0.25


class Written(NamedTuple):
    """The written stream: `sent` rows by Spark's own count, in `seconds` from the query's start to its end."""

    sent: int
    seconds: float
    micro_batches: int


def write(
    session: Any,
    flights: Flights,
    *,
    bootstrap: str,
    topic: str,
    partitions: int,
    checkpoint: Path,
    on_rows: Callable[[int], None] = lambda done: None,
    before_batch: Callable[[int], None] = lambda batch_id: None,
    kafka: Mapping[str, str] = NO_OPTIONS,
) -> Written:
    """Stream the files into the Kafka sink, one file for each micro-batch.

    Raise SparkFailed. `on_rows` is called with the approximate number of rows written. `before_batch` is called on
    another thread with the number of each micro-batch, from 0 up, before it begins, and may block it. `kafka` has
    options of Kafka's clients.
    """

    def write_batch(batch: DataFrame, batch_id: int) -> None:
        before_batch(batch_id)
        # A streaming DataFrame cannot be sorted, as a stream has no end, and without a sort a shuffle passes rows to a
        # task in the order in which blocks arrive. In foreachBatch the micro-batch is an ordinary DataFrame and can be
        # sorted. The topic is a column, so that the sink needs no option but the address.
        rows = messages(batch, topic=topic, partitions=partitions)
        rows.write.format("kafka").options(**cluster).save()

    cluster = {**spark_options(kafka), "kafka.bootstrap.servers": bootstrap}
    with as_spark_failure("Writing failed"):
        source = (
            session.readStream.schema(flights_schema())
            .option("header", True)
            .option("nullValue", NULL)
            .option("mode", "FAILFAST")
            .option("maxFilesPerTrigger", 1)
            .csv(str(flights.directory))
        )
        began = time.monotonic()
        query = (
            source.writeStream.foreachBatch(write_batch)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        progress = _BatchProgress(session, flights.file_rows, partitions)
        while not query.awaitTermination(PROGRESS_POLL_S):
            on_rows(progress.rows(query))
        seconds = time.monotonic() - began
        batches = [int(batch["numInputRows"]) for batch in query.recentProgress]
        on_rows(sum(batches))
        return Written(sum(batches), seconds, sum(1 for rows in batches if rows))


class _BatchProgress:
    """Estimate the rows written: whole micro-batches, and the share of finished tasks of the current one."""

    def __init__(self, session: Any, file_rows: Sequence[int], partitions: int) -> None:
        self._tracker = session.sparkContext.statusTracker()
        self._file_rows = file_rows
        self._partitions = partitions
        self._rows = 0

    def rows(self, query: Any) -> int:
        last = query.lastProgress
        batches = 0 if last is None else last["batchId"] + 1
        rows = sum(self._file_rows[:batches])
        if batches < len(self._file_rows):
            for stage in map(self._tracker.getStageInfo, self._tracker.getActiveStageIds()):
                # The stage before the shuffle has another number of tasks, one for each file.
                if stage is not None and stage.numTasks == self._partitions:
                    rows += self._file_rows[batches] * stage.numCompletedTasks // stage.numTasks
        self._rows = max(self._rows, rows)
        return self._rows


def read_back(
    session: Any,
    judge: Judge,
    *,
    bootstrap: str,
    topic: str,
    on_rows: Callable[[int], None] = lambda done: None,
    kafka: Mapping[str, str] = NO_OPTIONS,
) -> float:
    """Pass every record of the topic to the judge, each partition in the order of its offsets.

    Return the seconds it took. Raise SparkFailed.
    """
    with as_spark_failure("Reading back failed"):
        began = time.monotonic()
        records = (
            session.read.format("kafka")
            .options(**spark_options(kafka))
            .option("kafka.bootstrap.servers", bootstrap)
            .option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .load()
        )
        # Each Kafka partition is one Spark partition; they come one after another, each in the order of its offsets.
        for row in arrivals(records).toLocalIterator(prefetchPartitions=True):
            partition, offset, key, value = row
            judge.see(partition, offset, _as_bytes(key), _as_bytes(value))
            if judge.read % 1_000 == 0:
                on_rows(judge.read)
        on_rows(judge.read)
        return time.monotonic() - began


def _as_bytes(cell: bytearray | None) -> bytes | None:
    """Convert a binary cell: Spark returns bytearrays, which cannot be keys of a dict."""
    return None if cell is None else bytes(cell)
