"""Rules for every ownership source, each with the real system: a static table, a Kafka cluster, leases in etcd."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path

import pytest

from kproxy.config import ProxyConfig, load_proxy_config
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient, TxnOp, delete_op, put_op
from kproxy.ownership.static_table import StaticTable
from kproxy.proxy.sources import OpenSource, open_source
from kproxy.routing.topology import NO_OWNER, Address, Topology
from kproxy_codec.api_keys import FETCH, OFFSET_COMMIT, OFFSET_FETCH, PRODUCE
from tests.support.brokers.kafscale import snapshot_value
from tests.support.brokers.real_kafka import RealKafka
from tests.support.brokers.reference_broker import RawClient
from tests.support.etcd.embedded import connected
from tests.support.waiting import PATIENCE_S, eventually

PARTITIONS = 7
# The highest versions without topic ids.
WITHOUT_IDS = {PRODUCE: 12, FETCH: 12, OFFSET_COMMIT: 9, OFFSET_FETCH: 9}


class World(ABC):
    """One kind of source, with its upstream."""

    # Whether a refused request makes the source learn the change.
    follows = True

    def __init__(self) -> None:
        self.topic = f"contract-{uuid.uuid4().hex[:10]}"

    @property
    @abstractmethod
    def config(self) -> ProxyConfig:
        """The options of `kproxy serve`."""

    @abstractmethod
    async def prepare(self) -> None:
        """Give every partition of `topic` an owner."""

    @abstractmethod
    async def truth(self) -> tuple[dict[int, int], dict[int, Address]]:
        """The owners of `topic` by partition, and the brokers' addresses."""

    async def topic_id(self) -> bytes | None:
        """The id of `topic`; None if the source knows none."""
        return None

    @abstractmethod
    async def move(self) -> None:
        """Give every partition another owner than before."""

    @abstractmethod
    async def delete(self) -> None:
        """Delete `topic`."""

    async def make_again(self) -> None:
        """Create a topic of the same name: another one, with another id if there are ids."""
        await self.prepare()


class Fixed(World):
    follows = False

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._file = directory / "owners.toml"
        self._shift = 0

    @property
    def config(self) -> ProxyConfig:
        return load_proxy_config(flags={"ownership": "static", "table": str(self._file)}, environ={})

    async def prepare(self) -> None:
        owners = list(self._owners().values())
        self._file.write_text(
            f'[brokers]\n1 = "a:1"\n2 = "[::1]:2"\n[[topics]]\nname = "{self.topic}"\nowners = {owners}\n'
        )

    async def truth(self) -> tuple[dict[int, int], dict[int, Address]]:
        return self._owners(), {1: Address("a", 1), 2: Address("::1", 2)}

    def _owners(self) -> dict[int, int]:
        return {index: 1 + (index + self._shift) % 2 for index in range(PARTITIONS)}

    async def move(self) -> None:
        self._shift += 1
        await self.prepare()

    async def delete(self) -> None:
        self._file.write_text('[brokers]\n1 = "a:1"\n2 = "[::1]:2"\n')


class Cluster(World):
    def __init__(self, kafka: RealKafka) -> None:
        super().__init__()
        self._kafka = kafka

    @property
    def config(self) -> ProxyConfig:
        return load_proxy_config(flags={"ownership": "kafka", "bootstrap": self._kafka.bootstrap}, environ={})

    async def prepare(self) -> None:
        await asyncio.to_thread(self._kafka.create_topic, self.topic, PARTITIONS)

    async def truth(self) -> tuple[dict[int, int], dict[int, Address]]:
        leaders = await asyncio.to_thread(self._kafka.leaders, self.topic)
        return leaders, {broker.node_id: Address("127.0.0.1", broker.port) for broker in self._kafka.brokers}

    async def topic_id(self) -> bytes | None:
        host, _, port = self._kafka.bootstrap.partition(",")[0].rpartition(":")

        def ask() -> bytes:
            with RawClient(host, int(port)) as client:
                found: uuid.UUID = client.topic_id(self.topic)
                return found.bytes

        return await asyncio.to_thread(ask)

    async def move(self) -> None:
        await asyncio.to_thread(self._kafka.move_leaders, self.topic)

    async def delete(self) -> None:
        await asyncio.to_thread(self._kafka.delete_topic, self.topic)


class Leases(World):
    def __init__(self, etcd: EmbeddedEtcd, prefix: str, *, has_ids: bool = True) -> None:
        super().__init__()
        self._has_ids = has_ids
        self._etcd = etcd
        self._prefix = prefix
        self._shift = 0
        self._topic_id = uuid.uuid4()
        self._topic_key = f"{prefix}/refbroker/topics/{self.topic}"

    @property
    def config(self) -> ProxyConfig:
        flags = {"etcd": self._etcd.endpoint, "prefix": self._prefix}
        return load_proxy_config(flags=flags, environ={})

    async def prepare(self) -> None:
        brokers = [(f"{self._prefix}/brokers/{number}", address) for number, address in self._brokers().items()]
        await self._put([(key, json.dumps(value).encode()) for key, value in brokers])
        topic = json.dumps({"topic_id": str(self._topic_id), "replicas": [[1]] * PARTITIONS}).encode()
        if self._has_ids:
            await self._put([(self._topic_key, topic)])
        await self._put_owners()

    async def topic_id(self) -> bytes | None:
        return self._topic_id.bytes

    async def truth(self) -> tuple[dict[int, int], dict[int, Address]]:
        return self._owners(), {number: Address("127.0.0.1", number) for number in self._brokers()}

    async def move(self) -> None:
        self._shift += 1
        await self._put_owners()

    async def delete(self) -> None:
        keys = [f"{self._prefix}/partition-leases/{self.topic}/{index}" for index in range(PARTITIONS)]
        await self._txn([delete_op(key) for key in (*keys, self._topic_key)])

    async def make_again(self) -> None:
        self._topic_id = uuid.uuid4()
        await self.prepare()

    def _brokers(self) -> dict[int, dict[str, object]]:
        return {number: {"node_id": number, "host": "127.0.0.1", "port": number} for number in (1, 2, 3)}

    def _owners(self) -> dict[int, int]:
        return {index: 1 + (index + self._shift) % 3 for index in range(PARTITIONS)}

    async def _put_owners(self) -> None:
        keys = {index: f"{self._prefix}/partition-leases/{self.topic}/{index}" for index in range(PARTITIONS)}
        await self._put([(keys[index], b"%d" % owner) for index, owner in self._owners().items()])

    async def _put(self, items: list[tuple[str, bytes]]) -> None:
        await self._txn([put_op(key, value) for key, value in items])

    async def _txn(self, operations: list[TxnOp]) -> None:
        async with connected(EtcdClient([self._etcd.endpoint])) as client:
            await client.txn([], operations)


class KafScale(Leases):
    """The same leases, with KafScale's single key for all brokers and topics."""

    async def prepare(self) -> None:
        await self._put_snapshot({self.topic: self._topic_id.bytes})
        await self._put_owners()

    async def _put_snapshot(self, topics: dict[str, bytes]) -> None:
        value = snapshot_value({number: number for number in self._brokers()}, PARTITIONS, topics)
        await self._put([(f"{self._prefix}/metadata/snapshot", value)])

    async def delete(self) -> None:
        await super().delete()
        await self._put_snapshot({})


@pytest.fixture(
    params=[
        "static",
        pytest.param("kafka", marks=[pytest.mark.java, pytest.mark.timeout(900)]),
        "etcd",
        "kafscale",
    ]
)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    if request.param == "static":
        return Fixed(tmp_path)
    if request.param == "kafka":
        return Cluster(request.getfixturevalue("real_kafka"))
    kind = KafScale if request.param == "kafscale" else Leases
    return kind(request.getfixturevalue("etcd"), request.getfixturevalue("etcd_prefix"))


@asynccontextmanager
async def opened(world: World) -> AsyncIterator[tuple[OpenSource, Topology]]:
    topology = Topology(offers_unowned=world.config.ownership == "etcd")
    async with asyncio.timeout(60), open_source(world.config, topology) as source:
        yield source, topology


def owners(topology: Topology, topic: str) -> dict[int, int]:
    return {row.partition_index: row.owner for row in topology.ownerships() if row.topic == topic.encode()}


async def test_table_is_loaded_when_source_is_open(world: World) -> None:
    await world.prepare()
    async with opened(world) as (_, topology):
        true_owners, true_brokers = await world.truth()
        assert owners(topology, world.topic) == true_owners
        assert len(true_owners) == PARTITIONS
        assert topology.brokers == true_brokers
        # Every owner has an address.
        for index in range(PARTITIONS):
            assert topology.address(topology.owner(world.topic.encode(), index)) is not None
            assert topology.owner_revision(world.topic.encode(), index) > 0


async def test_topic_is_found_by_its_id(world: World) -> None:
    await world.prepare()
    async with opened(world) as (_, topology):
        topic_id = await world.topic_id()
        assert topology.topic_ids.get(world.topic.encode()) == topic_id
        if topic_id is not None:
            true_owners, _ = await world.truth()
            assert {index: topology.owner(topic_id, index) for index in true_owners} == true_owners


async def test_topics_by_id_are_offered_with_topic_ids(world: World) -> None:
    await world.prepare()
    async with opened(world) as (source, _):
        assert source.version_caps == (WITHOUT_IDS if await world.topic_id() is None else {})


async def test_missing_topic_ids_disable_topics_by_id(etcd: EmbeddedEtcd, etcd_prefix: str) -> None:
    world = Leases(etcd, etcd_prefix, has_ids=False)
    await world.prepare()
    async with opened(world) as (source, topology):
        assert topology.topic_ids == {}
        assert source.version_caps == WITHOUT_IDS


async def test_unknown_partition_has_no_owner(world: World) -> None:
    await world.prepare()
    async with opened(world) as (source, topology):
        name = world.topic.encode()
        for topic, index in ((b"never", 0), (name, PARTITIONS), (name, -1), (name, 2**31 - 1), (b"\xff\x00", 0)):
            assert topology.owner(topic, index) == NO_OWNER
            # A client may ask for this partition: the wait ends, and nothing changes.
            await asyncio.wait_for(
                source.source.refresh(topic, index, topology.owner_revision(topic, index)), PATIENCE_S
            )
            assert topology.owner(topic, index) == NO_OWNER
        assert len(owners(topology, world.topic)) == PARTITIONS


async def test_refresh_reflects_state_at_its_begin(world: World) -> None:
    await world.prepare()
    async with opened(world) as (source, topology):
        name = world.topic.encode()
        before = {index: topology.owner_revision(name, index) for index in range(PARTITIONS)}
        true_owners, _ = await world.truth()
        if world.follows:
            await world.move()
            # The source may know already. The Kafka broker that is asked may not know yet.
            old_owners = true_owners
            deadline = time.monotonic() + PATIENCE_S
            while true_owners == old_owners:
                assert time.monotonic() < deadline, "nothing has moved"
                true_owners, _ = await world.truth()

        # A Kafka broker learns of new leaders a moment after the controller chose them; a refused client asks again.
        async def are_told() -> bool:
            refreshes = (source.source.refresh(name, index, before[index]) for index in range(PARTITIONS))
            await asyncio.wait_for(asyncio.gather(*refreshes), PATIENCE_S)
            return owners(topology, world.topic) == true_owners

        await eventually(are_told, lambda: owners(topology, world.topic))
        if world.follows:
            assert all(topology.owner_revision(name, index) > before[index] for index in range(PARTITIONS))
            # A late refusal of an earlier owner changes nothing.
            version = topology.version
            for index in range(PARTITIONS):
                await asyncio.wait_for(source.source.refresh(name, index, before[index]), PATIENCE_S)
            assert topology.version == version


async def test_reload_reads_what_has_changed(world: World) -> None:
    """Reload as by SIGHUP; etcd reports changes itself, so a reload reads nothing new there."""
    await world.prepare()
    async with opened(world) as (source, topology):
        name = world.topic.encode()
        before = {index: topology.owner_revision(name, index) for index in range(PARTITIONS)}
        await world.move()
        await reloaded_to_truth(world, source, topology, before)
        # Nothing has changed since, so no route is doubted.
        version = topology.version
        await reload(world, source)
        assert topology.version == version


async def reloaded_to_truth(world: World, source: OpenSource, topology: Topology, revisions: Mapping[int, int]) -> None:
    """Reload until the owners are true and newer than these. The broker that knows the truth may lag."""
    name = world.topic.encode()

    def are_later() -> bool:
        return all(topology.owner_revision(name, index) > revision for index, revision in revisions.items())

    async with asyncio.timeout(PATIENCE_S):
        while (owners(topology, world.topic), topology.brokers) != await world.truth() or not are_later():
            assert await reload(world, source)
            await asyncio.sleep(0.05)


async def reload(world: World, source: OpenSource) -> str:
    """A table comes with the configuration; every other source is asked."""
    config = world.config
    if isinstance(source.source, StaticTable) and config.owners is not None:
        source.source.load(config.owners)
    return await asyncio.wait_for(source.source.reload(), PATIENCE_S)


async def reloaded(world: World, source: OpenSource, condition: Callable[[], bool]) -> None:
    """Reload until the condition holds: changes may take a moment to reach the source."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        assert await reload(world, source)
        if condition():
            return
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_deleted_topic_has_no_owners_and_recreated_differs(world: World) -> None:
    await world.prepare()
    async with opened(world) as (source, topology):
        name, old_id = world.topic.encode(), await world.topic_id()
        revisions = {index: topology.owner_revision(name, index) for index in range(PARTITIONS)}
        await world.delete()
        await reloaded(world, source, lambda: owners(topology, world.topic) == {} and name not in topology.topic_ids)
        for topic in (name, old_id or name):
            assert topology.owner(topic, 0) == NO_OWNER
        await world.make_again()
        await reloaded(world, source, lambda: len(owners(topology, world.topic)) == PARTITIONS)
        # A refusal from the first topic's time is older than the present state.
        await reloaded_to_truth(world, source, topology, revisions)
        new_id = await world.topic_id()
        assert topology.topic_ids.get(name) == new_id
        if old_id is not None and new_id is not None:
            assert new_id != old_id
            assert topology.owner(old_id, 0) == NO_OWNER
            assert topology.owner(new_id, 0) == topology.owner(name, 0)


async def test_source_that_answers_is_not_stale(world: World) -> None:
    await world.prepare()
    async with opened(world) as (source, _):
        assert not source.source.stale
        assert 0 <= source.source.age_s < 30
        assert source.source.age_s != inf
        assert not source.following.done()


async def test_closing_leaves_nothing_behind(world: World) -> None:
    await world.prepare()
    before = asyncio.all_tasks()
    async with opened(world) as (source, topology):
        assert not source.following.done()
    assert source.following.done()
    await asyncio.sleep(0.05)
    left = [task.get_name() for task in asyncio.all_tasks() - before]
    assert left == []
    # Later callers do not wait.
    await asyncio.wait_for(source.source.refresh(world.topic.encode(), 0, topology.revision), PATIENCE_S)
