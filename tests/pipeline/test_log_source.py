"""The format "kproxy_log" in a real Spark, through a real proxy."""

from __future__ import annotations

import uuid
from typing import Any

import confluent_kafka
import pytest

from kproxy.demo.run import create_topic
from kproxy.pipeline.audit.judge import Batch
from kproxy.pipeline.audit.log_client import LogReadFailed, TopicPartition
from kproxy.pipeline.audit.log_options import read_options
from kproxy.pipeline.audit.log_source import log_options, read_log
from kproxy.pipeline.audit.logs import TooLarge, bounds_now, ends_of, read_headers
from kproxy.pipeline.audit.schemas import LOG_SCHEMA
from kproxy_codec.partitioned import TOPIC_ID_BYTES
from tests.support.clients.kafka_io import TIMEOUT_S, produce
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
    ends = ends_of(dev_cluster.kafka, [topic])
    assert ends == ends_in(topic)
    produce(dev_cluster.kafka, topic, [b"later"], partition=1)
    # Pieces of 12 offsets: their borders lie within batches.
    log = read_log(spark, log_options(dev_cluster.kafka, topics=[topic], ends=ends, offsetsPerPartition=12))
    assert log.schema == LOG_SCHEMA
    rows = log.collect()
    assert log.rdd.getNumPartitions() == 7
    found = sorted((row.partition, row.base_offset, row.last_offset, row.record_count) for row in rows)
    assert found == [(p, n, n + 4, 5) for p, records in enumerate(RECORDS) for n in range(0, records, 5)]
    assert {(row.topic, row.producer_epoch, row.is_control, row.is_transactional) for row in rows} == {
        (topic, 0, False, False)
    }
    assert all(row.base_sequence == row.base_offset and row.crc_ok and row.bytes > 61 for row in rows)
    assert len({row.producer_id for row in rows}) == 1


def test_headers_are_read_equally_without_spark(spark: Any, dev_cluster: KproxyProcess, topic: str) -> None:
    options = log_options(dev_cluster.kafka, topics=[topic], ends=ends_in(topic))
    rows = read_log(spark, options).collect()
    size = sum(row.bytes for row in rows)
    read = read_headers(read_options(options), 13, size)
    names = Batch._fields
    assert sorted((*which, *each) for which, batches in read.items() for each in batches) == sorted(
        (row.topic, row.partition, *(row[name] for name in names)) for row in rows
    )
    for most in ((12, size), (13, size - 1)):
        with pytest.raises(TooLarge):
            read_headers(read_options(options), *most)


def test_log_bounds_name_topic_and_compaction(dev_cluster: KproxyProcess) -> None:
    name = f"bounds-{uuid.uuid4().hex[:10]}"
    create_topic(dev_cluster.kafka, name, 2)
    produce(dev_cluster.kafka, name, [b"value"] * 3, partition=1)
    bounds = bounds_now(dev_cluster.kafka, [name], compacted=[name])
    assert [(*which, *each[:3]) for which, each in bounds.items()] == [(name, 0, 0, 0, True), (name, 1, 0, 3, True)]
    (topic_id,) = {each.topic_id for each in bounds.values()}
    assert len(bytes.fromhex(topic_id or "")) == TOPIC_ID_BYTES


def test_missing_topic_is_named_by_driver_and_spark(spark: Any, dev_cluster: KproxyProcess) -> None:
    from pyspark.errors import AnalysisException

    said = f"There is no topic missing at {dev_cluster.kafka}."
    with pytest.raises(LogReadFailed, match=f"^{said}$"):
        ends_of(dev_cluster.kafka, ["missing"])
    with pytest.raises(AnalysisException, match=said):
        read_log(spark, log_options(dev_cluster.kafka, topics=["missing"])).collect()


def test_options_are_checked_before_spark_gets_them(spark: Any) -> None:
    with pytest.raises(LogReadFailed, match="Name what to read"):
        read_log(spark, log_options(f"127.0.0.1:{free_port()}", topics=[]))
