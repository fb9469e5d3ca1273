"""DeleteTopics, versions 1-6.

Any broker deletes, by name or, from version 6 on, by topic id. Owners give up the partitions and remove their logs as
soon as they see it; the answer does not wait for that.
"""

from __future__ import annotations

from typing import Any

from kproxy.broker.context import Body, Broker, Request
from kproxy.broker.topics import TopicOutcome
from kproxy_codec import control, error_codes
from kproxy_codec.api_keys import DELETE_TOPICS

API_KEY = DELETE_TOPICS
MIN_VERSION = 1
MAX_VERSION = 6

_TOPIC_ID_VERSION = 6


async def handle(broker: Broker, request: Request) -> Body:
    """Delete each topic."""
    version = request.header.api_version
    message = control.decode_request(API_KEY, version, request.body)
    if version >= _TOPIC_ID_VERSION:
        asked = [(each.name, each.topic_id) for each in message.topics]
    else:
        asked = [(name, None) for name in message.topic_names]
    responses = [await _delete(broker, name, topic_id, version) for name, topic_id in asked]
    return [control.encode_response(control.build_response(API_KEY, version, responses=responses))]


async def _delete(broker: Broker, name: str | None, topic_id: Any, version: int) -> dict[str, Any]:
    topic = broker.view.topics.get(name) if name is not None else broker.view.topic_by_id(topic_id.bytes)
    if topic is not None:
        outcome = await broker.topics.delete(topic)
    elif name is not None:
        outcome = TopicOutcome(error_codes.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}")
    else:
        outcome = TopicOutcome(error_codes.UNKNOWN_TOPIC_ID, f"there is no topic {topic_id}")
    response: dict[str, Any] = {"name": topic.name if topic is not None else name, "error_code": outcome.error_code}
    if version >= 5:
        response["error_message"] = outcome.error_message
    if version >= _TOPIC_ID_VERSION:
        response["topic_id"] = topic.topic_id if topic is not None else topic_id
    return response
