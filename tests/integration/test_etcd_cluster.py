"""The lease table before a real cluster of three etcd members that fail in every way members fail."""

from __future__ import annotations

from pathlib import Path

from kproxy.ownership.etcd import EtcdClient
from tests.support.etcd_cluster import EtcdCluster, running_cluster


async def test_members_fail_and_come_back(etcd_cluster: EtcdCluster) -> None:
    client = EtcdClient(etcd_cluster.endpoints)
    await client.connect()
    first = await client.put("k", b"1")
    leader = etcd_cluster.leader()
    leader.kill()
    assert etcd_cluster.leader() is not leader
    assert await client.put("k", b"2") > first
    etcd_cluster.start_member(leader)
    await etcd_cluster.healthy()
    await client.close()


async def test_restore(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        client = EtcdClient(cluster.endpoints)
        await client.connect()
        await client.put("k", b"1")
        await cluster.snapshot(tmp_path / "db")
        await client.put("k", b"2")
        before = await client.status()
        await cluster.restore(tmp_path / "db", same_cluster=True)
        after = await client.status()
        assert after.cluster_id == before.cluster_id
        assert after.revision < before.revision
        await cluster.restore(tmp_path / "db", same_cluster=False)
        assert (await client.status()).cluster_id != before.cluster_id
        kv = await client.get("k")
        assert kv is not None
        assert kv.value == b"1"
        await client.close()
