"""The operations that control requests need, and the refusals without them: the table of kproxy.proxy.acl_filter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

import pytest

from kproxy.proxy.acl_filter import Filtered
from kproxy.security.acls import CLUSTER_NAME, Operation, Resource
from kproxy_codec import api_keys as keys
from kproxy_codec.control import build_response, decode_response, encode_response
from tests.unit.proxy.acl_filters import Right, access_of, answered, filter_of, filtered

GROUP, TRANSACTION, TOPIC, CLUSTER = Resource.GROUP, Resource.TRANSACTIONAL_ID, Resource.TOPIC, Resource.CLUSTER
READ, WRITE, DESCRIBE = Operation.READ, Operation.WRITE, Operation.DESCRIBE
# The topics whose ids are known.
IDS = {"a": UUID(int=5, version=4), "b": UUID(int=6, version=4)}
UNKNOWN_ID = UUID(int=7, version=4)


async def screen(needs: Iterable[Right], api_key: int, version: int, **fields: object) -> tuple[Filtered, Any]:
    """The decision for a client with these rights, and what a broker gets."""
    return await filtered(filter_of(access_of(needs), IDS), api_key, version, **fields)


async def refusal(needs: Iterable[Right], api_key: int, version: int, **fields: object) -> Any:
    """The proxy's own answer to a client with these rights."""
    return await answered(filter_of(access_of(needs), IDS), api_key, version, **fields)


# The error without a right; an idempotent producer needs the right to some topic, or to the cluster.
ERRORS = {GROUP: 30, CLUSTER: 31, TRANSACTION: 53, TOPIC: 31}
ENDS: dict[str, object] = {"transactional_id": "x", "producer_id": 1, "producer_epoch": 1}
NO_TRANSACTION: dict[str, object] = {"transactional_id": None, "transaction_timeout_ms": 1}
ANY_TOPIC = "InitProducerId of an idempotent producer"
# Requests that are refused or pass whole, and their required rights.
WHOLE: dict[str, tuple[int, int, dict[str, object], list[Right]]] = {
    "Heartbeat": (keys.HEARTBEAT, 3, {"group_id": "g", "generation_id": 1, "member_id": "m"}, [(READ, GROUP, "g")]),
    "LeaveGroup": (keys.LEAVE_GROUP, 1, {"group_id": "g", "member_id": "m"}, [(READ, GROUP, "g")]),
    "InitProducerId": (
        keys.INIT_PRODUCER_ID,
        1,
        {"transactional_id": "x", "transaction_timeout_ms": 1},
        [(WRITE, TRANSACTION, "x")],
    ),
    ANY_TOPIC: (keys.INIT_PRODUCER_ID, 1, NO_TRANSACTION, [(WRITE, TOPIC, "any")]),
    "InitProducerId by the cluster": (
        keys.INIT_PRODUCER_ID,
        1,
        NO_TRANSACTION,
        [(WRITE, CLUSTER, CLUSTER_NAME)],
    ),
    "EndTxn": (keys.END_TXN, 1, {**ENDS, "committed": True}, [(WRITE, TRANSACTION, "x")]),
    "AddOffsetsToTxn": (
        keys.ADD_OFFSETS_TO_TXN,
        1,
        {**ENDS, "group_id": "g"},
        [(WRITE, TRANSACTION, "x"), (READ, GROUP, "g")],
    ),
    "FindCoordinator of a group": (keys.FIND_COORDINATOR, 1, {"key": "g", "key_type": 0}, [(DESCRIBE, GROUP, "g")]),
    "FindCoordinator of a group, without types": (keys.FIND_COORDINATOR, 0, {"key": "g"}, [(DESCRIBE, GROUP, "g")]),
    "FindCoordinator of a transaction": (
        keys.FIND_COORDINATOR,
        2,
        {"key": "x", "key_type": 1},
        [(DESCRIBE, TRANSACTION, "x")],
    ),
    "FindCoordinator of a share group": (
        keys.FIND_COORDINATOR,
        2,
        {"key": "x", "key_type": 2},
        [(Operation.ADMIN, CLUSTER, CLUSTER_NAME)],
    ),
}


@pytest.mark.parametrize("name", WHOLE)
async def test_request_passes_with_all_its_rights_alone(name: str) -> None:
    api_key, version, fields, every = WHOLE[name]
    screened, sent = await screen(every, api_key, version, **fields)
    assert sent is not None
    assert screened.amend is None
    for missing in every:
        rights = [need for need in every if need != missing]
        # The same right on another resource does not help, nor does another right on this one.
        operation, kind, resource = missing
        rights += [(operation, kind, resource + "-2")] if name != ANY_TOPIC else []
        rights += [(Operation.CREATE, kind, resource)]
        assert (await refusal(rights, api_key, version, **fields)).error_code == ERRORS[kind]


async def test_refused_producer_gets_no_id() -> None:
    answer = await refusal([], keys.INIT_PRODUCER_ID, 1, transactional_id="x", transaction_timeout_ms=1)
    assert (answer.producer_id, answer.producer_epoch) == (-1, -1)


def partitions(*names: str) -> list[dict[str, object]]:
    each = {"partition_index": 3, "committed_offset": 1, "committed_leader_epoch": -1, "committed_metadata": ""}
    return [{"name": name, "partitions": [each]} for name in names]


@pytest.mark.parametrize("api_key", [keys.OFFSET_COMMIT, keys.TXN_OFFSET_COMMIT, keys.OFFSET_FETCH])
async def test_offsets_need_group_and_each_topic(api_key: int) -> None:
    version = 3 if api_key == keys.TXN_OFFSET_COMMIT else 5
    operation = DESCRIBE if api_key == keys.OFFSET_FETCH else READ
    fields: dict[str, object] = {"group_id": "g", "topics": partitions("a", "b")}
    if api_key == keys.OFFSET_FETCH:
        fields["topics"] = [{"name": name, "partition_indexes": [3]} for name in ("a", "b")]
    if api_key == keys.TXN_OFFSET_COMMIT:
        fields |= {"transactional_id": "x", "producer_id": 1, "producer_epoch": 1}
    needs = [(operation, GROUP, "g"), (WRITE, TRANSACTION, "x"), (operation, TOPIC, "a")]
    screened, sent = await screen(needs, api_key, version, **fields)
    assert [each.name for each in sent.topics] == ["a"]
    assert screened.amend is not None
    screened, sent = await screen([*needs, (operation, TOPIC, "b")], api_key, version, **fields)
    assert ([each.name for each in sent.topics], screened.amend) == (["a", "b"], None)
    # Without any topic, no broker needs to be asked.
    topics = (await refusal(needs[:2], api_key, version, **fields)).topics
    assert [(each.name, each.partitions[0].partition_index) for each in topics] == [("a", 3), ("b", 3)]
    assert {each.partitions[0].error_code for each in topics} == {29}
    refused = await refusal(needs[1:], api_key, version, **fields)
    codes = {each.error_code for topic in refused.topics for each in topic.partitions}
    assert codes == ({30} if api_key != keys.OFFSET_FETCH else set())
    assert api_key != keys.OFFSET_FETCH or refused.error_code == 30
    if api_key == keys.TXN_OFFSET_COMMIT:
        refused = await refusal([needs[0], needs[2]], api_key, version, **fields)
        assert {each.error_code for topic in refused.topics for each in topic.partitions} == {53}


@pytest.mark.parametrize("version", [8, 9, 10])
async def test_offsets_of_groups_need_each_of_them(version: int) -> None:
    def topics(*names: str) -> list[dict[str, Any]]:
        ids = {**IDS, "unknown": UNKNOWN_ID}
        named = [{"topic_id": ids[name]} if version >= 10 else {"name": name} for name in names]
        return [{**each, "partition_indexes": [3]} for each in named]

    def name(topic: Any) -> str:
        ids = {each: name for name, each in IDS.items()}
        return ids.get(topic.topic_id, "unknown") if version >= 10 else str(topic.name)

    asked: dict[str, Any] = {"g": topics("a", "b", "unknown"), "h": topics("a"), "i": None}
    groups = [{"group_id": group, "topics": each} for group, each in asked.items()]
    needs = [(DESCRIBE, GROUP, "g"), (DESCRIBE, GROUP, "i"), (DESCRIBE, TOPIC, "a")]
    screened, sent = await screen(needs, keys.OFFSET_FETCH, version, groups=groups)
    assert [each.group_id for each in sent.groups] == ["g", "i"]
    assert [name(each) for each in sent.groups[0].topics] == ["a"]
    assert screened.amend is not None
    results = [
        {**each, "partitions": [{"partition_index": 3, "committed_offset": 1, "metadata": "", "error_code": 0}]}
        for each in (
            {key: value for key, value in each.items() if key != "partition_indexes"} for each in topics("a", "b")
        )
    ]
    answer = build_response(
        keys.OFFSET_FETCH,
        version,
        groups=[{"group_id": "g", "topics": results[:1]}, {"group_id": "i", "topics": results}],
    )
    screened.amend(answer)
    found = decode_response(keys.OFFSET_FETCH, version, encode_response(answer)).groups
    assert [(each.group_id, each.error_code) for each in found] == [("g", 0), ("i", 0), ("h", 30)]
    codes = {name(topic): each.error_code for topic in found[0].topics for each in topic.partitions}
    assert codes == {"a": 0, "b": 29, "unknown": 100 if version >= 10 else 29}
    assert [name(topic) for topic in found[1].topics] == ["a"]
    # With all rights it passes as it is; without any group there is nothing to ask a broker for.
    screened, sent = await screen(needs, keys.OFFSET_FETCH, version, groups=[{"group_id": "g", "topics": topics("a")}])
    assert (screened.amend, len(sent.groups)) == (None, 1)
    refused = (await refusal([], keys.OFFSET_FETCH, version, groups=groups)).groups
    assert [(each.group_id, each.error_code) for each in refused] == [(group, 30) for group in asked]


async def test_commits_by_id_need_their_topics() -> None:
    ids = (IDS["a"], IDS["b"], UNKNOWN_ID)
    fields = {"group_id": "g", "topics": [{**partitions("")[0], "topic_id": each} for each in ids]}
    for each in fields["topics"]:
        del each["name"]
    screened, sent = await screen([(READ, GROUP, "g"), (READ, TOPIC, "a")], keys.OFFSET_COMMIT, 10, **fields)
    assert [each.topic_id for each in sent.topics] == [IDS["a"]]
    assert screened.amend is not None
    answer = build_response(keys.OFFSET_COMMIT, 10, topics=[])
    screened.amend(answer)
    assert [(each.topic_id, each.partitions[0].error_code) for each in answer.topics] == [
        (IDS["b"], 29),
        (UNKNOWN_ID, 100),
    ]


async def test_offsets_of_unnamed_topics_are_hidden() -> None:
    needs = [(DESCRIBE, GROUP, "g"), (DESCRIBE, TOPIC, "a")]
    screened, sent = await screen(needs, keys.OFFSET_FETCH, 5, group_id="g", topics=None)
    assert sent.topics is None
    assert screened.amend is not None

    class Answer:
        def __init__(self) -> None:
            self.topics = [type("Topic", (), {"name": name}) for name in ("a", "b")]

    answer = Answer()
    screened.amend(answer)
    assert [each.name for each in answer.topics] == ["a"]


async def test_partitions_are_added_together_or_not_at_all() -> None:
    topics = [{"name": name, "partitions": [1, 2]} for name in ("a", "b")]
    fields: dict[str, object] = {
        "v3_and_below_transactional_id": "x",
        "v3_and_below_producer_id": 1,
        "v3_and_below_producer_epoch": 1,
        "v3_and_below_topics": topics,
    }
    needs = [(WRITE, TRANSACTION, "x"), (WRITE, TOPIC, "a"), (WRITE, TOPIC, "b")]
    _, sent = await screen(needs, keys.ADD_PARTITIONS_TO_TXN, 1, **fields)
    assert sent is not None
    for rights, codes in ((needs[:2], {"a": 55, "b": 29}), (needs[1:], {"a": 53, "b": 53})):
        results = (await refusal(rights, keys.ADD_PARTITIONS_TO_TXN, 1, **fields)).results_by_topic_v3_and_below
        told = {each.name: {one.partition_error_code for one in each.results_by_partition} for each in results}
        assert told == {name: {code} for name, code in codes.items()}
        assert [len(each.results_by_partition) for each in results] == [2, 2]


@pytest.mark.parametrize(
    ("api_key", "version", "asked", "results", "operation", "message"),
    [
        (keys.CREATE_TOPICS, 4, "topics", "topics", Operation.CREATE, "Authorization failed."),
        (keys.CREATE_PARTITIONS, 1, "topics", "results", Operation.ALTER, None),
        (keys.DELETE_TOPICS, 5, "topic_names", "responses", Operation.DELETE, "Topic authorization failed."),
        (keys.DELETE_TOPICS, 4, "topic_names", "responses", Operation.DELETE, None),
        (keys.DELETE_TOPICS, 6, "topics", "responses", Operation.DELETE, "Topic authorization failed."),
    ],
)
async def test_each_topic_is_changed_by_its_right(
    api_key: int, version: int, asked: str, results: str, operation: Operation, message: str | None
) -> None:
    def fields(*names: str) -> dict[str, object]:
        more: dict[str, object] = {}
        if api_key == keys.CREATE_TOPICS:
            more = {"num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
        if api_key == keys.CREATE_PARTITIONS:
            more = {"count": 2, "assignments": None}
        if asked == "topic_names":
            return {"topic_names": list(names), "timeout_ms": 1}
        return {"topics": [{"name": name, **more} for name in names], "timeout_ms": 1}

    screened, sent = await screen([(operation, TOPIC, "a")], api_key, version, **fields("a", "b"))
    assert [each if isinstance(each, str) else each.name for each in getattr(sent, asked)] == ["a"]
    assert screened.amend is not None
    screened, sent = await screen([(operation, TOPIC, "a")], api_key, version, **fields("a"))
    assert screened.amend is None
    others: list[Right] = [(operation, TOPIC, "c"), (DESCRIBE, TOPIC, "b")]
    (refused,) = getattr(await refusal(others, api_key, version, **fields("b")), results)
    assert (refused.name, refused.error_code) == ("b", 29)
    assert message is None or refused.error_message == message


async def test_topic_is_deleted_by_known_id_alone() -> None:
    topics = [{"name": None, "topic_id": UUID(int=9)}]
    rights = [(Operation.DELETE, TOPIC, "a")]
    (refused,) = (await refusal(rights, keys.DELETE_TOPICS, 6, topics=topics, timeout_ms=1)).responses
    assert (refused.error_code, refused.topic_id) == (100, UUID(int=9))


async def test_cluster_may_create_every_topic() -> None:
    new = {"num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
    rights = [(Operation.CREATE, CLUSTER, CLUSTER_NAME)]
    topics = [{"name": "a", **new}]
    _, sent = await screen(rights, keys.CREATE_TOPICS, 4, topics=topics, timeout_ms=1)
    assert [each.name for each in sent.topics] == ["a"]


async def test_configs_are_described_by_kind() -> None:
    resources = [{"resource_type": kind, "resource_name": name} for kind, name in ((2, "a"), (2, "b"), (4, "1"))]
    for rights, kept, refused in (
        ([(DESCRIBE, TOPIC, "a")], ["a"], {"b": 29, "1": 31}),
        ([(DESCRIBE, CLUSTER, CLUSTER_NAME)], ["1"], {"a": 29, "b": 29}),
    ):
        _, sent = await screen(rights, keys.DESCRIBE_CONFIGS, 1, resources=resources)
        assert [each.resource_name for each in sent.resources] == kept
        others = [each for each in resources if each["resource_name"] not in kept]
        results = (await refusal(rights, keys.DESCRIBE_CONFIGS, 1, resources=others)).results
        assert {each.resource_name: each.error_code for each in results} == refused


@pytest.mark.parametrize("asks_to_create", [True, False])
async def test_metadata_creates_for_those_who_may_alone(asks_to_create: bool) -> None:
    fields: dict[str, object] = {"topics": [{"name": "a"}], "allow_auto_topic_creation": asks_to_create}
    sees = [(DESCRIBE, TOPIC, "a")]
    _, sent = await screen(sees, keys.METADATA, 4, **fields)
    assert not sent.allow_auto_topic_creation or not asks_to_create
    screened, sent = await screen([*sees, (Operation.CREATE, TOPIC, "a")], keys.METADATA, 4, **fields)
    assert sent.allow_auto_topic_creation == asks_to_create
    # A topic without a name is not created.
    by_id = {"topics": [{"name": "a"}, {"name": None, "topic_id": UUID(int=9)}]}
    _, sent = await screen([*sees, (Operation.CREATE, TOPIC, "a")], keys.METADATA, 12, **fields | by_id)
    assert sent.allow_auto_topic_creation == asks_to_create
    # An unauthorized client learns only that the topic is unknown.
    screened, _ = await screen(sees, keys.METADATA, 4, **fields)
    assert screened.verdict is not None
    assert screened.verdict(b"a", bytes(16), 3) == (29 if asks_to_create else 3, True)
    assert screened.verdict(b"a", bytes(16), 0) == (0, True)
    assert screened.verdict(b"b", bytes(16), 0) == (29, True)
    # Of all topics those are left out that it may not see.
    screened, _ = await screen(sees, keys.METADATA, 4, topics=None, allow_auto_topic_creation=False)
    assert screened.verdict is not None
    assert (screened.verdict(b"a", bytes(16), 0), screened.verdict(b"b", bytes(16), 0)) == ((0, True), None)
