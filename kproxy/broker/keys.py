"""Define the broker's keys in etcd, and encode and decode their values.

    {prefix}/brokers/{id}                               {"node_id": 1, "host": "…", "port": 9092, "replication_port": 9,
                                                         "log_id": uuid} on the broker's lease
    {prefix}/partition-leases/{topic}/{partition}       decimal broker id, on the broker's lease
    {prefix}/refbroker/topics/{topic}                   {"topic_id": uuid, "replicas": [[1, 2], …], "configs": {…}}
    {prefix}/refbroker/creating/{topic}                 topic id of the creation that may put the topic's states
    {prefix}/refbroker/partitions/{topic}/{partition}   {"leader_epoch": n, "isr": [[id, log id], …], "topic_id": uuid,
                                                         "version": 2}
    {prefix}/refbroker/fences/{topic}/{partition}       {"fence": n, "is_owned": bool, "topic_id": uuid}
    {prefix}/refbroker/cluster-id                       the cluster's id, as Kafka's clients see it
    {prefix}/refbroker/replication-secret               the secret that brokers share (replication.authentication)
    {prefix}/producer-ids                               decimal: the first producer id not assigned yet

`replicas[p]` are the brokers that keep partition p; the first one that can takes it. A state or fence with another
topic_id belongs to an earlier topic of the same name and counts as absent. Unreadable values raise ValueError.

The states of a topic are created with it (`topics`), in leader epoch -1, which never had a leader.

A log id names the contents of one disk (KIP-858's directory ids, KIP-853's replica keys).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import msgspec

MAX_PARTITIONS_PER_TOPIC = 10_000
STATE_VERSION = 2


class TopicValue(msgspec.Struct, frozen=True):
    """One topic as created; it never changes. All its partitions have the same number of replicas."""

    topic_id: uuid.UUID
    replicas: list[list[int]]
    configs: dict[str, str]


class ReplicaKey(NamedTuple):
    """One log of a partition: its broker, and the id of the disk's contents."""

    node_id: int
    log_id: uuid.UUID

    @classmethod
    def parse(cls, text: str) -> ReplicaKey:
        """Parse the `str` form of a key. Raises ValueError."""
        node_id, _, log_id = text.partition("/")
        key = cls(parse_node_id(node_id), uuid.UUID(log_id))
        if str(key) != text:
            raise ValueError(f"invalid replica {text[:60]!r}; expected broker id/log id")
        return key

    def __str__(self) -> str:
        return f"{self.node_id}/{self.log_id}"


def node_ids(replicas: Iterable[ReplicaKey]) -> list[int]:
    """Return the brokers of those logs, sorted."""
    return sorted(replica.node_id for replica in replicas)


class StateValue(msgspec.Struct, frozen=True):
    """The state of a partition, whoever owns it. An absent state was lost, and no broker may lead."""

    leader_epoch: int
    isr: list[ReplicaKey]
    topic_id: uuid.UUID
    version: int = STATE_VERSION


class FenceValue(msgspec.Struct, frozen=True):
    """The fence of a partition's writers (`writer_fence`). If absent, the partition was never claimed."""

    fence: int
    is_owned: bool
    topic_id: uuid.UUID


class BrokerValue(msgspec.Struct, frozen=True):
    """The addresses of a live broker for clients and for followers. `log_id` is that of its data directory."""

    node_id: int
    host: str
    port: int
    replication_port: int
    log_id: uuid.UUID


_Value = TypeVar("_Value", TopicValue, StateValue, FenceValue, BrokerValue)


def decode_value(data: bytes, kind: type[_Value]) -> _Value:
    """Decode a value of that kind. Raises ValueError."""
    try:
        value = msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error
    if isinstance(value, StateValue) and value.version != STATE_VERSION:
        raise ValueError(f"unknown version {value.version}; expected {STATE_VERSION}")
    return value


def encode_value(value: TopicValue | StateValue | FenceValue | BrokerValue) -> bytes:
    """Encode a value for etcd."""
    return msgspec.json.encode(value)


class Keys:
    """The names of all keys under one prefix."""

    def __init__(self, prefix: str) -> None:
        root = prefix.rstrip("/")
        self.brokers = f"{root}/brokers/"
        self.leases = f"{root}/partition-leases/"
        self.topics = f"{root}/refbroker/topics/"
        self._creating = f"{root}/refbroker/creating/"
        self.states = f"{root}/refbroker/partitions/"
        self.fences = f"{root}/refbroker/fences/"
        self.cluster_id = f"{root}/refbroker/cluster-id"
        self.replication_secret = f"{root}/refbroker/replication-secret"
        self.producer_ids = f"{root}/producer-ids"

    def broker(self, node_id: int) -> str:
        return f"{self.brokers}{node_id}"

    def lease(self, topic: str, partition_index: int) -> str:
        return f"{self.leases}{topic}/{partition_index}"

    def topic(self, topic: str) -> str:
        return f"{self.topics}{topic}"

    def creating(self, topic: str) -> str:
        return f"{self._creating}{topic}"

    def state(self, topic: str, partition_index: int) -> str:
        return f"{self.states}{topic}/{partition_index}"

    def fence(self, topic: str, partition_index: int) -> str:
        return f"{self.fences}{topic}/{partition_index}"


class PartitionKey(NamedTuple):
    """A partition: topic name and index."""

    topic: str
    partition_index: int


def parse_partition(suffix: str) -> PartitionKey:
    """Parse the `{topic}/{partition}` that follows a prefix. Raises ValueError."""
    topic, slash, index = suffix.rpartition("/")
    if not topic or not slash or "/" in topic or not index.isascii() or not index.isdigit():
        raise ValueError(f"invalid key {suffix!r}; expected topic/partition")
    partition_index = int(index)
    if str(partition_index) != index or partition_index >= MAX_PARTITIONS_PER_TOPIC:
        raise ValueError(f"invalid partition in {suffix!r}; expected less than {MAX_PARTITIONS_PER_TOPIC}")
    return PartitionKey(topic, partition_index)


def parse_node_id(text: str) -> int:
    """Parse a decimal broker id. Raises ValueError."""
    if not text.isascii() or not text.isdigit() or len(text) > 10:
        raise ValueError(f"invalid broker id {text!r}; expected a number")
    return int(text)
