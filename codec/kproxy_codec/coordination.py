"""Read and rewrite messages about groups and transactions for a proxy.

It covers the key of a request, the groups of a request that names several, the coordinator of each key
(FindCoordinator, versions 0 to 6), the error codes in answers, the leader epochs of commits and of OffsetFetch answers,
and refusals, which have an error for each partition. The number of keys or partitions in a message has no other limit
than its length (see `kproxy_codec.walk`).

Tagged fields are skipped; none are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final, NamedTuple

from kproxy_codec.api_keys import (
    ADD_PARTITIONS_TO_TXN,
    FIND_COORDINATOR,
    HEARTBEAT,
    JOIN_GROUP,
    LEAVE_GROUP,
    OFFSET_COMMIT,
    OFFSET_FETCH,
    SYNC_GROUP,
    TXN_OFFSET_COMMIT,
    is_flexible,
)
from kproxy_codec.error_codes import NONE
from kproxy_codec.errors import InvalidField
from kproxy_codec.partitioned import TOPIC_ID_BYTES
from kproxy_codec.primitives import INT8, INT16, INT32, INT64, Buffer, encode_count, encode_string
from kproxy_codec.walk import Walk, Work

# FindCoordinator's key types; version 0 has only groups.
GROUP: Final = 0
TRANSACTION: Final = 1
KEY_TYPES_FROM: Final = 1
# From this version a FindCoordinator request has several keys (KIP-699).
BATCHED_FROM: Final = 4
# From this version OffsetFetch names several groups, which may have several coordinators (KIP-709).
_FETCH_GROUPS_FROM: Final = 8
# From this version OffsetCommit and OffsetFetch name topics by id (KIP-848).
OFFSETS_BY_ID_FROM: Final = 10

_NO_TAGS: Final = b"\x00"
_NO_EPOCH: Final = INT32.pack(-1)
# The cost of a partition in a portion (`kproxy_codec.walk.PORTION`).
_PARTITION_COST: Final = 4
_KEY_COST: Final = 12

# Versions of FindCoordinator and OffsetFetch.
_FIND_MESSAGE_FROM = 1
_FETCH_ERROR_FROM = 2
FETCH_EPOCH_FROM: Final = 5
_FETCH_MEMBER_FROM = 9
# From these versions commits have leader epochs.
COMMIT_EPOCH_FROM: Final = {OFFSET_COMMIT: 6, TXN_OFFSET_COMMIT: 2}

# The version from which an answer begins with throttle_time_ms.
_THROTTLE_FROM: Final = {
    FIND_COORDINATOR: 1,
    OFFSET_COMMIT: 3,
    OFFSET_FETCH: 3,
    JOIN_GROUP: 2,
    HEARTBEAT: 1,
    LEAVE_GROUP: 1,
    SYNC_GROUP: 1,
}

TELL_ERRORS: Final = frozenset(_THROTTLE_FROM) - {FIND_COORDINATOR}
"""The group APIs whose answers `error_codes` reads."""


def coordination_key(api_key: int, api_version: int, body: Buffer) -> str:
    """The group or transactional id of a request, empty if it has none. Raises CodecError."""
    walk = Walk(body, compact=is_flexible(api_key, api_version))
    if api_key == TXN_OFFSET_COMMIT:
        # Skip the transactional id, because the request goes to the group's coordinator.
        walk.string()
    return walk.text(nullable=True) or ""


# Requests about several groups


class GroupSpan(NamedTuple):
    """A group of a request, and the span of its element in the body."""

    group: str
    start: int
    end: int


def names_groups(api_key: int, api_version: int) -> bool:
    """Whether the request, an OffsetFetch, may name several groups."""
    return api_key == OFFSET_FETCH and api_version >= _FETCH_GROUPS_FROM


def read_groups(api_key: int, api_version: int, body: Buffer) -> Work[list[GroupSpan]]:
    """The groups of a request that `names_groups`. Raises CodecError."""
    walk = Walk(body, compact=is_flexible(api_key, api_version))
    spans: list[GroupSpan] = []
    for _ in range(walk.count(2)):
        start = walk.at
        group = walk.text() or ""
        if api_version >= _FETCH_MEMBER_FROM:
            walk.string(nullable=True)
            walk.skip(INT32.size)
        for _ in range(walk.count(3, nullable=True)):
            _topic(walk, api_key, api_version)
            walk.skip(walk.count(INT32.size) * INT32.size)
            walk.tags()
            if walk.spend(_PARTITION_COST):
                yield
        walk.tags()
        spans.append(GroupSpan(group, start, walk.at))
        if walk.spend(_KEY_COST):
            yield
    walk.skip(INT8.size)
    walk.end()
    return spans


def about_one(api_key: int, api_version: int, body: memoryview, spans: Sequence[GroupSpan], place: int) -> bytes:
    """The body of the request for one of its groups."""
    _, start, end = spans[place]
    one = encode_count(1, compact=is_flexible(api_key, api_version))
    return b"".join((one, body[start:end], body[spans[-1].end :]))


def merge_groups(api_key: int, api_version: int, bodies: Sequence[memoryview]) -> bytes:
    """One body of an answer from those about one group each. Raises CodecError."""
    compact = is_flexible(api_key, api_version)
    throttle_bytes = len(_throttle(api_key, api_version))
    one, tail = encode_count(1, compact=compact), _NO_TAGS if compact else b""
    start = throttle_bytes + len(one)
    for body in bodies:
        if body[throttle_bytes:start] != one or body[len(body) - len(tail) :] != tail:
            raise InvalidField("an answer about one group has another number of them, or unknown fields")
    throttle = max((bytes(body[:throttle_bytes]) for body in bodies), default=_throttle(api_key, api_version))
    elements = (body[start : len(body) - len(tail)] for body in bodies)
    return b"".join((throttle, encode_count(len(bodies), compact=compact), *elements, tail))


# FindCoordinator


class Asked(NamedTuple):
    """A FindCoordinator request: one `key` or, from version 4 on, a number of `keys`, which begin at position `at`."""

    key_type: int
    key: str
    keys: int = 1
    at: int = 0


class Found(NamedTuple):
    """The coordinator of a key, or an error. Up to version 3 the answer omits the key, which is that of the request."""

    key: str
    node_id: int
    host: str
    port: int
    error_code: int = NONE
    error_message: str | None = None


def parse_find_coordinator(api_version: int, body: Buffer) -> Asked:
    """Return the key type and the keys of a request. Raises CodecError."""
    walk = Walk(body, compact=is_flexible(FIND_COORDINATOR, api_version))
    if api_version >= BATCHED_FROM:
        key_type = walk.fixed(INT8)
        keys = walk.count(1)
        return Asked(key_type, "", keys, walk.at)
    key = walk.text() or ""
    return Asked(walk.fixed(INT8) if api_version >= KEY_TYPES_FROM else GROUP, key)


def answer_find_coordinator(
    api_version: int, request_body: Buffer, found: Callable[[int, str], Found]
) -> Work[bytearray]:
    """The body of an answer; `found` returns the coordinator for a key type and a key. Raises CodecError."""
    asked = parse_find_coordinator(api_version, request_body)
    walk = Walk(request_body, compact=is_flexible(FIND_COORDINATOR, api_version))
    walk.at = asked.at
    out = bytearray(_throttle(FIND_COORDINATOR, api_version))
    if api_version >= BATCHED_FROM:
        out += encode_count(asked.keys, compact=True)
    for _ in range(asked.keys):
        _write_found(api_version, found(asked.key_type, walk.text() or ""), out)
        if walk.spend(_KEY_COST):
            yield
    if api_version < BATCHED_FROM and api_version >= KEY_TYPES_FROM:
        walk.skip(INT8.size)
    walk.end()
    if walk.compact:
        out += _NO_TAGS
    return out


def replace_coordinators(
    api_version: int, asked: Asked, body: Buffer, replace: Callable[[int, Found], Found]
) -> Work[bytearray]:
    """The body of an answer with replaced coordinators. Raises CodecError.

    The answer is to `asked`. `replace` gets the type of a key and the coordinator that the answer names for it.
    """
    compact = is_flexible(FIND_COORDINATOR, api_version)
    walk, out = Walk(body, compact=compact), bytearray()
    if api_version >= _THROTTLE_FROM[FIND_COORDINATOR]:
        out += walk.skip(INT32.size)
    if api_version < BATCHED_FROM:
        _write_found(api_version, replace(asked.key_type, _read_found(walk, api_version, asked.key)), out)
    else:
        count = walk.count(13)
        out += encode_count(count, compact=True)
        for _ in range(count):
            _write_found(api_version, replace(asked.key_type, _read_found(walk, api_version)), out)
            if walk.spend(_KEY_COST):
                yield
    walk.end()
    if compact:
        out += _NO_TAGS
    return out


def _read_found(walk: Walk, api_version: int, asked: str = "") -> Found:
    if api_version >= BATCHED_FROM:
        key = walk.text() or ""
        node_id, host, port = walk.fixed(INT32), walk.text() or "", walk.fixed(INT32)
        error_code, error_message = walk.fixed(INT16), walk.text(nullable=True)
        walk.tags()
    else:
        key, error_code = asked, walk.fixed(INT16)
        error_message = walk.text(nullable=True) if api_version >= _FIND_MESSAGE_FROM else None
        node_id, host, port = walk.fixed(INT32), walk.text() or "", walk.fixed(INT32)
    return Found(key, node_id, host, port, error_code, error_message)


def _write_found(api_version: int, found: Found, out: bytearray) -> None:
    compact = is_flexible(FIND_COORDINATOR, api_version)
    message = None if found.error_message is None else found.error_message.encode()
    failure = INT16.pack(found.error_code)
    if api_version >= _FIND_MESSAGE_FROM:
        failure += encode_string(message, compact=compact)
    place = INT32.pack(found.node_id) + encode_string(found.host.encode(), compact=compact) + INT32.pack(found.port)
    if api_version >= BATCHED_FROM:
        out += encode_string(found.key.encode(), compact=True) + place + failure + _NO_TAGS
    else:
        out += failure + place


# Answers about the offsets of a group


def error_codes(api_key: int, api_version: int, body: memoryview, *, without_epochs: bool = False) -> Work[set[int]]:
    """The error codes in an answer about a group. Raises CodecError.

    `without_epochs`: the leader epochs in an OffsetFetch answer are overwritten with -1 (unknown). Only the beginning
    of answers without partitions is read.
    """
    walk = Walk(body, compact=is_flexible(api_key, api_version))
    if api_version >= _THROTTLE_FROM[api_key]:
        walk.skip(INT32.size)
    if api_key not in (OFFSET_COMMIT, OFFSET_FETCH):
        return {walk.fixed(INT16)}
    codes: set[int] = set()
    if not names_groups(api_key, api_version):
        yield from _offsets(walk, api_key, api_version, codes, without_epochs=without_epochs)
    else:
        for _ in range(walk.count(5)):
            walk.string()
            yield from _offsets(walk, api_key, api_version, codes, without_epochs=without_epochs)
            walk.tags()
            if walk.spend(_KEY_COST):
                yield
    walk.end()
    return codes


def _offsets(walk: Walk, api_key: int, api_version: int, codes: set[int], *, without_epochs: bool) -> Work[None]:
    """Collect the error codes of one group's topics, and its own."""
    fetched = api_key == OFFSET_FETCH
    has_epoch = fetched and api_version >= FETCH_EPOCH_FROM
    for _ in range(walk.count(3)):
        _topic(walk, api_key, api_version)
        for _ in range(walk.count(6)):
            walk.skip(INT32.size + INT64.size * fetched)
            if has_epoch:
                epoch = walk.skip(INT32.size)
                if without_epochs:
                    epoch[:] = _NO_EPOCH
            if fetched:
                walk.string(nullable=True)
            codes.add(walk.fixed(INT16))
            walk.tags()
            if walk.spend(_PARTITION_COST):
                yield
        walk.tags()
        if walk.spend(_PARTITION_COST):
            yield
    if fetched and api_version >= _FETCH_ERROR_FROM:
        codes.add(walk.fixed(INT16))


def _topic(walk: Walk, api_key: int, api_version: int) -> bytes:
    """Skip a topic's name or id, and return its bytes."""
    start = walk.at
    if api_key in (OFFSET_COMMIT, OFFSET_FETCH) and api_version >= OFFSETS_BY_ID_FROM:
        walk.skip(TOPIC_ID_BYTES)
    else:
        walk.string()
    return bytes(walk.body[start : walk.at])


# Requests that commit offsets


def blank_committed_epochs(api_key: int, api_version: int, request_body: memoryview) -> Work[None]:
    """Overwrite the leader epochs of a version from COMMIT_EPOCH_FROM on with -1 (unknown). Raises CodecError."""
    walk = Walk(request_body, compact=is_flexible(api_key, api_version))
    _pass(walk, _BEFORE_TOPICS[api_key], api_version)
    for _ in range(walk.count(3)):
        _topic(walk, api_key, api_version)
        for _ in range(walk.count(18)):
            walk.skip(INT32.size + INT64.size)
            walk.skip(INT32.size)[:] = _NO_EPOCH
            walk.string(nullable=True)
            walk.tags()
            if walk.spend(_PARTITION_COST):
                yield
        walk.tags()
        if walk.spend(_PARTITION_COST):
            yield
    walk.end()


# Refusals


class _Field(NamedTuple):
    """A field to skip in the versions that have it; without a `form` it is a nullable string."""

    form: Struct | None
    first: int = 0
    last: int = 1 << 15


_STRING = _Field(None)
# The fields of a request before its topics, and the fields of each partition after its index.
_BEFORE_TOPICS: Final[dict[int, tuple[_Field, ...]]] = {
    ADD_PARTITIONS_TO_TXN: (_STRING, _Field(INT64), _Field(INT16)),
    TXN_OFFSET_COMMIT: (
        _STRING,
        _STRING,
        _Field(INT64),
        _Field(INT16),
        _Field(INT32, 3),
        _Field(None, 3),
        _Field(None, 3),
    ),
    OFFSET_COMMIT: (_STRING, _Field(INT32, 1), _Field(None, 1), _Field(None, 7), _Field(INT64, 2, 4)),
    OFFSET_FETCH: (_STRING,),
}
_BEHIND_INDEX: Final[dict[int, tuple[_Field, ...]]] = {
    TXN_OFFSET_COMMIT: (_Field(INT64), _Field(INT32, 2), _STRING),
    OFFSET_COMMIT: (_Field(INT64), _Field(INT32, 6), _Field(INT64, 1, 1), _STRING),
}
REFUSED_BY_PARTITION: Final = frozenset(_BEFORE_TOPICS)
"""The APIs whose answers have an error for each partition."""
# The versions from which an answer as a whole has one.
_ERROR_FROM: Final = {OFFSET_FETCH: _FETCH_ERROR_FROM, ADD_PARTITIONS_TO_TXN: 4}


def is_refused_by_partition(api_key: int, api_version: int) -> bool:
    """Whether the answer can report an error only in each partition (`refuse_partitions`)."""
    return api_key in REFUSED_BY_PARTITION and api_version < _ERROR_FROM.get(api_key, api_version + 1)


def refuse_partitions(api_key: int, api_version: int, request_body: Buffer, error_code: int) -> Work[bytearray]:
    """The body of an answer that gives each partition of the request this error. Raises CodecError."""
    compact = is_flexible(api_key, api_version)
    walk, out = Walk(request_body, compact=compact), bytearray(_throttle(api_key, api_version))
    _pass(walk, _BEFORE_TOPICS[api_key], api_version)
    behind_index = _BEHIND_INDEX.get(api_key, ())
    failure = INT16.pack(error_code)
    if api_key == OFFSET_FETCH:
        # An offset and empty metadata.
        failure = INT64.pack(0) + encode_string(b"", compact=compact) + failure
    elements_have_tags = compact and bool(behind_index)
    failure += _NO_TAGS if compact else b""
    topics = walk.count(3)
    out += encode_count(topics, compact=compact)
    for _ in range(topics):
        out += _topic(walk, api_key, api_version)
        partitions = walk.count(INT32.size)
        out += encode_count(partitions, compact=compact)
        for _ in range(partitions):
            out += walk.skip(INT32.size)
            out += failure
            _pass(walk, behind_index, api_version)
            if elements_have_tags:
                walk.tags()
            if walk.spend(_PARTITION_COST):
                yield
        walk.tags()
        out += _NO_TAGS if compact else b""
        if walk.spend(_PARTITION_COST):
            yield
    walk.end()
    if compact:
        out += _NO_TAGS
    return out


def _pass(walk: Walk, fields: tuple[_Field, ...], api_version: int) -> None:
    for field in fields:
        if not field.first <= api_version <= field.last:
            continue
        if field.form is None:
            walk.string(nullable=True)
        else:
            walk.skip(field.form.size)


def _throttle(api_key: int, api_version: int) -> bytes:
    return INT32.pack(0) if api_version >= _THROTTLE_FROM.get(api_key, 0) else b""
