"""CreateTopics, versions 2-7.

- Any broker creates; the answer waits for the leaders, within the request's timeout and a few seconds.
- Replication factor -1 or 1; partitions -1 for the broker's default; or one live broker assigned to each partition.
- Topic configurations are refused (INVALID_CONFIG) unless they say what is so anyway: none is stored yet.
- The same topic twice in a request: INVALID_REQUEST for it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from codec import control, error_codes
from codec.api_keys import CREATE_TOPICS
from kproxy.broker.context import LEADERS_TIMEOUT_S, Body, Broker, Request
from kproxy.broker.topics import TopicOutcome

API_KEY = CREATE_TOPICS
MIN_VERSION = 2
MAX_VERSION = 7

# What the log does anyway, so that tools which always send it are not turned away.
_HARMLESS_CONFIGS = {"cleanup.policy": "delete", "compression.type": "producer", "message.timestamp.type": "CreateTime"}


async def handle(broker: Broker, request: Request) -> Body:
    """Create each topic, then wait for leaders."""
    version = request.header.api_version
    message = control.decode_request(API_KEY, version, request.body)
    counts = Counter(asked.name for asked in message.topics)
    outcomes: dict[str, TopicOutcome] = {}
    for asked in message.topics:
        if counts[asked.name] > 1:
            outcomes[asked.name] = TopicOutcome(error_codes.INVALID_REQUEST, "the request names the topic twice")
        else:
            outcomes[asked.name] = await _create(broker, asked, validate_only=message.validate_only)
    created = [name for name, outcome in outcomes.items() if outcome.error_code == error_codes.NONE]
    if created and not message.validate_only:
        timeout_s = min(max(message.timeout_ms, 0) / 1000, LEADERS_TIMEOUT_S)
        await broker.view.wait_until(lambda: all(map(broker.view.is_fully_owned, created)), timeout_s)
    results = [_result(broker, name, outcome, version) for name, outcome in outcomes.items()]
    return [control.encode_response(control.build_response(API_KEY, version, topics=results))]


async def _create(broker: Broker, asked: control.Message, *, validate_only: bool) -> TopicOutcome:
    indexes = [each.partition_index for each in asked.assignments]
    if sorted(indexes) != list(range(len(indexes))):
        message = "replicas are to be assigned to partitions 0, 1, 2 and so on"
        return TopicOutcome(error_codes.INVALID_REPLICA_ASSIGNMENT, message)
    for config in asked.configs:
        if _HARMLESS_CONFIGS.get(config.name) != config.value:
            message = f"{config.name}={config.value}: topic configurations are not offered by this broker"
            return TopicOutcome(error_codes.INVALID_CONFIG, message)
    assignments = [each.broker_ids for each in sorted(asked.assignments, key=lambda each: int(each.partition_index))]
    outcome = broker.topics.check(asked.name, asked.num_partitions, asked.replication_factor, assignments)
    if outcome.error_code != error_codes.NONE or validate_only:
        return outcome
    return await broker.topics.create(asked.name, asked.num_partitions, assignments)


def _result(broker: Broker, name: str, outcome: TopicOutcome, version: int) -> dict[str, Any]:
    result: dict[str, Any] = {
        "name": name,
        "error_code": outcome.error_code,
        "error_message": outcome.error_message,
    }
    topic = broker.view.topics.get(name)
    if outcome.error_code == error_codes.NONE and topic is not None:
        if version >= 5:
            result |= {"num_partitions": len(topic.replicas), "replication_factor": 1, "configs": []}
        if version >= 7:
            result["topic_id"] = topic.topic_id
    return result
