"""How topics and brokers look in the answers that describe them: Metadata and DescribeTopicPartitions."""

from __future__ import annotations

from typing import Any

from codec import error_codes
from kproxy.broker.cluster import NO_OWNER, Topic
from kproxy.broker.context import Broker


def describe_partition(broker: Broker, topic: Topic, partition_index: int) -> dict[str, Any]:
    """Leader, epoch, replicas and ISR; LEADER_NOT_AVAILABLE while nobody holds the partition's lease."""
    leader_id, leader_epoch = broker.current_leader(topic.name, partition_index)
    state = broker.view.state(topic, partition_index)
    # Before anybody took the partition, those who may are the best answer there is.
    replicas = state.isr if state is not None else topic.replicas[partition_index]
    if leader_id != NO_OWNER and leader_id not in replicas:
        replicas = [leader_id, *replicas]
    return {
        "error_code": error_codes.NONE if leader_id != NO_OWNER else error_codes.LEADER_NOT_AVAILABLE,
        "partition_index": partition_index,
        "leader_id": leader_id,
        "leader_epoch": leader_epoch if leader_id != NO_OWNER else -1,
        "replica_nodes": replicas,
        "isr_nodes": replicas,
        "offline_replicas": [node_id for node_id in replicas if node_id not in broker.view.brokers],
    }


def describe_brokers(broker: Broker, id_field: str) -> list[dict[str, Any]]:
    """The live brokers by id."""
    live = sorted(broker.view.brokers.values())
    return [{id_field: each.node_id, "host": each.host, "port": each.port} for each in live]


def controller_id(broker: Broker) -> int:
    """Every broker can do what a controller does; all of them name the same one. -1 where none is live."""
    return min(broker.view.brokers, default=-1)
