"""Write and read records with each of Python's three clients, through one interface."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import aiokafka  # type: ignore[import-untyped]
import kafka

from tests.support.clients.kafka_io import Record, read_topic
from tests.support.clients.librdkafka_client import run_librdkafka

TIMEOUT_S = 60.0
# A client's own settings, by its own names.
Settings = Mapping[str, Any]
KeyValue = tuple[bytes | None, bytes]
Written = tuple[int, int, bytes | None, bytes | None]
"""Partition, offset, key and value."""


def at(client: str, bootstrap: str) -> dict[str, Any]:
    """A client's settings, all default but the address."""
    return {"bootstrap.servers" if client == "librdkafka" else "bootstrap_servers": bootstrap}


def _write_with_librdkafka(settings: Settings, topic: str, records: Iterable[KeyValue]) -> list[Written]:
    sent: list[KeyValue] = []

    def each() -> Iterable[Record]:
        for pair in records:
            sent.append(pair)
            yield Record(*pair)

    run = run_librdkafka(topic, each(), settings)
    assert run.errors == {}
    return [(*run.acknowledged[number], *pair) for number, pair in enumerate(sent)]


def _read_with_librdkafka(settings: Settings, topic: str, partitions: int, count: int) -> list[Written]:
    read = read_topic(settings["bootstrap.servers"], topic, partitions, count, TIMEOUT_S, settings)
    return [each[:4] for each in read]


def _write_with_kafka_python(settings: Settings, topic: str, records: Iterable[KeyValue]) -> list[Written]:
    producer = kafka.KafkaProducer(**settings)
    try:
        futures = [(producer.send(topic, value, key), key, value) for key, value in records]
        placed = [(future.get(TIMEOUT_S), key, value) for future, key, value in futures]
    finally:
        producer.close()
    return [(place.partition, place.offset, key, value) for place, key, value in placed]


def _read_with_kafka_python(settings: Settings, topic: str, partitions: int, count: int) -> list[Written]:
    options = {"auto_offset_reset": "earliest", "consumer_timeout_ms": TIMEOUT_S * 1000}
    consumer = kafka.KafkaConsumer(**settings, **options)
    try:
        consumer.assign([kafka.TopicPartition(topic, each) for each in range(partitions)])
        return [(each.partition, each.offset, each.key, each.value) for _, each in zip(range(count), consumer)]  # noqa: B905
    finally:
        consumer.close()


def _write_with_aiokafka(settings: Settings, topic: str, records: Iterable[KeyValue]) -> list[Written]:
    async def write() -> list[Written]:
        async with aiokafka.AIOKafkaProducer(**settings) as producer:
            futures = [(await producer.send(topic, value, key), key, value) for key, value in records]
            placed = [(await asyncio.wait_for(future, TIMEOUT_S), key, value) for future, key, value in futures]
        return [(place.partition, place.offset, key, value) for place, key, value in placed]

    return asyncio.run(write())


def _read_with_aiokafka(settings: Settings, topic: str, partitions: int, count: int) -> list[Written]:
    async def read() -> list[Written]:
        consumer = aiokafka.AIOKafkaConsumer(**settings, auto_offset_reset="earliest")
        await consumer.start()
        try:
            consumer.assign([aiokafka.TopicPartition(topic, each) for each in range(partitions)])
            async with asyncio.timeout(TIMEOUT_S):
                found = [await consumer.getone() for _ in range(count)]
        finally:
            await consumer.stop()
        return [(each.partition, each.offset, each.key, each.value) for each in found]

    return asyncio.run(read())


_WRITERS: dict[str, Callable[[Settings, str, Iterable[KeyValue]], list[Written]]] = {
    "librdkafka": _write_with_librdkafka,
    "kafka-python": _write_with_kafka_python,
    "aiokafka": _write_with_aiokafka,
}
_READERS: dict[str, Callable[[Settings, str, int, int], list[Written]]] = {
    "librdkafka": _read_with_librdkafka,
    "kafka-python": _read_with_kafka_python,
    "aiokafka": _read_with_aiokafka,
}
CLIENTS = tuple(_WRITERS)
IDEMPOTENT: Mapping[str, Settings] = MappingProxyType(
    {
        "librdkafka": {"enable.idempotence": True, "linger.ms": 2, "batch.num.messages": 50},
        "kafka-python": {"enable_idempotence": True},
        "aiokafka": {"enable_idempotence": True},
    }
)


def write(client: str, settings: Settings, topic: str, records: Iterable[KeyValue]) -> list[Written]:
    """Write the records in order; return them with their places once all are acknowledged."""
    return _WRITERS[client](settings, topic, records)


def read(client: str, settings: Settings, topic: str, partitions: int, count: int) -> list[Written]:
    """The first `count` records of a topic, in order within each partition."""
    return _READERS[client](settings, topic, partitions, count)


def check(written: Sequence[Written], found: Sequence[Written], partitions: int) -> None:
    """Check that each acknowledged record is at its place, nothing else is there, and each key is in sending order."""
    assert sorted(written) == sorted(found)
    for partition in range(partitions):
        offsets = [offset for each, offset, _, _ in found if each == partition]
        assert offsets == list(range(len(offsets))), f"partition {partition} was not read in order from 0"
        assert offsets, f"nothing in partition {partition}"
    for key in {key for _, _, key, _ in written if key is not None}:
        assert len({partition for partition, _, each, _ in written if each == key}) == 1
        sent = [value for _, _, each, value in written if each == key]
        assert [value for _, _, each, value in found if each == key] == sent
