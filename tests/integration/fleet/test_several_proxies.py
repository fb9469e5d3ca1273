"""Several `kproxy serve` on one etcd: the brokers that they name, and clients' view when one ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka
import msgspec
import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient
from kproxy.fleet.registration import proxies_prefix
from kproxy.observe.table import TablePage
from kproxy_codec import api_keys as keys
from tests.support.brokers.kafka_jars import KAFKA_VERSION
from tests.support.brokers.real_kafka import CLUSTER_ID, RealKafka
from tests.support.brokers.reference_broker import RawClient, start_brokers
from tests.support.clients.idempotent_writers import IdempotentWriter
from tests.support.clients.kafka_io import produce, read_topic
from tests.support.clients.raw_client import RawClient as AsyncRawClient
from tests.support.clients.raw_client import produce_frame
from tests.support.clients.steady_writers import MODES, Writer, find, writing
from tests.support.etcd.embedded import Relay, own_etcd
from tests.support.processes.dev import KproxyProcess, run_kproxy, serving
from tests.support.processes.served import ServedBroker, beside, page, port_of, samples, static_proxy
from tests.support.waiting import PATIENCE_S, eventually, wait_for

PARTITIONS = 12
# Clients follow the proxies' names while their requests are in flight.
SETTINGS: dict[str, dict[str, int]] = {
    "kafka-python": {"linger_ms": 2, "metadata_max_age_ms": 100},
    f"java {KAFKA_VERSION}": {"linger.ms": 2, "metadata.max.age.ms": 100},
}
TTL_S = 5
FIRST = 1_000_000


class Site:
    """Brokers on one etcd prefix, with proxies in front of them."""

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
    """The brokers that a proxy names: ports by id."""
    brokers = asked(proxy, keys.METADATA, 9, topics=[]).brokers
    assert {each.host for each in brokers} == {"127.0.0.1"}
    return {each.node_id: each.port for each in brokers}


def ports(proxies: Sequence[KproxyProcess]) -> dict[int, int]:
    """The expected names of proxies that were started in this order."""
    return {FIRST + number: port_of(proxy) for number, proxy in enumerate(proxies)}


def leaders(proxy: KproxyProcess, topic: str) -> dict[int, int]:
    found = asked(proxy, keys.METADATA, 9, topics=[{"name": topic}], allow_auto_topic_creation=True).topics[0]
    return {each.partition_index: each.leader_id for each in found.partitions}


def agree(proxies: Sequence[KproxyProcess], expected: dict[int, int]) -> None:
    for proxy in proxies:
        wait_for(lambda proxy=proxy: named(proxy) == expected, what=f"{proxy.kafka} names {named(proxy)}")


def end(proxy: KproxyProcess, number: int) -> None:
    proxy.signal(number)
    proxy.wait()


def test_each_proxy_names_all_and_partitions_spread(site: Site) -> None:
    with site.proxies(3) as proxies, site.proxy(0, "--alone") as sidecar:
        expected = ports(proxies)
        agree(proxies, expected)
        assert named(sidecar) == {FIRST: port_of(sidecar)}, "it tells of nobody, and nobody of it"
        wait_for(lambda: len(leaders(proxies[0], "spread")) == PARTITIONS)
        answers = [leaders(proxy, "spread") for proxy in proxies]
        assert answers[0] == answers[1] == answers[2]
        assert set(answers[0].values()) == set(expected)
        clusters = [asked(proxy, keys.DESCRIBE_CLUSTER, 0) for proxy in proxies]
        assert {each.controller_id for each in clusters} == {FIRST}
        assert len({each.cluster_id for each in clusters}) == 1
        assert all({each.broker_id: each.port for each in answer.brokers} == expected for answer in clusters)
        # On the admin page, in the metrics and in `kproxy table`.
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


async def entries(client: EtcdClient, prefix: str) -> list[str]:
    return [kv.key for kv in (await client.get_prefix(proxies_prefix(prefix))).kvs]


async def test_entry_is_deleted_before_requests_in_flight_end(
    etcd: EmbeddedEtcd, etcd_client: EtcdClient, etcd_prefix: str, tmp_path: Path
) -> None:
    upstream = await ServedBroker(1).start()
    more = ("--etcd", etcd.endpoint, "--prefix", etcd_prefix, "--lease-ttl", "600")
    with static_proxy(tmp_path, {1: upstream.port}, limits={"drain_s": 60}, more=more) as process:
        assert await entries(etcd_client, etcd_prefix) == [f"{etcd_prefix}/kproxy/proxies/{FIRST}"]
        client = await AsyncRawClient().connect(port_of(process))
        client.send(produce_frame())
        waiting = await upstream.next()
        process.signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            while await entries(etcd_client, etcd_prefix):
                await asyncio.sleep(0.02)
        waiting.answer()
        assert (await client.answer()).frame, "it was still answering"
        client.close()
    await upstream.stop()


async def test_no_entry_before_the_table_is_loaded(
    etcd: EmbeddedEtcd, etcd_client: EtcdClient, etcd_prefix: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        admin = f"127.0.0.1:{server.getsockname()[1]}"
    arguments = ["serve", "--listen", "127.0.0.1:0", "--ownership", "kafka", "--bootstrap", "127.0.0.1:1"]
    arguments += ["--admin", admin, "--etcd", etcd.endpoint, "--prefix", etcd_prefix]
    process = KproxyProcess(arguments, tmp_path / "stderr")
    try:
        await asyncio.to_thread(wait_for, lambda: is_up(admin))
        # A registration takes some milliseconds.
        await asyncio.sleep(1)
        assert await entries(etcd_client, etcd_prefix) == []
        status, text = await asyncio.to_thread(page, admin, "/readyz")
        assert (status, text.partition(":")[0]) == (503, "starting")
    finally:
        await asyncio.to_thread(process.stop)


def is_up(admin: str) -> bool:
    try:
        return page(admin, "/livez")[0] == 200
    except ConnectionError:
        return False


@pytest.mark.long
async def test_static_table_proxies_survive_an_etcd_outage(tmp_path: Path) -> None:
    table = tmp_path / "owners.toml"
    table.write_text('[brokers]\n1 = "127.0.0.1:1"\n')
    static = ("--ownership", "static", "--table", str(table))
    async with own_etcd(tmp_path / "etcd") as (server, client), Relay(server.endpoint) as way:
        site = Site(way.endpoint, "/static", tmp_path)
        async with beside(site.proxy(0, *static)) as one, beside(site.proxy(0, *static)) as other:
            assert other.etcd == site.etcd
            everyone = ports([one, other])
            await asyncio.to_thread(agree, [one, other], everyone)
            await way.shut()
            while await entries(client, "/static"):
                await asyncio.sleep(0.05)
            # Their leases have ended, but each still names the other, which may be alive.
            assert [await asyncio.to_thread(named, proxy) for proxy in (one, other)] == [everyone] * 2
            async with beside(site.proxy(0, *static)) as late:
                assert await asyncio.to_thread(named, late) == {FIRST: port_of(late)}, "it serves alone"
                await way.open()
                await eventually(lambda: all_named(late, [one, other, late]))
                await asyncio.to_thread(lambda: agree([one, other], named(late)))


async def all_named(proxy: KproxyProcess, proxies: Sequence[KproxyProcess]) -> bool:
    return sorted((await asyncio.to_thread(named, proxy)).values()) == sorted(ports(proxies).values())


def served(proxy: KproxyProcess) -> float:
    """The number of produce requests that a proxy has answered."""
    return samples(page(proxy.admin, "/metrics")[1])["kproxy_produce_duration_seconds_count", ()]


@pytest.mark.java
@pytest.mark.timeout(900)
async def test_clients_keep_writing_while_proxies_change(site: Site) -> None:
    """librdkafka pipelines to all partitions of one topic; the others write to half of another topic's each."""
    piped, steady = "piped-through-the-fleet", "through-the-fleet"
    with site.proxies(3) as proxies, ExitStack() as stack:
        agree(proxies, ports(proxies))
        for topic in (piped, steady):
            wait_for(lambda topic=topic: len(leaders(proxies[0], topic)) == PARTITIONS)
        # They only get the first one's address, which is the first to go, and learn the others from it.
        first, kinds = proxies[0].kafka, [*SETTINGS] * (PARTITIONS // len(SETTINGS))
        writers = [
            Writer(kind, first, steady, partition, MODES["idempotent"], SETTINGS[kind])
            for partition, kind in enumerate(kinds)
        ]
        async with IdempotentWriter(first, piped, PARTITIONS) as piping:
            with writing(writers) as clients:

                def go_on() -> None:
                    piping.wait_for_more(300)
                    now = time.monotonic()
                    assert clients.all_acknowledged(now, 20, now + PATIENCE_S), [each.problems for each in writers]

                go_on()
                assert [served(proxy) > 0 for proxy in proxies] == [True] * 3, "they spread"
                end(proxies[0], signal.SIGKILL)
                go_on()
                back = stack.enter_context(site.proxy(port_of(proxies[0])))
                new = stack.enter_context(site.proxy())
                go_on()
                end(proxies[1], signal.SIGTERM)
                go_on()
                wait_for(lambda: served(back) and served(new), what="they follow what they are told of")
        read = read_topic(new.kafka, steady, PARTITIONS, 0)
        for writer in writers:
            assert (writer.problems, find(writer, read)) == ([], (0, 0, True)), writer.name
        read = read_topic(new.kafka, piped, PARTITIONS, 0)
        assert piping.failed == []
        for partition in range(PARTITIONS):
            numbers = [int(each.value or b"-1") for each in read if each.partition == partition]
            assert numbers == list(range(len(piping.acked[partition]))), f"partition {partition}"


@pytest.mark.java
@pytest.mark.timeout(900)
def test_group_continues_after_its_coordinating_proxy_dies(site: Site, real_kafka: RealKafka, tmp_path: Path) -> None:
    topic = real_kafka.create_topic(f"fleet-{uuid.uuid4().hex[:10]}", 3)
    kafka_source = ("--ownership", "kafka", "--bootstrap", real_kafka.bootstrap, "--prefix", f"{site.prefix}/kafka")
    with site.proxy(0, *kafka_source) as one, site.proxy(0, *kafka_source) as other:
        agree([one, other], ports([one, other]))
        # Clients see one cluster: the brokers' own id, the same leaders and coordinators.
        metadata = [asked(proxy, keys.METADATA, 9, topics=[{"name": topic}]) for proxy in (one, other)]
        assert [each.cluster_id for each in metadata] == [CLUSTER_ID] * 2
        assert leaders(one, topic) == leaders(other, topic)
        group = f"group-{topic}"
        named_first = wait_for(lambda: coordinator_port(one, group), 60, "the cluster has a coordinator")
        assert coordinator_port(other, group) == named_first
        coordinator, survivor = (one, other) if named_first == port_of(one) else (other, one)
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": coordinator.kafka,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "log_level": 0,
            }
        )
        try:
            consumer.subscribe([topic])
            assert produce(one.kafka, topic, [b"a-%d" % number for number in range(10)]) == consume(consumer, 10)
            consumer.commit(asynchronous=False)
            end(coordinator, signal.SIGKILL)
            assert produce(survivor.kafka, topic, [b"b-%d" % number for number in range(10)]) == consume(consumer, 10)
            consumer.commit(asynchronous=False)
        finally:
            consumer.close()


def coordinator_port(proxy: KproxyProcess, group: str) -> int:
    """The port to which a proxy sends members of a group; 0 if there is no coordinator yet."""
    (found,) = asked(proxy, keys.FIND_COORDINATOR, 4, key_type=0, coordinator_keys=[group]).coordinators
    if found.error_code:
        return 0
    assert named(proxy)[found.node_id] == found.port
    return int(found.port)


def consume(consumer: confluent_kafka.Consumer, count: int) -> list[bytes]:
    values: list[bytes] = []
    deadline = time.monotonic() + 60
    while len(values) < count:
        assert time.monotonic() < deadline, f"{len(values)} of {count} records"
        values += [each.value() or b"" for each in consumer.consume(count - len(values), 0.2) if each.error() is None]
    return values
