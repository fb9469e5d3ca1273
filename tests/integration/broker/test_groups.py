"""Unchanged consumers in groups on reference brokers: they share partitions, commit, and survive their coordinator."""

from __future__ import annotations

import time
import uuid

import confluent_kafka
import kafka
import pytest
from aiokafka import AIOKafkaConsumer  # type: ignore[import-untyped]

from tests.support.brokers.reference_broker import Cluster

pytest_plugins = ["tests.support.etcd.embedded", "tests.support.brokers.reference_broker"]


@pytest.fixture
def topic() -> str:
    return f"g-{uuid.uuid4().hex[:12]}"


def test_try(cluster: Cluster, topic: str) -> None:
    producer = kafka.KafkaProducer(bootstrap_servers=cluster.bootstrap.split(","))
    for n in range(30):
        producer.send(topic, b"%d" % n)
    producer.flush()
    producer.close()
    t = time.time()
    consumer = kafka.KafkaConsumer(topic, group_id=topic, bootstrap_servers=cluster.bootstrap.split(","), auto_offset_reset="earliest")
    got = []
    while len(got) < 30 and time.time() - t < 30:
        for records in consumer.poll(500).values():
            got += records
    print("kafka-python read", len(got), time.time() - t)
    t = time.time()
    consumer.close()
    print("closed in", time.time() - t)
    t = time.time()
    consumer = confluent_kafka.Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    print(consumer.consume(1, timeout=6), time.time() - t)
    print([(each.partition, each.offset) for each in consumer.committed(consumer.assignment(), timeout=5)])
    t = time.time()
    consumer.close()
    print("closed in", time.time() - t)
    for b in cluster.brokers:
        print(b.log()[-3000:])
    raise SystemExit
