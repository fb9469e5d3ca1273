"""Who may take a partition that nobody owns, and who goes first. Decisions on a ClusterView, nothing else.

- Where it has a state, the members of its ISR: they hold all that was acknowledged with acks=all. A member is a log,
  not a broker: a broker that has opened another log is none, which the lease manager sees to.
- Where it has none it was never written: a live one of its replicas, or any live broker where no replica is alive.

Of several that may, the one that stands first in the replica list goes first, so that what it lists first is led where
it is wanted; the others follow at a distance, in case it cannot. Where no replica is alive, rendezvous hashing orders
the live brokers, so that all come to the same answer and partitions spread.
"""

from __future__ import annotations

import hashlib

from kproxy.broker.cluster import ClusterView, Topic
from kproxy.broker.keys import ReplicaKey

NOT_A_CANDIDATE = -1


def hosts(view: ClusterView, topic: Topic, partition_index: int, node_id: int) -> bool:
    """Whether the broker keeps a replica."""
    state = view.state(topic, partition_index)
    return node_id in view.replicas(topic, partition_index) or (state is not None and node_id in state.in_sync)


def is_in_sync(view: ClusterView, topic: Topic, partition_index: int, replica: ReplicaKey) -> bool:
    """Whether that very log holds all that was committed: it is in the ISR, or nothing was ever written."""
    state = view.state(topic, partition_index)
    return state is None or replica in state.isr


def place_in_line(view: ClusterView, topic: Topic, partition_index: int, node_id: int, *, count_dead: bool) -> int:
    """How many go before this broker, or NOT_A_CANDIDATE. `count_dead`: also those that are not alive, who may be about
    to be; for a partition that was never written that is its first replica alone."""
    live = {*view.brokers, node_id}
    replicas = view.replicas(topic, partition_index)
    state = view.state(topic, partition_index)
    if state is not None:
        if node_id not in state.in_sync:
            return NOT_A_CANDIDATE
        ordered = [each for each in replicas if each in state.in_sync]
        ordered += sorted(set(state.in_sync) - set(ordered))
        return [each for each in ordered if count_dead or each in live].index(node_id)
    living = [each for each in replicas if each in live]
    if living:
        if node_id not in living:
            return NOT_A_CANDIDATE
        return living.index(node_id) + (1 if count_dead and replicas[0] not in live else 0)
    stand_ins = sorted(live, key=lambda each: _weight(topic.name, partition_index, each), reverse=True)
    return stand_ins.index(node_id) + (1 if count_dead else 0)


def first_replicas(view: ClusterView, topic: Topic, partition_index: int, node_id: int) -> list[int]:
    """The replicas of a never-written partition that `node_id` takes: those wanted, or as many live brokers, itself
    first, where it is none of those."""
    wanted = topic.replicas[partition_index]
    if node_id in wanted:
        return wanted
    others = sorted(set(view.brokers) - {node_id}, key=lambda each: _weight(topic.name, partition_index, each))
    return [node_id, *others[: len(wanted) - 1]]


def _weight(topic: str, partition_index: int, node_id: int) -> bytes:
    return hashlib.blake2b(f"{topic}/{partition_index}/{node_id}".encode(), digest_size=8).digest()
