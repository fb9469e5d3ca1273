"""How topics and brokers look in the answers that describe them: Metadata, DescribeConfigs and their kin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kproxy.broker.cluster import NO_OWNER, Topic
from kproxy.broker.config import topic_config_values
from kproxy.broker.context import Broker
from kproxy_codec import error_codes

# Kafka's numbering of where a configuration comes from.
TOPIC_SOURCE = 1
BROKER_SOURCE = 4


def describe_partition(broker: Broker, topic: Topic, partition_index: int) -> dict[str, Any]:
    """Leader, epoch, replicas and ISR; LEADER_NOT_AVAILABLE while nobody holds the partition's lease.

    Before anybody took the partition all its replicas are in sync: it was never written.
    """
    leader_id, leader_epoch = broker.current_leader(topic.name, partition_index)
    state = broker.view.state(topic, partition_index)
    replicas = broker.view.replicas(topic, partition_index)
    isr = state.in_sync if state is not None else replicas
    return {
        "error_code": error_codes.NONE if leader_id != NO_OWNER else error_codes.LEADER_NOT_AVAILABLE,
        "partition_index": partition_index,
        "leader_id": leader_id,
        "leader_epoch": leader_epoch if leader_id != NO_OWNER else -1,
        "replica_nodes": replicas,
        "isr_nodes": isr,
        "offline_replicas": [node_id for node_id in replicas if node_id not in broker.view.brokers],
    }


def describe_brokers(broker: Broker, id_field: str) -> list[dict[str, Any]]:
    """The live brokers by id."""
    live = sorted(broker.view.brokers.values())
    return [{id_field: each.node_id, "host": each.host, "port": each.port} for each in live]


def describe_topic_configs(broker: Broker, configs: Mapping[str, str], replication_factor: int) -> list[dict[str, Any]]:
    """What a topic goes by, and whether it or the broker says so."""
    values = topic_config_values(configs, replication_factor, broker.config)
    return [describe_config(name, value, TOPIC_SOURCE if name in configs else BROKER_SOURCE) for name, value in values]


def describe_config(name: str, value: str, source: int) -> dict[str, Any]:
    """One configuration; nothing here can be altered, or is a secret."""
    return {"name": name, "value": value, "read_only": True, "config_source": source, "is_sensitive": False}


def controller_id(broker: Broker) -> int:
    """Every broker can do what a controller does; all of them name the same one. -1 where none is live."""
    return min(broker.view.brokers, default=-1)
