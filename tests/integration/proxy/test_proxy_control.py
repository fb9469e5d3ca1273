"""Requests about the cluster: answers name only the proxy, and brokers with faults are skipped."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from kproxy.proxy import api_versions
from kproxy.proxy.apis import SERVED
from kproxy.routing.fleet import Proxy
from kproxy_codec import api_keys
from kproxy_codec.api_keys import FETCH, LIST_OFFSETS, PRODUCE
from kproxy_codec.cluster import ASK_ANOTHER
from tests.support.brokers.scripted_upstream import Asked, ScriptedUpstream
from tests.support.clients.raw_client import (
    RawClient,
    control_frame,
    fetch_frame,
    list_offsets_frame,
    produce_frame,
    raw_frame,
)
from tests.support.processes.running_proxy import IDENTITY, both_loops, in_one_go
from tests.support.processes.running_proxy import running_among_strangers as running_proxy
from tests.support.waiting import eventually

REAL_ID = 0x51525354
REAL_HOST = "broker-nine.internal"
REAL_PORT = 0x6B6B
EPOCH = 0x41424344
RACK = "rack-of-the-broker"
TOPIC_ID = UUID(int=7)
# Whatever form it takes on the wire, none of this may reach a client.
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


def naming_versions() -> list[tuple[int, int]]:
    keys = (
        api_keys.METADATA,
        api_keys.DESCRIBE_CLUSTER,
        api_keys.FIND_COORDINATOR,
        api_keys.DESCRIBE_TOPIC_PARTITIONS,
    )
    return [(key, version) for key in keys for version in range(SERVED[key].min_version, SERVED[key].max_version + 1)]


@pytest.mark.parametrize(("key", "version"), naming_versions())
@both_loops
async def test_no_answer_about_the_cluster_names_a_broker(key: int, version: int) -> None:
    upstream = ScriptedUpstream(REAL_ID, answer_about_the_cluster)
    async with running_proxy(upstream) as proxy:
        client = await proxy.client()
        client.send(request_of(key, version))
        answer = await client.answer(key, version)
        assert answer.correlation_id == 6
        assert [each for each in TELLTALES if each in answer.frame] == []
        assert answer.message is not None
        if key != api_keys.DESCRIBE_TOPIC_PARTITIONS:
            assert IDENTITY.host.encode() in answer.frame
        if key in (api_keys.METADATA, api_keys.DESCRIBE_TOPIC_PARTITIONS):
            partition = answer.message.topics[0].partitions[0]
            assert (partition.leader_id, partition.replica_nodes, partition.isr_nodes) == (
                IDENTITY.node_id,
                [IDENTITY.node_id],
                [IDENTITY.node_id],
            )


OTHERS = (Proxy(1_000_001, "other-1.test", 19093), Proxy(1_000_002, "other-2.test", 19094))


@pytest.mark.parametrize(("key", "version"), naming_versions())
@both_loops
async def test_answers_name_all_proxies_with_same_leader(key: int, version: int) -> None:
    upstream = ScriptedUpstream(REAL_ID, answer_about_the_cluster)
    async with running_proxy(upstream) as proxy:
        fleet = proxy.context.fleet
        fleet.replace([IDENTITY, *OTHERS])
        client = await proxy.client()
        client.send(request_of(key, version))
        answer = await client.answer(key, version)
        message = answer.message
        assert message is not None
        assert [each for each in TELLTALES if each in answer.frame] == []
        if key in (api_keys.METADATA, api_keys.DESCRIBE_TOPIC_PARTITIONS):
            (topic,) = message.topics
            for partition in topic.partitions:
                (leader,) = fleet.leaders(topic.name.encode(), [partition.partition_index])
                assert partition.leader_id == leader.node_id
                assert partition.replica_nodes == partition.isr_nodes == [leader.node_id]
            assert len({partition.leader_id for partition in topic.partitions}) == 3
        if key == api_keys.METADATA:
            assert [(each.node_id, each.host, each.port) for each in message.brokers] == [IDENTITY, *OTHERS]
            assert version == 0 or message.controller_id == IDENTITY.node_id
        if key == api_keys.DESCRIBE_CLUSTER:
            assert [(each.broker_id, each.host, each.port) for each in message.brokers] == [IDENTITY, *OTHERS]
            assert message.controller_id == IDENTITY.node_id
        if key == api_keys.FIND_COORDINATOR:
            found = message.coordinators[0] if version >= 4 else message
            assert (found.node_id, found.host, found.port) == fleet.coordinator(0, "k") == OTHERS[0]


CURRENT_LEADER = struct.pack(">ii", REAL_ID, EPOCH) + b"\x00"


def node_endpoints() -> bytes:
    host, rack = REAL_HOST.encode(), RACK.encode()
    node = struct.pack(">i", REAL_ID) + bytes([len(host) + 1]) + host + struct.pack(">i", REAL_PORT)
    return b"\x02" + node + bytes([len(rack) + 1]) + rack + b"\x00"


# (a request, its API, its version, the tag of the current leader in an entry)
NAMING_DATA = [
    (lambda: produce_frame({"t": [0, 1]}, version=10), PRODUCE, 10, 0),
    (lambda: produce_frame({"t": [0, 1]}, version=11), PRODUCE, 11, 0),
    (lambda: fetch_frame({"t": [0, 1]}, version=12), FETCH, 12, 1),
]


@pytest.mark.parametrize("code", [0, 6, 87])
@pytest.mark.parametrize("owners", [(1, 1), (1, 2)], ids=["whole", "split"])
@pytest.mark.parametrize(("frame", "key", "version", "tag"), NAMING_DATA, ids=["Produce 10", "Produce 11", "Fetch 12"])
@both_loops
async def test_no_answer_with_data_names_a_broker(
    frame: Callable[[], bytes], key: int, version: int, tag: int, owners: tuple[int, int], code: int
) -> None:
    """KIP-951: a client that is told the real leader goes round the proxy."""

    def script(asked: Asked) -> None:
        entry: dict[str, Any] = {"error_code": code, "tags": [(tag, CURRENT_LEADER)]}
        if key == FETCH:
            entry["preferred_read_replica"] = REAL_ID
            entry["records"] = b"data"
        asked.answer(results=dict.fromkeys(asked.partitions, entry), tags=[(0, node_endpoints())])

    first, second = ScriptedUpstream(1, script), ScriptedUpstream(2, script)
    async with running_proxy(first, second) as proxy:
        for partition, owner in enumerate(owners):
            proxy.own(owner, partitions=[partition])
        client = await proxy.client()
        client.send(frame())
        answer = await client.answer(key, version)
        assert answer.codes == {("t", 0): code, ("t", 1): code}
        assert [each for each in TELLTALES if each in answer.frame] == []


@both_loops
async def test_list_offsets_contains_no_leader_epoch() -> None:
    upstream = ScriptedUpstream(1, lambda asked: asked.answer(results={("t", 0): {"leader_epoch": EPOCH}}))
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        for version in range(4, 10):
            client.send(list_offsets_frame(version=version))
            answer = await client.answer(LIST_OFFSETS, version)
            assert answer.results[0].fields["leader_epoch"] == -1


# ApiVersions


def says_ranges(*ranges: tuple[int, int, int]) -> Callable[[Asked], None]:
    def script(asked: Asked) -> None:
        if asked.header.api_key == api_keys.API_VERSIONS:
            listed = [{"api_key": key, "min_version": low, "max_version": high} for key, low, high in ranges]
            asked.answer_message(api_keys=listed)

    return script


WIDE = says_ranges(*((key, offer.min_version, 99) for key, offer in SERVED.items()))


async def offered(client: Any, version: int = 3) -> dict[int, tuple[int, int]]:
    client.send(control_frame(api_keys.API_VERSIONS, version))
    message = (await client.answer(api_keys.API_VERSIONS, version)).message
    return {each.api_key: (each.min_version, each.max_version) for each in message.api_keys}


@pytest.mark.parametrize("version", range(5))
@both_loops
async def test_common_versions_of_proxy_and_brokers_are_offered(version: int) -> None:
    narrow = says_ranges((PRODUCE, 3, 9), (FETCH, 4, 11), (api_keys.METADATA, 0, 12), (LIST_OFFSETS, 50, 60))
    async with running_proxy(ScriptedUpstream(1, WIDE), ScriptedUpstream(2, narrow)) as proxy:
        assert await offered(await proxy.client(), version) == {
            # From 0, although 0 to 2 are refused when sent.
            PRODUCE: (0, 9),
            FETCH: (4, 11),
            api_keys.METADATA: (0, 12),
            api_keys.API_VERSIONS: (0, 4),
        }


@pytest.mark.parametrize("version", [5, 9, 32767])
@both_loops
async def test_unknown_api_versions_version_gets_version_0(version: int) -> None:
    """KIP-511."""
    async with running_proxy(ScriptedUpstream(1, WIDE)) as proxy:
        client = await proxy.client()
        client.send(raw_frame(struct.pack(">hhih", 18, version, 4, 1) + b"x\x00" + b"\x02a\x02b\x00"))
        frame = await client.receive()
        assert frame[4:8] == struct.pack(">i", 4)
        error_code, count, key, lowest, highest = struct.unpack(">hihhh", frame[8:])
        assert (error_code, count, key, lowest, highest) == (35, 1, 18, 0, 4)


@both_loops
async def test_brokers_are_asked_for_their_versions_once() -> None:
    upstream = ScriptedUpstream(1, WIDE)
    async with running_proxy(upstream) as proxy:
        for _ in range(3):
            await offered(await proxy.client())
        assert len(upstream.log) == 1


@both_loops
@in_one_go
async def test_broker_without_versions_does_not_delay_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api_versions, "ASK_TIMEOUT_S", 1.0)
    hung = ScriptedUpstream(1)
    async with running_proxy(hung, ScriptedUpstream(2, WIDE)) as proxy:
        await offered(await proxy.client())
        began = time.monotonic()
        assert PRODUCE in await offered(await proxy.client())
        assert time.monotonic() - began < 0.9


@pytest.mark.parametrize("reply", [b"\xff" * 40, b""], ids=["garbage", "nothing"])
@both_loops
async def test_invalid_versions_answer_is_ignored(reply: bytes) -> None:
    def script(asked: Asked) -> None:
        asked.connection.write(raw_frame(struct.pack(">i", asked.header.correlation_id) + reply))

    async with running_proxy(ScriptedUpstream(1, script), ScriptedUpstream(2, WIDE)) as proxy:
        assert PRODUCE in await offered(await proxy.client())


# Brokers in trouble


async def metadata_of(client: Any) -> Any:
    client.send(control_frame(api_keys.METADATA, 9, topics=[{"name": "t"}]))
    return (await client.answer(api_keys.METADATA, 9)).message


@both_loops
async def test_proxy_names_itself_without_brokers() -> None:
    async with running_proxy() as proxy:
        message = await metadata_of(await proxy.client())
        assert [(each.node_id, each.host, each.port) for each in message.brokers] == [IDENTITY]
        assert [(topic.name, topic.error_code) for topic in message.topics] == [("t", 5)]


def closes(asked: Asked) -> None:
    asked.connection.abort()


def says_nonsense(asked: Asked) -> None:
    asked.connection.write(raw_frame(struct.pack(">i", asked.header.correlation_id) + b"\x00" + b"\xee" * 50))


def answers_another_question(asked: Asked) -> None:
    asked.connection.write(raw_frame(struct.pack(">i", asked.header.correlation_id + 1) + bytes(50)))


def knows_no_better(asked: Asked) -> None:
    """As a reference broker without a lease says it."""
    topic = {"error_code": 5, "name": "t", "topic_id": TOPIC_ID, "partitions": []}
    answer = asked.message(brokers=[REAL_BROKER], controller_id=-1, cluster_id="the-cluster", topics=[topic])
    asked.connection.write(raw_frame(answer[4:-1] + ASK_ANOTHER))


TROUBLES = [closes, says_nonsense, answers_another_question, knows_no_better]


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda each: each.__name__)
@both_loops
async def test_a_broker_in_trouble_is_passed_over(trouble: Callable[[Asked], None]) -> None:
    first, second = ScriptedUpstream(1, trouble), ScriptedUpstream(2, trouble)
    async with running_proxy(first, second) as proxy:
        client = await proxy.client()
        message = await metadata_of(client)
        assert message.topics[0].error_code == 5
        assert (len(first.log), len(second.log)) == (1, 1)
        first.script = second.script = answer_about_the_cluster
        message = await metadata_of(client)
        assert message.topics[0].error_code == 0


@both_loops
@in_one_go
async def test_a_hung_broker_is_waited_for_once() -> None:
    brokers = [ScriptedUpstream(node_id) for node_id in (1, 2)]
    async with running_proxy(*brokers, limits={"control_attempt_s": 1.0}) as proxy:
        client = await proxy.client()
        client.send(control_frame(api_keys.METADATA, 9, topics=[{"name": "t"}]))
        await eventually(lambda: any(broker.log for broker in brokers))
        hung, sound = sorted(brokers, key=lambda broker: -len(broker.log))
        sound.script = answer_about_the_cluster
        assert (await client.answer(api_keys.METADATA, 9)).message.topics[0].error_code == 0
        began = time.monotonic()
        for _ in range(3):
            assert (await metadata_of(client)).topics[0].error_code == 0
        assert time.monotonic() - began < 0.9
        assert len(hung.log) == 1


@both_loops
async def test_broker_leaving_during_a_request_is_skipped() -> None:
    brokers = {node_id: ScriptedUpstream(node_id) for node_id in (1, 2, 3)}
    async with running_proxy(*brokers.values()) as proxy:
        client = await proxy.client()
        client.send(control_frame(api_keys.DESCRIBE_CLUSTER, 0))
        await eventually(lambda: any(broker.log for broker in brokers.values()))
        asked = next(broker for broker in brokers.values() if broker.log)
        others = [broker for broker in brokers.values() if broker is not asked]
        for broker in others:
            broker.script = answer_about_the_cluster
        proxy.topology.remove_broker(others[0].node_id)
        asked.connections[0].abort()
        assert (await client.answer(api_keys.DESCRIBE_CLUSTER, 0)).message.error_code == 0


@both_loops
async def test_non_repeatable_request_goes_to_one_broker() -> None:
    first, second = ScriptedUpstream(1, closes), ScriptedUpstream(2, closes)
    async with running_proxy(first, second) as proxy:
        client = await proxy.client()
        client.send(control_frame(api_keys.CREATE_TOPICS, 5, topics=[], timeout_ms=1000))
        assert await client.is_closed()
        assert len(first.log) + len(second.log) == 1


@both_loops
async def test_unwritten_request_may_go_to_second_broker() -> None:
    first, second = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(first, second) as proxy:
        client = await proxy.client()
        await first.stop_listening()
        second.script = lambda asked: asked.answer_message(topics=[])
        client.send(control_frame(api_keys.CREATE_TOPICS, 5, correlation_id=3, topics=[], timeout_ms=1000))
        assert (await client.answer(api_keys.CREATE_TOPICS, 5)).correlation_id == 3


@both_loops
async def test_a_forwarded_answer_comes_back_byte_for_byte() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        client = await proxy.client()
        frame = control_frame(api_keys.INIT_PRODUCER_ID, 4, correlation_id=2**31 - 1, transaction_timeout_ms=9)
        client.send(frame)
        asked = await upstream.next()
        assert asked.frame[:8] + asked.frame[12:] == frame[:8] + frame[12:]
        reply = asked.message(error_code=0, producer_id=4711, producer_epoch=0)
        asked.connection.write(reply)
        came = await client.receive()
        assert came[4:8] == struct.pack(">i", 2**31 - 1)
        assert came[:4] + came[8:] == reply[:4] + reply[8:]


@both_loops
async def test_control_answers_keep_their_place_among_the_others() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(control_frame(api_keys.METADATA, 9, correlation_id=1, topics=None), produce_frame(correlation_id=2))
        asked = {each.header.api_key: each for each in [await upstream.next(), await upstream.next()]}
        asked[PRODUCE].answer()
        assert await client.is_silent()
        answer_about_the_cluster(asked[api_keys.METADATA])
        assert (await client.answer(api_keys.METADATA, 9)).correlation_id == 1
        assert (await client.answer()).correlation_id == 2


@both_loops
async def test_requests_of_leaving_client_are_dropped() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        client = await proxy.client()
        client.send(*(control_frame(api_keys.METADATA, 9, topics=None) for _ in range(5)))
        await upstream.next()
        client.abort()
        await upstream.connections[0].until_closed()
        await eventually(lambda: not proxy.listener._sessions)


@both_loops
async def test_moved_broker_is_asked_at_its_new_address() -> None:
    before, now = ScriptedUpstream(1, answer_about_the_cluster), ScriptedUpstream(1, answer_about_the_cluster)
    async with running_proxy(before) as proxy:
        client = await proxy.client()
        client.send(request_of(api_keys.METADATA, 9))
        await client.answer(api_keys.METADATA, 9)
        await now.start()
        proxy.topology.set_broker(1, now.address)
        client.send(request_of(api_keys.METADATA, 9))
        await client.answer(api_keys.METADATA, 9)
        asked = [
            len([each for each in broker.log if each.header.api_key == api_keys.METADATA]) for broker in (before, now)
        ]
        assert asked == [1, 1]
        await now.stop()


ALL_TOPICS = control_frame(api_keys.METADATA, 9, topics=None)


def answer_with_topics(asked: Asked, *names: str) -> None:
    topics = [{"error_code": 0, "name": name, "is_internal": False, "partitions": [PARTITION]} for name in names]
    asked.answer_message(brokers=[REAL_BROKER], controller_id=REAL_ID, cluster_id="c", topics=topics)


async def topics_told(client: RawClient) -> list[str]:
    answer = await client.answer(api_keys.METADATA, 9)
    assert answer.message is not None
    return [topic.name for topic in answer.message.topics]


@both_loops
async def test_concurrent_requests_for_all_topics_share_one() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        first, *others = [await proxy.client() for _ in range(4)]
        first.send(ALL_TOPICS)
        asked = await upstream.next()
        # Of what they have done before they ask the first question may know nothing.
        for client in others:
            client.send(ALL_TOPICS, ALL_TOPICS)
        assert await upstream.is_silent()
        answer_with_topics(asked, "old")
        assert await topics_told(first) == ["old"]
        answer_with_topics(await upstream.next(), "old", "new")
        for client in others:
            assert await topics_told(client) == ["old", "new"]
            assert await topics_told(client) == ["old", "new"]
        assert await upstream.is_silent()
        # Nothing is kept for who asks later.
        first.send(ALL_TOPICS)
        answer_with_topics(await upstream.next(), "old", "new", "newer")
        assert await topics_told(first) == ["old", "new", "newer"]


@both_loops
async def test_shared_request_is_repeated_when_its_asker_leaves() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        asking, *others = [await proxy.client() for _ in range(3)]
        asking.send(ALL_TOPICS)
        asked = await upstream.next()
        for client in others:
            client.send(ALL_TOPICS)
        assert await upstream.is_silent()
        asking.abort()
        await asked.connection.until_closed()
        answer_with_topics(await upstream.next(), "t")
        assert [await topics_told(client) for client in others] == [["t"], ["t"]]


@both_loops
async def test_other_requests_do_not_wait_for_all_topics() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        first, second = [await proxy.client() for _ in range(2)]
        first.send(ALL_TOPICS)
        all_topics = await upstream.next()
        second.send(request_of(api_keys.METADATA, 9))
        answer_with_topics(await upstream.next(), "t")
        assert await topics_told(second) == ["t"]
        second.send(control_frame(api_keys.METADATA, 12, topics=None))
        answer_with_topics(await upstream.next(), "t", "u")
        await second.receive()
        answer_with_topics(all_topics, "t")
        assert await topics_told(first) == ["t"]


@both_loops
async def test_requests_for_all_topics_are_answered_without_brokers() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        clients = [await proxy.client() for _ in range(3)]
        clients[0].send(ALL_TOPICS)
        asked = await upstream.next()
        for client in clients[1:]:
            client.send(ALL_TOPICS)
        assert await upstream.is_silent()
        await upstream.stop_listening()
        asked.connection.abort()
        assert [await topics_told(client) for client in clients] == [[], [], []]


@both_loops
async def test_pipelined_cluster_requests_are_answered_in_order() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        client, other = await proxy.client(), await proxy.client()
        requests = 200
        configs = {"resources": [{"resource_type": 2, "resource_name": "t", "configuration_keys": None}]}
        client.send(
            *(control_frame(api_keys.DESCRIBE_CONFIGS, 1, correlation_id=n, **configs) for n in range(requests))
        )
        waiting = [await upstream.next()]
        await upstream.is_silent()
        while not upstream.asked.empty():
            waiting.append(await upstream.next())
        assert 1 <= len(waiting) <= 16
        # They are the client's own, who keeps nobody else waiting.
        other.send(request_of(api_keys.METADATA, 9))
        answer_with_topics(await upstream.next(), "t")
        assert await topics_told(other) == ["t"]
        for n in range(requests):
            waiting.pop(0).answer_message(results=[])
            assert (await client.answer(api_keys.DESCRIBE_CONFIGS, 1)).correlation_id == n
            if len(waiting) + n + 1 < requests:
                waiting.append(await upstream.next())
        assert await upstream.is_silent()
