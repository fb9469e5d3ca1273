"""CreateTopics, versions 2-7.

- Any broker creates; the answer waits for the leaders, within the request's timeout and a few seconds.
- Replication factor -1 for as many replicas as the broker's default and live brokers allow, else exactly so many or
  INVALID_REPLICATION_FACTOR; partitions -1 for the broker's default. Or live brokers assigned to each partition.
- Configurations: see `topic_config`; those that are not offered: INVALID_CONFIG.
- From version 5 on the answer says what was, or with validate_only would be, created.
- The same topic twice in a request: INVALID_REQUEST for it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kproxy.broker.apis.describe import describe_topic_configs
from kproxy.broker.context import LEADERS_TIMEOUT_S, Body, Broker, Request
from kproxy.broker.keys import TopicValue
from kproxy.broker.topics import NewTopic, TopicOutcome
from kproxy_codec import control, error_codes
from kproxy_codec.api_keys import CREATE_TOPICS

API_KEY = CREATE_TOPICS
MIN_VERSION = 2
MAX_VERSION = 7


_NAMED_TWICE = TopicOutcome(error_codes.INVALID_REQUEST, "the request names the topic twice")


async def handle(broker: Broker, request: Request) -> Body:
    """Create each topic, then wait for leaders."""
    version = request.header.api_version
    message = control.decode_request(API_KEY, version, request.body)
    counts = Counter(asked.name for asked in message.topics)
    made: dict[str, TopicValue | TopicOutcome] = {}
    for asked in message.topics:
        if counts[asked.name] > 1:
            made[asked.name] = _NAMED_TWICE
        else:
            made[asked.name] = await _make(broker, asked, validate_only=message.validate_only)
    created = [name for name, topic in made.items() if isinstance(topic, TopicValue)]
    if created and not message.validate_only:
        timeout_s = min(max(message.timeout_ms, 0) / 1000, LEADERS_TIMEOUT_S)
        await broker.view.wait_until(lambda: all(map(broker.view.is_fully_owned, created)), timeout_s)
    is_there = not message.validate_only
    results = [_result(broker, name, topic, version, is_there=is_there) for name, topic in made.items()]
    return [control.encode_response(control.build_response(API_KEY, version, topics=results))]


async def _make(broker: Broker, asked: control.Message, *, validate_only: bool) -> TopicValue | TopicOutcome:
    """The topic that was, or would be, created, or why there is none."""
    assigned = sorted(asked.assignments, key=lambda each: int(each.partition_index))
    if [each.partition_index for each in assigned] != list(range(len(assigned))):
        message = "replicas are to be assigned to partitions 0, 1, 2 and so on"
        return TopicOutcome(error_codes.INVALID_REPLICA_ASSIGNMENT, message)
    assignments = [each.broker_ids for each in assigned]
    configs = {each.name: each.value for each in asked.configs}
    wanted = NewTopic(asked.name, asked.num_partitions, asked.replication_factor, assignments, configs)
    planned = await broker.topics.plan(wanted)
    if isinstance(planned, TopicOutcome) or validate_only:
        return planned
    outcome = await broker.topics.create(asked.name, planned)
    return planned if outcome.error_code == error_codes.NONE else outcome


def _result(
    broker: Broker, name: str, topic: TopicValue | TopicOutcome, version: int, *, is_there: bool
) -> dict[str, Any]:
    if isinstance(topic, TopicOutcome):
        return {"name": name, "error_code": topic.error_code, "error_message": topic.error_message}
    result: dict[str, Any] = {"name": name, "error_code": error_codes.NONE, "error_message": None}
    if version >= 5:
        factor = len(topic.replicas[0])
        configs = describe_topic_configs(broker, topic.configs, factor)
        result |= {"num_partitions": len(topic.replicas), "replication_factor": factor, "configs": configs}
    if version >= 7 and is_there:
        result["topic_id"] = topic.topic_id
    return result
