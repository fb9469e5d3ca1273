"""Headers and error codes: equal to those of other libraries; hostile headers are refused."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from kafka.protocol import admin, consumer, metadata, producer, sasl
from kafka.protocol.api_header import RequestHeader as TheirRequestHeader
from kafka.protocol.api_header import ResponseHeader as TheirResponseHeader
from kafka.protocol.api_message import ApiMessage
from kio.index import KioIndexError, load_payload_module
from kio.schema.errors import ErrorCode
from kio.static.constants import EntityType

from kproxy_codec import api_keys, error_codes
from kproxy_codec.api_keys import API_VERSIONS, FETCH, METADATA, PRODUCE, is_flexible, name_of
from kproxy_codec.errors import CodecError, InvalidField, Truncated
from kproxy_codec.framing import (
    client_id,
    frame_message,
    parse_request_header,
    request_header,
    response_body_offset,
    response_correlation_id,
    response_header,
)
from kproxy_codec.partitioned import set_correlation_id
from tests.support.wire.messages import tag_section, uvarint

OWN = 20311


def _their_classes() -> list[Any]:
    modules = (admin, consumer, metadata, producer, sasl)
    candidates = [getattr(module, name) for module in modules for name in module.__all__]
    return [candidate for candidate in candidates if isinstance(candidate, type(ApiMessage))]


THEIR_CLASSES = _their_classes()
EVERY_MESSAGE = [pytest.param(candidate, id=candidate.name) for candidate in THEIR_CLASSES]
# This project's own APIs, which no other codec knows.
PRIVATE_KEYS = {api_keys.OWN, api_keys.BIND_FENCES}
KAFKAS_KEYS = [
    value
    for name, value in vars(api_keys).items()
    if isinstance(value, int) and name_of(value) == name and value not in PRIVATE_KEYS
]


def test_kafka_python_knows_the_tested_apis() -> None:
    known = {candidate.API_KEY for candidate in THEIR_CLASSES}
    assert {0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 17, 18, 19, 20, 22, 24, 25, 26, 28, 36, 37, 42, 60, 75} <= known
    assert len(known) >= 50


@pytest.mark.parametrize("message_class", EVERY_MESSAGE)
def test_flexible_versions_are_those_of_kafkas_schemas(message_class: Any) -> None:
    for version in range(message_class.max_version + 1):
        assert is_flexible(message_class.API_KEY, version) is message_class.flexible_version_q(version)


@pytest.mark.parametrize("api_key", KAFKAS_KEYS)
def test_flexible_versions_match_kios_source(api_key: int) -> None:
    """kio also has what kafka-python lacks: delegation tokens, telemetry, the consumer group protocol."""
    known = 0
    for version in range(20):
        try:
            module = load_payload_module(api_key, version, EntityType.request)
        except KioIndexError:
            continue
        entities = [item for item in vars(module).values() if getattr(item, "__api_key__", None) == api_key]
        known += len(entities)
        assert {entity.__flexible__ for entity in entities} == {is_flexible(api_key, version)}
    assert known


def test_error_codes_are_kafkas() -> None:
    ours = {name: value for name, value in vars(error_codes).items() if isinstance(value, int)}
    assert ours.items() <= {code.name.upper(): code.value for code in ErrorCode}.items()
    assert {error_codes.name_of(value): value for value in ours.values()} == ours


@pytest.mark.parametrize("message_class", EVERY_MESSAGE)
@pytest.mark.parametrize("sender", [None, "", "spark-ü"])
def test_header_is_written_as_by_kafka_python(message_class: Any, sender: str | None) -> None:
    for version in range(message_class.max_version + 1):
        _check_header(message_class, version, sender)


def _check_header(message_class: Any, version: int, sender: str | None) -> None:
    api_key, flexible = message_class.API_KEY, message_class.flexible_version_q(version)
    encoded = None if sender is None else sender.encode()
    if message_class.is_request():
        theirs = TheirRequestHeader(
            request_api_key=api_key, request_api_version=version, correlation_id=-7, client_id=sender
        ).encode(flexible=flexible)
        assert request_header(api_key, version, -7, encoded) == theirs
        frame = frame_message(theirs, b"body")
        assert parse_request_header(frame) == (api_key, version, -7, 4 + len(theirs))
        assert client_id(frame) == encoded
    else:
        # KIP-511: the answer to ApiVersions has the old header, so that every client can read it.
        theirs = TheirResponseHeader(correlation_id=-7).encode(flexible=flexible and api_key != API_VERSIONS)
        assert response_header(api_key, version, -7) == theirs
        frame = frame_message(theirs, b"body")
        assert response_body_offset(frame, api_key, version) == 4 + len(theirs)
        assert response_correlation_id(frame) == -7


def test_tagged_fields_of_a_header_are_stepped_over() -> None:
    head = struct.pack(">hhih", METADATA, 12, 1, 2) + b"id"
    tags = tag_section([(0, b"x" * 200), (2**32 - 1, b"")])
    assert parse_request_header(frame_message(head, tags, b"body")).body_offset == 4 + len(head) + len(tags)
    frame = frame_message(struct.pack(">i", 1), tags, b"body")
    assert response_body_offset(frame, METADATA, 12) == 8 + len(tags)


@pytest.mark.parametrize("api_key", [OWN, 20312, 0x7FFF, -1, 999])
def test_unknown_keys_have_flexible_headers_from_version_0(api_key: int) -> None:
    assert is_flexible(api_key, 0)
    assert parse_request_header(frame_message(request_header(api_key, 0, 5, b"c"))).api_key == api_key


def test_future_api_versions_request_is_read() -> None:
    """It must be answered with error 35 and its own correlation_id (KIP-511)."""
    header = parse_request_header(frame_message(request_header(API_VERSIONS, 0x7FFF, 99, b"c"), b"\xff" * 30))
    assert (header.api_version, header.correlation_id) == (0x7FFF, 99)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (b"", Truncated),
        (bytes(9), Truncated),
        (struct.pack(">hhih", PRODUCE, 3, 1, 1), Truncated),
        (struct.pack(">hhih", PRODUCE, 3, 1, 0x7FFF) + bytes(100), Truncated),
        (struct.pack(">hhih", PRODUCE, 3, 1, -2), InvalidField),
        (struct.pack(">hhih", PRODUCE, 3, 1, -0x8000) + bytes(10), InvalidField),
        (struct.pack(">hhih", PRODUCE, 9, 1, 0), Truncated),
        (struct.pack(">hhih", PRODUCE, 9, 1, 0) + uvarint(65) + bytes(300), InvalidField),
        (struct.pack(">hhih", PRODUCE, 9, 1, 0) + uvarint(2**32 - 1), InvalidField),
        (struct.pack(">hhih", PRODUCE, 9, 1, 0) + b"\x01\x00" + uvarint(2**32 - 1), Truncated),
        (struct.pack(">hhih", PRODUCE, 9, 1, 0) + b"\xff" * 5, InvalidField),
        (struct.pack(">hhih", PRODUCE, 9, 1, 0) + b"\x80" * 6, InvalidField),
    ],
)
def test_hostile_headers_are_refused(message: bytes, error: type[CodecError]) -> None:
    frame = memoryview(bytearray(frame_message(message)))
    with pytest.raises(error):
        parse_request_header(frame)


@pytest.mark.parametrize("length", range(8))
def test_answer_shorter_than_its_header_is_refused(length: int) -> None:
    with pytest.raises(Truncated):
        response_correlation_id(bytes(length))
    with pytest.raises(Truncated):
        response_body_offset(bytes(length), FETCH, 4)


@pytest.mark.parametrize("correlation_id", [0, 2**31 - 1, -(2**31)])
def test_request_takes_another_correlation_id_in_place(correlation_id: int) -> None:
    frame = memoryview(bytearray(frame_message(request_header(PRODUCE, 9, 1, b"client"), b"body")))
    before = bytes(frame)
    set_correlation_id(frame, correlation_id)
    assert parse_request_header(frame).correlation_id == correlation_id
    assert bytes(frame[:8]) + bytes(frame[12:]) == before[:8] + before[12:]
