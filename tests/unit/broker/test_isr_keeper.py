"""Writing in-sync replicas to etcd: the order of changes."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kproxy.broker.cluster import ClusterView
from kproxy.broker.keys import BrokerValue, Keys, StateValue, encode_value
from kproxy.broker.leader_epochs import Leadership
from kproxy.broker.log import Log
from kproxy.broker.partition import Partition, ReplicaSettings
from kproxy.broker.replication.isr_keeper import CONCURRENT_CHANGES, IsrKeeper
from kproxy.broker.replication.partition_replication import Isr
from kproxy.broker.writer_fence import KeptFence
from kproxy.etcd import EtcdUnavailable, put_op
from tests.support.brokers.replica_group import Fence, on_disk
from tests.support.models.simulated_etcd import EtcdStore, SimulatedEtcdClient
from tests.support.waiting import eventually

KEYS = Keys("/p")
TOPIC_ID = uuid.uuid4()


class RefusingClient(SimulatedEtcdClient):
    """Of some partitions etcd takes nothing."""

    refused: frozenset[str] = frozenset()

    async def txn(self, compares: Any, puts: Any, otherwise: Any = ()) -> Any:
        if any(put.message.request_put.key.decode() in self.refused for put in puts):
            raise EtcdUnavailable("not now", maybe_applied=False)
        return await super().txn(compares, puts, otherwise)


@pytest.fixture
def led(tmp_path: Path) -> Iterator[list[Partition]]:
    led = []
    for index in range(CONCURRENT_CHANGES + 2):
        log = Log.open(tmp_path / str(index))
        led.append(Partition("t", index, TOPIC_ID, log, ReplicaSettings(1, time.monotonic), on_disk(1).log_id))
    yield led
    for partition in led:
        partition.close()


async def test_partitions_whose_change_never_gets_through_do_not_keep_others_from_theirs(led: list[Partition]) -> None:
    client, view = RefusingClient(EtcdStore(time.monotonic)), ClusterView(KEYS)
    client.refused = frozenset(KEYS.state("t", index) for index in range(CONCURRENT_CHANGES))
    view.apply_put(KEYS.broker(1), encode_value(BrokerValue(1, "h", 1)), lease_id=7, revision=1)
    for partition in led:
        index = partition.partition_index
        state = encode_value(StateValue(0, [on_disk(1), on_disk(2)], TOPIC_ID))
        put = [put_op(KEYS.lease("t", index), b"1"), put_op(KEYS.state("t", index), state)]
        taken = await SimulatedEtcdClient.txn(client, [], put)
        isr = Isr(frozenset({on_disk(1), on_disk(2)}), taken.revision)
        partition.become_leader(Leadership(0, taken.revision), (1, 2), isr, Fence(), KeptFence())
    keeper = IsrKeeper(client, view, lambda: led, isr_lag_s=0.1, on_deposed=lambda _: None)
    running = asyncio.create_task(keeper.run())
    await eventually(
        lambda: all(each.replication.isr.members == {on_disk(1)} for each in led[CONCURRENT_CHANGES:]),
        timeout_s=10.0,
        what="the turn of the last ones",
    )
    assert all(each.replication.isr.members == {on_disk(1), on_disk(2)} for each in led[:CONCURRENT_CHANGES])
    running.cancel()
