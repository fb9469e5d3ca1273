"""Unchanged clients write to three reference brokers, without a proxy, and read the same records."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy_codec.record_batch import iterate_batches
from tests.support.brokers.reference_broker import Cluster, fetch, start_broker
from tests.support.clients.attempts import log_bytes
from tests.support.clients.idempotent_writers import IdempotentWriter
from tests.support.waiting import PATIENCE_S

RECORDS = 300


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


async def test_idempotent_producer_survives_restarts_and_kill_9(
    etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path
) -> None:
    """Every acknowledged record exists once, in order, although its only broker is restarted and killed."""
    with start_broker(1, tmp_path / "1", etcd.endpoint, etcd_prefix, lease_ttl_s=2) as broker:
        broker.arguments.append(f"listen={broker.port}")  # clients only know this address
        async with IdempotentWriter(broker.address, "t", 1) as writer:
            for ending in (broker.terminate, broker.kill):
                await asyncio.to_thread(writer.wait_for_more, 100)
                ending()
                broker.start()
            await asyncio.to_thread(writer.wait_for_more, 100)
        writer.judge(0, log_bytes(broker.data_dir / "t-0"))
