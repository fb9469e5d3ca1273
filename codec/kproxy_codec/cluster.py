"""Copy answers about the cluster and replace the brokers in them.

Metadata (versions 0 to 13), DescribeCluster (0 to 2) and DescribeTopicPartitions (0) name brokers in their list, as the
controller, and as leaders and replicas of partitions. This module writes other brokers in their place. Each partition
then has one replica, its leader, and no error about leaders; leader epochs are -1 (unknown), racks are null. Offline
and eligible replicas and tagged fields are omitted. Everything else is copied unchanged (but see `Named.verdict`).

An answer about all topics of a large cluster may have megabytes, so it is copied in portions (`kproxy_codec.walk`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from typing import Final, NamedTuple, TypeAlias

from kproxy_codec.api_keys import DESCRIBE_CLUSTER, DESCRIBE_TOPIC_PARTITIONS, METADATA, is_flexible
from kproxy_codec.error_codes import LEADER_NOT_AVAILABLE, NONE, NOT_LEADER_OR_FOLLOWER, REPLICA_NOT_AVAILABLE
from kproxy_codec.errors import InvalidField
from kproxy_codec.metadata import (
    BROKER_TAIL_FROM,
    CLUSTER_ID_FROM,
    CLUSTER_OPERATIONS_TO,
    LEADER_EPOCH_FROM,
    LEAST_BROKER_BYTES,
    LEAST_PARTITION_BYTES,
    LEAST_TOPIC_BYTES,
    OFFLINE_REPLICAS_FROM,
    OPERATIONS_FROM,
    THROTTLE_FROM,
    TOPIC_ID_FROM,
    WITH_EPOCH,
    WITHOUT_EPOCH,
    read_partitions,
)
from kproxy_codec.primitives import INT8, INT16, INT32, Buffer, encode_count, encode_string
from kproxy_codec.walk import Walk, Work

RENAMED: Final = frozenset({METADATA, DESCRIBE_CLUSTER, DESCRIBE_TOPIC_PARTITIONS})
"""The APIs whose answers this module copies."""

ASK_ANOTHER: Final = b"\x01\xd7\x9e\x01\x00"
"""The end of a flexible answer from a reference broker that does not know the cluster: one tagged field of this
project, empty and numbered as the API key of Own. Clients skip it; a proxy asks another broker."""

_NO_EPOCH: Final = -1
# Errors about a broker's own view of leaders; they do not apply to the brokers that replace it.
_ABOUT_LEADERS: Final = frozenset({LEADER_NOT_AVAILABLE, REPLICA_NOT_AVAILABLE, NOT_LEADER_OR_FOLLOWER})
# Operations that were not requested (KIP-430).
_NO_OPERATIONS: Final = INT32.pack(-(2**31))
_NO_TOPIC_ID: Final = bytes(16)
_NO_TAGS: Final = b"\x00"

# Versions of Metadata.
_NULLABLE_NAME_FROM = 12
_ERROR_CODE_FROM = 13
_ALL_TOPICS_NULL_FROM = 1
_AUTO_CREATION_FROM = 4
# Versions of DescribeCluster.
_ENDPOINT_TYPE_FROM = 1
_IS_FENCED_FROM = 2

_HEAD: Final = Struct(">hi")
# The cost of a topic in a portion, in partitions.
_TOPIC_COST = 5


Verdict: TypeAlias = Callable[[bytes, bytes, int], tuple[int, bool] | None]
"""Maps a topic's name, id and error code to its code in the copy, and whether its name is shown; None omits it. A topic
whose code is changed has no partitions. The id is empty if the version has none."""


class Named(NamedTuple):
    """The brokers to name: `brokers` as node id, host and port, and the leaders of a topic's partitions.

    `verdict` decides about each topic; None: all are named. With a verdict the authorized operations are omitted.
    """

    brokers: Sequence[tuple[int, str, int]]
    controller_id: int
    leaders: Callable[[bytes, list[int]], Iterable[int]]
    verdict: Verdict | None = None


class _Form(NamedTuple):
    """The layout of topics and partitions in one version; `arrays`: for each array of a partition, may it be null."""

    compact: bool
    nullable_name: bool
    has_topic_id: bool
    has_is_internal: bool
    has_operations: bool
    has_epoch: bool
    arrays: tuple[bool, ...]

    def behind_index(self, leader: int) -> bytes:
        """A partition's bytes after its error code and index."""
        epoch = INT32.pack(_NO_EPOCH) if self.has_epoch else b""
        replicas = encode_count(1, compact=self.compact) + INT32.pack(leader)
        nobody = encode_count(0, compact=self.compact) * (len(self.arrays) - 2)
        return INT32.pack(leader) + epoch + 2 * replicas + nobody + (_NO_TAGS if self.compact else b"")


def _metadata_form(version: int) -> _Form:
    return _Form(
        compact=is_flexible(METADATA, version),
        nullable_name=version >= _NULLABLE_NAME_FROM,
        has_topic_id=version >= TOPIC_ID_FROM,
        has_is_internal=version >= BROKER_TAIL_FROM,
        has_operations=version >= OPERATIONS_FROM,
        has_epoch=version >= LEADER_EPOCH_FROM,
        arrays=(False, False, False) if version >= OFFLINE_REPLICAS_FROM else (False, False),
    )


# Replicas, in-sync replicas, eligible and last known eligible leaders, offline replicas. The eligible arrays are empty,
# not null, because kafka-clients 3.9 reads them without a null check.
_TOPIC_PARTITIONS_FORM: Final = _Form(
    compact=True,
    nullable_name=True,
    has_topic_id=True,
    has_is_internal=True,
    has_operations=True,
    has_epoch=True,
    arrays=(False, False, True, True, False),
)


def rename_brokers(api_key: int, api_version: int, body: Buffer, named: Named) -> Work[bytearray]:
    """The body of an answer of an API in RENAMED, with these brokers in it. Raises CodecError."""
    walk, out = Walk(body, compact=is_flexible(api_key, api_version)), bytearray()
    if api_key == METADATA:
        yield from _metadata(walk, api_version, named, out)
    elif api_key == DESCRIBE_CLUSTER:
        yield from _cluster(walk, api_version, named, out)
    else:
        out += walk.skip(INT32.size)
        yield from _topics(walk, _TOPIC_PARTITIONS_FORM, named, out)
        _cursor(walk, out)
    walk.end()
    if walk.compact:
        out += _NO_TAGS
    return out


def _metadata(walk: Walk, version: int, named: Named, out: bytearray) -> Work[None]:
    if version >= THROTTLE_FROM:
        out += walk.skip(INT32.size)
    yield from _brokers(walk, named, out, has_rack=version >= BROKER_TAIL_FROM)
    if version >= CLUSTER_ID_FROM:
        out += encode_string(walk.string(nullable=True), compact=walk.compact)
    if version >= BROKER_TAIL_FROM:
        walk.skip(INT32.size)
        out += INT32.pack(named.controller_id)
    yield from _topics(walk, _metadata_form(version), named, out)
    if OPERATIONS_FROM <= version <= CLUSTER_OPERATIONS_TO:
        operations = walk.skip(INT32.size)
        out += operations if named.verdict is None else _NO_OPERATIONS
    if version >= _ERROR_CODE_FROM:
        out += walk.skip(INT16.size)


def _cluster(walk: Walk, version: int, named: Named, out: bytearray) -> Work[None]:
    out += walk.skip(INT32.size + INT16.size)
    out += encode_string(walk.string(nullable=True), compact=True)
    if version >= _ENDPOINT_TYPE_FROM:
        out += walk.skip(INT8.size)
    out += encode_string(walk.string(), compact=True)
    walk.skip(INT32.size)
    out += INT32.pack(named.controller_id)
    yield from _brokers(walk, named, out, has_rack=True, behind_rack=b"\x00" * (version >= _IS_FENCED_FROM))
    operations = walk.skip(INT32.size)
    out += operations if named.verdict is None else _NO_OPERATIONS


def _brokers(walk: Walk, named: Named, out: bytearray, *, has_rack: bool, behind_rack: bytes = b"") -> Work[None]:
    """Replace the brokers; `behind_rack`: fixed fields with which an entry ends."""
    for _ in range(walk.count(LEAST_BROKER_BYTES)):
        walk.skip(INT32.size)
        walk.string()
        walk.skip(INT32.size)
        if has_rack:
            walk.string(nullable=True)
        walk.skip(len(behind_rack))
        walk.tags()
        if walk.spend(_TOPIC_COST):
            yield
    _write_brokers(named, out, compact=walk.compact, has_rack=has_rack, behind_rack=behind_rack)


def _write_brokers(named: Named, out: bytearray, *, compact: bool, has_rack: bool, behind_rack: bytes = b"") -> None:
    behind = (encode_string(None, compact=compact) if has_rack else b"") + behind_rack + (_NO_TAGS if compact else b"")
    out += encode_count(len(named.brokers), compact=compact)
    for node_id, host, port in named.brokers:
        out += INT32.pack(node_id) + encode_string(host.encode(), compact=compact) + INT32.pack(port) + behind


def _topics(walk: Walk, form: _Form, named: Named, out: bytearray) -> Work[None]:
    count = walk.count(LEAST_TOPIC_BYTES)
    if named.verdict is None:
        out += encode_count(count, compact=form.compact)
        yield from _each_topic(walk, form, named, count, out)
        return
    # The number of topics to write is known only after they are copied.
    told = bytearray()
    left_out = yield from _each_topic(walk, form, named, count, told)
    out += encode_count(count - left_out, compact=form.compact)
    out += told


def _each_topic(walk: Walk, form: _Form, named: Named, count: int, out: bytearray) -> Work[int]:
    """Copy `count` topics; return the number that is left out."""
    behind_index: dict[int, bytes] = {}
    leaders, verdict = named.leaders, named.verdict
    left_out = 0
    for _ in range(count):
        start = walk.at
        error_code = walk.fixed(INT16)
        name = walk.string(nullable=form.nullable_name) or b""
        topic_id = bytes(walk.skip(len(_NO_TOPIC_ID) * form.has_topic_id))
        walk.skip(int(form.has_is_internal))
        partitions = walk.count(LEAST_PARTITION_BYTES)
        decided = (error_code, True) if verdict is None else verdict(name, topic_id, error_code)
        if decided is None or decided[0] != error_code:
            yield from _pass_over(walk, form, partitions)
            if decided is None:
                left_out += 1
            else:
                out += _refused_topic(form, name, topic_id, *decided)
            continue
        out += walk.body[start : walk.at]
        while partitions:
            portion = min(partitions, walk.room)
            found = _read_partitions(walk, form, portion)
            indexes = [each[1] for each in found]
            for (error_code, index, *_), leader in zip(found, leaders(name, indexes), strict=True):
                behind = behind_index.get(leader)
                if behind is None:
                    behind = behind_index[leader] = form.behind_index(leader)
                out += _HEAD.pack(NONE if error_code in _ABOUT_LEADERS else error_code, index) + behind
            partitions -= portion
            if walk.spend(portion):
                yield
        operations = walk.skip(INT32.size * form.has_operations)
        out += operations if verdict is None or not form.has_operations else _NO_OPERATIONS
        walk.tags()
        if form.compact:
            out += _NO_TAGS
        if walk.spend(_TOPIC_COST):
            yield
    return left_out


def _pass_over(walk: Walk, form: _Form, partitions: int) -> Work[None]:
    """Skip the rest of a topic, from its partitions on."""
    while partitions:
        portion = min(partitions, walk.room)
        _read_partitions(walk, form, portion)
        partitions -= portion
        if walk.spend(portion):
            yield
    walk.skip(INT32.size * form.has_operations)
    walk.tags()
    if walk.spend(_TOPIC_COST):
        yield


def _refused_topic(form: _Form, name: bytes, topic_id: bytes, error_code: int, is_told: bool) -> bytes:
    """The entry of a topic with an error and no partitions: its name or, without a name, its id."""
    told = encode_string(name if is_told or not form.nullable_name else None, compact=form.compact)
    identity = told + ((_NO_TOPIC_ID if is_told else topic_id) if form.has_topic_id else b"")
    behind = b"\x00" * form.has_is_internal + encode_count(0, compact=form.compact)
    behind += (_NO_OPERATIONS if form.has_operations else b"") + (_NO_TAGS if form.compact else b"")
    return INT16.pack(error_code) + identity + behind


def _read_partitions(walk: Walk, form: _Form, count: int) -> list[tuple[int, ...]]:
    """The error code and index, and more, of the next partitions."""
    partitions: list[tuple[int, ...]] = []
    fields = WITH_EPOCH if form.has_epoch else WITHOUT_EPOCH
    read_partitions(walk, fields, form.arrays, count, partitions.append)
    return partitions


def _cursor(walk: Walk, out: bytearray) -> None:
    """Copy the cursor, where the next request begins, if there is one."""
    start = walk.at
    if walk.fixed(INT8) < 0:
        out += walk.body[start : walk.at]
        return
    walk.string()
    walk.skip(INT32.size)
    out += walk.body[start : walk.at]
    out += _NO_TAGS
    walk.tags()


# Requests for Metadata


def asks_for_all_topics(api_version: int, body: Buffer) -> bool:
    """Whether a Metadata request asks for all topics by naming none. Raises CodecError."""
    walk = Walk(body, compact=is_flexible(METADATA, api_version))
    count = walk.count(0, nullable=True)
    return count < 0 if api_version >= _ALL_TOPICS_NULL_FROM else count == 0


def disallow_auto_creation(api_version: int, body: memoryview) -> bool:
    """Change a Metadata request in place so that it creates no topic; return False if its version has no such field.

    Raises CodecError.
    """
    if api_version < _AUTO_CREATION_FROM:
        return False
    form = _metadata_form(api_version)
    walk = Walk(body, compact=form.compact)
    for _ in range(walk.count(2, nullable=True)):
        walk.skip(len(_NO_TOPIC_ID) * form.has_topic_id)
        walk.string(nullable=form.has_topic_id)
        walk.tags()
    walk.skip(INT8.size)[:] = b"\x00"
    return True


def leaderless_metadata(api_version: int, request_body: Buffer, named: Named) -> Work[bytearray]:
    """The body of a Metadata answer that names these brokers and no partition.

    Each topic has the error LEADER_NOT_AVAILABLE, after which clients ask again. Raises CodecError.
    """
    form = _metadata_form(api_version)
    walk, out = Walk(request_body, compact=form.compact), bytearray()
    if api_version >= THROTTLE_FROM:
        out += INT32.pack(0)
    _write_brokers(named, out, compact=form.compact, has_rack=api_version >= BROKER_TAIL_FROM)
    if api_version >= CLUSTER_ID_FROM:
        out += encode_string(None, compact=form.compact)
    if api_version >= BROKER_TAIL_FROM:
        out += INT32.pack(named.controller_id)
    count = walk.count(2, nullable=api_version >= _ALL_TOPICS_NULL_FROM)
    out += encode_count(max(count, 0), compact=form.compact)
    behind = b"\x00" * form.has_is_internal + encode_count(0, compact=form.compact)
    behind += (_NO_OPERATIONS if form.has_operations else b"") + (_NO_TAGS if form.compact else b"")
    for _ in range(count):
        topic_id = walk.skip(len(_NO_TOPIC_ID) * form.has_topic_id)
        name = walk.string(nullable=form.has_topic_id)
        walk.tags()
        if name is None and not form.nullable_name:
            raise InvalidField(f"Metadata v{api_version} asks for a topic without a name")
        out += INT16.pack(LEADER_NOT_AVAILABLE) + encode_string(name, compact=form.compact)
        out += topic_id
        out += behind
        if walk.spend(_TOPIC_COST):
            yield
    if OPERATIONS_FROM <= api_version <= CLUSTER_OPERATIONS_TO:
        out += _NO_OPERATIONS
    if api_version >= _ERROR_CODE_FROM:
        out += INT16.pack(NONE)
    if form.compact:
        out += _NO_TAGS
    # The fields after the topics are not needed. Bytes after the request are ignored, because librdkafka (2.16 at
    # least) sends three bytes too many.
    return out
