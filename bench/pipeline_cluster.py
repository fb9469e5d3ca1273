"""Run what the measurement of Spark's sink needs: brokers of Apache Kafka, a proxy before them, Spark, and topics."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

from bench.processes import child, cpu_seconds, first_line
from kproxy.pipeline.session import SessionOptions, open_session
from tests.support.brokers.real_kafka import RealKafka, start_real_kafka

BROKERS = 3
PARTITIONS = 12
WAYS = VIA_PROXY, DIRECT = "through kproxy", "past it"
ADMIN_TIMEOUT_S = 30.0


class Cluster(NamedTuple):
    """All running processes; `pids` by their role."""

    session: Any
    kafka: RealKafka
    bootstraps: dict[str, str]
    pids: dict[str, list[int]]

    def cpu(self) -> dict[str, float]:
        return {name: sum(map(cpu_seconds, pids)) for name, pids in self.pids.items()}


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    """Run everything. Raise StartupError if Spark is missing; skip, as a test, if Java or a jar of Kafka is."""
    with contextlib.ExitStack() as stack:
        kafka = stack.enter_context(start_real_kafka(directory / "kafka", BROKERS))
        command = (sys.executable, "-m", "kproxy", "--log-level", "error", "serve", "--ownership", "kafka")
        proxy = stack.enter_context(child(*command, "--bootstrap", kafka.bootstrap, "--listen", "127.0.0.1:0"))
        address = first_line(proxy).partition("kafka=")[2].split()[0]
        spark = stack.enter_context(open_session(SessionOptions("kproxy bench", master="local[2]", short=True)))
        if spark.process is None:
            raise SystemExit("Another Spark runs in this process")
        pids = {"kproxy": [proxy.pid], "brokers": [each.pid for each in kafka.brokers], "Spark": [spark.process.pid]}
        yield Cluster(spark.session, kafka, {VIA_PROXY: address, DIRECT: kafka.bootstrap}, pids)


class Topic:
    """A topic of the measurement, with one replica. It is deleted when its block ends, because it is large."""

    def __init__(self, kafka: RealKafka, name: str) -> None:
        self.name = name
        self._kafka = kafka

    def __enter__(self) -> Topic:
        # Kafka keeps the files of a deleted topic for a minute.
        wanted = NewTopic(self.name, PARTITIONS, 1, config={"file.delete.delay.ms": "100"})
        self._kafka.admin().create_topics([wanted])[self.name].result(ADMIN_TIMEOUT_S)
        deadline = time.monotonic() + ADMIN_TIMEOUT_S
        while not self._kafka.takes_writes(self.name, PARTITIONS):
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.name}: some partitions have no leader")
            time.sleep(0.05)
        return self

    def __exit__(self, *error: object) -> None:
        self._kafka.admin().delete_topics([self.name])[self.name].result(ADMIN_TIMEOUT_S)

    def records(self) -> int:
        """Return the number of records that a reader gets. Raise KafkaException."""
        return sum(self._kafka.end_offsets(self.name, PARTITIONS).values())
