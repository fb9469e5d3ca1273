"""Create and delete topics in etcd.

A topic's record names its replicas and configuration. It is put once, only if the topic has none, and never changed.
The named brokers then take its partitions; the broker that created it waits for that as long as its client allows.

Each partition has a state from the topic's creation on: no leader yet, and the logs of its live replicas in sync. So an
etcd restored to any later time names the logs that may lead. A replaced disk is not among them, however old etcd's
state is.

Invariants of a creation
1. The topic is put in the transaction that puts the last of its states. States that do not fit are put before.
2. A creation puts states only while it is the last that began and the topic does not exist: the key `creating` is its
   own. So the states of an existing topic are its own, even if other creations of the same name run or died.
3. A deletion removes no state once another creation has begun. The rest has another topic id and counts as absent.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from kproxy.broker.cluster import ClusterView, Topic
from kproxy.broker.config import BrokerConfig, InvalidConfig, check_configs
from kproxy.broker.keys import MAX_PARTITIONS_PER_TOPIC, ReplicaKey, StateValue, TopicValue, encode_value
from kproxy.etcd import (
    EtcdClient,
    EtcdError,
    TxnOp,
    TxnResult,
    delete_op,
    key_absent,
    mod_revision_is,
    put_op,
)
from kproxy_codec import error_codes

MAX_NAME_LENGTH = 249
CONSUMER_OFFSETS = "__consumer_offsets"
"""The internal topic of consumer groups. Clients cannot write to it; it is created on first use."""
_OFFSETS_MAX_REPLICAS = 3
# Its records are rewritten, never retired by age or size; followers remove whole segments.
_OFFSETS_CONFIGS = {"retention.ms": "-1", "retention.bytes": "-1", "segment.bytes": str(16 << 20)}
_LEGAL_NAME = re.compile(r"[a-zA-Z0-9._-]+")
# etcd accepts at most 128 operations in a transaction.
_OPS_PER_TXN = 100
# etcd accepts 1.5 MiB in a request.
MAX_TOPIC_BYTES = 1 << 20


class TopicOutcome(NamedTuple):
    """The result of a creation or deletion."""

    error_code: int
    error_message: str | None = None


_DONE = TopicOutcome(error_codes.NONE)


def check_name(name: str) -> str | None:
    """Return why `name` is not a valid topic name, or None; the rules are Kafka's."""
    if not name:
        return "a topic needs a name"
    if name in (".", ".."):
        return "a topic may not be named '.' or '..'"
    if len(name) > MAX_NAME_LENGTH:
        return f"a topic's name has at most {MAX_NAME_LENGTH} characters, this has {len(name)}"
    if _LEGAL_NAME.fullmatch(name) is None:
        return "a topic's name is made of ASCII letters and digits, '.', '_' and '-'"
    return None


def _wrong_partitions(partitions: int) -> TopicOutcome:
    message = f"{partitions} partitions: a topic has 1 to {MAX_PARTITIONS_PER_TOPIC}"
    return TopicOutcome(error_codes.INVALID_PARTITIONS, message)


class NewTopic(NamedTuple):
    """A requested topic: -1 means the default of either number; without assignments the brokers choose."""

    name: str
    partitions: int = -1
    replication_factor: int = -1
    assignments: Sequence[Sequence[int]] = ()
    configs: Mapping[str, str | None] = MappingProxyType({})


def plan_topic(asked: NewTopic, view: ClusterView, config: BrokerConfig) -> TopicValue | TopicOutcome:
    """Plan the topic, or return why it cannot be created, according to `view`."""
    wrong = check_name(asked.name)
    if wrong is not None:
        return TopicOutcome(error_codes.INVALID_TOPIC_EXCEPTION, wrong)
    if asked.name in view.topics:
        return TopicOutcome(error_codes.TOPIC_ALREADY_EXISTS, f"topic {asked.name} exists")
    try:
        is_internal = asked.name == CONSUMER_OFFSETS
        configs = check_configs({**(_OFFSETS_CONFIGS if is_internal else {}), **asked.configs})
    except InvalidConfig as error:
        return TopicOutcome(error_codes.INVALID_CONFIG, str(error))
    topic_id, live = uuid.uuid4(), sorted(view.brokers)
    # The first broker differs between topics; otherwise all small topics would be on the same one.
    replicas = _assigned(asked, live) if asked.assignments else _spread(asked, live, config, topic_id.int)
    return replicas if isinstance(replicas, TopicOutcome) else TopicValue(topic_id, replicas, configs)


def _assigned(asked: NewTopic, live: list[int]) -> list[list[int]] | TopicOutcome:
    if asked.partitions != -1 or asked.replication_factor != -1:
        message = "with replicas assigned, partitions and replication factor are to be -1"
        return TopicOutcome(error_codes.INVALID_REQUEST, message)
    if len(asked.assignments) > MAX_PARTITIONS_PER_TOPIC:
        return _wrong_partitions(len(asked.assignments))
    wrong = check_assignments(asked.assignments, live)
    if wrong is not None:
        return TopicOutcome(error_codes.INVALID_REPLICA_ASSIGNMENT, wrong)
    return [list(replicas) for replicas in asked.assignments]


def _spread(asked: NewTopic, live: list[int], config: BrokerConfig, first: int) -> list[list[int]] | TopicOutcome:
    if not live:
        return TopicOutcome(error_codes.BROKER_NOT_AVAILABLE, "no broker is live")
    factor = asked.replication_factor
    if factor == -1:
        most = _OFFSETS_MAX_REPLICAS if asked.name == CONSUMER_OFFSETS else len(live)
        factor = min(config.default_replication_factor, len(live), most)
    elif not 1 <= factor <= len(live):
        message = f"replication factor {factor}: it may be from 1 to {len(live)}, the number of live brokers"
        return TopicOutcome(error_codes.INVALID_REPLICATION_FACTOR, message)
    default = config.offsets_topic_partitions if asked.name == CONSUMER_OFFSETS else config.num_partitions
    partitions = default if asked.partitions == -1 else asked.partitions
    if not 1 <= partitions <= MAX_PARTITIONS_PER_TOPIC:
        return _wrong_partitions(partitions)
    return spread_replicas(live, partitions, factor, first % len(live))


class TopicAdmin:
    """Creates and deletes topics on behalf of any broker."""

    def __init__(self, client: EtcdClient, view: ClusterView, config: BrokerConfig) -> None:
        self._client = client
        self._view = view
        self._config = config

    async def plan(self, asked: NewTopic) -> TopicValue | TopicOutcome:
        """Plan the topic as if created now, or return why it is refused.

        The watch may lag, so this reads the live brokers from etcd: a topic spreads over every broker that has reported
        that it serves.
        """
        try:
            snapshot = await self._client.get_prefix(self._view.keys.brokers)
        except EtcdError as error:
            return TopicOutcome(error_codes.REQUEST_TIMED_OUT, str(error))
        for kv in snapshot.kvs:
            self._view.apply_put(kv.key, kv.value, lease_id=kv.lease_id, revision=kv.mod_revision)
        return plan_topic(asked, self._view, self._config)

    async def create(self, name: str, value: TopicValue) -> TopicOutcome:
        """Create a topic as planned."""
        key, encoded = self._view.keys.topic(name), encode_value(value)
        if len(encoded) > MAX_TOPIC_BYTES:
            message = f"{len(value.replicas)} partitions of {len(value.replicas[0])} replicas: too many for one topic"
            return TopicOutcome(error_codes.INVALID_PARTITIONS, message)
        try:
            result = await self._put(name, value.topic_id, put_op(key, encoded), self._first_states(name, value))
        except EtcdError as error:
            return TopicOutcome(error_codes.REQUEST_TIMED_OUT, str(error))
        if not result.succeeded:
            return TopicOutcome(error_codes.TOPIC_ALREADY_EXISTS, f"topic {name} exists")
        self._view.apply_put(key, encoded, lease_id=0, revision=result.revision)
        return _DONE

    def _first_states(self, name: str, topic: TopicValue) -> list[TxnOp]:
        """The states of partitions without a first leader: the live replicas are in sync, as they are empty."""
        log_ids = {each.node_id: each.log_id for each in self._view.brokers.values()}
        states = []
        for index, replicas in enumerate(topic.replicas):
            isr = [ReplicaKey(each, log_ids[each]) for each in sorted(replicas) if each in log_ids]
            states.append(put_op(self._view.keys.state(name, index), encode_value(StateValue(-1, isr, topic.topic_id))))
        return states

    async def _put(self, name: str, topic_id: uuid.UUID, topic: TxnOp, states: Sequence[TxnOp]) -> TxnResult:
        """Put the topic and its states, unless the topic exists or another creation has begun. Raises EtcdError."""
        creating = self._view.keys.creating(name)
        guards = [key_absent(self._view.keys.topic(name))]
        *before, last = [states[start : start + _OPS_PER_TXN] for start in range(0, len(states), _OPS_PER_TXN)]
        if before:
            result = await self._client.txn(guards, [put_op(creating, str(topic_id).encode())])
            guards = [*guards, mod_revision_is(creating, result.revision)]
            for page in before:
                await self._client.txn(guards, page)
        return await self._client.txn(guards, [topic, *last, delete_op(creating)])

    async def delete(self, topic: Topic) -> TopicOutcome:
        """Delete a topic; its owners give up its partitions and remove their logs when they see it."""
        keys = self._view.keys
        partitions = range(len(topic.replicas))
        kept = [key_of(topic.name, index) for index in partitions for key_of in (keys.state, keys.fence)]
        try:
            key = keys.topic(topic.name)
            result = await self._client.txn([mod_revision_is(key, topic.mod_revision)], [delete_op(key)])
            if not result.succeeded:
                return TopicOutcome(error_codes.UNKNOWN_TOPIC_OR_PARTITION, f"topic {topic.name} is gone")
            for start in range(0, len(kept), _OPS_PER_TXN):
                page = [delete_op(each) for each in kept[start : start + _OPS_PER_TXN]]
                await self._client.txn([key_absent(key), key_absent(keys.creating(topic.name))], page)
        except EtcdError as error:
            return TopicOutcome(error_codes.REQUEST_TIMED_OUT, str(error))
        return _DONE


def spread_replicas(brokers: Sequence[int], partitions: int, replication_factor: int, first: int) -> list[list[int]]:
    """Assign distinct replicas to each partition, spread evenly.

    First replicas rotate over the brokers, starting at `first`. A partition's other replicas follow its first at a
    distance that grows with every round: so the partitions of a dead broker move to all others, not only to its
    neighbour.
    """
    count = len(brokers)
    assigned = []
    for partition_index in range(partitions):
        round_number, leader = partition_index // count, first + partition_index
        distances = [0] + [1 + (round_number + further) % (count - 1) for further in range(replication_factor - 1)]
        assigned.append([brokers[(leader + distance) % count] for distance in distances])
    return assigned


def check_assignments(assignments: Sequence[Sequence[int]], live: Collection[int]) -> str | None:
    """Return why these replicas, by partition, are invalid for a topic, or None."""
    for partition_index, replicas in enumerate(assignments):
        where = f"the replicas {list(replicas)} of partition {partition_index}"
        if not replicas:
            return f"partition {partition_index} is assigned no broker"
        if len(set(replicas)) != len(replicas):
            return f"{where} name a broker twice"
        absent = [node_id for node_id in replicas if node_id not in live]
        if absent:
            return f"{where} name broker {absent[0]}, which is not live"
        if len(replicas) != len(assignments[0]):
            return f"{where} are {len(replicas)}, those of partition 0 are {len(assignments[0])}: give all as many"
    return None
