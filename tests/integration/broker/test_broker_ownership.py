"""Partition leases with real brokers and a real etcd: ownership, its end, and the rights of a former owner."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kproxy.broker.cluster import ClusterView
from kproxy.broker.config import BrokerConfig
from kproxy.broker.keys import Keys as BrokerKeys
from kproxy.broker.keys import TopicValue, encode_value
from kproxy.broker.topics import NewTopic, TopicAdmin
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient, KeyValue
from kproxy_codec import error_codes
from kproxy_codec.api_keys import DESCRIBE_TOPIC_PARTITIONS
from kproxy_codec.record_batch import iterate_batches
from tests.support.brokers.reference_broker import (
    END_TIMEOUT_S,
    LASTING_TTL_S,
    BrokerProcess,
    RawClient,
    fetch,
    send_fetch,
    start_broker,
    start_brokers,
)
from tests.support.brokers.replica_group import broker_value
from tests.support.brokers.topics import DEAD, put_topic
from tests.support.waiting import PATIENCE_S, eventually, wait_for
from tests.support.wire.record_batches import build_batch

TTL_S = 2
TOPIC = "t"
NOT_LEADER = error_codes.NOT_LEADER_OR_FOLLOWER


class Keys:
    """A test's keys in etcd."""

    def __init__(self, client: EtcdClient, prefix: str) -> None:
        self.client = client
        self.prefix = prefix

    def lease_key(self, partition: int = 0) -> str:
        return f"{self.prefix}/partition-leases/{TOPIC}/{partition}"

    async def lease(self, partition: int = 0) -> KeyValue | None:
        return await self.client.get(self.lease_key(partition))

    async def leases(self) -> dict[str, int]:
        kvs = (await self.client.get_prefix(f"{self.prefix}/partition-leases/")).kvs
        return {kv.key.rpartition("/")[2]: int(kv.value) for kv in kvs}

    async def held_lease(self, partition: int = 0) -> KeyValue:
        """Return the lease as soon as it exists."""
        found: KeyValue = await eventually(lambda: self.lease(partition))
        return found

    async def leader_epoch(self, partition: int = 0) -> int:
        found = await self.client.get(f"{self.prefix}/refbroker/partitions/{TOPIC}/{partition}")
        assert found is not None
        epoch: int = json.loads(found.value)["leader_epoch"]
        return epoch

    async def put_topic(self, replicas: list[list[int]], **options: Any) -> None:
        await put_topic(self.client, BrokerKeys(self.prefix), TOPIC, replicas, **options)


@pytest.fixture
async def keys(etcd_client: EtcdClient, etcd_prefix: str) -> Keys:
    return Keys(etcd_client, etcd_prefix)


@contextmanager
def leading_broker(etcd: EmbeddedEtcd, keys: Keys, tmp_path: Path, lease_ttl_s: int) -> Iterator[BrokerProcess]:
    with start_broker(1, tmp_path / "1", etcd.endpoint, keys.prefix, lease_ttl_s=lease_ttl_s) as started:
        with started.client() as client:
            wait_for(lambda: client.leaders(TOPIC) == {0: 1})
        yield started


@pytest.fixture
async def broker(etcd: EmbeddedEtcd, keys: Keys, tmp_path: Path) -> AsyncIterator[BrokerProcess]:
    """Broker 1, which leads the one partition of TOPIC."""
    with leading_broker(etcd, keys, tmp_path, LASTING_TTL_S) as started:
        yield started


@pytest.fixture
async def mortal(etcd: EmbeddedEtcd, keys: Keys, tmp_path: Path) -> AsyncIterator[BrokerProcess]:
    """Like `broker`, with a short lease, for tests that wait for its end; a stall of the machine may also end it."""
    with leading_broker(etcd, keys, tmp_path, TTL_S) as started:
        yield started


def produce(broker: BrokerProcess, value: bytes = b"v", **options: Any) -> tuple[int, int]:
    with broker.client() as client:
        result = client.produce(TOPIC, 0, build_batch([value], **options))
    return result.error_code, result.base_offset


def accepted(broker: BrokerProcess, value: bytes = b"v", **options: Any) -> tuple[int, int]:
    """Like `produce`, repeated while the broker does not lead: then nothing is written."""
    found: tuple[int, int] = wait_for(
        lambda: result if (result := produce(broker, value, **options))[0] != NOT_LEADER else None
    )
    return found


def values_read(broker: BrokerProcess) -> list[int]:
    with broker.client() as client:
        return [batch.base_offset for batch in iterate_batches(fetch(client, TOPIC, max_wait_ms=0).records or b"")]


# Taking


@pytest.mark.parametrize("asked", [NewTopic(TOPIC, 2, 2), NewTopic(TOPIC, assignments=[[1, 2], [2, 1]])])
async def test_topic_counts_on_brokers_unseen_by_the_watch(keys: Keys, asked: NewTopic) -> None:
    view = ClusterView(BrokerKeys(keys.prefix))
    for node_id in (1, 2):
        value = encode_value(broker_value(node_id))
        await keys.client.put(view.keys.broker(node_id), value)
    admin = TopicAdmin(keys.client, view, BrokerConfig(1, Path("unused"), ("unused",)))
    planned = await admin.plan(asked)
    assert isinstance(planned, TopicValue), planned
    assert sorted(planned.replicas) == [[1, 2], [2, 1]]


def partitions_known(client: RawClient) -> int:
    """Return how many partitions of TOPIC a broker knows; this request takes none."""
    topics = client.request(DESCRIBE_TOPIC_PARTITIONS, 0, topics=[{"name": TOPIC}]).topics
    return len(topics[0].partitions)


async def test_each_partition_goes_to_one_of_several_brokers(etcd: EmbeddedEtcd, keys: Keys, tmp_path: Path) -> None:
    """Their first replica is dead; each broker takes some while clients use all of them everywhere."""
    partitions = 30
    with (
        start_brokers((1, 2, 3), tmp_path, etcd.endpoint, keys.prefix, lease_ttl_s=LASTING_TTL_S) as brokers,
        ExitStack() as stack,
    ):
        clients = [stack.enter_context(broker.client()) for broker in brokers]
        await keys.put_topic([[DEAD, 1, 2, 3], [DEAD, 2, 3, 1], [DEAD, 3, 1, 2]] * (partitions // 3), leader_epoch=0)
        wait_for(lambda: all(partitions_known(client) == partitions for client in clients))
        for partition in range(partitions):
            for client in clients:
                client.send_produce(TOPIC, partition, build_batch())
        winners: dict[str, list[int]] = {str(partition): [] for partition in range(partitions)}
        for partition in range(partitions):
            for client, broker in zip(clients, brokers, strict=True):
                result = client.produced()
                assert (result.error_code, result.base_offset) in ((0, 0), (NOT_LEADER, -1))
                if result.error_code == 0:
                    winners[str(partition)].append(broker.node_id)
        owners = await keys.leases()
        assert {partition: [owner] for partition, owner in owners.items()} == winners


async def test_partition_taken_once_waits_for_its_holder(
    etcd: EmbeddedEtcd, keys: Keys, broker: BrokerProcess, tmp_path: Path
) -> None:
    with start_broker(2, tmp_path / "2", etcd.endpoint, keys.prefix, lease_ttl_s=LASTING_TTL_S) as other:
        assert produce(broker) == (0, 0)
        assert broker.terminate() == 0
        with other.client() as client:
            wait_for(lambda: client.leaders(TOPIC) == {0: -1}, what="nobody leads")
            assert client.metadata(TOPIC).topics[0].partitions[0].error_code == error_codes.LEADER_NOT_AVAILABLE
            assert client.produce(TOPIC, 0, build_batch()).error_code == NOT_LEADER
            assert await keys.leases() == {}
            broker.start()
            wait_for(lambda: client.leaders(TOPIC) == {0: 1}, what="the holder is back")
        assert produce(broker) == (0, 1)


# Stopping and coming back


async def test_graceful_stop_gives_everything_up_at_once(etcd: EmbeddedEtcd, keys: Keys, tmp_path: Path) -> None:
    lease_ttl_s = 300
    with start_broker(1, tmp_path / "1", etcd.endpoint, keys.prefix, lease_ttl_s=lease_ttl_s) as broker:
        with broker.client() as client:
            assert client.leaders(TOPIC) == {0: 1}
        produce(broker)
        started = time.monotonic()
        assert broker.terminate() == 0
        assert await keys.leases() == {}
        assert await keys.client.get(f"{keys.prefix}/brokers/1") is None
        broker.start()
        assert time.monotonic() - started < lease_ttl_s / 2, "it waited for a lease that was revoked"
        assert produce(broker) == (0, 1)
        assert await keys.leader_epoch() == 1


async def test_sigterm_stops_broker_despite_waiting_fetch(broker: BrokerProcess) -> None:
    with broker.client() as client:
        send_fetch(client, TOPIC, max_wait_ms=round(3000 * END_TIMEOUT_S))
        assert client.silent_for(0.1)
        assert broker.terminate() == 0
        assert client.receive().responses[0].partitions[0].error_code == 0, "it was answered, not cut off"


async def test_acknowledged_records_survive_kill_9_with_their_offsets(mortal: BrokerProcess, keys: Keys) -> None:
    broker, options = mortal, {"producer_id": 5, "producer_epoch": 0}
    acknowledged = [accepted(broker, b"v" * 2000, base_sequence=sequence, **options) for sequence in range(50)]
    assert acknowledged == [(0, offset) for offset in range(50)]
    first = await keys.held_lease()
    broker.kill()
    segment = next((broker.data_dir / f"{TOPIC}-0").glob("*.log"))
    with segment.open("ab") as file:
        file.write(build_batch([b"torn" * 100])[:-7])  # a write that kill -9 cut in two
    broker.start()
    wait_for(lambda: values_read(broker) == list(range(50)))
    assert accepted(broker, b"v" * 2000, base_sequence=48, **options) == (0, 48), "a resend after the crash"
    assert accepted(broker, b"v" * 2000, base_sequence=60, **options)[0] == error_codes.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert accepted(broker, b"v" * 2000, base_sequence=50, **options) == (0, 50)
    wait_for(lambda: values_read(broker) == list(range(51)))
    second = await keys.held_lease()
    assert first.lease_id != second.lease_id, "the new process took over its predecessor's key"
    assert await keys.leader_epoch() >= 1


# Losing


async def test_broker_refuses_while_another_holds_its_key(broker: BrokerProcess, keys: Keys) -> None:
    await keys.client.put(keys.lease_key(), b"99")
    appended, deadline = 0, time.monotonic() + PATIENCE_S
    while produce(broker)[0] == 0:
        appended += 1
        await asyncio.sleep(0.01)
        assert time.monotonic() < deadline, "it did not notice"
    await asyncio.sleep(2)
    assert produce(broker)[0] == NOT_LEADER
    assert values_read(broker) == [], "it does not serve reads either"
    assert (await keys.lease()).value == b"99"  # type: ignore[union-attr]
    await keys.client.delete(keys.lease_key())
    wait_for(lambda: produce(broker)[0] == 0, what="the key is free again")
    with broker.client() as client:
        assert fetch(client, TOPIC).high_watermark == appended + 1, "a refused write was kept"


async def test_releasing_leaves_a_successors_key_alone(broker: BrokerProcess, keys: Keys) -> None:
    await keys.client.put(keys.lease_key(), b"99")
    wait_for(lambda: produce(broker)[0] == NOT_LEADER)
    assert broker.terminate() == 0
    found = await keys.lease()
    assert found is not None
    assert found.value == b"99"


async def test_broker_with_deleted_key_registers_anew(broker: BrokerProcess, keys: Keys) -> None:
    before = await keys.lease()
    await keys.client.delete(f"{keys.prefix}/brokers/1")
    wait_for(lambda: "lease lost" in broker.log(), what="it noticed")
    wait_for(lambda: produce(broker)[0] == 0, what="it owns again")
    after = await keys.lease()
    assert before is not None
    assert after is not None
    assert before.lease_id != after.lease_id
    assert await keys.client.get(f"{keys.prefix}/brokers/1") is not None


# Duplicates


async def test_second_process_under_one_id_gives_up(
    etcd: EmbeddedEtcd, keys: Keys, broker: BrokerProcess, tmp_path: Path
) -> None:
    before = await keys.lease()
    second = BrokerProcess(1, tmp_path / "other", etcd.endpoint, keys.prefix, lease_ttl_s=TTL_S).start(wait=False)
    try:
        assert second.process.wait(END_TIMEOUT_S) == 2
        assert "another broker with --node-id 1 is alive" in second.log()
        assert str(broker.port) in second.log(), "it does not say where"
    finally:
        second.stop()
    assert await keys.lease() == before
    assert produce(broker) == (0, 0)


async def test_key_on_foreign_lease_is_not_ours(broker: BrokerProcess, keys: Keys) -> None:
    assert broker.terminate() == 0
    await keys.client.put(keys.lease_key(), b"1")
    broker.start()
    assert produce(broker)[0] == NOT_LEADER
    await keys.client.delete(keys.lease_key())
    wait_for(lambda: produce(broker)[0] == 0, what="the key is free")


async def test_recreated_topic_keeps_nothing_of_the_deleted_one(broker: BrokerProcess, keys: Keys) -> None:
    """The logs of its partitions are removed one by one while those of the new topic are created."""
    partitions = 60
    topic_key = f"{keys.prefix}/refbroker/topics/{TOPIC}"
    with broker.client() as client:
        for _ in range(2):
            await keys.client.delete(topic_key)
            await keys.put_topic([[1]] * partitions)
            wait_for(lambda: client.produce(TOPIC, partitions - 1, build_batch()).error_code == 0)
            wait_for(lambda: len(owned := client.leaders(TOPIC)) == partitions and set(owned.values()) == {1})
    wait_for(lambda: not list(broker.data_dir.glob("#deleted-*")), what="all is removed")
    assert list(broker.data_dir.glob("#stray-*")) == []
    assert len(list(broker.data_dir.glob(f"{TOPIC}-*/*.log"))) == partitions


@pytest.mark.long
async def test_many_partitions_are_taken_and_released_quickly(etcd: EmbeddedEtcd, keys: Keys, tmp_path: Path) -> None:
    """There are more logs than the usual limit on open files."""
    partitions = 1200
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    broker = BrokerProcess(1, tmp_path / "1", etcd.endpoint, keys.prefix, lease_ttl_s=LASTING_TTL_S)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))  # the limit that the broker inherits
        broker.start(wait=False)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        broker.wait_ready()
        await keys.put_topic([[1]] * partitions)
        with broker.client() as client:
            wait_for(lambda: partitions_known(client) == partitions)
            wait_for(lambda: -1 not in client.leaders(TOPIC).values(), what="all are led")
            assert client.produce(TOPIC, partitions - 1, build_batch()).error_code == 0
        assert broker.terminate() == 0
        assert await keys.leases() == {}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        broker.stop()
