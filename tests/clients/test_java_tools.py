"""Kafka's own Java tools against a running `kproxy dev`, with default settings and the proxy as their only address."""

from __future__ import annotations

import re
import subprocess
import uuid
from pathlib import Path

import pytest

from tests.support.brokers.kafka_jars import kafka_classpath
from tests.support.brokers.real_kafka import shared_classes
from tests.support.clients.java import SHORT_JAVA, java_executable
from tests.support.clients.kafka_io import read_partition
from tests.support.processes.dev import KproxyProcess

# The very first run downloads Kafka's jars.
pytestmark = [pytest.mark.java, pytest.mark.timeout(900)]

TIMEOUT_S = 90.0
RECORDS = 5_000
RECORD_BYTES = 300


def run_java(main_class: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run one of Kafka's tools to its end."""
    return subprocess.run(
        [java_executable(), *SHORT_JAVA, *shared_classes(), "-cp", kafka_classpath(), main_class, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.fixture(scope="module", autouse=True)
def _jars() -> None:
    """Downloaded once per user."""
    shared_classes()


@pytest.fixture
def topic() -> str:
    return f"java-{uuid.uuid4().hex[:10]}"


def console_consumer(kafka: str, topic: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Of partition 0 from the start; a partition asked for by number needs no consumer group."""
    return run_java(
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        *("--bootstrap-server", kafka, "--topic", topic, "--partition", "0", "--offset", "earliest", *more),
    )


@pytest.mark.long
def test_producer_performance_tool_writes_and_console_consumer_reads(
    dev_cluster: KproxyProcess, topic: str, tmp_path: Path
) -> None:
    payloads = [f"{number:05d} " + "x" * RECORD_BYTES for number in range(100)]
    (tmp_path / "payloads").write_text("\n".join(payloads))
    wrote = run_java(
        "org.apache.kafka.tools.ProducerPerformance",
        *("--bootstrap-server", dev_cluster.kafka, "--topic", topic, "--num-records", str(RECORDS)),
        *("--throughput", "-1", "--payload-file", str(tmp_path / "payloads")),
    )
    assert wrote.returncode == 0, wrote.stdout + wrote.stderr
    assert re.search(rf"^{RECORDS} records sent, ", wrote.stdout, re.MULTILINE), wrote.stdout + wrote.stderr
    assert "Exception" not in wrote.stdout + wrote.stderr

    read = console_consumer(dev_cluster.kafka, topic, "--max-messages", str(RECORDS))
    assert read.returncode == 0, read.stderr
    lines = read.stdout.splitlines()
    assert len(lines) == RECORDS
    assert set(lines) <= set(payloads)
    # Another client sees the same records at the same places.
    assert [value.decode() for value in read_partition(dev_cluster.kafka, topic, 0, RECORDS)] == lines


def test_console_producer_input_comes_back_in_order(dev_cluster: KproxyProcess, topic: str) -> None:
    lines = [f"line {number}: grüße" for number in range(200)]
    wrote = run_java(
        "org.apache.kafka.tools.ConsoleProducer",
        *("--bootstrap-server", dev_cluster.kafka, "--topic", topic),
        stdin="\n".join(lines) + "\n",
    )
    assert wrote.returncode == 0, wrote.stderr
    assert "ERROR" not in wrote.stderr, wrote.stderr
    read = console_consumer(dev_cluster.kafka, topic, "--max-messages", str(len(lines)))
    assert read.stdout.splitlines() == lines, read.stderr
