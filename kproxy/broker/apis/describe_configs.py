"""DescribeConfigs, versions 1-4.

What this broker and its topics do, under Kafka's names, so that admin tools find what they look for; all of it is read
only and the broker's own. A topic that does not exist: UNKNOWN_TOPIC_OR_PARTITION; another resource type:
INVALID_REQUEST.
"""

from __future__ import annotations

from typing import Any

from codec import control, error_codes
from codec.api_keys import DESCRIBE_CONFIGS
from kproxy.broker.context import Body, Broker, Request

API_KEY = DESCRIBE_CONFIGS
MIN_VERSION = 1
MAX_VERSION = 4

_TOPIC = 2
_BROKER = 4
# A static broker configuration, in Kafka's numbering of sources.
_SOURCE = 4


def handle(broker: Broker, request: Request) -> Body:
    """The configuration of each resource asked for."""
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
        if asked.resource_name not in broker.view.topics:
            message = f"there is no topic {asked.resource_name}"
            return result | {"error_code": error_codes.UNKNOWN_TOPIC_OR_PARTITION, "error_message": message}
        values = _topic_values(broker)
    elif asked.resource_type == _BROKER:
        values = _broker_values(broker)
    else:
        message = f"resource type {asked.resource_type}: topics and brokers can be described here"
        return result | {"error_code": error_codes.INVALID_REQUEST, "error_message": message}
    wanted = asked.configuration_keys
    result["configs"] = [
        {
            "name": name,
            "value": value,
            "read_only": True,
            "config_source": _SOURCE,
            "is_sensitive": False,
            "synonyms": [],
        }
        for name, value in values.items()
        if wanted is None or name in wanted
    ]
    return result


def _topic_values(broker: Broker) -> dict[str, str]:
    return {
        "cleanup.policy": "delete",
        "compression.type": "producer",
        "max.message.bytes": str(broker.config.message_max_bytes),
        "message.timestamp.type": "CreateTime",
        "min.insync.replicas": "1",
        "retention.bytes": "-1",
        "retention.ms": "-1",
        "segment.bytes": str(broker.config.segment_bytes),
    }


def _broker_values(broker: Broker) -> dict[str, str]:
    return {
        "auto.create.topics.enable": str(broker.config.auto_create_topics).lower(),
        "broker.id": str(broker.config.node_id),
        "default.replication.factor": "1",
        "fetch.max.bytes": str(broker.config.fetch_max_bytes),
        "log.segment.bytes": str(broker.config.segment_bytes),
        "message.max.bytes": str(broker.config.message_max_bytes),
        "min.insync.replicas": "1",
        "num.partitions": str(broker.config.num_partitions),
    }
