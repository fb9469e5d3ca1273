"""Who owns which partition, and where the owners are.

State: for each topic, by partition index, (owner, revision); for each broker id, its address. One instance per process,
changed only by an ownership source and read by everything else, all on one event loop. A reader sees one consistent
snapshot because it looks up every partition of a request within one synchronous step: nothing here awaits.

Invariants
1. An entry changes only upward: a change that carries a revision at or below the entry's own is ignored. A removal
   keeps its revision, so that a late event of an earlier owner cannot bring that owner back.
2. `revision` is the highest revision seen; it goes down only in `begin_rebuild` (a restored etcd).
3. `version` grows with every change that could alter a route.
4. A topic id (KIP-516, 16 bytes) is another name of its topic: what is looked up by the one is found by the other, at
   the same cost. A topic has one id at most; with a new id it is a new topic, and the old id leads nowhere. Kafka's ids
   are UUIDs of version 4, whose bytes are never all ASCII: none of them is the name of a topic.
5. `owned_count` is the number of partitions that have an owner.
6. A broker may be doubted: it is not known to answer at the address it has. `takers`, to whom what nobody owns is
   offered, are the others, or all where all are doubted. What a doubted broker owns goes to it all the same.
7. Partition indexes lie in [0, MAX_PARTITION_INDEX]; anything else is refused, so a bad key cannot cost memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from codec.partitioned import TOPIC_ID_BYTES

NO_OWNER = -1
MAX_PARTITION_INDEX = 999_999


class Address(NamedTuple):
    """Where a broker listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Ownership(NamedTuple):
    """One row of the table: `revision` is etcd's mod_revision of the lease key, never a leader epoch."""

    topic: bytes
    partition_index: int
    owner: int
    revision: int


class _TopicOwners:
    """Owner and revision by partition index, twelve bytes a partition."""

    __slots__ = ("owners", "revisions")

    def __init__(self) -> None:
        self.owners = array("i")
        self.revisions = array("q")

    def grow(self, partition_index: int) -> None:
        missing = partition_index + 1 - len(self.owners)
        if missing > 0:
            self.owners.extend([NO_OWNER] * missing)
            self.revisions.extend([0] * missing)


class Topology:
    """The routing table. Topics are bytes as they stand on the wire, so that a lookup decodes nothing."""

    def __init__(self, *, offers_unowned: bool = True) -> None:
        """`offers_unowned`: a partition that nobody owns may be offered to a broker, which will take it."""
        self.offers_unowned = offers_unowned
        # By name, and by id where there is one.
        self._topics: dict[bytes, _TopicOwners] = {}
        self._ids: dict[bytes, bytes] = {}
        self._names: dict[bytes, bytes] = {}
        self._brokers: dict[int, Address] = {}
        self._doubted: set[int] = set()
        self.revision = 0
        self.version = 0
        self._waiting: dict[Callable[[], None], None] = {}
        self.owned_count = 0

    # Reading

    def owner(self, topic: bytes, partition_index: int) -> int:
        """The broker id that owns the partition, or NO_OWNER."""
        topic_owners = self._topics.get(topic)
        if topic_owners is None or not 0 <= partition_index < len(topic_owners.owners):
            return NO_OWNER
        return topic_owners.owners[partition_index]

    def owner_revision(self, topic: bytes, partition_index: int) -> int:
        """The revision of the partition's last change, 0 where none was ever seen."""
        topic_owners = self._topics.get(topic)
        if topic_owners is None or not 0 <= partition_index < len(topic_owners.revisions):
            return 0
        return topic_owners.revisions[partition_index]

    def name_of(self, topic: bytes) -> bytes | None:
        """The name of the topic with this id."""
        return self._names.get(topic)

    @property
    def topic_ids(self) -> Mapping[bytes, bytes]:
        """Topic ids by name, as far as they are known. Treat it as read-only."""
        return self._ids

    def partition_indexes(self, topic: bytes) -> range:
        """The partitions of a topic that something has been known of."""
        topic_owners = self._topics.get(topic)
        return range(len(topic_owners.owners)) if topic_owners is not None else range(0)

    def address(self, broker_id: int) -> Address | None:
        return self._brokers.get(broker_id)

    @property
    def brokers(self) -> dict[int, Address]:
        """Live brokers by id. Treat it as read-only."""
        return self._brokers

    @property
    def takers(self) -> Collection[int]:
        """The ids of the brokers that may be offered what nobody owns. Treat it as read-only."""
        if not self._doubted:
            return self._brokers
        return self._brokers.keys() - self._doubted or self._brokers

    def ownerships(self) -> Iterator[Ownership]:
        """Every owned partition, by topic and index."""
        for topic in sorted(self._topics.keys() - self._names.keys()):
            topic_owners = self._topics[topic]
            for partition_index, owner in enumerate(topic_owners.owners):
                if owner != NO_OWNER:
                    yield Ownership(topic, partition_index, owner, topic_owners.revisions[partition_index])

    def on_next_change(self, call: Callable[[], None]) -> None:
        """Have `call` called once, in the midst of the next change; again only if asked again."""
        self._waiting[call] = None

    def forget(self, call: Callable[[], None]) -> None:
        """Take back `on_next_change`."""
        self._waiting.pop(call, None)

    def _changed(self) -> None:
        self.version += 1
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for call in waiting:
                call()

    # Changing: for ownership sources alone

    def set_owner(self, topic: bytes, partition_index: int, owner: int, revision: int) -> bool:
        """Record `owner` (NO_OWNER for a removal) as of `revision`; False where the table already knows better."""
        if not 0 <= partition_index <= MAX_PARTITION_INDEX:
            return False
        topic_owners = self._topics.get(topic)
        if topic_owners is None:
            topic_owners = self._add(topic)
        topic_owners.grow(partition_index)
        if revision <= topic_owners.revisions[partition_index]:
            return False
        self.owned_count += (owner != NO_OWNER) - (topic_owners.owners[partition_index] != NO_OWNER)
        topic_owners.owners[partition_index] = owner
        topic_owners.revisions[partition_index] = revision
        self.revision = max(self.revision, revision)
        self._changed()
        return True

    def _add(self, topic: bytes) -> _TopicOwners:
        topic_owners = self._topics[topic] = _TopicOwners()
        return topic_owners

    def set_topic_id(self, topic: bytes, topic_id: bytes | None) -> None:
        """Name a topic's id, or that it has none (any more). Raises ValueError for an id that is none."""
        known = self._ids.get(topic)
        if topic_id == known:
            return
        if topic_id is not None and (len(topic_id) != TOPIC_ID_BYTES or topic_id in self._topics):
            raise ValueError(f"{topic_id.hex()} is no id for {topic!r}")
        if known is not None:
            del self._ids[topic], self._names[known], self._topics[known]
        if topic_id is not None:
            self._ids[topic] = topic_id
            self._names[topic_id] = topic
            self._topics[topic_id] = self._topics.get(topic) or self._add(topic)
        self._changed()

    def load(self, rows: Iterable[Ownership], revision: int) -> None:
        """Take `rows` as the whole table at `revision`: set what they name, remove what they do not."""
        named: set[tuple[bytes, int]] = set()
        for row in rows:
            named.add((row.topic, row.partition_index))
            self.set_owner(row.topic, row.partition_index, row.owner, row.revision)
        for known in list(self.ownerships()):
            if (known.topic, known.partition_index) not in named and known.revision <= revision:
                self.set_owner(known.topic, known.partition_index, NO_OWNER, max(revision, known.revision + 1))
        self.revision = max(self.revision, revision)

    def begin_rebuild(self) -> None:
        """Forget every owner and revision: etcd was restored, its revisions start anew."""
        self._topics.clear()
        self._ids.clear()
        self._names.clear()
        self.owned_count = 0
        self.revision = 0
        self._changed()

    def set_broker(self, broker_id: int, address: Address) -> None:
        if self._brokers.get(broker_id) != address:
            self._brokers[broker_id] = address
            self._doubted.discard(broker_id)
            self._changed()

    def remove_broker(self, broker_id: int) -> None:
        if self._brokers.pop(broker_id, None) is not None:
            self._doubted.discard(broker_id)
            self._changed()

    # For those who talk to brokers

    def doubt(self, broker_id: int, *, doubted: bool) -> None:
        """A broker does not answer at its address, or answers again."""
        if doubted is (broker_id in self._doubted) or broker_id not in self._brokers:
            return
        if doubted:
            self._doubted.add(broker_id)
        else:
            self._doubted.discard(broker_id)
        self._changed()
