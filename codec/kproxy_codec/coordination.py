"""Read and rewrite messages about groups and transactions for a proxy.

It covers the key of a request, the coordinator of each key (FindCoordinator, versions 0 to 6), the error codes in
answers, and the leader epochs of commits and of OffsetFetch answers. The number of keys or partitions in a message has
no other limit than its length (see `kproxy_codec.walk`).

Tagged fields are skipped; none are known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from kproxy_codec.api_keys import (
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
# The versions from which commits have leader epochs; the generation and member; the id of a static member.
COMMIT_EPOCH_FROM: Final = {OFFSET_COMMIT: 6, TXN_OFFSET_COMMIT: 2}
_COMMIT_MEMBER_FROM: Final = {OFFSET_COMMIT: 1, TXN_OFFSET_COMMIT: 3}
_COMMIT_INSTANCE_FROM: Final = {OFFSET_COMMIT: 7, TXN_OFFSET_COMMIT: 3}

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


def coordination_key(api_key: int, api_version: int, body: Buffer) -> str | None:
    """The group or transactional id of a request; None if it has none, or not just one. Raises CodecError."""
    walk = Walk(body, compact=is_flexible(api_key, api_version))
    if names_groups(api_key, api_version):
        return walk.text() if walk.count(2) == 1 else None
    if api_key == TXN_OFFSET_COMMIT:
        # Skip the transactional id, because the request goes to the group's coordinator.
        walk.string()
    return walk.text(nullable=True)


def names_groups(api_key: int, api_version: int) -> bool:
    """Whether the request, an OffsetFetch, may name several groups."""
    return api_key == OFFSET_FETCH and api_version >= _FETCH_GROUPS_FROM


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
    out = bytearray(INT32.size if api_version >= _THROTTLE_FROM[FIND_COORDINATOR] else 0)
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


def _topic(walk: Walk, api_key: int, api_version: int) -> None:
    """Skip a topic's name or id."""
    if api_key in (OFFSET_COMMIT, OFFSET_FETCH) and api_version >= OFFSETS_BY_ID_FROM:
        walk.skip(TOPIC_ID_BYTES)
    else:
        walk.string()


# Requests that commit offsets


def blank_committed_epochs(api_key: int, api_version: int, request_body: memoryview) -> Work[None]:
    """Overwrite the leader epochs of a version from COMMIT_EPOCH_FROM on with -1 (unknown). Raises CodecError."""
    walk = Walk(request_body, compact=is_flexible(api_key, api_version))
    walk.string()
    if api_key == TXN_OFFSET_COMMIT:
        walk.string()
        walk.skip(INT64.size + INT16.size)
    if api_version >= _COMMIT_MEMBER_FROM[api_key]:
        walk.skip(INT32.size)
        walk.string()
    if api_version >= _COMMIT_INSTANCE_FROM[api_key]:
        walk.string(nullable=True)
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
