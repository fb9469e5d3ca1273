"""A topic's configuration reaches every replica's log."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy_codec.api_keys import LIST_OFFSETS
from tests.integration.broker.test_broker_apis import base_offsets
from tests.support.brokers.reference_broker import BrokerProcess, RawClient, create_topic, fetch, start_brokers
from tests.support.waiting import wait_for
from tests.support.wire.record_batches import build_batch

SEGMENT_BYTES = 1 << 20
# Two of these fill a segment; a third begins the next.
BATCH_BYTES = 500_000
BATCHES = 9
RETENTION_CHECK_INTERVAL_S = 1


@pytest.fixture(scope="module")
def brokers(etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[BrokerProcess]]:
    directory, prefix = tmp_path_factory.mktemp("settings"), f"/settings-{uuid.uuid4().hex[:8]}"
    interval_s = RETENTION_CHECK_INTERVAL_S
    with start_brokers((1, 2, 3), directory, etcd.endpoint, prefix, retention_check_interval_s=interval_s) as started:
        yield started


def segments(broker: BrokerProcess, topic: str) -> list[int]:
    """The first offsets of the segments on this broker's disk."""
    return sorted(int(path.stem) for path in (broker.data_dir / f"{topic}-0").glob("*.log"))


def earliest(client: RawClient, topic: str) -> int:
    asked = [{"name": topic, "partitions": [{"partition_index": 0, "timestamp": -2}]}]
    offset: int = client.request(LIST_OFFSETS, 6, replica_id=-1, topics=asked).topics[0].partitions[0].offset
    return offset


# Configurations -> the base offsets of the remaining segments.
KEPT: list[tuple[dict[str, int], list[int]]] = [
    ({}, [0]),
    ({"segment.bytes": SEGMENT_BYTES}, [0, 2, 4, 6, 8]),
    ({"segment.bytes": SEGMENT_BYTES, "retention.bytes": 2 * SEGMENT_BYTES}, [4, 6, 8]),
    # The records have timestamps years ago; Kafka also removes the last segment by age, but not by size.
    ({"segment.bytes": SEGMENT_BYTES, "retention.ms": 60_000}, [BATCHES]),
    ({"retention.bytes": 0}, [0]),
]


def create(client: RawClient, configs: dict[str, int]) -> str:
    """Create a topic with one partition on all three brokers, led by the first, and write its records."""
    topic = f"settings-{uuid.uuid4().hex[:10]}"
    assert create_topic(client, topic, [[1, 2, 3]], configs).error_code == 0
    for _ in range(BATCHES):
        assert client.produce(topic, 0, build_batch([b"x" * BATCH_BYTES])).error_code == 0
    return topic


def test_segments_follow_topic_size_and_count(brokers: list[BrokerProcess]) -> None:
    with brokers[0].client() as client:
        kept = {create(client, configs): left for configs, left in KEPT}

        def found() -> dict[str, list[list[int]]]:
            return {topic: [segments(broker, topic) for broker in brokers] for topic in kept}

        expected = {topic: [left] * len(brokers) for topic, left in kept.items()}
        wait_for(lambda: found() == expected, what=f"{expected}, instead of {found()}")
        time.sleep(2 * RETENTION_CHECK_INTERVAL_S)
        assert found() == expected, "what was to be kept went later"
        for topic, (first, *_) in kept.items():
            assert earliest(client, topic) == first
            assert base_offsets(fetch(client, topic, first, max_bytes=10).records) == [first][: BATCHES - first]
            assert client.produce(topic, 0, build_batch()).base_offset == BATCHES
