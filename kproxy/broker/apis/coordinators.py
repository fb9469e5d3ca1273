"""Handle FindCoordinator and InitProducerId: name a group's coordinator, and assign producer ids.

Consumer groups and idempotent producers are offered, transactions are not.

FindCoordinator, versions 0-6
- A group's coordinator is the leader of its partition of `__consumer_offsets`. The first request creates this topic,
  and its answer waits for the leaders, at most a second. A broker that stops does not create it.
- COORDINATOR_NOT_AVAILABLE means that the partition has no leader, or that this broker has no live lease.
- Other keys get an error and, from version 1, a sentence with the reason. With these codes clients fail at once and
  show the sentence (tried with librdkafka 2.16 and kafka-python 3.0): CLUSTER_AUTHORIZATION_FAILED for transactions,
  because librdkafka would retry INVALID_REQUEST for ever; INVALID_REQUEST for the rest.

InitProducerId, versions 0-5
- A request without a transactional id gets a producer id that was never assigned before, with epoch 0; or, if etcd
  gives none, COORDINATOR_NOT_AVAILABLE, which clients retry.
- A request with a transactional id gets TRANSACTIONAL_ID_AUTHORIZATION_FAILED, the one code that makes every client
  fail at once instead of asking for ever. (Clients send FindCoordinator first, whose answer gives the reason.)
- An empty transactional id, or a producer id and an epoch of which only one is given, gets INVALID_REQUEST.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import structlog

from kproxy.broker.cluster import LiveBroker
from kproxy.broker.context import Body, Broker, Request
from kproxy.broker.groups.coordinator import partition_for
from kproxy.broker.keys import TopicValue
from kproxy.broker.topics import CONSUMER_OFFSETS, NewTopic
from kproxy.etcd import EtcdError
from kproxy_codec import error_codes

_logger = structlog.get_logger(__name__)

_BATCH_VERSION = 4
_GROUP = 0
# Kafka does not wait at all: clients ask again. Reads of the same client wait behind this answer, also without etcd.
MAKING_TIMEOUT_S = 1.0
_CODES = {1: error_codes.CLUSTER_AUTHORIZATION_FAILED}
_REASONS = {
    1: "transactions are not offered by this broker: use an idempotent producer without a transactional id",
    2: "share groups are not offered by this broker",
}


async def handle_find_coordinator(broker: Broker, request: Request) -> Body:
    """Answer FindCoordinator for each key."""
    message = request.message()
    version = message.version
    key_type = message.key_type
    keys = message.coordinator_keys if version >= _BATCH_VERSION else [message.key]
    if key_type == _GROUP:
        await _make_offsets_topic(broker, keys)
    found = [_coordinator(broker, key_type, key) for key in keys]
    if version >= _BATCH_VERSION:
        coordinators = [{"key": key, **each} for key, each in zip(keys, found, strict=True)]
        return request.answer(coordinators=coordinators)
    return request.answer(**found[0])


async def _make_offsets_topic(broker: Broker, group_ids: Sequence[str]) -> None:
    """Create the topic if it does not exist, and wait for the leaders of these groups, for at most MAKING_TIMEOUT_S."""
    manager = broker.replica_manager
    if CONSUMER_OFFSETS not in broker.view.topics and manager.holds_lease and not manager.stopping:
        with suppress(TimeoutError):
            async with asyncio.timeout(MAKING_TIMEOUT_S):
                planned = await broker.topics.plan(NewTopic(CONSUMER_OFFSETS))
                if isinstance(planned, TopicValue):
                    await broker.topics.create(CONSUMER_OFFSETS, planned)
                await broker.view.wait_until(
                    lambda: all(_leader(broker, each) is not None for each in group_ids), MAKING_TIMEOUT_S
                )


def _leader(broker: Broker, group_id: str) -> LiveBroker | None:
    topic = broker.view.topics.get(CONSUMER_OFFSETS)
    if topic is None:
        return None
    owner = broker.view.owner(CONSUMER_OFFSETS, partition_for(group_id, len(topic.replicas)))
    return broker.view.brokers.get(owner)


def _coordinator(broker: Broker, key_type: int, key: str) -> dict[str, Any]:
    error_code, reason = _CODES.get(key_type, error_codes.INVALID_REQUEST), None
    if key_type == _GROUP:
        leader = _leader(broker, key) if broker.replica_manager.holds_lease else None
        if leader is not None:
            place = {"node_id": leader.node_id, "host": leader.host, "port": leader.port}
            return {"error_code": error_codes.NONE, "error_message": None, **place}
        error_code, reason = error_codes.COORDINATOR_NOT_AVAILABLE, "the group's partition has no leader"
    message = reason or _REASONS.get(key_type, f"there is no coordinator type {key_type}")
    return {"error_code": error_code, "error_message": message, "node_id": -1, "host": "", "port": -1}


async def handle_init_producer_id(broker: Broker, request: Request) -> Body:
    """Answer InitProducerId with a new producer id."""
    message = request.message()
    error_code, producer_id, producer_epoch = error_codes.NONE, -1, -1
    has_part = (message.producer_id == -1) != (message.producer_epoch == -1)
    if message.transactional_id == "" or has_part:
        error_code = error_codes.INVALID_REQUEST
    elif message.transactional_id is not None:
        error_code = error_codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    else:
        try:
            producer_id, producer_epoch = await broker.producer_ids.allocate(), 0
        except EtcdError as error:
            _logger.warning("producer id not allocated", reason=str(error))
            error_code = error_codes.COORDINATOR_NOT_AVAILABLE
    return request.answer(error_code=error_code, producer_id=producer_id, producer_epoch=producer_epoch)
