"""DescribeCluster, DescribeConfigs and DescribeTopicPartitions.

Metadata and CreateTopics use their parts.

DescribeCluster, versions 0-1 (KIP-700)
- Endpoint type 1, brokers, is known; any other gets UNSUPPORTED_ENDPOINT_TYPE: there are no controllers.

DescribeConfigs, versions 1-4
- Brokers and topics are described under Kafka's names, so that admin tools find what they look for; all is read-only.
- A topic that does not exist: UNKNOWN_TOPIC_OR_PARTITION; another resource type: INVALID_REQUEST.

DescribeTopicPartitions, version 0 (KIP-966)
- Topics come in order of name; a request that names none means all. No topic is created.
- An answer has at most as many partitions as the request allows, and at most MAX_DESCRIBED_PARTITIONS; a cursor says
  where to go on.

While this broker has no lease, these requests close the connection (`Broker.check_knows_cluster`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kproxy.broker.cluster import NO_OWNER, Topic
from kproxy.broker.config import default_min_insync_replicas, topic_config_values
from kproxy.broker.context import Body, Broker, Request
from kproxy.broker.topics import check_name
from kproxy_codec import control, error_codes
from kproxy_codec.api_keys import DESCRIBE_CLUSTER, DESCRIBE_CONFIGS, DESCRIBE_TOPIC_PARTITIONS

_BROKER_ENDPOINTS = 1
_UNSUPPORTED_ENDPOINT_TYPE = 115


_TOPIC_RESOURCE = 2
_BROKER_RESOURCE = 4
MAX_DESCRIBED_PARTITIONS = 2000
# Empty, not null: kafka-clients 3.9 reads both without asking.
_NO_ELR: dict[str, list[int]] = {"eligible_leader_replicas": [], "last_known_elr": []}
# Kafka's numbering of where a configuration comes from.
TOPIC_SOURCE = 1
BROKER_SOURCE = 4


def handle_describe_cluster(broker: Broker, request: Request) -> Body:
    """Answer DescribeCluster with the live brokers."""
    broker.check_knows_cluster()
    version = request.header.api_version
    message = control.decode_request(DESCRIBE_CLUSTER, version, request.body)
    if version >= 1 and message.endpoint_type != _BROKER_ENDPOINTS:
        response = control.build_response(
            DESCRIBE_CLUSTER,
            version,
            error_code=_UNSUPPORTED_ENDPOINT_TYPE,
            error_message="only brokers can be described here",
        )
    else:
        response = control.build_response(
            DESCRIBE_CLUSTER,
            version,
            cluster_id=broker.cluster_id,
            controller_id=controller_id(broker),
            brokers=describe_brokers(broker, "broker_id"),
        )
    return [control.encode_response(response)]


def handle_describe_configs(broker: Broker, request: Request) -> Body:
    """Answer DescribeConfigs with the configuration of each requested resource."""
    broker.check_knows_cluster()
    version = request.header.api_version
    message = control.decode_request(DESCRIBE_CONFIGS, version, request.body)
    results = [_describe_resource(broker, asked) for asked in message.resources]
    return [control.encode_response(control.build_response(DESCRIBE_CONFIGS, version, results=results))]


def _describe_resource(broker: Broker, asked: control.Message) -> dict[str, Any]:
    result: dict[str, Any] = {
        "error_code": error_codes.NONE,
        "error_message": None,
        "resource_type": asked.resource_type,
        "resource_name": asked.resource_name,
        "configs": [],
    }
    if asked.resource_type == _TOPIC_RESOURCE:
        topic = broker.view.topics.get(asked.resource_name)
        if topic is None:
            message = f"there is no topic {asked.resource_name}"
            return result | {"error_code": error_codes.UNKNOWN_TOPIC_OR_PARTITION, "error_message": message}
        configs = describe_topic_configs(broker, topic.configs, topic.replication_factor)
    elif asked.resource_type == _BROKER_RESOURCE:
        configs = [describe_config(name, value, BROKER_SOURCE) for name, value in _broker_values(broker).items()]
    else:
        message = f"resource type {asked.resource_type}: topics and brokers can be described here"
        return result | {"error_code": error_codes.INVALID_REQUEST, "error_message": message}
    wanted = asked.configuration_keys
    result["configs"] = [each | {"synonyms": []} for each in configs if wanted is None or each["name"] in wanted]
    return result


def _broker_values(broker: Broker) -> dict[str, str]:
    return {
        "auto.create.topics.enable": str(broker.config.auto_create_topics).lower(),
        "broker.id": str(broker.config.node_id),
        "default.replication.factor": str(broker.config.default_replication_factor),
        "fetch.max.bytes": str(broker.config.fetch_max_bytes),
        "log.retention.bytes": str(broker.config.retention_bytes),
        "log.retention.ms": str(broker.config.retention_ms),
        "log.segment.bytes": str(broker.config.segment_bytes),
        "message.max.bytes": str(broker.config.message_max_bytes),
        "min.insync.replicas": str(
            default_min_insync_replicas(broker.config.default_replication_factor, broker.config)
        ),
        "num.partitions": str(broker.config.num_partitions),
    }


def handle_describe_topic_partitions(broker: Broker, request: Request) -> Body:
    """Answer DescribeTopicPartitions, from the cursor on."""
    broker.check_knows_cluster()
    message = control.decode_request(DESCRIBE_TOPIC_PARTITIONS, request.header.api_version, request.body)
    names = sorted({asked.name for asked in message.topics} or broker.view.topics)
    cursor = message.cursor
    first_index = 0
    if cursor is not None:
        names = [name for name in names if name >= cursor.topic_name]
        first_index = max(cursor.partition_index, 0) if names[:1] == [cursor.topic_name] else 0
    left = max(1, min(message.response_partition_limit, MAX_DESCRIBED_PARTITIONS))
    topics: list[dict[str, Any]] = []
    next_cursor = None
    for name in names:
        found = broker.view.topics.get(name)
        if left == 0:
            next_cursor = {"topic_name": name, "partition_index": 0}
            break
        if found is None:
            legal = check_name(name) is None
            error_code = error_codes.UNKNOWN_TOPIC_OR_PARTITION if legal else error_codes.INVALID_TOPIC_EXCEPTION
            topics.append({"error_code": error_code, "name": name, "partitions": []})
            continue
        indexes = range(first_index, len(found.replicas))
        first_index = 0
        partitions = [describe_partition(broker, found, index) | _NO_ELR for index in indexes[:left]]
        topics.append({"name": name, "topic_id": found.topic_id, "partitions": partitions})
        left -= len(partitions)
        if len(partitions) < len(indexes):
            next_cursor = {"topic_name": name, "partition_index": indexes[len(partitions)]}
            break
    response = control.build_response(
        DESCRIBE_TOPIC_PARTITIONS, message.version, topics=topics, next_cursor=next_cursor
    )
    return [control.encode_response(response)]


# Shared with Metadata and CreateTopics


def describe_partition(broker: Broker, topic: Topic, partition_index: int) -> dict[str, Any]:
    """Describe leader, epoch, replicas and ISR of a partition.

    LEADER_NOT_AVAILABLE while no live broker owns it. A partition that was never taken was never written, so all its
    replicas are in sync.
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
    """Describe the live brokers, ordered by id."""
    live = sorted(broker.view.brokers.values())
    return [{id_field: each.node_id, "host": each.host, "port": each.port} for each in live]


def describe_topic_configs(broker: Broker, configs: Mapping[str, str], replication_factor: int) -> list[dict[str, Any]]:
    """Describe a topic's effective configuration and whether the topic or the broker sets each value."""
    values = topic_config_values(configs, replication_factor, broker.config)
    return [describe_config(name, value, TOPIC_SOURCE if name in configs else BROKER_SOURCE) for name, value in values]


def describe_config(name: str, value: str, source: int) -> dict[str, Any]:
    """Describe one configuration value; none can be altered, none is secret."""
    return {"name": name, "value": value, "read_only": True, "config_source": source, "is_sensitive": False}


def controller_id(broker: Broker) -> int:
    """Return the lowest live broker id, -1 where none is live.

    Every broker does what a controller does, and all of them name the same one.
    """
    return min(broker.view.brokers, default=-1)
