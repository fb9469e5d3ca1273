"""Readers through `kproxy serve` before a real Apache Kafka cluster: racks, limits of fetches, a frozen broker."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import confluent_kafka
import pytest

from kproxy_codec.api_keys import FETCH
from tests.support.brokers.real_kafka import RealKafka
from tests.support.clients.kafka_io import produce
from tests.support.clients.raw_client import RawClient, fetch_frame
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import kafka_proxy, port_of

# The first run of all downloads the jars.
pytestmark = [pytest.mark.java, pytest.mark.timeout(900)]

PARTITIONS = (0, 1, 2)
TIMEOUT_S = 120.0
NO_EPOCHS = {"current_leader_epoch": -1, "last_fetched_epoch": -1, "log_start_offset": -1}
EOF = confluent_kafka.KafkaError._PARTITION_EOF


@pytest.fixture(scope="module")
def proxy(real_kafka: RealKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KproxyProcess]:
    with pytest.MonkeyPatch.context() as patch:
        # A frozen broker does not count as hung in these tests, so readers depend on the fetches alone.
        patch.setenv("KPROXY_LIMITS__PROBE_TIMEOUT_S", str(TIMEOUT_S))
        with kafka_proxy(tmp_path_factory.mktemp("proxy"), real_kafka.bootstrap) as process:
            yield process


@pytest.fixture
def topic(real_kafka: RealKafka) -> str:
    """Each of its partitions has a leader of its own."""
    name = real_kafka.create_topic(f"read-{uuid.uuid4().hex[:10]}", len(PARTITIONS))
    assert len(set(real_kafka.leaders(name).values())) == len(PARTITIONS)
    return name


def reader(bootstrap: str, topic: str, **settings: Any) -> confluent_kafka.Consumer:
    """A consumer of all partitions from their beginnings."""
    named = {name.replace("_", "."): value for name, value in settings.items()}
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "unused", "enable.auto.commit": False, **named}
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, each, 0) for each in PARTITIONS])
    return consumer


def read(consumer: confluent_kafka.Consumer, counts: Sequence[int]) -> dict[int, list[int]]:
    """The offsets of the next records by partition, until each has so many; an error fails the test.

    So does the end of a partition that has fewer.
    """
    found: dict[int, list[int]] = {each: [] for each in PARTITIONS}
    deadline = time.monotonic() + TIMEOUT_S
    while any(len(found[each]) < count for each, count in enumerate(counts)):
        assert time.monotonic() < deadline, f"only {found} within {TIMEOUT_S} s"
        message = consumer.poll(1.0)
        if message is None:
            continue
        partition, offset, error = message.partition(), message.offset(), message.error()
        assert partition is not None
        if error is None:
            assert offset is not None
            found[partition].append(offset)
        else:
            assert error.code() == EOF, error
            assert len(found[partition]) >= counts[partition], f"partition {partition} has ended at {offset}"
    return found


@pytest.mark.parametrize(
    "rack", ["", "rack-1", *(pytest.param(each, marks=pytest.mark.long) for each in ("rack-3", "unknown"))]
)
def test_rack_changes_nothing_for_readers(proxy: KproxyProcess, topic: str, rack: str) -> None:
    for partition in PARTITIONS:
        produce(proxy.kafka, topic, [b"%d" % n for n in range(10)], partition)
    consumer = reader(proxy.kafka, topic, client_rack=rack)
    try:
        assert read(consumer, [10] * 3) == {each: list(range(10)) for each in PARTITIONS}
    finally:
        consumer.close()


def test_large_batches_fit_the_receive_limit(proxy: KproxyProcess, topic: str) -> None:
    """librdkafka rejects an answer that is larger than receive.message.max.bytes, and asks for the same again."""
    for partition in PARTITIONS:
        for n in range(4):
            produce(proxy.kafka, topic, [b"%d" % n * 900_000], partition)
    limits = {"fetch_max_bytes": 1_000_000, "receive_message_max_bytes": 1_000_512}
    consumer = reader(proxy.kafka, topic, **limits)
    try:
        assert read(consumer, [4] * 3) == {each: list(range(4)) for each in PARTITIONS}
    finally:
        consumer.close()


async def test_one_byte_of_a_fetch_is_one_batch(proxy: KproxyProcess, topic: str) -> None:
    for partition in PARTITIONS:
        await asyncio.to_thread(produce, proxy.kafka, topic, [b"r" * 200_000], partition)
    client = await RawClient().connect(port_of(proxy))
    asked = [{"partition": each, "fetch_offset": 0, "partition_max_bytes": 1 << 20, **NO_EPOCHS} for each in PARTITIONS]
    got: list[list[int]] = []
    # Which broker answers first is chance.
    while len(got) < 20 and {sizes.index(max(sizes)) for sizes in got} != set(PARTITIONS):
        client.send(fetch_frame(topics=[{"topic": topic, "partitions": asked}], max_bytes=1, max_wait_ms=5000))
        answer = await client.answer(FETCH, 12, patience_s=TIMEOUT_S)
        got.append([len(each.fields["records"]) for each in answer.results])
    client.abort()
    # One batch each time, and soon each partition has had its turn.
    assert {[size > 0 for size in sizes].count(True) for sizes in got} == {1}
    assert [max(column) > 200_000 for column in zip(*got, strict=True)] == [True, True, True]


def test_frozen_broker_stalls_no_other_partition(proxy: KproxyProcess, real_kafka: RealKafka, topic: str) -> None:
    for partition in PARTITIONS:
        # Batches of 2 kB, one for each fetch.
        for _ in range(10):
            produce(proxy.kafka, topic, [b"r" * 2000], partition)
    frozen = real_kafka.leaders(topic)[2]
    broker = next(each for each in real_kafka.brokers if each.node_id == frozen)
    consumer = reader(proxy.kafka, topic, enable_partition_eof=True, fetch_message_max_bytes=1000)
    try:
        # The client knows the leaders: what it asks about the cluster may have to wait for the frozen broker.
        before = read(consumer, [1, 0, 0])
        broker.pause()
        began = time.monotonic()
        during = read(consumer, [*(10 - len(before[each]) for each in (0, 1)), 0])
        print(f"healthy partitions read in {time.monotonic() - began:.2f} s beside a frozen broker")
        broker.resume()
        # Its partition has neither ended nor lost a record.
        found = before[2] + during[2]
        assert found + read(consumer, [0, 0, 10 - len(found)])[2] == list(range(10))
    finally:
        broker.resume()
        consumer.close()
