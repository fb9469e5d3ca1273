"""The compiled plain path handles Fetch requests and answers as the Python codec does, or leaves them to the core.

KPROXY_SEED repeats a run of the mutations.
"""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from kproxy.plain import compiled
from kproxy.routing.merge import answers_in_order
from kproxy_codec.api_keys import FETCH
from kproxy_codec.errors import CodecError
from kproxy_codec.fetch import MAX_VERSION, MIN_VERSION, FetchApi, FetchRequest
from kproxy_codec.framing import parse_request_header
from tests.support.wire.hostile import INFLATED
from tests.support.wire.messages import (
    RESPONSE_FIELDS,
    frame_of,
    request_body,
    request_frame,
    response_body,
    response_frame,
    sample_request,
    sample_response,
)

pytestmark = pytest.mark.skipif(compiled is None, reason="the plain path is not compiled here")
plain: Any = compiled

VERSIONS = range(MIN_VERSION, MAX_VERSION + 1)
SEED = int(os.environ.get("KPROXY_SEED", "0")) or secrets.randbelow(1 << 32)
TOPICS = {"a": [4, 0, 2], "topic": [7]}
API = FetchApi()
# Where the correlation id ends.
BODY = 12


def fetch_frame(version: int, offset: int, epoch: int = -1, **changes: Any) -> memoryview:
    """A fetch of all TOPICS from this offset on."""
    fields = sample_request(FETCH, TOPICS, **{"session_id": 0, "session_epoch": -1, "rack_id": "", **changes})
    for topic in fields["topics"]:
        for entry in topic["partitions"]:
            entry |= {"fetch_offset": offset, "current_leader_epoch": epoch}
    return request_frame(FETCH, version, request_body(FETCH, version, fields), correlation_id=offset % 1000)


def admitted(frame: memoryview) -> FetchRequest:
    """A request as the core sends it to a broker. Raises CodecError."""
    request = API.parse_request(frame, parse_request_header(frame))
    if request.continues_session or request.is_too_large or request.repeats_a_partition():
        raise CodecError("it is refused")
    API.admit(request)
    return request


def answer_frame(version: int, topics: Mapping[str, Sequence[int]] = TOPICS, **changes: Any) -> memoryview:
    """An answer with records for each partition."""
    fields = sample_response(FETCH, topics, **changes)
    listed, entries, *_ = RESPONSE_FIELDS[FETCH]
    for number, topic in enumerate(fields[listed]):
        for entry in topic[entries]:
            entry |= {"error_code": 0, "preferred_read_replica": 3, "records": b"r" * 50 * number}
            entry["aborted_transactions"] = [{"producer_id": 1, "first_offset": 2}] * number
    return response_frame(FETCH, version, response_body(FETCH, version, fields))


def mutated(draw: random.Random, frame: memoryview) -> memoryview:
    """A frame with some bytes changed, cut, or repeated, of the same length or not."""
    body = bytearray(frame[4:])
    for _ in range(draw.randrange(3)):
        at = draw.randrange(len(body))
        match draw.randrange(5):
            case 0:
                body[at] = draw.randrange(256)
            case 1:
                body[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                inflated = draw.choice(INFLATED)[: len(body) - at]
                body[at : at + len(inflated)] = inflated
            case 3:
                del body[at : at + draw.randrange(1, 9)]
            case _:
                body[at:at] = body[at : at + draw.randrange(1, 9)]
    return frame_of(bytes(body))


@pytest.mark.parametrize("version", VERSIONS)
def test_read_again_is_sent_as_by_core(version: int) -> None:
    known = admitted(fetch_frame(version, 5))
    again = plain.read_again(known, fetch_frame(version, 2**40, epoch=9))
    assert again[BODY:] == bytes(admitted(fetch_frame(version, 2**40, epoch=9)).frame[BODY:])


@pytest.mark.parametrize(
    "changes", [{"max_bytes": 9}, {"min_bytes": 7}, {"isolation_level": 0}, {"session_epoch": 4}, {"rack_id": "r"}]
)
def test_other_read_is_left_to_core(changes: dict[str, Any]) -> None:
    known = admitted(fetch_frame(11, 5))
    assert plain.read_again(known, fetch_frame(11, 5)) is not None
    assert plain.read_again(known, fetch_frame(11, 5, **changes)) is None
    assert plain.read_again(known, fetch_frame(10, 5)) is None


def test_changed_reads_are_sent_like_core_does() -> None:
    print(f"KPROXY_SEED={SEED}")
    draw = random.Random(SEED)
    taken = 0
    for _ in range(8000):
        version = draw.choice(VERSIONS)
        frame = mutated(draw, fetch_frame(version, draw.randrange(1000)))
        again = plain.read_again(admitted(fetch_frame(version, 5)), frame)
        if again is not None:
            taken += 1
            assert again[BODY:] == bytes(admitted(frame).frame[BODY:]), bytes(frame).hex()
    assert 800 < taken < 7200


@pytest.mark.parametrize("version", VERSIONS)
def test_plain_answer_is_read_like_codec_does(version: int) -> None:
    known, ours, theirs = admitted(fetch_frame(version, 5)), answer_frame(version), answer_frame(version)
    assert plain.has_read(known, ours)
    response = API.parse_response(theirs, version)
    assert answers_in_order(known, response)
    assert bytes(ours) == bytes(theirs)


@pytest.mark.parametrize(
    "answer",
    [
        answer_frame(12, error_code=6),
        answer_frame(12, {"a": [4, 0], "topic": [7]}),
        answer_frame(12, {"a": [4, 2, 0], "topic": [7]}),
        answer_frame(12, {"topic": [7], "a": [4, 0, 2]}),
        answer_frame(12, {"a": [4, 0, 2], "topia": [7]}),
        answer_frame(12, tags=[(0, b"where a broker is")]),
        answer_frame(12)[:-1],
    ],
)
def test_unusual_answer_is_left_to_core(answer: memoryview) -> None:
    assert not plain.has_read(admitted(fetch_frame(12, 5)), answer)


def test_changed_answers_are_read_like_codec_does() -> None:
    print(f"KPROXY_SEED={SEED}")
    draw = random.Random(SEED)
    taken = 0
    for _ in range(8000):
        version = draw.choice(VERSIONS)
        known, ours = admitted(fetch_frame(version, 5)), mutated(draw, answer_frame(version))
        theirs = memoryview(bytearray(ours))
        if plain.has_read(known, ours):
            taken += 1
            response = API.parse_response(theirs, version)
            assert answers_in_order(known, response)
            assert (response.error_code, response.names_brokers) == (0, False)
            assert bytes(ours) == bytes(theirs), bytes(ours).hex()
    assert 800 < taken < 7200
