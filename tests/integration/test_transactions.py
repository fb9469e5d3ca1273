"""Transactions through the proxy: on real Apache Kafka they work unchanged, elsewhere a producer is told so at once."""

from __future__ import annotations

import re
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import confluent_kafka
import pytest

from tests.support.dev import KproxyProcess, serving
from tests.support.java import java_executable
from tests.support.kafka_jars import kafka_classpath
from tests.support.real_kafka import RealKafka

# The first run of all downloads Kafka's jars.
pytestmark = [pytest.mark.java, pytest.mark.timeout(900)]

PARTITIONS = 6
RECORDS = 60
FATES = ["commit", "abort", "commit", "abort"]
TIMEOUT_S = 60.0
# A producer that waits for what never comes gives up after 60 s.
AT_ONCE_S = 10.0
Run = Callable[..., str]
JAVA_SOURCE = Path(__file__).parents[1] / "support" / "TransactionalClient.java"
COMMITTED = sorted(f"commit {number} {record}" for number in (0, 2) for record in range(RECORDS))
ABORTED = sorted(f"abort {number} {record}" for number in (1, 3) for record in range(RECORDS))


@pytest.fixture(scope="module")
def proxy(real_kafka: RealKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KproxyProcess]:
    arguments = ["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    arguments += ["--ownership", "kafka", "--bootstrap", real_kafka.bootstrap]
    with serving(arguments, tmp_path_factory.mktemp("proxy") / "stderr") as process:
        yield process


@pytest.fixture
def topic(real_kafka: RealKafka) -> str:
    return real_kafka.create_topic(f"transactions-{uuid.uuid4().hex[:10]}", PARTITIONS)


def run_java(bootstrap: str, topic: str, *fates: str) -> str:
    """What the Java producer says in the end."""
    command = [java_executable(), "-cp", kafka_classpath(), str(JAVA_SOURCE), bootstrap, topic, f"java-{topic}"]
    command += [str(PARTITIONS), str(RECORDS), *fates]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * TIMEOUT_S, check=False)
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr


def run_librdkafka(bootstrap: str, topic: str, *fates: str) -> str:
    """The same by librdkafka."""
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
    """All there is to read in a topic, sorted."""
    settings = {"bootstrap.servers": bootstrap, "group.id": "unused", "enable.auto.commit": False}
    settings |= {"isolation.level": isolation, "enable.partition.eof": True}
    consumer = confluent_kafka.Consumer(settings)
    values: list[str] = []
    ends: set[int | None] = set()
    deadline = time.monotonic() + TIMEOUT_S
    try:
        first = confluent_kafka.OFFSET_BEGINNING
        consumer.assign([confluent_kafka.TopicPartition(topic, each, first) for each in range(PARTITIONS)])
        while len(ends) < PARTITIONS:
            assert time.monotonic() < deadline, f"the ends of {ends} alone were reached"
            for message in consumer.consume(1000, 0.5):
                error = message.error()
                if error is None:
                    values.append((message.value() or b"").decode())
                elif error.code() == confluent_kafka.KafkaError._PARTITION_EOF:
                    ends.add(message.partition())
    finally:
        consumer.close()
    return sorted(values)


@pytest.mark.parametrize("run", [run_java, run_librdkafka])
def test_what_is_committed_is_read_and_what_is_aborted_is_not(
    run: Run, proxy: KproxyProcess, real_kafka: RealKafka, topic: str
) -> None:
    assert run(proxy.kafka, topic, *FATES) == "done"
    for bootstrap in (real_kafka.bootstrap, proxy.kafka):
        assert read(bootstrap, topic, "read_committed") == COMMITTED
        assert read(bootstrap, topic, "read_uncommitted") == sorted(COMMITTED + ABORTED)


@pytest.mark.parametrize("run", [run_java, run_librdkafka])
def test_where_the_brokers_keep_no_transactions_a_producer_is_told_so_at_once(
    run: Run, dev_cluster: KproxyProcess
) -> None:
    said = run(dev_cluster.kafka, "any", "commit")
    assert "the brokers behind this proxy keep no transactions" in said
    milliseconds = re.match(r"failed after (\d+) ms", said)
    assert milliseconds is not None, said
    assert int(milliseconds[1]) < AT_ONCE_S * 1000
