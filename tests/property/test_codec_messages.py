"""Partitioned messages are read, split and merged without loss, duplicates or changes, by comparison with kafka-python.

The oracle for the codec's output is a writer in the tests, which knows tagged fields; the first two tests compare that
writer with kafka-python.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.index import load_payload_module
from kio.serial import entity_reader, entity_writer
from kio.static.constants import EntityType

from kproxy_codec.api_keys import FETCH, LIST_OFFSETS, PRODUCE
from kproxy_codec.fetch import FetchRequest, PartitionFetch, partition_fetch
from kproxy_codec.framing import response_header
from kproxy_codec.partitioned import PartitionedRequest, Places, Splitter, encode_topics, with_length
from kproxy_codec.primitives import Buffer
from kproxy_codec.produce import records_of, transactional_id
from tests.support.rules import examples
from tests.support.wire.messages import (
    APIS,
    EVERY_VERSION,
    FLEXIBLE_FROM,
    NAMES,
    REQUEST_FIELDS,
    RESPONSE_FIELDS,
    head_of,
    is_by_id,
    named_as,
    read_by_kafka_python,
    request_body,
    request_frame,
    requests,
    response_body,
    response_frame,
    responses,
    sample_request,
    without_tags,
    written_by_kafka_python,
)

Case = tuple[int, int, dict[str, Any]]

REQUESTS = st.sampled_from(EVERY_VERSION).flatmap(lambda case: st.tuples(*map(st.just, case), requests(*case)))
RESPONSES = st.sampled_from(EVERY_VERSION).flatmap(lambda case: st.tuples(*map(st.just, case), responses(*case)))
HEADER_TAGS = [(0, b"of the header"), (2**31, b"")]


def _without_tags_anywhere(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_tags_anywhere(inner) for name, inner in value.items() if name != "tags"}
    return [_without_tags_anywhere(inner) for inner in value] if isinstance(value, list) else value


@settings(max_examples=examples(60))
@given(REQUESTS, RESPONSES)
def test_writer_of_tests_matches_kafka_python(request: Case, response: Case) -> None:
    writers: list[tuple[str, Callable[..., bytes], Case]] = [
        ("request", request_body, request),
        ("response", response_body, response),
    ]
    for kind, write, (api_key, version, fields) in writers:
        plain = _without_tags_anywhere(fields)
        assert write(api_key, version, plain) == written_by_kafka_python(kind, api_key, version, fields)
        tagged = write(api_key, version, fields)
        assert read_by_kafka_python(kind, api_key, version, tagged) == without_tags(kind, api_key, version, fields)


def _parsed(api_key: int, version: int, fields: dict[str, Any]) -> PartitionedRequest:
    frame = request_frame(api_key, version, request_body(api_key, version, fields), tags=HEADER_TAGS)
    return APIS[api_key].parse_request(frame, head_of(frame))


@settings(max_examples=examples(60))
@given(REQUESTS)
def test_request_is_indexed_as_it_was_written(case: Case) -> None:
    api_key, version, fields = case
    topics_field, entries_field, name_field, index_field = REQUEST_FIELDS[api_key]
    request = _parsed(api_key, version, fields)
    assert len(request.topics) == len(fields[topics_field])
    for topic, written in zip(request.topics, fields[topics_field], strict=True):
        assert topic.name == named_as(api_key, version, written[name_field])
        assert topic.partitions == [entry[index_field] for entry in written[entries_field]]
        for ordinal, entry in enumerate(written[entries_field]):
            if api_key == PRODUCE:
                records = records_of(request, topic, ordinal)
                assert (bytes(records), records.obj is request.frame.obj) == (entry["records"] or b"", True)
            if isinstance(request, FetchRequest):
                expected = PartitionFetch(
                    entry["partition"],
                    entry["current_leader_epoch"] if version >= 9 else -1,
                    entry["fetch_offset"],
                    entry["last_fetched_epoch"] if version >= 12 else -1,
                    entry["log_start_offset"] if version >= 5 else -1,
                    entry["partition_max_bytes"],
                )
                assert partition_fetch(request, topic.starts[ordinal]) == expected
    if api_key == PRODUCE:
        name = fields["transactional_id"]
        assert transactional_id(request) == (None if name is None else name.encode())
        assert (request.acks, request.timeout_ms) == (fields["acks"], fields["timeout_ms"])
    else:
        assert request.acks == -1


def _chosen(api_key: int, fields: dict[str, Any], owners: Sequence[Sequence[int]], owner: int) -> dict[str, Any]:
    """The message with only one owner's entries; topics without such entries are omitted."""
    topics_field, entries_field, _, _ = REQUEST_FIELDS[api_key]
    topics = []
    for topic, by_ordinal in zip(fields[topics_field], owners, strict=True):
        entries = [entry for entry, owned in zip(topic[entries_field], by_ordinal, strict=True) if owned == owner]
        if entries:
            topics.append({**topic, entries_field: entries})
    return {**fields, topics_field: topics}


@settings(max_examples=examples(125))
@given(REQUESTS, st.integers(1, 4), st.integers(0, 2**32), st.integers(-(2**31), 2**31 - 1))
def test_parts_together_are_the_whole_request(case: Case, owners: int, seed: int, correlation_id: int) -> None:
    """Each part equals, byte for byte, the request of a client that asks only for this owner's partitions."""
    api_key, version, fields = case
    api = APIS[api_key]
    request = _parsed(api_key, version, fields)
    chance = random.Random(seed)
    assigned = [[chance.randrange(owners) for _ in topic.partitions] for topic in request.topics]
    for owner in range(owners):
        selection = []
        for place, by_ordinal in enumerate(assigned):
            ordinals = [ordinal for ordinal, owned in enumerate(by_ordinal) if owned == owner]
            if ordinals:
                selection.append((place, ordinals))
        parts = Splitter(request, api.piece_preamble(request, owners, 1)).part(selection, correlation_id)
        expected = _chosen(api_key, fields, assigned, owner)
        if api_key == FETCH:
            expected |= {"max_bytes": fields["max_bytes"] // owners, "min_bytes": 1}
            expected |= {"session_id": 0, "session_epoch": -1}
        body = request_body(api_key, version, expected)
        frame = request_frame(api_key, version, body, correlation_id=correlation_id, tags=HEADER_TAGS)
        assert b"".join(parts) == bytes(frame)
        theirs = read_by_kafka_python("request", api_key, version, body)
        assert theirs == without_tags("request", api_key, version, expected)
        again = api.parse_request(frame, head_of(frame))
        assert [topic.partitions for topic in again.topics] == [
            [request.topics[place].partitions[ordinal] for ordinal in ordinals] for place, ordinals in selection
        ]
        _no_entry_is_copied(request, selection, parts)


def _no_entry_is_copied(request: PartitionedRequest, selection: Places, parts: list[Buffer]) -> None:
    """The bytes around the entries are few and copied; the entries, with their records, are slices of the request."""
    slices = [part for part in parts if isinstance(part, memoryview)]
    assert all(part.obj is request.frame.obj for part in slices)
    entries = [(request.topics[place], ordinal) for place, ordinals in selection for ordinal in ordinals]
    assert sum(map(len, slices)) == sum(topic.ends[ordinal] - topic.starts[ordinal] for topic, ordinal in entries)


def _without_epochs(api_key: int, fields: dict[str, Any]) -> dict[str, Any]:
    """A read as it must leave the proxy: without the leader epochs of clients, which know none."""
    if api_key == PRODUCE:
        return fields
    topics_field, entries_field, *_ = REQUEST_FIELDS[api_key]

    def blanked(topic: dict[str, Any]) -> dict[str, Any]:
        return {**topic, entries_field: [{**entry, "current_leader_epoch": -1} for entry in topic[entries_field]]}

    return {**fields, topics_field: list(map(blanked, fields[topics_field]))}


@settings(max_examples=examples(30))
@given(REQUESTS)
def test_unsplit_request_is_forwarded_unchanged(case: Case) -> None:
    api_key, version, fields = case
    request = _parsed(api_key, version, fields)
    APIS[api_key].admit(request)
    # Without a session and a rack: the proxy cannot follow what a leader answers to these (KIP-227, KIP-392).
    no_session = {"session_id": 0, "session_epoch": -1, "rack_id": ""} if api_key == FETCH else {}
    body = request_body(api_key, version, {**_without_epochs(api_key, fields), **no_session})
    assert bytes(request.frame) == bytes(request_frame(api_key, version, body, tags=HEADER_TAGS))


def _blanked(api_key: int, fields: dict[str, Any]) -> dict[str, Any]:
    """The answer as it must leave the proxy: no leader epoch, replica or session, no records instead of null."""
    topics_field, entries_field, _, _ = RESPONSE_FIELDS[api_key]
    blank = {LIST_OFFSETS: {"leader_epoch": -1}, FETCH: {"preferred_read_replica": -1}}.get(api_key, {})

    def blanked(entry: dict[str, Any]) -> dict[str, Any]:
        records = {"records": entry["records"] or b""} if api_key == FETCH else {}
        return {**entry, **blank, **records}

    topics = [{**topic, entries_field: list(map(blanked, topic[entries_field]))} for topic in fields[topics_field]]
    return {**fields, topics_field: topics, "session_id": 0, "error_code": 0}


@settings(max_examples=examples(60))
@given(RESPONSES)
def test_answer_is_indexed_and_blanked_only(case: Case) -> None:
    api_key, version, fields = case
    topics_field, entries_field, name_field, index_field = RESPONSE_FIELDS[api_key]
    frame = response_frame(api_key, version, response_body(api_key, version, fields), tags=HEADER_TAGS)
    response = APIS[api_key].parse_response(frame, version)
    for topic, written in zip(response.topics, fields[topics_field], strict=True):
        assert topic.name == named_as(api_key, version, written[name_field])
        assert topic.partitions == [entry[index_field] for entry in written[entries_field]]
        assert topic.error_codes == [entry["error_code"] for entry in written[entries_field]]
    assert response.throttle_time_ms == fields.get("throttle_time_ms", 0)
    assert response.error_code == fields.get("error_code", 0)
    found = [entry.get("records") or b"" for topic in fields[topics_field] for entry in topic[entries_field]]
    assert response.payload_bytes == (sum(map(len, found)) if api_key == FETCH else 0)
    assert not response.names_brokers
    assert response.other_tags == (fields["tags"] if version >= FLEXIBLE_FROM[api_key] else [])
    expected = {**_blanked(api_key, fields), "error_code": fields.get("error_code", 0)}
    body = response_body(api_key, version, expected)
    assert bytes(frame) == bytes(response_frame(api_key, version, body, tags=HEADER_TAGS))


@settings(max_examples=examples(75))
@given(RESPONSES, st.integers(1, 3), st.integers(0, 2**32), st.integers(-(2**31), 2**31 - 1))
def test_answers_merge_into_one(case: Case, brokers: int, seed: int, throttle_time_ms: int) -> None:
    """The answer's entries come from several brokers' answers, in which they had another order."""
    api_key, version, fields = case
    topics_field, entries_field, name_field, _ = RESPONSE_FIELDS[api_key]
    chance = random.Random(seed)
    topics = [{**topic, "tags": []} for topic in fields[topics_field]]
    places = [(place, ordinal) for place, topic in enumerate(topics) for ordinal in range(len(topic[entries_field]))]
    chance.shuffle(places)
    found: dict[tuple[int, int], memoryview] = {}
    for broker in range(brokers):
        mine = places[broker::brokers]
        answered = []
        for place, ordinal in mine:
            entry = topics[place][entries_field][ordinal]
            answered.append({**topics[place], entries_field: [entry], "tags": [(100, b"topic's own")]})
        answer = {**fields, topics_field: answered}
        response = APIS[api_key].parse_response(
            response_frame(api_key, version, response_body(api_key, version, answer)), version
        )
        for entry_place, span in zip(mine, response.topics, strict=True):
            found[entry_place] = response.frame[span.starts[0] : span.ends[0]]
    merged = []
    for place, topic in enumerate(topics):
        entries = [found[place, ordinal] for ordinal in range(len(topic[entries_field]))]
        merged.append((named_as(api_key, version, topic[name_field]), entries, len(entries)))
    flexible = version >= FLEXIBLE_FROM[api_key]
    by_id = is_by_id(api_key, version)
    head, tail = APIS[api_key].response_ends(version, throttle_time_ms, fields["tags"])
    array = encode_topics(merged, flexible=flexible, by_id=by_id)
    parts = with_length([response_header(api_key, version, 7) + head, *array, tail])
    expected = {**_blanked(api_key, {**fields, topics_field: topics}), "throttle_time_ms": throttle_time_ms}
    body = response_body(api_key, version, expected)
    assert b"".join(parts) == bytes(response_frame(api_key, version, body))
    theirs = read_by_kafka_python("response", api_key, version, body)
    assert theirs == without_tags("response", api_key, version, expected)


@pytest.mark.parametrize(("api_key", "version"), EVERY_VERSION)
def test_kio_reads_the_parts(api_key: int, version: int) -> None:
    fields = sample_request(api_key, {"a": [0, 1, 2], "b": [7], "c": [3, 4]})
    frame = request_frame(api_key, version, request_body(api_key, version, fields))
    request = APIS[api_key].parse_request(frame, head_of(frame))
    module = load_payload_module(api_key, version, EntityType.request)
    entity_class = getattr(module, NAMES[api_key] + "Request")
    seen: list[tuple[bytes, int]] = []
    by_id = is_by_id(api_key, version)
    splitter = Splitter(request, APIS[api_key].piece_preamble(request, 2, 1))
    for selection in ([(0, [0, 2]), (2, [0, 1])], [(0, [1]), (1, [0])]):
        # A part has the whole request's header.
        body = b"".join(splitter.part(selection, 1))[request.header.body_offset :]
        entity, read = entity_reader(entity_class)(body, 0)
        assert read == len(body)
        again = BytesIO()
        entity_writer(entity_class)(again, entity)
        assert again.getvalue() == body
        topics_field, entries_field, name_field, index_field = REQUEST_FIELDS[api_key]
        for topic in getattr(entity, topics_field):
            name = topic.topic_id.bytes if by_id else getattr(topic, name_field).encode()
            seen += [(name, getattr(item, index_field)) for item in getattr(topic, entries_field)]
    expected = [("a", 0), ("a", 1), ("a", 2), ("b", 7), ("c", 3), ("c", 4)]
    assert sorted(seen) == sorted((named_as(api_key, version, name), index) for name, index in expected)
