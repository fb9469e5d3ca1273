"""Write each row of a Spark Structured Streaming query once, by owning the partitions that its tasks write to.

Spark's foreachBatch may run a batch again: after a failed task, a lost executor, or a restart of the driver. The
earlier attempt may still be running and writing. Here each task claims the partitions that it writes to, finds the end
of their logs, and writes the missing rows:

  - Once a task has claimed its partitions, no other writer can write to them, and no earlier request of another writer
    is appended. So the end of the log that the task finds stays the end until it writes.
  - The generation is the batch's number plus one, because generation 0 takes over from anybody. A later batch takes
    over from an earlier one, and another attempt from an attempt at the same batch. A late task of an earlier batch is
    refused with "is owned with a generation above ...".
  - Each record has its batch and its row number, which is the same in every attempt. A task that finds the last row of
    its batch in the log has nothing to write. A task that finds a later batch there is late and writes nothing either.

A restarted query needs its checkpoint, and a source that can be read again (here rows are counted; files and Kafka also
work). With speculative execution two attempts take over from each other until Spark gives up: leave it off.

    kproxy dev --writer-group orders=writers
    pip install '.[demo]'
    python examples/spark_foreach_batch.py --checkpoint /tmp/orders-checkpoint

Kill it at any moment (kill -9), start it again with the same checkpoint, and read the topic: each partition has all
rows in order, and none twice. kproxy must also be installed on Spark's executors.
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
    """The destination of the rows."""

    bootstrap: str
    topic: str
    partitions: int
    group: str


def foreach_batch(sink: Sink) -> Callable[[DataFrame, int], None]:
    """Return the function for DataStreamWriter.foreachBatch. A row's `value` determines its partition."""

    def write_batch(rows: DataFrame, batch: int) -> None:
        placed = rows.withColumn("partition", F.pmod(F.hash("value"), F.lit(sink.partitions)))
        placed.repartition(sink.partitions, "partition").foreachPartition(lambda some: write_rows(sink, batch, some))
        print(f"batch {batch} is written", flush=True)

    return write_batch


def write_rows(sink: Sink, batch: int, rows: Iterable[Row]) -> None:
    """Run one task of a batch: write all rows of some partitions. An executor may run it more than once."""
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
    # Once this record is acknowledged, all earlier ones can be read.
    claimed = send(sink, producer, partition, {"claimed_for": batch}).get(ACK_TIMEOUT_S)
    last = last_place(sink, partition, claimed.offset)
    sent = [
        send(sink, producer, partition, {"batch": batch, "row": row, "value": value})
        for row, value in enumerate(values)
        if (batch, row) > last
    ]
    # A row that is not acknowledged fails the task, and Spark runs the task again.
    for each in sent:
        each.get(ACK_TIMEOUT_S)


def send(sink: Sink, producer: KafkaProducer, partition: int, record: dict[str, Any]) -> Any:
    return producer.send(sink.topic, json.dumps(record).encode(), partition=partition)


def last_place(sink: Sink, partition: int, end: int) -> Place:
    """Return the place of the last row before that offset; (-1, -1) if there is none."""
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
    """Return the records from offset `start` to before `end`."""
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
    # Executors on this machine import kproxy from the same place as this script.
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
