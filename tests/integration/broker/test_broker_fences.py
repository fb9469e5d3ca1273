"""Writer fences at reference brokers with a real etcd: accepted and refused writers, and who remembers the fence."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kproxy.broker.keys import FenceValue, Keys, TopicValue, decode_value, encode_value
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient
from kproxy_codec import error_codes
from kproxy_codec.api_keys import API_VERSIONS, BIND_FENCES, DELETE_TOPICS
from kproxy_codec.own import NO_FENCE, BoundFence, FenceBinding
from tests.support.brokers.reference_broker import BrokerProcess, Cluster, RawClient, fetch, start_broker, start_brokers
from tests.support.clients.attempts import stored
from tests.support.etcd.embedded import kill, own_etcd
from tests.support.waiting import wait_for
from tests.support.wire.record_batches import build_batch

TTL_S = 4
REFUSED = error_codes.POLICY_VIOLATION
NOT_LEADER = error_codes.NOT_LEADER_OR_FOLLOWER
UNKNOWN = error_codes.UNKNOWN_TOPIC_OR_PARTITION

Grant = Callable[[], Awaitable[int]]


@pytest.fixture
def grant(etcd_client: EtcdClient, etcd_prefix: str) -> Grant:
    """A revision higher than all before, like a claim's."""
    return lambda: etcd_client.put(f"{etcd_prefix}/kproxy/own/writers/claim", b"{}")


@pytest.fixture
def clients(leader: BrokerProcess) -> Iterator[list[RawClient]]:
    """Three connections to the leader."""
    with ExitStack() as stack:
        yield [stack.enter_context(leader.client()) for _ in range(3)]


def bind(client: RawClient, topic: str, fence: int, partition: int = 0) -> tuple[int, int]:
    [bound] = client.bind_fences(FenceBinding(topic, partition, fence))
    return bound.error_code, bound.fence


def release(client: RawClient, topic: str, fence: int) -> tuple[int, int]:
    [bound] = client.bind_fences(FenceBinding(topic, 0, fence, is_released=True))
    return bound.error_code, bound.fence


def write(client: RawClient, topic: str, value: bytes = b"v", **options: Any) -> int:
    code: int = client.produce(topic, 0, build_batch([value]), **options).error_code
    return code


def test_bind_fences_api_is_offered(cluster: Cluster) -> None:
    with cluster.brokers[0].client() as client:
        keys = client.request(API_VERSIONS, 3, client_software_name="x", client_software_version="1").api_keys
    assert (BIND_FENCES, 0, 0) in [(each.api_key, each.min_version, each.max_version) for each in keys]


# Accepted writers


async def test_only_writers_bound_to_the_fence_may_write(clients: list[RawClient], topic: str, grant: Grant) -> None:
    old, new, unbound = clients
    lower, higher = await grant(), await grant()
    assert write(unbound, topic) == 0, "nobody owns it yet"
    assert bind(old, topic, lower) == (0, lower)
    assert [write(each, topic) for each in (old, unbound)] == [0, REFUSED]
    assert bind(new, topic, higher) == (0, higher)
    assert [write(each, topic) for each in (old, new, unbound)] == [REFUSED, 0, REFUSED]
    result = old.produce(topic, 0, build_batch())
    assert result.error_message == (
        f"{topic}-0: its owner writes behind fence {higher}, and this connection is bound to the older {lower}"
    )
    assert result.base_offset == -1


@pytest.mark.parametrize("version", range(3, 14))
async def test_every_produce_version_is_refused(
    clients: list[RawClient], topic: str, grant: Grant, version: int
) -> None:
    owner, other, _ = clients
    bind(owner, topic, await grant())
    for acks in (-1, 1):
        assert write(other, topic, version=version, acks=acks) == REFUSED
    assert write(owner, topic, version=version) == 0
    assert other.produce(topic, 0, b"no batch", version=version).error_code == REFUSED
    other.produce(topic, 0, build_batch(), version=version, acks=0, answered=False)
    assert other.is_closed()


async def test_stale_writer_gets_no_duplicate_or_transactional_batch(
    clients: list[RawClient], topic: str, grant: Grant
) -> None:
    old, new, _ = clients
    batch = build_batch(producer_id=5, producer_epoch=0, base_sequence=0)
    transactional = build_batch(producer_id=6, producer_epoch=0, base_sequence=0, is_transactional=True)
    bind(old, topic, await grant())
    assert [old.produce(topic, 0, each).error_code for each in (batch, batch)] == [0, 0]
    assert old.produce(topic, 0, transactional).error_code == error_codes.INVALID_TXN_STATE
    bind(new, topic, await grant())
    assert [old.produce(topic, 0, each).error_code for each in (batch, transactional)] == [REFUSED, REFUSED]
    assert new.produce(topic, 0, batch).base_offset == 0, "the same producer on another connection"


async def test_pipelined_writes_after_a_bind_are_bound(clients: list[RawClient], topic: str, grant: Grant) -> None:
    owner, other, _ = clients
    bind(other, topic, await grant())
    owner.send_bind_fences(FenceBinding(topic, 0, await grant()))
    for _ in range(3):
        owner.send_produce(topic, 0, build_batch())
    assert owner.bound()[0].error_code == 0
    assert [owner.produced().error_code for _ in range(3)] == [0, 0, 0]
    assert write(other, topic) == REFUSED


async def test_release_lets_others_write_but_no_predecessor(clients: list[RawClient], topic: str, grant: Grant) -> None:
    old, late, other = clients
    fence, released_at = await grant(), await grant()
    bind(old, topic, fence)
    assert release(other, topic, fence - 1) == (0, fence), "an older release changes nothing"
    assert write(other, topic) == REFUSED
    assert release(other, topic, released_at) == (0, released_at)
    assert write(other, topic) == 0
    assert write(old, topic) == REFUSED
    # A connection of the same claim, and its writes after its bind.
    late.send_bind_fences(FenceBinding(topic, 0, fence))
    late.send_produce(topic, 0, build_batch())
    assert late.bound() == [BoundFence(topic, 0, REFUSED, released_at)]
    assert late.produced().error_code == REFUSED
    assert bind(old, topic, await grant())[0] == 0
    assert [write(each, topic) for each in (old, other)] == [0, REFUSED]
    assert release(late, topic, await grant())[0] == 0
    assert write(other, topic) == 0, "to release is not to be bound"


# Requests


async def test_each_partition_of_request_gets_its_own_answer(cluster: Cluster, topic: str, grant: Grant) -> None:
    fence = await grant()
    with cluster.brokers[0].client() as client:
        leaders = client.leaders(topic)
        mine = next(index for index, leader in leaders.items() if leader == 1)
        other = next(index for index, leader in leaders.items() if leader != 1)
        asked = [
            FenceBinding(topic, mine, fence),
            FenceBinding(topic, other, fence),
            FenceBinding(topic, 1_000, fence),
            FenceBinding(topic, -1, fence),
            FenceBinding("nowhere", 0, fence),
            FenceBinding("no/topic", 0, fence),
        ]
        bound = client.bind_fences(*asked)
    assert [(each.topic, each.partition_index) for each in bound] == [
        (each.topic, each.partition_index) for each in asked
    ]
    assert [(each.error_code, each.fence) for each in bound] == [
        (0, fence),
        (NOT_LEADER, NO_FENCE),
        *[(UNKNOWN, NO_FENCE)] * 4,
    ]


async def test_invalid_bind_is_refused_and_changes_nothing(clients: list[RawClient], topic: str, grant: Grant) -> None:
    client, other, _ = clients
    fence = await grant()
    twice = client.bind_fences(FenceBinding(topic, 0, fence), FenceBinding(topic, 0, fence, is_released=True))
    assert [each.error_code for each in twice] == [error_codes.INVALID_REQUEST] * 2
    # Fences of a lost history, as after a restore of etcd, would lock out all writers.
    for nonsense in (0, -1, (1 << 63) - 1, fence + 1_000_000):
        assert bind(client, topic, nonsense) == (error_codes.INVALID_REQUEST, NO_FENCE)
        assert release(client, topic, nonsense) == (error_codes.INVALID_REQUEST, NO_FENCE)
    assert client.bind_fences() == []
    assert write(other, topic) == 0
    assert bind(client, topic, fence) == (0, fence)


# Memory of fences


async def test_deleted_topic_removes_its_fences(
    cluster: Cluster, etcd_client: EtcdClient, topic: str, grant: Grant
) -> None:
    key = Keys(f"/cluster-{os.getpid()}").fence(topic, 0)
    with cluster.brokers[0].client() as admin:
        for _ in range(2):
            leader = cluster.leader(topic)
            with leader.client() as owner, leader.client() as other:
                fence = await grant()
                assert bind(owner, topic, fence) == (0, fence)
                found = await etcd_client.get(key)
                assert found is not None
                value = decode_value(found.value, FenceValue)
                assert (value.fence, value.is_owned) == (fence, True)
                assert write(other, topic) == REFUSED
                admin.request(DELETE_TOPICS, 1, topic_names=[topic], timeout_ms=5000)
                assert await etcd_client.get(key) is None
                wait_for(lambda owner=owner: write(owner, topic) == UNKNOWN)
                assert bind(owner, topic, await grant()) == (UNKNOWN, NO_FENCE)


async def test_next_leader_knows_the_fence(etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path, grant: Grant) -> None:
    """After kill -9 of the leader."""
    options = {"lease_ttl_s": TTL_S, "default_replication_factor": 3}
    with start_brokers((1, 2, 3), tmp_path, etcd.endpoint, etcd_prefix, **options) as brokers:
        leader = Cluster(brokers).leader("t")
        stale, fence = await grant(), await grant()
        with leader.client() as old, leader.client() as owner:
            bind(old, "t", stale)
            assert write(old, "t", b"old") == 0
            bind(owner, "t", fence)
            assert write(owner, "t", b"new") == 0
        leader.kill()
        following = next(broker for broker in brokers if broker is not leader)
        with following.client() as client:
            wait_for(lambda: client.leaders("t")[0] not in (-1, leader.node_id))
            elected = brokers[client.leaders("t")[0] - 1]
        _remembers(elected, stale, fence)
        assert _values(elected) == [b"old", b"new", b"again"]


def _remembers(leader: BrokerProcess, stale: int, fence: int) -> None:
    with leader.client() as unbound, leader.client() as old, leader.client() as owner:
        assert write(unbound, "t") == REFUSED
        assert bind(old, "t", stale) == (REFUSED, fence)
        assert write(old, "t") == REFUSED
        assert bind(owner, "t", fence) == (0, fence)
        assert write(owner, "t", b"again") == 0


def _values(leader: BrokerProcess) -> list[bytes]:
    with leader.client() as client:
        records = fetch(client, "t", max_wait_ms=0).records
    return [value for _, value in stored(records)]


async def test_restored_etcd_voids_earlier_binds(tmp_path: Path) -> None:
    """The restored copy of its files has the broker's lease, but not the latest claim."""
    async with own_etcd(tmp_path / "etcd") as (server, etcd_client):
        with start_broker(1, tmp_path / "1", server.endpoint, "/p", lease_ttl_s=60) as broker:
            with broker.client() as owner, broker.client() as unbound:
                assert owner.leaders("t") == {0: 1}
                copied = await etcd_client.put("/p/claim", b"x")
                await kill(server)
                shutil.copytree(server.data_dir, tmp_path / "copy")
                await server.start()
                for _ in range(50):
                    fence = await etcd_client.put("/p/claim", b"x")
                assert bind(owner, "t", fence) == (0, fence)
                assert write(unbound, "t") == REFUSED
                # The broker knows more than the mirror.
                later = encode_value(TopicValue(uuid.uuid4(), [[1]], {}))
                await etcd_client.put(Keys("/p").topic("later"), later)
                wait_for(lambda: owner.metadata("later", create=False).topics[0].error_code == 0)
                await kill(server)
                shutil.rmtree(server.data_dir)
                (tmp_path / "copy").rename(server.data_dir)
                await server.start()
                assert owner.is_closed()
                wait_for(lambda: write(unbound, "t") == 0, what="etcd's word: nobody owns it")
            with broker.client() as stale, broker.client() as owner:
                assert bind(stale, "t", fence) == (error_codes.INVALID_REQUEST, NO_FENCE), "etcd has not come to it"
                fence = await etcd_client.put("/p/claim", b"x")
                assert fence <= copied + 20
                assert bind(owner, "t", fence) == (0, fence)
                assert [write(each, "t") for each in (owner, stale)] == [0, REFUSED]
