"""`kproxy serve` with owners from a real Apache Kafka cluster, and with a fixed table, in front of the same brokers."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from kproxy.trail.rows import Range
from kproxy_codec import api_keys as keys
from tests.support.audit.audit_trails import is_whole, trails_in_topic
from tests.support.brokers.real_kafka import RealKafka
from tests.support.brokers.reference_broker import RawClient
from tests.support.clients.kafka_io import produce, read_partition
from tests.support.clients.python_clients import (
    CLIENTS,
    IDEMPOTENT,
    KeyValue,
    Written,
    at,
    check,
    read,
    write,
)
from tests.support.clients.raw_client import RawClient as RawProducer
from tests.support.clients.raw_client import batch, produce_frame
from tests.support.processes.dev import KproxyProcess, run_kproxy, serving
from tests.support.processes.served import counted, kafka_proxy, page
from tests.support.waiting import wait_for

# The very first run downloads Kafka's jars.
pytestmark = [pytest.mark.java, pytest.mark.timeout(900)]

PARTITIONS = 6
RECORDS = 1_000
MOVED_RECORDS = 20_000
KEYS = 100
TIMEOUT_S = 60.0


@pytest.fixture
def topic(real_kafka: RealKafka) -> str:
    return real_kafka.create_topic(f"real-{uuid.uuid4().hex[:10]}", PARTITIONS)


def numbered(count: int) -> list[KeyValue]:
    return [(b"key-%d" % (number % KEYS), b"%d" % number) for number in range(count)]


def read_direct(real_kafka: RealKafka, topic: str, count: int) -> list[Written]:
    return read("librdkafka", at("librdkafka", real_kafka.bootstrap), topic, PARTITIONS, count)


def idempotently(client: str, bootstrap: str) -> dict[str, Any]:
    return {**at(client, bootstrap), **IDEMPOTENT[client]}


def highest_produce(proxy: KproxyProcess) -> int:
    """The highest version of Produce that is offered."""
    host, _, port = proxy.kafka.rpartition(":")
    with RawClient(host, int(port)) as client:
        offered = client.request(keys.API_VERSIONS, 0).api_keys
    return next(int(each.max_version) for each in offered if each.api_key == keys.PRODUCE)


def test_topic_ids_are_used_where_cluster_has_them(proxy: KproxyProcess) -> None:
    assert highest_produce(proxy) == 13


async def test_requests_of_many_partitions_stay_on_plain_path(proxy: KproxyProcess, real_kafka: RealKafka) -> None:
    """Kafka answers the partitions of a request in hash table order, not in the request's order."""
    partitions, requests = range(30), 20
    topic = real_kafka.create_topic(f"real-{uuid.uuid4().hex[:10]}", len(partitions))
    names = ("kproxy_plain_path_requests_total", "kproxy_plain_path_left_total")
    producer = await RawProducer().connect(int(proxy.kafka.rpartition(":")[2]))
    try:
        producer.send(produce_frame({topic: partitions}, records=batch(producer_id=-1)))
        assert set((await producer.answer()).codes.values()) == {0}
        before = [counted(proxy.admin, name) for name in names]
        frames = [
            produce_frame({topic: partitions}, records=batch(producer_id=-1), correlation_id=number)
            for number in range(1, 1 + requests)
        ]
        producer.send(*frames)
        for number in range(1, 1 + requests):
            results = (await producer.answer()).results
            assert [(each.partition_index, each.error_code) for each in results] == [(each, 0) for each in partitions]
            assert [each.fields["base_offset"] for each in results] == [number] * len(partitions)
    finally:
        producer.close()
    assert [counted(proxy.admin, name) - start for name, start in zip(names, before, strict=True)] == [requests, 0]


@pytest.mark.parametrize("client", CLIENTS)
def test_client_keeps_every_record(proxy: KproxyProcess, topic: str, real_kafka: RealKafka, client: str) -> None:
    written = write(client, idempotently(client, proxy.kafka), topic, numbered(RECORDS))
    check(written, read(client, at(client, proxy.kafka), topic, PARTITIONS, RECORDS), PARTITIONS)
    # The brokers hold the records that the proxy reports.
    check(written, read_direct(real_kafka, topic, RECORDS), PARTITIONS)


def test_write_creates_a_topic(proxy: KproxyProcess, real_kafka: RealKafka) -> None:
    for _ in range(3):
        topic = f"made-{uuid.uuid4().hex[:10]}"
        began = time.monotonic()
        values = produce(proxy.kafka, topic, [b"first", b"second"], partition=2)
        # Well before the next regular read of the table.
        assert time.monotonic() - began < 25
        assert read_partition(real_kafka.bootstrap, topic, 2, 2) == values
        assert read_partition(proxy.kafka, topic, 2, 2) == values


def test_answers_name_only_the_proxy(proxy: KproxyProcess, topic: str, real_kafka: RealKafka) -> None:
    host, _, port = proxy.kafka.rpartition(":")
    real_ids = {broker.node_id for broker in real_kafka.brokers}
    with RawClient(host, int(port)) as client:
        for version in range(14):
            fields: dict[str, object] = {"topics": [{"name": topic}]}
            if version >= 10:
                fields["topics"] = [{"name": topic, "topic_id": None}]
            answer = client.request(keys.METADATA, version, **fields)
            assert [(each.host, each.port) for each in answer.brokers] == [(host, int(port))], version
            proxy_id = answer.brokers[0].node_id
            assert proxy_id not in real_ids
            partitions = answer.topics[0].partitions
            assert len(partitions) == PARTITIONS
            for each in partitions:
                assert (each.leader_id, [*each.replica_nodes], [*each.isr_nodes]) == (proxy_id, [proxy_id], [proxy_id])
        answer = client.request(keys.DESCRIBE_CLUSTER, 1)
        assert [(each.host, each.port) for each in answer.brokers] == [(host, int(port))]
        answer = client.request(keys.DESCRIBE_TOPIC_PARTITIONS, 0, topics=[{"name": topic}], response_partition_limit=9)
        assert {each.leader_id for each in answer.topics[0].partitions} == {proxy_id}
        answer = client.request(keys.FIND_COORDINATOR, 3, key="some-group", key_type=0)
        assert answer.error_code or (answer.host, answer.port) == (host, int(port))


@pytest.mark.long
def test_broker_that_kafka_dropped_stays_in_metrics(proxy: KproxyProcess, real_kafka: RealKafka) -> None:
    """Kafka drops a dead broker from its metadata within seconds, and an alert waits for longer."""
    victim = real_kafka.brokers[2]
    series = f'kproxy_broker_up{{broker="{victim.node_id}"}} '
    wait_for(lambda: counted(proxy.admin, series) == 1)
    try:
        victim.kill()

        def is_dropped_and_down() -> bool:
            # From one moment: on a busy machine Kafka may drop another broker for a while.
            text = page(proxy.admin, "/metrics")[1]
            return "kproxy_table_brokers 2.0\n" in text and f"{series}0.0\n" in text

        wait_for(is_dropped_and_down)
    finally:
        victim.start()
    wait_for(lambda: counted(proxy.admin, series) == 1)


@pytest.mark.long
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_idempotent_producer_survives_a_broker(
    proxy: KproxyProcess, topic: str, real_kafka: RealKafka, how: str
) -> None:
    victim = real_kafka.brokers[real_kafka.leaders(topic)[0] - 1]

    def befallen_half_way() -> Iterator[KeyValue]:
        for number, record in enumerate(numbered(MOVED_RECORDS)):
            if number == MOVED_RECORDS // 2:
                victim.kill() if how == "dies" else victim.pause()
            elif number % 100 == 0:
                time.sleep(0.02)
            yield record

    try:
        written = write("librdkafka", idempotently("librdkafka", proxy.kafka), topic, befallen_half_way())
        if how == "dies":
            assert not victim.running
            assert victim.node_id not in real_kafka.leaders(topic).values()
        found = read("librdkafka", at("librdkafka", proxy.kafka), topic, PARTITIONS, MOVED_RECORDS)
        check(written, found, PARTITIONS)
    finally:
        if how == "dies":
            victim.start()
        else:
            victim.resume()
    real_kafka.wait_until_in_sync([topic])
    # Unanswered records that reached it before it hung are not duplicated.
    check(written, read_direct(real_kafka, topic, MOVED_RECORDS), PARTITIONS)


@pytest.mark.parametrize("inline", [True, pytest.param(False, marks=pytest.mark.long)])
def test_fixed_table_serves_its_topics(real_kafka: RealKafka, topic: str, tmp_path: Path, inline: bool) -> None:
    leaders = real_kafka.leaders(topic)
    brokers = "".join(f'{broker.node_id} = "{broker.address}"\n' for broker in real_kafka.brokers)
    owners = [leaders[index] for index in range(PARTITIONS)]
    table = f'[brokers]\n{brokers}[[topics]]\nname = "{topic}"\nowners = {owners}\n'
    file = tmp_path / "file.toml"
    if inline:
        file.write_text(f'[ownership]\nownership = "static"\n{table}')
        source: list[str | Path] = ["--config", file]
    else:
        file.write_text(table)
        source = ["--ownership", "static", "--table", file]
    with serving(["serve", "--listen", "127.0.0.1:0", *source], tmp_path / "stderr") as proxy:
        assert set(proxy.fields) == {"kafka"}
        assert highest_produce(proxy) == 12, "a fixed table knows no topic ids"
        written = write("librdkafka", idempotently("librdkafka", proxy.kafka), topic, numbered(RECORDS))
        check(written, read("librdkafka", at("librdkafka", proxy.kafka), topic, PARTITIONS, RECORDS), PARTITIONS)
        # An unlisted topic has no owner, although the brokers would have created it.
        producer = confluent_kafka.Producer({"bootstrap.servers": proxy.kafka, "message.timeout.ms": 2000})
        errors: list[object] = []
        producer.produce(f"{topic}-other", b"x", on_delivery=lambda error, _: errors.append(error))
        producer.flush(TIMEOUT_S)
        assert len(errors) == 1
        assert errors[0] is not None
        assert proxy.stop() == 0


def test_audit_trail_is_kept_in_the_cluster(real_kafka: RealKafka, topic: str, tmp_path: Path) -> None:
    trail = f"trail-{topic}"
    more = ("--audit-sink", f"topic:{trail}", "--audit-interval-s", "0.5")
    with kafka_proxy(tmp_path / "audited", real_kafka.bootstrap, *more) as process:
        produce(process.kafka, topic, [b"%d" % n for n in range(100)])
    (rows,) = trails_in_topic(real_kafka.bootstrap, trail).values()
    assert is_whole(rows)
    assert sum(row.record_count for row in rows if isinstance(row, Range) and row.topic == topic) == 100


def test_doctor_passes_the_cluster(real_kafka: RealKafka, topic: str) -> None:
    ended = run_kproxy("doctor", "--bootstrap", real_kafka.bootstrap, "--topic", topic, "--json")
    findings = json.loads(ended.stdout)["findings"]
    assert (ended.status, {finding["result"] for finding in findings}) == (0, {"ok"}), findings
    assert [finding["check"] for finding in findings].count("kafka.named") == 3
