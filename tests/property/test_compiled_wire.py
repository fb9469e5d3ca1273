"""The compiled plain path reads and writes the same bytes as the Python codec, or leaves them to it.

KPROXY_SEED repeats a run of the mutations.
"""

from __future__ import annotations

import functools
import os
import random
import secrets
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.plain import compiled
from kproxy.routing.merge import Exchange, is_success, match_results
from kproxy.routing.split import Entry
from kproxy_codec.api_keys import PRODUCE
from kproxy_codec.errors import CodecError
from kproxy_codec.framing import parse_request_header
from kproxy_codec.partitioned import PartitionedRequest, Splitter, encode_topics, set_response_correlation_id
from kproxy_codec.produce import MAX_VERSION, MIN_VERSION, PRODUCE_API, parse_produce, records_span
from tests.property.test_compiled_fetch import mutated
from tests.support.rules import examples
from tests.support.wire.messages import (
    frame_of,
    request_body,
    request_frame,
    requests,
    sample_request,
)

pytestmark = pytest.mark.skipif(compiled is None, reason="the plain path is not compiled here")
plain: Any = compiled

VERSIONS = range(MIN_VERSION, MAX_VERSION + 1)
SEED = int(os.environ.get("KPROXY_SEED", "0")) or secrets.randbelow(1 << 32)
TOPICS = {"a": [4, 0, 2], "topic": [7], "c": [1, 9]}
Selection = list[tuple[int, list[int]]]
ALL: Selection = [(0, [0, 1, 2]), (1, [0]), (2, [0, 1])]
SELECTIONS: list[Selection] = [ALL, [(0, [0, 2])], [(0, [1, 2])], [(1, [0]), (2, [1])], [(2, [0, 1])]]


def usual(version: int, topics: dict[str, list[int]] | None = None) -> memoryview:
    """A request as clients send it."""
    return request_frame(PRODUCE, version, request_body(PRODUCE, version, sample_request(PRODUCE, topics or TOPICS)))


def parsed(frame: memoryview) -> PartitionedRequest:
    return parse_produce(frame, parse_request_header(frame))


def indexed(request: PartitionedRequest) -> tuple[Any, ...]:
    """The codec's index of a request, in the form of the compiled one."""
    topics = []
    for topic in request.topics:
        name_start = topic.head_end - len(topic.wire)
        spans = (topic.head_start, name_start, topic.head_end, topic.tail_start, topic.tail_end)
        entries = [
            (index, start, end, records_span(request, topic, ordinal)[0])
            for ordinal, (index, start, end) in enumerate(zip(topic.partitions, topic.starts, topic.ends, strict=True))
        ]
        topics.append((spans, entries))
    header = request.header
    return (
        header.api_version,
        header.correlation_id,
        request.acks,
        request.timeout_ms,
        request.topics_start,
        request.topics_end,
        topics,
    )


def judge(frame: memoryview) -> bool:
    """Check whether a frame is indexed; if so, the codec must read the same."""
    found = plain.index(frame)
    if found is None:
        return False
    assert found == indexed(parsed(frame))
    return True


@pytest.mark.parametrize("version", VERSIONS)
def test_usual_requests_are_indexed_as_by_codec(version: int) -> None:
    for topics in (TOPICS, {"t": [0]}, {"t": list(range(100))}, {"x" * 200: [1, 2], "y": [2**31 - 1]}):
        assert judge(usual(version, topics))


@settings(max_examples=examples(300))
@given(st.data())
def test_indexed_request_is_read_equally_by_codec(data: st.DataObject) -> None:
    version = data.draw(st.sampled_from(VERSIONS))
    frame = request_frame(PRODUCE, version, request_body(PRODUCE, version, data.draw(requests(PRODUCE, version))))
    judge(frame)


def test_changed_requests_are_read_or_refused_equally() -> None:
    """A request that the codec refuses is never indexed, whatever bytes were changed, cut, repeated or inflated."""
    print(f"KPROXY_SEED={SEED}")
    draw = random.Random(SEED)
    frames = {version: usual(version) for version in VERSIONS}
    counts = {True: 0, False: 0}
    for _ in range(20_000):
        frame = mutated(draw, frames[draw.choice(VERSIONS)])
        try:
            counts[judge(frame)] += 1
        except CodecError as error:
            pytest.fail(f"indexed, but {error}: {bytes(frame).hex()}")
    assert min(counts.values()) > 1000, counts


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
@pytest.mark.parametrize("version", VERSIONS)
def test_part_is_encoded_as_by_codec(version: int, selection: Selection) -> None:
    frame = usual(version)
    assert plain.part(frame, selection, 77) == b"".join(Splitter(parsed(frame), None).part(selection, 77))


@functools.lru_cache
def asked_by(version: int) -> Exchange:
    """The usual request."""
    return Exchange(PRODUCE_API, parsed(usual(version)), 1, 0.0)


def entries_to(version: int, selection: Selection) -> dict[Entry, bytes]:
    """A success for each selected entry."""
    topics = asked_by(version).request.topics
    return {
        (place, ordinal): PRODUCE_API.error_entry(version, topics[place].partitions[ordinal], 0)
        for place, ordinals in selection
        for ordinal in ordinals
    }


def answer_of(version: int, selection: Selection, entries: dict[Entry, bytes]) -> memoryview:
    """The answer with these entries, in the order of the selection."""
    request = asked_by(version).request
    topics = [
        (request.topics[place].wire, [entries[place, ordinal] for ordinal in ordinals], len(ordinals))
        for place, ordinals in selection
    ]
    head, tail = PRODUCE_API.response_ends(version, 0, [])
    # The correlation_id, and the tagged fields of the header.
    first = bytes(4) + (b"\x00" if request.flexible else b"")
    encoded = encode_topics(topics, flexible=request.flexible, by_id=request.by_id)
    return frame_of(first + head, b"".join(encoded), tail)


def in_order(version: int, selection: Selection, frame: memoryview) -> memoryview | None:
    """An answer in the order of the selection; None if it is not one of success, or has something unusual."""
    exchange = asked_by(version)
    if not is_success(exchange, selection, frame):
        return None
    response = PRODUCE_API.parse_response(frame, version)
    results = match_results(exchange, selection, response)
    entries = {entry: bytes(frame[topic.starts[at] : topic.ends[at]]) for entry, _, topic, at in results}
    # The bytes after the offsets.
    end_bytes = 3 if version >= 9 else 6 if version == 8 else 0
    for entry, usual_one in entries_to(version, selection).items():
        found = entries[entry]
        if len(found) != len(usual_one) or found[len(found) - end_bytes :] != usual_one[len(found) - end_bytes :]:
            return None
    ordered = answer_of(version, selection, entries)
    is_usual = len(ordered) == len(frame) and not (response.throttle_time_ms or response.names_brokers)
    return ordered if is_usual and not response.other_tags else None


def places_in(version: int, selection: Selection, answer: memoryview) -> list[int]:
    """The positions at which the entries of an answer begin."""
    return [start for topic in PRODUCE_API.parse_response(answer, version).topics for start in topic.starts]


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
@pytest.mark.parametrize("version", VERSIONS)
def test_answers_are_judged_as_in_python(version: int, selection: Selection) -> None:
    print(f"KPROXY_SEED={SEED}")
    draw = random.Random(SEED)
    asked = usual(version)
    whole = answer_of(version, selection, entries_to(version, selection))
    assert plain.results(asked, selection, whole) == places_in(version, selection, whole)
    met = 0
    for _ in range(500):
        frame = bytearray(whole)
        for _ in range(draw.randrange(1, 3)):
            frame[draw.randrange(4, len(frame))] = draw.randrange(256)
        if not draw.randrange(4):
            frame = frame[: draw.randrange(8, len(frame))]
        set_response_correlation_id(memoryview(frame), 0)
        expected = in_order(version, selection, memoryview(bytearray(frame)))
        found = plain.results(asked, selection, memoryview(frame))
        assert (found is not None) is (expected is not None)
        assert found is None or frame == expected
        met += found is not None
    assert met


@pytest.mark.parametrize("version", VERSIONS)
def test_answers_in_other_order_are_sorted_equally(version: int) -> None:
    print(f"KPROXY_SEED={SEED}")
    draw = random.Random(SEED)
    asked = usual(version)
    sorted_ = 0
    for _ in range(300):
        selection = draw.choice(SELECTIONS)
        frame = bytearray(answer_of(version, selection, entries_to(version, selection)))
        # Whole entries change places; if one belongs to another topic, the answer is invalid.
        starts = places_in(version, selection, memoryview(bytearray(frame)))
        size = len(PRODUCE_API.error_entry(version, 0, 0))
        others = draw.sample(starts, len(starts))
        entries = [bytes(frame[start : start + size]) for start in others]
        for start, entry in zip(starts, entries, strict=True):
            frame[start : start + size] = entry
        if not draw.randrange(3):
            frame[draw.randrange(8, len(frame))] = draw.randrange(256)
        expected = in_order(version, selection, memoryview(bytearray(frame)))
        received = memoryview(bytearray(frame))
        found = plain.results(asked, selection, received)
        assert (found is not None) is (expected is not None)
        assert received == (frame if expected is None else expected)
        sorted_ += found is not None and received != frame
    assert sorted_


def test_topics_in_other_order_are_sorted() -> None:
    for version in VERSIONS:
        entries = entries_to(version, ALL)
        received = answer_of(version, [ALL[2], ALL[0], ALL[1]], entries)
        expected = answer_of(version, ALL, entries)
        found = plain.results(usual(version), ALL, received)
        assert received == expected
        assert found == places_in(version, ALL, expected)
