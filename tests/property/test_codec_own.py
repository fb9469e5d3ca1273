"""Encode and decode the messages of the Own API and of the brokers' fences; broken ones raise CodecError.

No other codec knows these messages. A second writer here builds the same bytes from the description in
`kproxy_codec.own`, tagged fields included.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy_codec import own
from kproxy_codec.api_keys import BIND_FENCES, OWN, is_flexible
from kproxy_codec.errors import CodecError, InvalidField
from kproxy_codec.framing import parse_request_header, request_header, response_header
from kproxy_codec.own import (
    MAX_NAME_BYTES,
    MAX_RESOURCES,
    BoundFence,
    FenceBinding,
    OwnedResource,
    OwnRequest,
    OwnResource,
    OwnResponse,
    resource_partition,
)
from tests.support.rules import examples
from tests.support.wire.hostile import assert_refused_before_allocation, assert_refused_when_cut
from tests.support.wire.messages import frame_of, tag_section, uvarint

TAGS = [(100, b"abc"), (2**31, b"")]

INT16, INT32, INT64 = (st.integers(-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (16, 32, 64))
# Every character but the halves of surrogate pairs, which UTF-8 does not have.
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


class Kind(NamedTuple):
    """A message with its two writers, of the test and of the codec, and its reader."""

    name: str
    messages: st.SearchStrategy[Any]
    sample: Any
    encode: Callable[[Any], bytes]
    write: Callable[[Any, bytes], bytes]
    parse: Callable[[memoryview], Any]
    frame: Callable[[bytes], memoryview]


def _string(text: str) -> bytes:
    return uvarint(len(text.encode()) + 1) + text.encode()


def _array(entries: list[bytes] | None) -> bytes:
    return b"\x00" if entries is None else uvarint(len(entries) + 1) + b"".join(entries)


def _write_own_request(request: OwnRequest, tags: bytes) -> bytes:
    entries = request.resources and [
        _string(each.resource) + struct.pack(">q", each.generation) + tags for each in request.resources
    ]
    return _string(request.group) + _array(None if request.resources is None else list(entries or ())) + tags


def _write_own_response(response: OwnResponse, tags: bytes, version: int) -> bytes:
    entries = [
        _string(each.resource)
        + struct.pack(">hq", each.error_code, each.generation)
        + (struct.pack(">q", each.fence) if version else b"")
        + tags
        for each in response.resources
    ]
    head = struct.pack(">ih", response.throttle_time_ms, response.error_code) + _string(response.group)
    return head + _array(entries) + tags


def _write_bindings(bindings: tuple[FenceBinding, ...], tags: bytes) -> bytes:
    return _array([_string(each.topic) + struct.pack(">iq?", *each[1:]) + tags for each in bindings]) + tags


def _write_bound(bound: tuple[BoundFence, ...], tags: bytes) -> bytes:
    return bytes(4) + _array([_string(each.topic) + struct.pack(">ihq", *each[1:]) + tags for each in bound]) + tags


def _request(api_key: int, version: int) -> Callable[[bytes], memoryview]:
    return lambda body: frame_of(request_header(api_key, version, 7, b"tests"), body)


def _response(api_key: int, version: int) -> Callable[[bytes], memoryview]:
    return lambda body: frame_of(response_header(api_key, version, 7), body)


def _own_response_kind(version: int) -> Kind:
    fences = INT64 if version else st.just(own.NO_FENCE)
    resources = st.builds(OwnedResource, NAMES, INT16, INT64, fences)
    sample = OwnResponse(82, "g", (OwnedResource("flights/3", 0, 4, 5 if version else -1), OwnedResource("ü", 82)), 21)
    return Kind(
        f"own response v{version}",
        st.builds(OwnResponse, INT16, NAMES, st.lists(resources, max_size=4).map(tuple), INT32),
        sample,
        lambda message: own.encode_own_response(message, version),
        lambda message, tags: _write_own_response(message, tags, version),
        lambda frame: own.parse_own_response(frame, version),
        _response(OWN, version),
    )


def _own_request_kind(version: int) -> Kind:
    resources = st.lists(st.builds(OwnResource, NAMES, INT64), max_size=4).map(tuple)
    return Kind(
        f"own request v{version}",
        st.builds(OwnRequest, NAMES, st.none() | resources),
        OwnRequest("g", (OwnResource("flights/3", 4), OwnResource("ü", -1))),
        own.encode_own_request,
        _write_own_request,
        lambda frame: own.parse_own_request(frame, parse_request_header(frame)),
        _request(OWN, version),
    )


KINDS = [
    *map(_own_request_kind, (0, 1)),
    *map(_own_response_kind, (0, 1)),
    Kind(
        "bindings",
        st.lists(st.builds(FenceBinding, NAMES, INT32, INT64, st.booleans()), max_size=4).map(tuple),
        (FenceBinding("flights", 3, 2**40), FenceBinding("ü", 7, 9, is_released=True)),
        own.encode_bind_fences_request,
        _write_bindings,
        lambda frame: own.parse_bind_fences_request(frame, parse_request_header(frame)),
        _request(BIND_FENCES, 0),
    ),
    Kind(
        "bound",
        st.lists(st.builds(BoundFence, NAMES, INT32, INT16, INT64), max_size=4).map(tuple),
        (BoundFence("flights", 3, 44, 2**40), BoundFence("ü", 7, 0)),
        own.encode_bind_fences_response,
        _write_bound,
        own.parse_bind_fences_response,
        _response(BIND_FENCES, 0),
    ),
]
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@EVERY_KIND
@settings(max_examples=examples(100))
@given(data=st.data())
def test_written_message_is_read_back(kind: Kind, data: st.DataObject) -> None:
    message = data.draw(kind.messages)
    written = kind.encode(message)
    assert written == kind.write(message, tag_section())
    assert kind.parse(kind.frame(written)) == message


@EVERY_KIND
def test_unknown_tagged_fields_are_skipped(kind: Kind) -> None:
    assert kind.parse(kind.frame(kind.write(kind.sample, tag_section(TAGS)))) == kind.sample


@EVERY_KIND
def test_message_cut_short_or_continued_is_refused(kind: Kind) -> None:
    frame = kind.frame(kind.write(kind.sample, tag_section(TAGS)))
    assert_refused_when_cut(kind.parse, frame)
    with pytest.raises(InvalidField, match="follow the end"):
        kind.parse(memoryview(bytearray(frame) + b"\x00"))


@EVERY_KIND
def test_inflated_lengths_are_refused_before_allocation(kind: Kind) -> None:
    assert_refused_before_allocation(kind.parse, bytes(kind.frame(kind.write(kind.sample, tag_section(TAGS)))))


@EVERY_KIND
def test_noise_is_refused_or_read(kind: Kind) -> None:
    """Noise in place of a message is refused; noise over a few bytes of one is often read."""
    outcomes = Counter[str]()
    body = kind.write(kind.sample, tag_section())

    @settings(max_examples=examples(100))
    @given(st.integers(0, 2**64))
    def parse_noise(seed: int) -> None:
        chance = random.Random(seed)
        noise = chance.randbytes(chance.randrange(80))
        start = chance.randrange(len(body))
        over = body[start : start + chance.randrange(1, 9)]
        noisy = body[:start] + chance.randbytes(len(over)) + body[start + len(over) :]
        for frame in (kind.frame(noise), frame_of(noise), kind.frame(noisy)):
            try:
                found = kind.parse(frame)
            except CodecError:
                outcomes["refused"] += 1
                continue
            outcomes["read"] += 1
            # The codec invents nothing: the message that it read needs no more bytes than the frame.
            assert len(kind.encode(found)) <= len(frame)

    parse_noise()
    assert min(outcomes["refused"], outcomes["read"]) > outcomes.total() // 60, outcomes


# The smallest element that each message can hold.
SMALLEST = [
    *[OwnResource("", 0)] * 2,
    *[OwnedResource("", 0)] * 2,
    FenceBinding("", 0, 0),
    BoundFence("", 0, 0),
]


def _many(kind: Kind, element: Any, count: int) -> Any:
    elements = (element,) * count
    return kind.sample._replace(resources=elements) if hasattr(kind.sample, "resources") else elements


@pytest.mark.parametrize(
    ("kind", "element"), list(zip(KINDS, SMALLEST, strict=True)), ids=[each.name for each in KINDS]
)
def test_number_of_elements_is_limited(kind: Kind, element: Any) -> None:
    most = _many(kind, element, MAX_RESOURCES)
    assert kind.parse(kind.frame(kind.encode(most))) == most
    with pytest.raises(InvalidField, match="has 4097 elements; expected at most 4096"):
        kind.parse(kind.frame(kind.encode(_many(kind, element, MAX_RESOURCES + 1))))
    # One element more than fits, even at the smallest size: the decoder reads none.
    written = kind.encode(_many(kind, element, 100))
    one_more = written.replace(uvarint(101), uvarint(102), 1)
    with pytest.raises(InvalidField, match="an array announces 101 elements"):
        kind.parse(kind.frame(one_more))


@pytest.mark.parametrize("letter", ["n", "ü"])
def test_length_of_names_is_limited(letter: str) -> None:
    longest = letter * (MAX_NAME_BYTES // len(letter.encode()))
    for kind, message, longer in [
        (KINDS[1], OwnRequest(longest, (OwnResource(longest, 1),)), OwnRequest(longest + "n", ())),
        (KINDS[1], OwnRequest("g", (OwnResource(longest, 1),)), OwnRequest("g", (OwnResource(longest + "n", 1),))),
        (KINDS[3], OwnResponse(0, longest), OwnResponse(0, longest + "n")),
        (KINDS[4], (FenceBinding(longest, 0, 1),), (FenceBinding(longest + "n", 0, 1),)),
    ]:
        assert kind.parse(kind.frame(kind.encode(message))) == message
        with pytest.raises(InvalidField, match="a name has 1025 bytes; expected at most 1024"):
            kind.parse(kind.frame(kind.encode(longer)))


def test_names_are_utf8_and_not_null() -> None:
    for group in (b"\x03\xff\xfe", b"\x02\x80", b"\x04\xed\xa0\x80", b"\x00"):
        with pytest.raises(InvalidField):
            KINDS[0].parse(KINDS[0].frame(group + b"\x01\x00"))


def test_null_means_whole_group_and_empty_array_nothing() -> None:
    for resources in (None, ()):
        for kind in KINDS[:2]:
            assert kind.parse(kind.frame(kind.encode(OwnRequest("g", resources)))) == OwnRequest("g", resources)
    null_answer = struct.pack(">ih", 0, 0) + _string("g") + b"\x00\x00"
    with pytest.raises(InvalidField, match="null"):
        KINDS[2].parse(KINDS[2].frame(null_answer))


def test_both_keys_have_flexible_headers_in_every_version() -> None:
    assert all(is_flexible(OWN, version) for version in (0, 1))
    assert is_flexible(BIND_FENCES, 0)


@pytest.mark.parametrize(
    ("resource", "partition"),
    [
        ("flights/0", ("flights", 0)),
        ("flights/12", ("flights", 12)),
        ("a.b_c-d/999999999", ("a.b_c-d", 999_999_999)),
        ("flights/1000000000", None),
        ("flights/01", None),
        ("flights/-1", None),
        ("flights/+1", None),
        ("flights/1 ", None),
        ("flights/١", None),
        ("flights/²", None),
        ("flights/", None),
        ("flights", None),
        ("/0", None),
        ("a/b/0", None),
        ("a//0", None),
        ("", None),
        ("/", None),
    ],
)
def test_resource_name_selects_its_partition(resource: str, partition: tuple[str, int] | None) -> None:
    assert resource_partition(resource) == partition
