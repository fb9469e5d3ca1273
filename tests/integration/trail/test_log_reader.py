"""Batch headers read through the proxy: the log reader's results for topics of real producers."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Sequence
from typing import Any

import confluent_kafka
import pytest

from kproxy.pipeline.audit.judge import Batch
from kproxy.pipeline.audit.log_client import EARLIEST, LATEST, LogClient, LogReadFailed, TopicPartition
from kproxy.pipeline.audit.log_reader import RangeReader
from kproxy.pipeline.audit.logs import cut
from kproxy_codec.record_crc import crc_is_valid
from tests.support.clients.kafka_io import TIMEOUT_S, create_topic, produce
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.ports import free_port

PARTITIONS = 3
# The patience of a client that gets no answer.
SHORT_S = 2.0


def read(bootstrap: str, topic: str, most: int = 1000, max_bytes: int = 1 << 20) -> dict[int, list[Batch]]:
    """Read a whole topic, in ranges of `most` offsets, by partition."""
    found: dict[int, list[Batch]] = {}
    with LogClient(bootstrap) as client:
        partitions = [TopicPartition(topic, index) for index in range(client.partitions([topic])[topic])]
        starts, ends = client.list_offsets(partitions, EARLIEST), client.list_offsets(partitions, LATEST)
        for piece in cut(starts, ends, most):
            for wanted in piece:
                for rows in RangeReader(client, wanted, crc_is_valid, max_bytes).headers():
                    found.setdefault(wanted.which.partition, []).extend(rows)
    return found


def batches_of(count: int) -> list[tuple[int, int, bool]]:
    """The expected batches of `count` records, ten each: base offset, records, CRC."""
    return [(first, 10, True) for first in range(0, count, 10)]


@pytest.fixture
def topic(dev_cluster: KproxyProcess) -> str:
    name = f"read-{uuid.uuid4().hex[:10]}"
    create_topic(dev_cluster.kafka, name, PARTITIONS)
    return name


def write(bootstrap: str, topic: str, partition: int, batches: int, **settings: Any) -> None:
    """Write batches of ten records, one by one."""
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "linger.ms": 1000, **settings})
    for _ in range(batches):
        for n in range(10):
            producer.produce(topic, b"value %d" % n * 10, partition=partition)
        assert producer.flush(TIMEOUT_S) == 0


def told(rows: Sequence[Batch]) -> list[tuple[int, int, bool | None]]:
    return [(row.base_offset, row.record_count, row.crc_ok) for row in rows]


@pytest.mark.parametrize("most", [7, 10, 1000])
@pytest.mark.parametrize("max_bytes", [1, 500, 1 << 20])
def test_every_batch_is_read_once_at_any_cut(
    dev_cluster: KproxyProcess, written: str, most: int, max_bytes: int
) -> None:
    found = read(dev_cluster.kafka, written, most, max_bytes)
    assert {index: told(rows) for index, rows in found.items()} == {0: batches_of(80), 1: batches_of(50)}


@pytest.fixture(scope="module")
def written(dev_cluster: KproxyProcess) -> str:
    """A plain partition, one with compressed batches of an idempotent producer, and an empty one."""
    name = f"read-{uuid.uuid4().hex[:10]}"
    create_topic(dev_cluster.kafka, name, PARTITIONS)
    write(dev_cluster.kafka, name, 0, 8)
    write(dev_cluster.kafka, name, 1, 5, **{"enable.idempotence": True, "compression.type": "zstd"})
    return name


def test_header_is_reported_as_its_producer_made_it(dev_cluster: KproxyProcess, written: str) -> None:
    found = read(dev_cluster.kafka, written)
    plain, idempotent = found[0], found[1]
    for row in [*plain, *idempotent]:
        assert row.last_offset == row.base_offset + 9
        assert not row.is_control
    assert {row[3:6] for row in plain} == {(-1, -1, -1)}
    (producer_id,) = {row[3] for row in idempotent}
    assert producer_id >= 0
    assert [row[4:6] for row in idempotent] == [(0, 10 * n) for n in range(5)]


def test_ends_and_beginnings_are_listed_for_all_partitions(dev_cluster: KproxyProcess, written: str) -> None:
    partitions = [TopicPartition(written, index) for index in range(PARTITIONS)]
    with LogClient(dev_cluster.kafka) as client:
        assert client.list_offsets(partitions, EARLIEST) == dict.fromkeys(partitions, 0)
        assert client.list_offsets(partitions, LATEST) == dict(zip(partitions, [80, 50, 0], strict=True))
        assert client.compacted([written]) == set()
        assert client.partitions(None)[written] == PARTITIONS


def test_topic_that_is_not_there_is_named(dev_cluster: KproxyProcess) -> None:
    with LogClient(dev_cluster.kafka) as client:
        with pytest.raises(LogReadFailed, match=f"^There is no topic missing at {dev_cluster.kafka}.$"):
            client.partitions(["missing"])
        assert "missing" not in client.partitions(None), "asking has made it"


def test_unanswered_read_is_reported_after_a_while() -> None:
    address = f"127.0.0.1:{free_port()}"
    with (
        LogClient(address, patience_s=SHORT_S) as client,
        pytest.raises(LogReadFailed, match=f"{address} cannot be reached.*given up after"),
    ):
        client.partitions(["t"])


def test_hung_broker_address_does_not_block_the_next(dev_cluster: KproxyProcess, written: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        bootstrap = f"127.0.0.1:{deaf.getsockname()[1]},{dev_cluster.kafka}"
        with LogClient(bootstrap, timeout_s=SHORT_S) as client:
            assert client.partitions([written]) == {written: PARTITIONS}


def test_closed_connection_is_reopened(dev_cluster: KproxyProcess, written: str) -> None:
    which = TopicPartition(written, 0)
    with LogClient(dev_cluster.kafka) as client:
        assert client.list_offsets([which], LATEST) == {which: 80}
        for connection in client._connections.values():
            number = connection._transport.get_extra_info("socket").fileno()
            with socket.socket(fileno=os.dup(number)) as same:
                same.shutdown(socket.SHUT_RDWR)
        assert client.fetch(which, 0, 1 << 20, client.patience()).high_watermark == 80


def test_later_records_are_not_read(dev_cluster: KproxyProcess, topic: str) -> None:
    produce(dev_cluster.kafka, topic, [b"before"] * 3)
    which = TopicPartition(topic, 0)
    with LogClient(dev_cluster.kafka) as client:
        ends = client.list_offsets([which], LATEST)
        produce(dev_cluster.kafka, topic, [b"after"] * 3)
        ((wanted,),) = cut({which: 0}, ends, 100)
        rows = [row for chunk in RangeReader(client, wanted, crc_is_valid).headers() for row in chunk]
    assert sum(row.record_count for row in rows) == 3
