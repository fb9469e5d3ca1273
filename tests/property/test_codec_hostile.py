"""Damaged bytes give a CodecError or a message, never another exception, and never use much memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy_codec import partitioned, primitives, replica_fetch
from kproxy_codec.api_keys import FETCH, PRODUCE
from kproxy_codec.errors import CodecError
from kproxy_codec.fetch import FetchRequest, partition_fetch
from kproxy_codec.framing import parse_request_header, response_body_offset
from kproxy_codec.partitioned import PartitionedRequest, PartitionedResponse, Splitter
from kproxy_codec.primitives import Buffer, read_tagged_fields
from kproxy_codec.produce import records_of, transactional_id
from kproxy_codec.replica_fetch import ReplicaAnswer, read_replica_answer
from tests.support.rules import examples
from tests.support.wire.hostile import INFLATED, assert_refused_before_allocation, assert_refused_when_cut
from tests.support.wire.messages import (
    APIS,
    EVERY_VERSION,
    FLEXIBLE_FROM,
    REQUEST_FIELDS,
    RESPONSE_FIELDS,
    VERSIONS,
    frame_of,
    head_of,
    named_as,
    read_by_kafka_python,
    request_body,
    request_frame,
    requests,
    response_body,
    response_frame,
    responses,
    sample_request,
    sample_response,
)

TAGS = [(100, b"abc"), (2**31, b"")]
# A follower's answer is written like any other answer.
WRITTEN_AS = {"replica answer": "response"}
Parsed = PartitionedRequest | PartitionedResponse | ReplicaAnswer


def _tagged(api_key: int, fields: dict[str, object], names: tuple[str, str, str, str]) -> dict[str, object]:
    topics = fields[names[0]]
    assert isinstance(topics, list)
    topics[0]["tags"] = TAGS
    topics[0][names[1]][0]["tags"] = TAGS
    return {**fields, "tags": TAGS}


def _sample(kind: str, api_key: int, version: int) -> memoryview:
    partitions = {"flights": [0, 3], "ü": [7]}
    if kind == "request":
        changes = {"transactional_id": "tx"} if api_key == PRODUCE else {}
        fields = _tagged(api_key, sample_request(api_key, partitions, **changes), REQUEST_FIELDS[api_key])
        return request_frame(api_key, version, request_body(api_key, version, fields), tags=TAGS)
    fields = _tagged(api_key, sample_response(api_key, partitions), RESPONSE_FIELDS[api_key])
    return response_frame(api_key, version, response_body(api_key, version, fields), tags=TAGS)


def _parse(kind: str, api_key: int, version: int, frame: memoryview) -> Parsed:
    if kind == "replica answer":
        return read_replica_answer(frame)
    if kind == "response":
        return APIS[api_key].parse_response(frame, version)
    header = parse_request_header(frame)
    # A broken header may name another API, which the proxy would use, and so does this function.
    return APIS.get(header.api_key, APIS[api_key]).parse_request(frame, header)


def _use(message: Parsed) -> None:
    """Use the parts of an accepted message that the proxy or a follower would use."""
    if isinstance(message, ReplicaAnswer):
        assert all(len(topic_id) == 16 for topic_id, _ in message.topics)
        assert all(bytes(each.records) is not None for _, found in message.topics for each in found)
        return
    size = len(message.frame)
    for topic in message.topics:
        assert len(topic.starts) == len(topic.ends) == len(topic.partitions)
        assert all(0 < start < end <= size for start, end in zip(topic.starts, topic.ends, strict=True))
    if isinstance(message, PartitionedResponse):
        assert [len(topic.error_codes) for topic in message.topics] == [len(topic.starts) for topic in message.topics]
        return
    message.repeats_a_partition()
    for topic in message.topics:
        for ordinal, start in enumerate(topic.starts):
            if message.header.api_key == PRODUCE:
                assert len(records_of(message, topic, ordinal)) < size
            if isinstance(message, FetchRequest):
                partition_fetch(message, start)
    if message.header.api_key == PRODUCE:
        transactional_id(message)
    _take_apart(message)


def _take_apart(request: PartitionedRequest) -> None:
    """Check that an accepted request can be sent in parts, and that the parts are accepted."""
    api = APIS[request.header.api_key]
    for parity in (0, 1):
        selection = []
        for place, topic in enumerate(request.topics):
            ordinals = [ordinal for ordinal in range(len(topic.starts)) if ordinal % 2 == parity]
            if ordinals:
                selection.append((place, ordinals))
        splitter = Splitter(request, api.piece_preamble(request, 2, 1))
        frame = memoryview(bytearray(b"".join(splitter.part(selection, 1))))
        again = api.parse_request(frame, head_of(frame))
        assert [(topic.name, topic.partitions) for topic in again.topics] == [
            (request.topics[place].name, request.topics[place].partitions[parity::2]) for place, _ in selection
        ]


REPLICA_ANSWER = ("replica answer", FETCH, replica_fetch.VERSION)
EVERY_MESSAGE = [(kind, *case) for kind in ("request", "response") for case in EVERY_VERSION] + [REPLICA_ANSWER]


@pytest.mark.parametrize(("kind", "api_key", "version"), EVERY_MESSAGE)
def test_truncated_message_is_refused_at_any_length(kind: str, api_key: int, version: int) -> None:
    frame = _sample(kind, api_key, version)
    _use(_parse(kind, api_key, version, memoryview(bytearray(frame))))
    assert_refused_when_cut(partial(_parse, kind, api_key, version), frame)


# One of each layout that matters to lengths: the oldest, the last before compact types, the first with them and the
# newest.
EVERY_LAYOUT = [
    (kind, api_key, version)
    for kind in ("request", "response")
    for api_key, versions in VERSIONS.items()
    for version in sorted({versions[0], FLEXIBLE_FROM[api_key] - 1, FLEXIBLE_FROM[api_key], versions[-1]})
] + [REPLICA_ANSWER]


@pytest.mark.parametrize(("kind", "api_key", "version"), EVERY_LAYOUT)
def test_inflated_lengths_are_refused_before_allocation(kind: str, api_key: int, version: int) -> None:
    assert_refused_before_allocation(partial(_parse, kind, api_key, version), bytes(_sample(kind, api_key, version)))


CASES = st.sampled_from(EVERY_VERSION).flatmap(
    lambda case: st.tuples(*map(st.just, case), requests(*case), responses(*case))
)


def _break(chance: random.Random, frame: bytes, spared: int) -> memoryview:
    """Change, insert, remove or repeat a few bytes behind the first `spared`."""
    broken = bytearray(frame)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(spared, len(broken) + 1)
        width = chance.choice((0, 1, 1, 1, 2, 4, 9))
        put = chance.choice((chance.choice(INFLATED), chance.randbytes(width), bytes(broken[at : at + width]) * 2, b""))
        broken[at : at + width] = put
    return memoryview(broken)


# Cluster id, leaders, endpoints, epochs: kafka-python parses these; the codec blanks, drops or forwards them.
KNOWN_TAGS = {0, 1, 2}


@contextmanager
def _tags_seen() -> Iterator[set[int]]:
    """The numbers of all tagged fields that are read meanwhile."""
    seen: set[int] = set()

    def read(buffer: Buffer, offset: int, limit: int) -> tuple[list[tuple[int, int, int]], int]:
        fields, end = read_tagged_fields(buffer, offset, limit)
        seen.update(tag for tag, _, _ in fields)
        return fields, end

    with (
        mock.patch.object(primitives, "read_tagged_fields", read),
        mock.patch.object(partitioned, "read_tagged_fields", read),
    ):
        yield seen


@settings(max_examples=examples(80))
@given(CASES, st.integers(0, 2**64))
def test_accepted_message_is_read_as_by_kafka_python(
    case: tuple[int, int, dict[str, object], dict[str, object]], seed: int
) -> None:
    """A message that this codec accepts reaches a broker or a client, which must not be the first to see a fault."""
    api_key, version, request, response = case
    chance = random.Random(seed)
    frames = {
        "request": bytes(request_frame(api_key, version, request_body(api_key, version, request), tags=TAGS)),
        "response": bytes(response_frame(api_key, version, response_body(api_key, version, response), tags=TAGS)),
    }
    if (api_key, version) == REPLICA_ANSWER[1:]:
        frames["replica answer"] = frames["response"]
    for kind, frame in frames.items():
        noise = chance.randbytes(chance.randrange(120))
        for noisy in (frame_of(noise), request_frame(api_key, version, noise)):
            with suppress(CodecError):
                _use(_parse(kind, api_key, version, noisy))
        for _ in range(12):
            # The API and its version are left alone: a request is broken, not another one.
            broken = _break(chance, frame, 8)
            before = bytes(broken)
            with _tags_seen() as tags:
                try:
                    message = _parse(kind, api_key, version, broken)
                except CodecError:
                    continue
            _use(message)
            if tags.isdisjoint(KNOWN_TAGS):
                _compare(kind, api_key, version, before, message)


def _compare(kind: str, api_key: int, version: int, frame: bytes, message: Parsed) -> None:
    if isinstance(message, PartitionedRequest):
        begin, names = message.header.body_offset, REQUEST_FIELDS[api_key]
    else:
        begin, names = response_body_offset(frame, api_key, version), RESPONSE_FIELDS[api_key]
    try:
        theirs = read_by_kafka_python(WRITTEN_AS.get(kind, kind), api_key, version, frame[begin:])
    except CodecError as error:
        # Only the names of topics matter here, and brokers read other strings leniently.
        if "utf-8" in str(error):
            return
        raise
    found = [
        (named_as(api_key, version, topic[names[2]]), [entry[names[3]] for entry in topic[names[1]]])
        for topic in theirs[names[0]]
    ]
    if isinstance(message, ReplicaAnswer):
        ours = [(topic_id, [each.partition_index for each in results]) for topic_id, results in message.topics]
        records = [bytes(each.records) for _, results in message.topics for each in results]
        assert records == [entry["records"] or b"" for topic in theirs["responses"] for entry in topic["partitions"]]
    else:
        ours = [(topic.name, topic.partitions) for topic in message.topics]
    assert ours == found
