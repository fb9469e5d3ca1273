"""Read brokers' addresses, topic ids and group coordinators from etcd.

The lease table (kproxy.ownership.leases) feeds it with changes.

| key under the prefix | value | written by |
| --- | --- | --- |
| `brokers/{id}` | JSON with node_id, host, port | a reference broker, on its lease |
| `refbroker/topics/{topic}` | JSON with topic_id | reference brokers |
| `metadata/snapshot` | JSON: addresses and ids of all brokers and topics | KafScale's operator and brokers |
| `group-leases/{group}` | a decimal broker id | KafScale's broker that coordinates the group, on its lease |

A broker or topic may have both a key of its own and an entry in the snapshot (`Overlay`). Its own key wins: a broker's
key is on the broker's lease, so etcd removes it with the broker. The snapshot was written once by an operator or a
broker and may list brokers that are gone. So an entry of the snapshot counts only while there is no such key; dialling
shows whether its address is dead.

Invariants
1. An invalid value counts as none. But a snapshot has many brokers' addresses: if the whole is invalid, the last valid
   snapshot stays in force; a single invalid entry is skipped.
2. The result of a load and of events is the same, except for an invalid snapshot.
3. `Overlay` reports the present value of a key: the own value, else the listed value, else None. It reports removals
   before additions, so that an id may move from one topic to another.
4. Between loads a group's lease changes only to a later revision; others are ignored. There are at most MAX_GROUPS
   groups; further groups are treated as without a lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Final, Generic, NamedTuple, TypeVar

from kproxy.etcd import KeyValue, WatchEvent
from kproxy.ownership.lease_keys import (
    NO_SNAPSHOT,
    InvalidEntry,
    parse_address,
    parse_broker_key,
    parse_group_key,
    parse_owner,
    parse_snapshot,
    parse_topic_id,
    parse_topic_key,
)
from kproxy.routing.topology import Address, Topology

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Overlay(Generic[Key, Value]):
    """Values by key from two sources. `tell` is called with a key and its present value, or None."""

    def __init__(self, tell: Callable[[Key, Value | None], None]) -> None:
        self._tell = tell
        self._own: dict[Key, Value] = {}
        self._listed: Mapping[Key, Value] = {}
        self._told: dict[Key, Value] = {}

    def set_own(self, key: Key, value: Value | None) -> None:
        """Set the key's own value; None if its entry is gone."""
        if value is None:
            self._own.pop(key, None)
            value = self._listed.get(key)
        else:
            self._own[key] = value
        if value == self._told.get(key):
            return
        if value is None:
            del self._told[key]
        else:
            self._told[key] = value
        self._tell(key, value)

    def set_listed(self, listed: Mapping[Key, Value]) -> None:
        """Replace the values listed by the snapshot."""
        self._listed = listed
        standing = {**listed, **self._own}
        if standing != self._told:
            self._settle(standing, {key for key in standing if standing[key] != self._told.get(key)})

    def load(self, own: dict[Key, Value], listed: Mapping[Key, Value] | None) -> None:
        """Replace both sources; `listed` None keeps the listed values.

        Report all present values, also the unchanged ones.
        """
        self._own = own
        if listed is not None:
            self._listed = listed
        standing = {**self._listed, **own}
        self._settle(standing, standing)

    def _settle(self, standing: dict[Key, Value], news: Iterable[Key]) -> None:
        gone = [key for key, value in self._told.items() if standing.get(key) != value]
        self._told = standing
        for key in gone:
            self._tell(key, None)
        for key in news:
            self._tell(key, standing[key])


MAX_GROUPS: Final = 1_000_000


class GroupLease(NamedTuple):
    """`revision` is etcd's mod_revision of the key."""

    broker_id: int
    revision: int


class GroupLeases:
    """The coordinator of each consumer group, from KafScale's leases."""

    def __init__(self) -> None:
        self._leases: dict[str, GroupLease] = {}

    def holder(self, group: str) -> int | None:
        """The id of the broker that coordinates the group; None if it has no lease."""
        lease = self._leases.get(group)
        return None if lease is None else lease.broker_id

    def __len__(self) -> int:
        return len(self._leases)

    def put(self, group: str, lease: GroupLease) -> None:
        """Set the group's lease."""
        known = self._leases.get(group)
        if known is None and len(self._leases) >= MAX_GROUPS:
            return
        if known is None or known.revision < lease.revision:
            self._leases[group] = lease

    def remove(self, group: str, revision: int) -> None:
        """Remove the group's lease as of `revision`."""
        known = self._leases.get(group)
        if known is not None and known.revision <= revision:
            del self._leases[group]

    def load(self, leases: Mapping[str, GroupLease]) -> None:
        """Replace all leases."""
        self._leases = dict(leases)


PORTION_ENTRIES = 1_000


class _Kind(Enum):
    BROKER = "broker"
    TOPIC = "topic"
    GROUP = "group"
    SNAPSHOT = "snapshot"


class Directory:
    """Feeds brokers and topic ids to `topology`, and coordinators to `groups`.

    `skip` is called with each invalid key or value.
    """

    def __init__(self, prefix: str, topology: Topology, skip: Callable[[KeyValue, InvalidEntry], None]) -> None:
        self._topology = topology
        self._skip = skip
        self._brokers_prefix = f"{prefix}/brokers/"
        self._topics_prefix = f"{prefix}/refbroker/topics/"
        self._groups_prefix = f"{prefix}/group-leases/"
        self._snapshot_key = f"{prefix}/metadata/snapshot"
        self._addresses: Overlay[int, Address] = Overlay(self._tell_address)
        self._topic_ids: Overlay[bytes, bytes] = Overlay(self._tell_topic_id)
        self.groups = GroupLeases()

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefixes that a mirror must watch for this directory, beside `keys`."""
        return (self._brokers_prefix, self._topics_prefix, self._groups_prefix)

    @property
    def keys(self) -> tuple[str, ...]:
        return (self._snapshot_key,)

    def take(self, event: WatchEvent) -> None:
        """Apply a change."""
        said = self._read(event.kv, deleted=event.deleted)
        if said is None:
            return
        kind, key, value = said
        if kind is _Kind.BROKER:
            self._addresses.set_own(key, value)
        elif kind is _Kind.TOPIC:
            self._topic_ids.set_own(key, value)
        elif kind is _Kind.GROUP:
            if value is None:
                self.groups.remove(key, event.kv.mod_revision)
            else:
                self.groups.put(key, value)
        elif value is not None or event.deleted:
            listed = NO_SNAPSHOT if value is None else value
            self._topic_ids.set_listed(listed.topic_ids)
            self._addresses.set_listed(listed.addresses)

    async def load(self, kvs: Sequence[KeyValue]) -> None:
        """Replace all entries by those of these keys."""
        found: dict[_Kind, dict[Any, Any]] = {kind: {} for kind in _Kind}
        for position, kv in enumerate(kvs):
            said = self._read(kv)
            if said is not None:
                found[said[0]][said[1]] = said[2]
            if position % PORTION_ENTRIES == PORTION_ENTRIES - 1:
                await asyncio.sleep(0)
        said_by_keys = {kind: {key: value for key, value in found[kind].items() if value is not None} for kind in _Kind}
        # Without the key nothing is listed; with an invalid value the last valid list stays.
        listed = found[_Kind.SNAPSHOT].get(self._snapshot_key, NO_SNAPSHOT)
        self._addresses.load(said_by_keys[_Kind.BROKER], None if listed is None else listed.addresses)
        self._topic_ids.load(said_by_keys[_Kind.TOPIC], None if listed is None else listed.topic_ids)
        self.groups.load(said_by_keys[_Kind.GROUP])

    def _read(self, kv: KeyValue, *, deleted: bool = False) -> tuple[_Kind, Any, Any] | None:
        """The kind of a key, the name in it, and its value (None if deleted or invalid); None for an invalid key."""
        try:
            kind, key = self._subject(kv.key)
        except InvalidEntry as reason:
            self._skip(kv, reason)
            return None
        try:
            return kind, key, None if deleted else self._value(kind, key, kv)
        except InvalidEntry as reason:
            self._skip(kv, reason)
            return kind, key, None

    def _subject(self, key: str) -> tuple[_Kind, Any]:
        """The kind of a key and the name in it. Raises InvalidEntry."""
        if key.startswith(self._groups_prefix):
            return _Kind.GROUP, parse_group_key(key.removeprefix(self._groups_prefix))
        if key.startswith(self._topics_prefix):
            return _Kind.TOPIC, parse_topic_key(key.removeprefix(self._topics_prefix))
        if key == self._snapshot_key:
            return _Kind.SNAPSHOT, key
        return _Kind.BROKER, parse_broker_key(key.removeprefix(self._brokers_prefix))

    def _value(self, kind: _Kind, key: Any, kv: KeyValue) -> Any:
        """The parsed value of a key. Raises InvalidEntry."""
        if kind is _Kind.GROUP:
            return GroupLease(parse_owner(kv.value), kv.mod_revision)
        if kind is _Kind.TOPIC:
            return parse_topic_id(kv.value)
        if kind is _Kind.BROKER:
            return parse_address(key, kv.value)
        snapshot = parse_snapshot(kv.value)
        for reason in snapshot.invalid:
            self._skip(kv, reason)
        return snapshot

    # Changes to the topology

    def _tell_address(self, broker_id: int, address: Address | None) -> None:
        if address is None:
            self._topology.remove_broker(broker_id)
        else:
            self._topology.set_broker(broker_id, address)

    def _tell_topic_id(self, topic: bytes, topic_id: bytes | None) -> None:
        try:
            self._topology.set_topic_id(topic, topic_id)
        except ValueError:
            key = self._topics_prefix + topic.decode("ascii")
            self._skip(KeyValue(key, topic_id or b"", 0, 0, 0, 0), InvalidEntry("a topic_id that another topic has"))
            self._topology.set_topic_id(topic, None)
