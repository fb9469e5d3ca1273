"""A broker that returns with an empty disk, while requests of its predecessor are still in flight (KIP-903).

Real brokers, real etcd. Both faults together lost every acknowledged record before there were log ids: the late fetch
put the empty log into the ISR, and the leader died.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kproxy.etcd import EtcdError
from kproxy_codec import error_codes
from tests.support.brokers.faulty_site import FaultySite, faulty_site
from tests.support.brokers.reference_broker import RawClient
from tests.support.clients.attempts import stored
from tests.support.etcd.etcd_cluster import EtcdCluster
from tests.support.waiting import eventually
from tests.support.wire.record_batches import build_batch

# A machine that stalls for seconds ends no lease; the test ends those of dead brokers.
TTL_S = 60
# Longer than the test delays a follower's question.
LAG_S = 300.0
RECORDS = 20


@pytest_asyncio.fixture
async def site(etcd_cluster: EtcdCluster, etcd_prefix: str, tmp_path: Path) -> AsyncIterator[FaultySite]:
    async with faulty_site(etcd_cluster, etcd_prefix, tmp_path) as site:
        await site.add((1, 2, 3), lease_ttl_s=TTL_S, isr_lag_s=LAG_S)
        yield site


def produce(site: FaultySite, broker: int, values: list[bytes]) -> list[int]:
    """Return the offsets, each acknowledged by all in-sync replicas."""
    client = RawClient(*site.brokers[broker].client_address)
    try:
        offsets = []
        for value in values:
            result = client.produce("t", 0, build_batch([value]), acks=-1)
            assert result is not None
            assert result.error_code == error_codes.NONE
            offsets.append(result.base_offset)
        return offsets
    finally:
        client.close()


async def replace_disk(site: FaultySite, broker: int) -> None:
    """kill -9, and remove all its data."""
    await site.brokers[broker].down()
    shutil.rmtree(site.brokers[broker].data_dir)

    await site.end_lease(broker)


async def test_late_fetch_does_not_make_empty_disk_lead(site: FaultySite) -> None:
    await site.put_topic("t", [[2, 1, 3]])
    await site.led_by("t", 0, [2])
    await site.in_sync("t", 0, (1, 2, 3))
    values = [b"v%d" % number for number in range(RECORDS)]
    assert await asyncio.to_thread(produce, site, 2, values) == list(range(RECORDS))

    way = site.brokers[2].replication_way
    way.hold_questions()

    async def both_are_held() -> bool:
        return way.held == 2

    await eventually(both_are_held, ignored=(EtcdError,), what="the next question of each follower is under way")
    await replace_disk(site, 1)
    await site.in_sync("t", 0, (2, 3))
    await site.brokers[1].up()
    way.release_questions()
    # The log named by the late question is in sync for the leader, but no longer exists.
    await site.in_sync("t", 0, (1, 2, 3))
    await site.brokers[2].down()
    await site.end_lease(2)
    assert await site.led_by("t", 0, [1, 3]) == 3
    there = [(each.offset, each.value) for each in stored(site.log_bytes(3, "t"))]
    assert there == list(enumerate(values)), "what was acknowledged is not there"

    await way.restore()
    await site.in_sync("t", 0, (1, 3))
    assert await asyncio.to_thread(produce, site, 3, [b"more"]) == [RECORDS]
    await site.heal()
    await site.in_sync("t", 0, (1, 2, 3))
    assert [each.value for each in await site.same_logs("t", 0, (1, 2, 3))] == [*values, b"more"]


async def test_only_copy_is_not_restarted_on_empty_disk(site: FaultySite) -> None:
    """Consumers would read other records at the same offsets; the owner of the old disk may restore it."""
    await site.put_topic("t", [[1]])
    await site.led_by("t", 0, [1])
    await asyncio.to_thread(produce, site, 1, [b"v"])
    broker = site.brokers[1]
    kept = broker.data_dir.with_name("kept")
    await broker.down()
    shutil.copytree(broker.data_dir, kept)
    await replace_disk(site, 1)
    await broker.up()
    with pytest.raises(AssertionError):
        await site.led_by("t", 0, [1, 2, 3], 5)
    told = next(line for line in broker.log().splitlines() if "in-sync log lost" in line)
    assert "put the data directory back that was here" in told
    await replace_disk(site, 1)
    kept.rename(broker.data_dir)
    await broker.up()
    await site.led_by("t", 0, [1])
    assert await asyncio.to_thread(produce, site, 1, [b"w"]) == [1]
