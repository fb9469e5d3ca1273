"""DescribeTopicPartitions, version 0 (KIP-966).

- Topics come in order of name; no topics named means all. Nothing is created.
- At most as many partitions as the request allows, and never more than MAX_PARTITIONS; a cursor says where to go on.
- While this broker has no lease the connection is closed (`Broker.check_knows_cluster`).
"""

from __future__ import annotations

from typing import Any

from kproxy.broker.apis.describe import describe_partition
from kproxy.broker.context import Body, Broker, Request
from kproxy.broker.topics import check_name
from kproxy_codec import control, error_codes
from kproxy_codec.api_keys import DESCRIBE_TOPIC_PARTITIONS

API_KEY = DESCRIBE_TOPIC_PARTITIONS
MIN_VERSION = 0
MAX_VERSION = 0

MAX_PARTITIONS = 2000
# Empty, not null: kafka-clients 3.9 reads both without asking.
_NO_ELR: dict[str, list[int]] = {"eligible_leader_replicas": [], "last_known_elr": []}


def handle(broker: Broker, request: Request) -> Body:
    """The partitions asked for, from the cursor on."""
    broker.check_knows_cluster()
    message = control.decode_request(API_KEY, request.header.api_version, request.body)
    names = sorted({asked.name for asked in message.topics} or broker.view.topics)
    cursor = message.cursor
    first_index = 0
    if cursor is not None:
        names = [name for name in names if name >= cursor.topic_name]
        first_index = max(cursor.partition_index, 0) if names[:1] == [cursor.topic_name] else 0
    left = max(1, min(message.response_partition_limit, MAX_PARTITIONS))
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
    response = control.build_response(API_KEY, message.version, topics=topics, next_cursor=next_cursor)
    return [control.encode_response(response)]
