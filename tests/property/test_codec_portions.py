"""Messages read and written in portions are byte for byte those of kafka-python, in every version."""

from __future__ import annotations

import os
import string
from contextlib import suppress
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.proxy.apis import REQUEST_KEY_TYPES, SERVED
from kproxy_codec import api_keys as keys
from kproxy_codec import control
from kproxy_codec.cluster import Named, asks_for_all_topics, leaderless_metadata, rename_brokers
from kproxy_codec.coordination import (
    BATCHED_FROM,
    COMMIT_EPOCH_FROM,
    GROUP,
    Found,
    answer_find_coordinator,
    blank_committed_epochs,
    coordination_key,
    error_codes,
    names_groups,
    parse_find_coordinator,
    replace_coordinators,
)
from kproxy_codec.errors import CodecError
from kproxy_codec.walk import PORTION, Work, at_once
from tests.support.rules import ALL
from tests.support.wire.fattest import arrays, body_of, fattest, many_tags, schema_of

BROKERS = [(1_000_000, "proxy-0.test", 9092), (1_000_001, "::1", 9093), (1_000_002, "proxy-2.test", 9094)]
CONTROLLER = 1_000_000
# The number of messages of each version, which are new in each run.
MANY, FEW = (20, 7) if os.environ.get(ALL) == "1" else (4, 2)
ABOUT_LEADERS = (5, 6, 9)
COORDINATED = [key for key, api in SERVED.items() if api.handling in REQUEST_KEY_TYPES]
NO_TAGS = b"\x00"


def leaders(topic: bytes, indexes: list[int]) -> list[int]:
    return [BROKERS[(len(topic) + index) % len(BROKERS)][0] for index in indexes]


NAMED = Named(BROKERS, CONTROLLER, leaders)


def versions_of(*api_keys: int) -> list[tuple[int, int]]:
    return [(key, v) for key in api_keys for v in range(SERVED[key].min_version, SERVED[key].max_version + 1)]


# Random messages, after kafka-python's schemas

INTEGERS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64, "bitfield": 32}
TEXTS = st.text(string.ascii_letters + "ü€", max_size=6) | st.just("x" * 200)


def values(field: Any, version: int) -> st.SearchStrategy[Any]:
    kind = field.type_str
    if field.is_struct_array():
        plain: st.SearchStrategy[Any] = st.lists(structures(field, version), max_size=3)
    elif field.is_struct():
        plain = structures(field, version)
    elif field.is_array():
        plain = st.lists(scalars(kind.removeprefix("[]")), max_size=4) | st.just([7] * 130 if "int" in kind else [])
    else:
        plain = scalars(kind)
    return plain | st.none() if field.nullable_for_version_q(version) else plain


def scalars(kind: str) -> st.SearchStrategy[Any]:
    if kind == "string":
        return TEXTS
    if kind == "bytes":
        return st.binary(max_size=9)
    if kind == "bool":
        return st.booleans()
    if kind == "uuid":
        return st.builds(UUID, int=st.integers(0, 2**128 - 1))
    if kind == "bitfield":
        return st.none() | st.sets(st.integers(0, 12), max_size=3)
    bits = INTEGERS[kind]
    # Small numbers are error codes, too.
    return st.integers(-1, 30) | st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def structures(schema: Any, version: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            field.name: values(field, version)
            for field in schema.fields.values()
            if field.for_version_q(version) and not field.tagged_field_q(version)
        }
    )


def bodies(kind: str, api_key: int, version: int) -> st.SearchStrategy[bytes]:
    build, encode = (
        (control.build_request, control.encode_request)
        if kind == "request"
        else (control.build_response, control.encode_response)
    )
    return structures(schema_of(kind, api_key), version).map(lambda fields: encode(build(api_key, version, **fields)))


# Answers about the cluster


def renamed_by_kafka_python(api_key: int, version: int, body: bytes) -> bytes:
    """The expected result of `rename_brokers`, by decoding the whole message."""
    message = control.decode_response(api_key, version, body)
    if api_key != keys.DESCRIBE_TOPIC_PARTITIONS:
        id_field = "broker_id" if api_key == keys.DESCRIBE_CLUSTER else "node_id"
        brokers = [{id_field: node_id, "host": host, "port": port} for node_id, host, port in BROKERS]
        message.brokers = control.build_response(api_key, version, brokers=brokers).brokers
        message.controller_id = CONTROLLER
    if api_key != keys.DESCRIBE_CLUSTER:
        for topic in message.topics:
            indexes = [partition.partition_index for partition in topic.partitions]
            for partition, leader in zip(topic.partitions, leaders((topic.name or "").encode(), indexes), strict=True):
                if partition.error_code in ABOUT_LEADERS:
                    partition.error_code = 0
                partition.leader_id, partition.leader_epoch = leader, -1
                partition.replica_nodes = partition.isr_nodes = [leader]
                partition.offline_replicas = []
                if api_key == keys.DESCRIBE_TOPIC_PARTITIONS:
                    partition.eligible_leader_replicas = partition.last_known_elr = []
    return control.encode_response(message)


@pytest.mark.parametrize(
    ("key", "version"), versions_of(keys.METADATA, keys.DESCRIBE_CLUSTER, keys.DESCRIBE_TOPIC_PARTITIONS)
)
@given(data=st.data())
@settings(max_examples=MANY)
def test_cluster_answers_change_only_their_brokers(key: int, version: int, data: st.DataObject) -> None:
    body = data.draw(bodies("response", key, version))
    assert bytes(at_once(rename_brokers(key, version, body, NAMED))) == renamed_by_kafka_python(key, version, body)


@pytest.mark.parametrize(("_", "version"), versions_of(keys.METADATA))
@given(data=st.data())
@settings(max_examples=FEW)
def test_request_for_metadata_is_answered_without_brokers(_: int, version: int, data: st.DataObject) -> None:
    body = data.draw(bodies("request", keys.METADATA, version))
    request = control.decode_request(keys.METADATA, version, body)
    topics = request.topics or []
    assert asks_for_all_topics(version, body) is (request.topics is None if version else not topics)
    if version < 12 and any(topic.name is None for topic in topics):
        with pytest.raises(CodecError):
            at_once(leaderless_metadata(version, body, NAMED))
        return
    fields = {
        "brokers": [{"node_id": node_id, "host": host, "port": port} for node_id, host, port in BROKERS],
        "controller_id": CONTROLLER,
        "topics": [
            {"error_code": 5, "name": topic.name, "topic_id": topic.topic_id, "partitions": []} for topic in topics
        ],
    }
    expected = control.encode_response(control.build_response(keys.METADATA, version, **fields))
    assert bytes(at_once(leaderless_metadata(version, body, NAMED))) == expected


# Groups and transactions

KEY_FIELDS = {
    keys.ADD_PARTITIONS_TO_TXN: "v3_and_below_transactional_id",
    keys.INIT_PRODUCER_ID: "transactional_id",
    keys.ADD_OFFSETS_TO_TXN: "transactional_id",
    keys.END_TXN: "transactional_id",
}


@pytest.mark.parametrize(("key", "version"), versions_of(*COORDINATED))
@given(data=st.data())
@settings(max_examples=FEW)
def test_key_of_a_coordinated_request_is_found(key: int, version: int, data: st.DataObject) -> None:
    body = data.draw(bodies("request", key, version))
    request = control.decode_request(key, version, body)
    if names_groups(key, version):
        expected = request.groups[0].group_id if len(request.groups) == 1 else None
    else:
        expected = getattr(request, KEY_FIELDS.get(key, "group_id"))
    assert coordination_key(key, version, body) == expected


def found_for(key_type: int, key: str) -> Found:
    if key.startswith("x"):
        return Found(key, -1, "", -1, 15, "none" if key_type == GROUP else None)
    return Found(key, len(key), "host", 9092)


@pytest.mark.parametrize(("_", "version"), versions_of(keys.FIND_COORDINATOR))
@given(data=st.data())
@settings(max_examples=FEW)
def test_coordinators_are_found_and_replaced(_: int, version: int, data: st.DataObject) -> None:
    batched = version >= BATCHED_FROM
    request_body = data.draw(bodies("request", keys.FIND_COORDINATOR, version))
    request = control.decode_request(keys.FIND_COORDINATOR, version, request_body)
    key_type = request.key_type if version else GROUP
    asked_keys = request.coordinator_keys if batched else [request.key]
    found = [found_for(key_type, key)._asdict() for key in asked_keys]
    fields = {"coordinators": found} if batched else {k: v for k, v in found[0].items() if k != "key"}
    answer = control.build_response(keys.FIND_COORDINATOR, version, **fields)
    written = at_once(answer_find_coordinator(version, request_body, found_for))
    assert bytes(written) == control.encode_response(answer)

    body = data.draw(bodies("response", keys.FIND_COORDINATOR, version))
    answer = control.decode_response(keys.FIND_COORDINATOR, version, body)
    seen = []
    for each in answer.coordinators if batched else [answer]:
        key = each.key if batched else request.key
        seen.append((key_type, Found(key, each.node_id, each.host, each.port, each.error_code, each.error_message)))
        each.node_id, each.host, each.port = BROKERS[0]
    taken = []

    def replace(key_type: int, one: Found) -> Found:
        taken.append((key_type, one))
        node_id, host, port = BROKERS[0]
        return one._replace(node_id=node_id, host=host, port=port)

    asked = parse_find_coordinator(version, request_body)
    assert bytes(at_once(replace_coordinators(version, asked, body, replace))) == control.encode_response(answer)
    assert taken == [(kind, one._replace(error_message=one.error_message if version else None)) for kind, one in seen]


@pytest.mark.parametrize(
    ("key", "version"),
    versions_of(keys.OFFSET_FETCH, keys.OFFSET_COMMIT, keys.JOIN_GROUP, keys.SYNC_GROUP, keys.LEAVE_GROUP),
)
@given(data=st.data())
@settings(max_examples=FEW)
def test_group_error_codes_are_read_without_epochs(key: int, version: int, data: st.DataObject) -> None:
    body = bytearray(data.draw(bodies("response", key, version)))
    message = control.decode_response(key, version, bytes(body))
    groups = message.groups if names_groups(key, version) else [message]
    has_code = key != keys.OFFSET_COMMIT and (key, version) != (keys.OFFSET_FETCH, 1)
    expected = {group.error_code for group in groups if has_code}
    if key in (keys.OFFSET_FETCH, keys.OFFSET_COMMIT):
        for partition in (each for group in groups for topic in group.topics for each in topic.partitions):
            expected.add(partition.error_code)
            if key == keys.OFFSET_FETCH:
                partition.committed_leader_epoch = -1
    assert at_once(error_codes(key, version, memoryview(body), without_epochs=True)) == expected
    if key in (keys.OFFSET_FETCH, keys.OFFSET_COMMIT):
        assert bytes(body) == control.encode_response(message)


COMMITS = [each for each in versions_of(*COMMIT_EPOCH_FROM) if each[1] >= COMMIT_EPOCH_FROM[each[0]]]


@pytest.mark.parametrize(("key", "version"), COMMITS)
@given(data=st.data())
@settings(max_examples=FEW)
def test_commits_lose_only_their_epochs(key: int, version: int, data: st.DataObject) -> None:
    body = bytearray(data.draw(bodies("request", key, version)))
    message = control.decode_request(key, version, bytes(body))
    for topic in message.topics:
        for partition in topic.partitions:
            partition.committed_leader_epoch = -1
    at_once(blank_committed_epochs(key, version, memoryview(body)))
    assert bytes(body) == control.encode_request(message)


# Whatever comes


def works(kind: str, key: int, version: int, body: bytes) -> list[Work[Any]]:
    """All kinds of work on such a message."""
    if kind == "response":
        if key == keys.FIND_COORDINATOR:
            asked = parse_find_coordinator(version, body_of("request", key, version, (), 0))
            return [replace_coordinators(version, asked, body, lambda _, found: found)]
        if key in (keys.OFFSET_FETCH, keys.OFFSET_COMMIT):
            return [error_codes(key, version, memoryview(bytearray(body)), without_epochs=True)]
        return [rename_brokers(key, version, body, NAMED)]
    if key == keys.FIND_COORDINATOR:
        return [answer_find_coordinator(version, body, found_for)]
    if key == keys.METADATA:
        return [leaderless_metadata(version, body, NAMED)]
    return [blank_committed_epochs(key, version, memoryview(bytearray(body)))]


READ = [
    *(("response", *each) for each in versions_of(keys.METADATA, keys.DESCRIBE_CLUSTER, keys.FIND_COORDINATOR)),
    *(("response", *each) for each in versions_of(keys.DESCRIBE_TOPIC_PARTITIONS)),
    *(("response", *each) for each in versions_of(keys.OFFSET_FETCH, keys.OFFSET_COMMIT)),
    *(("request", *each) for each in versions_of(keys.METADATA, keys.FIND_COORDINATOR)),
    *(("request", *each) for each in COMMITS),
]


@pytest.mark.parametrize(("kind", "key", "version"), READ)
@given(data=st.data())
@settings(max_examples=FEW)
def test_malformed_message_raises_codec_error(kind: str, key: int, version: int, data: st.DataObject) -> None:
    body = bytearray(data.draw(bodies(kind, key, version)))
    if data.draw(st.booleans()):
        del body[data.draw(st.integers(0, len(body))) :]
    for _ in range(data.draw(st.integers(0, 3))):
        if body:
            at = data.draw(st.integers(0, len(body) - 1))
            body[at : at + 1] = data.draw(st.sampled_from([b"\x00", b"\x7f", b"\xff", b"\xff" * 5, b"\x80" * 6, b""]))
    for work in works(kind, key, version, bytes(body)):
        with suppress(CodecError):
            at_once(work)


@pytest.mark.parametrize(("kind", "key", "version"), READ)
def test_no_portion_is_larger_than_others(kind: str, key: int, version: int) -> None:
    for array in arrays(kind, key, version):
        if len(array) > 1 and array[-1].endswith(("_nodes", "_replicas", "_elr")):
            # Skipped unchanged, whatever their length.
            continue
        count = 5 * PORTION
        for work in works(kind, key, version, body_of(kind, key, version, array, count)):
            assert sum(1 for _ in work) >= count // PORTION, (array, work)


@pytest.mark.parametrize(("kind", "key", "version"), READ)
def test_excess_tagged_fields_are_refused(kind: str, key: int, version: int) -> None:
    plain, tagged = (body_of(kind, key, version, (), 0, tags=tags) for tags in (NO_TAGS, many_tags(1 << 12)))
    for work in works(kind, key, version, tagged):
        if plain == tagged or (kind, key) == ("request", keys.METADATA):
            at_once(work)
        else:
            with pytest.raises(CodecError):
                at_once(work)


def test_long_lists_of_nodes_cost_little() -> None:
    body = fattest("response", keys.METADATA, 12, ("topics", "partitions", "replica_nodes"), 1 << 20)
    assert len(at_once(rename_brokers(keys.METADATA, 12, body, NAMED))) < 1 << 10
