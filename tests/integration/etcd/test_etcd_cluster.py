"""A mirror and a lease table with three real etcd members that fail in every way.

The received events are compared with etcd's own history, as read afterwards by an undisturbed watcher.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from kproxy.etcd import EtcdClient, PrefixMirror
from kproxy.ownership.leases import LeaseTable
from kproxy.routing.topology import Topology
from tests.support.etcd.embedded import connected, running
from tests.support.etcd.etcd_cluster import EtcdCluster, running_cluster
from tests.support.etcd.etcd_history import Churn, Hearing, history
from tests.support.waiting import eventually

# The longest silence of etcd before a table must report it.
STALE_WITHIN_S = 5.0


async def test_no_change_is_lost_whichever_member_fails(etcd_cluster: EtcdCluster, etcd_prefix: str) -> None:
    prefix = f"{etcd_prefix}/"
    async with (
        connected(EtcdClient(etcd_cluster.endpoints, timeout_s=20.0)) as client,
        connected(EtcdClient(etcd_cluster.endpoints, timeout_s=1.0)) as writer,
    ):
        hearing = Hearing()
        began = await client.put(f"{prefix}first", b"")
        mirror = PrefixMirror(client, [prefix], hearing)
        churn = Churn(writer, prefix, seed=7)
        async with running(mirror.run()):
            await mirror.wait_synced()
            async with running(churn.run()) as writing:
                # The leader first, then the others: each election may choose a different leader.
                for member in (etcd_cluster.leader(), *etcd_cluster.followers()):
                    await churn.goes_on()
                    member.kill()
                    await churn.goes_on()
                    etcd_cluster.start_member(member)
                    await etcd_cluster.healthy()
                await churn.goes_on()
                churn.stop()
                await writing
            ended = await client.put(f"{prefix}last", b"")
            await eventually(lambda: hearing.changes[-1][0] == ended, what="it has caught up")
        truth = await history(client, prefix, began, ended)
    # A revision split by a break may be received twice; no other, and none out of order.
    once = [change for n, change in enumerate(hearing.changes) if n == 0 or change != hearing.changes[n - 1]]
    assert once == truth
    assert set(churn.acknowledged) <= set(truth)
    assert (hearing.snapshots, hearing.restores) == (1, 0), "it went on where it was, and did not begin anew"


@pytest.mark.parametrize(
    "hang", [pytest.param(True, id="hung"), pytest.param(False, id="killed", marks=pytest.mark.long)]
)
async def test_table_without_etcd_majority_is_stale_and_recovers(tmp_path: Path, hang: bool) -> None:
    """The remaining member answers what it can alone: that must not count as etcd's answer."""
    async with running_cluster(tmp_path) as cluster, connected(EtcdClient(cluster.endpoints, timeout_s=20.0)) as client:
        await client.put("/p/partition-leases/t/0", b"1")
        topology = Topology()
        table = LeaseTable(client, "/p", topology)
        async with running(table.run()):
            await table.wait_synced()
            # Long enough for each of its periods to pass once.
            await asyncio.sleep(3)
            await eventually(lambda: not table.stale, what="not stale")
            down = [cluster.leader(), cluster.followers()[0]]
            lost_at = time.monotonic()
            for member in down:
                if hang:
                    await member.freeze()
                else:
                    member.kill()
            await eventually(lambda: table.stale, what="stale")
            assert time.monotonic() - lost_at < STALE_WITHIN_S + 30
            age = table.age_s
            await asyncio.sleep(2)
            assert table.stale
            assert table.age_s > age + 1.5, "nobody is heard, so it grows older"
            assert topology.owner(b"t", 0) == 1, "what was known serves on"
            for member in down:
                if hang:
                    member.thaw()
                else:
                    cluster.start_member(member)
            await cluster.healthy()
            async with connected(EtcdClient(cluster.endpoints, timeout_s=20.0)) as other:
                await other.put("/p/partition-leases/t/0", b"2")
            await eventually(lambda: topology.owner(b"t", 0) == 2, what="it follows again")
            await eventually(lambda: not table.stale, what="not stale")
            assert table.restores == 0
