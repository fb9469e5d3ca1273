"""Topics in etcd: names that may be, creation, deletion.

A topic record is put once, only where there is none, and never changed. Its partitions are then taken by the brokers
that it names; whoever created it waits for that only as long as it likes.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import NamedTuple

from codec import error_codes
from kproxy.broker.cluster import ClusterView, Topic
from kproxy.broker.keys import MAX_PARTITIONS_PER_TOPIC, TopicValue, encode_value
from kproxy.ownership.etcd import EtcdClient, EtcdError, delete_op, key_absent, mod_revision_is, put_op

MAX_NAME_LENGTH = 249
_LEGAL_NAME = re.compile(r"[a-zA-Z0-9._-]+")
# etcd takes at most 128 operations in a transaction.
_OPS_PER_TXN = 100


class TopicOutcome(NamedTuple):
    """What came of a creation or deletion."""

    error_code: int
    error_message: str | None = None


_DONE = TopicOutcome(error_codes.NONE)


def check_name(name: str) -> str | None:
    """Why `name` may not be a topic's, or None; the rules are Kafka's."""
    if not name:
        return "a topic needs a name"
    if name in (".", ".."):
        return "a topic may not be named '.' or '..'"
    if len(name) > MAX_NAME_LENGTH:
        return f"a topic's name has at most {MAX_NAME_LENGTH} characters, this has {len(name)}"
    if _LEGAL_NAME.fullmatch(name) is None:
        return "a topic's name is made of ASCII letters and digits, '.', '_' and '-'"
    return None


class TopicAdmin:
    """Creates and deletes topics, for whichever broker a client asked."""

    def __init__(self, client: EtcdClient, view: ClusterView, default_partitions: int) -> None:
        self.default_partitions = default_partitions
        self._client = client
        self._view = view

    def check(
        self, name: str, partitions: int, replication_factor: int, assignments: Sequence[Sequence[int]] = ()
    ) -> TopicOutcome:
        """Whether such a topic could be created; -1 stands for the default number of either."""
        wrong = check_name(name)
        if wrong is not None:
            return TopicOutcome(error_codes.INVALID_TOPIC_EXCEPTION, wrong)
        if name in self._view.topics:
            return TopicOutcome(error_codes.TOPIC_ALREADY_EXISTS, f"topic {name} exists")
        if assignments:
            return self._check_assignments(partitions, replication_factor, assignments)
        if replication_factor not in (-1, 1):
            message = f"replication factor {replication_factor}: this broker keeps one replica of each partition"
            return TopicOutcome(error_codes.INVALID_REPLICATION_FACTOR, message)
        if partitions != -1 and not 1 <= partitions <= MAX_PARTITIONS_PER_TOPIC:
            message = f"{partitions} partitions: a topic has 1 to {MAX_PARTITIONS_PER_TOPIC}"
            return TopicOutcome(error_codes.INVALID_PARTITIONS, message)
        return _DONE

    def _check_assignments(
        self, partitions: int, replication_factor: int, assignments: Sequence[Sequence[int]]
    ) -> TopicOutcome:
        if partitions != -1 or replication_factor != -1:
            message = "with replicas assigned, partitions and replication factor are to be -1"
            return TopicOutcome(error_codes.INVALID_REQUEST, message)
        if len(assignments) > MAX_PARTITIONS_PER_TOPIC:
            message = f"{len(assignments)} partitions: a topic has 1 to {MAX_PARTITIONS_PER_TOPIC}"
            return TopicOutcome(error_codes.INVALID_PARTITIONS, message)
        for replicas in assignments:
            if len(replicas) != 1 or replicas[0] not in self._view.brokers:
                message = f"replicas {list(replicas)}: one live broker is wanted for each partition"
                return TopicOutcome(error_codes.INVALID_REPLICA_ASSIGNMENT, message)
        return _DONE

    async def create(self, name: str, partitions: int = -1, assignments: Sequence[Sequence[int]] = ()) -> TopicOutcome:
        """Create a topic that `check` found nothing against; partitions go round the live brokers, unless assigned."""
        replicas = [list(each) for each in assignments]
        if not replicas:
            brokers = sorted(self._view.brokers)
            if not brokers:
                return TopicOutcome(error_codes.BROKER_NOT_AVAILABLE, "no broker is live")
            # Where the round begins differs from topic to topic, or small topics would all lie on the first broker.
            topic_id = uuid.uuid4()
            first = topic_id.int % len(brokers)
            count = partitions if partitions != -1 else self.default_partitions
            replicas = [[brokers[(first + index) % len(brokers)]] for index in range(count)]
        else:
            topic_id = uuid.uuid4()
        key, value = self._view.keys.topic(name), encode_value(TopicValue(topic_id, replicas))
        try:
            result = await self._client.txn([key_absent(key)], [put_op(key, value)])
        except EtcdError as error:
            return TopicOutcome(error_codes.REQUEST_TIMED_OUT, str(error))
        if not result.succeeded:
            return TopicOutcome(error_codes.TOPIC_ALREADY_EXISTS, f"topic {name} exists")
        self._view.apply_put(key, value, lease_id=0, revision=result.revision)
        return _DONE

    async def delete(self, topic: Topic) -> TopicOutcome:
        """Delete a topic; its owners give up its partitions and remove their logs when they see it."""
        keys = self._view.keys
        states = [keys.state(topic.name, index) for index in range(len(topic.replicas))]
        try:
            key = keys.topic(topic.name)
            result = await self._client.txn([mod_revision_is(key, topic.mod_revision)], [delete_op(key)])
            if not result.succeeded:
                return TopicOutcome(error_codes.UNKNOWN_TOPIC_OR_PARTITION, f"topic {topic.name} is gone")
            for start in range(0, len(states), _OPS_PER_TXN):
                await self._client.txn(
                    [key_absent(key)], [delete_op(each) for each in states[start : start + _OPS_PER_TXN]]
                )
        except EtcdError as error:
            return TopicOutcome(error_codes.REQUEST_TIMED_OUT, str(error))
        return _DONE
