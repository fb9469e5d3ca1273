"""Run Kafka's own Java client of any release since 0.11 (JavaClient.java)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.support.brokers.kafka_jars import kafka_classpath
from tests.support.brokers.real_kafka import shared_classes
from tests.support.clients.client_process import ClientRun, run_client
from tests.support.clients.java import java_program
from tests.support.clients.kafka_io import Record

_SOURCE = Path(__file__).with_name("JavaClient.java")


def run_java_client(
    classpath: str,
    topic: str,
    records: Iterable[Record],
    settings: Mapping[str, object],
    *,
    read_back: int = 0,
    options: Sequence[str] = (),
) -> ClientRun:
    """Write all of `records`. With `read_back`, the topic's number of partitions, read as many records with the client.

    `options` are for Java itself.
    """
    # The archive fits only the jars of the brokers.
    shared = shared_classes() if classpath == kafka_classpath() else []
    command = java_program(_SOURCE, classpath, *shared, *options)
    command += ["both" if read_back else "produce", topic, str(read_back)]
    return run_client([*command, *(f"{name}={value}" for name, value in settings.items())], records)
