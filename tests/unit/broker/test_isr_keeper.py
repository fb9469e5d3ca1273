"""Writing in-sync replicas to etcd: the order of changes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kproxy.broker.cluster import ClusterView
from kproxy.broker.keys import Keys, StateValue, encode_value
from kproxy.broker.partition import Partition
from kproxy.broker.replication.isr_keeper import CONCURRENT_CHANGES, IsrKeeper
from kproxy.broker.replication.partition_replication import FollowerContact, ReplicationManager
from kproxy.etcd import EtcdUnavailable, KeyValue, WatchEvent, put_op
from tests.support.brokers.replica_group import TOPIC_ID, broker_value, on_disk
from tests.support.models.simulated_etcd import EtcdStore, SimulatedEtcdClient
from tests.support.waiting import eventually
from tests.unit.broker.replicas import lead, replica

KEYS = Keys("/p")


class RefusingClient(SimulatedEtcdClient):
    """etcd accepts no change of some partitions."""

    refused: frozenset[str] = frozenset()

    async def txn(self, compares: Any, puts: Any, otherwise: Any = ()) -> Any:
        if any(put.message.request_put.key.decode() in self.refused for put in puts):
            raise EtcdUnavailable("not now", maybe_applied=False)
        return await super().txn(compares, puts, otherwise)


@pytest.fixture
def led(tmp_path: Path) -> Iterator[list[Partition]]:
    led = [replica(tmp_path / str(index), 1, index) for index in range(CONCURRENT_CHANGES + 2)]
    yield led
    for partition in led:
        partition.close()


def view_of(*live: int) -> ClusterView:
    view = ClusterView(KEYS)
    for each in live:
        view.apply_put(KEYS.broker(each), encode_value(broker_value(each)), lease_id=7, revision=each)
    return view


async def take(client: SimulatedEtcdClient, led: list[Partition]) -> None:
    """Lead all partitions, with broker 2 in sync."""
    for partition in led:
        index = partition.partition_index
        state = encode_value(StateValue(0, [on_disk(1), on_disk(2)], TOPIC_ID))
        put = [put_op(KEYS.lease("t", index), b"1"), put_op(KEYS.state("t", index), state)]
        taken = await SimulatedEtcdClient.txn(client, [], put)
        lead(partition, 1, 2, token=taken.revision)


async def test_failing_isr_changes_do_not_block_others(led: list[Partition]) -> None:
    client, view = RefusingClient(EtcdStore(time.monotonic)), view_of(1)
    client.refused = frozenset(KEYS.state("t", index) for index in range(CONCURRENT_CHANGES))
    await take(client, led)
    keeper = IsrKeeper(client, view, lambda: led, isr_lag_s=0.1, on_deposed=lambda _: None)
    running = asyncio.create_task(keeper.run())
    await eventually(
        lambda: all(each.replication.isr.members == {on_disk(1)} for each in led[CONCURRENT_CHANGES:]),
        timeout_s=10.0,
        what="the turn of the last ones",
    )
    assert all(each.replication.isr.members == {on_disk(1), on_disk(2)} for each in led[:CONCURRENT_CHANGES])
    running.cancel()


async def test_rounds_leave_full_isrs_alone(led: list[Partition], monkeypatch: pytest.MonkeyPatch) -> None:
    client, view = SimulatedEtcdClient(EtcdStore(time.monotonic)), view_of(1, 2)
    await take(client, led)
    contact = FollowerContact(time.monotonic)
    for partition in led:
        partition.replication.replica_fetched(on_disk(2), 0)
        partition.replication.follower_waits(2, contact)
    looks, rounds = Counter[ReplicationManager](), 0
    wanted_isr = ReplicationManager.wanted_isr

    def count(manager: ReplicationManager, *brokers: Any) -> Any:
        looks[manager] += 1
        return wanted_isr(manager, *brokers)

    def begin_round() -> list[Partition]:
        nonlocal rounds
        rounds += 1
        contact.heard()
        return led

    monkeypatch.setattr(ReplicationManager, "wanted_isr", count)
    keeper = IsrKeeper(client, view, begin_round, isr_lag_s=0.04, on_deposed=lambda _: None)
    running = asyncio.create_task(keeper.run())
    await eventually(lambda: rounds > 20, timeout_s=60.0, what="rounds")
    assert set(looks.values()) == {1}, "of the round that begins with the keeper"
    view.on_events([WatchEvent(True, KeyValue(KEYS.broker(2), b"", 1, 9, 1, 0))], 9)
    await eventually(
        lambda: all(each.replication.isr.members == {on_disk(1)} for each in led), timeout_s=60.0, what="shrinks"
    )
    running.cancel()
