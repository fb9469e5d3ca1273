"""The requests of `bench.paths`, and its broker, which refuses each tenth batch until it is sent again."""

from __future__ import annotations

import pytest

from bench.load import VERSION, Frames, ProducerFrames
from bench.paths import ALL_OWNERS, FIRST, REFUSED, SHAPE, first_batches
from bench.refusing_broker import REFUSED_EVERY, RefusingBroker
from kproxy_codec.framing import ReceiveArena, parse_request_header
from kproxy_codec.produce import PRODUCE_API, parse_produce

NONE, NOT_LEADER = 0, 6


@pytest.fixture
def broker() -> RefusingBroker:
    return RefusingBroker(ReceiveArena())


def code(broker: RefusingBroker, frame: bytes | bytearray) -> int:
    """The broker's error code for a request's only batch."""
    answer = PRODUCE_API.parse_response(memoryview(bytearray(broker.answer(memoryview(frame)))), VERSION)
    ((error_code,),) = (topic.error_codes for topic in answer.topics)
    return error_code


def test_tenth_batch_is_refused_once_and_then_taken(broker: RefusingBroker) -> None:
    frames = ProducerFrames(SHAPE, topic=REFUSED)
    codes = []
    for _ in range(3 * REFUSED_EVERY):
        frame = frames()
        codes.append(code(broker, frame))
        if codes[-1]:
            assert code(broker, frame) == NONE
    assert codes == ([NONE] * (REFUSED_EVERY - 1) + [NOT_LEADER]) * 3


def test_batches_behind_refused_batch_are_refused_too(broker: RefusingBroker) -> None:
    frames = ProducerFrames(SHAPE, topic=REFUSED)
    others = ProducerFrames(SHAPE, 1, REFUSED)
    for _ in range(REFUSED_EVERY - 1):
        assert code(broker, frames()) == NONE
    refused, behind = frames(), frames()
    assert [code(broker, frame) for frame in (refused, behind, behind)] == [NOT_LEADER] * 3
    assert code(broker, others()) == NONE
    assert [code(broker, frame) for frame in (refused, behind)] == [NONE] * 2


def partitions(frames: Frames, count: int) -> list[tuple[bytes, int]]:
    """The partitions of the first requests of a row."""
    assert not isinstance(frames, bytes)
    found = []
    for _ in range(count):
        frame = memoryview(frames())
        (topic,) = parse_produce(frame, parse_request_header(frame)).topics
        (partition_index,) = topic.partitions
        found.append((topic.name, partition_index))
    return found


def test_first_batch_needs_an_unused_connection() -> None:
    count = len(ALL_OWNERS[FIRST])
    assert partitions(first_batches(), count) == [(FIRST, index) for index in range(count)]
