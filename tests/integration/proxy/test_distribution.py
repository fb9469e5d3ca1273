"""Requests are divided among brokers, and a broker that does not answer is an error in the merged answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kproxy_codec import api_keys as keys
from kproxy_codec import error_codes
from kproxy_codec.control import decode_request
from kproxy_codec.coordination import GROUP
from tests.integration.proxy.test_proxy_coordination import Cluster
from tests.support.brokers.scripted_upstream import Asked
from tests.support.clients.raw_client import control_frame
from tests.support.scene import HOLDS, Scene, scene

NOT_AVAILABLE, NOT_COORDINATOR, NOT_LEADER = 15, 16, 6
UNKNOWN_TOPIC, TIMED_OUT, INVALID_REQUEST, INVALID_REPLICAS = 3, 7, 42, 39
BROKER, TOPIC = 4, 2

three = partial(
    scene, HOLDS, HOLDS, HOLDS, introduced=False, limits={"control_attempt_s": 0.5, "control_timeout_s": 2.0}
)


class Brokers(Cluster):
    """Brokers 1 to 3: each answers with what it is asked for, and lists the groups that it coordinates."""

    def __init__(self, s: Scene) -> None:
        super().__init__(s)
        self.coordinators = {(GROUP, f"g{number}"): number % 3 + 1 for number in range(6)}
        self.coordinated = self.answer
        self.silent: set[int] = set()
        self.codes: dict[int, int] = {}

    def answer(self, asked: Asked) -> None:
        node_id, header = asked.connection.upstream.node_id, asked.header
        if node_id in self.silent:
            return
        request = decode_request(header.api_key, header.api_version, asked.body)
        asked.answer_message(**self.answers[header.api_key](node_id, self.codes.get(node_id, 0), request))

    @property
    def answers(self) -> dict[int, Callable[[int, int, Any], dict[str, Any]]]:
        return {
            keys.LIST_GROUPS: self.list_groups,
            keys.DESCRIBE_GROUPS: lambda node_id, code, request: {
                "groups": [{"group_id": group, "error_code": code} for group in request.groups]
            },
            keys.DELETE_RECORDS: lambda node_id, code, request: {
                "topics": [
                    {
                        "name": topic.name,
                        "partitions": [
                            {"partition_index": each.partition_index, "low_watermark": node_id, "error_code": code}
                            for each in topic.partitions
                        ],
                    }
                    for topic in request.topics
                ]
            },
            keys.INCREMENTAL_ALTER_CONFIGS: lambda node_id, code, request: {
                "responses": [
                    {"resource_type": each.resource_type, "resource_name": each.resource_name, "error_code": code}
                    for each in request.resources
                ]
            },
            keys.DESCRIBE_CONFIGS: lambda node_id, code, request: {
                "results": [
                    {
                        "resource_type": each.resource_type,
                        "resource_name": each.resource_name,
                        "error_code": 0 if each.resource_name in ("t", str(node_id)) else INVALID_REQUEST,
                    }
                    for each in request.resources
                ]
            },
            keys.DESCRIBE_LOG_DIRS: lambda node_id, code, request: {
                "results": [{"log_dir": "/data", "error_code": code}]
            },
            keys.CREATE_TOPICS: lambda node_id, code, request: {
                "topics": [{"name": each.name, "error_code": code} for each in request.topics]
            },
        }

    def list_groups(self, node_id: int, code: int, request: Any) -> dict[str, Any]:
        theirs = [key for (_, key), broker in self.coordinators.items() if broker == node_id]
        return {"error_code": code, "groups": [{"group_id": each, "protocol_type": "consumer"} for each in theirs]}


async def ask(s: Scene, key: int, version: int, **fields: Any) -> Any:
    s.send(control_frame(key, version, **fields))
    return (await s.client.answer(key, version)).message


GROUPS = [f"g{number}" for number in range(6)]


@three()
async def test_groups_of_all_brokers_are_merged(s: Scene) -> None:
    cluster = Brokers(s)
    for version in range(6):
        answer = await ask(s, keys.LIST_GROUPS, version)
        assert (answer.error_code, sorted(each.group_id for each in answer.groups)) == (0, GROUPS)
    assert cluster.got(keys.LIST_GROUPS) == [1] * 6 + [2] * 6 + [3] * 6


@pytest.mark.parametrize("trouble", ["silent", "down", "error"])
@three()
async def test_list_tells_of_a_broker_in_trouble(s: Scene, trouble: str) -> None:
    cluster = Brokers(s)
    if trouble == "silent":
        cluster.silent.add(2)
    elif trouble == "down":
        await s.brokers[1].stop()
    else:
        cluster.codes[2] = NOT_AVAILABLE
    answer = await ask(s, keys.LIST_GROUPS, 4)
    listed = [each.group_id for each in answer.groups if cluster.coordinators[GROUP, each.group_id] != 2]
    assert (answer.error_code, sorted(listed)) == (NOT_AVAILABLE, ["g0", "g2", "g3", "g5"])
    answer = await ask(s, keys.DESCRIBE_LOG_DIRS, 3, topics=None)
    if trouble == "error":
        assert answer.error_code == 0
        assert sorted(each.log_dir for each in answer.results) == ["1:/data", "2:/data", "3:/data"]
    else:
        assert answer.error_code == error_codes.BROKER_NOT_AVAILABLE
        assert sorted(each.log_dir for each in answer.results) == ["1:/data", "3:/data"]


@scene(owners=())
async def test_list_without_brokers_is_an_error(s: Scene) -> None:
    answer = await ask(s, keys.LIST_GROUPS, 4)
    assert (answer.error_code, answer.groups) == (NOT_AVAILABLE, [])


@three()
async def test_group_goes_to_its_coordinator(s: Scene) -> None:
    cluster = Brokers(s)
    answer = await ask(s, keys.DESCRIBE_GROUPS, 5, groups=[*GROUPS, "nobody's"])
    codes = {each.group_id: each.error_code for each in answer.groups}
    assert codes == {**dict.fromkeys(GROUPS, 0), "nobody's": NOT_AVAILABLE}
    assert sorted(cluster.got(keys.DESCRIBE_GROUPS)) == [1, 2, 3]


@three()
async def test_group_of_lost_coordinator_is_looked_up_again(s: Scene) -> None:
    cluster = Brokers(s)
    cluster.silent.add(2)
    answer = await ask(s, keys.DESCRIBE_GROUPS, 5, groups=GROUPS)
    codes = {each.group_id: each.error_code for each in answer.groups}
    assert codes == {group: NOT_COORDINATOR if group in ("g1", "g4") else 0 for group in GROUPS}
    # A broker that is none says so, too.
    cluster.codes[3] = NOT_COORDINATOR
    answer = await ask(s, keys.DESCRIBE_GROUPS, 5, groups=GROUPS[2:3])
    assert [each.error_code for each in answer.groups] == [NOT_COORDINATOR]
    cluster.coordinators = {(GROUP, group): 1 for group in GROUPS}
    answer = await ask(s, keys.DESCRIBE_GROUPS, 5, groups=["g1", "g2", "g4"])
    assert {each.error_code for each in answer.groups} == {0}


@three()
async def test_partition_goes_to_its_owner(s: Scene) -> None:
    cluster = Brokers(s)
    partitions = [{"partition_index": index, "offset": 1} for index in range(3)]
    topics = [{"name": "t", "partitions": partitions}]
    answer = await ask(s, keys.DELETE_RECORDS, 2, topics=topics, timeout_ms=1)
    [topic] = answer.topics
    told = {each.partition_index: (each.error_code, each.low_watermark) for each in topic.partitions}
    assert told == {index: (0, index + 1) for index in range(3)}
    await s.brokers[2].stop()
    cluster.codes[1] = UNKNOWN_TOPIC
    answer = await ask(s, keys.DELETE_RECORDS, 2, topics=topics, timeout_ms=1)
    told = {each.partition_index: each.error_code for each in answer.topics[0].partitions}
    assert told == {0: UNKNOWN_TOPIC, 1: 0, 2: NOT_LEADER}


def altered(*names: tuple[int, str]) -> dict[str, Any]:
    configs = [{"name": "a", "config_operation": 0, "value": "1"}]
    resources = [{"resource_type": kind, "resource_name": name, "configs": configs} for kind, name in names]
    return {"resources": resources, "validate_only": False}


@three()
async def test_configuration_goes_to_the_named_broker(s: Scene) -> None:
    cluster = Brokers(s)
    names = [(BROKER, "2"), (BROKER, "3"), (BROKER, "1000000"), (BROKER, ""), (TOPIC, "t"), (TOPIC, "1000000")]
    answer = await ask(s, keys.INCREMENTAL_ALTER_CONFIGS, 1, **altered(*names))
    codes = {(each.resource_type, each.resource_name): each.error_code for each in answer.responses}
    assert codes == {name: INVALID_REQUEST if name == (BROKER, "1000000") else 0 for name in names}
    [message] = [each.error_message for each in answer.responses if each.error_code]
    assert message == (
        "an id from 1000000 up is the id of a proxy (kproxy): configure a broker (1, 2, 3) at its own address, or the"
        " default of all"
    )
    assert {2, 3} <= set(cluster.got(keys.INCREMENTAL_ALTER_CONFIGS))
    await s.brokers[2].stop()
    answer = await ask(s, keys.INCREMENTAL_ALTER_CONFIGS, 1, **altered((BROKER, "3"), (BROKER, "2")))
    assert {each.resource_name: each.error_code for each in answer.responses} == {"3": TIMED_OUT, "2": 0}


@three()
async def test_proxy_shows_the_configuration_of_a_broker(s: Scene) -> None:
    Brokers(s)
    names = [(BROKER, "1000000"), (BROKER, "2"), (TOPIC, "t")]
    resources = [{"resource_type": kind, "resource_name": name, "configuration_keys": None} for kind, name in names]
    for _ in range(2):
        answer = await ask(s, keys.DESCRIBE_CONFIGS, 4, resources=resources)
        told = {(each.resource_type, each.resource_name): each.error_code for each in answer.results}
        assert told == dict.fromkeys(names, 0)
        await s.brokers[0].stop()
        # Another broker, if that was the one.


@three()
async def test_replicas_on_proxies_are_refused_alone(s: Scene) -> None:
    cluster = Brokers(s)

    def topic(name: str, *replicas: int) -> dict[str, Any]:
        placed = [{"partition_index": 0, "broker_ids": [*replicas]}] if replicas else []
        return {"name": name, "num_partitions": 1, "replication_factor": 1, "assignments": placed, "configs": []}

    for version in range(2, 8):
        topics = [topic("a", 1, 2), topic("b", 1, 1_000_000), topic("c")]
        answer = await ask(s, keys.CREATE_TOPICS, version, topics=topics, timeout_ms=1)
        assert {each.name: each.error_code for each in answer.topics} == {"a": 0, "b": INVALID_REPLICAS, "c": 0}
    assert len(cluster.got(keys.CREATE_TOPICS)) == 6
