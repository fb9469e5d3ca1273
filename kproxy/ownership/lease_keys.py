"""Parse etcd's keys and values about owners, brokers and topics, and report invalid ones.

A key or value that is invalid raises `InvalidEntry`. `SkippedKeys` counts such keys, and logs a limited number of them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple
from uuid import UUID

import msgspec
import structlog

from kproxy.config.parsing import is_topic_name
from kproxy.etcd import KeyValue
from kproxy.routing.topology import MAX_PARTITION_INDEX, Address
from kproxy_codec.partitioned import TOPIC_ID_BYTES

MAX_BROKER_ID = 2**31 - 1
MAX_BROKER_VALUE_BYTES = 4096
# A topic's value lists the replicas of each of its partitions.
MAX_TOPIC_VALUE_BYTES = 1 << 20
# KafScale's snapshot lists every partition of every topic; etcd takes requests of 1.5 MiB by default.
MAX_SNAPSHOT_VALUE_BYTES = 8 << 20
MAX_SNAPSHOT_BROKERS = 10_000
MAX_REASONS = 1_000
MAX_GROUP_ID_BYTES = 1_000

_DECIMAL = re.compile(r"0|[1-9][0-9]{0,9}")


class Partition(NamedTuple):
    topic: bytes
    partition_index: int


class InvalidEntry(Exception):
    """A key or value that cannot be used, and why."""


def _decimal(text: str, highest: int, reason: str) -> int:
    if _DECIMAL.fullmatch(text) is None or int(text) > highest:
        raise InvalidEntry(reason)
    return int(text)


@lru_cache(maxsize=1 << 14)
def _partition_index(text: str) -> int:
    return _decimal(text, MAX_PARTITION_INDEX, "not a partition index")


def parse_lease_key(rest: str) -> tuple[bytes, int]:
    """Parse `{topic}/{partition}`, the part of a lease's key after the prefix."""
    topic, _, partition = rest.rpartition("/")
    return parse_topic_key(topic), _partition_index(partition)


@lru_cache(maxsize=1 << 10)
def parse_owner(value: bytes) -> int:
    return _decimal(value[:16].decode("ascii", "replace"), MAX_BROKER_ID, "not a broker id")


def parse_broker_key(rest: str) -> int:
    return _decimal(rest, MAX_BROKER_ID, "not a broker id")


def parse_address(broker_id: int, value: bytes) -> Address:
    """Parse node_id, host and port in the JSON of a broker's key."""
    if len(value) > MAX_BROKER_VALUE_BYTES:
        raise InvalidEntry("a broker's value that is too long")
    try:
        fields = json.loads(value)
    except (ValueError, RecursionError):
        raise InvalidEntry("a broker's value that is not JSON") from None
    if not isinstance(fields, dict) or fields.get("node_id") != broker_id:
        raise InvalidEntry("a broker's value without the node_id of its key")
    return _address(fields.get("host"), fields.get("port"))


def _address(host: object, port: object) -> Address:
    if not isinstance(host, str) or not 0 < len(host) <= 255:
        raise InvalidEntry("a broker's value without a host")
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise InvalidEntry("a broker's value without a port")
    return Address(host, port)


@lru_cache(maxsize=1 << 10)
def parse_topic_key(rest: str) -> bytes:
    if not is_topic_name(rest):
        raise InvalidEntry("not a topic name")
    return rest.encode("ascii")


def parse_topic_id(value: bytes) -> bytes:
    """Parse the id in the JSON of a reference broker's topic."""
    if len(value) > MAX_TOPIC_VALUE_BYTES:
        raise InvalidEntry("a topic's value that is too long")
    try:
        return msgspec.json.decode(value, type=_TopicValue).topic_id.bytes
    except msgspec.MsgspecError:
        raise InvalidEntry("a topic's value without a topic_id") from None


class _TopicValue(msgspec.Struct):
    topic_id: UUID


def parse_group_key(rest: str) -> str:
    """Parse `{group}`, the part of a group lease's key after the prefix: any text, slashes included."""
    if not 0 < len(rest.encode(errors="surrogateescape")) <= MAX_GROUP_ID_BYTES:
        raise InvalidEntry("not a group id")
    return rest


class ClusterSnapshot(NamedTuple):
    """The cluster as KafScale's operator and brokers describe it: addresses by broker id, ids by topic.

    `invalid`: why entries were skipped, at most MAX_REASONS of them.
    """

    addresses: dict[int, Address]
    topic_ids: dict[bytes, bytes]
    invalid: list[InvalidEntry]


NO_SNAPSHOT = ClusterSnapshot({}, {}, [])


def parse_snapshot(value: bytes) -> ClusterSnapshot:
    """Parse the JSON of KafScale's `metadata/snapshot`, a Go struct without JSON names; invalid entries are skipped."""
    if len(value) > MAX_SNAPSHOT_VALUE_BYTES:
        raise InvalidEntry("a cluster snapshot that is too long")
    try:
        fields = msgspec.json.decode(value, type=_SnapshotValue)
    except (msgspec.MsgspecError, RecursionError):
        raise InvalidEntry("an invalid cluster snapshot") from None
    if len(fields.Brokers or ()) > MAX_SNAPSHOT_BROKERS:
        raise InvalidEntry("a cluster snapshot with too many brokers")
    addresses: dict[int, Address] = {}
    topic_ids: dict[bytes, bytes] = {}
    invalid: list[InvalidEntry] = []
    for entry in [*(fields.Brokers or ()), *(fields.Topics or ())]:
        try:
            if isinstance(entry, _SnapshotBroker):
                addresses[_node_id(entry.NodeID)] = _address(entry.Host, entry.Port)
            elif any(entry.TopicID or ()):
                topic_ids[parse_topic_key(entry.Topic or "")] = _topic_id_of(entry.TopicID or ())
        except InvalidEntry as reason:
            if len(invalid) < MAX_REASONS:
                invalid.append(reason)
    return ClusterSnapshot(addresses, topic_ids, invalid)


def _node_id(node_id: int) -> int:
    if not 0 <= node_id <= MAX_BROKER_ID:
        raise InvalidEntry("not a broker id")
    return node_id


def _topic_id_of(numbers: Sequence[int]) -> bytes:
    """The topic id in an array of 16 numbers, which is how Go writes 16 bytes."""
    try:
        topic_id = bytes(numbers)
    except ValueError:
        topic_id = b""
    if len(topic_id) != TOPIC_ID_BYTES:
        raise InvalidEntry("not a topic id")
    return topic_id


class _SnapshotBroker(msgspec.Struct):
    NodeID: int
    Host: str
    Port: int


class _SnapshotTopic(msgspec.Struct):
    Topic: str | None = None
    TopicID: list[int] | None = None


class _SnapshotValue(msgspec.Struct):
    # Go writes null for an empty list.
    Brokers: list[_SnapshotBroker] | None
    Topics: list[_SnapshotTopic] | None = None


log = structlog.get_logger(__name__)


class SkippedKeys:
    """Logs `event` for at most `most_logged` keys. Counts every key in `counts`, by `counted_as` and the reason."""

    def __init__(self, event: str, counts: Counter[str], *, counted_as: str = "", most_logged: int) -> None:
        self._event = event
        self._counts = counts
        self._counted_as = counted_as
        self._most_logged = most_logged
        self._logged: set[str] = set()

    def skip(self, kv: KeyValue, reason: InvalidEntry) -> None:
        self._counts[f"{self._counted_as}{reason}"] += 1
        if kv.key not in self._logged and len(self._logged) < self._most_logged:
            self._logged.add(kv.key)
            log.warning(self._event, key=kv.key[:300], value=kv.value[:80], reason=str(reason))
