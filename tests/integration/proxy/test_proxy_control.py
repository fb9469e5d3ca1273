"""Requests about the cluster: answers name only the proxy, and faulty brokers are skipped."""

from __future__ import annotations

import struct
import time
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from kproxy.proxy import broker_watch
from kproxy.proxy.apis import SERVED
from kproxy.routing.fleet import Proxy
from kproxy_codec import api_keys
from kproxy_codec.api_keys import FETCH, LIST_OFFSETS, PRODUCE
from kproxy_codec.cluster import ASK_ANOTHER
from tests.support.brokers.scripted_upstream import Asked, Script
from tests.support.clients.raw_client import (
    RawClient,
    control_frame,
    fetch_frame,
    list_offsets_frame,
    produce_frame,
    raw_frame,
)
from tests.support.processes.running_proxy import IDENTITY, both_loops
from tests.support.scene import DOWN, HOLDS, T0, Scene, scene, staged
from tests.support.waiting import eventually

REAL_ID = 0x51525354
REAL_HOST = "broker-nine.internal"
REAL_PORT = 0x6B6B
EPOCH = 0x41424344
RACK = "rack-of-the-broker"
TOPIC_ID = UUID(int=7)
# None of these may reach a client in any form on the wire.
TELLTALES = (*(struct.pack(">i", each) for each in (REAL_ID, REAL_PORT, EPOCH)), REAL_HOST.encode(), RACK.encode())
REAL_BROKER = {"node_id": REAL_ID, "host": REAL_HOST, "port": REAL_PORT, "rack": RACK}
PARTITION = {
    "error_code": 0,
    "partition_index": 0,
    "leader_id": REAL_ID,
    "leader_epoch": EPOCH,
    "replica_nodes": [REAL_ID],
    "isr_nodes": [REAL_ID],
    "offline_replicas": [REAL_ID],
}
INDEXES = range(12)


def answer_about_the_cluster(asked: Asked) -> None:
    key, version = asked.header.api_key, asked.header.api_version
    fields: dict[str, Any]
    if key == api_keys.METADATA:
        partitions = [{**PARTITION, "partition_index": index} for index in INDEXES]
        topic = {"error_code": 0, "name": "t", "topic_id": TOPIC_ID, "is_internal": False, "partitions": partitions}
        fields = {"brokers": [REAL_BROKER], "controller_id": REAL_ID, "cluster_id": "the-cluster", "topics": [topic]}
    elif key == api_keys.DESCRIBE_CLUSTER:
        broker = {"broker_id": REAL_ID, "host": REAL_HOST, "port": REAL_PORT, "rack": RACK}
        fields = {"brokers": [broker], "controller_id": REAL_ID, "cluster_id": "the-cluster"}
    elif key == api_keys.FIND_COORDINATOR:
        found = {"node_id": REAL_ID, "host": REAL_HOST, "port": REAL_PORT}
        fields = found if version < 4 else {"coordinators": [{**found, "key": "k"}]}
    else:
        more = {"eligible_leader_replicas": [REAL_ID], "last_known_elr": [REAL_ID]}
        partitions = [{**PARTITION, **more, "partition_index": index} for index in INDEXES]
        fields = {"topics": [{"error_code": 0, "name": "t", "topic_id": TOPIC_ID, "partitions": partitions}]}
    asked.answer_message(**fields)


def request_of(key: int, version: int) -> bytes:
    if key == api_keys.METADATA:
        return control_frame(key, version, correlation_id=6, topics=[{"name": "t", "topic_id": UUID(int=0)}])
    if key == api_keys.FIND_COORDINATOR:
        asked: dict[str, Any] = {"key": "k"} if version < 4 else {"coordinator_keys": ["k"]}
        return control_frame(key, version, correlation_id=6, **asked)
    if key == api_keys.DESCRIBE_TOPIC_PARTITIONS:
        return control_frame(key, version, correlation_id=6, topics=[{"name": "t"}])
    return control_frame(key, version, correlation_id=6)


NAMING = (
    api_keys.METADATA,
    api_keys.DESCRIBE_CLUSTER,
    api_keys.FIND_COORDINATOR,
    api_keys.DESCRIBE_TOPIC_PARTITIONS,
)
OTHERS = (Proxy(1_000_001, "other-1.test", 19093), Proxy(1_000_002, "other-2.test", 19094))
# The brokers' versions are unknown, so that only the test's requests arrive.
scene = partial(scene, introduced=False)
staged = partial(staged, introduced=False)


@pytest.mark.parametrize("fleet", [(IDENTITY,), (IDENTITY, *OTHERS)], ids=["alone", "three"])
@pytest.mark.parametrize("key", NAMING)
@scene(answer_about_the_cluster, ids=[REAL_ID])
async def test_answers_name_all_proxies_and_no_broker(s: Scene, key: int, fleet: tuple[Proxy, ...]) -> None:
    """All proxies name the same leader of a partition."""
    known = s.proxy.context.fleet
    known.replace(fleet)
    for version in range(SERVED[key].min_version, SERVED[key].max_version + 1):
        s.send(request_of(key, version))
        answer = await s.answer(key, version)
        message = answer.message
        assert (answer.correlation_id, message is None) == (6, False), version
        assert [each for each in TELLTALES if each in answer.frame] == [], version
        if key in (api_keys.METADATA, api_keys.DESCRIBE_TOPIC_PARTITIONS):
            (topic,) = message.topics
            for partition in topic.partitions:
                (leader,) = known.leaders(topic.name.encode(), [partition.partition_index])
                assert partition.leader_id == leader.node_id
                assert partition.replica_nodes == partition.isr_nodes == [leader.node_id]
            assert len({partition.leader_id for partition in topic.partitions}) == len(fleet)
        if key == api_keys.METADATA:
            assert [(each.node_id, each.host, each.port) for each in message.brokers] == [*fleet]
            assert version == 0 or message.controller_id == IDENTITY.node_id
        if key == api_keys.DESCRIBE_CLUSTER:
            assert [(each.broker_id, each.host, each.port) for each in message.brokers] == [*fleet]
            assert message.controller_id == IDENTITY.node_id
        if key == api_keys.FIND_COORDINATOR:
            found = message.coordinators[0] if version >= 4 else message
            assert (found.node_id, found.host, found.port) == known.coordinator(0, "k") == fleet[len(fleet) // 2]


CURRENT_LEADER = struct.pack(">ii", REAL_ID, EPOCH) + b"\x00"


def node_endpoints() -> bytes:
    host, rack = REAL_HOST.encode(), RACK.encode()
    node = struct.pack(">i", REAL_ID) + bytes([len(host) + 1]) + host + struct.pack(">i", REAL_PORT)
    return b"\x02" + node + bytes([len(rack) + 1]) + rack + b"\x00"


def names_itself(code: int, asked: Asked) -> None:
    """KIP-951, with data; a fetch has a different tag for the current leader of an entry."""
    is_fetch = asked.header.api_key == FETCH
    entry: dict[str, Any] = {"error_code": code, "tags": [(int(is_fetch), CURRENT_LEADER)]}
    if is_fetch:
        entry |= {"preferred_read_replica": REAL_ID, "records": b"data"}
    asked.answer(results=dict.fromkeys(asked.partitions, entry), tags=[(0, node_endpoints())])


@pytest.mark.parametrize("code", [0, 6, 87])
@pytest.mark.parametrize("owners", [(1, 1), (1, 2)], ids=["whole", "split"])
@both_loops
async def test_no_answer_with_data_names_a_broker(owners: tuple[int, int], code: int) -> None:
    """A client that knows the real leader bypasses the proxy."""
    script, both = partial(names_itself, code), {"t": [0, 1]}
    async with staged(script, script, owners=owners) as s:
        for key, version, frame in (
            (PRODUCE, 10, produce_frame(both, version=10)),
            (PRODUCE, 11, produce_frame(both, version=11)),
            (FETCH, 12, fetch_frame(both, version=12)),
        ):
            s.send(frame)
            answer = await s.answer(key, version)
            # The first answer to a read is the client's.
            assert set(answer.codes.values()) <= ({code, 0} if key == FETCH else {code})
            assert code in answer.codes.values()
            assert [each for each in TELLTALES if each in answer.frame] == []


@scene(lambda asked: asked.answer(results={T0: {"leader_epoch": EPOCH}}))
async def test_list_offsets_contains_no_leader_epoch(s: Scene) -> None:
    for version in range(4, 10):
        s.send(list_offsets_frame(version=version))
        assert (await s.answer(LIST_OFFSETS, version)).results[0].fields["leader_epoch"] == -1


# ApiVersions


def says_ranges(*ranges: tuple[int, int, int]) -> Script:
    def script(asked: Asked) -> None:
        if asked.header.api_key == api_keys.API_VERSIONS:
            listed = [{"api_key": key, "min_version": low, "max_version": high} for key, low, high in ranges]
            asked.answer_message(api_keys=listed)

    return script


WIDE = says_ranges(*((key, offer.min_version, 99) for key, offer in SERVED.items()))
NARROW = says_ranges((PRODUCE, 3, 9), (FETCH, 4, 11), (api_keys.METADATA, 0, 12), (LIST_OFFSETS, 50, 60))


async def offered(client: RawClient, version: int = 3) -> dict[int, tuple[int, int]]:
    client.send(control_frame(api_keys.API_VERSIONS, version))
    message = (await client.answer(api_keys.API_VERSIONS, version)).message
    return {each.api_key: (each.min_version, each.max_version) for each in message.api_keys}


@scene(WIDE, NARROW)
async def test_common_versions_of_proxy_and_brokers_are_offered(s: Scene) -> None:
    """Also for an unknown version of ApiVersions, in version 0 (KIP-511). Each broker is asked once."""
    for version in range(5):
        assert await offered(await s.proxy.client(), version) == {
            # From 0, although 0 to 2 are refused when sent.
            PRODUCE: (0, 9),
            FETCH: (4, 11),
            api_keys.METADATA: (0, 12),
            api_keys.API_VERSIONS: (0, 4),
        }
    for version in (5, 9, 32767):
        s.send(raw_frame(struct.pack(">hhih", 18, version, 4, 1) + b"x\x00" + b"\x02a\x02b\x00"))
        assert (await s.client.receive())[4:] == struct.pack(">ihihhh", 4, 35, 1, 18, 0, 4)
    assert [len(broker.log) for broker in s.brokers] == [1, 1]


@scene(HOLDS, WIDE, clients=2, one_go=True)
async def test_broker_without_versions_does_not_delay_clients(s: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_watch, "ASK_TIMEOUT_S", 1.0)
    await offered(s.client)
    began = time.monotonic()
    assert PRODUCE in await offered(s.clients[1])
    assert time.monotonic() - began < 0.9


def says(reply: bytes, asked: Asked, off: int = 0) -> None:
    asked.connection.write(raw_frame(struct.pack(">i", asked.header.correlation_id + off) + reply))


@pytest.mark.parametrize("reply", [b"\xff" * 40, b""], ids=["garbage", "nothing"])
@both_loops
async def test_invalid_versions_answer_is_ignored(reply: bytes) -> None:
    async with staged(partial(says, reply), WIDE) as s:
        assert PRODUCE in await offered(s.client)


# Brokers in trouble


async def metadata_of(client: RawClient) -> Any:
    client.send(control_frame(api_keys.METADATA, 9, topics=[{"name": "t"}]))
    return (await client.answer(api_keys.METADATA, 9)).message


@scene()
async def test_proxy_names_itself_without_brokers(s: Scene) -> None:
    message = await metadata_of(s.client)
    assert [(each.node_id, each.host, each.port) for each in message.brokers] == [IDENTITY]
    assert [(topic.name, topic.error_code) for topic in message.topics] == [("t", 5)]


def closes(asked: Asked) -> None:
    asked.connection.abort()


def knows_no_better(asked: Asked) -> None:
    """As reported by a reference broker without a lease."""
    topic = {"error_code": 5, "name": "t", "topic_id": TOPIC_ID, "partitions": []}
    answer = asked.message(brokers=[REAL_BROKER], controller_id=-1, cluster_id="the-cluster", topics=[topic])
    asked.connection.write(raw_frame(answer[4:-1] + ASK_ANOTHER))


TROUBLES: dict[str, Script] = {
    "closes": closes,
    "says nonsense": partial(says, b"\x00" + b"\xee" * 50),
    "answers another question": partial(says, bytes(50), off=1),
    "knows no better": knows_no_better,
}


@pytest.mark.parametrize("trouble", TROUBLES)
@both_loops
async def test_failing_broker_is_skipped(trouble: str) -> None:
    async with staged(TROUBLES[trouble], TROUBLES[trouble]) as s:
        assert (await metadata_of(s.client)).topics[0].error_code == 5
        assert [len(broker.log) for broker in s.brokers] == [1, 1]
        for broker in s.brokers:
            broker.script = answer_about_the_cluster
        assert (await metadata_of(s.client)).topics[0].error_code == 0


@scene(HOLDS, HOLDS, limits={"control_attempt_s": 1.0}, one_go=True)
async def test_hung_broker_is_awaited_once(s: Scene) -> None:
    s.send(control_frame(api_keys.METADATA, 9, topics=[{"name": "t"}]))
    await eventually(lambda: any(broker.log for broker in s.brokers))
    hung, sound = sorted(s.brokers, key=lambda broker: -len(broker.log))
    sound.script = answer_about_the_cluster
    assert (await s.answer(api_keys.METADATA, 9)).message.topics[0].error_code == 0
    began = time.monotonic()
    for _ in range(3):
        assert (await metadata_of(s.client)).topics[0].error_code == 0
    assert time.monotonic() - began < 0.9
    assert len(hung.log) == 1


@scene(HOLDS, HOLDS, HOLDS)
async def test_broker_leaving_during_a_request_is_skipped(s: Scene) -> None:
    s.send(control_frame(api_keys.DESCRIBE_CLUSTER, 0))
    await eventually(lambda: any(broker.log for broker in s.brokers))
    asked, leaves, stays = sorted(s.brokers, key=lambda broker: -len(broker.log))
    leaves.script = stays.script = answer_about_the_cluster
    s.proxy.topology.remove_broker(leaves.node_id)
    asked.connections[0].abort()
    assert (await s.answer(api_keys.DESCRIBE_CLUSTER, 0)).message.error_code == 0


CREATE_TOPICS = control_frame(api_keys.CREATE_TOPICS, 5, correlation_id=3, topics=[], timeout_ms=1000)


@scene(closes, closes)
async def test_non_repeatable_request_goes_to_one_broker(s: Scene) -> None:
    s.send(CREATE_TOPICS)
    assert await s.client.is_closed()
    assert sum(len(broker.log) for broker in s.brokers) == 1


@scene(DOWN, lambda asked: asked.answer_message(topics=[]))
async def test_unwritten_request_may_go_to_second_broker(s: Scene) -> None:
    s.send(CREATE_TOPICS)
    assert (await s.answer(api_keys.CREATE_TOPICS, 5)).correlation_id == 3


@scene(HOLDS)
async def test_forwarded_answer_comes_back_byte_for_byte(s: Scene) -> None:
    most = 2**31 - 1
    frame = control_frame(api_keys.INIT_PRODUCER_ID, 4, correlation_id=most, transaction_timeout_ms=9)
    s.send(frame)
    asked = await s.next()
    assert asked.frame[:8] + asked.frame[12:] == frame[:8] + frame[12:]
    reply = asked.message(error_code=0, producer_id=4711, producer_epoch=0)
    asked.connection.write(reply)
    assert await s.client.receive() == reply[:4] + struct.pack(">i", most) + reply[8:]


@scene(HOLDS)
async def test_control_answers_keep_their_place_among_the_others(s: Scene) -> None:
    s.send(control_frame(api_keys.METADATA, 9, correlation_id=1, topics=None), produce_frame(correlation_id=2))
    asked = {each.header.api_key: each for each in [await s.next(), await s.next()]}
    asked[PRODUCE].answer()
    assert await s.still()
    answer_about_the_cluster(asked[api_keys.METADATA])
    assert (await s.answer(api_keys.METADATA, 9)).correlation_id == 1
    assert (await s.answer()).correlation_id == 2


@scene(HOLDS)
async def test_requests_of_leaving_client_are_dropped(s: Scene) -> None:
    s.send(*[ALL_TOPICS] * 5)
    await s.next()
    s.client.abort()
    await s.broker.connections[0].until_closed()
    await s.until_sessions()


@scene(answer_about_the_cluster, answer_about_the_cluster)
async def test_moved_broker_is_asked_at_its_new_address(s: Scene) -> None:
    s.proxy.topology.remove_broker(2)
    for broker in s.brokers:
        s.proxy.topology.set_broker(1, broker.address)
        await metadata_of(s.client)
    asked = [sum(each.header.api_key == api_keys.METADATA for each in broker.log) for broker in s.brokers]
    assert asked == [1, 1]


# All topics

ALL_TOPICS = control_frame(api_keys.METADATA, 9, topics=None)


def answer_with_topics(asked: Asked, *names: str) -> None:
    topics = [{"error_code": 0, "name": name, "is_internal": False, "partitions": [PARTITION]} for name in names]
    asked.answer_message(brokers=[REAL_BROKER], controller_id=REAL_ID, cluster_id="c", topics=topics)


async def topics_told(client: RawClient) -> list[str]:
    return [topic.name for topic in (await client.answer(api_keys.METADATA, 9)).message.topics]


async def all_ask(s: Scene, times: int = 1) -> Asked:
    """The first client requests all topics, then the others do: one request arrives."""
    s.send(ALL_TOPICS)
    asked = await s.next()
    for client in s.clients[1:]:
        client.send(*[ALL_TOPICS] * times)
    assert await s.broker.is_silent()
    return asked


@scene(HOLDS, clients=4)
async def test_concurrent_requests_for_all_topics_share_one(s: Scene) -> None:
    """The first answer may miss their earlier changes, so the others share a second request."""
    answer_with_topics(await all_ask(s, times=2), "old")
    assert await topics_told(s.client) == ["old"]
    answer_with_topics(await s.next(), "old", "new")
    for client in s.clients[1:]:
        assert [await topics_told(client) for _ in range(2)] == [["old", "new"]] * 2
    assert await s.broker.is_silent()
    # The proxy keeps no answer for later clients.
    s.send(ALL_TOPICS)
    answer_with_topics(await s.next(), "old", "new", "newer")
    assert await topics_told(s.client) == ["old", "new", "newer"]


@scene(HOLDS, clients=3)
async def test_shared_request_is_repeated_when_its_asker_leaves(s: Scene) -> None:
    asked = await all_ask(s)
    s.client.abort()
    await asked.connection.until_closed()
    answer_with_topics(await s.next(), "t")
    assert [await topics_told(client) for client in s.clients[1:]] == [["t"], ["t"]]


@scene(HOLDS, clients=2)
async def test_metadata_requests_wait_only_for_equal_ones(s: Scene) -> None:
    second = s.clients[1]
    s.send(ALL_TOPICS)
    all_topics = await s.next()
    second.send(request_of(api_keys.METADATA, 9))
    answer_with_topics(await s.next(), "t")
    assert await topics_told(second) == ["t"]
    second.send(control_frame(api_keys.METADATA, 12, topics=None))
    answer_with_topics(await s.next(), "t", "u")
    await second.receive()
    answer_with_topics(all_topics, "t")
    assert await topics_told(s.client) == ["t"]


@scene(HOLDS, clients=3)
async def test_requests_for_all_topics_are_answered_without_brokers(s: Scene) -> None:
    asked = await all_ask(s)
    await s.broker.stop_listening()
    asked.connection.abort()
    assert [await topics_told(client) for client in s.clients] == [[], [], []]


@scene(HOLDS, clients=2)
async def test_pipelined_cluster_requests_are_answered_in_order(s: Scene) -> None:
    requests, other = 200, s.clients[1]
    configs = {"resources": [{"resource_type": 2, "resource_name": "t", "configuration_keys": None}]}
    s.send(*(control_frame(api_keys.DESCRIBE_CONFIGS, 1, correlation_id=n, **configs) for n in range(requests)))
    waiting = [await s.next()]
    await s.broker.is_silent()
    while not s.broker.asked.empty():
        waiting.append(await s.next())
    assert 1 <= len(waiting) <= 16
    # These requests belong to one client, which does not delay others.
    other.send(request_of(api_keys.METADATA, 9))
    answer_with_topics(await s.next(), "t")
    assert await topics_told(other) == ["t"]
    for n in range(requests):
        waiting.pop(0).answer_message(results=[])
        assert (await s.answer(api_keys.DESCRIBE_CONFIGS, 1)).correlation_id == n
        if len(waiting) + n + 1 < requests:
            waiting.append(await s.next())
    assert await s.broker.is_silent()
