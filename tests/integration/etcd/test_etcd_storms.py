"""Large changes to a table at once: changes missed by a stopped proxy, the end of a large lease, an outdated etcd."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kproxy.etcd import (
    EtcdClient,
    EtcdUnavailable,
    PrefixMirror,
    delete_op,
    put_op,
)
from kproxy.ownership.leases import LeaseTable
from kproxy.routing.topology import Topology
from kproxy_codec.api_keys import PRODUCE
from tests.support.brokers.scripted_upstream import answers_everything
from tests.support.clients.raw_client import RawClient, batch, produce_frame
from tests.support.etcd.embedded import compact, connected, put_many, running
from tests.support.etcd.etcd_cluster import EtcdCluster, running_cluster
from tests.support.etcd.etcd_history import Hearing
from tests.support.etcd.leases import Owners, lease_key, owners, owners_in_etcd
from tests.support.processes.dev import KproxyProcess, serving
from tests.support.processes.served import ServedBroker, page, port_of
from tests.support.waiting import PATIENCE_S, eventually

# Longer than any time-out involved: a watch is replaced after 8 s of silence, gRPC drops a connection after 9.
STOPPED_S = 11.0


def told(process: KproxyProcess) -> tuple[Owners, bool]:
    """The owners on the admin page, and whether the page marks them as stale."""
    status, text = page(process.admin, "/table")
    assert status == 200
    table = json.loads(text)
    rows = [(topic["name"], row) for topic in table["topics"] for row in topic["partitions"]]
    return {(name, row["partition"]): row["owner"] for name, row in rows}, table["stale"]


async def asked_of(process: KproxyProcess, *brokers: ServedBroker) -> int:
    """The id of the broker that receives a client's records for t-0."""
    before = {broker.node_id: len(broker.log) for broker in brokers}
    client = await RawClient().connect(port_of(process))
    client.send(produce_frame(records=batch(0)))
    assert (await client.answer()).codes == {("t", 0): 0}
    client.close()
    produced = {
        broker.node_id: [each for each in broker.log[before[broker.node_id] :] if each.header.api_key == PRODUCE]
        for broker in brokers
    }
    [owner] = [node_id for node_id, requests in produced.items() if requests]
    return owner


@pytest.mark.long
async def test_proxy_stopped_for_long_learns_missed_changes(
    etcd_cluster: EtcdCluster, etcd_prefix: str, tmp_path: Path
) -> None:
    """SIGSTOP; meanwhile owners move, leave and come, and etcd compacts their history."""
    async with connected(EtcdClient(etcd_cluster.endpoints)) as client:
        brokers = [await ServedBroker(node_id, answers_everything).start() for node_id in (1, 2)]
        for broker in brokers:
            value = {"node_id": broker.node_id, "host": "127.0.0.1", "port": broker.port}
            await client.put(f"{etcd_prefix}/brokers/{broker.node_id}", json.dumps(value).encode())
        await put_many(client, [(lease_key(etcd_prefix, "t", index), b"1") for index in range(100)])
        arguments = ["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--prefix", etcd_prefix]
        with serving([*arguments, "--etcd", ",".join(etcd_cluster.endpoints)], tmp_path / "stderr") as process:
            assert await asked_of(process, *brokers) == 1
            process.signal(signal.SIGSTOP)
            try:
                await client.txn([], [delete_op(lease_key(etcd_prefix, "t", index)) for index in range(50, 100)])
                moved = [put_op(lease_key(etcd_prefix, "t", index), b"2") for index in range(0, 50, 2)]
                revision = (await client.txn([], [*moved, put_op(lease_key(etcd_prefix, "new", 0), b"2")])).revision
                await compact(client, revision)
                await asyncio.sleep(STOPPED_S)
            finally:
                process.signal(signal.SIGCONT)
            wanted = await owners_in_etcd(client, etcd_prefix)
            assert len(wanted) == 51
            await eventually(lambda: told(process) == (wanted, False))
            assert await asked_of(process, *brokers) == 2
            assert "etcd restored" not in process.stderr()
        for broker in brokers:
            await broker.stop()


async def test_idle_etcd_still_counts_as_alive(etcd_cluster: EtcdCluster, etcd_prefix: str) -> None:
    """etcd sends no progress until a watcher's start revision, the one after the load's, exists."""
    async with connected(EtcdClient(etcd_cluster.endpoints)) as client:
        written = await client.put(f"{etcd_prefix}/a", b"")
        mirror = PrefixMirror(client, [f"{etcd_prefix}/"], Hearing(), progress_interval_s=0.1)
        async with running(mirror.run()):
            await mirror.wait_synced()
            loaded = mirror.last_heard
            await eventually(lambda: mirror.last_heard > loaded + 1, what="signs of life")
            assert mirror.last_error is None
        assert (await client.get_snapshot(f"{etcd_prefix}/a")).revision == written, "nobody wrote"


class LongestStall:
    """How long the event loop was blocked by computing, in seconds of its thread's CPU time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def watch(self) -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.005)
            self.seconds = max(self.seconds, time.thread_time() - began)


# Both exceed one etcd message.
@pytest.mark.parametrize("count", [pytest.param(100_000, marks=pytest.mark.long), 30_000])
async def test_many_leases_ending_at_once_reach_the_table(
    etcd_cluster: EtcdCluster, etcd_prefix: str, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    async with connected(EtcdClient(etcd_cluster.endpoints, timeout_s=60)) as client:
        lease = await client.lease_grant(120)
        items = [(lease_key(etcd_prefix, f"topic-{n // 1000}", n % 1000), b"1") for n in range(count)]
        await put_many(client, items, lease.lease_id)
        topology = Topology()
        table = LeaseTable(client, etcd_prefix, topology)
        stall = LongestStall()
        async with running(table.run()):
            await asyncio.wait_for(table.wait_synced(), 2 * PATIENCE_S)
            assert topology.owned_count == count
            async with running(stall.watch()):
                began = time.monotonic()
                with suppress(EtcdUnavailable):
                    # A busy machine may exceed etcd's request timeout; the lease ends anyway.
                    await client.lease_revoke(lease.lease_id)
                # Owners that take over right after it must not count as ended.
                taken = [(lease_key(etcd_prefix, f"topic-{n}", n), b"2") for n in range(100)]
                await put_many(client, taken)
                await eventually(
                    lambda: topology.owned_count == 100, timeout_s=2 * PATIENCE_S, what="all others are gone"
                )
                took = time.monotonic() - began
            assert owners(topology) == {(f"topic-{n}", n): 2 for n in range(100)}
            assert owners(topology) == await owners_in_etcd(client, etcd_prefix)
            assert not table.skipped
        with capsys.disabled():
            print(f"\n{count} leases gone after {took:.2f} s, longest stall of the loop {stall.seconds * 1000:.0f} ms")
        # A noticeable stall on a slow machine; the value is printed.
        assert stall.seconds < 4


@pytest.mark.parametrize(
    ("same_cluster", "bump_revision"),
    [
        pytest.param(True, 0, id="the-same-cluster-id"),
        pytest.param(False, 0, id="another-cluster-id"),
        # As advised by etcd's manual: nothing decreases except the keys' revisions.
        pytest.param(True, 1_000_000, id="the-same-cluster-id-and-a-higher-revision"),
    ],
)
async def test_etcd_restored_from_snapshot_restores_the_table(
    tmp_path: Path, same_cluster: bool, bump_revision: int
) -> None:
    async with running_cluster(tmp_path / "etcd") as cluster, connected(EtcdClient(cluster.endpoints)) as client:
        await put_many(client, [(lease_key("/p", "t", index), b"1") for index in range(10)])
        await cluster.snapshot(tmp_path / "snapshot")
        topology = Topology()
        table = LeaseTable(client, "/p", topology)
        async with running(table.run()):
            await asyncio.wait_for(table.wait_synced(), PATIENCE_S)
            # A history that will be lost: moved, gone, new.
            await put_many(client, [(lease_key("/p", "t", index), b"2") for index in range(5)])
            await client.delete(lease_key("/p", "t", 9))
            await client.put(lease_key("/p", "later", 0), b"3")
            await eventually(lambda: topology.owner(b"later", 0) == 3)
            later = topology.revision
            await cluster.restore(tmp_path / "snapshot", same_cluster=same_cluster, bump_revision=bump_revision)
            truth = await owners_in_etcd(client, "/p")
            assert truth == {("t", index): 1 for index in range(10)}
            await eventually(lambda: owners(topology) == truth, what="what etcd says now")
            assert table.restores == 1
            assert (topology.revision < later) is not bool(bump_revision)
            # It then follows the new history.
            await client.put(lease_key("/p", "t", 0), b"4")
            await eventually(lambda: topology.owner(b"t", 0) == 4)
