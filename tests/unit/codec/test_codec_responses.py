"""The fields of answers that are read and blanked; kafka-python and kio can read the encoded answers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pytest
from kio.index import load_payload_module
from kio.serial import entity_reader
from kio.static.constants import EntityType

from kproxy_codec import fetch, list_offsets, produce
from kproxy_codec.api_keys import FETCH, LIST_OFFSETS, PRODUCE
from kproxy_codec.errors import InvalidField, Truncated
from kproxy_codec.framing import response_correlation_id, response_header
from kproxy_codec.partitioned import (
    MAX_READ_PARTITIONS,
    PartitionedResponse,
    encode_topics,
    set_response_correlation_id,
    with_length,
)
from kproxy_codec.primitives import Buffer
from tests.support.wire.messages import (
    APIS,
    AT_LENGTH,
    EVERY_VERSION,
    FLEXIBLE_FROM,
    NAMES,
    RESPONSE_FIELDS,
    VERSIONS,
    is_by_id,
    named_as,
    read_by_kafka_python,
    response_body,
    response_frame,
    sample_response,
    tag_section,
    uvarint,
)

NOT_LEADER = 6
# leader_id 3, leader_epoch 9, no tagged fields of its own; and the same as the proxy must send it
LEADER = struct.pack(">ii", 3, 9) + b"\x00"
NO_LEADER = struct.pack(">ii", -1, -1) + b"\x00"
# One node: id 3, host "broker", port 9092, no rack
NODE_ENDPOINTS = uvarint(2) + struct.pack(">i", 3) + b"\x07broker" + struct.pack(">i", 9092) + b"\x00\x00"
# API, first version whose answers name leaders, the tag of an entry's current leader
LEADER_TAGS = [(PRODUCE, 10, 0), (FETCH, 12, 1)]
FLEXIBLE = [(api_key, version) for api_key, version in EVERY_VERSION if version >= FLEXIBLE_FROM[api_key]]


def _answer(api_key: int, version: int, fields: dict[str, Any]) -> memoryview:
    return response_frame(api_key, version, response_body(api_key, version, fields))


def _parse(api_key: int, version: int, fields: dict[str, Any]) -> PartitionedResponse:
    return APIS[api_key].parse_response(_answer(api_key, version, fields), version)


def _entries(api_key: int, fields: dict[str, Any]) -> list[dict[str, Any]]:
    topics, entries, _, _ = RESPONSE_FIELDS[api_key]
    return [entry for topic in fields[topics] for entry in topic[entries]]


@pytest.mark.parametrize(
    ("api_key", "version", "tag"),
    [(key, version, tag) for key, first, tag in LEADER_TAGS for version in VERSIONS[key] if version >= first],
)
def test_real_leader_is_hidden(api_key: int, version: int, tag: int) -> None:
    """KIP-951: a client that learns the leader bypasses the proxy."""
    others = [(number, b"kept") for number in (100, 2**31)]
    fields = sample_response(api_key, {"t": [0, 1, 2]}, tags=[(0, NODE_ENDPOINTS), *others])
    named, unnamed, short = _entries(api_key, fields)
    named["tags"] = [(tag, LEADER), *others]
    unnamed["tags"] = others
    short["tags"] = [(tag, LEADER[:7])]
    response = _parse(api_key, version, fields)
    topic = response.topics[0]
    tails = [bytes(response.frame[start:end]) for start, end in zip(topic.starts, topic.ends, strict=True)]
    assert tails[0].endswith(tag_section([(tag, NO_LEADER), *others]))
    assert tails[1].endswith(tag_section(others))
    # Seven bytes cannot hold a leader, so the entry passes unchanged.
    assert tails[2].endswith(tag_section([(tag, LEADER[:7])]))
    assert response.names_brokers
    assert response.other_tags == others
    merged = _merged(api_key, version, [(b"t", tails)], tags=response.other_tags)
    assert LEADER[:8] not in merged
    assert b"broker" not in merged


@pytest.mark.parametrize(("api_key", "version"), EVERY_VERSION)
def test_bad_answers_are_refused(api_key: int, version: int) -> None:
    topics_field, entries_field, name_field, _ = RESPONSE_FIELDS[api_key]
    body = response_body(api_key, version, sample_response(api_key, {"t": [0]}))
    with pytest.raises(InvalidField, match="follow"):
        APIS[api_key].parse_response(response_frame(api_key, version, body + b"\x00"), version)
    for frame in (memoryview(bytearray()), memoryview(bytearray(7))):
        with pytest.raises(Truncated):
            APIS[api_key].parse_response(frame, version)
    no_topics = sample_response(api_key, {}, **{topics_field: None})
    no_entries = sample_response(api_key, {}, **{topics_field: [{name_field: "t", entries_field: None}]})
    no_name = sample_response(api_key, {}, **{topics_field: [{name_field: None, entries_field: []}]})
    by_id = is_by_id(api_key, version)
    for fields in (no_topics, no_entries) if by_id else (no_topics, no_entries, no_name):
        with pytest.raises(InvalidField, match="null"):
            _parse(api_key, version, fields)


@pytest.mark.parametrize(("api_key", "version"), AT_LENGTH)
def test_answer_partitions_and_topics_are_limited(api_key: int, version: int) -> None:
    topics_field = RESPONSE_FIELDS[api_key][0]
    with pytest.raises(InvalidField, match=str(MAX_READ_PARTITIONS)):
        _parse(api_key, version, sample_response(api_key, {"t": range(MAX_READ_PARTITIONS + 1)}))
    empty = sample_response(api_key, {"t": []})[topics_field] * (MAX_READ_PARTITIONS + 1)
    with pytest.raises(InvalidField, match=str(MAX_READ_PARTITIONS)):
        _parse(api_key, version, sample_response(api_key, {}, **{topics_field: empty}))


@pytest.mark.parametrize(("api_key", "version"), FLEXIBLE)
@pytest.mark.parametrize("level", ["header", "answer", "topic", "partition"])
def test_tagged_fields_of_an_answer_are_bounded(api_key: int, version: int, level: str) -> None:
    for count, refused in ((64, False), (65, True)):
        tags = [(100 + number, b"") for number in range(count)]
        fields = sample_response(api_key, {"t": [0]})
        topic = fields[RESPONSE_FIELDS[api_key][0]][0]
        levels = {"header": {}, "answer": fields, "topic": topic, "partition": _entries(api_key, fields)[0]}
        levels[level]["tags"] = tags
        body = response_body(api_key, version, fields)
        frame = response_frame(api_key, version, body, tags=tags if level == "header" else ())
        if refused:
            with pytest.raises(InvalidField, match="tagged"):
                APIS[api_key].parse_response(frame, version)
        else:
            APIS[api_key].parse_response(frame, version)


def test_answer_takes_another_correlation_id_in_place() -> None:
    body = response_body(PRODUCE, 9, sample_response(PRODUCE, {"t": [0]}))
    frame = response_frame(PRODUCE, 9, body, correlation_id=5)
    before = bytes(frame)
    assert response_correlation_id(frame) == 5
    set_response_correlation_id(frame, -(2**31))
    assert response_correlation_id(frame) == -(2**31)
    assert bytes(frame[:4]) + bytes(frame[8:]) == before[:4] + before[8:]


# Encoded by the codec, decoded by kafka-python


def _merged(
    api_key: int,
    version: int,
    topics: Sequence[tuple[bytes, Sequence[Buffer]]],
    *,
    throttle_time_ms: int = 9,
    tags: list[tuple[int, bytes]] | None = None,
    entries_in: int = 1,
) -> bytes:
    """A whole answer from entries, as the proxy puts it together; an entry may consist of several buffers."""
    flexible = version >= FLEXIBLE_FROM[api_key]
    head, tail = APIS[api_key].response_ends(version, throttle_time_ms, tags or [])
    by_id = is_by_id(api_key, version)
    counted = [
        (named_as(api_key, version, name.decode()), buffers, len(buffers) // entries_in) for name, buffers in topics
    ]
    array = encode_topics(counted, flexible=flexible, by_id=by_id)
    return b"".join(with_length([response_header(api_key, version, 7) + head, *array, tail]))


def _read(api_key: int, version: int, frame: bytes) -> dict[str, Any]:
    """What kafka-python reads in an answer; kio must read as many bytes."""
    assert struct.unpack_from(">ii", frame) == (len(frame) - 4, 7)
    body = frame[9 if version >= FLEXIBLE_FROM[api_key] else 8 :]
    module = load_payload_module(api_key, version, EntityType.response)
    _, read = entity_reader(getattr(module, NAMES[api_key] + "Response"))(body, 0)
    assert read == len(body)
    return read_by_kafka_python("response", api_key, version, body)


@pytest.mark.parametrize(("api_key", "version"), EVERY_VERSION)
def test_error_answer_contains_only_its_code(api_key: int, version: int) -> None:
    """KafScale's proxy answered errors with offset 0 and an invented leader."""
    api = APIS[api_key]
    entries = [api.error_entry(version, index, code) for index, code in ((0, NOT_LEADER), (2**31 - 1, -1))]
    frame = _merged(api_key, version, [(b"t", entries), ("ü".encode(), []), (b"", entries[:1])])
    answer = _read(api_key, version, frame)
    names = RESPONSE_FIELDS[api_key]
    assert [topic[names[2]] for topic in answer[names[0]]] == ["t", "ü", ""]
    assert answer.get("throttle_time_ms", 9) == 9
    found = _entries(api_key, answer)
    assert [(entry[names[3]], entry["error_code"]) for entry in found] == [(0, 6), (2**31 - 1, -1), (0, 6)]
    for entry in found:
        numbers = {value for name, value in entry.items() if name not in (names[3], "error_code") and value}
        assert numbers <= {-1}, entry
    # The codec decodes its own answer like kafka-python.
    again = api.parse_response(memoryview(bytearray(frame)), version)
    assert [topic.error_codes for topic in again.topics] == [[6, -1], [], [6]]


@pytest.mark.parametrize("version", VERSIONS[PRODUCE])
@pytest.mark.parametrize(
    "error_message", [None, "", "no: ü", "m" * 300, "é." * 20_000, "🂡." * 20_000, "half a \ud800 pair"]
)
def test_produce_result_has_all_fields_of_its_version(version: int, error_message: str | None) -> None:
    entry = produce.result_entry(
        version,
        3,
        87,
        base_offset=2**40,
        log_start_offset=5,
        log_append_time_ms=1_700_000_000_000,
        error_message=error_message,
        current_leader=(4, 8),
    )
    answer = _read(PRODUCE, version, _merged(PRODUCE, version, [(b"t", [entry])]))
    (found,) = _entries(PRODUCE, answer)
    assert (found["index"], found["error_code"], found["base_offset"]) == (3, 87, 2**40)
    assert found["log_append_time_ms"] == 1_700_000_000_000
    assert found.get("log_start_offset", 5) == 5
    assert found.get("record_errors", []) == []
    if version >= 8:
        message = found["error_message"]
        if error_message is None:
            assert message is None
        else:
            # Text that exceeds a Kafka string is cut, and characters without UTF-8 are replaced.
            assert len(message.encode()) <= 0x7FFF
            assert error_message.encode(errors="replace").decode().startswith(message)
            assert len(message) == min(len(error_message), 8191)
    leader = struct.pack(">ii", 4, 8)
    assert (leader in entry) is (version >= 10)


@pytest.mark.parametrize("version", VERSIONS[FETCH])
@pytest.mark.parametrize("records", [b"", b"r" * 127, b"r" * 20_000])
def test_fetch_result_carries_its_records_uncopied(version: int, records: bytes) -> None:
    view = memoryview(records)
    buffers = fetch.result_entry(version, fetch.PartitionFetched(3, 0, 44, 5, records=view))
    assert any(buffer is view for buffer in buffers)
    answer = _read(FETCH, version, _merged(FETCH, version, [(b"t", buffers)], entries_in=len(buffers)))
    (found,) = _entries(FETCH, answer)
    assert (found["partition_index"], found["error_code"], found["records"]) == (3, 0, records)
    assert (found["high_watermark"], found["last_stable_offset"], found.get("log_start_offset", 5)) == (44, 44, 5)
    assert found["aborted_transactions"] is None
    assert found.get("preferred_read_replica", -1) == -1


@pytest.mark.parametrize("version", VERSIONS[LIST_OFFSETS])
def test_list_offsets_result_is_read_back(version: int) -> None:
    entry = list_offsets.result_entry(version, 3, 0, timestamp=9, offset=2**40, leader_epoch=6)
    answer = _read(LIST_OFFSETS, version, _merged(LIST_OFFSETS, version, [(b"t", [entry])]))
    (found,) = _entries(LIST_OFFSETS, answer)
    assert (found["partition_index"], found["error_code"], found["timestamp"], found["offset"]) == (3, 0, 9, 2**40)
    assert found.get("leader_epoch", 6) == 6


@pytest.mark.parametrize("version", VERSIONS[FETCH])
def test_fetch_answer_can_fail_as_a_whole(version: int) -> None:
    head, tail = fetch.response_ends(version, 0, [], error_code=70)
    flexible = version >= FLEXIBLE_FROM[FETCH]
    parts = [response_header(FETCH, version, 7) + head, *encode_topics([], flexible=flexible), tail]
    answer = _read(FETCH, version, b"".join(with_length(parts)))
    assert answer.get("error_code", 70) == 70
    assert answer.get("session_id", 0) == 0
