"""Readers with the versions that they speak to brokers, through the proxy: groups, topics by id, leaders that move.

Apache Kafka and the reference brokers stand behind it. The proxy's metrics tell which versions it was asked in.
"""

from __future__ import annotations

import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import confluent_kafka
import kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from kproxy_codec.api_keys import FETCH, OFFSET_COMMIT, OFFSET_FETCH, name_of
from tests.support.brokers.kafka_jars import kafka_classpath
from tests.support.brokers.real_kafka import RealKafka, shared_classes
from tests.support.clients.java import SHORT_JAVA, java_executable
from tests.support.clients.kafka_io import produce
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import counted, kafka_proxy
from tests.support.waiting import wait_for

# The first run of all downloads the jars.
pytestmark = [pytest.mark.java, pytest.mark.timeout(900)]

PARTITIONS = 3
RECORDS = 30
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def before_kafka(real_kafka: RealKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KproxyProcess]:
    with kafka_proxy(tmp_path_factory.mktemp("proxy"), real_kafka.bootstrap) as process:
        yield process


@pytest.fixture(params=["before_kafka", "dev_cluster"])
def proxy(request: pytest.FixtureRequest) -> KproxyProcess:
    process: KproxyProcess = request.getfixturevalue(request.param)
    return process


@pytest.fixture
def topic(proxy: KproxyProcess) -> str:
    name = f"versions-{uuid.uuid4().hex[:10]}"
    admin = AdminClient({"bootstrap.servers": proxy.kafka})
    admin.create_topics([NewTopic(name, PARTITIONS)])[name].result(TIMEOUT_S)
    return name


def write(proxy: KproxyProcess, topic: str, beginning: str) -> set[str]:
    """The values of the new records, some in each partition."""
    values = [f"{beginning}-{number}" for number in range(RECORDS)]
    for partition in range(PARTITIONS):
        produce(proxy.kafka, topic, [each.encode() for each in values[partition::PARTITIONS]], partition)
    return set(values)


def asked(proxy: KproxyProcess, api_key: int, version: int) -> float:
    """How many requests of a version the proxy has had."""
    return counted(proxy.admin, f'kproxy_requests_total{{api="{name_of(api_key)}",version="{version}"}}')


@contextmanager
def grows(proxy: KproxyProcess, *versions: tuple[int, int]) -> Iterator[None]:
    """Check that requests of these versions came."""
    before = [asked(proxy, *each) for each in versions]
    yield
    grown = [each for each, old in zip(versions, before, strict=True) if asked(proxy, *each) > old]
    assert grown == [*versions]


@pytest.mark.parametrize("api_version", [(3, 0), pytest.param((3, 3), marks=pytest.mark.long), (4, 0)])
def test_pinned_kafka_python_reads_in_a_group(proxy: KproxyProcess, topic: str, api_version: tuple[int, int]) -> None:
    group = f"group-{topic}"

    def read(count: int) -> set[str]:
        consumer = kafka.KafkaConsumer(
            topic,
            bootstrap_servers=proxy.kafka,
            group_id=group,
            api_version=api_version,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            consumer_timeout_ms=int(TIMEOUT_S * 1000),
        )
        try:
            found = {message.value.decode() for message in islice(consumer, count)}
            consumer.commit()
        finally:
            consumer.close()
        return found

    with grows(proxy, (OFFSET_FETCH, 8)):
        for beginning in ("first", "second"):
            written = write(proxy, topic, beginning)
            assert read(RECORDS) == written


def test_librdkafka_reads_topics_by_id(proxy: KproxyProcess, topic: str, request: pytest.FixtureRequest) -> None:
    written = write(proxy, topic, "first")
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": proxy.kafka, "group.id": f"group-{topic}", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe([topic])
    found: set[str] = set()
    deadline = time.monotonic() + TIMEOUT_S

    def read(expected: set[str]) -> None:
        while not expected <= found:
            assert time.monotonic() < deadline, f"{len(found)} records"
            message = consumer.poll(1.0)
            if message is not None:
                assert message.error() is None, message.error()
                found.add((message.value() or b"").decode())

    with grows(proxy, (FETCH, 16)):
        read(written)
        if "before_kafka" in request.fixturenames:
            request.getfixturevalue("real_kafka").move_leaders(topic)
        read(written | write(proxy, topic, "second"))
    committed = consumer.commit(asynchronous=False)
    consumer.close()
    assert committed is not None
    assert sorted(each.offset for each in committed) == [2 * RECORDS // PARTITIONS] * PARTITIONS


def test_console_consumer_reads_while_leaders_move(before_kafka: KproxyProcess, real_kafka: RealKafka) -> None:
    topic = real_kafka.create_topic(f"versions-{uuid.uuid4().hex[:10]}", PARTITIONS)
    group = f"group-{topic}"
    written = write(before_kafka, topic, "first")
    with grows(before_kafka, (FETCH, 18), (OFFSET_FETCH, 9), (OFFSET_COMMIT, 9)):
        command = [java_executable(), *SHORT_JAVA, *shared_classes(), "-cp", kafka_classpath()]
        command += ["org.apache.kafka.tools.consumer.ConsoleConsumer", "--bootstrap-server", before_kafka.kafka]
        command += ["--topic", topic, "--group", group, "--from-beginning", "--max-messages", str(2 * RECORDS)]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        end = threading.Timer(TIMEOUT_S, process.kill)
        end.start()
        assert process.stdout is not None
        assert process.stderr is not None
        found = [process.stdout.readline().strip() for _ in range(RECORDS)]
        assert set(found) == written
        real_kafka.move_leaders(topic)
        written |= write(before_kafka, topic, "second")
        found += process.stdout.read().split()
        end.cancel()
        assert set(found) == written, process.stderr.read()
        assert len(found) == 2 * RECORDS
        process.wait(TIMEOUT_S)
    # Committed without leader epochs, also where brokers hold them.
    direct = kafka.KafkaAdminClient(bootstrap_servers=real_kafka.bootstrap)
    try:
        offsets = direct.list_group_offsets(group)
    finally:
        direct.close()
    assert {each.leader_epoch for found in offsets.values() for each in found.values()} == {-1}


@pytest.mark.parametrize("proxy", ["dev_cluster"], indirect=True)
def test_new_group_protocol_is_refused_with_the_reason(proxy: KproxyProcess, topic: str) -> None:
    """librdkafka read nothing, without an error, when the request was not named in ApiVersions."""
    errors: list[str] = []
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": proxy.kafka, "group.id": "new-protocol", "group.protocol": "consumer"}
    )
    consumer.subscribe([topic])

    def is_reported() -> bool:
        message = consumer.poll(0.1)
        if message is not None:
            errors.append(str(message.error()))
        return bool(errors)

    wait_for(is_reported, TIMEOUT_S, "an error")
    consumer.close()
    assert "ConsumerGroupHeartbeat" in errors[0]
