"""Handle CreateTopics and DeleteTopics.

CreateTopics, versions 2-7
- Any broker creates topics; the answer waits for the leaders, for the request's timeout but at most LEADERS_TIMEOUT_S.
- Replication factor -1 means as many replicas as the broker's default and the live brokers allow; any other number is
  used exactly, or refused with INVALID_REPLICATION_FACTOR. Partitions -1 means the broker's default. A request may
  instead assign live brokers to each partition.
- A configuration that cannot be set (`config`) gets INVALID_CONFIG; a topic that is named twice, INVALID_REQUEST.
- From version 5 the answer describes the topic that was created, or with validate_only would be created.

DeleteTopics, versions 1-6
- Any broker deletes topics, by name or, from version 6, by topic id. Owners give up the partitions and remove their
  logs when they see the deletion; the answer does not wait for them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kproxy.broker.apis.describe import describe_topic_configs
from kproxy.broker.context import LEADERS_TIMEOUT_S, Body, Broker, Request
from kproxy.broker.keys import TopicValue
from kproxy.broker.topics import NewTopic, TopicOutcome
from kproxy_codec import control, error_codes

_NAMED_TWICE = TopicOutcome(error_codes.INVALID_REQUEST, "the request names the topic twice")


_TOPIC_ID_VERSION = 6


async def handle_create_topics(broker: Broker, request: Request) -> Body:
    """Answer CreateTopics: create each topic, then wait for the leaders."""
    message = request.message()
    counts = Counter(asked.name for asked in message.topics)
    made: dict[str, TopicValue | TopicOutcome] = {}
    for asked in message.topics:
        if counts[asked.name] > 1:
            made[asked.name] = _NAMED_TWICE
        else:
            made[asked.name] = await _create(broker, asked, validate_only=message.validate_only)
    created = [name for name, topic in made.items() if isinstance(topic, TopicValue)]
    if created and not message.validate_only:
        timeout_s = min(max(message.timeout_ms, 0) / 1000, LEADERS_TIMEOUT_S)
        await broker.view.wait_until(lambda: all(map(broker.view.is_fully_owned, created)), timeout_s)
    is_there = not message.validate_only
    results = [_created(broker, name, topic, message.version, is_there=is_there) for name, topic in made.items()]
    return request.answer(topics=results)


async def _create(broker: Broker, asked: control.Message, *, validate_only: bool) -> TopicValue | TopicOutcome:
    """Create, or only plan, one topic; return it, or the reason why it is refused."""
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


def _created(
    broker: Broker, name: str, topic: TopicValue | TopicOutcome, version: int, *, is_there: bool
) -> dict[str, Any]:
    if isinstance(topic, TopicOutcome):
        return {"name": name, "error_code": topic.error_code, "error_message": topic.error_message}
    result: dict[str, Any] = {"name": name, "error_code": error_codes.NONE, "error_message": None}
    if version >= 5:
        factor = len(topic.replicas[0])
        configs = describe_topic_configs(broker, topic.configs, factor)
        result |= {"num_partitions": len(topic.replicas), "replication_factor": factor, "configs": configs}
    if is_there:
        result["topic_id"] = topic.topic_id
    return result


async def handle_delete_topics(broker: Broker, request: Request) -> Body:
    """Answer DeleteTopics."""
    message = request.message()
    if message.version >= _TOPIC_ID_VERSION:
        asked = [(each.name, each.topic_id) for each in message.topics]
    else:
        asked = [(name, None) for name in message.topic_names]
    responses = [await _delete(broker, name, topic_id) for name, topic_id in asked]
    return request.answer(responses=responses)


async def _delete(broker: Broker, name: str | None, topic_id: Any) -> dict[str, Any]:
    topic = broker.view.topics.get(name) if name is not None else broker.view.topic_by_id(topic_id.bytes)
    if name is not None and topic_id is not None and topic_id.int:
        topic, outcome = None, TopicOutcome(error_codes.INVALID_REQUEST, "a topic is named by its name or its id")
    elif topic is not None:
        outcome = await broker.topics.delete(topic)
    elif name is not None:
        outcome = TopicOutcome(error_codes.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}")
    else:
        outcome = TopicOutcome(error_codes.UNKNOWN_TOPIC_ID, f"there is no topic {topic_id}")
    return {
        "name": topic.name if topic is not None else name,
        "topic_id": topic.topic_id if topic is not None else topic_id,
        "error_code": outcome.error_code,
        "error_message": outcome.error_message,
    }
