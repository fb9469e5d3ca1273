"""Run the demo's Spark jobs: ingest the CSV files into Kafka, and pass the topic's records to the judge."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from kproxy.demo.flights import COLUMNS, KEY_COLUMN, NULL, ROW_NUMBER
from kproxy.demo.judge import Judge
from kproxy.pipeline.ingest.job import start, why
from kproxy.pipeline.ingest.options import IngestOptions
from kproxy.pipeline.ingest.sink import BatchDone
from kproxy.pipeline.kafka_access import NO_OPTIONS, spark_options
from kproxy.pipeline.spark import SparkFailed, as_spark_failure

# The columns of the CSV files, as DDL.
SCHEMA = ", ".join(
    [f"{ROW_NUMBER} INT", *(f"{name} {'INT' if number else 'STRING'}" for name, number in COLUMNS.items())]
)


class Written(NamedTuple):
    """The written stream: `sent` rows by Spark's own count, in `seconds` from the query's start to its end."""

    sent: int
    seconds: float
    micro_batches: int


def write(
    session: Any,
    directory: Path,
    *,
    bootstrap: str,
    topic: str,
    partitions: int,
    checkpoint: Path,
    on_rows: Callable[[int], None] = lambda done: None,
    before_batch: Callable[[int], None] = lambda batch: None,
    kafka: Mapping[str, str] = NO_OPTIONS,
) -> Written:
    """Ingest the files of `directory`, one for each micro-batch; the rows of a key keep the order of `n`.

    Raise SparkFailed. On another thread `on_rows` is called with the number of rows after each micro-batch, and
    `before_batch` with the number of each, from 0 up, before it begins; it may block. `kafka` has options of Kafka's
    clients.
    """
    options = IngestOptions(
        f"csv:{directory}",
        str(checkpoint),
        topic=topic,
        bootstrap=bootstrap,
        partitions=partitions,
        schema=SCHEMA,
        source_options={"nullValue": NULL},
        max_files_per_trigger=1,
        key=(KEY_COLUMN,),
        kafka_options=kafka,
    )
    batches: list[int] = []

    def on_batch(batch: BatchDone) -> None:
        batches.append(batch.written)
        on_rows(sum(batches))

    def stopping() -> bool:
        before_batch(len(batches))
        return False

    began = time.monotonic()
    query = start(session, options, on_batch=on_batch, stopping=stopping)
    try:
        query.awaitTermination()
    except (Py4JError, PySparkException) as error:
        raise SparkFailed(f"Writing failed: {why(error, options)}") from error
    return Written(sum(batches), time.monotonic() - began, len(batches))


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
        # Each Kafka partition is one Spark partition. The rows come by partition, each in the order of its offsets.
        for row in records.select("partition", "offset", "key", "value").toLocalIterator(prefetchPartitions=True):
            partition, offset, key, value = row
            judge.see(partition, offset, _as_bytes(key), _as_bytes(value))
            if judge.read % 1_000 == 0:
                on_rows(judge.read)
        on_rows(judge.read)
        return time.monotonic() - began


def _as_bytes(cell: bytearray | None) -> bytes | None:
    """Convert a binary cell, as Spark returns bytearrays, which cannot be keys of a dict."""
    return None if cell is None else bytes(cell)
