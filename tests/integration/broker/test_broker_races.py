"""Five brokers race for one lease, two hundred times: etcd's history shows the winner, and no other broker appends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kproxy.broker.keys import Keys, PartitionKey, StateValue, decode_value, node_ids
from kproxy.etcd import EtcdClient
from kproxy_codec.record_batch import iterate_batches
from tests.integration.broker.test_broker_leases import ANYBODYS, LOG_IDS, TOPIC, Member
from tests.support.brokers.topics import put_topic
from tests.support.etcd.embedded import connected
from tests.support.etcd.etcd_cluster import EtcdCluster
from tests.support.etcd.etcd_history import history
from tests.support.wire.record_batches import build_batch

RACES = 200
# All five are in one process, whose lease must not end while it waits for disks or the machine.
TTL_S = 120
RACERS = (1, 2, 3, 4, 5)
SEED = 7


@pytest.fixture
async def racers(etcd_cluster: EtcdCluster, etcd_prefix: str, tmp_path: Path) -> AsyncIterator[list[Member]]:
    """Each has its own connections to etcd and ignores changes of partitions, so that none gives way."""
    async with AsyncExitStack() as stack:
        members = []
        for node_id in RACERS:
            client = await stack.enter_async_context(connected(EtcdClient(etcd_cluster.endpoints, timeout_s=20.0)))
            member = Member(node_id, client, etcd_prefix, tmp_path, TTL_S)
            stack.push_async_callback(member.leave)
            await member.join()
            members.append(member)
        keys = Keys(etcd_prefix)
        await put_topic(members[0].client, keys, TOPIC, [ANYBODYS] * RACES, log_ids=LOG_IDS, leader_epoch=0)
        for member in members:
            await member.begin()
        yield members


async def race(member: Member, order: list[int]) -> dict[int, int]:
    """Take every partition and append at once to those obtained; return the assigned offset of each."""
    appended: dict[int, int] = {}

    async def run(partition: int) -> None:
        await member.manager.take([PartitionKey(TOPIC, partition)], 30)
        led = member.manager.led(TOPIC.encode(), partition)
        if led is not None:
            records = build_batch()
            [batch] = iterate_batches(records)
            result = led.append_as_leader(memoryview(records), batch)
            assert result.error_code == 0
            appended[partition] = result.base_offset

    await asyncio.gather(*map(run, order))
    return appended


async def test_one_of_five_racing_brokers_wins_each_lease(racers: list[Member]) -> None:
    keys, client = racers[0].keys, racers[0].client
    start = (await client.get_prefix(keys.leases)).revision
    # All in the same order, so that they compete for every partition.
    order = random.Random(SEED).sample(range(RACES), RACES)
    appended = await asyncio.gather(*(race(member, order) for member in racers))
    end = (await client.get_prefix(keys.leases)).revision

    won: dict[str, int] = {}
    for _, key, value in await history(client, keys.leases, start, end):
        assert value is not None, f"{key} was given up"
        assert key not in won, f"{key} was given to {won[key]}, then to {int(value)}"
        won[key] = int(value)
    assert len(won) == RACES
    states = [
        (key, decode_value(value or b"", StateValue))
        for _, key, value in await history(client, keys.states, start, end)
    ]
    assert len(states) == RACES, "a loser wrote a state"
    for _, state in states:
        assert (state.leader_epoch, tuple(node_ids(state.isr))) == (1, RACERS)

    for member, offsets in zip(racers, appended, strict=True):
        node_id = member.node_id
        mine = {partition for partition in range(RACES) if won[keys.lease(TOPIC, partition)] == node_id}
        assert offsets == dict.fromkeys(mine, 0), f"broker {node_id} appended elsewhere than it won"
        sizes = {
            partition: sum(
                file.stat().st_size for file in member.data_dir.partition_path(TOPIC, partition).glob("*.log")
            )
            for partition in range(RACES)
        }
        assert {partition for partition, size in sizes.items() if size} == mine, "a loser's log has bytes in it"
