"""Apply Metadata answers of a Kafka cluster to the routing table (`Topology`), in portions.

State: the cluster's id, and for each topic its id and the highest leader epoch of each partition.

Invariants
1. A revision is the number of the answer that changed an entry. Revisions only grow, even if the cluster changes.
2. Within one topic id a leader counts only if its epoch is not lower than the known one: a lagging broker cannot bring
   an earlier leader back. With a new topic id the epochs start again.
3. A partition that an answer omits, or names without a leader, loses its owner. If an answer has only an error for a
   topic, the topic is left unchanged unless the error is that it is unknown. An answer about some topics does not
   change the others.
4. A broker that the cluster does not name any more has no address.
5. Another cluster id means another cluster: everything known is dropped.
6. The topology knows how many partitions each topic has (`Topology.lacks`), from the first answer about all topics on.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import structlog

from kproxy.routing.topology import MAX_PARTITION_INDEX, NO_OWNER, Address, Topology
from kproxy_codec.error_codes import (
    INVALID_TOPIC_EXCEPTION,
    NONE,
    REPLICA_NOT_AVAILABLE,
    UNKNOWN_TOPIC_ID,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from kproxy_codec.metadata import NO_EPOCH, PORTION, MetadataReader, TopicLeaders

log = structlog.get_logger(__name__)

_NO_SUCH_TOPIC = (UNKNOWN_TOPIC_OR_PARTITION, UNKNOWN_TOPIC_ID, INVALID_TOPIC_EXCEPTION)


@dataclass
class _Known:
    """A topic's id, and its leader epochs by partition index."""

    topic_id: bytes | None
    epochs: array[int] = field(default_factory=lambda: array("i"))


class KafkaLeaders:
    """Applies one answer after another to `topology`."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._answers = 0
        self._cluster_id: str | None = None
        self._known: dict[bytes, _Known] = {}

    def take(self, answer: MetadataReader, *, whole: bool) -> Iterator[None]:
        """Apply an answer about all topics (`whole`) or some, in steps between which the caller may yield.

        Between two steps the table is valid, each partition in its old or new state.
        """
        self._answers += 1
        self._follow_cluster(answer.cluster_id)
        named = {broker.node_id: Address(broker.host, broker.port) for broker in answer.brokers}
        for broker_id, address in named.items():
            self._topology.set_broker(broker_id, address)
        done = 0
        for size, work in self._work(answer, whole):
            yield from work
            done += size
            if done >= PORTION:
                done = 0
                yield
        self._topology.is_complete |= whole
        # Remove brokers last: until now they may still be owners.
        for broker_id in set(self._topology.brokers) - set(named):
            self._topology.remove_broker(broker_id)

    def _work(self, answer: MetadataReader, whole: bool) -> Iterator[tuple[int, Iterator[None]]]:
        """Yield the work for each topic: its number of partitions, and the steps."""
        if whole:
            there = {topic.name for topic in answer.topics}
            for name in [name for name in self._known if name not in there]:
                yield 1 + len(self._topology.partition_indexes(name)), self._remove(name)
        for topic in answer.topics:
            if topic.name is None:
                continue
            if topic.error_code == NONE:
                yield 1 + topic.partition_count, self._take_topic(topic.name, topic)
            elif topic.error_code in _NO_SUCH_TOPIC:
                yield 1 + len(self._topology.partition_indexes(topic.name)), self._remove(topic.name)

    def _follow_cluster(self, cluster_id: str | None) -> None:
        if cluster_id is None or cluster_id == self._cluster_id:
            return
        if self._cluster_id is not None:
            log.error(
                "kafka cluster changed", consequence="the table is emptied", before=self._cluster_id, now=cluster_id
            )
            self._known.clear()
            self._topology.begin_rebuild()
            for broker_id in list(self._topology.brokers):
                self._topology.remove_broker(broker_id)
        self._cluster_id = cluster_id

    def _take_topic(self, name: bytes, topic: TopicLeaders) -> Iterator[None]:
        known = self._known.get(name)
        if known is None or known.topic_id != topic.topic_id:
            known = self._known[name] = _Known(topic.topic_id)
        if self._topology.topic_ids.get(name) != topic.topic_id:
            self._name_id(name, topic.topic_id)
        topology, epochs, answer = self._topology, known.epochs, self._answers
        named = bytearray(len(epochs))
        for place, (error_code, index, leader, epoch) in enumerate(topic.partitions(), 1):
            if place % PORTION == 0:
                yield
            if not 0 <= index <= MAX_PARTITION_INDEX:
                continue
            if index >= len(epochs):
                epochs.extend([NO_EPOCH] * (index + 1 - len(epochs)))
                named.extend(bytes(len(epochs) - len(named)))
            named[index] = 1
            lags = epoch < epochs[index]
            if not lags:
                epochs[index] = epoch
            owner = wanted = topology.owner(name, index)
            if not lags:
                has_leader = leader >= 0 and error_code in (NONE, REPLICA_NOT_AVAILABLE)
                wanted = leader if has_leader else NO_OWNER
            if wanted != owner:
                topology.set_owner(name, index, wanted, answer)
        topology.set_size(name, len(named))
        unnamed = named.find(0)
        while unnamed >= 0:
            epochs[unnamed] = NO_EPOCH
            self._disown(name, unnamed)
            unnamed = named.find(0, unnamed + 1)
        for index in topology.partition_indexes(name)[len(named) :]:
            # These partitions are of an earlier topic of that name, which had more.
            self._disown(name, index)

    def _name_id(self, name: bytes, topic_id: bytes | None) -> None:
        try:
            self._topology.set_topic_id(name, topic_id)
        except ValueError as error:
            # The cluster contradicts itself, so the topic is known only by its name.
            log.warning("topic id ignored", reason=str(error))

    def _remove(self, name: bytes) -> Iterator[None]:
        self._topology.set_size(name, 0)
        if self._known.pop(name, None) is None:
            return
        for index in self._topology.partition_indexes(name):
            self._disown(name, index)
            if index % PORTION == PORTION - 1:
                yield
        self._topology.set_topic_id(name, None)

    def _disown(self, name: bytes, index: int) -> None:
        if self._topology.owner(name, index) != NO_OWNER:
            self._topology.set_owner(name, index, NO_OWNER, self._answers)
