"""Python's three clients against a running `kproxy dev`, with default settings and the proxy as their only address.

Each writes records with and without keys, gets their offsets, and reads them back. Partitions are assigned by hand;
`tests/integration/broker/test_groups.py` has the groups.
"""

from __future__ import annotations

import asyncio
import uuid

import aiokafka  # type: ignore[import-untyped]
import confluent_kafka
import kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from tests.support.clients.kafka_io import read_with_aiokafka
from tests.support.processes.dev import KproxyProcess

PARTITIONS = 6
RECORDS = 1_000
TIMEOUT_S = 60.0
# partition, offset, key, value
Record = tuple[int, int, bytes | None, bytes | None]


@pytest.fixture
def topic(dev_cluster: KproxyProcess) -> str:
    """A topic of its own for each test, with partitions on every broker."""
    name = f"clients-{uuid.uuid4().hex[:10]}"
    admin = AdminClient({"bootstrap.servers": dev_cluster.kafka})
    admin.create_topics([NewTopic(name, PARTITIONS)])[name].result(TIMEOUT_S)
    return name


def records() -> list[tuple[bytes | None, bytes]]:
    """Keys and values: small and large ones, without a key, and values that are no text."""
    return [
        (None if number % 10 == 0 else b"key-%d" % (number % 50), bytes([number % 256]) * (1 + 7 * (number % 301)))
        for number in range(RECORDS)
    ]


def check(written: list[Record], read: list[Record]) -> None:
    """What was acknowledged at a place is what lies there, all of it, and nothing else."""
    assert len(written) == RECORDS
    assert sorted(written) == sorted(read)
    per_partition: dict[int, list[int]] = {partition: [] for partition in range(PARTITIONS)}
    for partition, offset, _, _ in read:
        per_partition[partition].append(offset)
    for partition, offsets in per_partition.items():
        assert offsets == list(range(len(offsets))), f"partition {partition} was not read in order from 0"
    assert all(per_partition.values()), "some partition got nothing"
    # Within a key, in the order they were sent.
    by_place = {(partition, offset): value for partition, offset, _, value in read}
    for key in {key for key, _ in records() if key is not None}:
        sent = [value for each, value in records() if each == key]
        places = sorted((partition, offset) for partition, offset, each, _ in written if each == key)
        assert len({partition for partition, _ in places}) == 1
        assert [by_place[place] for place in places] == sent


def test_confluent_kafka_writes_and_reads(dev_cluster: KproxyProcess, topic: str) -> None:
    written: list[Record] = []
    errors: list[object] = []

    def delivered(error: object, message: confluent_kafka.Message) -> None:
        if error is not None:
            errors.append(error)
        else:
            written.append((message.partition(), message.offset(), message.key(), message.value()))

    producer = confluent_kafka.Producer({"bootstrap.servers": dev_cluster.kafka})
    for key, value in records():
        producer.produce(topic, value, key, on_delivery=delivered)
    assert producer.flush(TIMEOUT_S) == 0
    assert errors == []

    # Its client insists on a group's name.
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": dev_cluster.kafka, "group.id": "unused", "enable.auto.commit": False}
    )
    try:
        first = confluent_kafka.OFFSET_BEGINNING
        consumer.assign([confluent_kafka.TopicPartition(topic, each, first) for each in range(PARTITIONS)])
        read: list[Record] = []
        polls = 0
        while len(read) < RECORDS:
            polls += 1
            assert polls < TIMEOUT_S, f"{len(read)} of {RECORDS} after {polls} s"
            read += [
                (message.partition(), message.offset(), message.key(), message.value())
                for message in consumer.consume(RECORDS, 1.0)
                if message.error() is None
            ]
    finally:
        consumer.close()
    check(written, read)


def test_kafka_python_writes_and_reads(dev_cluster: KproxyProcess, topic: str) -> None:
    producer = kafka.KafkaProducer(bootstrap_servers=dev_cluster.kafka)
    try:
        futures = [(producer.send(topic, value, key), key, value) for key, value in records()]
        producer.flush(TIMEOUT_S)
        placed = [(future.get(TIMEOUT_S), key, value) for future, key, value in futures]
    finally:
        producer.close()
    written = [(place.partition, place.offset, key, value) for place, key, value in placed]

    consumer = kafka.KafkaConsumer(
        bootstrap_servers=dev_cluster.kafka, auto_offset_reset="earliest", consumer_timeout_ms=TIMEOUT_S * 1000
    )
    try:
        consumer.assign([kafka.TopicPartition(topic, each) for each in range(PARTITIONS)])
        read: list[Record] = []
        for message in consumer:
            read.append((message.partition, message.offset, message.key, message.value))
            if len(read) == RECORDS:
                break
    finally:
        consumer.close()
    check(written, read)


async def test_aiokafka_writes_and_reads(dev_cluster: KproxyProcess, topic: str) -> None:
    producer = aiokafka.AIOKafkaProducer(bootstrap_servers=dev_cluster.kafka)
    await producer.start()
    try:
        futures = [(await producer.send(topic, value, key), key, value) for key, value in records()]
        placed = [(await asyncio.wait_for(future, TIMEOUT_S), key, value) for future, key, value in futures]
    finally:
        await producer.stop()
    written = [(place.partition, place.offset, key, value) for place, key, value in placed]
    check(written, await read_with_aiokafka(dev_cluster.kafka, topic, PARTITIONS, RECORDS, TIMEOUT_S))


@pytest.mark.parametrize("client", ["confluent-kafka", "kafka-python", "aiokafka"])
async def test_a_topic_is_made_by_being_written_to(dev_cluster: KproxyProcess, client: str) -> None:
    topic = f"made-by-{client}-{uuid.uuid4().hex[:8]}"
    if client == "confluent-kafka":
        librdkafka = confluent_kafka.Producer({"bootstrap.servers": dev_cluster.kafka})
        librdkafka.produce(topic, b"first")
        assert await asyncio.to_thread(librdkafka.flush, TIMEOUT_S) == 0
    elif client == "kafka-python":
        python = kafka.KafkaProducer(bootstrap_servers=dev_cluster.kafka)
        await asyncio.to_thread(lambda: python.send(topic, b"first").get(TIMEOUT_S))
        python.close()
    else:
        async with aiokafka.AIOKafkaProducer(bootstrap_servers=dev_cluster.kafka) as producer:
            await asyncio.wait_for(producer.send_and_wait(topic, b"first"), TIMEOUT_S)
    metadata = AdminClient({"bootstrap.servers": dev_cluster.kafka}).list_topics(topic, timeout=TIMEOUT_S)
    assert metadata.topics[topic].error is None


def test_clients_learn_of_the_proxy_only(dev_cluster: KproxyProcess, topic: str) -> None:
    metadata = AdminClient({"bootstrap.servers": dev_cluster.kafka}).list_topics(topic, timeout=TIMEOUT_S)
    addresses = {f"{broker.host}:{broker.port}" for broker in metadata.brokers.values()}
    assert addresses == {dev_cluster.kafka}
    leaders = {each.leader for each in metadata.topics[topic].partitions.values()}
    assert leaders == set(metadata.brokers)
    assert len(metadata.topics[topic].partitions) == PARTITIONS
