"""Spark Structured Streaming that writes each row once, by owning the partitions it writes to.

Spark's foreachBatch may run a batch again: a task that failed, an executor that was taken for dead, a driver that was
started anew. The one before may not be dead at all, and write on. Here each task claims the partitions that it writes
to, looks where their logs end, and writes what is missing:

  - Once they are claimed nobody else gets anything in: neither an executor that wakes up, nor what of it is still under
    way. So what the log says when it is looked at stays true while this task writes.
  - The generation is the batch's number (plus one, as 0 takes over from anybody). A later batch takes over from an
    earlier one, and another attempt from an attempt at the same batch; who comes late with an earlier batch is refused
    with "is owned with a generation above ...".
  - Each record carries its batch and its row, which Spark counts alike in every attempt. A task that finds the last row
    of its batch in the log has nothing to do; one that finds a later batch there comes late and writes nothing either.

So a restarted query needs its checkpoint, as any, and a source that can be read again (here rows are counted; files and
Kafka will do). Speculative execution has two attempts take over from each other until Spark gives up: leave it off.

    kproxy dev --writer-group orders=writers
    pip install '.[demo]'
    python examples/spark_foreach_batch.py --checkpoint /tmp/orders-checkpoint

Kill it at any moment (kill -9), start it again with the same checkpoint, and read the topic: in each partition the rows
stand one after another, none twice. kproxy has to be installed where Spark's executors run, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import KafkaTimeoutError
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses
from pyspark.sql.streaming import StreamingQuery

from kproxy.claims.client import own_sync

ACK_TIMEOUT_S = 60.0
LOOK_BACK = 100
Place = tuple[int, int]
"""A batch and the number of a row in it."""


@dataclass(frozen=True)
class Sink:
    """Where the rows go."""

    bootstrap: str
    topic: str
    partitions: int
    group: str


def foreach_batch(sink: Sink) -> Callable[[DataFrame, int], None]:
    """What DataStreamWriter.foreachBatch takes. `value` is what a row is; where it goes follows from it."""

    def write_batch(rows: DataFrame, batch: int) -> None:
        placed = rows.withColumn("partition", F.pmod(F.hash("value"), F.lit(sink.partitions)))
        placed.repartition(sink.partitions, "partition").foreachPartition(lambda some: write_rows(sink, batch, some))
        print(f"batch {batch} is written", flush=True)

    return write_batch


def write_rows(sink: Sink, batch: int, rows: Iterable[Row]) -> None:
    """One task of a batch: all rows of some partitions. Runs in an executor, and maybe more than once."""
    rows_of = defaultdict(list)
    for row in rows:
        rows_of[row["partition"]].append(row["value"])
    if not rows_of:
        return
    producer = KafkaProducer(bootstrap_servers=sink.bootstrap, acks="all")
    try:
        claims = [(sink.topic, partition) for partition in rows_of]
        with own_sync(producer, sink.group, claims, generation=batch + 1):
            for partition, values in rows_of.items():
                # Sorted, so that a row has the same number in each attempt, in whatever order Spark brings them.
                write_missing(sink, producer, partition, batch, sorted(values))
    finally:
        producer.close()


def write_missing(sink: Sink, producer: KafkaProducer, partition: int, batch: int, values: list[Any]) -> None:
    # When this one is acknowledged all that was written before can be read.
    claimed = send(sink, producer, partition, {"claimed_for": batch}).get(ACK_TIMEOUT_S)
    last = last_place(sink, partition, claimed.offset)
    sent = [
        send(sink, producer, partition, {"batch": batch, "row": row, "value": value})
        for row, value in enumerate(values)
        if (batch, row) > last
    ]
    # A row that was not acknowledged fails the task, and Spark runs it again.
    for each in sent:
        each.get(ACK_TIMEOUT_S)


def send(sink: Sink, producer: KafkaProducer, partition: int, record: dict[str, Any]) -> Any:
    return producer.send(sink.topic, json.dumps(record).encode(), partition=partition)


def last_place(sink: Sink, partition: int, end: int) -> Place:
    """Of the last row before that offset; (-1, -1) where there is none."""
    consumer = KafkaConsumer(bootstrap_servers=sink.bootstrap, enable_auto_commit=False, group_id=None)
    try:
        where = TopicPartition(sink.topic, partition)
        consumer.assign([where])
        first = consumer.beginning_offsets([where])[where]
        while end > first:
            start = max(first, end - LOOK_BACK)
            consumer.seek(where, start)
            if found := [(each["batch"], each["row"]) for each in read(consumer, start, end) if "batch" in each]:
                return found[-1]
            end = start
        return (-1, -1)
    finally:
        consumer.close()


def read(consumer: KafkaConsumer, start: int, end: int) -> list[dict[str, Any]]:
    """The records from one offset to before another."""
    records: list[dict[str, Any]] = []
    while start < end:
        fetched = [each for some in consumer.poll(timeout_ms=int(ACK_TIMEOUT_S * 1000)).values() for each in some]
        if not fetched:
            raise KafkaTimeoutError(f"nothing can be read at offset {start}")
        records += [json.loads(each.value) for each in fetched if each.offset < end]
        start = fetched[-1].offset + 1
    return records


def start(session: SparkSession, sink: Sink, checkpoint: str, rows_per_batch: int) -> StreamingQuery:
    """Count rows, some more in each batch, and write them."""
    rows = session.readStream.format("rate-micro-batch").option("rowsPerBatch", rows_per_batch).load()
    writing = rows.select("value").writeStream.foreachBatch(foreach_batch(sink))
    return writing.option("checkpointLocation", checkpoint).trigger(processingTime="1 second").start()


def main() -> None:
    parser = argparse.ArgumentParser(description="Rows that Spark counts, written once each to partitions it owns.")
    parser.add_argument("--bootstrap", default="127.0.0.1:9092", help="where kproxy listens")
    parser.add_argument("--topic", default="orders")
    parser.add_argument("--partitions", type=int, default=1, help="how many the topic has")
    parser.add_argument("--group", default="writers", help="the topic's writer group, as kproxy was told")
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="where Spark keeps how far it has come")
    parser.add_argument("--rows-per-batch", type=int, default=1_000)
    given = parser.parse_args()
    sink = Sink(given.bootstrap, given.topic, given.partitions, given.group)
    # Executors on this machine have kproxy where this script has it.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    session = SparkSession.builder.appName("foreachBatch that owns").getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    query = start(session, sink, given.checkpoint, given.rows_per_batch)
    with contextlib.suppress(KeyboardInterrupt):
        query.awaitTermination()
    query.stop()
    session.stop()


if __name__ == "__main__":
    main()
