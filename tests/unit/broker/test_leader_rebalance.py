"""The partitions that return to their first replica, and the number at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kproxy.broker.cluster import ClusterView
from kproxy.broker.election import HAND_OVER_BATCH, LeaderRebalance
from kproxy.broker.keys import Keys, PartitionKey, TopicValue, encode_value
from kproxy.broker.partition import Partition
from tests.support.brokers.replica_group import TOPIC_ID, broker_value
from tests.unit.broker.replicas import lead, replica

KEYS = Keys("/p")
PARTITIONS = 2 * HAND_OVER_BATCH + 1


@pytest.fixture
def led(tmp_path: Path) -> Iterator[Partition]:
    """Every partition of the topic: led here, with its first replica, broker 2, in sync."""
    partition = lead(replica(tmp_path / "t"), 2, 1)
    yield partition
    partition.close()


def view_of(*live: int) -> ClusterView:
    view = ClusterView(KEYS)
    for node_id in live:
        view.apply_put(KEYS.broker(node_id), encode_value(broker_value(node_id)), lease_id=1, revision=node_id)
    topic = TopicValue(TOPIC_ID, [[2, 1]] * PARTITIONS, {})
    view.apply_put(KEYS.topic("t"), encode_value(topic), lease_id=0, revision=9)
    return view


def rebalance_of(view: ClusterView, led: Partition, after_s: float = 0.0) -> LeaderRebalance:
    rebalance = LeaderRebalance(view, 1, {(b"t", index): led for index in range(PARTITIONS)}, after_s)
    for index in range(PARTITIONS):
        rebalance.begun(PartitionKey("t", index))
    return rebalance


async def test_partitions_go_back_in_batches(led: Partition) -> None:
    rebalance = rebalance_of(view_of(1, 2), led)
    handed_over: list[PartitionKey] = []
    sizes = []
    while batch := rebalance.next_batch():
        sizes.append(len(batch))
        handed_over += batch
        for key in batch:
            rebalance.ended(key)
    assert sizes == [HAND_OVER_BATCH, HAND_OVER_BATCH, 1]
    assert sorted(handed_over) == [PartitionKey("t", index) for index in range(PARTITIONS)]


async def test_dead_first_replica_gets_nothing_back(led: Partition) -> None:
    assert rebalance_of(view_of(1), led).next_batch() == []


async def test_preferred_leader_keeps_partitions_unasked(led: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    view = view_of(1, 2)
    view.apply_put(
        KEYS.topic("t"), encode_value(TopicValue(TOPIC_ID, [[1, 2]] * PARTITIONS, {})), lease_id=0, revision=10
    )
    rebalance = rebalance_of(view, led)
    assert rebalance.next_batch() == []
    asked: list[PartitionKey] = []
    monkeypatch.setattr(LeaderRebalance, "_stays", lambda rebalance, key: asked.append(key) or True)
    assert (rebalance.next_batch(), asked) == ([], [])


async def test_partition_that_resigned_is_not_due_again(led: Partition) -> None:
    led.resign()
    assert rebalance_of(view_of(1, 2), led).next_batch() == []


async def test_batch_waits_for_owners_of_last_one(led: Partition) -> None:
    view = view_of(1, 2)
    rebalance = rebalance_of(view, led, 0.05)
    await asyncio.sleep(0.1)
    batch = rebalance.next_batch()
    assert len(batch) == HAND_OVER_BATCH
    for key in batch:
        rebalance.ended(key)
    assert rebalance.next_batch() == []
    for revision, key in enumerate(batch, 10):
        view.apply_put(KEYS.lease(*key), b"2", lease_id=1, revision=revision)
    assert len(rebalance.next_batch()) == HAND_OVER_BATCH
    await asyncio.sleep(0.1)
    assert rebalance.next_batch(), "nobody takes them: the others do not wait for ever"
