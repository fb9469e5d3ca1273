"""Logs read by the tasks of a real Spark, through a real proxy."""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from kproxy.pipeline.audit.log_client import LogClient, TopicPartition
from kproxy.pipeline.audit.log_reader import LogRange
from kproxy.pipeline.audit.logs import LogTask, bounds_now, ends_of, plan
from kproxy.pipeline.audit.run import InProcess, TooLarge
from kproxy.pipeline.audit.run_spark import spark_in
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


def test_each_batch_is_read_in_any_task(
    spark: Any, dev_cluster: KproxyProcess, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LogClient(dev_cluster.kafka) as client:
        ends = ends_of(client, [topic])
        assert ends == ends_in(topic)
        produce(dev_cluster.kafka, topic, [b"later"], partition=1)
        # Pieces of 12 offsets: their borders lie within batches.
        pieces = plan(client, None, ends, 12)
        assert len(pieces) == 7
        task = LogTask(dev_cluster.kafka, NO_OPTIONS, client.leaders)
    with spark_in(spark, str(tmp_path / "kept")) as engine:
        chunks = list(engine.read(pieces, task.headers))
    batches = [(chunk.which.partition, batch) for chunk in chunks for batch in chunk.batches]
    found = sorted((partition, each.base_offset, each.last_offset, each.record_count) for partition, each in batches)
    assert found == [(p, n, n + 4, 5) for p, records in enumerate(RECORDS) for n in range(0, records, 5)]
    assert {(each.producer_epoch, each.is_control) for _, each in batches} == {(0, False)}
    assert all(each.base_sequence == each.base_offset and each.crc_ok for _, each in batches)
    assert len({each.producer_id for _, each in batches}) == 1
    assert sorted(InProcess(is_bounded=True).read(pieces, task.headers)) == sorted(chunks)
    for name, most in (("MOST_BATCHES", 12), ("MOST_BYTES", 800)):
        with monkeypatch.context() as patched:
            patched.setattr(f"kproxy.pipeline.audit.run.{name}", most)
            with pytest.raises(TooLarge):
                InProcess(is_bounded=True).read(pieces, task.headers)
            assert sorted(InProcess().read(pieces, task.headers)) == sorted(chunks)


def test_log_bounds_name_topic_and_compaction(dev_cluster: KproxyProcess) -> None:
    name = f"bounds-{uuid.uuid4().hex[:10]}"
    create_topic(dev_cluster.kafka, name, 2)
    produce(dev_cluster.kafka, name, [b"value"] * 3, partition=1)
    with LogClient(dev_cluster.kafka) as client:
        bounds = bounds_now(client, [name], compacted=[name])
    assert [(*which, *each[:3]) for which, each in bounds.items()] == [(name, 0, 0, 0, True), (name, 1, 0, 3, True)]
    (topic_id,) = {each.topic_id for each in bounds.values()}
    assert len(bytes.fromhex(topic_id or "")) == TOPIC_ID_BYTES


def test_partition_that_cannot_be_read_is_told() -> None:
    wanted = LogRange(TopicPartition("t", 0), 0, 1, is_first=True)
    task = LogTask(f"127.0.0.1:{free_port()}", NO_OPTIONS, {}, patience_s=0.1)
    (chunk,) = task.headers([[wanted]])
    assert (chunk.which, chunk.batches) == (wanted.which, [])
    assert re.search(r"cannot be reached .*given up after", chunk.unread or "")
