"""Hold this broker's view of the cluster, mirrored from etcd: live brokers, topics, lease keys and partition states.

State: four tables. A PrefixMirror and this broker's own transactions fill them, whichever comes first.

Invariants
1. Apart from a snapshot, which replaces all, an entry changes only to a higher mod_revision: older events are ignored.
2. Subscribers are called for every change, after the tables have it. A snapshot is one change that names no entry.
3. An unreadable value is logged and counts as absent; it never ends the mirror.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar

import structlog

from kproxy.broker.config import check_configs
from kproxy.broker.keys import (
    MAX_PARTITIONS_PER_TOPIC,
    BrokerValue,
    Keys,
    PartitionKey,
    ReplicaKey,
    StateValue,
    TopicValue,
    decode_value,
    node_ids,
    parse_node_id,
    parse_partition,
)
from kproxy.etcd import EtcdClient, KeyValue, Snapshot, WatchEvent, get_op, key_absent, put_op

NO_OWNER = -1
_logger = structlog.get_logger(__name__)


class LiveBroker(NamedTuple):
    """A broker that holds its key. Followers fetch at `replication_port`; `log_id` is that of its data directory."""

    node_id: int
    host: str
    port: int
    lease_id: int
    mod_revision: int
    replication_port: int
    log_id: uuid.UUID


class Topic(NamedTuple):
    """A topic with checked `configs`; `mod_revision` guards transactions that rely on it."""

    name: str
    topic_id: uuid.UUID
    replicas: list[list[int]]
    configs: dict[str, str]
    create_revision: int
    mod_revision: int

    @property
    def replication_factor(self) -> int:
        """The number of replicas that each partition was created with."""
        return len(self.replicas[0])


class Ownership(NamedTuple):
    """The holder of a partition's lease key."""

    node_id: int
    lease_id: int
    mod_revision: int


class PartitionState(NamedTuple):
    """A partition's leader epoch and ISR."""

    leader_epoch: int
    isr: list[ReplicaKey]
    topic_id: uuid.UUID
    mod_revision: int

    @property
    def in_sync(self) -> list[int]:
        """The ids of the brokers whose logs are in the ISR."""
        return node_ids(self.isr)


class Kind(Enum):
    """The kind of a change."""

    SNAPSHOT = "everything"
    RESTORED = "etcd's history"
    BROKER = "broker"
    TOPIC = "topic"
    OWNER = "owner"
    STATE = "state"


class Change(NamedTuple):
    """One change; its kind decides which fields count.

    `deleted` is the topic that a deletion removed. A topic that is merely missing from a snapshot gets no such change.
    """

    kind: Kind
    topic: str = ""
    partition_index: int = -1
    node_id: int = -1
    deleted: Topic | None = None


_Key = TypeVar("_Key")
_Entry = TypeVar("_Entry", bound=LiveBroker | Topic | Ownership | PartitionState)


class _Table(Generic[_Key, _Entry]):
    """The entries of one prefix, by the rest of their keys. `change_of` returns the change of a key's entry."""

    def __init__(
        self,
        prefix: str,
        parse_key: Callable[[str], _Key],
        parse_value: Callable[[_Key, KeyValue], _Entry],
        change_of: Callable[[_Key], Change],
    ) -> None:
        self.prefix = prefix
        self.entries: dict[_Key, _Entry] = {}
        self._parse_key = parse_key
        self._parse_value = parse_value
        self._change_of = change_of
        self._mirrored_revision = 0

    def clear(self, revision: int) -> None:
        """Forget everything; the entries at `revision` follow."""
        self.entries.clear()
        self._mirrored_revision = revision

    def put(self, kv: KeyValue, *, from_mirror: bool) -> tuple[Change, _Entry] | None:
        """Apply a put; return the change and the new entry, or None if a newer value is known. Raises ValueError."""
        key = self._parse_key(kv.key.removeprefix(self.prefix))
        known = self.entries.get(key)
        if from_mirror:
            self._mirrored_revision = max(self._mirrored_revision, kv.mod_revision)
        elif known is None and kv.mod_revision <= self._mirrored_revision:
            return None  # the mirror has reported this put and a later deletion
        if known is not None and known.mod_revision >= kv.mod_revision:
            return None
        self.entries.pop(key, None)
        entry = self.entries[key] = self._parse_value(key, kv)
        return self._change_of(key), entry

    def delete(self, kv: KeyValue) -> tuple[Change, _Entry] | None:
        """Apply a deletion; return the change and the removed entry. Raises ValueError."""
        self._mirrored_revision = max(self._mirrored_revision, kv.mod_revision)
        key = self._parse_key(kv.key.removeprefix(self.prefix))
        known = self.entries.get(key)
        if known is None or known.mod_revision > kv.mod_revision:
            return None
        return self._change_of(key), self.entries.pop(key)


class ClusterView:
    """The mirrored tables; a MirrorListener. Read them on the event loop that feeds them."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self._brokers = _Table(
            keys.brokers, parse_node_id, _parse_broker, lambda node_id: Change(Kind.BROKER, node_id=node_id)
        )
        self._topics = _Table(keys.topics, str, _parse_topic, lambda name: Change(Kind.TOPIC, name))
        self._states = _Table(keys.states, parse_partition, _parse_state, lambda key: Change(Kind.STATE, *key))
        self._owners = _Table(keys.leases, parse_partition, _parse_owner, lambda key: Change(Kind.OWNER, *key))
        self._tables: tuple[_Table[Any, Any], ...] = (self._brokers, self._topics, self._states, self._owners)
        self.snapshot_revision = 0
        # By the bytes of topic ids, as in requests: making a UUID costs more than the lookup.
        self._names: dict[bytes, str] = {}
        self._subscribers: list[Callable[[Change], None]] = []
        self._changed: asyncio.Future[None] | None = None

    @property
    def prefixes(self) -> list[str]:
        """The prefixes that a mirror must feed to this view."""
        return [table.prefix for table in self._tables]

    def subscribe(self, subscriber: Callable[[Change], None]) -> None:
        self._subscribers.append(subscriber)

    # Reading

    @property
    def brokers(self) -> Mapping[int, LiveBroker]:
        return self._brokers.entries

    @property
    def topics(self) -> Mapping[str, Topic]:
        return self._topics.entries

    def topic_by_id(self, topic_id: bytes) -> Topic | None:
        """Return the topic with that id, given as 16 bytes."""
        return self.topics.get(self._names.get(topic_id, ""))

    def ownership(self, topic: str, partition_index: int) -> Ownership | None:
        """Return the holder of the partition's lease key, dead or alive."""
        return self._owners.entries.get(PartitionKey(topic, partition_index))

    def owner(self, topic: str, partition_index: int) -> int:
        """Return the id of the live broker that owns the partition, or NO_OWNER.

        A lease key older than the topic belongs to a deleted topic of the same name and is about to be released.
        """
        ownership, found = self.ownership(topic, partition_index), self.topics.get(topic)
        if ownership is None or found is None or ownership.mod_revision < found.create_revision:
            return NO_OWNER
        return ownership.node_id if ownership.node_id in self.brokers else NO_OWNER

    def state(self, topic: Topic, partition_index: int) -> PartitionState | None:
        """Return the partition's state, if it belongs to this topic and not to an earlier one of the same name."""
        state = self._states.entries.get(PartitionKey(topic.name, partition_index))
        return state if state is not None and state.topic_id == topic.topic_id else None

    def is_fully_owned(self, topic: str) -> bool:
        """Return whether the topic exists and each of its partitions has a live owner."""
        found = self.topics.get(topic)
        return found is not None and all(self.owner(topic, index) != NO_OWNER for index in range(len(found.replicas)))

    async def wait_until(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a change that makes `predicate` true; False after `timeout_s`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not predicate():
            left = deadline - loop.time()
            if left <= 0:
                return False
            if self._changed is None:
                self._changed = loop.create_future()
            await asyncio.wait([self._changed], timeout=left)
        return True

    # Changes

    def on_restored(self) -> None:
        self._notify([Change(Kind.RESTORED)])

    def on_snapshot(self, snapshot: Snapshot) -> None:
        for table in self._tables:
            table.clear(snapshot.revision)
        self._names.clear()
        self.snapshot_revision = snapshot.revision
        for kv in snapshot.kvs:
            self._apply(kv)
        self._notify([Change(Kind.SNAPSHOT)])

    def on_events(self, events: list[WatchEvent], revision: int) -> None:
        changes = [self._apply(event.kv, deleted=event.deleted) for event in events]
        self._notify(change for change in changes if change is not None)

    def apply_put(self, key: str, value: bytes, *, lease_id: int, revision: int) -> bool:
        """Apply a put that this broker made or read at `revision`.

        False if nothing changes: the mirror has already reported this value or a newer one.
        """
        change = self._apply(KeyValue(key, value, revision, revision, 1, lease_id), from_mirror=False)
        if change is not None:
            self._notify([change])
        return change is not None

    def _notify(self, changes: Iterable[Change]) -> None:
        for change in changes:
            for subscriber in self._subscribers:
                subscriber(change)
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)

    def _apply(self, kv: KeyValue, *, deleted: bool = False, from_mirror: bool = True) -> Change | None:
        # The table of brokers refuses a key of any other kind.
        table = next((each for each in self._tables if kv.key.startswith(each.prefix)), self._brokers)
        try:
            applied = table.delete(kv) if deleted else table.put(kv, from_mirror=from_mirror)
        except ValueError as error:
            _logger.warning("etcd key ignored", key=kv.key, reason=str(error))
            return None
        if applied is None:
            return None
        change, entry = applied
        if not isinstance(entry, Topic):
            return change
        if deleted:
            self._names.pop(entry.topic_id.bytes, None)
            return change._replace(deleted=entry)
        self._names[entry.topic_id.bytes] = entry.name
        return change


def _parse_broker(node_id: int, kv: KeyValue) -> LiveBroker:
    value = decode_value(kv.value, BrokerValue)
    replicates = value.replication_port, value.log_id
    return LiveBroker(node_id, value.host, value.port, kv.lease_id, kv.mod_revision, *replicates)


def _parse_topic(name: str, kv: KeyValue) -> Topic:
    value = decode_value(kv.value, TopicValue)
    if not value.replicas or len(value.replicas) > MAX_PARTITIONS_PER_TOPIC or not all(value.replicas):
        raise ValueError("a topic needs a partition, and each partition a replica")
    configs = check_configs(value.configs)
    return Topic(name, value.topic_id, value.replicas, configs, kv.create_revision, kv.mod_revision)


def _parse_state(_: PartitionKey, kv: KeyValue) -> PartitionState:
    value = decode_value(kv.value, StateValue)
    return PartitionState(value.leader_epoch, value.isr, value.topic_id, kv.mod_revision)


def _parse_owner(_: PartitionKey, kv: KeyValue) -> Ownership:
    return Ownership(parse_node_id(kv.value.decode()), kv.lease_id, kv.mod_revision)


async def get_or_put(client: EtcdClient, key: str, proposal: bytes) -> bytes:
    """Return the value of `key`; put `proposal` if there is none. Raises EtcdError."""
    result = await client.txn([key_absent(key)], [put_op(key, proposal)], [get_op(key)])
    (found,) = result.found
    return proposal if found is None else found.value
