"""Several `kproxy serve` on one etcd, before reference brokers: whom they name, and what clients see as they go."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka
import kafka
import msgspec
import pytest

from codec import api_keys as keys
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.observe.table import TablePage
from tests.support.dev import KproxyProcess, run_kproxy, serving
from tests.support.kafka_io import Placed, read_topic
from tests.support.reference_broker import RawClient, start_brokers, wait_for
from tests.support.served import page, port_of, samples

PARTITIONS = 12
TTL_S = 2
FIRST = 1_000_000
# Others notice that a lease has ended within a moment of its end.
PATIENCE_S = 3 * TTL_S + 5


class Site:
    """Brokers on one prefix of an etcd, and proxies in front of them."""

    def __init__(self, etcd: str, prefix: str, directory: Path) -> None:
        self.etcd = etcd
        self.prefix = prefix
        self.directory = directory
        self._started = 0

    @contextmanager
    def proxy(self, port: int = 0, *more: str) -> Iterator[KproxyProcess]:
        self._started += 1
        arguments = ["serve", "--listen", f"127.0.0.1:{port}", "--admin", "127.0.0.1:0", "--lease-ttl", str(TTL_S)]
        arguments += ["--etcd", self.etcd, "--prefix", self.prefix, *more]
        with serving(arguments, self.directory / f"proxy-{self._started}") as process:
            yield process

    @contextmanager
    def proxies(self, count: int) -> Iterator[list[KproxyProcess]]:
        with ExitStack() as stack:
            yield [stack.enter_context(self.proxy()) for _ in range(count)]


@pytest.fixture(scope="module")
def site(etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory, prefix = tmp_path_factory.mktemp("site"), f"/fleet-{os.getpid()}"
    with start_brokers((1, 2), directory, etcd.endpoint, prefix, num_partitions=PARTITIONS):
        yield Site(etcd.endpoint, prefix, directory)


def asked(proxy: KproxyProcess, key: int, version: int, **fields: Any) -> Any:
    with RawClient("127.0.0.1", port_of(proxy)) as client:
        return client.request(key, version, **fields)


def named(proxy: KproxyProcess) -> dict[int, int]:
    """Whom it names: ports by id."""
    brokers = asked(proxy, keys.METADATA, 9, topics=[]).brokers
    assert {each.host for each in brokers} == {"127.0.0.1"}
    return {each.node_id: each.port for each in brokers}


def ports(proxies: Sequence[KproxyProcess]) -> dict[int, int]:
    """What is expected of proxies that were started one after the other."""
    return {FIRST + number: port_of(proxy) for number, proxy in enumerate(proxies)}


def leaders(proxy: KproxyProcess, topic: str) -> dict[int, int]:
    found = asked(proxy, keys.METADATA, 9, topics=[{"name": topic}], allow_auto_topic_creation=True).topics[0]
    return {each.partition_index: each.leader_id for each in found.partitions}


def agree(proxies: Sequence[KproxyProcess], expected: dict[int, int]) -> None:
    for proxy in proxies:
        wait_for(lambda proxy=proxy: named(proxy) == expected, PATIENCE_S, f"{proxy.kafka} names {named(proxy)}")


def end(proxy: KproxyProcess, number: int) -> None:
    proxy.signal(number)
    proxy.wait()


def test_each_names_all_and_partitions_spread(site: Site) -> None:
    with site.proxies(3) as proxies:
        expected = ports(proxies)
        agree(proxies, expected)
        wait_for(lambda: len(leaders(proxies[0], "spread")) == PARTITIONS)
        answers = [leaders(proxy, "spread") for proxy in proxies]
        assert answers[0] == answers[1] == answers[2]
        assert set(answers[0].values()) == set(expected)
        clusters = [asked(proxy, keys.DESCRIBE_CLUSTER, 0) for proxy in proxies]
        assert {each.controller_id for each in clusters} == {FIRST}
        assert len({each.cluster_id for each in clusters}) == 1
        assert all({each.broker_id: each.port for each in answer.brokers} == expected for answer in clusters)
        # On the admin page, in the metrics and by `kproxy table`.
        table = msgspec.json.decode(page(proxies[1].admin, "/table")[1], type=TablePage)
        assert [(each.id, each.port, each.this) for each in table.proxies] == [
            (node_id, port, port == port_of(proxies[1])) for node_id, port in expected.items()
        ]
        found = samples(page(proxies[1].admin, "/metrics")[1])
        assert found["kproxy_fleet_proxies", ()] == 3
        assert found["kproxy_fleet_registered", ()] == 1
        for of in (["--admin", proxies[1].admin], ["--etcd", site.etcd, "--prefix", site.prefix]):
            said = run_kproxy("table", *of).stdout
            assert all(f"{node_id} at 127.0.0.1:{port}" in said for node_id, port in expected.items()), said


def test_one_that_is_killed_is_gone_within_its_ttl_and_comes_back_under_its_id(site: Site) -> None:
    with site.proxies(3) as proxies:
        expected = ports(proxies)
        agree(proxies, expected)
        before = leaders(proxies[0], "spread")
        killed_at = time.monotonic()
        end(proxies[1], signal.SIGKILL)
        # Until its lease ends its id is its own: another address gets another one.
        with site.proxy() as fourth:
            assert named(fourth)[FIRST + 3] == port_of(fourth)
            if time.monotonic() < killed_at + TTL_S:
                assert named(fourth)[FIRST + 1] == port_of(proxies[1])
        survivors = {node_id: port for node_id, port in expected.items() if node_id != FIRST + 1}
        agree([proxies[0], proxies[2]], survivors)
        after = leaders(proxies[2], "spread")
        assert {index: after[index] for index, leader in before.items() if leader != FIRST + 1} == {
            index: leader for index, leader in before.items() if leader != FIRST + 1
        }
        with site.proxy(port_of(proxies[1])):
            agree([proxies[0], proxies[2]], expected)
            assert leaders(proxies[0], "spread") == before


def test_one_that_is_restarted_at_once_keeps_its_id(site: Site) -> None:
    with site.proxies(2) as proxies:
        expected = ports(proxies)
        agree(proxies, expected)
        end(proxies[1], signal.SIGKILL)
        with site.proxy(port_of(proxies[1])) as again:
            assert named(again) == named(proxies[0]) == expected
            # The lease of the one that was killed ends, and takes nothing with it.
            time.sleep(TTL_S + 1.5)
            assert named(again) == named(proxies[0]) == expected


def test_one_that_is_told_to_end_is_gone_at_once(site: Site) -> None:
    with site.proxies(2) as proxies:
        agree(proxies, ports(proxies))
        end(proxies[1], signal.SIGTERM)
        # Its lease lives for TTL_S more: it has been given up.
        assert named(proxies[0]) == {FIRST: port_of(proxies[0])}


def test_one_that_is_stopped_past_its_ttl_registers_again_when_it_wakes(site: Site) -> None:
    with site.proxies(2) as proxies:
        expected = ports(proxies)
        agree(proxies, expected)
        proxies[1].signal(signal.SIGSTOP)
        try:
            agree(proxies[:1], {FIRST: port_of(proxies[0])})
        finally:
            proxies[1].signal(signal.SIGCONT)
        agree(proxies, expected)


def test_one_alone_is_told_of_by_nobody_and_tells_of_nobody(site: Site) -> None:
    with site.proxy() as one, site.proxy(0, "--alone") as sidecar:
        assert named(sidecar) == {FIRST: port_of(sidecar)}
        assert named(one) == {FIRST: port_of(one)}


def test_before_a_fixed_table_too_and_while_etcd_is_not_there(site: Site, tmp_path: Path) -> None:
    table = tmp_path / "owners.toml"
    table.write_text('[brokers]\n1 = "127.0.0.1:1"\n')
    static = ("--ownership", "static", "--table", str(table), "--prefix", f"{site.prefix}/static")
    with site.proxy(0, *static) as one, site.proxy(0, *static) as other:
        agree([one, other], ports([one, other]))
        assert other.etcd == site.etcd


class Writer:
    """librdkafka or kafka-python, idempotent, writing until told to stop; every value is unique."""

    def __init__(self, kind: str, bootstrap: str, topic: str) -> None:
        self.kind = kind
        self.topic = topic
        self.acknowledged: set[bytes] = set()
        self.errors: list[str] = []
        self._bootstrap = bootstrap
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write)

    def __enter__(self) -> Writer:
        self._thread.start()
        wait_for(lambda: len(self.acknowledged) > 200 or self.errors, 30)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(90)
        assert not self._thread.is_alive()

    def more(self, count: int = 500) -> None:
        """Until so many more are acknowledged."""
        goal = len(self.acknowledged) + count
        wait_for(lambda: len(self.acknowledged) >= goal or self.errors, 60, f"{self.kind} goes on")

    def _write(self) -> None:
        if self.kind == "librdkafka":
            self._write_librdkafka()
        else:
            self._write_kafka_python()

    def _values(self) -> Iterator[tuple[int, bytes]]:
        number = 0
        while not self._stop.is_set():
            yield number % PARTITIONS, b"%s-%d" % (self.kind.encode(), number)
            number += 1
            time.sleep(0.001)

    def _write_librdkafka(self) -> None:
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": self._bootstrap, "enable.idempotence": True, "linger.ms": 2, "log_level": 0}
        )
        for partition, value in self._values():
            producer.produce(self.topic, value, partition=partition, on_delivery=self._delivered)
            producer.poll(0)
        assert producer.flush(60) == 0

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            self.errors.append(str(error))
        else:
            self.acknowledged.add(message.value())

    def _write_kafka_python(self) -> None:
        producer = kafka.KafkaProducer(bootstrap_servers=self._bootstrap.split(","), linger_ms=2)
        for partition, value in self._values():
            future = producer.send(self.topic, value, partition=partition)
            future.add_callback(lambda _, value=value: self.acknowledged.add(value))
            future.add_errback(lambda error: self.errors.append(repr(error)))
        producer.close(timeout=60)


def check(read: list[Placed], writer: Writer) -> None:
    """Acknowledged and lost: 0. Duplicates: 0. In order in each partition."""
    assert writer.errors == []
    values = [each.value for each in read if each.value is not None and each.value.startswith(writer.kind.encode())]
    assert writer.acknowledged - set(values) == set()
    assert len(values) == len(set(values))
    for partition in range(PARTITIONS):
        mine = [each.value for each in read if each.partition == partition and each.value in writer.acknowledged]
        numbers = [int(value.rpartition(b"-")[2]) for value in mine if value is not None]
        assert numbers == sorted(numbers), f"partition {partition}"


def test_clients_write_on_as_proxies_die_stop_and_come(site: Site) -> None:
    topic = "through-the-fleet"
    with site.proxies(3) as proxies, ExitStack() as stack:
        agree(proxies, ports(proxies))
        wait_for(lambda: len(leaders(proxies[0], topic)) == PARTITIONS)
        # They are told of the first one alone, which is the first to go; of the others they learn from it.
        bootstrap = proxies[0].kafka
        writers = [stack.enter_context(Writer(kind, bootstrap, topic)) for kind in ("librdkafka", "kafka-python")]
        end(proxies[0], signal.SIGKILL)
        for writer in writers:
            writer.more()
        stack.enter_context(site.proxy(port_of(proxies[0])))
        for writer in writers:
            writer.more()
        end(proxies[1], signal.SIGTERM)
        for writer in writers:
            writer.more()
        stack.enter_context(site.proxy())
        for writer in writers:
            writer.more()
            writer.__exit__()
        read = read_topic(proxies[2].kafka, topic, PARTITIONS, sum(len(each.acknowledged) for each in writers))
        for writer in writers:
            check(read, writer)
