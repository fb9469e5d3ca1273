"""The lease table against a real etcd: current, refreshed after a refusal, with its true age."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from structlog.testing import capture_logs

from kproxy.cli import table_sources
from kproxy.cli.table_sources import NoAnswer, tables_from_etcd
from kproxy.config.etcd import EtcdOptions
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import (
    EtcdClient,
    EtcdUnavailable,
    LeaseLost,
    TxnCompare,
    TxnOp,
    TxnResult,
    key_absent,
    put_op,
)
from kproxy.etcd.lease import lease_keep_alive
from kproxy.observe.table import TablePage
from kproxy.ownership.lease_keys import MAX_TOPIC_VALUE_BYTES
from kproxy.ownership.leases import REREAD_KEYS, LeaseTable
from kproxy.routing.topology import NO_OWNER, Address, Topology
from kproxy.security.broker_auth import BrokerAuth
from tests.support.etcd.embedded import Relay, compact, connected, kill, own_etcd, put_many, running
from tests.support.etcd.leases import lease_key, owners
from tests.support.waiting import PATIENCE_S, eventually
from tests.unit.ownership.test_kafka_metadata import ScriptedBroker, partition, topic


@asynccontextmanager
async def table_of(
    client: EtcdClient, prefix: str = "/k", **options: Any
) -> AsyncIterator[tuple[LeaseTable, Topology]]:
    topology = Topology()
    table = LeaseTable(client, prefix, topology, **options)
    assert table.stale
    async with running(table.run()):
        await asyncio.wait_for(table.wait_synced(), PATIENCE_S)
        yield table, topology


async def test_owners_and_brokers_follow_their_leases(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    lease = await etcd_client.lease_grant(30)
    value = json.dumps({"node_id": 1, "host": "127.0.0.1", "port": 9092}).encode()
    await etcd_client.put(f"{etcd_prefix}/brokers/1", value, lease_id=lease.lease_id)
    await etcd_client.put(lease_key(etcd_prefix, "t", 0), b"1", lease_id=lease.lease_id)
    async with table_of(etcd_client, etcd_prefix) as (table, topology):
        assert owners(topology) == {("t", 0): 1}
        assert topology.address(1) == Address("127.0.0.1", 9092)
        assert not table.stale
        await etcd_client.put(lease_key(etcd_prefix, "t", 1), b"1", lease_id=lease.lease_id)
        await eventually(lambda: owners(topology) == {("t", 0): 1, ("t", 1): 1})
        # Other keys under the prefix do not affect this table.
        await etcd_client.put(f"{etcd_prefix}/topics/t/partitions/0/next_offset", b"7")
        await etcd_client.lease_revoke(lease.lease_id)
        await eventually(lambda: owners(topology) == {} and topology.brokers == {})
        assert not table.skipped


async def test_topic_ids_follow_topics_of_reference_brokers(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    def key(topic: str) -> str:
        return f"{etcd_prefix}/refbroker/topics/{topic}"

    def value(topic_id: uuid.UUID) -> bytes:
        return json.dumps({"topic_id": str(topic_id), "replicas": [[1]]}).encode()

    first, second, third = (uuid.uuid4() for _ in range(3))
    await etcd_client.put(key("t"), value(first))
    await etcd_client.put(lease_key(etcd_prefix, "t", 0), b"1")
    async with table_of(etcd_client, etcd_prefix) as (table, topology):
        assert topology.topic_ids == {b"t": first.bytes}
        assert topology.owner(first.bytes, 0) == 1
        # By event: another topic, a recreated topic, another topic's id, nonsense, and a deletion.
        await etcd_client.put(key("u"), value(second))
        await eventually(lambda: topology.topic_ids == {b"t": first.bytes, b"u": second.bytes})
        await etcd_client.delete(key("t"))
        await eventually(lambda: topology.topic_ids == {b"u": second.bytes})
        await etcd_client.put(key("t"), value(third))
        await eventually(lambda: topology.owner(third.bytes, 0) == 1 and topology.name_of(first.bytes) is None)
        for nonsense in (value(second), b"{}", b"\xff", b'{"topic_id": 7}', b"x" * (MAX_TOPIC_VALUE_BYTES + 1)):
            skipped = table.skipped.total()
            await etcd_client.put(key("t"), nonsense)
            await eventually(lambda before=skipped: table.skipped.total() == before + 1)
            assert topology.topic_ids == {b"u": second.bytes}, nonsense[:20]
            await etcd_client.put(key("t"), value(third))
            await eventually(lambda: topology.name_of(third.bytes) == b"t")
        await etcd_client.put(key("not/a/topic"), value(first))
        await eventually(lambda: table.skipped["not a topic name"] == 1)


async def test_refusal_is_answered_by_current_etcd_state(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    async with Relay(etcd_client.endpoints) as relay, connected(EtcdClient([relay.endpoint], timeout_s=3)) as client:
        first = await etcd_client.put(lease_key(etcd_prefix, "t", 0), b"1")
        async with table_of(client, etcd_prefix) as (table, topology):
            assert not await table.refresh(b"t", 0, first), "the owner is who it was: nothing to retry with"
            assert topology.owner(b"t", 0) == 1
            second = await etcd_client.put(lease_key(etcd_prefix, "t", 0), b"2")
            assert await table.refresh(b"t", 0, first)
            assert (topology.owner(b"t", 0), topology.owner_revision(b"t", 0)) == (2, second)
            # A late refusal of the first owner does not affect the second.
            assert await table.refresh(b"t", 0, first)
            assert topology.owner(b"t", 0) == 2
            await etcd_client.delete(lease_key(etcd_prefix, "t", 0))
            assert await table.refresh(b"t", 0, second)
            assert topology.owner(b"t", 0) == NO_OWNER
            for topic, partition_index in ((b"never", 0), (b"a/b", 0), (b"\xff", 0), (b"t", -1), (b"t", 2**31 - 1)):
                assert not await table.refresh(topic, partition_index, 0)
        assert not await table.refresh(b"t", 1, 0), "a table that is not kept current says so at once"


class CountingReads(EtcdClient):
    """Counts read-only transactions, which are the table's rereads."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        super().__init__(endpoints)
        self.keys_read: list[int] = []

    async def txn(
        self, compares: Sequence[TxnCompare], success: Sequence[TxnOp], failure: Sequence[TxnOp] = ()
    ) -> TxnResult:
        self.keys_read.append(len(success))
        return await super().txn(compares, success, failure)


async def test_refusals_at_one_time_share_their_reads(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    async with connected(CountingReads(etcd_client.endpoints.split(","))) as client:
        revision = await put_many(etcd_client, [(lease_key(etcd_prefix, "t", n), b"1") for n in range(300)])
        async with table_of(client, etcd_prefix) as (table, _):
            found = await asyncio.gather(*(table.refresh(b"t", n % 300, revision) for n in range(3000)))
            assert not any(found)
            assert sum(client.keys_read) == 300
            assert max(client.keys_read) == REREAD_KEYS
            assert len(client.keys_read) == 3


async def test_refresh_during_a_read_gets_a_later_read(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    async with connected(CountingReads(etcd_client.endpoints.split(","))) as client:
        revision = await etcd_client.put(lease_key(etcd_prefix, "t", 0), b"1")
        async with table_of(client, etcd_prefix) as (table, _):
            early = asyncio.ensure_future(table.refresh(b"t", 0, revision))
            await eventually(lambda: len(client.keys_read) == 1)
            late = [asyncio.ensure_future(table.refresh(b"t", 0, revision)) for _ in range(5)]
            # A caller that stops waiting does not affect the others.
            await asyncio.sleep(0)
            late[0].cancel()
            await asyncio.gather(early, *late, return_exceptions=True)
            assert client.keys_read == [1, 1]
            assert [each.result() for each in late[1:]] == [False] * 4


async def test_table_without_etcd_stays_and_reports_age(tmp_path: Path) -> None:
    async with own_etcd(tmp_path) as (server, client):
        await client.put(lease_key("/k", "t", 0), b"1")
        now = 0.0
        async with table_of(client, clock=lambda: now, stale_after_s=10) as (table, topology):
            assert table.age_s == 0
            await client.put(lease_key("/k", "t", 1), b"1")
            await eventually(lambda: topology.owner(b"t", 1) == 1, what="the watch is open")
            await kill(server)
            await eventually(lambda: isinstance(table.last_error, EtcdUnavailable))
            now = 10.5
            assert table.stale
            assert table.age_s == 10.5
            assert owners(topology) == {("t", 0): 1, ("t", 1): 1}
            refreshing = asyncio.ensure_future(table.refresh(b"t", 0, topology.revision))
            await server.start()
            assert not await refreshing
            await eventually(lambda: not table.stale)
            await client.put(lease_key("/k", "t", 0), b"2")
            await eventually(lambda: owners(topology) == {("t", 0): 2, ("t", 1): 1})
            assert table.restores == 0


async def test_hints_end_when_etcd_returns(tmp_path: Path) -> None:
    broker = ScriptedBroker()
    broker.is_reference = True
    broker.topics = [topic(partition(0, 2, 7), partition(1, 2, 7))]
    async with own_etcd(tmp_path) as (server, client), broker.serve():
        for index in (0, 1):
            await client.put(lease_key("/k", "t", index), b"1")
        address = {"node_id": 9, "host": "127.0.0.1", "port": broker.port}
        await client.put("/k/brokers/9", json.dumps(address).encode())
        late_s = 0.0
        late = {"clock": lambda: time.monotonic() + late_s, "access": BrokerAuth()}
        async with table_of(client, **late) as (table, topology):
            await table.refresh(b"t", 0, topology.revision)
            assert (broker.asked, owners(topology)) == (0, {("t", 0): 1, ("t", 1): 1})
            await kill(server)
            late_s = 10.0
            with capture_logs() as logs:
                for index in (0, 1):
                    await table.refresh(b"t", index, topology.owner_revision(b"t", index))
            assert [entry["event"] for entry in logs].count("lease table stale") == 1
            assert owners(topology) == {("t", 0): 2, ("t", 1): 2}
            assert 2 in topology.brokers
            await server.start()
            # One partition has moved, the other has not: its hint was wrong.
            await client.put(lease_key("/k", "t", 0), b"3")
            await eventually(lambda: owners(topology) == {("t", 0): 3, ("t", 1): 1})
            assert topology.brokers == {9: Address("127.0.0.1", broker.port)}
            assert not topology.is_hinted
            asked = broker.asked
            await table.refresh(b"t", 1, topology.owner_revision(b"t", 1))
            assert broker.asked == asked


async def test_table_equals_final_read_after_moves_and_kills(tmp_path: Path) -> None:
    async with own_etcd(tmp_path) as (server, client):
        chance = random.Random(7)
        moves = 0
        stopped = False

        async def brokers_come_and_go() -> None:
            nonlocal moves
            while not stopped:
                broker_id = chance.randrange(1, 4)
                try:
                    lease = await client.lease_grant(30)
                    for _ in range(10):
                        key = lease_key("/k", f"topic-{chance.randrange(3)}", chance.randrange(20))
                        await client.txn([key_absent(key)], [put_op(key, b"%d" % broker_id, lease.lease_id)])
                    if chance.random() < 0.8:
                        await client.lease_revoke(lease.lease_id)
                    moves += 1
                except EtcdUnavailable:
                    await asyncio.sleep(0.02)

        async with table_of(client) as (_, topology), running(brokers_come_and_go()) as moving:
            for compacting in (False, True):
                reached = moves + 10
                await eventually(lambda at=reached: moves >= at)  # type: ignore[misc]
                await kill(server)
                await server.start()
                if compacting:
                    await compact(client, (await client.status()).revision)
            reached = moves + 10
            await eventually(lambda: moves >= reached)
            stopped = True
            await moving
            final = (await client.get_prefix("/k/partition-leases/")).kvs
            wanted = {(kv.key.split("/")[-2], int(kv.key.split("/")[-1])): int(kv.value) for kv in final}
            await eventually(lambda: owners(topology) == wanted, what="the table equals the final read")
            revisions = {kv.key: kv.mod_revision for kv in final}
            assert {
                lease_key("/k", row.topic.decode(), row.partition_index): row.revision for row in topology.ownerships()
            } == revisions


async def test_refresh_detects_restored_etcd_before_watch(tmp_path: Path) -> None:
    async with own_etcd(tmp_path / "1") as (server, old), own_etcd(tmp_path / "2") as (_, restored):

        class Divided(EtcdClient):
            """Its watch stays on the old etcd while its transactions reach the restored one."""

            async def txn(
                self, compares: Sequence[TxnCompare], success: Sequence[TxnOp], failure: Sequence[TxnOp] = ()
            ) -> TxnResult:
                return await restored.txn(compares, success, failure)

        await old.put(lease_key("/k", "t", 0), b"1")
        await restored.put(lease_key("/k", "t", 0), b"2")
        async with connected(Divided([server.endpoint])) as client, table_of(client) as (table, topology):
            before = topology.revision
            assert not await table.refresh(b"t", 0, before)
            assert topology.owner(b"t", 0) == 1, "revisions of another history are not applied"
            await eventually(lambda: table.restores == 1)


async def test_refresh_detects_restored_etcd_with_newer_revision(tmp_path: Path) -> None:
    """Neither cluster id nor revision shows it; the refused key has an older change than known."""
    async with own_etcd(tmp_path) as (server, writer), Relay(server.endpoint) as relay:
        await writer.put(lease_key("/k", "t", 0), b"1")
        await server.stop()
        shutil.copytree(tmp_path / "data", tmp_path / "backup")
        await server.start()
        async with (
            connected(EtcdClient([relay.endpoint], timeout_s=3)) as client,
            table_of(client) as (table, topology),
        ):
            for owner in (b"2", b"3"):
                await writer.put(lease_key("/k", "t", 0), owner)
            await eventually(lambda: topology.owner(b"t", 0) == 3)
            await relay.shut()
            await kill(server)
            shutil.rmtree(tmp_path / "data")
            shutil.copytree(tmp_path / "backup", tmp_path / "data")
            await server.start()
            for _ in range(20):
                last = await writer.put(lease_key("/k", "other", 0), b"1")
            await relay.open()
            await writer.put(lease_key("/k", "later", 0), b"1")
            await eventually(lambda: topology.owner(b"later", 0) == 1, what="it watches again")
            assert topology.revision > last
            assert (topology.owner(b"t", 0), table.restores) == (3, 0), "it cannot know"
            await table.refresh(b"t", 0, topology.owner_revision(b"t", 0))
            await eventually(lambda: topology.owner(b"t", 0) == 1)
            assert (topology.owner(b"other", 0), table.restores) == (1, 1)


@pytest.mark.parametrize("loop_factory", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_leases_and_table_work_on_both_event_loops(
    etcd: EmbeddedEtcd, etcd_prefix: str, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def broker_and_proxy() -> None:
        async with connected(EtcdClient([etcd.endpoint])) as client:
            lease = await client.lease_grant(8)
            renewed: list[float] = []
            keep_alive = lease_keep_alive(
                client, lease.lease_id, clock=time.monotonic, on_renewed=lambda sent_at, ttl_s: renewed.append(sent_at)
            )
            renewing = asyncio.ensure_future(keep_alive)
            async with table_of(client, etcd_prefix) as (_, topology):
                await client.put(lease_key(etcd_prefix, "t", 0), b"1", lease_id=lease.lease_id)
                await eventually(lambda: owners(topology) == {("t", 0): 1} and len(renewed) > 1)
                await client.lease_revoke(lease.lease_id)
                await eventually(lambda: owners(topology) == {})
                with pytest.raises(LeaseLost):
                    await renewing

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(broker_and_proxy())


async def test_table_command_waits_only_for_progressing_load(
    etcd_client: EtcdClient, etcd_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_sources, "ANSWER_TIMEOUT_S", 0.001)
    await put_many(etcd_client, [(lease_key(etcd_prefix, "t", n), b"1") for n in range(1_000)])
    async with aclosing(tables_from_etcd([etcd_client.endpoints], EtcdOptions(), etcd_prefix, None)) as tables:
        table = await anext(tables)
        assert isinstance(table, TablePage), table
        assert [len(topic.partitions) for topic in table.topics] == [1_000]
    monkeypatch.setattr(LeaseTable, "last_error", EtcdUnavailable("no answer"))
    async with aclosing(tables_from_etcd([etcd_client.endpoints], EtcdOptions(), etcd_prefix, None)) as tables:
        unanswered = await anext(tables)
        assert isinstance(unanswered, NoAnswer)
        assert "could not be read" in str(unanswered)
