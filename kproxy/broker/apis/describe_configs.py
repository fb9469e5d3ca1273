"""DescribeConfigs, versions 1-4.

What this broker and its topics do, under Kafka's names, so that admin tools find what they look for; all of it is read
only. A topic that does not exist: UNKNOWN_TOPIC_OR_PARTITION; another resource type: INVALID_REQUEST.
While this broker has no lease the connection is closed (`Broker.check_knows_cluster`).
"""

from __future__ import annotations

from typing import Any

from kproxy.broker.apis.describe import BROKER_SOURCE, describe_config, describe_topic_configs
from kproxy.broker.config import default_min_insync_replicas
from kproxy.broker.context import Body, Broker, Request
from kproxy_codec import control, error_codes
from kproxy_codec.api_keys import DESCRIBE_CONFIGS

API_KEY = DESCRIBE_CONFIGS
MIN_VERSION = 1
MAX_VERSION = 4

_TOPIC = 2
_BROKER = 4


def handle(broker: Broker, request: Request) -> Body:
    """The configuration of each resource asked for."""
    broker.check_knows_cluster()
    version = request.header.api_version
    message = control.decode_request(API_KEY, version, request.body)
    results = [_describe(broker, asked) for asked in message.resources]
    return [control.encode_response(control.build_response(API_KEY, version, results=results))]


def _describe(broker: Broker, asked: control.Message) -> dict[str, Any]:
    result: dict[str, Any] = {
        "error_code": error_codes.NONE,
        "error_message": None,
        "resource_type": asked.resource_type,
        "resource_name": asked.resource_name,
        "configs": [],
    }
    if asked.resource_type == _TOPIC:
        topic = broker.view.topics.get(asked.resource_name)
        if topic is None:
            message = f"there is no topic {asked.resource_name}"
            return result | {"error_code": error_codes.UNKNOWN_TOPIC_OR_PARTITION, "error_message": message}
        configs = describe_topic_configs(broker, topic.configs, topic.replication_factor)
    elif asked.resource_type == _BROKER:
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
