"""Unchanged clients write to three reference brokers, without a proxy, and read the same records."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import confluent_kafka
import kafka
import kafka.errors
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer  # type: ignore[import-untyped]
from aiokafka import TopicPartition as AioTopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic  # type: ignore[attr-defined]

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy_codec.record_batch import iterate_batches
from tests.integration.broker.test_broker_apis import fetch
from tests.support.brokers.reference_broker import BrokerProcess, Cluster
from tests.support.waiting import PATIENCE_S, wait_for

pytest_plugins = ["tests.support.etcd.embedded", "tests.support.brokers.reference_broker"]

RECORDS = 300


@pytest.fixture
def topic() -> str:
    return f"c-{uuid.uuid4().hex[:12]}"


def expected(topic: str) -> set[tuple[bytes, bytes]]:
    return {(b"%d" % number, b"value %d of %s" % (number, topic.encode())) for number in range(RECORDS)}


def in_order_within_partitions(records: list[tuple[int, int, bytes]]) -> bool:
    """Return whether offsets and keys both increase in each partition. Records are (partition, offset, key)."""
    last: dict[int, tuple[int, int]] = {}
    for partition, offset, key in records:
        before = last.get(partition, (-1, -1))
        if not (before[0] < offset and before[1] < int(key)):
            return False
        last[partition] = (offset, int(key))
    return True


def test_kafka_python_writes_and_reads_back(cluster: Cluster, topic: str) -> None:
    producer = kafka.KafkaProducer(bootstrap_servers=cluster.bootstrap.split(","))
    sent = [
        producer.send(topic, key=key, value=value)
        for key, value in sorted(expected(topic), key=lambda pair: int(pair[0]))
    ]
    producer.flush()
    places = {(future.get().partition, future.get().offset) for future in sent}
    producer.close()
    assert len(places) == RECORDS
    assert {partition for partition, _ in places} == {0, 1, 2}, "some broker got nothing"
    consumer = kafka.KafkaConsumer(
        bootstrap_servers=cluster.bootstrap.split(","),
        auto_offset_reset="earliest",
        consumer_timeout_ms=PATIENCE_S * 1000,
    )
    consumer.assign([kafka.TopicPartition(topic, partition) for partition in range(3)])
    read = []
    for record in consumer:
        read.append(record)
        if len(read) == RECORDS:
            break
    consumer.close()
    assert {(record.key, record.value) for record in read} == expected(topic)
    assert in_order_within_partitions([(record.partition, record.offset, record.key) for record in read])


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_librdkafka_writes_compressed_and_idempotent_and_reads_back(
    cluster: Cluster, topic: str, compression: str
) -> None:
    options = {"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True, "compression.type": compression}
    failures = []
    producer = confluent_kafka.Producer(options | {"linger.ms": 20})

    def delivered(error: Any, _: Any) -> None:
        if error is not None:
            failures.append(error)

    for key, value in sorted(expected(topic), key=lambda pair: int(pair[0])):
        producer.produce(topic, key=key, value=value, on_delivery=delivered)
    assert producer.flush(PATIENCE_S) == 0
    assert not failures
    read = read_with_librdkafka(cluster, topic)
    assert {(record.key(), record.value()) for record in read} == expected(topic)
    assert in_order_within_partitions([(record.partition(), record.offset(), record.key()) for record in read])
    with cluster.leader(topic).client() as client:
        stored = {batch.compression for batch in iterate_batches(fetch(client, topic, version=12).records)}
        producers = {batch.producer_id for batch in iterate_batches(fetch(client, topic, version=12).records)}
    assert stored == {["none", "gzip", "snappy", "lz4", "zstd"].index(compression)}, "compression was lost on the way"
    assert -1 not in producers


def read_with_librdkafka(cluster: Cluster, topic: str) -> list[Any]:
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": cluster.bootstrap, "group.id": "unused", "enable.auto.commit": False}
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, partition, 0) for partition in range(3)])
    read: list[Any] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(read) < RECORDS and time.monotonic() < deadline:
        read += [record for record in consumer.consume(RECORDS, timeout=0.5) if record.error() is None]
    consumer.close()
    return read


async def test_aiokafka_writes_and_reads_back(cluster: Cluster, topic: str) -> None:
    async with AIOKafkaProducer(bootstrap_servers=cluster.bootstrap) as producer:
        sent = [
            await producer.send(topic, key=key, value=value)
            for key, value in sorted(expected(topic), key=lambda pair: int(pair[0]))
        ]
        for future in sent:
            await future
    consumer = AIOKafkaConsumer(bootstrap_servers=cluster.bootstrap, auto_offset_reset="earliest")
    consumer.assign([AioTopicPartition(topic, partition) for partition in range(3)])
    await consumer.start()
    read: list[Any] = []
    while len(read) < RECORDS:
        found = await consumer.getmany(timeout_ms=round(PATIENCE_S * 1000))
        assert found, f"{len(read)} of {RECORDS} came"
        read += [record for records in found.values() for record in records]
    await consumer.stop()
    assert {(record.key, record.value) for record in read} == expected(topic)


def test_offsets_by_time_are_found_by_a_client(cluster: Cluster, topic: str) -> None:
    producer = kafka.KafkaProducer(bootstrap_servers=cluster.bootstrap.split(","), linger_ms=0)
    for timestamp in (1_000, 2_000, 3_000):
        producer.send(topic, b"v", partition=0, timestamp_ms=timestamp).get()
    producer.close()
    consumer = kafka.KafkaConsumer(bootstrap_servers=cluster.bootstrap.split(","))
    partition = kafka.TopicPartition(topic, 0)
    found = consumer.offsets_for_times({partition: 1_500})[partition]
    ends = consumer.end_offsets([partition])[partition]
    consumer.close()
    assert (found.offset, found.timestamp, ends) == (1, 2_000, 3)


def test_idempotent_producer_survives_restarts_and_kill_9(etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path) -> None:
    """Every acknowledged record exists once, in order, although its only broker is restarted and killed."""
    broker = BrokerProcess(1, tmp_path / "1", etcd.endpoint, etcd_prefix, lease_ttl_s=2).start()
    broker.arguments.append(f"listen={broker.port}")  # clients only know this address
    acknowledged: list[int] = []
    failures: list[Any] = []
    stop = threading.Event()

    def produce() -> None:
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": broker.address, "enable.idempotence": True, "linger.ms": 2, "retry.backoff.ms": 50}
        )
        for number in itertools.count():
            if stop.is_set():
                break

            def delivered(error: Any, _: Any, number: int = number) -> None:
                (failures if error is not None else acknowledged).append(error or number)

            producer.produce("t", partition=0, value=b"%d" % number, on_delivery=delivered)
            producer.poll(0)
            time.sleep(0.001)
        assert producer.flush(PATIENCE_S) == 0

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        for ending in (broker.terminate, broker.kill):
            count = len(acknowledged)
            wait_for(lambda count=count: len(acknowledged) > count + 100, what="it is acknowledged again")
            ending()
            broker.start()
        stop.set()
        thread.join(2 * PATIENCE_S)
        with broker.client() as client:
            end = fetch(client, "t", max_wait_ms=0).high_watermark
        read = [int(record.value()) for record in read_partition(broker, "t", end)]
    finally:
        stop.set()
        broker.stop()
    assert not failures
    assert len(acknowledged) > 200
    assert read == sorted(set(acknowledged)) == acknowledged


def read_partition(broker: BrokerProcess, topic: str, end: int) -> list[Any]:
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": broker.address, "group.id": "unused", "enable.auto.commit": False}
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    read: list[Any] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(read) < end and time.monotonic() < deadline:
        read += [record for record in consumer.consume(1000, timeout=0.5) if record.error() is None]
    consumer.close()
    return read


# An unsupported feature fails at once, with the reason


def test_librdkafka_transactions_are_refused(cluster: Cluster) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": cluster.bootstrap, "transactional.id": "t"})
    started = time.monotonic()
    with pytest.raises(confluent_kafka.KafkaException) as raised:
        producer.init_transactions(3 * PATIENCE_S)
    assert time.monotonic() - started < PATIENCE_S
    assert "transactions are not offered" in str(raised.value)


def test_kafka_python_transactions_are_refused(cluster: Cluster) -> None:
    producer = kafka.KafkaProducer(
        bootstrap_servers=cluster.bootstrap.split(","), transactional_id="t", max_block_ms=3000 * PATIENCE_S
    )
    started = time.monotonic()
    with pytest.raises(kafka.errors.KafkaError):
        producer.init_transactions()
    assert time.monotonic() - started < PATIENCE_S
    producer.close(timeout=1)


# Administration


def test_librdkafka_admin_creates_describes_and_deletes(cluster: Cluster, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap, "allow.auto.create.topics": False})
    admin.create_topics([NewTopic(topic, num_partitions=6, replication_factor=2)])[topic].result(PATIENCE_S)
    metadata = admin.list_topics(topic, timeout=PATIENCE_S)
    assert {each.leader for each in metadata.topics[topic].partitions.values()} == {1, 2, 3}
    assert {len(each.replicas) for each in metadata.topics[topic].partitions.values()} == {2}
    assert len(admin.describe_cluster().result(PATIENCE_S).nodes) == 3
    resource = ConfigResource("topic", topic)
    assert admin.describe_configs([resource])[resource].result(PATIENCE_S)["max.message.bytes"].value == "1048588"
    four = NewTopic(f"{topic}-4", num_partitions=1, replication_factor=4)
    with pytest.raises(confluent_kafka.KafkaException, match="replication factor"):
        admin.create_topics([four])[four.topic].result(PATIENCE_S)
    admin.delete_topics([topic])[topic].result(PATIENCE_S)
    assert topic not in admin.list_topics(timeout=PATIENCE_S).topics
