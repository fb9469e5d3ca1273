"""Requests about transactional ids and groups reach their current coordinator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from uuid import UUID

import pytest

from kproxy.proxy import coordinators
from kproxy.proxy.apis import REQUEST_KEY_TYPES, SERVED
from kproxy.proxy.coordinators import NO_TRANSACTIONS, Coordinators
from kproxy_codec import api_keys as keys
from kproxy_codec.control import decode_request
from kproxy_codec.coordination import GROUP, TRANSACTION
from tests.support.brokers.scripted_upstream import Asked
from tests.support.clients.raw_client import RawClient, control_frame, produce_frame
from tests.support.processes.running_proxy import IDENTITY
from tests.support.scene import HOLDS, Scene, scene
from tests.support.waiting import eventually

NOT_AVAILABLE, NOT_COORDINATOR, NOT_AUTHORIZED, UNSUPPORTED = 15, 16, 53, 35
TOPICS = [{"name": "t", "partitions": [{"partition_index": 3, "committed_offset": 7, "committed_metadata": ""}]}]

# All fields that a request may need; a version gets only its own.
FIELDS: dict[int, dict[str, Any]] = {
    keys.INIT_PRODUCER_ID: {"transactional_id": "k"},
    keys.ADD_PARTITIONS_TO_TXN: {
        "v3_and_below_transactional_id": "k",
        "v3_and_below_topics": [{"name": "t", "partitions": [3]}],
    },
    keys.ADD_OFFSETS_TO_TXN: {"transactional_id": "k", "group_id": "g"},
    keys.END_TXN: {"transactional_id": "k", "committed": True},
    keys.TXN_OFFSET_COMMIT: {"transactional_id": "not this", "group_id": "k", "topics": TOPICS},
    keys.OFFSET_COMMIT: {"group_id": "k", "topics": TOPICS},
    keys.OFFSET_FETCH: {"group_id": "k", "topics": [{"name": "t", "partition_indexes": [3]}]},
    keys.JOIN_GROUP: {"group_id": "k", "protocol_type": "consumer"},
    keys.HEARTBEAT: {"group_id": "k"},
    keys.LEAVE_GROUP: {"group_id": "k"},
    keys.SYNC_GROUP: {"group_id": "k"},
    keys.OFFSET_DELETE: {"group_id": "k", "topics": [{"name": "t", "partitions": [{"partition_index": 3}]}]},
    keys.CONSUMER_GROUP_HEARTBEAT: {"group_id": "k"},
}


COORDINATED = {
    key: REQUEST_KEY_TYPES[each.handling] for key, each in SERVED.items() if each.handling in REQUEST_KEY_TYPES
}


def every_version(key: int) -> range:
    return range(SERVED[key].min_version, SERVED[key].max_version + 1)


def request_of(key: int, version: int, correlation_id: int = 6) -> bytes:
    fields = FIELDS[key]
    if (key, version) == (keys.OFFSET_COMMIT, 10):
        fields = {**fields, "topics": [{"topic_id": UUID(int=7), "partitions": TOPICS[0]["partitions"]}]}
    if key == keys.OFFSET_FETCH and version >= 8:
        fields = {"groups": [{**fields, "topics": fields["topics"] if version < 10 else None}]}
    return control_frame(key, version, correlation_id=correlation_id, **fields)


three = partial(scene, HOLDS, HOLDS, HOLDS, owners=(), introduced=False)


class Cluster:
    """Brokers 1 to 3 of a scene, with the coordinator of each key; each answers its requests."""

    def __init__(self, s: Scene) -> None:
        self.coordinators: dict[tuple[int, str], int] = {(GROUP, "k"): 2, (TRANSACTION, "k"): 3}
        self.brokers = s.brokers
        self.asked: list[tuple[int, str]] = []
        for broker in s.brokers:
            broker.script = self.script

    def script(self, asked: Asked) -> None:
        if asked.header.api_key == keys.FIND_COORDINATOR:
            self._find(asked)
        elif asked.header.api_key != keys.API_VERSIONS:
            self.coordinated(asked)

    def _find(self, asked: Asked) -> None:
        version = asked.header.api_version
        request = decode_request(keys.FIND_COORDINATOR, version, asked.body)
        key_type = request.key_type if version >= 1 else GROUP
        found = []
        for key in request.coordinator_keys if version >= 4 else [request.key]:
            self.asked.append((key_type, key))
            broker = self.coordinators.get((key_type, key))
            answer: dict[str, Any] = {"node_id": broker, "host": "secret", "port": 1, "error_code": 0}
            found.append(answer if broker else {"error_code": NOT_AVAILABLE, "node_id": -1, "host": "", "port": -1})
            if version >= 4:
                found[-1]["key"] = key
        asked.answer_message(**({"coordinators": found} if version >= 4 else found[0]))

    coordinated: Callable[[Asked], None] = staticmethod(lambda asked: asked.answer_message())

    def got(self, key: int) -> list[int]:
        """The brokers that received requests of this kind."""
        return [broker.node_id for broker in self.brokers for each in broker.log if each.header.api_key == key]


def codes_of(key: int, message: Any) -> list[int]:
    if key == keys.ADD_PARTITIONS_TO_TXN:
        return [
            each.partition_error_code
            for topic in message.results_by_topic_v3_and_below
            for each in topic.results_by_partition
        ]
    if key in (keys.TXN_OFFSET_COMMIT, keys.OFFSET_COMMIT) or (key == keys.OFFSET_FETCH and message.version < 2):
        return [each.error_code for topic in message.topics for each in topic.partitions]
    if key == keys.OFFSET_FETCH and message.version >= 8:
        return [group.error_code for group in message.groups]
    return [message.error_code]


async def codes(client: RawClient, key: int, version: int) -> list[int]:
    client.send(request_of(key, version))
    answer = await client.answer(key, version)
    assert answer.correlation_id == 6
    return codes_of(key, answer.message)


async def beats(s: Scene) -> list[int]:
    return await codes(s.client, keys.HEARTBEAT, 4)


@pytest.mark.parametrize("key", COORDINATED)
@three()
async def test_every_version_of_request_goes_to_its_coordinator(s: Scene, key: int) -> None:
    cluster, key_type = Cluster(s), COORDINATED[key]
    for times, version in enumerate([*every_version(key)] * 2, 1):
        await codes(s.client, key, version)
        assert cluster.got(key) == [2 if key_type == GROUP else 3] * times, f"version {version}"
    # The coordinator is looked up once.
    assert cluster.asked == [(key_type, "k")]


@three()
async def test_missing_coordinator_gets_retriable_error_in_all_versions(s: Scene) -> None:
    cluster = Cluster(s)
    cluster.coordinators.clear()
    for key in COORDINATED:
        for version in every_version(key):
            assert await codes(s.client, key, version) == [NOT_AVAILABLE], f"{key}, version {version}"
        assert cluster.got(key) == []


@pytest.mark.parametrize("key", COORDINATED)
@three()
async def test_lost_coordinator_is_looked_up_again(s: Scene, key: int) -> None:
    cluster, version = Cluster(s), SERVED[key].max_version
    cluster.coordinated = lambda asked: asked.connection.abort()
    assert await codes(s.client, key, version) == [NOT_COORDINATOR]
    cluster.coordinators[COORDINATED[key], "k"] = 1
    del cluster.coordinated
    assert await codes(s.client, key, version) != [NOT_COORDINATOR]
    assert cluster.got(key)[0] == 1


def asks_for_k(version: int, *others: str) -> dict[str, Any]:
    return {"key": "k"} if version < 4 else {"coordinator_keys": [*others, "k"]}


@three(clients=2)
async def test_client_lookup_in_any_version_corrects_the_cache(s: Scene) -> None:
    """NOT_COORDINATOR is passed on; clients then send FindCoordinator, from which the proxy learns."""
    cluster = Cluster(s)
    for version in every_version(keys.FIND_COORDINATOR):
        for broker in cluster.brokers:
            broker.log.clear()
        cluster.coordinated = lambda asked: asked.answer_message(error_code=NOT_COORDINATOR)
        assert await beats(s) == [NOT_COORDINATOR]
        before = cluster.coordinators[GROUP, "k"]
        now = cluster.coordinators[GROUP, "k"] = 3 - before
        del cluster.coordinated
        s.send(control_frame(keys.FIND_COORDINATOR, version, **asks_for_k(version, "other")))
        answer = await s.answer(keys.FIND_COORDINATOR, version)
        assert b"secret" not in answer.frame
        assert IDENTITY.host.encode() in answer.frame
        for each in s.clients:
            assert await codes(each, keys.HEARTBEAT, 4) == [0]
        assert sorted(cluster.got(keys.HEARTBEAT)) == sorted([before, now, now]), f"version {version}"


@three()
async def test_failed_client_lookup_clears_the_cache(s: Scene) -> None:
    cluster = Cluster(s)
    assert await beats(s) == [0]
    # One connection for the lookup, one to the coordinator.
    assert s.proxy.vitals.upstream_connections.total() == 2
    cluster.coordinators.clear()
    s.send(control_frame(keys.FIND_COORDINATOR, 3, key="k"))
    assert (await s.answer(keys.FIND_COORDINATOR, 3)).message.error_code == NOT_AVAILABLE
    assert await beats(s) == [NOT_AVAILABLE]
    assert cluster.got(keys.HEARTBEAT) == [2]


@three()
async def test_departed_coordinator_is_looked_up_again(s: Scene) -> None:
    cluster = Cluster(s)
    assert await beats(s) == [0]
    s.proxy.topology.remove_broker(2)
    cluster.coordinators[GROUP, "k"] = 3
    assert await beats(s) == [0]
    assert cluster.got(keys.HEARTBEAT) == [2, 3]


@three(limits={"control_timeout_s": 0.3}, one_go=True)
async def test_hung_coordinator_is_given_up_after_timeout(s: Scene) -> None:
    """Members of a group may wait for each other for longer."""
    cluster = Cluster(s)
    cluster.coordinated = lambda asked: None
    assert await beats(s) == [NOT_COORDINATOR]
    s.send(request_of(keys.JOIN_GROUP, 5))
    await eventually(lambda: cluster.got(keys.JOIN_GROUP))
    assert await s.still(0.6)
    cluster.brokers[1].log[-1].answer_message(member_id="m")
    assert (await s.client.receive())[4:8] == b"\0\0\0\6"


@three(clients=2, limits={"probe_timeout_s": 0.2}, one_go=True)
async def test_group_members_do_not_wait_for_hung_coordinator(s: Scene) -> None:
    cluster = Cluster(s)
    cluster.coordinated = lambda asked: None
    cluster.brokers[1].answers_probes = False
    s.proxy.own(2)
    s.send(request_of(keys.JOIN_GROUP, 5))
    await eventually(lambda: cluster.got(keys.JOIN_GROUP))
    # A hang is noticed by its unanswered writes.
    s.clients[1].send(produce_frame())
    assert (await s.answer(keys.JOIN_GROUP, 5)).message.error_code == NOT_COORDINATOR


@three()
async def test_requests_of_one_group_keep_their_order(s: Scene) -> None:
    cluster = Cluster(s)
    s.send(*(request_of(keys.OFFSET_COMMIT, 7, correlation_id=number) for number in range(50)))
    for number in range(50):
        assert (await s.answer(keys.OFFSET_COMMIT, 7)).correlation_id == number
    assert cluster.got(keys.OFFSET_COMMIT) == [2] * 50
    # The proxy's own correlation ids count the requests of a connection.
    came = [each.header.correlation_id for each in cluster.brokers[1].log if each.header.api_key != 10]
    assert came == sorted(came)


@scene(HOLDS, ids=[2], owners=(), introduced=False)
async def test_group_request_does_not_wait_for_another(s: Scene) -> None:
    """Brokers answer a connection's requests in order: a JoinGroup must not delay a Metadata."""
    cluster = Cluster(s)
    cluster.coordinated = lambda asked: None
    s.send(request_of(keys.JOIN_GROUP, 5), control_frame(keys.DESCRIBE_CLUSTER, 0))
    await eventually(lambda: cluster.got(keys.JOIN_GROUP) and cluster.got(keys.DESCRIBE_CLUSTER))
    wanted = (keys.JOIN_GROUP, keys.DESCRIBE_CLUSTER)
    joined, described = (each.connection for each in s.broker.log if each.header.api_key in wanted)
    assert joined is not described


@pytest.mark.parametrize("transactional_id", [None, ""])
@three()
async def test_producer_without_transactions_needs_no_coordinator(s: Scene, transactional_id: str | None) -> None:
    cluster = Cluster(s)
    s.send(control_frame(keys.INIT_PRODUCER_ID, 4, transactional_id=transactional_id))
    assert (await s.answer(keys.INIT_PRODUCER_ID, 4)).message.error_code == 0
    assert cluster.asked == []


@three()
async def test_committed_offsets_hide_leader_epoch_in_all_versions(s: Scene) -> None:
    def commits(asked: Asked) -> None:
        epochs = {"committed_leader_epoch": 9} if asked.header.api_version >= 5 else {}
        partition = {"partition_index": 3, "committed_offset": 70, "metadata": "m", "error_code": 0, **epochs}
        named = {"topic_id": UUID(int=7)} if asked.header.api_version >= 10 else {"name": "t"}
        group = {"topics": [{**named, "partitions": [partition]}]}
        asked.answer_message(**({"groups": [{"group_id": "k", **group}]} if asked.header.api_version >= 8 else group))

    Cluster(s).coordinated = commits
    for version in every_version(keys.OFFSET_FETCH):
        s.send(request_of(keys.OFFSET_FETCH, version))
        message = (await s.answer(keys.OFFSET_FETCH, version)).message
        answer = (message.groups[0] if version >= 8 else message).topics[0].partitions[0]
        assert (answer.partition_index, answer.committed_offset, answer.metadata) == (3, 70, "m")
        assert version < 5 or answer.committed_leader_epoch == -1, f"version {version}"


@pytest.mark.parametrize("key", [keys.OFFSET_COMMIT, keys.TXN_OFFSET_COMMIT])
@three()
async def test_commits_carry_no_leader_epoch_to_brokers(s: Scene, key: int) -> None:
    cluster = Cluster(s)
    partitions = [{"partition_index": 3, "committed_offset": 7, "committed_leader_epoch": 4, "committed_metadata": ""}]
    for version in every_version(key):
        named = {"topic_id": UUID(int=7)} if (key, version) == (keys.OFFSET_COMMIT, 10) else {"name": "t"}
        fields = {**FIELDS[key], "topics": [{**named, "partitions": partitions}]}
        s.send(control_frame(key, version, correlation_id=6, **fields))
        await s.answer(key, version)
        came = decode_request(key, version, cluster.brokers[1].log[-1].body).topics[0].partitions[0]
        assert came.committed_offset == 7
        assert getattr(came, "committed_leader_epoch", -1) == -1, f"version {version}"


@pytest.mark.parametrize("version", [8, 9, 10])
@three()
async def test_each_group_goes_to_its_own_coordinator(s: Scene, version: int) -> None:
    def commits(asked: Asked) -> None:
        groups = decode_request(keys.OFFSET_FETCH, version, asked.body).groups
        partition = {"partition_index": 3, "committed_offset": 70, "committed_leader_epoch": 9, "metadata": ""}
        topic = {
            "topic_id" if version >= 10 else "name": UUID(int=7) if version >= 10 else "t",
            "partitions": [partition],
        }
        asked.answer_message(
            throttle_time_ms=len(groups),
            groups=[{"group_id": each.group_id, "error_code": 0, "topics": [topic]} for each in groups],
        )

    cluster = Cluster(s)
    cluster.coordinated = commits
    names = [f"g{number}" for number in range(300)]
    cluster.coordinators = {(GROUP, name): 1 + number % 3 for number, name in enumerate(names[:-1])}
    s.send(control_frame(keys.OFFSET_FETCH, version, groups=[{"group_id": name, "topics": None} for name in names]))
    message = (await s.answer(keys.OFFSET_FETCH, version)).message
    assert [(each.group_id, each.error_code) for each in message.groups] == [
        *((name, 0) for name in names[:-1]),
        (names[-1], NOT_AVAILABLE),
    ]
    epochs = {each.topics[0].partitions[0].committed_leader_epoch for each in message.groups[:-1]}
    assert (epochs, message.throttle_time_ms) == ({-1}, 100)
    assert sorted(cluster.got(keys.OFFSET_FETCH)) == [1, 2, 3]
    assert len(cluster.got(keys.FIND_COORDINATOR)) == 2, "not one request for some hundred groups"
    twice = [{"group_id": "g1", "topics": topics} for topics in (None, [])]
    s.send(control_frame(keys.OFFSET_FETCH, version, groups=twice))
    assert [each.group_id for each in (await s.answer(keys.OFFSET_FETCH, version)).message.groups] == ["g1", "g1"]
    s.send(control_frame(keys.OFFSET_FETCH, version, groups=[]))
    assert (await s.answer(keys.OFFSET_FETCH, version)).message.groups == []


@three()
async def test_empty_group_has_a_coordinator(s: Scene) -> None:
    """Kafka keeps its offsets, as those of any group."""
    cluster = Cluster(s)
    cluster.coordinators[GROUP, ""] = 3
    for key, version in ((keys.OFFSET_COMMIT, 8), (keys.OFFSET_FETCH, 7), (keys.HEARTBEAT, 4)):
        s.send(control_frame(key, version, **{**FIELDS[key], "group_id": ""}))
        await s.answer(key, version)
        assert cluster.got(key) == [3]


@three()
async def test_brokers_without_transactions_coordinate_only_groups(s: Scene) -> None:
    """Transactional ids have no coordinator, and are not initialised."""
    cluster = Cluster(s)
    served = [key for key in SERVED if key not in COORDINATED]
    listed = [{"api_key": key, "min_version": 0, "max_version": 99} for key in [*served, keys.INIT_PRODUCER_ID]]

    def script(asked: Asked) -> None:
        if asked.header.api_key == keys.API_VERSIONS:
            asked.answer_message(api_keys=listed)
        else:
            cluster.script(asked)

    for broker in cluster.brokers:
        broker.script = script
    s.send(control_frame(keys.API_VERSIONS, 0))
    assert keys.END_TXN not in [each.api_key for each in (await s.answer(keys.API_VERSIONS, 0)).message.api_keys]
    versions = every_version(keys.FIND_COORDINATOR)
    for version, key_type in [(0, GROUP), *product(versions[1:], (GROUP, TRANSACTION))]:
        key_types = {"key_type": key_type} if version > 0 else {}
        s.send(control_frame(keys.FIND_COORDINATOR, version, **key_types, **asks_for_k(version)))
        message = (await s.answer(keys.FIND_COORDINATOR, version)).message
        found = message.coordinators[0] if version >= 4 else message
        if key_type == GROUP:
            assert found.error_code == 0
        else:
            # librdkafka gives up at the first code, Java shows the text of the second.
            assert found.error_code == (NOT_AUTHORIZED if version < 4 else UNSUPPORTED)
            assert (found.error_message, found.node_id) == (NO_TRANSACTIONS, -1)
    assert (TRANSACTION, "k") not in cluster.asked
    for version in every_version(keys.INIT_PRODUCER_ID):
        assert await codes(s.client, keys.INIT_PRODUCER_ID, version) == [NOT_AUTHORIZED], f"version {version}"
        s.send(control_frame(keys.INIT_PRODUCER_ID, version, transactional_id=None))
        assert (await s.answer(keys.INIT_PRODUCER_ID, version)).message.error_code == 0


# Remembered coordinators


def test_least_recently_used_entry_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinators, "MAX_REMEMBERED", 3)
    known = Coordinators()
    for broker, key in enumerate("abc"):
        known.remember(GROUP, key, broker)
    assert known.get(GROUP, "a") == 0
    known.remember(GROUP, "d", 3)
    assert [known.get(GROUP, key) for key in "abcd"] == [0, None, 2, 3]


def test_long_keys_are_not_remembered_and_kinds_differ() -> None:
    known = Coordinators()
    known.remember(GROUP, "k" * 1001, 1)
    assert known.get(GROUP, "k" * 1001) is None
    known.remember(GROUP, "k", 1)
    known.remember(TRANSACTION, "k", 2)
    assert (known.get(GROUP, "k"), known.get(TRANSACTION, "k")) == (1, 2)
