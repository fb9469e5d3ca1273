"""What the keys and values of ownership in etcd mean; one that means nothing raises `Senseless`."""

from __future__ import annotations

import json
import re
from typing import NamedTuple
from uuid import UUID

import msgspec

from kproxy.routing.topology import MAX_PARTITION_INDEX, Address

MAX_BROKER_ID = 2**31 - 1
MAX_BROKER_VALUE_BYTES = 4096
# A topic's value lists the replicas of each of its partitions.
MAX_TOPIC_VALUE_BYTES = 1 << 20

_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,9}")


class Partition(NamedTuple):
    topic: bytes
    partition_index: int


class Senseless(Exception):
    """A key or value that cannot be used, and why."""


def _decimal(text: str, highest: int, reason: str) -> int:
    if _DECIMAL.fullmatch(text) is None or int(text) > highest:
        raise Senseless(reason)
    return int(text)


def is_topic_name(name: str) -> bool:
    return _TOPIC.fullmatch(name) is not None and name not in (".", "..")


def parse_lease_key(rest: str) -> Partition:
    """`{topic}/{partition}`, the part of a lease's key after the prefix."""
    topic, _, partition = rest.rpartition("/")
    if not is_topic_name(topic):
        raise Senseless("not a topic name")
    return Partition(topic.encode("ascii"), _decimal(partition, MAX_PARTITION_INDEX, "not a partition index"))


def parse_owner(value: bytes) -> int:
    return _decimal(value[:16].decode("ascii", "replace"), MAX_BROKER_ID, "not a broker id")


def parse_broker_key(rest: str) -> int:
    return _decimal(rest, MAX_BROKER_ID, "not a broker id")


def parse_address(broker_id: int, value: bytes) -> Address:
    """The JSON of a broker's key; fields other than node_id, host and port are none of our business."""
    if len(value) > MAX_BROKER_VALUE_BYTES:
        raise Senseless("a broker's value that is too long")
    try:
        fields = json.loads(value)
    except (ValueError, RecursionError):
        raise Senseless("a broker's value that is not JSON") from None
    if not isinstance(fields, dict) or fields.get("node_id") != broker_id:
        raise Senseless("a broker's value without the node_id of its key")
    host, port = fields.get("host"), fields.get("port")
    if not isinstance(host, str) or not 0 < len(host) <= 255:
        raise Senseless("a broker's value without a host")
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise Senseless("a broker's value without a port")
    return Address(host, port)


def parse_topic_key(rest: str) -> bytes:
    if not is_topic_name(rest):
        raise Senseless("not a topic name")
    return rest.encode("ascii")


def parse_topic_id(value: bytes) -> bytes:
    """The id in the JSON of a reference broker's topic."""
    if len(value) > MAX_TOPIC_VALUE_BYTES:
        raise Senseless("a topic's value that is too long")
    try:
        return msgspec.json.decode(value, type=_TopicValue).topic_id.bytes
    except msgspec.MsgspecError:
        raise Senseless("a topic's value without a topic_id") from None


class _TopicValue(msgspec.Struct):
    topic_id: UUID
