"""Handle Metadata, and the Describe APIs of the cluster, topics and configurations.

DescribeCluster, versions 0-2 (KIP-700)
- Endpoint type 1 (brokers) is offered; 2 (controllers) gets MISMATCHED_ENDPOINT_TYPE, others UNSUPPORTED_ENDPOINT_TYPE.

DescribeConfigs, versions 1-4
- Brokers and topics are described under Kafka's names, so that admin tools find them; all are read-only.
- A topic that does not exist gets UNKNOWN_TOPIC_OR_PARTITION, an illegal name INVALID_TOPIC_EXCEPTION. Another broker
  or resource type gets INVALID_REQUEST.

DescribeTopicPartitions, version 0 (KIP-966)
- Topics come in order of name; a request that names none means all. No topic is created.
- An answer has at most as many partitions as the request allows, and at most MAX_DESCRIBED_PARTITIONS; a cursor says
  where to continue.

While this broker has no lease, the Describe requests close the connection (`Broker.check_knows_cluster`).

Metadata, versions 0-13
- A partition's leader is the owner of its lease; without a live owner it has LEADER_NOT_AVAILABLE and leader -1.
- A topic that does not exist is created, with the broker's default numbers of partitions and replicas, if the request
  (from version 4) and the broker allow it; the answer waits a few seconds for its leaders. Otherwise the topic gets
  UNKNOWN_TOPIC_OR_PARTITION.
- While this broker has no lease, its answer has the other brokers that it knew, LEADER_NOT_AVAILABLE for each topic,
  and a mark that makes a proxy ask another broker. It closes the connection if such an answer is impossible: all topics
  are requested, no other broker is known, or the version has no place for the mark.
- An illegal name gets INVALID_TOPIC_EXCEPTION. From version 12 topics may be named by id: an unknown id gets
  UNKNOWN_TOPIC_ID, an id in an earlier version INVALID_REQUEST. A topic named twice is answered once.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from typing import Any

from kproxy.broker.cluster import NO_OWNER, Topic
from kproxy.broker.config import default_min_insync_replicas, topic_config_values
from kproxy.broker.context import LEADERS_TIMEOUT_S, Body, Broker, Request
from kproxy.broker.keys import TopicValue
from kproxy.broker.topics import CONSUMER_OFFSETS, NewTopic, check_name
from kproxy_codec import control, error_codes
from kproxy_codec.api_keys import METADATA, is_flexible
from kproxy_codec.cluster import ASK_ANOTHER

_TOPIC_ID_VERSION = 12
# Concurrent creations for one request.
_CONCURRENT_CREATIONS = 8


def handle_metadata(broker: Broker, request: Request) -> Body | Awaitable[Body]:
    """Answer Metadata at once, unless it creates topics first."""
    message = request.message()
    if not broker.replica_manager.holds_lease:
        return _send_elsewhere(broker, request, message)
    names = [asked.name for asked in message.topics or () if asked.name is not None]
    missing = [name for name in names if name not in broker.view.topics and check_name(name) is None]
    may_create = broker.config.auto_create_topics and message.allow_auto_topic_creation
    to_create = list(dict.fromkeys(missing)) if may_create and not broker.replica_manager.stopping else []
    if to_create:
        return _create_and_describe(broker, request, message, to_create)
    return _describe(broker, request, message)


async def _create_and_describe(
    broker: Broker, request: Request, message: control.Message, to_create: list[str]
) -> Body:
    slots = asyncio.Semaphore(_CONCURRENT_CREATIONS)

    async def create(name: str) -> None:
        # Other requests of the client wait behind this answer, also while etcd is away.
        with suppress(TimeoutError):
            async with slots, asyncio.timeout(LEADERS_TIMEOUT_S):
                planned = await broker.topics.plan(NewTopic(name))
                if isinstance(planned, TopicValue):
                    await broker.topics.create(name, planned)

    await asyncio.gather(*(create(name) for name in to_create))
    await broker.view.wait_until(lambda: all(map(broker.view.is_fully_owned, to_create)), LEADERS_TIMEOUT_S)
    serve = _describe if broker.replica_manager.holds_lease else _send_elsewhere
    return serve(broker, request, message)


def _send_elsewhere(broker: Broker, request: Request, message: control.Message) -> Body:
    """Refer clients to another broker.

    Raises CloseConnection if there is none. Closing is not enough: a Java client that knows this broker as a leader
    reconnects to it first.
    """
    others = [each for each in describe_brokers(broker, "node_id") if each["node_id"] != broker.config.node_id]
    if not others or message.topics is None or not is_flexible(METADATA, message.version):
        broker.check_knows_cluster()
    unknown = {"error_code": error_codes.LEADER_NOT_AVAILABLE, "partitions": []}
    topics = [unknown | {"name": asked.name, "topic_id": asked.topic_id} for asked in message.topics or ()]
    (answer,) = request.answer(brokers=others, cluster_id=broker.cluster_id, topics=topics)
    return [bytes(answer)[:-1] + ASK_ANOTHER]


def _describe(broker: Broker, request: Request, message: control.Message) -> Body:
    version = message.version
    if message.topics is None or (version == 0 and not message.topics):
        topics = [_topic(broker, topic) for topic in broker.view.topics.values()]
    else:
        # Each topic once, as Kafka answers.
        once = {(asked.name, asked.topic_id): asked for asked in message.topics}
        topics = [_asked(broker, asked, version) for asked in once.values()]
    return request.answer(
        brokers=describe_brokers(broker, "node_id"),
        cluster_id=broker.cluster_id,
        controller_id=controller_id(broker),
        topics=topics,
    )


def _asked(broker: Broker, asked: control.Message, version: int) -> dict[str, Any]:
    if version < _TOPIC_ID_VERSION and (asked.name is None or (asked.topic_id is not None and asked.topic_id.int)):
        # Versions 10 and 11 have topic ids, but find topics only by name.
        return {"error_code": error_codes.INVALID_REQUEST, "name": asked.name or "", "partitions": []}
    if asked.name is None:
        found = broker.view.topic_by_id(asked.topic_id.bytes) if asked.topic_id is not None else None
        if found is not None:
            return _topic(broker, found)
        unknown = error_codes.UNKNOWN_TOPIC_ID
        return {"error_code": unknown, "name": None, "topic_id": asked.topic_id, "partitions": []}
    found = broker.view.topics.get(asked.name)
    if found is not None:
        return _topic(broker, found)
    return {"error_code": _unknown(asked.name), "name": asked.name, "partitions": []}


def _unknown(topic: str) -> int:
    """Return the error code for a topic that does not exist."""
    legal = check_name(topic) is None
    return error_codes.UNKNOWN_TOPIC_OR_PARTITION if legal else error_codes.INVALID_TOPIC_EXCEPTION


def _topic(broker: Broker, topic: Topic) -> dict[str, Any]:
    return {
        "error_code": error_codes.NONE,
        "name": topic.name,
        "topic_id": topic.topic_id,
        "is_internal": topic.name == CONSUMER_OFFSETS,
        "partitions": [describe_partition(broker, topic, index) for index in range(len(topic.replicas))],
    }


_BROKER_ENDPOINTS, _CONTROLLER_ENDPOINTS = 1, 2


_TOPIC_RESOURCE = 2
_BROKER_RESOURCE = 4
MAX_DESCRIBED_PARTITIONS = 2000
# Empty, not null: kafka-clients 3.9 reads both unconditionally.
_NO_ELR: dict[str, list[int]] = {"eligible_leader_replicas": [], "last_known_elr": []}
# Kafka's numbers for the source of a configuration.
TOPIC_SOURCE = 1
BROKER_SOURCE = 4


def handle_describe_cluster(broker: Broker, request: Request) -> Body:
    """Answer DescribeCluster with the live brokers."""
    broker.check_knows_cluster()
    message = request.message()
    if message.endpoint_type != _BROKER_ENDPOINTS:
        is_controllers = message.endpoint_type == _CONTROLLER_ENDPOINTS
        return request.answer(
            error_code=error_codes.MISMATCHED_ENDPOINT_TYPE
            if is_controllers
            else error_codes.UNSUPPORTED_ENDPOINT_TYPE,
            error_message="only brokers can be described here",
        )
    return request.answer(
        cluster_id=broker.cluster_id,
        controller_id=controller_id(broker),
        brokers=describe_brokers(broker, "broker_id"),
    )


def handle_describe_configs(broker: Broker, request: Request) -> Body:
    """Answer DescribeConfigs with the configuration of each requested resource."""
    broker.check_knows_cluster()
    return request.answer(results=[_describe_resource(broker, asked) for asked in request.message().resources])


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
            return result | {"error_code": _unknown(asked.resource_name), "error_message": message}
        configs = describe_topic_configs(broker, topic.configs, topic.replication_factor)
    elif asked.resource_type == _BROKER_RESOURCE and asked.resource_name not in ("", str(broker.config.node_id)):
        message = f"broker {broker.config.node_id} describes itself alone, not {asked.resource_name}"
        return result | {"error_code": error_codes.INVALID_REQUEST, "error_message": message}
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
    message = request.message()
    cursor = message.cursor
    first_name, first_index = ("", 0) if cursor is None else (cursor.topic_name, max(cursor.partition_index, 0))
    names = sorted({asked.name for asked in message.topics} or broker.view.topics)
    left = max(1, min(message.response_partition_limit, MAX_DESCRIBED_PARTITIONS))
    topics: list[dict[str, Any]] = []
    next_cursor = None
    for name in names[bisect_left(names, first_name) :]:
        found = broker.view.topics.get(name)
        if left == 0:
            next_cursor = {"topic_name": name, "partition_index": 0}
            break
        if found is None:
            topics.append({"error_code": _unknown(name), "name": name, "partitions": []})
            continue
        indexes = range(first_index if name == first_name else 0, len(found.replicas))
        partitions = [describe_partition(broker, found, index) | _NO_ELR for index in indexes[:left]]
        internal = name == CONSUMER_OFFSETS
        topics.append({"name": name, "topic_id": found.topic_id, "is_internal": internal, "partitions": partitions})
        left -= len(partitions)
        if len(partitions) < len(indexes):
            next_cursor = {"topic_name": name, "partition_index": indexes[len(partitions)]}
            break
    return request.answer(topics=topics, next_cursor=next_cursor)


# Shared with CreateTopics


def describe_partition(broker: Broker, topic: Topic, partition_index: int) -> dict[str, Any]:
    """Describe leader, epoch, replicas and ISR of a partition.

    LEADER_NOT_AVAILABLE while no live broker owns it. While the state is unknown, the ISR is all replicas.
    """
    leader_id, leader_epoch = broker.current_leader(topic.name, partition_index)
    state = broker.view.state(topic, partition_index)
    replicas = topic.replicas[partition_index]
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
    """Describe a topic's effective configuration and the source of each value: topic or broker."""
    values = topic_config_values(configs, replication_factor, broker.config)
    return [describe_config(name, value, TOPIC_SOURCE if name in configs else BROKER_SOURCE) for name, value in values]


def describe_config(name: str, value: str, source: int) -> dict[str, Any]:
    """Describe one configuration value; all are read-only, none is secret."""
    return {"name": name, "value": value, "read_only": True, "config_source": source, "is_sensitive": False}


def controller_id(broker: Broker) -> int:
    """Return the lowest live broker id, or -1. Every broker acts as controller, and all name the same one."""
    return min(broker.view.brokers, default=-1)
