"""The formats "kproxy_log" and "kproxy_bounds" in a real Spark, through a real proxy."""

from __future__ import annotations

import uuid
from typing import Any

import confluent_kafka
import pytest

from kproxy.demo.run import create_topic
from kproxy.pipeline.audit import log_source
from kproxy.pipeline.audit.log_client import LogReadFailed
from kproxy.pipeline.audit.log_source import read_short_log
from kproxy.pipeline.audit.schemas import BOUNDS_SCHEMA, LOG_SCHEMA
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


def test_each_batch_is_a_row_in_any_task(spark: Any, dev_cluster: KproxyProcess, topic: str) -> None:
    ends = log_source.fix_ends(dev_cluster.kafka, topics=[topic])
    assert ends == f'{{"{topic}":{{"0":40,"1":0,"2":25}}}}'
    produce(dev_cluster.kafka, topic, [b"later"], partition=1)
    # Pieces of 12 offsets: their borders lie within batches.
    log = log_source.read_log(spark, dev_cluster.kafka, topics=[topic], end_offsets=ends, offsets_per_partition=12)
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


def test_short_log_is_read_equally_without_spark(spark: Any, dev_cluster: KproxyProcess, topic: str) -> None:
    ends = f'{{"{topic}":{{"0":40,"1":0,"2":25}}}}'
    log = log_source.read_log(spark, dev_cluster.kafka, topics=[topic], end_offsets=ends)
    size = sum(row.bytes for row in log.collect())

    def read(end_offsets: str = ends, *, most_batches: int = 13, most_bytes: int = size) -> Any:
        return read_short_log(
            spark,
            dev_cluster.kafka,
            topics=[topic],
            end_offsets=end_offsets,
            most_batches=most_batches,
            most_bytes=most_bytes,
        )

    short = read()
    assert short.schema == LOG_SCHEMA
    assert sorted(short.collect()) == sorted(log.collect())
    assert read(most_batches=12) is None
    assert read(most_bytes=size - 1) is None
    nothing = read(f'{{"{topic}":{{"0":0,"1":0,"2":0}}}}')
    assert (nothing.schema, nothing.count()) == (LOG_SCHEMA, 0)


def test_log_bounds_are_read_at_execution(spark: Any, dev_cluster: KproxyProcess) -> None:
    name = f"bounds-{uuid.uuid4().hex[:10]}"
    create_topic(dev_cluster.kafka, name, 2)
    log_source.register(spark)
    options = {"bootstrap": dev_cluster.kafka, "topicPattern": f"{name}.*", "compactedTopics": name}
    bounds = spark.read.format(log_source.BOUNDS_FORMAT).options(**options).load()
    assert bounds.schema == BOUNDS_SCHEMA
    produce(dev_cluster.kafka, name, [b"value"] * 3, partition=1)
    rows = sorted(map(tuple, bounds.collect()))
    topic_id = rows[0][-1]
    assert rows == [(name, 0, 0, 0, True, topic_id), (name, 1, 0, 3, True, topic_id)]
    assert len(bytes.fromhex(topic_id)) == TOPIC_ID_BYTES


def test_missing_topic_is_named_by_driver_and_spark(spark: Any, dev_cluster: KproxyProcess) -> None:
    from pyspark.errors import AnalysisException

    said = f"There is no topic missing at {dev_cluster.kafka}."
    with pytest.raises(LogReadFailed, match=f"^{said}$"):
        log_source.fix_ends(dev_cluster.kafka, topics=["missing"])
    with pytest.raises(AnalysisException, match=said):
        log_source.read_log(spark, dev_cluster.kafka, topics=["missing"]).collect()


def test_options_are_judged_before_spark_sees_them(spark: Any) -> None:
    with pytest.raises(LogReadFailed, match="Say what to read"):
        log_source.read_log(spark, f"127.0.0.1:{free_port()}")
