"""Encode and parse Own and BindFences, two APIs of this project in the form of Kafka's.

They implement the Kafka wiki's "Single Reader/Writer".

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

from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from typing import Final, NamedTuple, TypeVar

from kproxy_codec.api_keys import BIND_FENCES, OWN
from kproxy_codec.errors import InvalidField
from kproxy_codec.framing import RequestHeader, response_body_offset
from kproxy_codec.partitioned import MAX_PARTITIONS, expect_end
from kproxy_codec.primitives import (
    INT8,
    INT16,
    INT32,
    INT64,
    Buffer,
    encode_count,
    encode_tagged_fields,
    read_count,
    read_fixed,
    skip_string,
    skip_tagged_fields,
)

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
    """The body, the same in both versions."""
    return _string(request.group) + _array(request.resources, _own_resource) + _NO_TAGS


def parse_own_request(frame: Buffer, header: RequestHeader) -> OwnRequest:
    """Parse a whole frame. Raises CodecError."""
    limit = len(frame)
    group, offset = _read_string(frame, header.body_offset, limit)
    resources, offset = _read_array(frame, offset, limit, _read_own_resource, least_bytes=10, nullable=True)
    expect_end(memoryview(frame), skip_tagged_fields(frame, offset, limit))
    return OwnRequest(group, resources)


def encode_own_response(response: OwnResponse, api_version: int) -> bytes:
    """The body."""
    head = INT32.pack(response.throttle_time_ms) + INT16.pack(response.error_code) + _string(response.group)
    with_fence = api_version >= _FENCE_FROM
    entries = _array(response.resources, lambda owned: _owned_resource(owned, with_fence=with_fence))
    return head + entries + _NO_TAGS


def parse_own_response(frame: Buffer, api_version: int) -> OwnResponse:
    """Parse a whole frame. Raises CodecError."""
    limit = len(frame)
    throttle_time_ms, offset = read_fixed(INT32, frame, response_body_offset(frame, OWN, api_version), limit)
    error_code, offset = read_fixed(INT16, frame, offset, limit)
    group, offset = _read_string(frame, offset, limit)
    with_fence = api_version >= _FENCE_FROM

    def read(buffer: Buffer, offset: int, limit: int) -> tuple[OwnedResource, int]:
        return _read_owned_resource(buffer, offset, limit, with_fence=with_fence)

    resources, offset = _read_array(frame, offset, limit, read, least_bytes=20 if with_fence else 12)
    expect_end(memoryview(frame), skip_tagged_fields(frame, offset, limit))
    return OwnResponse(error_code, group, resources or (), throttle_time_ms)


# BindFences


def encode_bind_fences_request(bindings: Sequence[FenceBinding]) -> bytes:
    """The body."""
    return _array(bindings, _fence_binding) + _NO_TAGS


def parse_bind_fences_request(frame: Buffer, header: RequestHeader) -> tuple[FenceBinding, ...]:
    """Parse a whole frame. Raises CodecError."""
    limit = len(frame)
    bindings, offset = _read_array(frame, header.body_offset, limit, _read_fence_binding, least_bytes=15)
    expect_end(memoryview(frame), skip_tagged_fields(frame, offset, limit))
    return bindings or ()


def encode_bind_fences_response(bound: Sequence[BoundFence]) -> bytes:
    """The body, with a throttle_time_ms of 0."""
    return INT32.pack(0) + _array(bound, _bound_fence) + _NO_TAGS


def parse_bind_fences_response(frame: Buffer) -> tuple[BoundFence, ...]:
    """Parse a whole frame. Raises CodecError."""
    limit = len(frame)
    body_offset = response_body_offset(frame, BIND_FENCES, BIND_FENCES_VERSION)
    _, offset = read_fixed(INT32, frame, body_offset, limit)
    bound, offset = _read_array(frame, offset, limit, _read_bound_fence, least_bytes=16)
    expect_end(memoryview(frame), skip_tagged_fields(frame, offset, limit))
    return bound or ()


# Elements

_GENERATION = INT64
_PARTITION_AND_FENCE = Struct(">iq?")
_PARTITION_AND_ERROR = Struct(">ihq")


def _own_resource(claim: OwnResource) -> bytes:
    return _string(claim.resource) + _GENERATION.pack(claim.generation) + _NO_TAGS


def _read_own_resource(buffer: Buffer, offset: int, limit: int) -> tuple[OwnResource, int]:
    resource, offset = _read_string(buffer, offset, limit)
    generation, offset = read_fixed(_GENERATION, buffer, offset, limit)
    return OwnResource(resource, generation), skip_tagged_fields(buffer, offset, limit)


def _owned_resource(owned: OwnedResource, *, with_fence: bool) -> bytes:
    entry = _string(owned.resource) + INT16.pack(owned.error_code) + _GENERATION.pack(owned.generation)
    return entry + (INT64.pack(owned.fence) if with_fence else b"") + _NO_TAGS


def _read_owned_resource(buffer: Buffer, offset: int, limit: int, *, with_fence: bool) -> tuple[OwnedResource, int]:
    resource, offset = _read_string(buffer, offset, limit)
    error_code, offset = read_fixed(INT16, buffer, offset, limit)
    generation, offset = read_fixed(_GENERATION, buffer, offset, limit)
    fence = NO_FENCE
    if with_fence:
        fence, offset = read_fixed(INT64, buffer, offset, limit)
    return OwnedResource(resource, error_code, generation, fence), skip_tagged_fields(buffer, offset, limit)


def _fence_binding(binding: FenceBinding) -> bytes:
    topic, partition_index, fence, is_released = binding
    return _string(topic) + _PARTITION_AND_FENCE.pack(partition_index, fence, is_released) + _NO_TAGS


def _read_fence_binding(buffer: Buffer, offset: int, limit: int) -> tuple[FenceBinding, int]:
    topic, offset = _read_string(buffer, offset, limit)
    partition_index, offset = read_fixed(INT32, buffer, offset, limit)
    fence, offset = read_fixed(INT64, buffer, offset, limit)
    is_released, offset = read_fixed(INT8, buffer, offset, limit)
    binding = FenceBinding(topic, partition_index, fence, bool(is_released))
    return binding, skip_tagged_fields(buffer, offset, limit)


def _bound_fence(bound: BoundFence) -> bytes:
    topic, partition_index, error_code, fence = bound
    return _string(topic) + _PARTITION_AND_ERROR.pack(partition_index, error_code, fence) + _NO_TAGS


def _read_bound_fence(buffer: Buffer, offset: int, limit: int) -> tuple[BoundFence, int]:
    topic, offset = _read_string(buffer, offset, limit)
    partition_index, offset = read_fixed(INT32, buffer, offset, limit)
    error_code, offset = read_fixed(INT16, buffer, offset, limit)
    fence, offset = read_fixed(INT64, buffer, offset, limit)
    return BoundFence(topic, partition_index, error_code, fence), skip_tagged_fields(buffer, offset, limit)


# Strings and arrays


def _string(text: str) -> bytes:
    encoded = text.encode()
    return encode_count(len(encoded), compact=True) + encoded


def _read_string(buffer: Buffer, offset: int, limit: int) -> tuple[str, int]:
    start, end, offset = skip_string(buffer, offset, limit, compact=True)
    if end - start > MAX_NAME_BYTES:
        raise InvalidField(f"a name of {end - start} bytes; at most {MAX_NAME_BYTES} are read")
    try:
        return bytes(buffer[start:end]).decode(), offset
    except UnicodeDecodeError as error:
        raise InvalidField(f"a name is not UTF-8: {error}") from error


def _array(elements: Iterable[_Element] | None, encode: Callable[[_Element], bytes]) -> bytes:
    if elements is None:
        return encode_count(-1, compact=True)
    encoded = [encode(each) for each in elements]
    return encode_count(len(encoded), compact=True) + b"".join(encoded)


def _read_array(
    buffer: Buffer,
    offset: int,
    limit: int,
    read: Callable[[Buffer, int, int], tuple[_Element, int]],
    *,
    least_bytes: int,
    nullable: bool = False,
) -> tuple[tuple[_Element, ...] | None, int]:
    count, offset = read_count(buffer, offset, limit, compact=True, least_bytes=least_bytes, nullable=nullable)
    if count < 0:
        return None, offset
    if count > MAX_RESOURCES:
        raise InvalidField(f"{count} elements in one message; at most {MAX_RESOURCES} are read")
    elements = []
    for _ in range(count):
        element, offset = read(buffer, offset, limit)
        elements.append(element)
    return tuple(elements), offset
