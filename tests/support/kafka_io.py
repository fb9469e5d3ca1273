"""A few records in and out, for tests that are about something else. librdkafka, acks=all."""

from __future__ import annotations

import time
from collections.abc import Sequence

import confluent_kafka

TIMEOUT_S = 30.0


def produce(bootstrap: str, topic: str, values: Sequence[bytes], partition: int = 0) -> list[bytes]:
    """Write `values` to one partition, in order; they are acknowledged when this returns, and returned."""
    failed: list[object] = []

    def delivered(error: object, _: object) -> None:
        if error is not None:
            failed.append(error)

    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "acks": "all"})
    for value in values:
        producer.produce(topic, value, partition=partition, on_delivery=delivered)
    assert producer.flush(TIMEOUT_S) == 0, "not all was acknowledged in time"
    assert failed == []
    return list(values)


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
