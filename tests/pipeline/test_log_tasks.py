"""Logs read by the tasks of a real Spark, through a real proxy."""

from __future__ import annotations

import re
import uuid
from typing import Any

import confluent_kafka
import pytest

from kproxy.pipeline.audit.columns import LOG, ddl
from kproxy.pipeline.audit.judge import Batch
from kproxy.pipeline.audit.log_client import LogClient, TopicPartition
from kproxy.pipeline.audit.log_reader import MAX_BYTES, LogRange
from kproxy.pipeline.audit.logs import TooLarge, bounds_now, ends_of, read_headers
from kproxy.pipeline.audit.run import AuditJob
from kproxy.pipeline.audit.run_spark import read_log
from kproxy.pipeline.audit.spark_tasks import Pieces
from kproxy.pipeline.audit.trail_place import parse_trail
from kproxy.pipeline.kafka_access import NO_OPTIONS
from kproxy_codec.partitioned import TOPIC_ID_BYTES
from tests.support.clients.kafka_io import TIMEOUT_S, create_topic, produce
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.ports import free_port

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

RECORDS = [40, 0, 25]


@pytest.fixture(scope="module")
def topic(dev_cluster: KproxyProcess) -> str:
    """Batches of five records; an empty partition between two others."""
    name = f"source-{uuid.uuid4().hex[:10]}"
    create_topic(dev_cluster.kafka, name, len(RECORDS))
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": dev_cluster.kafka, "enable.idempotence": True, "linger.ms": 1000}
    )
    for first in range(0, max(RECORDS), 5):
        for partition, records in enumerate(RECORDS):
            for _ in range(5 if first < records else 0):
                producer.produce(name, b"value", partition=partition)
        assert producer.flush(TIMEOUT_S) == 0
    return name


def ends_in(topic: str) -> dict[TopicPartition, int]:
    return {TopicPartition(topic, index): records for index, records in enumerate(RECORDS)}


def test_each_batch_is_a_row_in_any_task(spark: Any, dev_cluster: KproxyProcess, topic: str) -> None:
    job = AuditJob(bootstrap=dev_cluster.kafka, trail=parse_trail("topic"))
    with LogClient(dev_cluster.kafka) as client:
        ends = ends_of(client, [topic])
        assert ends == ends_in(topic)
        produce(dev_cluster.kafka, topic, [b"later"], partition=1)
        # Pieces of 12 offsets: their borders lie within batches.
        log = read_log(spark, client, job, None, ends, 12)
    assert log.columns == list(LOG)
    rows = log.collect()
    assert log.rdd.getNumPartitions() == 7
    found = sorted((row.partition, row.base_offset, row.last_offset, row.record_count) for row in rows)
    assert found == [(p, n, n + 4, 5) for p, records in enumerate(RECORDS) for n in range(0, records, 5)]
    assert {(row.topic, row.producer_epoch, row.is_control) for row in rows} == {(topic, 0, False)}
    assert all(row.base_sequence == row.base_offset and row.crc_ok for row in rows)
    assert len({row.producer_id for row in rows}) == 1
    names = Batch._fields
    with LogClient(dev_cluster.kafka) as client:
        read = read_headers(client, None, ends, 13, MAX_BYTES)
        assert sorted((*which, *each) for which, batches in read.items() for each in batches) == sorted(
            (row.topic, row.partition, *(row[name] for name in names)) for row in rows
        )
        for most in ((12, None), (None, 800)):
            with pytest.raises(TooLarge):
                read_headers(client, None, ends, *most)


def test_log_bounds_name_topic_and_compaction(dev_cluster: KproxyProcess) -> None:
    name = f"bounds-{uuid.uuid4().hex[:10]}"
    create_topic(dev_cluster.kafka, name, 2)
    produce(dev_cluster.kafka, name, [b"value"] * 3, partition=1)
    with LogClient(dev_cluster.kafka) as client:
        bounds = bounds_now(client, [name], compacted=[name])
    assert [(*which, *each[:3]) for which, each in bounds.items()] == [(name, 0, 0, 0, True), (name, 1, 0, 3, True)]
    (topic_id,) = {each.topic_id for each in bounds.values()}
    assert len(bytes.fromhex(topic_id or "")) == TOPIC_ID_BYTES


def test_partition_that_cannot_be_read_is_a_row(spark: Any, dev_cluster: KproxyProcess, topic: str) -> None:
    wanted = LogRange(TopicPartition(topic, 0), 0, 1, is_first=True)
    read = Pieces(f"127.0.0.1:{free_port()}", NO_OPTIONS, [[wanted]], {}, patience_s=0.1)
    frame = spark.range(0, 1, 1, 1).mapInArrow(lambda numbers: read.headers(numbers), ddl(LOG))
    (row,) = frame.collect()
    assert (row.topic, row.partition, row.base_offset) == (topic, 0, None)
    assert re.search(r"cannot be reached .*given up after", row.unread)
