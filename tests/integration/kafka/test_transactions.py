"""Transactions and groups: unchanged on real Apache Kafka through the proxy, refused elsewhere."""

from __future__ import annotations

import itertools
import re
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import confluent_kafka
import kafka
import pytest

from tests.support.brokers.kafka_jars import kafka_classpath
from tests.support.brokers.real_kafka import RealKafka
from tests.support.clients.java import SHORT_JAVA, java_executable
from tests.support.clients.kafka_io import produce, read_topic
from tests.support.clients.member_processes import console_consumer
from tests.support.processes.dev import KproxyProcess

# The very first run downloads Kafka's jars.
pytestmark = [pytest.mark.java, pytest.mark.timeout(900)]

PARTITIONS = 6
RECORDS = 60
FATES = ["commit", "abort", "commit", "abort"]
TIMEOUT_S = 60.0
# A producer gives up an unsuccessful wait after 60 s.
AT_ONCE_S = 45.0
Run = Callable[..., str]
JAVA_SOURCE = Path(__file__).parents[2] / "support" / "clients" / "TransactionalClient.java"
COMMITTED = sorted(f"commit {number} {record}" for number in (0, 2) for record in range(RECORDS))
ABORTED = sorted(f"abort {number} {record}" for number in (1, 3) for record in range(RECORDS))


@pytest.fixture
def topic(real_kafka: RealKafka) -> str:
    return real_kafka.create_topic(f"transactions-{uuid.uuid4().hex[:10]}", PARTITIONS)


def run_java(bootstrap: str, topic: str, *fates: str) -> str:
    """The Java producer's final output."""
    command = [java_executable(), *SHORT_JAVA, "-cp", kafka_classpath(), str(JAVA_SOURCE)]
    command += [bootstrap, topic, f"java-{topic}", str(PARTITIONS), str(RECORDS), *fates]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * TIMEOUT_S, check=False)
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr


def run_librdkafka(bootstrap: str, topic: str, *fates: str) -> str:
    """Like `run_java`, with librdkafka."""
    settings = {"bootstrap.servers": bootstrap, "transactional.id": f"librdkafka-{topic}", "log_level": 0}
    producer = confluent_kafka.Producer(settings)
    began = time.monotonic()
    try:
        producer.init_transactions(TIMEOUT_S)
        for number, fate in enumerate(fates):
            producer.begin_transaction()
            for record in range(RECORDS):
                producer.produce(topic, f"{fate} {number} {record}", partition=record % PARTITIONS)
            if fate == "commit":
                producer.commit_transaction(TIMEOUT_S)
            else:
                assert producer.flush(TIMEOUT_S) == 0
                producer.abort_transaction(TIMEOUT_S)
    except confluent_kafka.KafkaException as error:
        return f"failed after {(time.monotonic() - began) * 1000:.0f} ms: {error}"
    return "done"


def read(bootstrap: str, topic: str, isolation: str) -> list[str]:
    """All records of a topic, sorted."""
    found = read_topic(bootstrap, topic, PARTITIONS, 0, settings={"isolation.level": isolation})
    return sorted((each.value or b"").decode() for each in found)


@pytest.mark.parametrize("run", [pytest.param(run_java, marks=pytest.mark.long), run_librdkafka])
def test_committed_records_are_read_and_aborted_are_not(
    run: Run, proxy: KproxyProcess, real_kafka: RealKafka, topic: str
) -> None:
    assert run(proxy.kafka, topic, *FATES) == "done"
    for bootstrap in (real_kafka.bootstrap, proxy.kafka):
        assert read(bootstrap, topic, "read_committed") == COMMITTED
        assert read(bootstrap, topic, "read_uncommitted") == sorted(COMMITTED + ABORTED)


@pytest.mark.long
def test_transactions_continue_after_death_of_their_coordinator(
    proxy: KproxyProcess, real_kafka: RealKafka, topic: str
) -> None:
    settings = {"bootstrap.servers": proxy.kafka, "transactional.id": topic, "log_level": 0}
    producer = confluent_kafka.Producer(settings)
    producer.init_transactions(TIMEOUT_S)
    committed: list[str] = []
    dead = None
    try:
        for number in range(12):
            if number == 4:
                coordinator = real_kafka.leaders("__transaction_state")[0]
                dead = next(broker for broker in real_kafka.brokers if broker.node_id == coordinator)
                dead.kill()
            committed += transact(producer, topic, number)
    finally:
        if dead is not None:
            dead.start()
    assert read(proxy.kafka, topic, "read_committed") == sorted(committed)


def transact(producer: confluent_kafka.Producer, topic: str, number: int) -> list[str]:
    """Run one transaction until it is committed, as librdkafka advises; return the committed records."""
    deadline = time.monotonic() + 2 * TIMEOUT_S
    for attempt in itertools.count():
        values = [f"{number} {attempt} {record}" for record in range(RECORDS)]
        producer.begin_transaction()
        for record, value in enumerate(values):
            producer.produce(topic, value, partition=record % PARTITIONS)
        if finish(producer.commit_transaction, deadline):
            return values
        assert finish(producer.abort_transaction, deadline)
    raise AssertionError


def finish(ends: Callable[[float], None], deadline: float) -> bool:
    """Return whether the transaction ended this way; False if it must be aborted."""
    while True:
        try:
            ends(TIMEOUT_S)
            return True
        except confluent_kafka.KafkaException as exception:
            error = exception.args[0]
            if error.txn_requires_abort():
                return False
            assert error.retriable(), error
            assert time.monotonic() < deadline, error


@pytest.mark.long(but=1)
@pytest.mark.parametrize("run", [run_java, run_librdkafka])
def test_transactional_producer_is_refused_without_transactions(run: Run, dev_cluster: KproxyProcess) -> None:
    said = run(dev_cluster.kafka, "any", "commit")
    assert "the brokers behind this proxy keep no transactions" in said
    milliseconds = re.match(r"failed after (\d+) ms", said)
    assert milliseconds is not None, said
    assert int(milliseconds[1]) < AT_ONCE_S * 1000


# Groups


def test_group_offsets_are_committed_with_their_transaction(
    proxy: KproxyProcess, real_kafka: RealKafka, topic: str
) -> None:
    """Consume, transform, produce: offsets go to the group's coordinator as part of the transaction."""
    produce(real_kafka.bootstrap, topic, [b"%d" % number for number in range(RECORDS)])
    made = real_kafka.create_topic(f"{topic}-made", PARTITIONS)
    settings = {"bootstrap.servers": proxy.kafka, "group.id": topic, "enable.auto.commit": False}
    consumer = confluent_kafka.Consumer({**settings, "auto.offset.reset": "earliest"})
    producer = confluent_kafka.Producer({"bootstrap.servers": proxy.kafka, "transactional.id": topic})
    try:
        consumer.subscribe([topic])
        producer.init_transactions(TIMEOUT_S)
        for fate in ("abort", "commit"):
            values = consume(consumer, RECORDS // 2)
            producer.begin_transaction()
            for value in values:
                producer.produce(made, f"{fate} 0 {value}", partition=0)
            positions = consumer.position(consumer.assignment())
            producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), TIMEOUT_S)
            if fate == "abort":
                producer.abort_transaction(TIMEOUT_S)
                # Uncommitted records are read again.
                consumer.seek(confluent_kafka.TopicPartition(topic, 0, 0))
            else:
                producer.commit_transaction(TIMEOUT_S)
        place = confluent_kafka.TopicPartition(topic, 0)
        assert consumer.committed([place], TIMEOUT_S)[0].offset == RECORDS // 2
    finally:
        consumer.close()
    assert read(proxy.kafka, made, "read_committed") == sorted(f"commit 0 {number}" for number in range(RECORDS // 2))


def consume(consumer: confluent_kafka.Consumer, count: int) -> list[str]:
    values: list[str] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(values) < count:
        assert time.monotonic() < deadline, f"{len(values)} of {count} records"
        for message in consumer.consume(count - len(values), 0.5):
            assert message.error() is None
            values.append((message.value() or b"").decode())
    return values


def consume_with_librdkafka(bootstrap: str, topic: str, count: int) -> list[str]:
    settings = {"bootstrap.servers": bootstrap, "group.id": f"librdkafka-{topic}", "auto.offset.reset": "earliest"}
    consumer = confluent_kafka.Consumer(settings)
    try:
        consumer.subscribe([topic])
        return consume(consumer, count)
    finally:
        # Closing commits the position.
        consumer.close()


def consume_with_kafka_python(bootstrap: str, topic: str, count: int) -> list[str]:
    consumer = kafka.KafkaConsumer(
        topic,
        bootstrap_servers=bootstrap,
        group_id=f"kafka-python-{topic}",
        auto_offset_reset="earliest",
        # Its first broker may not know the topic yet; by default it retries after five minutes.
        metadata_max_age_ms=1_000,
    )
    try:
        values: list[str] = []
        deadline = time.monotonic() + TIMEOUT_S
        while len(values) < count:
            assert time.monotonic() < deadline, f"{len(values)} of {count} records"
            polled = consumer.poll(500, max_records=count - len(values))
            values += [record.value.decode() for records in polled.values() for record in records]
        return values
    finally:
        consumer.close()


def consume_with_java(bootstrap: str, topic: str, count: int) -> list[str]:
    command = [*console_consumer(bootstrap, topic, f"java-{topic}", "auto.offset.reset=earliest")]
    command += ["--max-messages", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * TIMEOUT_S, check=True)
    # The value stands behind the partition and the offset.
    return [line.split()[-1] for line in done.stdout.splitlines()]


@pytest.mark.long(but=1)
@pytest.mark.parametrize("consumes", [consume_with_java, consume_with_librdkafka, consume_with_kafka_python])
def test_group_continues_where_it_stopped(
    consumes: Callable[[str, str, int], list[str]], proxy: KproxyProcess, real_kafka: RealKafka, topic: str
) -> None:
    values = [str(number) for number in range(RECORDS)]
    produce(real_kafka.bootstrap, topic, [value.encode() for value in values])
    first = consumes(proxy.kafka, topic, RECORDS // 3)
    assert first == values[: RECORDS // 3]
    # Through the proxy and at the brokers it is the same group.
    second = consumes(real_kafka.bootstrap, topic, RECORDS // 3)
    third = consumes(proxy.kafka, topic, RECORDS // 3)
    assert first + second + third == values


def test_members_of_a_group_share_its_partitions(proxy: KproxyProcess, real_kafka: RealKafka, topic: str) -> None:
    """One member at the brokers, two through the proxy."""
    settings = {"group.id": topic, "auto.offset.reset": "earliest", "enable.auto.commit": False}
    members = [
        confluent_kafka.Consumer({**settings, "bootstrap.servers": bootstrap})
        for bootstrap in (proxy.kafka, proxy.kafka, real_kafka.bootstrap)
    ]
    try:
        for member in members:
            member.subscribe([topic])
        deadline = time.monotonic() + TIMEOUT_S
        shares: list[int] = []
        while shares != [PARTITIONS // len(members)] * len(members):
            assert time.monotonic() < deadline, shares
            for member in members:
                member.poll(0.1)
            shares = [len(member.assignment()) for member in members]
    finally:
        for member in members:
            member.close()
