"""Single writer before a real Apache Kafka, which has no fences: a claim waits for the writes of earlier writers.

The waits of a surviving proxy are in test_own_last_writes, with scripted brokers.

owner     - a proxy - Way - Kafka      written bytes may stay in flight for any time
successor - another proxy - Kafka
"""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from kproxy.claims.keys import OwnKeys
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient
from kproxy_codec.error_codes import NONE, POLICY_VIOLATION, REQUEST_TIMED_OUT
from tests.support.brokers.held_bytes import HOST, Way
from tests.support.brokers.real_kafka import RealKafka
from tests.support.claims.own_client import OwnClient
from tests.support.clients.kafka_io import read_partition
from tests.support.etcd.embedded import connected
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import port_of
from tests.support.waiting import PATIENCE_S, eventually

# The very first run downloads Kafka's jars.
pytestmark = [pytest.mark.java, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

GROUP = "writers"
TOPICS = [f"unfenced-{uuid.uuid4().hex[:10]}-{number}" for number in range(6)]
# The lease of the proxy that the test kills, and of the other proxies.
TTL_S = 4
LASTING_TTL_S = 60
# An unsuccessful claim is answered after this time, long before time alone settles a write.
OWN_TIMEOUT_S = 1.0
UNSETTLED_S = 10.0


class Site:
    """Proxies in front of the cluster: those that reach it by `ways`, and others."""

    def __init__(self, kafka: RealKafka, etcd: str, directory: Path, stack: AsyncExitStack) -> None:
        self.kafka = kafka
        self._etcd = etcd
        self._directory = directory
        self._stack = stack
        self._started = 0
        self._unused = iter(TOPICS)
        self.ways: dict[int, Way] = {}

    async def start(self) -> None:
        for topic in TOPICS:
            # The records of tests have old timestamps.
            await asyncio.to_thread(self.kafka.create_topic, topic, 1, retention_ms="-1")
        for broker in self.kafka.brokers:
            self.ways[broker.node_id] = await self._stack.enter_async_context(Way(broker.port))
        self.successors = await self.proxy({broker.node_id: broker.port for broker in self.kafka.brokers})

    async def proxy(
        self, ports: dict[int, int] | None, prefix: str = f"/{TOPICS[0]}", ttl_s: int = LASTING_TTL_S
    ) -> KproxyProcess:
        """Start a proxy for brokers at these ports (None: those that the cluster names) and for its prefix."""
        self._started += 1
        lines = [f"[limits]\nown_timeout_s = {OWN_TIMEOUT_S}\nown_unsettled_s = {UNSETTLED_S}"]
        source: list[str] = ["--ownership", "kafka", "--bootstrap", self.kafka.bootstrap]
        if ports is not None:
            source = ["--ownership", "static"]
            lines += ["[brokers]", *(f'{node_id} = "{HOST}:{port}"' for node_id, port in ports.items())]
            for topic in TOPICS:
                leaders = await asyncio.to_thread(self.kafka.leaders, topic)
                lines += ["[[topics]]", f'name = "{topic}"', f"owners = [{leaders[0]}]"]
        file = self._directory / f"{self._started}.toml"
        file.write_text("\n".join(lines) + "\n")
        arguments = ["serve", "--config", str(file), "--listen", f"{HOST}:0", *source, "--etcd", self._etcd]
        arguments += ["--prefix", prefix, "--lease-ttl", str(ttl_s)]
        arguments += [f"--writer-group={topic}={GROUP}" for topic in TOPICS]
        process = KproxyProcess(arguments, file.with_suffix(".stderr"))
        self._stack.push_async_callback(asyncio.to_thread, process.stop)
        await asyncio.to_thread(process.wait_ready)
        return process

    def topic(self) -> str:
        """A new topic with one partition."""
        return next(self._unused)

    async def client(self, proxy: KproxyProcess) -> OwnClient:
        client = await OwnClient.connect(HOST, port_of(proxy))
        self._stack.push_async_callback(client.close)
        return client

    async def writer(self, proxy: KproxyProcess, topic: str) -> OwnClient:
        """A client that owns the topic's partition, and has written."""
        writer = await self.client(proxy)
        await claim_until_granted(writer, topic)
        assert (await writer.produce(topic, 0, b"first")).error_code == NONE
        return writer

    def hold(self) -> None:
        """Keep the owners' writes in flight from now on."""
        assert sum(way.hold(lambda port: True) for way in self.ways.values()) > 0

    async def until_under_way(self) -> None:
        """Wait until something has been written since."""
        await eventually(lambda: any(way.held() for way in self.ways.values()))

    def release(self) -> None:
        for way in self.ways.values():
            way.release()

    async def log(self, topic: str, count: int) -> list[bytes]:
        return await asyncio.to_thread(read_partition, self.kafka.bootstrap, topic, 0, count)


async def claim(client: OwnClient, topic: str) -> int:
    (owned,) = (await client.own(GROUP, [(f"{topic}/0", 1)])).resources
    return owned.error_code


async def claim_until_granted(client: OwnClient, topic: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (code := await claim(client, topic)) != NONE:
            assert code == REQUEST_TIMED_OUT


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(
    real_kafka: RealKafka, etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        site = Site(real_kafka, etcd.endpoint, tmp_path_factory.mktemp("unfenced"), stack)
        await site.start()
        yield site


async def test_writes_of_dead_proxy_precede_next_owners(site: Site) -> None:
    topic = site.topic()
    proxy = await site.proxy({node_id: way.port for node_id, way in site.ways.items()}, ttl_s=TTL_S)
    owner, successor = await site.writer(proxy, topic), await site.client(site.successors)
    site.hold()
    owner.send_produce(topic, 0, b"last")
    await site.until_under_way()
    os.kill(proxy.pid, signal.SIGKILL)
    began = asyncio.get_running_loop().time()
    # The dead proxy's lease must end, and then its possible writes.
    while asyncio.get_running_loop().time() - began < TTL_S + OWN_TIMEOUT_S:
        code = await claim(successor, topic)
        assert code == REQUEST_TIMED_OUT or asyncio.get_running_loop().time() - began >= 0.95 * UNSETTLED_S
    site.release()
    await claim_until_granted(successor, topic)
    assert asyncio.get_running_loop().time() - began >= 0.95 * UNSETTLED_S
    assert (await successor.produce(topic, 0, b"next")).error_code == NONE
    assert await site.log(topic, 3) == [b"first", b"last", b"next"]


@pytest_asyncio.fixture(loop_scope="module")
async def etcd_here(etcd: EmbeddedEtcd) -> AsyncIterator[EtcdClient]:
    async with connected(EtcdClient([etcd.endpoint])) as client:
        yield client


@pytest.mark.long
async def test_writes_of_all_dead_proxies_are_awaited(site: Site, etcd_here: EtcdClient) -> None:
    topic, prefix = site.topic(), f"/alone-{uuid.uuid4().hex}"
    proxy = await site.proxy(None, prefix, TTL_S)
    await site.writer(proxy, topic)
    os.kill(proxy.pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        # No remaining process saw the proxy die.
        while (await etcd_here.get_prefix(OwnKeys(prefix).members)).kvs:
            await asyncio.sleep(0.1)
    proxy = await site.proxy(None, prefix)
    assert await claim(await site.client(proxy), topic) == REQUEST_TIMED_OUT
    await site.writer(proxy, topic)
    assert await asyncio.to_thread(proxy.stop) == 0
    # A cleanly stopped one leaves nothing behind.
    proxy = await site.proxy(None, prefix)
    assert await claim(await site.client(proxy), topic) == NONE


async def test_owners_alternate_on_partitions_named_by_cluster(site: Site) -> None:
    """Nothing is in flight when a claim is made, so no claim waits."""
    topic = site.topic()
    proxy = await site.proxy(None)
    written = [b"first"]
    owner = await site.writer(proxy, topic)
    for turn in range(6):
        successor = await site.client(proxy if turn % 2 else site.successors)
        assert (await successor.produce(topic, 0, b"too early")).error_code == POLICY_VIOLATION
        written += [b"%d without acks" % turn, b"%d with all acks" % turn]
        await owner.produce(topic, 0, written[-2], 0)
        assert (await owner.produce(topic, 0, written[-1])).error_code == NONE
        await claim_until_granted(successor, topic)
        assert await owner.wait_closed()
        owner = successor
    assert (await owner.produce(topic, 0, b"end")).error_code == NONE
    assert await site.log(topic, len(written) + 1) == [*written, b"end"]
