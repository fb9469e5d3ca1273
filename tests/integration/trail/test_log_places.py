"""A topic to audit is requested by name before it is reported as missing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from kproxy.pipeline.audit.log_client import LogClient, LogReadFailed, Offsets, TopicPartition
from kproxy.pipeline.audit.logs import ends_of, existing
from kproxy_codec import error_codes
from kproxy_codec.api_keys import METADATA
from kproxy_codec.control import decode_request
from tests.support.brokers.scripted_upstream import Asked
from tests.support.processes.served import ServedBroker

TOLD_OF = "orders"


def script(named: Mapping[str, int]) -> ServedBroker:
    """A broker that lists one topic, and other topics only if `named` has them and they are requested."""
    broker = ServedBroker(1)

    def answer(asked: Asked) -> None:
        request = decode_request(asked.header.api_key, asked.header.api_version, asked.body)
        names = [TOLD_OF] if request.topics is None else [topic.name for topic in request.topics]
        topics = [
            {
                "error_code": named.get(name, 0),
                "name": name,
                "partitions": [] if name in named else [{"partition_index": 0, "leader_id": 1}],
            }
            for name in names
        ]
        asked.answer_message(brokers=[{"node_id": 1, "host": "127.0.0.1", "port": broker.port}], topics=topics)

    broker.script = answer
    return broker


async def existing_among(*topics: str, **named: int) -> tuple[str, ...]:
    broker = await script(named).start()
    try:

        def ask() -> tuple[str, ...]:
            with LogClient(str(broker.address)) as client:
                return existing(client, set(topics))

        return await asyncio.to_thread(ask)
    finally:
        await broker.stop()


async def test_new_topic_is_found_on_request() -> None:
    assert await existing_among(TOLD_OF, "hidden") == ("hidden", TOLD_OF)


async def test_deleted_topic_is_absent_and_not_requested_again() -> None:
    gone = await existing_among(TOLD_OF, "gone", "no topic's name", gone=error_codes.UNKNOWN_TOPIC_OR_PARTITION)
    assert gone == (TOLD_OF,)


async def test_unreadable_topic_does_not_count_as_deleted() -> None:
    with pytest.raises(LogReadFailed, match=r"^Topic secret cannot be read: TOPIC_AUTHORIZATION_FAILED.$"):
        await existing_among(TOLD_OF, "secret", secret=error_codes.TOPIC_AUTHORIZATION_FAILED)


def two_of_three() -> ServedBroker:
    """A broker that leads partition 0 and refuses 1; partition 2 has no leader."""
    broker = ServedBroker(1)

    def answer(asked: Asked) -> None:
        request = decode_request(asked.header.api_key, asked.header.api_version, asked.body)
        if asked.header.api_key == METADATA:
            partitions = [{"partition_index": n, "leader_id": 1 if n < 2 else -1} for n in range(3)]
            topics = [{"error_code": 0, "name": TOLD_OF, "partitions": partitions}]
            brokers = [{"node_id": 1, "host": "127.0.0.1", "port": broker.port}]
            asked.answer_message(brokers=brokers, topics=topics)
            return
        refused = error_codes.TOPIC_AUTHORIZATION_FAILED
        found = [
            {"partition_index": each.partition_index, "error_code": refused if each.partition_index else 0, "offset": 7}
            for topic in request.topics
            for each in topic.partitions
        ]
        asked.answer_message(topics=[{"name": TOLD_OF, "partitions": found}])

    broker.script = answer
    return broker


async def test_unreadable_partitions_leave_the_others_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kproxy.pipeline.audit.logs.FIRST_PATIENCE_S", 0.3)
    broker = await two_of_three().start()
    unread: dict[TopicPartition, str] = {}

    def ask(unread: dict[TopicPartition, str] | None) -> Offsets:
        with LogClient(str(broker.address)) as client:
            return ends_of(client, [TOLD_OF], unread)

    try:
        ends = await asyncio.to_thread(ask, unread)
        with pytest.raises(LogReadFailed, match=r"partition (1 cannot be read|2 are not to be had \(it has no leader)"):
            await asyncio.to_thread(ask, None)
    finally:
        await broker.stop()
    assert ends == {TopicPartition(TOLD_OF, 0): 7}
    assert unread == {
        TopicPartition(TOLD_OF, 1): "TOPIC_AUTHORIZATION_FAILED",
        TopicPartition(TOLD_OF, 2): "it has no leader",
    }
