"""Topics can be created with the same replicas and configuration as at Apache Kafka."""

from __future__ import annotations

import uuid
from typing import Any

from kproxy_codec import error_codes
from kproxy_codec.api_keys import CREATE_TOPICS
from tests.support.brokers.oracle import Side, on_both

Asked = dict[str, Any]


def configured(name: str, *values: str | None) -> list[Asked]:
    return [{"configs": [{"name": name, "value": value}]} for value in values]


def assigned(*replicas: list[int], **more: int) -> Asked:
    by_partition = [{"partition_index": index, "broker_ids": ids} for index, ids in enumerate(replicas)]
    return {"num_partitions": -1, "replication_factor": -1, "assignments": by_partition, **more}


ASKED: list[Asked] = [
    *({"replication_factor": factor} for factor in (3, 2, 1, -1, 0, -2, 4, 32_767)),
    *({"num_partitions": partitions} for partitions in (1, 7, -1, 0, -2)),
    assigned([1]),
    assigned([2, 3], [3, 1], [1, 2]),
    assigned([1, 2], [3]),
    assigned([1, 1]),
    assigned([]),
    assigned([9]),
    assigned([1, 9]),
    assigned([-1]),
    assigned([1], replication_factor=1),
    assigned([1], num_partitions=1),
    {**assigned(), "assignments": [{"partition_index": 1, "broker_ids": [1]}]},
    {**assigned(), "assignments": [{"partition_index": 0, "broker_ids": [1]}] * 2},
    *({"name": name} for name in ("", ".", "..", "a/b", "a b", "ü", "x" * 249, "x" * 250)),
    *configured("min.insync.replicas", "1", " +2 ", "4", "2147483647", "0", "-1", "", "two", "1_0", "2147483648", None),
    *configured("min.insync.replicas", "0" * 40 + "2", "0x1", "1.0"),
    *configured("retention.ms", "-1", "0", "60000", "-2", "1e3", "9223372036854775807", "9223372036854775808"),
    *configured("retention.bytes", "-1", "0", "-5", "-9223372036854775808", "-9223372036854775809"),
    *configured("segment.bytes", "1048576", "1048575", "0", "2147483647", "2147483648"),
    *configured("cleanup.policy", "delete", "nothing"),
    *configured("compression.type", "producer", "nothing"),
    *configured("message.timestamp.type", "CreateTime", "nothing"),
    *configured("unclean.leader.election.enable", "false", "nothing"),
    *configured("no.such.thing", "1"),
]
# Kafka has more configurations, and more values of these.
REFUSED_HERE: list[Asked] = [
    *configured("cleanup.policy", "compact", "compact,delete"),
    *configured("compression.type", "zstd"),
    *configured("unclean.leader.election.enable", "true"),
    *configured("max.message.bytes", "1000"),
    *configured("flush.messages", "1"),
]


def outcomes(side: Side, asked: list[Asked]) -> list[tuple[str, str, int, int]]:
    """The outcome of each creation, one by one: the error, and the topic's partitions and replicas."""
    found = []
    with side.client(1) as client:
        for each in asked:
            topic = {"name": f"new-{uuid.uuid4().hex[:10]}", "num_partitions": 2, "replication_factor": 3, **each}
            answer = client.request(CREATE_TOPICS, 7, topics=[topic], timeout_ms=10_000, validate_only=True).topics[0]
            error = error_codes.name_of(answer.error_code)
            assert bool(answer.error_message) == (answer.error_code != error_codes.NONE), answer
            found.append((str(each), error, answer.num_partitions, answer.replication_factor))
    return found


def test_topic_accepts_the_settings_kafka_accepts(sides: dict[str, Side]) -> None:
    real, ours = on_both(sides, lambda side: outcomes(side, ASKED))
    assert ours == real


def test_unsupported_kafka_settings_are_refused(sides: dict[str, Side]) -> None:
    real, ours = on_both(sides, lambda side: outcomes(side, REFUSED_HERE))
    assert {error for _, error, *_ in real} == {"NONE"}
    assert {error for _, error, *_ in ours} == {"INVALID_CONFIG"}
