"""The quick check of a produce answer agrees with parsing it, or finds nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy_codec.api_keys import PRODUCE
from kproxy_codec.errors import CodecError
from kproxy_codec.partitioned import PartitionedRequest
from kproxy_codec.produce import MAX_VERSION, MIN_VERSION, PRODUCE_API, parse_produce
from tests.support.rules import examples
from tests.support.wire.messages import (
    head_of,
    request_body,
    request_frame,
    response_body,
    response_frame,
    sample_request,
)

VERSIONS = range(MIN_VERSION, MAX_VERSION + 1)
TOPICS = {"a": [4, 0, 2], "topic": [7], "c": [1, 9]}
Selection = list[tuple[int, list[int]]]
ALL: Selection = [(0, [0, 1, 2]), (1, [0]), (2, [0, 1])]
SELECTIONS: list[Selection] = [ALL, [(0, [0, 2])], [(1, [0]), (2, [1])], [(2, [0, 1])]]


def _request(version: int) -> PartitionedRequest:
    frame = request_frame(PRODUCE, version, request_body(PRODUCE, version, sample_request(PRODUCE, TOPICS)))
    return parse_produce(frame, head_of(frame))


def _answer(request: PartitionedRequest, selection: Selection, base_offset: int = 77) -> dict[str, Any]:
    topics = []
    for place, ordinals in selection:
        topic = request.topics[place]
        results = [
            {
                "index": topic.partitions[ordinal],
                "error_code": 0,
                "base_offset": base_offset + ordinal,
                "log_append_time_ms": -1,
                "log_start_offset": 3,
                "record_errors": [],
                "error_message": None,
                "tags": [],
            }
            for ordinal in ordinals
        ]
        topics.append({"name": list(TOPICS)[place], "partition_responses": results, "tags": []})
    return {"responses": topics, "throttle_time_ms": 0, "tags": []}


def _framed(version: int, answer: dict[str, Any]) -> memoryview:
    return response_frame(PRODUCE, version, response_body(PRODUCE, version, answer))


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
@pytest.mark.parametrize("version", VERSIONS)
def test_success_is_recognised_and_cut_as_by_parsing(version: int, selection: Selection) -> None:
    request = _request(version)
    frame = _framed(version, _answer(request, selection))
    parsed = PRODUCE_API.parse_response(frame, version)
    expected = [
        bytes(frame[start:end]) for topic in parsed.topics for start, end in zip(topic.starts, topic.ends, strict=True)
    ]
    assert PRODUCE_API.plain_answer(request, selection).results(frame) == expected


def _changes(version: int) -> dict[str, Any]:
    """What must be looked at more closely."""

    def entry(**fields: Any) -> Any:
        return lambda answer: answer["responses"][1]["partition_responses"][0].update(fields)

    changes: dict[str, Any] = {
        "an error": entry(error_code=6),
        "another partition": entry(index=8),
        "a partition twice": lambda answer: answer["responses"][0]["partition_responses"][1].update(index=4),
        "another topic": lambda answer: answer["responses"][1].update(name="tobic"),
        "a topic more": lambda answer: answer["responses"].append({**answer["responses"][1], "name": "d"}),
        "a topic less": lambda answer: answer["responses"].pop(),
        "a partition less": lambda answer: answer["responses"][2]["partition_responses"].pop(),
        "throttling": lambda answer: answer.update(throttle_time_ms=1),
    }
    if version >= 8:
        changes["a message"] = entry(error_message="x")
        changes["a record error"] = entry(
            record_errors=[{"batch_index": 0, "batch_index_error_message": None, "tags": []}]
        )
    if version >= 9:
        tag = [(100, b"x")]
        changes["an entry's tag"] = entry(tags=tag)
        changes["a topic's tag"] = lambda answer: answer["responses"][2].update(tags=tag)
        changes["the answer's tag"] = lambda answer: answer.update(tags=tag)
    return changes


@pytest.mark.parametrize(
    ("version", "change"), [(version, change) for version in VERSIONS for change in _changes(version)]
)
def test_other_answers_are_left_to_parsing(version: int, change: str) -> None:
    request = _request(version)
    answer = _answer(request, ALL)
    _changes(version)[change](answer)
    assert PRODUCE_API.plain_answer(request, ALL).results(_framed(version, answer)) is None


@settings(max_examples=examples(100))
@given(st.sampled_from(VERSIONS), st.sampled_from(SELECTIONS), st.randoms(use_true_random=False))
def test_success_is_reordered_as_the_request(version: int, selection: Selection, draw: random.Random) -> None:
    """A broker of Apache Kafka answers in the order of its hash tables."""
    request = _request(version)
    answer = _answer(request, selection)
    expected = bytes(_framed(version, answer))
    draw.shuffle(answer["responses"])
    for topic in answer["responses"]:
        draw.shuffle(topic["partition_responses"])
    frame = _framed(version, answer)
    assert PRODUCE_API.plain_answer(request, selection).is_met(frame)
    assert bytes(frame) == expected


@settings(max_examples=examples(300))
@given(st.sampled_from(VERSIONS), st.sampled_from(SELECTIONS), st.data())
def test_other_bytes_never_count_as_success(version: int, selection: Selection, data: st.DataObject) -> None:
    """Bytes changed, cut or added anywhere: either it is seen to be odd, or parsing calls it the same success."""
    request = _request(version)
    whole = bytearray(_framed(version, _answer(request, selection)))
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(8, len(whole) - 1))] = data.draw(st.integers(0, 255))
    size = data.draw(st.integers(8, len(whole)))
    frame = memoryview(whole[:size] if data.draw(st.booleans()) else whole + bytes(data.draw(st.integers(0, 3))))
    results = PRODUCE_API.plain_answer(request, selection).results(frame)
    if results is None:
        return
    try:
        parsed = PRODUCE_API.parse_response(frame, version)
    except CodecError as error:
        pytest.fail(f"taken for a success, but {error}")
    asked = [
        (request.topics[place].name, [request.topics[place].partitions[ordinal] for ordinal in ordinals])
        for place, ordinals in selection
    ]
    assert [(topic.name, topic.partitions) for topic in parsed.topics] == asked
    assert not any(code for topic in parsed.topics for code in topic.error_codes)
    assert (parsed.throttle_time_ms, parsed.names_brokers, parsed.other_tags) == (0, False, [])
