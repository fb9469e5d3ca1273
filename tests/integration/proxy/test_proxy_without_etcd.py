"""A proxy that has lost etcd: it asks brokers that have it for leaders, and forgets the answers when etcd returns."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.brokers.faulty_site import FaultySite, faulty_site
from tests.support.clients.attempts import log_bytes
from tests.support.clients.idempotent_writers import IdempotentWriter
from tests.support.etcd.embedded import Relay
from tests.support.etcd.etcd_cluster import EtcdCluster
from tests.support.processes.dev import KproxyProcess, serving
from tests.support.processes.served import beside, counted, page
from tests.support.waiting import eventually

A, B = 1, 2
TTL_S = 2
TOPIC = "moved"
# A hang's limit: the writer's records are acknowledged within some seconds.
TIMEOUT_S = 60.0


@asynccontextmanager
async def cut_off(
    etcd: EtcdCluster, prefix: str, directory: Path
) -> AsyncIterator[tuple[FaultySite, Relay, KproxyProcess, IdempotentWriter]]:
    """A site, a proxy that reaches etcd only by a relay, and a client that writes."""
    async with faulty_site(etcd, prefix, directory) as site:
        await site.add((A, B), lease_ttl_s=TTL_S)
        await site.put_topic(TOPIC, [[A, B]], **{"min.insync.replicas": "1"})
        await site.led_by(TOPIC, 0, [A])
        await site.in_sync(TOPIC, 0, (A, B))
        way = Relay(etcd.members[0].endpoint)
        await way.open()
        try:
            arguments = ["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
            arguments += ["--etcd", way.endpoint, "--prefix", prefix]
            async with (
                beside(serving(arguments, directory / "serve.stderr")) as proxy,
                IdempotentWriter(proxy.kafka, TOPIC, 1) as writer,
            ):
                await asyncio.to_thread(writer.wait_for_more, 100)
                yield site, way, proxy, writer
        finally:
            await way.shut()


@pytest.mark.parametrize("how", ["silent", pytest.param("refused", marks=pytest.mark.long)])
async def test_writes_follow_a_leader_without_etcd(
    how: str, etcd_cluster: EtcdCluster, etcd_prefix: str, tmp_path: Path
) -> None:
    async with cut_off(etcd_cluster, etcd_prefix, tmp_path) as (site, way, proxy, writer):
        if how == "refused":
            await way.shut()
        else:
            way.blackhole()
        await site.brokers[A].down()
        await site.led_by(TOPIC, 0, [B])
        moved = time.monotonic()
        await asyncio.to_thread(writer.wait_for_more, 1, TIMEOUT_S)
        print(f"the first write {time.monotonic() - moved:.1f} s after the lead has moved")
        await asyncio.to_thread(writer.wait_for_more, 200, TIMEOUT_S)
        assert counted(proxy.admin, "kproxy_table_stale") == 1
        assert page(proxy.admin, "/readyz")[1].startswith("ready, degraded")
        # The leadership returns to A while the proxy can only ask the brokers.
        await site.brokers[A].up()
        await site.in_sync(TOPIC, 0, (A, B))
        await site.brokers[B].down()
        await site.led_by(TOPIC, 0, [A])
        await asyncio.to_thread(writer.wait_for_more, 200, TIMEOUT_S)
        await (way.open() if how == "refused" else way.restore())
        await eventually(lambda: counted(proxy.admin, "kproxy_table_stale") == 0, timeout_s=TIMEOUT_S)
        await asyncio.to_thread(writer.wait_for_more, 200, TIMEOUT_S)
        assert proxy.stderr().count("lease table stale") == 1
    assert writer.judge(0, log_bytes(tmp_path / str(A) / f"{TOPIC}-0")) == 0


async def test_missing_etcd_leaves_nothing_acknowledged(
    etcd_cluster: EtcdCluster, etcd_prefix: str, tmp_path: Path
) -> None:
    """The leases end, so no broker leads, and none names a leader."""
    async with cut_off(etcd_cluster, etcd_prefix, tmp_path) as (site, _, proxy, writer):
        try:
            for member in etcd_cluster.members:
                await member.freeze()
            await eventually(lambda: counted(proxy.admin, "kproxy_table_stale") == 1, timeout_s=TIMEOUT_S)
            acked = -1

            async def is_still() -> bool:
                nonlocal acked
                before, acked = acked, sum(map(len, writer.acked.values()))
                await asyncio.sleep(TTL_S)
                return acked == before

            await eventually(is_still, "the leases have ended", timeout_s=TIMEOUT_S)
            # Long enough for several questions to brokers.
            await asyncio.sleep(2 * TTL_S)
            assert sum(map(len, writer.acked.values())) == acked
            owners = json.loads(page(proxy.admin, f"/table?topic={TOPIC}")[1])
            assert owners["stale"]
            assert [row["owner"] for row in owners["topics"][0]["partitions"]] == [A]
        finally:
            for member in etcd_cluster.members:
                member.thaw()
            await etcd_cluster.healthy()
        await asyncio.to_thread(writer.wait_for_more, 200, TIMEOUT_S)
        leader = await site.led_by(TOPIC, 0, (A, B))
    assert writer.judge(0, log_bytes(tmp_path / str(leader) / f"{TOPIC}-0")) == 0
