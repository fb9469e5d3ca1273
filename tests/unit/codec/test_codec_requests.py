"""Invalid partitioned requests of clients, and the fields of valid ones, in a table for each rule."""

from __future__ import annotations

import struct
import time
from typing import Any

import pytest

from kproxy_codec.api_keys import FETCH, LIST_OFFSETS, PRODUCE
from kproxy_codec.errors import InvalidField, UnsupportedVersion
from kproxy_codec.fetch import FetchRequest, PartitionFetch, partition_fetch
from kproxy_codec.partitioned import MAX_PARTITIONS, MAX_READ_PARTITIONS, PartitionedRequest
from kproxy_codec.produce import records_of
from tests.support.wire.messages import (
    APIS,
    AT_LENGTH,
    EVERY_VERSION,
    FLEXIBLE_FROM,
    REQUEST_FIELDS,
    VERSIONS,
    head_of,
    is_by_id,
    request_body,
    request_frame,
    sample_request,
    tag_section,
    uvarint,
)

FLEXIBLE = [(api_key, version) for api_key, version in EVERY_VERSION if version >= FLEXIBLE_FROM[api_key]]
BY_ID = [case for case in EVERY_VERSION if is_by_id(*case)]


def _parse(api_key: int, version: int, body: bytes) -> PartitionedRequest:
    frame = request_frame(api_key, version, body)
    return APIS[api_key].parse_request(frame, head_of(frame))


def _asking(api_key: int, version: int, partitions: dict[str, list[int]], **changes: Any) -> PartitionedRequest:
    return _parse(api_key, version, request_body(api_key, version, sample_request(api_key, partitions, **changes)))


def _topics(api_key: int, topics: list[dict[str, Any]] | None) -> dict[str, Any]:
    return {**sample_request(api_key, {}), REQUEST_FIELDS[api_key][0]: topics}


@pytest.mark.parametrize("version", VERSIONS[FETCH])
def test_fetch_request_fields_are_read(version: int) -> None:
    numbers = {"max_wait_ms": 500, "min_bytes": 2, "max_bytes": 3, "isolation_level": 1, "session_id": 9}
    request = _asking(FETCH, version, {"t": [1, 2]}, session_epoch=4, **numbers)
    assert isinstance(request, FetchRequest)
    assert (request.max_wait_ms, request.min_bytes, request.max_bytes, request.isolation_level) == (500, 2, 3, 1)
    assert (request.session_id, request.session_epoch) == ((9, 4) if version >= 7 else (0, -1))
    # The values of `sample_request`.
    assert partition_fetch(request, request.topics[0].starts[1]) == PartitionFetch(
        partition_index=2,
        current_leader_epoch=11 if version >= 9 else -1,
        fetch_offset=2**40 + 2,
        last_fetched_epoch=10 if version >= 12 else -1,
        log_start_offset=5 if version >= 5 else -1,
        max_bytes=1 << 20,
    )


@pytest.mark.parametrize("api_key", VERSIONS)
@pytest.mark.parametrize(
    ("partitions", "repeats"),
    [
        ([("t", [0])], False),
        ([("t", [])], False),
        ([("t", [0, 1, 2])], False),
        ([("t", [0, 1, 0])], True),
        ([("t", [0, 1]), ("u", [0, 1])], False),
        ([("t", [0, 1]), ("u", [0]), ("t", [2])], False),
        ([("t", [0, 1]), ("u", [0]), ("t", [1])], True),
        ([("t", []), ("t", [])], False),
    ],
)
def test_repeated_partition_is_detected(api_key: int, partitions: list[tuple[str, list[int]]], repeats: bool) -> None:
    topics: list[dict[str, Any]] = []
    for name, indexes in partitions:
        topics += sample_request(api_key, {name: indexes})[REQUEST_FIELDS[api_key][0]]
    for version in VERSIONS[api_key]:
        request = _parse(api_key, version, request_body(api_key, version, _topics(api_key, topics)))
        assert request.repeats_a_partition() is repeats


@pytest.mark.parametrize(("api_key", "version"), EVERY_VERSION)
def test_bytes_behind_the_message_are_refused(api_key: int, version: int) -> None:
    body = request_body(api_key, version, sample_request(api_key, {"t": [0]}))
    _parse(api_key, version, body)
    with pytest.raises(InvalidField, match="follow"):
        _parse(api_key, version, body + b"\x00")


@pytest.mark.parametrize(("api_key", "versions"), VERSIONS.items())
def test_versions_outside_the_range_are_refused(api_key: int, versions: range) -> None:
    for version in (-1, 0, versions.start - 1, versions.stop, 0x7FFF):
        frame = request_frame(api_key, version, bytes(200), tags=())
        with pytest.raises(UnsupportedVersion):
            APIS[api_key].parse_request(frame, head_of(frame))


@pytest.mark.parametrize(("api_key", "version"), [case for case in EVERY_VERSION if case[0] == FETCH])
@pytest.mark.parametrize("replica_id", [0, 1, 2**31 - 1])
def test_replica_fetch_through_proxy_is_refused(api_key: int, version: int, replica_id: int) -> None:
    with pytest.raises(InvalidField, match="replica_id"):
        _asking(api_key, version, {"t": [0]}, replica_id=replica_id)


@pytest.mark.parametrize(("api_key", "version"), AT_LENGTH)
def test_number_of_partitions_is_bounded(api_key: int, version: int) -> None:
    most = _asking(api_key, version, {"t": list(range(4000)), "u": list(range(MAX_PARTITIONS - 4000))})
    assert most.partition_count == MAX_PARTITIONS
    assert not most.is_too_large
    assert _asking(api_key, version, {"t": list(range(4000)), "u": list(range(MAX_PARTITIONS - 3999))}).is_too_large
    with pytest.raises(InvalidField, match=str(MAX_READ_PARTITIONS)):
        _asking(api_key, version, {"t": list(range(4000)), "u": list(range(MAX_READ_PARTITIONS - 3999))})


@pytest.mark.parametrize(("api_key", "version"), AT_LENGTH)
def test_topics_without_partitions_are_bounded_too(api_key: int, version: int) -> None:
    """A hundred MiB of them would otherwise be 33 million objects, and stop other clients for minutes."""
    empty = sample_request(api_key, {"": []})[REQUEST_FIELDS[api_key][0]]
    assert _parse(
        api_key, version, request_body(api_key, version, _topics(api_key, empty * (MAX_PARTITIONS + 1)))
    ).is_too_large
    body = request_body(api_key, version, _topics(api_key, empty * (MAX_READ_PARTITIONS + 1)))
    with pytest.raises(InvalidField, match="topics"):
        _parse(api_key, version, body)


@pytest.mark.parametrize(
    "version",
    [
        pytest.param(
            version, marks=() if version in (7, FLEXIBLE_FROM[FETCH], VERSIONS[FETCH][-1]) else pytest.mark.long
        )
        for version in VERSIONS[FETCH]
        if version >= 7
    ],
)
def test_forgotten_topics_are_bounded_too(version: int) -> None:
    forgotten = [{"topic": "f", "partitions": []}] * (MAX_READ_PARTITIONS + 1)
    with pytest.raises(InvalidField, match="topics"):
        _asking(FETCH, version, {"t": [0]}, forgotten_topics_data=forgotten)


@pytest.mark.parametrize(("api_key", "version"), EVERY_VERSION)
def test_null_topics_and_null_partitions_are_refused(api_key: int, version: int) -> None:
    """Kafka closes the connection on them, so one client could make a broker close its connections."""
    topics_field, partitions_field, _, _ = REQUEST_FIELDS[api_key]
    topics = sample_request(api_key, {"t": [0], "u": []})[topics_field]
    topics[1][partitions_field] = None
    for hostile in (_topics(api_key, None), _topics(api_key, topics)):
        with pytest.raises(InvalidField, match="null"):
            _parse(api_key, version, request_body(api_key, version, hostile))


# Versions, and their non-nullable fields; from version 13 on a topic has an id, which cannot be null.
NULLS_IN_THE_TRAILER: list[tuple[range, dict[str, Any]]] = [
    (range(7, 14), {"forgotten_topics_data": None}),
    (range(7, 13), {"forgotten_topics_data": [{"topic": None, "partitions": []}]}),
    (range(7, 14), {"forgotten_topics_data": [{"topic": "t", "partitions": None}]}),
    (range(11, 14), {"rack_id": None}),
]


@pytest.mark.parametrize(
    ("version", "first_version", "change"),
    [
        (version, versions.start, change)
        for versions, change in NULLS_IN_THE_TRAILER
        for version in range(VERSIONS[FETCH].start, versions.stop)
    ],
)
def test_null_in_fetch_trailer_is_refused(version: int, first_version: int, change: dict[str, Any]) -> None:
    if version < first_version:
        # This version lacks the field, so the test's value never reaches the wire.
        assert _asking(FETCH, version, {"t": [0]}, **change).partition_count == 1
        return
    with pytest.raises(InvalidField, match="null"):
        _asking(FETCH, version, {"t": [0]}, **change)


@pytest.mark.parametrize("version", [version for version in VERSIONS[FETCH] if version >= 11])
@pytest.mark.parametrize("rack", ["", "a", "r" * 0x7FFF], ids=["none", "short", "long"])
def test_admitted_fetch_names_no_rack(version: int, rack: str) -> None:
    """A leader that knows a replica in the reader's rack refers the reader to it, without records (KIP-392)."""
    tags = [(100, b"kept")] if version >= FLEXIBLE_FROM[FETCH] else []
    named, nameless = (
        _asking(FETCH, version, {"t": [0, 1]}, rack_id=each, tags=tags, session_epoch=-1) for each in (rack, "")
    )
    for each in (named, nameless):
        APIS[FETCH].admit(each)
    assert bytes(named.frame) == bytes(nameless.frame)
    # The entry is decoded whole again, so its length may differ.
    assert APIS[FETCH].parse_request(named.frame, head_of(named.frame)).partition_count == 2


@pytest.mark.parametrize(("api_key", "version"), [case for case in EVERY_VERSION if case not in BY_ID])
def test_topic_needs_a_name_in_utf_8(api_key: int, version: int) -> None:
    """A broker reads other bytes as U+FFFD, and answers for a topic that nobody requested."""
    topics_field, _, name_field, _ = REQUEST_FIELDS[api_key]
    topics = sample_request(api_key, {"t": [0]})[topics_field]
    for name in (None, b"\xff", b"t\xc3", b"\xed\xa0\x80", b"\xc0\xaf"):
        topics[0][name_field] = name
        with pytest.raises(InvalidField, match=r"name|null"):
            _parse(api_key, version, request_body(api_key, version, _topics(api_key, topics)))


@pytest.mark.parametrize(("api_key", "version"), FLEXIBLE)
def test_compact_strings_have_the_old_length_limit(api_key: int, version: int) -> None:
    """Kafka refuses compact strings over 32,767 bytes and closes the connection."""
    if (api_key, version) not in BY_ID:
        assert _asking(api_key, version, {"n" * 0x7FFF: [0]}).topics[0].name == b"n" * 0x7FFF
        with pytest.raises(InvalidField, match="32768"):
            _asking(api_key, version, {"n" * 0x8000: [0]})
    change = {PRODUCE: {"transactional_id": "x" * 0x8000}, FETCH: {"rack_id": "r" * 0x8000}}.get(api_key)
    if change:
        with pytest.raises(InvalidField, match="32768"):
            _asking(api_key, version, {"t": [0]}, **change)


def _tagged(api_key: int, level: str, tags: list[tuple[int, bytes]]) -> dict[str, Any]:
    topics_field, partitions_field, _, _ = REQUEST_FIELDS[api_key]
    fields = sample_request(api_key, {"t": [0]})
    topic = fields[topics_field][0]
    {"request": fields, "topic": topic, "partition": topic[partitions_field][0]}[level]["tags"] = tags
    return fields


@pytest.mark.parametrize(("api_key", "version"), FLEXIBLE)
@pytest.mark.parametrize("level", ["header", "request", "topic", "partition"])
@pytest.mark.parametrize(
    ("tags", "refused"),
    [
        ([(100 + number, b"v") for number in range(64)], False),
        ([(100 + number, b"v") for number in range(65)], True),
        ([(101, b"a"), (100, b"b")], True),
        ([(100, b"a"), (100, b"b")], True),
        ([(2**32 - 1, b"")], False),
    ],
    ids=["64", "65", "descending", "twice", "the highest number"],
)
def test_tagged_fields_are_bounded_and_ascend(
    api_key: int, version: int, level: str, tags: list[tuple[int, bytes]], refused: bool
) -> None:
    if level == "header":
        frame = request_frame(
            api_key, version, request_body(api_key, version, sample_request(api_key, {"t": [0]})), tags=tags
        )
    else:
        frame = request_frame(api_key, version, request_body(api_key, version, _tagged(api_key, level, tags)))
    if refused:
        with pytest.raises(InvalidField, match="tag"):
            APIS[api_key].parse_request(frame, head_of(frame))
    else:
        assert APIS[api_key].parse_request(frame, head_of(frame)).partition_count == 1


def test_padded_varints_are_read_and_kept() -> None:
    """Kafka reads 0x81 0x00 as 1; the meaning must not depend on whether the request is split."""
    entry = struct.pack(">i", 6) + b"\x84\x00abc" + b"\x80\x00"
    body = uvarint(0) + struct.pack(">hi", -1, 1000) + b"\x82\x00" + b"\x82\x80\x00t" + b"\x82\x00" + entry
    request = _parse(PRODUCE, 9, body + b"\x80\x00" + tag_section())
    topic = request.topics[0]
    assert (topic.name, topic.partitions) == (b"t", [6])
    assert bytes(request.frame[topic.starts[0] : topic.ends[0]]) == entry
    assert bytes(records_of(request, topic, 0)) == b"abc"


@pytest.mark.parametrize(("api_key", "version"), EVERY_VERSION)
def test_inflated_request_is_refused_at_once(api_key: int, version: int) -> None:
    """Two hundred thousand empty topics in a megabyte must cost almost nothing."""
    flexible = version >= FLEXIBLE_FROM[api_key]
    count = uvarint(200_001) if flexible else struct.pack(">i", 200_000)
    one = b"\x01\x01\x00" if flexible else bytes(6)
    body = request_body(api_key, version, _topics(api_key, []))
    topics_offset = {PRODUCE: 7 if flexible else 8, FETCH: 25 if version >= 7 else 17, LIST_OFFSETS: 4 + (version >= 2)}
    start = topics_offset[api_key]
    hostile = body[:start] + count + one * 200_000 + body[start + (1 if flexible else 4) :]
    took = []
    # The garbage collector may run during one of them.
    for _ in range(3):
        begin = time.thread_time()
        with pytest.raises(InvalidField):
            _parse(api_key, version, hostile)
        took.append(time.thread_time() - begin)
    assert min(took) < 0.1


@pytest.mark.parametrize("size", [None, 0, 1, 126, 127, 128, 16_382, 16_383, 16_384, 2_097_150, 2_097_151, 2_097_152])
@pytest.mark.parametrize("padding", [0, 1])
def test_records_of_every_length_are_found(size: int | None, padding: int) -> None:
    """A length may have more bytes than it needs; the codec and Kafka agree where the next partition begins."""
    length = uvarint(0 if size is None else size + 1)
    if padding:
        length = length[:-1] + bytes([length[-1] | 0x80, 0])
    records = b"r" * (size or 0)
    body = b"\x00\xff\xff" + bytes(4) + b"\x02\x02t\x03"
    body += struct.pack(">i", 5) + length + records + b"\x00" + struct.pack(">i", 6) + b"\x02s\x00" + b"\x00\x00"
    request = _parse(PRODUCE, 9, body)
    (topic,) = request.topics
    assert topic.partitions == [5, 6]
    assert records_of(request, topic, 0) == records
    assert records_of(request, topic, 1) == b"s"
