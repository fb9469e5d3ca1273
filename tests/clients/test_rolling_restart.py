"""No send fails during a rolling restart of three proxies before an Apache Kafka cluster, as a rollout does it.

Each proxy gets SIGTERM, waits for `--drain-delay`, ends, and is started on the same address; once it is ready, the next
one follows. Clients run at their defaults, in all modes, each to its own partition; Spark writes batches. Nothing is
lost or doubled, even without idempotence: a proxy answers the requests that it has read, and begins no later ones.
"""

from __future__ import annotations

import signal
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from tests.support.brokers.kafka_jars import KAFKA_VERSION
from tests.support.brokers.real_kafka import RealKafka
from tests.support.clients.kafka_io import read_topic
from tests.support.clients.spark import write_batches
from tests.support.clients.steady_writers import MODES, Found, Running, Writer, find, writing
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import counted, kafka_proxy, page, port_of
from tests.support.waiting import wait_for

# The first run of all downloads the jars.
pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.timeout(900)]

# kafka-python is not among them: its transactions may wait for ever for a commit whose connection was closed.
CLIENTS = ("librdkafka", "aiokafka", f"java {KAFKA_VERSION}")
PROXIES = 3
DRAIN_DELAY_S = 2
SPARK_PARTITIONS = 3
SPARK_ROWS = 200
# Acknowledgements of each client before the next proxy goes.
SETTLED = 20
PATIENCE_S = 120.0


class Fleet:
    """Proxies that share an etcd, each of which keeps its address when it is started again."""

    def __init__(self, real_kafka: RealKafka, flags: list[str], directory: Path, stack: ExitStack) -> None:
        self._bootstrap = real_kafka.bootstrap
        self._flags = [*flags, "--lease-ttl", "3", "--drain-delay", str(DRAIN_DELAY_S)]
        self._directory = directory
        self._stack = stack
        self._started = 0
        self.proxies = [self._start(0) for _ in range(PROXIES)]
        for proxy in self.proxies:
            wait_for(lambda proxy=proxy: counted(proxy.admin, "kproxy_fleet_proxies") == PROXIES)

    @property
    def bootstrap(self) -> str:
        return ",".join(proxy.kafka for proxy in self.proxies)

    def _start(self, port: int) -> KproxyProcess:
        self._started += 1
        listen = ["--listen", f"127.0.0.1:{port}"]
        process = kafka_proxy(self._directory / str(self._started), self._bootstrap, *self._flags, *listen)
        return self._stack.enter_context(process)

    def restart(self, place: int) -> None:
        """As a rollout: until it is ready again."""
        before = self.proxies[place]
        before.signal(signal.SIGTERM)
        wait_for(lambda: page(before.admin, "/readyz")[0] == 503)
        assert before.wait() == 0, before.stderr()[-2000:]
        self.proxies[place] = self._start(port_of(before))
        wait_for(lambda: page(self.proxies[place].admin, "/readyz")[0] == 200)


@pytest.fixture
def fleet(real_kafka: RealKafka, etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(real_kafka, ["--etcd", etcd.endpoint, "--prefix", etcd_prefix], tmp_path, stack)


@pytest.mark.long
def test_no_client_sees_a_rolling_restart(real_kafka: RealKafka, fleet: Fleet, spark: Any) -> None:
    writers = {mode: writers_of(mode, real_kafka, fleet.bootstrap) for mode in MODES}
    spark_topic = real_kafka.create_topic(f"rolling-spark-{uuid.uuid4().hex[:10]}", SPARK_PARTITIONS)
    ended = threading.Event()
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        stack.callback(ended.set)
        by_spark = pool.submit(
            write_batches,
            spark,
            spark_topic,
            SPARK_PARTITIONS,
            {"kafka.bootstrap.servers": fleet.bootstrap},
            rows=SPARK_ROWS,
            goes_on=lambda: not ended.is_set(),
        )
        running = [stack.enter_context(writing(each)) for each in writers.values()]
        all_go_on(running)
        for place in range(PROXIES):
            fleet.restart(place)
            all_go_on(running)
            assert not by_spark.done(), by_spark.result()

    for mode, of_mode in writers.items():
        read = read_topic(real_kafka.bootstrap, of_mode[0].topic, len(CLIENTS), 0)
        for writer in of_mode:
            found = find(writer, read)
            print(f"{mode:13} {writer.name:13} {len(writer.kept)} acknowledged, {found}, {writer.problems[:3]}")
            assert writer.problems == [], f"{mode} {writer.name}"
            assert found == Found(lost=0, twice=0, is_in_order=True), f"{mode} {writer.name}"
    total = by_spark.result()
    values = [
        int(each.value or b"-1") for each in read_topic(real_kafka.bootstrap, spark_topic, SPARK_PARTITIONS, total)
    ]
    assert sorted(values) == list(range(total))


def writers_of(mode: str, real_kafka: RealKafka, bootstrap: str) -> list[Writer]:
    topic = real_kafka.create_topic(f"rolling-{mode}-{uuid.uuid4().hex[:10]}", len(CLIENTS))
    return [Writer(name, bootstrap, topic, place, MODES[mode]) for place, name in enumerate(CLIENTS)]


def all_go_on(running: list[Running]) -> None:
    now = time.monotonic()
    for each in running:
        assert each.all_acknowledged(now, SETTLED, now + PATIENCE_S), "a writer stands still"
