"""Metadata, versions 0-13.

- Leaders are the lease owners; a partition without one says LEADER_NOT_AVAILABLE and leader -1.
- A topic that does not exist is created, with the broker's default numbers of partitions and replicas, if the request
  (from version 4) and the broker allow it; the answer waits a few seconds for its leaders. Otherwise
  UNKNOWN_TOPIC_OR_PARTITION.
- While this broker has no lease it names the other brokers that it knew, LEADER_NOT_AVAILABLE for each topic, and a
  mark that makes a proxy ask another broker. Where that cannot be said (all topics are asked for, no other broker is
  known, or the version has no place for the mark) the connection is closed.
- An illegal name: INVALID_TOPIC_EXCEPTION. By topic id from version 12; unknown: UNKNOWN_TOPIC_ID.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from kproxy.broker.apis.describe import controller_id, describe_brokers, describe_partition
from kproxy.broker.cluster import Topic
from kproxy.broker.context import LEADERS_TIMEOUT_S, Body, Broker, Request
from kproxy.broker.keys import TopicValue
from kproxy.broker.topics import NewTopic, check_name
from kproxy_codec import control, error_codes
from kproxy_codec.api_keys import METADATA, is_flexible
from kproxy_codec.cluster import ASK_ANOTHER

_TOPIC_ID_VERSION = 12
# Concurrent creations for one request.
_CONCURRENT_CREATIONS = 8


def handle(broker: Broker, request: Request) -> Body | Awaitable[Body]:
    """Answer at once, unless topics are to be created first."""
    message = control.decode_request(METADATA, request.header.api_version, request.body)
    if not broker.replica_manager.holds_lease:
        return _send_elsewhere(broker, message)
    version = message.version
    names = _names(broker, message)
    missing = [name for name in names if name not in broker.view.topics and check_name(name) is None]
    may_create = broker.config.auto_create_topics and (version < 4 or message.allow_auto_topic_creation)
    to_create = list(dict.fromkeys(missing)) if may_create and not broker.replica_manager.stopping else []
    return _create_and_describe(broker, message, to_create) if to_create else _describe(broker, message)


def _names(broker: Broker, message: control.Message) -> list[str]:
    """List the topics asked for by name; all of them where the request says so."""
    if message.topics is None or (message.version == 0 and not message.topics):
        return list(broker.view.topics)
    return [asked.name for asked in message.topics if asked.name is not None]


async def _create_and_describe(broker: Broker, message: control.Message, to_create: list[str]) -> Body:
    slots = asyncio.Semaphore(_CONCURRENT_CREATIONS)

    async def create(name: str) -> None:
        async with slots:
            planned = await broker.topics.plan(NewTopic(name))
            if isinstance(planned, TopicValue):
                await broker.topics.create(name, planned)

    await asyncio.gather(*(create(name) for name in to_create))
    await broker.view.wait_until(lambda: all(map(broker.view.is_fully_owned, to_create)), LEADERS_TIMEOUT_S)
    return _describe(broker, message) if broker.replica_manager.holds_lease else _send_elsewhere(broker, message)


def _send_elsewhere(broker: Broker, message: control.Message) -> Body:
    """Answer that clients should ask another broker.

    Raises CloseConnection if there is none. Closing alone is not enough: a Java client that knows this broker as a
    leader reconnects and asks it first.
    """
    version = message.version
    others = [each for each in _brokers(broker) if each["node_id"] != broker.config.node_id]
    if not others or message.topics is None or not is_flexible(METADATA, version):
        broker.check_knows_cluster()
    topics: list[dict[str, Any]] = [
        {"error_code": error_codes.LEADER_NOT_AVAILABLE, "name": asked.name, "partitions": []}
        | ({"topic_id": asked.topic_id} if version >= 10 else {})
        for asked in message.topics or ()
    ]
    response = control.build_response(METADATA, version, brokers=others, cluster_id=broker.cluster_id, topics=topics)
    return [bytes(control.encode_response(response))[:-1] + ASK_ANOTHER]


def _describe(broker: Broker, message: control.Message) -> Body:
    version = message.version
    if message.topics is None or (version == 0 and not message.topics):
        topics = [_topic(broker, topic, version) for topic in broker.view.topics.values()]
    else:
        topics = [_asked(broker, asked, version) for asked in message.topics]
    fields: dict[str, Any] = {"brokers": _brokers(broker), "topics": topics}
    if version >= 1:
        fields["controller_id"] = controller_id(broker)
    if version >= 2:
        fields["cluster_id"] = broker.cluster_id
    return [control.encode_response(control.build_response(METADATA, version, **fields))]


def _brokers(broker: Broker) -> list[dict[str, Any]]:
    return describe_brokers(broker, "node_id")


def _asked(broker: Broker, asked: control.Message, version: int) -> dict[str, Any]:
    if asked.name is None:
        found = broker.view.topic_by_id(asked.topic_id.bytes) if asked.topic_id is not None else None
        if found is not None and version >= _TOPIC_ID_VERSION:
            return _topic(broker, found, version)
        # Versions 10 and 11 have topic ids, but no null name to answer with.
        name = None if version >= _TOPIC_ID_VERSION else ""
        return {
            "error_code": error_codes.UNKNOWN_TOPIC_ID,
            "name": name,
            "topic_id": asked.topic_id,
            "partitions": [],
        }
    found = broker.view.topics.get(asked.name)
    if found is not None:
        return _topic(broker, found, version)
    legal = check_name(asked.name) is None
    error_code = error_codes.UNKNOWN_TOPIC_OR_PARTITION if legal else error_codes.INVALID_TOPIC_EXCEPTION
    return {"error_code": error_code, "name": asked.name, "partitions": []}


def _topic(broker: Broker, topic: Topic, version: int) -> dict[str, Any]:
    partitions = [describe_partition(broker, topic, index) for index in range(len(topic.replicas))]
    described: dict[str, Any] = {"error_code": error_codes.NONE, "name": topic.name, "partitions": partitions}
    if version >= 10:
        described["topic_id"] = topic.topic_id
    return described
