"""Answers are matched to the requests that await them, however their bytes arrive; anything else is an error."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_codec.correlation import MAX_CORRELATION_ID, AwaitedAnswers
from kproxy_codec.errors import CodecError, FrameTooLarge, InvalidField, Truncated, UnexpectedAnswer
from kproxy_codec.framing import CHUNK_BYTES, FrameReader

LIMIT = 1000


def answer(correlation_id: int, body: bytes = b"") -> bytes:
    return struct.pack(">ii", 4 + len(body), correlation_id) + body


def awaiting(*correlation_ids: int, most: int = 10) -> AwaitedAnswers[str]:
    queue: AwaitedAnswers[str] = AwaitedAnswers(FrameReader(LIMIT), most)
    for correlation_id in correlation_ids:
        queue.sent(correlation_id, f"waiter {correlation_id}")
    return queue


def receiving(queue: AwaitedAnswers[str], data: bytes) -> Iterator[tuple[str, memoryview]]:
    while data:
        buffer = queue.frames.get_buffer()
        nbytes = min(len(buffer), len(data))
        buffer[:nbytes], data = data[:nbytes], data[nbytes:]
        yield from queue.receive(nbytes)


@given(st.lists(st.binary(max_size=200), max_size=10), st.lists(st.integers(1, 50), min_size=1))
def test_each_waiter_gets_one_answer_at_any_cut(bodies: list[bytes], cuts: list[int]) -> None:
    queue = awaiting(*range(len(bodies)))
    stream = b"".join(answer(number, body) for number, body in enumerate(bodies))
    found: list[tuple[str, bytes]] = []
    while stream:
        size = cuts[len(stream) % len(cuts)]
        found += [(waiter, bytes(frame)) for waiter, frame in receiving(queue, stream[:size])]
        stream = stream[size:]
    assert found == [(f"waiter {number}", answer(number, body)) for number, body in enumerate(bodies)]
    assert (len(queue), queue.oldest) == (0, None)


def test_bytes_beyond_the_buffer_arrive_in_parts() -> None:
    count = 2 * CHUNK_BYTES // LIMIT
    queue = awaiting(*range(count), most=count)
    stream = b"".join(answer(number, b"x" * (LIMIT - 4)) for number in range(count))
    assert b"".join(frame for _, frame in receiving(queue, stream)) == stream
    assert len(queue) == 0


@pytest.mark.parametrize(
    ("received", "error", "words"),
    [
        (answer(2), UnexpectedAnswer, "matches no request \\(2; correlation_id 1 is awaited\\)"),
        (answer(1) + answer(1), UnexpectedAnswer, "matches no request \\(1; correlation_id 2 is awaited\\)"),
        (answer(1) + answer(2) + answer(3), UnexpectedAnswer, "matches no request \\(3; nothing is awaited\\)"),
        (struct.pack(">ih", 2, 1), Truncated, "shorter than its header"),
        (struct.pack(">i", -1), InvalidField, "negative length"),
        (struct.pack(">i", LIMIT + 1), FrameTooLarge, "at most 1000"),
    ],
    ids=["out of order", "twice", "not asked", "no header", "a negative length", "too large"],
)
def test_unexpected_answer_is_an_error(received: bytes, error: type[CodecError], words: str) -> None:
    queue = awaiting(1, 2)
    with pytest.raises(error, match=words):
        list(receiving(queue, received))


def test_answers_before_unexpected_one_reach_their_waiters() -> None:
    queue = awaiting(1, 2, 3)
    answers = receiving(queue, answer(1) + answer(3))
    assert next(answers)[0] == "waiter 1"
    with pytest.raises(UnexpectedAnswer):
        next(answers)
    assert [*queue] == ["waiter 2", "waiter 3"]


def test_ended_waiters_count_until_taken_out() -> None:
    queue = awaiting(1, 2, 3)
    assert [(waiter, [*queue]) for waiter in queue.end()] == [
        ("waiter 1", ["waiter 2", "waiter 3"]),
        ("waiter 2", ["waiter 3"]),
        ("waiter 3", []),
    ]


def test_queue_is_bounded() -> None:
    queue = awaiting(1, 2, most=2)
    with pytest.raises(CodecError, match="2 earlier requests have no answer yet"):
        queue.sent(3, "waiter 3")
    assert [*queue] == ["waiter 1", "waiter 2"]


def test_waiters_are_replaced_in_place_during_reception() -> None:
    queue = awaiting(1, 2, 3)
    answers = receiving(queue, answer(1) + answer(2) + answer(3))
    found = [next(answers)[0]]
    queue.replace({"waiter 3": "another", "waiter 9": "nobody"})
    assert queue.oldest == (2, "waiter 2")
    assert found + [waiter for waiter, _ in answers] == ["waiter 1", "waiter 2", "another"]


def test_correlation_ids_begin_anew_after_the_largest() -> None:
    queue = awaiting()
    assert (queue.next_id(), queue.next_id()) == (1, 2)
    queue._last_id = MAX_CORRELATION_ID - 1
    assert (queue.next_id(), queue.next_id()) == (MAX_CORRELATION_ID, 0)
