"""Java and librdkafka write through two proxies to a real Apache Kafka cluster during a rolling restart.

Each broker in turn is stopped and started again: one comes back where it was, one on another port, one was killed. One
of the proxies is killed meanwhile, the one with more client connections. All the while the clients write,
idempotently, and in the end the brokers have what was acknowledged: all of it, once, in order.

With Spark as the third client: test_rolled_under_spark. KPROXY_TEST_ROLLS has the cluster rolled more often than once.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from tests.support.brokers.kafka_jars import KAFKA_VERSION, client_classpath
from tests.support.brokers.leader_moves import check_numbered, numbered, paced
from tests.support.brokers.real_kafka import RealBroker, RealKafka
from tests.support.clients.client_process import ClientRun
from tests.support.clients.java_client import run_java_client
from tests.support.clients.kafka_io import Record, read_topic
from tests.support.clients.librdkafka_client import run_librdkafka
from tests.support.clients.spark import write_batches
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import counted, kafka_proxy
from tests.support.waiting import wait_for

# The first run of all downloads the jars.
pytestmark = [pytest.mark.java, pytest.mark.timeout(900)]

ROLLS = int(os.environ.get("KPROXY_TEST_ROLLS", "1"))
PARTITIONS = 3
RECORDS_PER_S = 2_000 if os.environ.get("KPROXY_TEST_ALL") == "1" else 500
SPARK_ROWS = 200
READ_TIMEOUT_S = 60.0
# Of /metrics.
CLIENTS = "kproxy_client_connections"
PROXIES = "kproxy_fleet_proxies"
RETRIES = "kproxy_retries_total{"


@pytest.fixture
def proxies(
    real_kafka: RealKafka, etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path
) -> Iterator[list[KproxyProcess]]:
    """Two that clients are told of: Spark's (3.9) would not go back to the addresses that they began with."""
    fleet = ["--etcd", etcd.endpoint, "--prefix", etcd_prefix, "--lease-ttl", "3"]
    with (
        kafka_proxy(tmp_path / "first", real_kafka.bootstrap, *fleet) as first,
        kafka_proxy(tmp_path / "second", real_kafka.bootstrap, *fleet) as second,
    ):
        for proxy in (first, second):
            wait_for(lambda proxy=proxy: counted(proxy.admin, PROXIES) == 2)
        yield [first, second]


class Writers:
    """The clients, each to a topic of its own, from the start of the block until its end or the first failure."""

    def __init__(self, real_kafka: RealKafka, bootstrap: str, spark: Any | None) -> None:
        name = uuid.uuid4().hex[:10]
        self.topics = {
            client: real_kafka.create_topic(f"rolled-{client}-{name}", PARTITIONS)
            for client in ("java", "librdkafka", *(["spark"] if spark is not None else []))
        }
        self._bootstrap = bootstrap
        self._spark = spark
        self._pool = ThreadPoolExecutor(len(self.topics))
        self._ended = Event()

    def __enter__(self) -> Writers:
        self._java = self._pool.submit(self._write_java)
        self._librdkafka = self._pool.submit(self._write_librdkafka)
        self._by_spark = None if self._spark is None else self._pool.submit(self._write_spark)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._pool.shutdown()

    def check_alive(self) -> None:
        for each in (self._java, self._librdkafka, self._by_spark):
            if each is not None and each.done():
                each.result()
                raise AssertionError("a client has ended before its time")

    def results(self) -> dict[str, ClientRun]:
        """By client; once the block has ended."""
        return {"java": self._java.result(), "librdkafka": self._librdkafka.result()}

    def spark_count(self) -> int:
        """How many records Spark has written; once the block has ended."""
        assert self._by_spark is not None, "Spark is not among the clients"
        return self._by_spark.result()

    def _records(self) -> Iterator[Record]:
        endless = paced(numbered(1 << 40, PARTITIONS), RECORDS_PER_S)
        return takewhile(lambda _: not self._ended.is_set(), endless)

    def _settings(self) -> dict[str, object]:
        settings = {"bootstrap.servers": self._bootstrap, "enable.idempotence": "true", "acks": "all", "linger.ms": 2}
        # On a busy machine a broker takes minutes to be back, and what a client gives up must not look like a loss.
        return settings | {"delivery.timeout.ms": 600_000}

    def _write_java(self) -> ClientRun:
        settings = self._settings() | {"batch.size": 2_000}
        return run_java_client(client_classpath(KAFKA_VERSION), self.topics["java"], self._records(), settings)

    def _write_librdkafka(self) -> ClientRun:
        return run_librdkafka(self.topics["librdkafka"], self._records(), self._settings())

    def _write_spark(self) -> int:
        settings = {"kafka.bootstrap.servers": self._bootstrap}
        topic = self.topics["spark"]
        return write_batches(
            self._spark, topic, PARTITIONS, settings, rows=SPARK_ROWS, goes_on=lambda: not self._ended.is_set()
        )


def roll(real_kafka: RealKafka, broker: RealBroker, writers: Writers, how: str) -> None:
    """Take a broker down and bring it back, in sync."""
    if how == "killed":
        broker.kill()
    else:
        broker.terminate()
    if how == "moved":
        broker.move()
    broker.start()
    real_kafka.wait_until_in_sync(list(writers.topics.values()))
    writers.check_alive()


def roll_under(writers: Writers, real_kafka: RealKafka, proxies: list[KproxyProcess]) -> None:
    """Roll the cluster, kill a proxy meanwhile, and check what Java and librdkafka have written."""
    with writers:
        for number in range(ROLLS):
            for broker, how in zip(real_kafka.brokers, ("stopped", "moved", "killed"), strict=True):
                roll(real_kafka, broker, writers, how)
                if number == 0 and how == "stopped":
                    survivor, victim = sorted(proxies, key=lambda proxy: counted(proxy.admin, CLIENTS))
                    victim.signal(signal.SIGKILL)
    assert counted(survivor.admin, RETRIES) > 0, "the rolls were to hit requests on their way"
    for client, run in writers.results().items():
        assert run.errors == {}, client
        read = read_topic(real_kafka.bootstrap, writers.topics[client], PARTITIONS, run.sent, READ_TIMEOUT_S)
        check_numbered(read, run.acknowledged, run.sent, PARTITIONS)
        assert run.sent > RECORDS_PER_S


@pytest.mark.long
def test_rolling_restart_keeps_records_complete_and_in_order(
    real_kafka: RealKafka, proxies: list[KproxyProcess]
) -> None:
    writers = Writers(real_kafka, ",".join(proxy.kafka for proxy in proxies), None)
    roll_under(writers, real_kafka, proxies)
