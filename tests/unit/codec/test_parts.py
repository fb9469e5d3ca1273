"""Errors and merged answers are built by the schemas of messages."""

from __future__ import annotations

from typing import Any

import pytest

from kproxy_codec import api_keys as keys
from kproxy_codec.control import build_request, build_response, decode_request, decode_response, encode_request
from kproxy_codec.control import encode_response as encode
from kproxy_codec.parts import changed, keep, merged, name_of, numbers, only, partitions_of, refused

PARTITIONS = [{"name": "a", "partitions": [{"partition_index": 1, "offset": 5}, {"partition_index": 2, "offset": 6}]}]
RESOURCES = [{"resource_type": 2, "resource_name": "t", "configs": []}]
ENTITY = [{"entity_type": "user", "entity_name": None}, {"entity_type": "client-id", "entity_name": "c"}]
SALTED = {"mechanism": 1, "iterations": 1, "salt": b"", "salted_password": b""}

# The request, its parts and their results, and the fields of the answer that say where the error belongs.
REFUSED: dict[int, tuple[int, str, str, dict[str, Any], list[Any]]] = {
    keys.DESCRIBE_GROUPS: (6, "groups", "groups", {"groups": ["a", "b"]}, ["a", "b"]),
    keys.DELETE_GROUPS: (2, "groups_names", "results", {"groups_names": ["a"]}, ["a"]),
    keys.DELETE_TOPICS: (5, "topic_names", "responses", {"topic_names": ["a"]}, ["a"]),
    keys.DELETE_RECORDS: (2, "topics", "topics", {"topics": PARTITIONS}, ["a"]),
    keys.DESCRIBE_PRODUCERS: (0, "topics", "topics", {"topics": [{"name": "a", "partition_indexes": [1, 2]}]}, ["a"]),
    keys.INCREMENTAL_ALTER_CONFIGS: (1, "resources", "responses", {"resources": RESOURCES}, ["t"]),
    keys.DESCRIBE_TRANSACTIONS: (0, "transactional_ids", "transaction_states", {"transactional_ids": ["x"]}, ["x"]),
    keys.CONSUMER_GROUP_DESCRIBE: (1, "group_ids", "groups", {"group_ids": ["x"]}, ["x"]),
}


def received(api_key: int, version: int, **fields: Any) -> Any:
    return decode_request(api_key, version, encode_request(build_request(api_key, version, **fields)))


def sent(answer: Any) -> Any:
    return decode_response(answer.API_KEY, answer.version, encode(answer))


@pytest.mark.parametrize("api_key", REFUSED)
def test_each_part_gets_the_error(api_key: int) -> None:
    version, at, to, fields, names = REFUSED[api_key]
    answer = sent(refused(received(api_key, version, **fields), 29, "why", at=at, to=to))
    results = getattr(answer, to)
    assert [name_of(each) for each in results] == names
    if api_key in (keys.DELETE_RECORDS, keys.DESCRIBE_PRODUCERS):
        assert [(name_of(each), each.error_code) for each in partitions_of(results[0])] == [(1, 29), (2, 29)]
    else:
        assert {each.error_code for each in results} == {29}


def test_whole_answer_gets_the_error_where_it_can() -> None:
    asked = received(keys.CONSUMER_GROUP_HEARTBEAT, 1, group_id="g", member_id="m", member_epoch=0)
    answer = sent(refused(asked, 30, "why"))
    assert (answer.error_code, answer.error_message, answer.assignment) == (30, "why", None)
    assert sent(refused(received(keys.LIST_GROUPS, 5), 15)).error_code == 15


def test_users_and_entities_are_named() -> None:
    fields = {"deletions": [{"name": "u", "mechanism": 1}], "upsertions": [{"name": "w", **SALTED}]}
    asked = received(keys.ALTER_USER_SCRAM_CREDENTIALS, 0, **fields)
    answer = sent(refused(asked, 31, at="deletions upsertions", to="results"))
    assert [(each.user, each.error_code) for each in answer.results] == [("u", 31), ("w", 31)]
    asked = received(keys.ALTER_CLIENT_QUOTAS, 1, entries=[{"entity": ENTITY, "ops": []}])
    [entry] = sent(refused(asked, 31, at="entries", to="entries")).entries
    assert [(each.entity_type, each.entity_name) for each in entry.entity] == [("user", None), ("client-id", "c")]


def groups(error_code: int, *names: str) -> Any:
    listed = [{"group_id": name, "protocol_type": "consumer"} for name in names]
    return build_response(keys.LIST_GROUPS, 4, error_code=error_code, groups=listed)


def test_merged_answer_has_everything_once() -> None:
    answer = sent(merged([groups(15), groups(0, "a", "b"), groups(14, "b", "c")], "groups"))
    assert (answer.error_code, [each.group_id for each in answer.groups]) == (15, ["a", "b", "c"])
    shares = [
        refused(received(keys.DELETE_RECORDS, 2, topics=topics), code, at="topics", to="topics")
        for code, topics in ((6, PARTITIONS), (3, [{"name": "a", "partitions": [{"partition_index": 7, "offset": 1}]}]))
    ]
    [topic] = sent(merged(shares, "topics")).topics
    assert {each.partition_index: each.error_code for each in topic.partitions} == {1: 6, 2: 6, 7: 3}


def test_parts_are_changed_in_copies() -> None:
    request = received(keys.DELETE_RECORDS, 2, topics=PARTITIONS)
    [topic] = request.topics
    share = changed(request, topics=[only(topic, partitions_of(topic)[:1])])
    assert [each.partition_index for each in share.topics[0].partitions] == [1]
    assert [each.partition_index for each in request.topics[0].partitions] == [1, 2]
    assert decode_request(keys.DELETE_RECORDS, 2, encode_request(share)).topics[0].partitions[0].offset == 5


def test_paths_of_fields_are_followed() -> None:
    moves = [{"partition_index": 0, "replicas": [1, 2]}, {"partition_index": 1, "replicas": None}]
    asked = received(keys.ALTER_PARTITION_REASSIGNMENTS, 0, topics=[{"name": "a", "partitions": moves}])
    assert list(numbers(asked, "topics.partitions.replicas")) == [1, 2]
    topics = [{"topic": name, "partitions": [0]} for name in ("a", "b")]
    answer = build_response(
        keys.DESCRIBE_TRANSACTIONS, 0, transaction_states=[{"transactional_id": "x", "topics": topics}]
    )
    keep(answer, "transaction_states.topics", lambda each: each.topic == "b")
    assert [each.topic for each in answer.transaction_states[0].topics] == ["b"]
