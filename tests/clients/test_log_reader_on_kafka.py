"""Logs of a real Apache Kafka cluster, read header by header while leaders, log starts and brokers change."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import kafka
import pytest

from kproxy.pipeline.audit.judge import Batch
from kproxy.pipeline.audit.log_client import LATEST, LogClient, TopicPartition
from kproxy.pipeline.audit.log_reader import LogRange, RangeReader
from kproxy.pipeline.audit.logs import cut
from kproxy_codec.record_crc import crc_is_valid
from tests.support.brokers.real_kafka import RealKafka
from tests.support.clients.kafka_io import TIMEOUT_S
from tests.support.waiting import wait_for

# The very first run downloads Kafka's jars.
pytestmark = [pytest.mark.java, pytest.mark.timeout(900)]

BATCHES = 60
PER_BATCH = 5
END = BATCHES * PER_BATCH
# One batch and a bit: an answer has one or two.
SMALL_ANSWERS = 700


@pytest.fixture
def client(real_kafka: RealKafka) -> Iterator[LogClient]:
    with LogClient(real_kafka.bootstrap, timeout_s=30) as client:
        yield client


def new_topic(real_kafka: RealKafka, **config: str) -> TopicPartition:
    return TopicPartition(real_kafka.create_topic(f"read-{uuid.uuid4().hex[:10]}", 1, **config), 0)


def write(real_kafka: RealKafka, which: TopicPartition, batches: int = BATCHES, **settings: Any) -> None:
    """Batches of PER_BATCH records; the n-th record of each has the key n."""
    options = {"bootstrap.servers": real_kafka.bootstrap, "linger.ms": 1000, "acks": "all", **settings}
    producer = confluent_kafka.Producer(options)
    for _ in range(batches):
        for n in range(PER_BATCH):
            producer.produce(which.topic, b"v" * 80, key=b"%d" % n, partition=which.partition)
        assert producer.flush(TIMEOUT_S) == 0


def has_deleted(real_kafka: RealKafka, which: TopicPartition, offset: int) -> bool:
    """Delete the records before an offset; False if a busy Kafka has no leader ready for it."""
    cut_off = confluent_kafka.TopicPartition(*which, offset)
    try:
        for deleted in real_kafka.admin().delete_records([cut_off]).values():
            deleted.result(TIMEOUT_S)
    except confluent_kafka.KafkaException as error:
        if error.args[0].code() != confluent_kafka.KafkaError._NOENT:
            raise
        return False
    return True


def reading(client: LogClient, which: TopicPartition, most: int = 10**6) -> Iterator[Batch]:
    """The log up to where it ends now, row by row: what comes between two rows happens between two answers, or so."""
    ends = client.list_offsets([which], LATEST)
    for piece in cut({which: 0}, ends, most):
        for wanted in piece:
            yield from rows_of(client, wanted)


def rows_of(client: LogClient, wanted: LogRange) -> Iterator[Batch]:
    for rows in RangeReader(client, wanted, crc_is_valid, SMALL_ANSWERS).headers():
        yield from rows


EVERY = [(first, first + PER_BATCH - 1, True) for first in range(0, END, PER_BATCH)]


def told(rows: list[Batch]) -> list[tuple[int, int, bool | None]]:
    return [(row.base_offset, row.last_offset, row.crc_ok) for row in rows]


@pytest.mark.long
def test_leader_moves_neither_skip_nor_repeat_records(real_kafka: RealKafka, client: LogClient) -> None:
    which = new_topic(real_kafka)
    write(real_kafka, which)
    rows, asked = [], []
    nodes = [broker.node_id for broker in real_kafka.brokers]
    for row in reading(client, which, most=70):
        if len(rows) % 20 == 10:
            place_on(real_kafka, which, nodes[len(rows) // 20])
        rows.append(row)
        asked.append(client.leaders.get(which))
    assert told(rows) == EVERY
    assert len(set(asked)) > 1, "it was read from one broker alone"


def place_on(real_kafka: RealKafka, which: TopicPartition, node_id: int) -> None:
    """Have one replica alone: a leader that has become a follower would still send what clients ask of it."""
    place = kafka.TopicPartition(*which)
    admin = kafka.KafkaAdminClient(bootstrap_servers=real_kafka.bootstrap)
    try:
        assert not any(admin.alter_partition_reassignments({place: [node_id]}).values())
        wait_for(lambda: not admin.list_partition_reassignments({which.topic: [which.partition]}), TIMEOUT_S, "moved")
    finally:
        admin.close()


@pytest.mark.long
def test_read_goes_on_when_its_broker_dies(real_kafka: RealKafka, client: LogClient) -> None:
    which = new_topic(real_kafka)
    write(real_kafka, which)
    leader = next(each for each in real_kafka.brokers if each.node_id == real_kafka.leaders(which.topic)[0])
    rows = []
    try:
        for row in reading(client, which):
            if len(rows) == BATCHES // 2:
                leader.kill()
            rows.append(row)
        assert not leader.running
    finally:
        if not leader.running:
            leader.start()
            real_kafka.wait_until_in_sync([which.topic])
    assert told(rows) == EVERY


def test_read_goes_on_behind_retention(real_kafka: RealKafka, client: LogClient) -> None:
    which = new_topic(real_kafka)
    write(real_kafka, which)
    rows = []
    for row in reading(client, which, most=70):
        if len(rows) == 10:
            # In the middle of a batch, which is still there, and of a range that nothing was read of.
            wait_for(lambda: has_deleted(real_kafka, which, 202), what="records are deleted")
        rows.append(row)
    read = told(rows)
    assert read[:10] == EVERY[:10]
    left = read.index((200, 204, True))
    # What an answer had brought before it was deleted may be there.
    assert read[:left] == EVERY[:left]
    assert left <= 12
    assert read[left:] == EVERY[40:]


def test_transactions_are_reported_committed_or_aborted(real_kafka: RealKafka, client: LogClient) -> None:
    which = new_topic(real_kafka)
    options = {"bootstrap.servers": real_kafka.bootstrap, "transactional.id": which.topic, "linger.ms": 1000}
    producer = confluent_kafka.Producer(options)
    producer.init_transactions(TIMEOUT_S)
    for ends in (producer.commit_transaction, producer.abort_transaction):
        producer.begin_transaction()
        for _ in range(3):
            producer.produce(which.topic, b"v", partition=0)
        producer.flush(TIMEOUT_S)
        ends(TIMEOUT_S)
    # The coordinator writes the marker after it has answered.
    deadline = time.monotonic() + TIMEOUT_S
    while len(rows := list(reading(client, which))) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    found = [(row.base_offset, row.record_count, row.is_control) for row in rows]
    assert found == [(0, 3, False), (3, 1, True), (4, 3, False), (7, 1, True)]
    assert len({row.producer_id for row in rows}) == 1
    assert all(row.crc_ok for row in rows)


def test_compacted_log_is_read_as_far_as_kept(real_kafka: RealKafka, client: LogClient) -> None:
    settings = {"cleanup_policy": "compact", "min_cleanable_dirty_ratio": "0.001", "segment_ms": "200"}
    which = new_topic(real_kafka, **settings, min_compaction_lag_ms="0", delete_retention_ms="0")
    kept = new_topic(real_kafka)
    assert client.compacted([which.topic, kept.topic]) == {which.topic}
    write(real_kafka, which, 20)

    def is_compacted() -> bool:
        # What is written last is not cleaned: something has to follow in a segment of its own.
        write(real_kafka, which, 1)
        return next(reading(client, which))[0] > 0

    wait_for(is_compacted, 60, "it is compacted")
    rows = list(reading(client, which, most=7))
    assert [row[0] for row in rows] == sorted({row[0] for row in rows})
    (end,) = client.list_offsets([which], LATEST).values()
    assert rows[-1][1] == end - 1
    # Each of the keys is there once at least, and most records are not.
    assert PER_BATCH <= sum(row[2] for row in rows) < end - PER_BATCH
    assert all(row.crc_ok for row in rows)


def test_batch_changed_on_disk_is_reported(real_kafka: RealKafka, client: LogClient) -> None:
    which = new_topic(real_kafka)
    write(real_kafka, which)
    for broker in real_kafka.brokers:
        (segment,) = stored(broker.log_path.parent, which)
        with segment.open("r+b") as file:
            place = segment.read_bytes().index(b"v" * 80, segment.stat().st_size // 2)
            file.seek(place)
            file.write(b"w")
    found = told(list(reading(client, which)))
    assert [each[:2] for each in found] == [each[:2] for each in EVERY]
    assert [each[2] for each in found].count(False) == 1
    assert found[BATCHES // 2][2] is False


def stored(directory: Path, which: TopicPartition) -> list[Path]:
    return sorted((directory / "data" / f"{which.topic}-{which.partition}").glob("*.log"))
