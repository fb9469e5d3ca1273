"""Hold the routing table: each partition's owner, and the brokers' addresses.

State: for each topic, by partition index, (owner, revision); for each broker id, its address. One instance per process,
changed only by ownership sources and, with `doubt`, by broker watches; all of it on one event loop. A reader sees one
consistent snapshot, as it looks up every partition of a request within one synchronous step: nothing here awaits.

Invariants
1. An entry's revision only grows, except in `begin_rebuild`: a change at or below the entry's own revision is ignored.
   A removal keeps its revision, so that a late event of an earlier owner cannot bring that owner back.
2. `revision` is the highest revision seen; it decreases only in `begin_rebuild` (a restored etcd).
3. `version` grows by one with every change that could alter a route. `moved_since` names every partition whose entry
   has changed since a version, or returns None: a change was of another kind, or is too long ago. Versions, not
   revisions, identify the state of this table when a request was sent: a read of one partition may return a revision
   before the watch delivers a lower one of another partition.
4. A topic id (KIP-516, 16 bytes) is another name of its topic: lookups by either find the same entry, at the same cost.
   A topic has at most one id. A new id replaces the old one, which then finds nothing; the owners stay until the source
   changes them. Kafka's ids are UUIDs of version 4, whose bytes are never all ASCII: none is the name of a topic.
5. `owned_count` is the number of partitions that have an owner.
6. A broker may be doubted: it may not answer at its address. `takers`, which are offered partitions without an owner,
   are the brokers that are not doubted, or all if all are doubted. Partitions that a doubted broker owns still go to
   it.
7. Partition indexes lie in [0, MAX_PARTITION_INDEX]; others are refused, so that a bad key cannot use up memory.
8. `lacks` is true only where the source names every partition that the upstream has, and has named them all
   (`is_complete`): a partition without an owner then does not exist.
9. A load (`begin_load`) sets each row at once, so a row counts before the load has ended. Entries that the load does
   not name are removed at its end, unless they are newer than the load. A load that is dropped halfway removes nothing.
10. A hint is an owner or an address without a revision, from a broker. It overrides the source's value, which is kept:
   a change by the source replaces the hint, and `drop_hints` undoes all of them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from kproxy.address import Address as Address
from kproxy_codec.partitioned import TOPIC_ID_BYTES

NO_OWNER = -1
MAX_PARTITION_INDEX = 999_999
# Limit of moves that `moved_since` remembers: more than occur between two requests of a busy client.
MAX_MOVES_KEPT = 256
# Topics whose changes of owners are counted each by itself; those of the others count as one.
MAX_COUNTED_TOPICS = 100
OTHER_TOPICS = b"other"
# Rows checked per step when a load ends.
PORTION_ROWS = 1_000


class Ownership(NamedTuple):
    """One row of the table: `revision` is etcd's mod_revision of the lease key, never a leader epoch."""

    topic: bytes
    partition_index: int
    owner: int
    revision: int


class _TopicOwners:
    """Owner, revision, version and moves by partition index, 24 bytes per partition."""

    __slots__ = ("all_moves", "moves", "owners", "revisions", "versions")

    def __init__(self) -> None:
        self.all_moves = 0
        self.owners = array("i")
        self.revisions = array("q")
        self.versions = array("q")
        self.moves = array("i")

    def grow(self, partition_index: int) -> None:
        missing = partition_index + 1 - len(self.owners)
        self.owners.extend([NO_OWNER] * missing)
        self.revisions.extend([0] * missing)
        self.versions.extend([0] * missing)
        self.moves.extend([0] * missing)


class Topology:
    """The routing table. Topics are bytes as on the wire, so lookups decode nothing."""

    def __init__(self, *, offers_unowned: bool = True) -> None:
        """`offers_unowned`: a partition without an owner may be offered to a broker, which accepts it."""
        self.offers_unowned = offers_unowned
        # By name, and by id if the topic has one.
        self._topics: dict[bytes, _TopicOwners] = {}
        self._ids: dict[bytes, bytes] = {}
        self._names: dict[bytes, bytes] = {}
        self._brokers: dict[int, Address] = {}
        self._doubted: set[int] = set()
        # The source's value where a hint overrides it.
        self._hinted: dict[tuple[bytes, int], int] = {}
        self._hinted_brokers: dict[int, Address | None] = {}
        self.revision = 0
        self.version = 0
        # The partitions of the latest changes, one for each step of `version`.
        self._moves: deque[tuple[bytes, int]] = deque(maxlen=MAX_MOVES_KEPT)
        # The names of the topics in order; None after an addition.
        self._in_order: list[bytes] | None = None
        self._waiting: dict[Callable[[], None], None] = {}
        self.owned_count = 0
        # By topic: how often a known partition has got another owner, or one again.
        self.owner_changes: dict[bytes, int] = {}
        # Whether `_sizes` has all partitions of the upstream.
        self.is_complete = False
        # How many partitions each topic has, by name.
        self._sizes: dict[bytes, int] = {}

    # Reading

    def owner(self, topic: bytes, partition_index: int) -> int:
        """The broker id that owns the partition, or NO_OWNER."""
        topic_owners = self._topics.get(topic)
        if topic_owners is None or not 0 <= partition_index < len(topic_owners.owners):
            return NO_OWNER
        return topic_owners.owners[partition_index]

    def owner_revision(self, topic: bytes, partition_index: int) -> int:
        """The revision of the partition's last change, 0 if it never had one."""
        topic_owners = self._topics.get(topic)
        if topic_owners is None or not 0 <= partition_index < len(topic_owners.revisions):
            return 0
        return topic_owners.revisions[partition_index]

    def owner_version(self, topic: bytes, partition_index: int) -> int:
        """The version of the table at which the partition's entry last changed, 0 if it never did."""
        topic_owners = self._topics.get(topic)
        if topic_owners is None or not 0 <= partition_index < len(topic_owners.versions):
            return 0
        return topic_owners.versions[partition_index]

    def owner_moves(self, topic: bytes, partition_index: int) -> int:
        """How often a known partition has got another owner, or one again."""
        topic_owners = self._topics.get(topic)
        if topic_owners is None or not 0 <= partition_index < len(topic_owners.moves):
            return 0
        return topic_owners.moves[partition_index]

    def topic_moves(self, topic: bytes) -> int:
        """The same for all partitions of a topic."""
        topic_owners = self._topics.get(topic)
        return topic_owners.all_moves if topic_owners is not None else 0

    def count_owned(self, topic: bytes, first: int, last: int) -> Counter[int]:
        """Count the partitions of a topic in [first, last) by owner; NO_OWNER is one of them."""
        topic_owners = self._topics.get(topic)
        return Counter(topic_owners.owners[first:last] if topic_owners is not None else ())

    def lacks(self, topic: bytes, partition_index: int) -> bool:
        """Whether the upstream is known not to have this partition: a client gets UNKNOWN_TOPIC_OR_PARTITION."""
        return self.is_complete and not 0 <= partition_index < self._sizes.get(self._names.get(topic, topic), 0)

    def name_of(self, topic: bytes) -> bytes | None:
        """The name of the topic with this id."""
        return self._names.get(topic)

    @property
    def topic_ids(self) -> Mapping[bytes, bytes]:
        """Known topic ids by name. Treat it as read-only."""
        return self._ids

    def partition_indexes(self, topic: bytes) -> range:
        """The partitions of a topic that are or were known."""
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
        """The ids of the brokers that may be offered partitions without an owner. Treat it as read-only."""
        if not self._doubted:
            return self._brokers
        return self._brokers.keys() - self._doubted or self._brokers

    def ownerships(self, after: tuple[bytes, int] = (b"", -1)) -> Iterator[Ownership]:
        """Every owned partition after `after`, by topic and index."""
        for topic in self._topics_from(after[0]):
            topic_owners = self._topics.get(topic)
            if topic_owners is None:
                continue
            first = after[1] + 1 if topic == after[0] else 0
            for partition_index in range(first, len(topic_owners.owners)):
                owner = topic_owners.owners[partition_index]
                if owner != NO_OWNER:
                    yield Ownership(topic, partition_index, owner, topic_owners.revisions[partition_index])

    @property
    def names(self) -> Sequence[bytes]:
        """The names of all topics that are or were known, in order; this object never changes."""
        if self._in_order is None:
            self._in_order = sorted(self._topics.keys() - self._names.keys())
        return self._in_order

    def _topics_from(self, first: bytes) -> Iterator[bytes]:
        names = self.names
        return islice(names, bisect_left(names, first), None)

    def moved_since(self, version: int) -> Sequence[tuple[bytes, int]] | None:
        """The partitions whose entry has changed since `version`.

        They are listed under each name of their topics. None if other facts may have changed.
        """
        count = self.version - version
        if count > len(self._moves):
            return None
        moves = list(islice(reversed(self._moves), count))
        if self._ids:
            moves += [(self._ids[topic], partition_index) for topic, partition_index in moves if topic in self._ids]
        return moves

    def on_next_change(self, call: Callable[[], None]) -> None:
        """Call `call` once, during the next change."""
        self._waiting[call] = None

    def forget(self, call: Callable[[], None]) -> None:
        """Undo `on_next_change`."""
        self._waiting.pop(call, None)

    def _changed(self) -> None:
        """Note a change other than one partition's owner."""
        self._moves.clear()
        self.version += 1
        self._tell()

    def _tell(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for call in waiting:
            call()

    # Changes: for ownership sources only

    def set_owner(self, topic: bytes, partition_index: int, owner: int, revision: int) -> bool:
        """Record `owner` (NO_OWNER for a removal) as of `revision`; False if the entry is as new or newer."""
        if not 0 <= partition_index <= MAX_PARTITION_INDEX:
            return False
        topic_owners = self._topics.get(topic)
        if topic_owners is None:
            topic_owners = self._add(topic)
        if partition_index >= len(topic_owners.owners):
            topic_owners.grow(partition_index)
        if revision <= topic_owners.revisions[partition_index]:
            return False
        topic_owners.revisions[partition_index] = revision
        self.revision = max(self.revision, revision)
        if self._hinted:
            self._hinted.pop((topic, partition_index), None)
        self._put(topic_owners, topic, partition_index, owner)
        return True

    def _put(self, topic_owners: _TopicOwners, topic: bytes, partition_index: int, owner: int) -> None:
        owners = topic_owners.owners
        if owner not in (NO_OWNER, owners[partition_index]) and topic_owners.versions[partition_index]:
            topic_owners.moves[partition_index] += 1
            topic_owners.all_moves += 1
            counted = self.owner_changes
            name = topic if topic in counted or len(counted) < MAX_COUNTED_TOPICS else OTHER_TOPICS
            counted[name] = counted.get(name, 0) + 1
        self.owned_count += (owner != NO_OWNER) - (owners[partition_index] != NO_OWNER)
        owners[partition_index] = owner
        self._moves.append((topic, partition_index))
        self.version += 1
        topic_owners.versions[partition_index] = self.version
        if self._waiting:
            self._tell()

    def _add(self, topic: bytes) -> _TopicOwners:
        topic_owners = self._topics[topic] = _TopicOwners()
        self._in_order = None
        return topic_owners

    def set_topic_id(self, topic: bytes, topic_id: bytes | None) -> None:
        """Set or remove (None) a topic's id. Raises ValueError if the id is invalid or in use."""
        known = self._ids.get(topic)
        if topic_id == known:
            return
        if topic_id is not None and (len(topic_id) != TOPIC_ID_BYTES or topic_id in self._topics):
            raise ValueError(f"invalid id {topic_id.hex()} for topic {topic!r}: expected 16 bytes, not in use")
        if known is not None:
            del self._ids[topic], self._names[known], self._topics[known]
        if topic_id is not None:
            self._ids[topic] = topic_id
            self._names[topic_id] = topic
            self._topics[topic_id] = self._topics.get(topic) or self._add(topic)
        self._changed()

    def set_size(self, topic: bytes, partitions: int) -> None:
        """Note how many partitions a topic has in the upstream, owned or not; 0 if it does not exist."""
        if partitions:
            self._sizes[topic] = partitions
        else:
            self._sizes.pop(topic, None)

    def load(self, rows: Iterable[Ownership], revision: int) -> None:
        """Take `rows` as the whole table at `revision`: set the rows they name, remove the others."""
        load = self.begin_load(revision)
        for row in rows:
            load.set_owner(row.topic, row.partition_index, row.owner, row.revision)
        for _ in load.end():
            pass

    def begin_load(self, revision: int) -> Load:
        """Begin to load a table in several steps."""
        return Load(self, revision)

    def begin_rebuild(self) -> None:
        """Forget every owner and revision: etcd was restored, and its revisions restart."""
        self._topics.clear()
        self._ids.clear()
        self._names.clear()
        self._hinted.clear()
        self._sizes.clear()
        self.is_complete = False
        self._in_order = None
        self.owned_count = 0
        self.revision = 0
        self._changed()

    def set_broker(self, broker_id: int, address: Address) -> None:
        self._hinted_brokers.pop(broker_id, None)
        self._place(broker_id, address)

    def _place(self, broker_id: int, address: Address) -> None:
        if self._brokers.get(broker_id) != address:
            self._brokers[broker_id] = address
            self._doubted.discard(broker_id)
            self._changed()

    def remove_broker(self, broker_id: int) -> None:
        self._hinted_brokers.pop(broker_id, None)
        if self._brokers.pop(broker_id, None) is not None:
            self._doubted.discard(broker_id)
            self._changed()

    # Hints, while the source is silent

    def hint_owner(self, topic: bytes, partition_index: int, owner: int) -> bool:
        """Route to `owner`, named by a broker; return whether that changes the route. `topic` is a name."""
        if not 0 <= partition_index <= MAX_PARTITION_INDEX or self.owner(topic, partition_index) == owner:
            return False
        topic_owners = self._topics.get(topic) or self._add(topic)
        topic_owners.grow(partition_index)
        self._hinted.setdefault((topic, partition_index), topic_owners.owners[partition_index])
        self._put(topic_owners, topic, partition_index, owner)
        return True

    def hint_broker(self, broker_id: int, address: Address) -> bool:
        """Set a broker's address as reported by another one; return whether it changes."""
        known = self._brokers.get(broker_id)
        if known == address:
            return False
        self._hinted_brokers.setdefault(broker_id, known)
        self._place(broker_id, address)
        return True

    @property
    def is_hinted(self) -> bool:
        """Whether there is a hint."""
        return bool(self._hinted or self._hinted_brokers)

    def drop_hints(self) -> None:
        """Return to the source's last values."""
        hinted, self._hinted = self._hinted, {}
        for (topic, partition_index), owner in hinted.items():
            if self.owner(topic, partition_index) != owner:
                self._put(self._topics[topic], topic, partition_index, owner)
        for broker_id, address in list(self._hinted_brokers.items()):
            if address is None:
                self.remove_broker(broker_id)
            else:
                self.set_broker(broker_id, address)

    # For code that talks to brokers

    def doubt(self, broker_id: int, *, doubted: bool) -> None:
        """Note whether a broker fails to answer at its address."""
        if doubted is (broker_id in self._doubted) or broker_id not in self._brokers:
            return
        if doubted:
            self._doubted.add(broker_id)
        else:
            self._doubted.discard(broker_id)
        self._changed()


class Load:
    """A load of the whole table at one revision: name every row, then `end`."""

    def __init__(self, topology: Topology, revision: int) -> None:
        self._topology = topology
        self._revision = revision
        # By topic, a byte for each partition: whether it was named.
        self._named: dict[bytes, bytearray] = {}
        self.count = 0

    def set_owner(self, topic: bytes, partition_index: int, owner: int, revision: int) -> bool:
        """As `Topology.set_owner`."""
        changed = self._topology.set_owner(topic, partition_index, owner, revision)
        named = self._named.get(topic)
        if named is None:
            named = self._named[topic] = bytearray()
        if 0 <= partition_index <= MAX_PARTITION_INDEX:
            if partition_index >= len(named):
                named.extend(bytes(partition_index + 1 - len(named)))
            self.count += not named[partition_index]
            named[partition_index] = True
        return changed

    def end(self) -> Iterator[None]:
        """Remove rows that were not named. Exhaust the iterator; other events may occur between its steps."""
        for position, row in enumerate(self._topology.ownerships()):
            named = self._named.get(row.topic, b"")
            is_named = row.partition_index < len(named) and named[row.partition_index]
            # Rows that came during the load are newer and stay.
            if not is_named and row.revision <= self._revision:
                at = max(self._revision, row.revision + 1)
                self._topology.set_owner(row.topic, row.partition_index, NO_OWNER, at)
            if position % PORTION_ROWS == PORTION_ROWS - 1:
                yield
        self._topology.revision = max(self._topology.revision, self._revision)
