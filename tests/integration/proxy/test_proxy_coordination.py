"""Requests about transactional ids and groups reach their current coordinator."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from kproxy.proxy import coordinators
from kproxy.proxy.apis import KEY_TYPES, SERVED
from kproxy.proxy.coordinators import NO_TRANSACTIONS, Coordinators
from kproxy_codec import api_keys as keys
from kproxy_codec.control import decode_request
from kproxy_codec.coordination import GROUP, TRANSACTION
from tests.support.brokers.scripted_upstream import Asked, ScriptedUpstream
from tests.support.clients.raw_client import RawClient, control_frame, produce_frame
from tests.support.processes.running_proxy import IDENTITY, RunningProxy, both_loops, in_one_go
from tests.support.processes.running_proxy import running_among_strangers as running_proxy
from tests.support.waiting import eventually

NOT_AVAILABLE, NOT_COORDINATOR, NOT_AUTHORIZED, UNSUPPORTED = 15, 16, 53, 35
TOPICS = [{"name": "t", "partitions": [{"partition_index": 3, "committed_offset": 7, "committed_metadata": ""}]}]

# Every field that a request may need; those that a version lacks are not given to it.
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
}


COORDINATED = {key: KEY_TYPES[api.handling] for key, api in SERVED.items() if api.handling in KEY_TYPES}


def every_version(key: int) -> range:
    return range(SERVED[key].min_version, SERVED[key].max_version + 1)


def request_of(key: int, version: int, correlation_id: int = 6) -> bytes:
    return control_frame(key, version, correlation_id=correlation_id, **FIELDS[key])


class Cluster:
    """Brokers 1 to 3, and who of them coordinates which key; each answers what it is asked."""

    def __init__(self) -> None:
        self.coordinators: dict[tuple[int, str], int] = {(GROUP, "k"): 2, (TRANSACTION, "k"): 3}
        self.brokers = [ScriptedUpstream(node_id, self.script) for node_id in (1, 2, 3)]
        self.asked: list[tuple[int, str]] = []

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
        """The brokers that requests of this kind came to."""
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
    return [message.error_code]


async def codes(client: RawClient, key: int, version: int) -> list[int]:
    client.send(request_of(key, version))
    answer = await client.answer(key, version)
    assert answer.correlation_id == 6
    return codes_of(key, answer.message)


@pytest.mark.parametrize("key", COORDINATED)
@both_loops
async def test_every_version_of_request_goes_to_its_coordinator(key: int) -> None:
    cluster = Cluster()
    async with running_proxy(*cluster.brokers) as proxy:
        client = await proxy.client()
        key_type = COORDINATED[key]
        for times, version in enumerate([*every_version(key)] * 2, 1):
            await codes(client, key, version)
            assert cluster.got(key) == [2 if key_type == GROUP else 3] * times, f"version {version}"
        # Who it is is asked once.
        assert cluster.asked == [(key_type, "k")]


@pytest.mark.parametrize("key", COORDINATED)
@both_loops
async def test_missing_coordinator_gets_retriable_error_in_all_versions(key: int) -> None:
    cluster = Cluster()
    cluster.coordinators.clear()
    async with running_proxy(*cluster.brokers) as proxy:
        client = await proxy.client()
        for version in every_version(key):
            assert await codes(client, key, version) == [NOT_AVAILABLE], f"version {version}"
        assert cluster.got(key) == []


@pytest.mark.parametrize("key", COORDINATED)
@both_loops
async def test_lost_coordinator_is_looked_up_again(key: int) -> None:
    cluster = Cluster()
    cluster.coordinated = lambda asked: asked.connection.abort()
    version = SERVED[key].max_version
    async with running_proxy(*cluster.brokers) as proxy:
        client = await proxy.client()
        assert await codes(client, key, version) == [NOT_COORDINATOR]
        cluster.coordinators[COORDINATED[key], "k"] = 1
        del cluster.coordinated
        assert await codes(client, key, version) != [NOT_COORDINATOR]
        assert cluster.got(key)[0] == 1


@both_loops
async def test_client_lookup_in_any_version_corrects_the_cache() -> None:
    """NOT_COORDINATOR is handed on; upon it clients ask FindCoordinator, and that is what the proxy learns from."""
    cluster = Cluster()
    async with running_proxy(*cluster.brokers) as proxy:
        client, other = await proxy.client(), await proxy.client()
        for version in every_version(keys.FIND_COORDINATOR):
            for broker in cluster.brokers:
                broker.log.clear()
            cluster.coordinated = lambda asked: asked.answer_message(error_code=NOT_COORDINATOR)
            assert await codes(client, keys.HEARTBEAT, 4) == [NOT_COORDINATOR]
            before = cluster.coordinators[GROUP, "k"]
            now = cluster.coordinators[GROUP, "k"] = 3 - before
            del cluster.coordinated
            asked: dict[str, Any] = {"key": "k"} if version < 4 else {"coordinator_keys": ["other", "k"]}
            client.send(control_frame(keys.FIND_COORDINATOR, version, **asked))
            answer = await client.answer(keys.FIND_COORDINATOR, version)
            assert b"secret" not in answer.frame
            assert IDENTITY.host.encode() in answer.frame
            for each in (client, other):
                assert await codes(each, keys.HEARTBEAT, 4) == [0]
            assert sorted(cluster.got(keys.HEARTBEAT)) == sorted([before, now, now]), f"version {version}"


@both_loops
async def test_failed_client_lookup_clears_the_cache() -> None:
    cluster = Cluster()
    async with running_proxy(*cluster.brokers) as proxy:
        client = await proxy.client()
        assert await codes(client, keys.HEARTBEAT, 4) == [0]
        cluster.coordinators.clear()
        client.send(control_frame(keys.FIND_COORDINATOR, 3, key="k"))
        assert (await client.answer(keys.FIND_COORDINATOR, 3)).message.error_code == NOT_AVAILABLE
        assert await codes(client, keys.HEARTBEAT, 4) == [NOT_AVAILABLE]
        assert cluster.got(keys.HEARTBEAT) == [2]


@both_loops
async def test_departed_coordinator_is_looked_up_again() -> None:
    cluster = Cluster()
    async with running_proxy(*cluster.brokers) as proxy:
        client = await proxy.client()
        await codes(client, keys.HEARTBEAT, 4)
        proxy.topology.remove_broker(2)
        cluster.coordinators[GROUP, "k"] = 3
        assert await codes(client, keys.HEARTBEAT, 4) == [0]
        assert cluster.got(keys.HEARTBEAT) == [2, 3]


@both_loops
@in_one_go
async def test_hung_coordinator_is_given_up_after_timeout() -> None:
    cluster = Cluster()
    cluster.coordinated = lambda asked: None
    async with running_proxy(*cluster.brokers, limits={"control_timeout_s": 0.3}) as proxy:
        client = await proxy.client()
        assert await codes(client, keys.HEARTBEAT, 4) == [NOT_COORDINATOR]


@both_loops
async def test_connections_to_coordinators_are_counted() -> None:
    cluster = Cluster()
    async with running_proxy(*cluster.brokers) as proxy:
        client = await proxy.client()
        await codes(client, keys.HEARTBEAT, 4)
        # One to whoever said who coordinates, one to the coordinator.
        assert proxy.vitals.upstream_connections == 2


@both_loops
@in_one_go
async def test_group_members_may_wait_longer_than_broker_timeout() -> None:
    cluster = Cluster()
    cluster.coordinated = lambda asked: None
    async with running_proxy(*cluster.brokers, limits={"control_timeout_s": 0.2}) as proxy:
        client = await proxy.client()
        client.send(request_of(keys.JOIN_GROUP, 5))
        await eventually(lambda: cluster.got(keys.JOIN_GROUP))
        assert await client.is_silent(0.5)
        cluster.brokers[1].log[-1].answer_message(member_id="m")
        assert (await client.receive())[4:8] == b"\0\0\0\6"


@both_loops
@in_one_go
async def test_group_members_do_not_wait_for_hung_coordinator() -> None:
    cluster = Cluster()
    cluster.coordinated = lambda asked: None
    cluster.brokers[1].answers_probes = False
    async with running_proxy(*cluster.brokers, limits={"probe_timeout_s": 0.2}) as proxy:
        proxy.own(2)
        client, other = await proxy.client(), await proxy.client()
        client.send(request_of(keys.JOIN_GROUP, 5))
        await eventually(lambda: cluster.got(keys.JOIN_GROUP))
        # That a broker hangs is noticed of what it is to write.
        other.send(produce_frame())
        assert (await client.answer(keys.JOIN_GROUP, 5)).message.error_code == NOT_COORDINATOR


@both_loops
async def test_requests_of_one_group_keep_their_order() -> None:
    cluster = Cluster()
    async with running_proxy(*cluster.brokers) as proxy:
        client = await proxy.client()
        client.send(*(request_of(keys.OFFSET_COMMIT, 7, correlation_id=number) for number in range(50)))
        for number in range(50):
            assert (await client.answer(keys.OFFSET_COMMIT, 7)).correlation_id == number
        assert cluster.got(keys.OFFSET_COMMIT) == [2] * 50
        # The proxy's own correlation ids count the requests of a connection.
        came = [each.header.correlation_id for each in cluster.brokers[1].log if each.header.api_key != 10]
        assert came == sorted(came)


@both_loops
async def test_group_request_does_not_wait_for_another() -> None:
    """Brokers answer a connection's requests one after another: a JoinGroup must not hold up a Metadata."""
    cluster = Cluster()
    cluster.coordinated = lambda asked: None
    async with running_proxy(cluster.brokers[1]) as proxy:
        client = await proxy.client()
        client.send(request_of(keys.JOIN_GROUP, 5), control_frame(keys.DESCRIBE_CLUSTER, 0))
        await eventually(lambda: cluster.got(keys.JOIN_GROUP) and cluster.got(keys.DESCRIBE_CLUSTER))
        joined, described = (
            next(each.connection for each in cluster.brokers[1].log if each.header.api_key == key)
            for key in (keys.JOIN_GROUP, keys.DESCRIBE_CLUSTER)
        )
        assert joined is not described


@pytest.mark.parametrize("transactional_id", [None, ""])
@both_loops
async def test_a_producer_without_transactions_needs_no_coordinator(transactional_id: str | None) -> None:
    cluster = Cluster()
    async with running_proxy(*cluster.brokers) as proxy:
        client = await proxy.client()
        client.send(control_frame(keys.INIT_PRODUCER_ID, 4, transactional_id=transactional_id))
        assert (await client.answer(keys.INIT_PRODUCER_ID, 4)).message.error_code == 0
        assert cluster.asked == []


@both_loops
async def test_committed_offsets_hide_leader_epoch_in_all_versions() -> None:
    def commits(asked: Asked) -> None:
        epochs = {"committed_leader_epoch": 9} if asked.header.api_version >= 5 else {}
        partition = {"partition_index": 3, "committed_offset": 70, "metadata": "m", "error_code": 0, **epochs}
        asked.answer_message(topics=[{"name": "t", "partitions": [partition]}])

    cluster = Cluster()
    cluster.coordinated = commits
    async with running_proxy(*cluster.brokers) as proxy:
        client = await proxy.client()
        for version in every_version(keys.OFFSET_FETCH):
            client.send(request_of(keys.OFFSET_FETCH, version))
            answer = (await client.answer(keys.OFFSET_FETCH, version)).message.topics[0].partitions[0]
            assert (answer.partition_index, answer.committed_offset, answer.metadata) == (3, 70, "m")
            assert version < 5 or answer.committed_leader_epoch == -1, f"version {version}"


# Brokers that keep no transactions


async def without_transactions(proxy: RunningProxy) -> RawClient:
    client = await proxy.client()
    client.send(control_frame(keys.API_VERSIONS, 0))
    offered = {each.api_key for each in (await client.answer(keys.API_VERSIONS, 0)).message.api_keys}
    assert keys.END_TXN not in offered
    return client


def keeps_none() -> Cluster:
    """Everything is served but transactions."""
    cluster = Cluster()
    served = [key for key in SERVED if key not in COORDINATED]
    listed = [{"api_key": key, "min_version": 0, "max_version": 99} for key in [*served, keys.INIT_PRODUCER_ID]]

    def script(asked: Asked) -> None:
        if asked.header.api_key == keys.API_VERSIONS:
            asked.answer_message(api_keys=listed)
        else:
            Cluster.script(cluster, asked)

    for broker in cluster.brokers:
        broker.script = script
    return cluster


@both_loops
async def test_unsupported_transactions_have_no_coordinator() -> None:
    cluster = keeps_none()
    async with running_proxy(*cluster.brokers) as proxy:
        client = await without_transactions(proxy)
        versions = every_version(keys.FIND_COORDINATOR)
        for version, key_type in [(0, GROUP), *product(versions[1:], (GROUP, TRANSACTION))]:
            asked: dict[str, Any] = {"key": "k"} if version < 4 else {"coordinator_keys": ["k"]}
            key_types = {"key_type": key_type} if version > 0 else {}
            client.send(control_frame(keys.FIND_COORDINATOR, version, **key_types, **asked))
            message = (await client.answer(keys.FIND_COORDINATOR, version)).message
            found = message.coordinators[0] if version >= 4 else message
            if key_type == GROUP:
                assert found.error_code == 0
            else:
                # librdkafka ends at the one, Java shows the text of the other.
                assert found.error_code == (NOT_AUTHORIZED if version < 4 else UNSUPPORTED)
                assert found.error_message == NO_TRANSACTIONS
                assert found.node_id == -1
        assert (TRANSACTION, "k") not in cluster.asked


@both_loops
async def test_unsupported_transactional_id_is_not_initialised() -> None:
    cluster = keeps_none()
    async with running_proxy(*cluster.brokers) as proxy:
        client = await without_transactions(proxy)
        for version in every_version(keys.INIT_PRODUCER_ID):
            assert await codes(client, keys.INIT_PRODUCER_ID, version) == [NOT_AUTHORIZED], f"version {version}"
            client.send(control_frame(keys.INIT_PRODUCER_ID, version, transactional_id=None))
            assert (await client.answer(keys.INIT_PRODUCER_ID, version)).message.error_code == 0


# What is remembered


def test_least_recently_used_entry_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinators, "MAX_REMEMBERED", 3)
    known = Coordinators()
    for broker, key in enumerate("abc"):
        known.remember(GROUP, key, broker)
    assert known.get(GROUP, "a") == 0
    known.remember(GROUP, "d", 3)
    assert [known.get(GROUP, key) for key in "abcd"] == [0, None, 2, 3]


def test_long_keys_are_not_remembered() -> None:
    known = Coordinators()
    known.remember(GROUP, "k" * 1001, 1)
    assert known.get(GROUP, "k" * 1001) is None


def test_groups_and_transactional_ids_of_one_name_differ() -> None:
    known = Coordinators()
    known.remember(GROUP, "k", 1)
    known.remember(TRANSACTION, "k", 2)
    assert (known.get(GROUP, "k"), known.get(TRANSACTION, "k")) == (1, 2)
