"""Write and read a few records with librdkafka and acks=all, for tests about other things."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import confluent_kafka
from kafka.admin import KafkaAdminClient

TIMEOUT_S = 60.0


def produce(bootstrap: str, topic: str, values: Sequence[bytes], partition: int = 0) -> list[bytes]:
    """Write `values` to one partition, in order; return them once they are acknowledged."""
    settings = {"bootstrap.servers": bootstrap, "acks": "all"}
    assert set(write(settings, topic, values, partition=partition)) <= {None}
    return list(values)


def write(
    settings: Mapping[str, Any], topic: str, values: Iterable[bytes], *, partition: int = -1, pause_s: float = 0.0
) -> list[object]:
    """Write the values with these settings; the outcomes, None for each that is written."""
    outcomes: list[object] = []

    def delivered(error: Any, _: object) -> None:
        outcomes.append(None if error is None else error.name())

    producer = confluent_kafka.Producer({"log_level": 0, **settings})
    for value in values:
        producer.produce(topic, value, partition=partition, on_delivery=delivered)
        producer.poll(0)
        time.sleep(pause_s)
    assert producer.flush(TIMEOUT_S) == 0, "not all was acknowledged in time"
    return outcomes


def create_topic(bootstrap: str, topic: str, partitions: int) -> None:
    """Create a topic with the default replication, and wait until it has leaders."""
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        settings = {"num_partitions": partitions, "replication_factor": -1}
        admin.create_topics({topic: settings}, wait_for_metadata=True)
    finally:
        admin.close()


def read_partition(bootstrap: str, topic: str, partition: int, count: int) -> list[bytes]:
    """The first `count` values of a partition, in order."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "unused", "enable.auto.commit": False}
    )
    try:
        consumer.assign([confluent_kafka.TopicPartition(topic, partition, confluent_kafka.OFFSET_BEGINNING)])
        values: list[bytes] = []
        deadline = time.monotonic() + TIMEOUT_S
        while len(values) < count:
            assert time.monotonic() < deadline, f"{len(values)} of {count} records within {TIMEOUT_S} s"
            for message in consumer.consume(count - len(values), 1.0):
                if message.error() is None:
                    value = message.value()
                    assert isinstance(value, bytes)
                    values.append(value)
        return values
    finally:
        consumer.close()


def read_values(settings: dict[str, Any], topic: str, count: int, timeout_s: float = TIMEOUT_S) -> set[bytes]:
    """`count` different values of a topic, read by a consumer group with the topic's name and these settings."""
    consumer = confluent_kafka.Consumer({**settings, "group.id": topic, "auto.offset.reset": "earliest"})
    try:
        consumer.subscribe([topic])
        values: set[bytes] = set()
        deadline = time.monotonic() + timeout_s
        while len(values) < count:
            assert time.monotonic() < deadline, f"{len(values)} of {count} values within {timeout_s} s"
            message = consumer.poll(1.0)
            if message is not None and message.error() is None:
                value = message.value()
                assert isinstance(value, bytes)
                values.add(value)
        return values
    finally:
        consumer.close()


class Record(NamedTuple):
    """A record to be written; `partition` None leaves the choice to the client."""

    key: bytes | None
    value: bytes | None
    partition: int | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()


class Placed(NamedTuple):
    """A record that was read."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int | None = None


def read_topic(
    bootstrap: str,
    topic: str,
    partitions: int,
    at_least: int,
    timeout_s: float = TIMEOUT_S,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> list[Placed]:
    """All records of a topic that has lost none; in order within each partition.

    `at_least` is the number of acknowledged records: with acks=1 the end shown to readers may lag behind.
    """
    consumer = confluent_kafka.Consumer(
        {
            **settings,
            "bootstrap.servers": bootstrap,
            "group.id": "unused",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            # An answer without records marks the end of a partition; a broker would otherwise delay it.
            "fetch.wait.max.ms": 10,
        }
    )
    try:
        # From 0 and not from the beginning, because asking for that would take half a second.
        consumer.assign([confluent_kafka.TopicPartition(topic, each, 0) for each in range(partitions)])
        read: list[Placed] = []
        at_end: set[int | None] = set()
        deadline = time.monotonic() + timeout_s
        while len(at_end) < partitions or len(read) < at_least:
            assert time.monotonic() < deadline, f"{len(read)} of {at_least} records within {timeout_s} s"
            for message in consumer.consume(10_000, 0.1):
                error = message.error()
                if error is None:
                    read.append(_placed(message))
                elif error.code() == confluent_kafka.KafkaError._PARTITION_EOF:
                    at_end.add(message.partition())
        return read
    finally:
        consumer.close()


def _placed(message: Any) -> Placed:
    headers = tuple(message.headers() or ())
    return Placed(
        message.partition(), message.offset(), message.key(), message.value(), headers, message.timestamp()[1]
    )
