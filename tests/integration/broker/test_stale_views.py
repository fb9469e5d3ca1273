"""Brokers and proxies cut off from etcd give no outdated answers (the KRaft split-brain text, steps 5, 6).

A is cut off and its lease has ended; B has created a topic since, and leads A's partitions. All clients still reach A.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiokafka  # type: ignore[import-untyped]
import confluent_kafka
import kafka
import pytest

from kproxy.etcd import EtcdError
from kproxy_codec import error_codes
from kproxy_codec.api_keys import (
    API_VERSIONS,
    CREATE_TOPICS,
    DESCRIBE_CLUSTER,
    DESCRIBE_CONFIGS,
    DESCRIBE_TOPIC_PARTITIONS,
    METADATA,
)
from tests.support.brokers.faulty_site import FaultyBroker, FaultySite, faulty_site
from tests.support.brokers.kafka_jars import kafka_classpath
from tests.support.brokers.reference_broker import Closed, RawClient
from tests.support.clients.java_client import run_java_client
from tests.support.clients.kafka_io import Record
from tests.support.etcd.embedded import Relay
from tests.support.etcd.etcd_cluster import EtcdCluster
from tests.support.processes.dev import serving
from tests.support.processes.served import beside, port_of
from tests.support.waiting import eventually

A, B = 1, 2
TTL_S = 2
TIMEOUT_S = 60.0
FRESH_CLIENTS = 20

# Requests whose answers name brokers or topics, by API.
QUESTIONS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "Metadata": (METADATA, 8, {"topics": [{"name": "made-since"}], "allow_auto_topic_creation": False}),
    "Metadata of all topics": (METADATA, 1, {"topics": None}),
    "Metadata that may create": (METADATA, 4, {"topics": [{"name": "never"}], "allow_auto_topic_creation": True}),
    "DescribeCluster": (DESCRIBE_CLUSTER, 1, {}),
    "DescribeTopicPartitions": (DESCRIBE_TOPIC_PARTITIONS, 0, {"topics": [{"name": "made-since"}]}),
    "DescribeConfigs": (DESCRIBE_CONFIGS, 4, {"resources": [{"resource_type": 2, "resource_name": "made-since"}]}),
}


@pytest.fixture
async def site(etcd_cluster: EtcdCluster, etcd_prefix: str, tmp_path: Path) -> AsyncIterator[FaultySite]:
    """A and B, in sync, with A as the leader of `moved`."""
    async with faulty_site(etcd_cluster, etcd_prefix, tmp_path) as site:
        await site.add((A, B), lease_ttl_s=TTL_S)
        await site.put_topic("moved", [[A, B]], **{"min.insync.replicas": "1"})
        await site.led_by("moved", 0, [A])
        await site.in_sync("moved", 0, (A, B))
        yield site


async def cut_off(site: FaultySite, how: str = "silent") -> None:
    """Cut A off from etcd until its lease ends; B continues."""
    await site.brokers[A].cut_off_from_etcd(how)
    await site.led_by("moved", 0, [B])


async def make_topic_at_b(site: FaultySite) -> None:
    asked = {"name": "made-since", "num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
    broker = site.brokers[B]

    async def is_made() -> bool:
        made = await asyncio.to_thread(request, broker, CREATE_TOPICS, 5, topics=[asked], timeout_ms=30_000)
        return made.topics[0].error_code in (error_codes.NONE, error_codes.TOPIC_ALREADY_EXISTS)

    # Without a lease it ends the connection; a stall of the machine may end the lease.
    await eventually(is_made, "the topic is made", ignored=(Closed,))


def request(broker: FaultyBroker, api_key: int, version: int, **fields: Any) -> Any:
    with broker.client() as client:
        return client.request(api_key, version, **fields)


async def sends_elsewhere(broker: FaultyBroker, version: int) -> bool:
    """Whether Metadata names only the other brokers, and no leader; otherwise it is unchanged."""
    asked = {"topics": [{"name": "moved"}, {"name": "made-since"}], "allow_auto_topic_creation": False}
    described = await asyncio.to_thread(request, broker, METADATA, version, **asked)
    codes = [(topic.name, topic.error_code, len(topic.partitions)) for topic in described.topics]
    brokers = {each.node_id for each in described.brokers}
    if codes == [(name, error_codes.LEADER_NOT_AVAILABLE, 0) for name in ("moved", "made-since")]:
        assert (brokers, described.controller_id) == ({B}, -1)
        return True
    assert brokers == {A, B}
    return False


def is_refused(broker: FaultyBroker, question: str) -> bool:
    key, version, fields = QUESTIONS[question]
    try:
        request(broker, key, version, **fields)
    except Closed:
        return True
    return False


@pytest.mark.parametrize("how", ["silent", pytest.param("refused", marks=pytest.mark.long)])
async def test_broker_without_lease_describes_nothing_until_renewed(site: FaultySite, how: str) -> None:
    broker = site.brokers[A]

    async def is_asked() -> bool:
        for question in QUESTIONS:
            if await asyncio.to_thread(is_refused, broker, question):
                return False
        return not await sends_elsewhere(broker, 13)

    await eventually(is_asked, "A answers while it has a lease")
    await cut_off(site, how)
    await make_topic_at_b(site)
    for version in (9, 10, 12, 13):
        assert await sends_elsewhere(broker, version)
    for question in QUESTIONS:
        assert await asyncio.to_thread(is_refused, broker, question), question
    # ApiVersions is still answered: otherwise librdkafka would assume a broker older than ApiVersions.
    assert (await asyncio.to_thread(request, broker, API_VERSIONS, 0)).error_code == error_codes.NONE
    await site.heal()

    async def is_back() -> bool:
        return not await asyncio.to_thread(is_refused, broker, "Metadata") and not await sends_elsewhere(broker, 12)

    await eventually(
        is_back, timeout_s=TIMEOUT_S, ignored=(EtcdError,), what="A has a lease again, and describes the cluster"
    )


# Real clients


class Client:
    """Writes with one client that only knows A at first: a record at its start, and one when the leader has moved."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.began, self.moved = threading.Event(), threading.Event()

    def run(self) -> None:
        try:
            self.write()
        finally:
            self.began.set()

    def write(self) -> None:
        raise NotImplementedError

    def pause(self) -> None:
        self.began.set()
        assert self.moved.wait(TIMEOUT_S)


class KafkaPython(Client):
    def write(self) -> None:
        producer = kafka.KafkaProducer(bootstrap_servers=self.bootstrap, acks="all")
        producer.send("moved", b"before").get(TIMEOUT_S)
        self.pause()
        producer.send("moved", b"after").get(TIMEOUT_S)
        producer.close()


class Librdkafka(Client):
    def write(self) -> None:
        producer = confluent_kafka.Producer({"bootstrap.servers": self.bootstrap})
        producer.produce("moved", b"before")
        assert producer.flush(TIMEOUT_S) == 0
        self.pause()
        producer.produce("moved", b"after")
        assert producer.flush(TIMEOUT_S) == 0


class Aiokafka(Client):
    def write(self) -> None:
        asyncio.run(self._write())

    async def _write(self) -> None:
        async with aiokafka.AIOKafkaProducer(bootstrap_servers=self.bootstrap, acks="all") as producer:
            await producer.send_and_wait("moved", b"before")
            await asyncio.to_thread(self.pause)
            async with asyncio.timeout(TIMEOUT_S):
                await producer.send_and_wait("moved", b"after")


class Java(Client):
    def write(self) -> None:
        settings = {"bootstrap.servers": self.bootstrap, "acks": "all", "delivery.timeout.ms": round(TIMEOUT_S * 1000)}
        run = run_java_client(kafka_classpath(), "moved", self._records(), {"request.timeout.ms": 5000, **settings})
        assert run.errors == {}
        assert len(run.acknowledged) == 4

    def _records(self) -> Iterator[Record]:
        # Some records do not fit into the pipe's buffer.
        for _ in range(3):
            yield Record(None, bytes(100_000), partition=0)
        self.pause()
        yield Record(None, b"after", partition=0)


@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(each, marks=pytest.mark.long) for each in (KafkaPython, Aiokafka)),
        Librdkafka,
        pytest.param(Java, marks=[pytest.mark.java, pytest.mark.long]),
    ],
)
async def test_clients_leave_broker_that_loses_its_lease(site: FaultySite, kind: Callable[[str], Client]) -> None:
    """Although A accepts their connections, and is the broker that they know best."""
    client = kind(site.brokers[A].address)
    async with asyncio.timeout(3 * TIMEOUT_S):
        writing = asyncio.create_task(asyncio.to_thread(client.run))
        await asyncio.to_thread(client.began.wait)

        async def is_written() -> bool:
            return writing.done() or len(site.log_bytes(A, "moved")) > 0

        await eventually(is_written, timeout_s=TIMEOUT_S, ignored=(EtcdError,), what="A has something of the client's")
        await cut_off(site)
        client.moved.set()
        await writing


# Through a proxy


async def test_cut_off_proxy_skips_brokers_without_leases(site: FaultySite, tmp_path: Path) -> None:
    """Every new client gets the same answer about a topic that the proxy does not know."""
    async with AsyncExitStack() as stack:
        way = await stack.enter_async_context(Relay(site.etcd.members[0].endpoint))
        arguments = ["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--prefix", site.prefix]
        process = serving([*arguments, "--etcd", way.endpoint], tmp_path / "proxy")
        proxy = await stack.enter_async_context(beside(process))
        way.blackhole()
        await cut_off(site)
        await make_topic_at_b(site)
        told = [await asyncio.to_thread(topic_error, port_of(proxy)) for _ in range(FRESH_CLIENTS)]
        assert told == [error_codes.NONE] * FRESH_CLIENTS
        # No broker knows the topics now: they are reported as unavailable, which clients wait out, and none as missing.
        await site.brokers[B].cut_off_from_etcd("silent")

        async def nobody_knows() -> bool:
            return await asyncio.to_thread(topic_error, port_of(proxy)) == error_codes.LEADER_NOT_AVAILABLE

        await eventually(nobody_knows, timeout_s=TIMEOUT_S, ignored=(EtcdError,), what="B's lease has ended")


def topic_error(port: int) -> int:
    with RawClient("127.0.0.1", port) as client:
        return int(client.metadata("made-since", create=False).topics[0].error_code)
