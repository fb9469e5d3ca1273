"""Brokers whose etcd was restored from a snapshot that is older than everything they have written.

Real brokers, a real etcd and a real snapshot, taken after the topic's creation and before its first leader.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
from pathlib import Path

import pytest

from kproxy.broker.cluster import ClusterView
from kproxy.broker.config import BrokerConfig
from kproxy.broker.keys import Keys
from kproxy.broker.topics import NewTopic, TopicAdmin, TopicOutcome
from kproxy_codec import error_codes
from tests.support.brokers.faulty_site import FaultySite, faulty_site
from tests.support.brokers.reference_broker import RawClient
from tests.support.clients.attempts import stored
from tests.support.etcd.etcd_cluster import running_cluster
from tests.support.waiting import PATIENCE_S
from tests.support.wire.record_batches import build_batch

# A machine that stalls for seconds ends no lease; the test ends those of dead brokers.
TTL_S = 60
PREFIX = "/restored"
REPLICAS = (1, 2, 3)
VALUES = [b"v%d" % number for number in range(40)]


async def create_topic_unseen(site: FaultySite, snapshot: Path) -> None:
    """Create the topic while no broker can take its partition, and save that state of etcd."""
    for broker in site.brokers.values():
        broker.signal(signal.SIGSTOP)
    view = ClusterView(Keys(PREFIX))
    admin = TopicAdmin(site.client, view, BrokerConfig(1, Path("unused"), ("unused",)))
    planned = await admin.plan(NewTopic("t", assignments=[REPLICAS]))
    assert not isinstance(planned, TopicOutcome)
    assert (await admin.create("t", planned)).error_code == error_codes.NONE
    await site.etcd.snapshot(snapshot)
    for broker in site.brokers.values():
        broker.signal(signal.SIGCONT)


def produce(site: FaultySite, broker: int) -> None:
    client = RawClient(*site.brokers[broker].client_address)
    try:
        for offset, value in enumerate(VALUES):
            result = client.produce("t", 0, build_batch([value]), acks=-1)
            assert result is not None
            assert (result.error_code, result.base_offset) == (error_codes.NONE, offset)
    finally:
        client.close()


@pytest.mark.timeout(180)
async def test_wiped_broker_does_not_lead_after_restore(tmp_path: Path) -> None:
    async with running_cluster(tmp_path / "etcd") as etcd, faulty_site(etcd, PREFIX, tmp_path) as site:
        await site.add(REPLICAS, lease_ttl_s=TTL_S)
        await create_topic_unseen(site, tmp_path / "snapshot")
        leader = await site.led_by("t", 0, REPLICAS)
        await site.in_sync("t", 0, REPLICAS)
        await asyncio.to_thread(produce, site, leader)
        for node_id in REPLICAS:
            await site.brokers[node_id].down()
        await etcd.restore(tmp_path / "snapshot", same_cluster=False)
        for node_id in REPLICAS:
            await site.end_lease(node_id)
        shutil.rmtree(site.brokers[1].data_dir)
        await site.brokers[1].up()
        with pytest.raises(AssertionError):
            await site.led_by("t", 0, [1], 5.0)
        for node_id in (2, 3):
            await site.brokers[node_id].up()
        leader = await site.led_by("t", 0, [2, 3], 2 * PATIENCE_S)
        assert [each.value for each in stored(site.log_bytes(leader, "t"))] == VALUES
        await site.in_sync("t", 0, REPLICAS)
        assert [each.value for each in await site.same_logs("t", 0, REPLICAS)] == VALUES
