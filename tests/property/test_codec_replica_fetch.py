"""The messages that followers send and read, against kafka-python, an independent codec of the other side."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy_codec import control, replica_fetch
from kproxy_codec.api_keys import FETCH
from kproxy_codec.errors import InvalidField, Truncated
from kproxy_codec.fetch import (
    EpochEnd,
    PartitionFetch,
    PartitionFetched,
    parse_fetch,
    partition_fetch,
    response_ends,
    result_entry,
)
from kproxy_codec.framing import parse_request_header, response_header
from kproxy_codec.partitioned import encode_topics, with_length
from kproxy_codec.replica_fetch import encode_replica_fetch, read_replica_answer
from tests.support.rules import examples
from tests.support.wire.messages import frame_of, response_body, response_frame, sample_response, tag_section, topic_id

INT16, INT32, INT64 = (st.integers(-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (16, 32, 64))
LOG_IDS = st.uuids(version=4).map(lambda each: each.bytes)
ASKED = st.builds(PartitionFetch, INT32, INT32, INT64, INT32, INT64, INT32, LOG_IDS)
EPOCH_ENDS = st.none() | st.builds(EpochEnd, INT32, INT64)
FETCHED = st.builds(PartitionFetched, INT32, INT16, INT64, INT64, EPOCH_ENDS, st.binary(max_size=300))
# Null ids and the ids of Kafka's own topics have no meaning here.
TOPIC_IDS = st.uuids(version=4)


def _asking(
    topics: list[tuple[uuid.UUID, list[PartitionFetch]]],
    withdrawn: list[tuple[uuid.UUID, list[int]]] | None = None,
    **changes: int,
) -> memoryview:
    numbers = {"correlation_id": 7, "max_wait_ms": 500, "min_bytes": 1, "max_bytes": 10 << 20, **changes}
    wire = [(topic.bytes, asked) for topic, asked in topics]
    left = [(topic.bytes, indexes) for topic, indexes in withdrawn or []]
    return memoryview(bytearray(encode_replica_fetch(3, wire, left, sender=b"broker-3", **numbers)))


@settings(max_examples=examples(150))
@given(
    st.lists(st.tuples(TOPIC_IDS, st.lists(ASKED, max_size=4)), max_size=4),
    st.lists(st.tuples(TOPIC_IDS, st.lists(INT32, max_size=4)), max_size=4),
    INT32,
    INT32,
)
def test_leader_reads_followers_request(
    topics: list[tuple[uuid.UUID, list[PartitionFetch]]],
    withdrawn: list[tuple[uuid.UUID, list[int]]],
    correlation_id: int,
    max_bytes: int,
) -> None:
    frame = _asking(topics, withdrawn, correlation_id=correlation_id, max_bytes=max_bytes)
    header = parse_request_header(frame)
    assert header[:3] == (FETCH, replica_fetch.VERSION, correlation_id)
    theirs = control.decode_request(FETCH, replica_fetch.VERSION, frame[header.body_offset :])
    assert (theirs.replica_id, theirs.max_wait_ms, theirs.min_bytes, theirs.max_bytes) == (3, 500, 1, max_bytes)
    assert (theirs.isolation_level, theirs.session_id, theirs.session_epoch) == (0, 0, 0)
    forgotten = [(each.topic_id, each.partitions) for each in theirs.forgotten_topics_data]
    assert (forgotten, theirs.rack_id) == (withdrawn, "")
    # kafka-python knows no replica_directory_id in this version.
    read = [(topic.topic_id, [PartitionFetch(*_numbers(each)) for each in topic.partitions]) for topic in theirs.topics]
    assert read == [(topic, [each._replace(replica_directory_id=b"") for each in asked]) for topic, asked in topics]
    ours = parse_fetch(frame, header)
    assert ours.forgotten == [(topic.bytes, tuple(indexes)) for topic, indexes in withdrawn]
    assert (ours.replica_id, ours.max_wait_ms, ours.min_bytes, ours.max_bytes) == (3, 500, 1, max_bytes)
    assert ours.by_id
    assert topics == [
        (uuid.UUID(bytes=topic.wire), [partition_fetch(ours, start) for start in topic.starts]) for topic in ours.topics
    ]
    body = bytes(frame[header.body_offset :])
    for _, asked in topics:
        for each in asked:
            body = body.replace(b"\x01\x00\x10" + each.replica_directory_id, b"\x00")
    assert control.encode_request(theirs) == body


def _numbers(each: Any) -> tuple[int, ...]:
    return (
        each.partition,
        each.current_leader_epoch,
        each.fetch_offset,
        each.last_fetched_epoch,
        each.log_start_offset,
        each.partition_max_bytes,
    )


def _answering(topics: list[tuple[uuid.UUID, list[PartitionFetched]]], error_code: int = 0) -> memoryview:
    """An answer as the broker writes it."""
    version = replica_fetch.VERSION
    head, tail = response_ends(version, 0, [], error_code)
    entries = [
        (topic.bytes, [part for each in fetched for part in result_entry(version, each)], len(fetched))
        for topic, fetched in topics
    ]
    array = encode_topics(entries, flexible=True, by_id=True)
    return memoryview(bytearray(b"".join(with_length([response_header(FETCH, version, 7) + head, *array, tail]))))


@settings(max_examples=examples(150))
@given(st.lists(st.tuples(TOPIC_IDS, st.lists(FETCHED, max_size=4)), max_size=4), INT16)
def test_follower_reads_leaders_answer(topics: list[tuple[uuid.UUID, list[PartitionFetched]]], error_code: int) -> None:
    frame = _answering(topics, error_code)
    theirs = control.decode_response(FETCH, replica_fetch.VERSION, frame[9:])
    assert (theirs.error_code, theirs.session_id, theirs.throttle_time_ms) == (error_code, 0, 0)
    read = [(topic.topic_id, [_fetched(each) for each in topic.partitions]) for topic in theirs.responses]
    assert read == topics
    ours = read_replica_answer(frame)
    assert ours.error_code == error_code
    assert [(uuid.UUID(bytes=topic), fetched) for topic, fetched in ours.topics] == topics


def _fetched(each: Any) -> PartitionFetched:
    assert each.aborted_transactions is None
    assert each.preferred_read_replica == -1
    assert each.last_stable_offset == each.high_watermark
    diverging = each.diverging_epoch and EpochEnd(each.diverging_epoch.epoch, each.diverging_epoch.end_offset)
    numbers = (each.partition_index, each.error_code, each.high_watermark, each.log_start_offset)
    return PartitionFetched(*numbers, diverging, bytes(each.records or b""))


def test_records_of_an_answer_are_slices_of_it() -> None:
    frame = _answering([(topic_id("t"), [PartitionFetched(0, 0, 9, 1, None, b"r" * 5000), PartitionFetched(1, 6)])])
    first, second = read_replica_answer(frame).topics[0][1]
    assert isinstance(first.records, memoryview)
    assert first.records.obj is frame.obj
    assert second == PartitionFetched(1, 6)
    assert second.records == b""


def test_unused_fields_are_skipped() -> None:
    """Other brokers may send aborted transactions and tagged fields."""
    fields = sample_response(FETCH, {"t": [4]})
    entry = fields["responses"][0]["partitions"][0]
    entry["aborted_transactions"] = [{"producer_id": 1, "first_offset": 2, "tags": [(9, b"x")]}] * 3
    leader = b"\x00" * 8 + b"\x00"
    entry["tags"] = [(0, EPOCH_END_OF_7), (1, leader), (100, b"abc")]
    frame = response_frame(FETCH, 13, response_body(FETCH, 13, {**fields, "tags": [(100, b"abc")]}), tags=[(0, b"h")])
    ((wire, (fetched,)),) = read_replica_answer(frame).topics
    assert wire == topic_id("t").bytes
    assert fetched == PartitionFetched(4, 0, 2**33 + 4, 5, EpochEnd(7, 70), b"records of 4")


EPOCH_END_OF_7 = (7).to_bytes(4, "big") + (70).to_bytes(8, "big") + tag_section()


def test_truncated_diverging_epoch_is_refused() -> None:
    fields = sample_response(FETCH, {"t": [4]})
    fields["responses"][0]["partitions"][0]["tags"] = [(0, EPOCH_END_OF_7[:11])]
    with pytest.raises(Truncated, match="diverging"):
        read_replica_answer(response_frame(FETCH, 13, response_body(FETCH, 13, fields)))


def test_bytes_behind_the_answer_are_refused() -> None:
    frame = _answering([(topic_id("t"), [PartitionFetched(0, 0)])])
    with pytest.raises(InvalidField, match="follow"):
        read_replica_answer(frame_of(bytes(frame[4:]) + b"\x00"))
