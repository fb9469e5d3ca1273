"""Encode and parse Own and BindFences, two APIs that this project adds to Kafka's.

They implement the Kafka wiki's "Single Reader/Writer", for claims of a single reader or writer.

Own (key 20311, versions 0 and 1): a client claims resources for its connection, within a group.
    OwnRequest   group COMPACT_STRING, resources COMPACT_NULLABLE_ARRAY of {resource COMPACT_STRING, generation INT64}
    OwnResponse  throttle_time_ms INT32, error_code INT16, group COMPACT_STRING, resources COMPACT_ARRAY of
                 {resource COMPACT_STRING, error_code INT16, generation INT64, fence INT64 (v1)}
Null resources claim the whole group. The answer then has one resource with an empty name; requests cannot name such a
resource.

BindFences (key 20312, version 0): a proxy reports to a partition's leader that from now on these fences apply to
produce requests on this connection, or that a fence is released.
    BindFencesRequest   partitions COMPACT_ARRAY of {topic COMPACT_STRING, partition_index INT32, fence INT64,
                        is_released BOOLEAN}
    BindFencesResponse  throttle_time_ms INT32, partitions COMPACT_ARRAY of {topic COMPACT_STRING, partition_index
                        INT32, error_code INT16, fence INT64: the highest known}

Every structure ends with tagged fields; this codec knows none and skips those in messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, Final, NamedTuple, TypeVar

from kproxy_codec.api_keys import BIND_FENCES, OWN
from kproxy_codec.errors import InvalidField
from kproxy_codec.framing import RequestHeader, response_body_offset
from kproxy_codec.partitioned import MAX_PARTITIONS, expect_end
from kproxy_codec.primitives import INT16, INT32, Buffer, encode_count, encode_tagged_fields
from kproxy_codec.walk import Walk

OWN_MIN_VERSION: Final = 0
OWN_MAX_VERSION: Final = 1
BIND_FENCES_VERSION: Final = 0
MAX_RESOURCES: Final = MAX_PARTITIONS
# The limit of names of groups and resources, which become parts of keys in etcd.
MAX_NAME_BYTES: Final = 1_024
WHOLE_GROUP: Final = ""
NO_FENCE: Final = -1
NO_GENERATION: Final = -1

_FENCE_FROM = 1
_NO_TAGS = encode_tagged_fields([])
# Every element is a name, and these fields.
_CLAIM = Struct(">q")
_OWNED = Struct(">hq")
_OWNED_WITH_FENCE = Struct(">hqq")
_BINDING = Struct(">iq?")
_BOUND = Struct(">ihq")
_Element = TypeVar("_Element")


class OwnResource(NamedTuple):
    """A claimed resource and the generation of the claim."""

    resource: str
    generation: int


class OwnRequest(NamedTuple):
    """`resources` None claims the whole group; an empty tuple binds the group to the connection."""

    group: str
    resources: tuple[OwnResource, ...] | None


class OwnedResource(NamedTuple):
    """The result of one claim. `generation` and `fence` are -1 if the claim was not granted; version 0 has no fence."""

    resource: str
    error_code: int
    generation: int = NO_GENERATION
    fence: int = NO_FENCE


class OwnResponse(NamedTuple):
    """`error_code` applies to the whole request; if it is set there are no resources."""

    error_code: int
    group: str
    resources: tuple[OwnedResource, ...] = ()
    throttle_time_ms: int = 0


class FenceBinding(NamedTuple):
    """The fence for this connection's writes to a partition; `is_released`: it applies to no connection any more."""

    topic: str
    partition_index: int
    fence: int
    is_released: bool = False


class BoundFence(NamedTuple):
    """The result of one binding; `fence` is the highest that the broker knows, -1 for none."""

    topic: str
    partition_index: int
    error_code: int
    fence: int = NO_FENCE


def resource_partition(resource: str) -> tuple[str, int] | None:
    """The topic and partition index of a resource `topic/partition`; None if the resource has another form."""
    topic, slash, index = resource.rpartition("/")
    if not topic or not slash or "/" in topic or not index.isascii() or not index.isdigit() or len(index) > 9:
        return None
    return (topic, int(index)) if str(int(index)) == index else None


# Own


def encode_own_request(request: OwnRequest) -> bytes:
    """Encode the body, which is the same in both versions."""
    return _string(request.group) + _array(request.resources, _CLAIM) + _NO_TAGS


def parse_own_request(frame: Buffer, header: RequestHeader) -> OwnRequest:
    """Parse a whole frame. Raises CodecError."""
    walk = _walk(frame, header.body_offset)
    group = _name(walk)
    resources = _elements(walk, OwnResource, _CLAIM, nullable=True)
    _end(walk)
    return OwnRequest(group, resources)


def encode_own_response(response: OwnResponse, api_version: int) -> bytes:
    """Encode the body."""
    head = INT32.pack(response.throttle_time_ms) + INT16.pack(response.error_code) + _string(response.group)
    if api_version >= _FENCE_FROM:
        return head + _array(response.resources, _OWNED_WITH_FENCE) + _NO_TAGS
    return head + _array([owned[:3] for owned in response.resources], _OWNED) + _NO_TAGS


def parse_own_response(frame: Buffer, api_version: int) -> OwnResponse:
    """Parse a whole frame. Raises CodecError."""
    walk = _walk(frame, response_body_offset(frame, OWN, api_version))
    throttle_time_ms, error_code, group = walk.fixed(INT32), walk.fixed(INT16), _name(walk)
    resources = _elements(walk, OwnedResource, _OWNED_WITH_FENCE if api_version >= _FENCE_FROM else _OWNED)
    _end(walk)
    return OwnResponse(error_code, group, resources or (), throttle_time_ms)


# BindFences


def encode_bind_fences_request(bindings: Sequence[FenceBinding]) -> bytes:
    """Encode the body."""
    return _array(bindings, _BINDING) + _NO_TAGS


def parse_bind_fences_request(frame: Buffer, header: RequestHeader) -> tuple[FenceBinding, ...]:
    """Parse a whole frame. Raises CodecError."""
    walk = _walk(frame, header.body_offset)
    bindings = _elements(walk, FenceBinding, _BINDING)
    _end(walk)
    return bindings or ()


def encode_bind_fences_response(bound: Sequence[BoundFence]) -> bytes:
    """Encode the body, with a throttle_time_ms of 0."""
    return INT32.pack(0) + _array(bound, _BOUND) + _NO_TAGS


def parse_bind_fences_response(frame: Buffer) -> tuple[BoundFence, ...]:
    """Parse a whole frame. Raises CodecError."""
    walk = _walk(frame, response_body_offset(frame, BIND_FENCES, BIND_FENCES_VERSION))
    walk.skip(INT32.size)
    bound = _elements(walk, BoundFence, _BOUND)
    _end(walk)
    return bound or ()


# Names and arrays


def _walk(frame: Buffer, body_offset: int) -> Walk:
    walk = Walk(frame, compact=True)
    walk.at = body_offset
    return walk


def _end(walk: Walk) -> None:
    walk.tags()
    expect_end(walk.body, walk.at)


def _string(text: str) -> bytes:
    encoded = text.encode()
    return encode_count(len(encoded), compact=True) + encoded


def _name(walk: Walk) -> str:
    name = walk.string() or b""
    if len(name) > MAX_NAME_BYTES:
        raise InvalidField(f"a name has {len(name)} bytes; expected at most {MAX_NAME_BYTES}")
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise InvalidField(f"a name is not UTF-8: {error}") from error


def _array(elements: Sequence[tuple[Any, ...]] | None, fields: Struct) -> bytes:
    if elements is None:
        return encode_count(-1, compact=True)
    encoded = [_string(name) + fields.pack(*values) + _NO_TAGS for name, *values in elements]
    return encode_count(len(encoded), compact=True) + b"".join(encoded)


def _elements(
    walk: Walk, make: Callable[..., _Element], fields: Struct, *, nullable: bool = False
) -> tuple[_Element, ...] | None:
    # The shortest name is empty: it takes one byte, and so do the tagged fields.
    count = walk.count(fields.size + 2, nullable=nullable)
    if count < 0:
        return None
    if count > MAX_RESOURCES:
        raise InvalidField(f"the message has {count} elements; expected at most {MAX_RESOURCES}")
    elements = []
    for _ in range(count):
        elements.append(make(_name(walk), *fields.unpack(walk.skip(fields.size))))
        walk.tags()
    return tuple(elements)
