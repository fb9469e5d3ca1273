"""The client against a real etcd: the result of each call, and the error when it fails."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import (
    EtcdClient,
    EtcdUnavailable,
    LeaseLost,
    TxnCompare,
    create_revision_is,
    delete_op,
    get_op,
    key_absent,
    lease_is,
    mod_revision_is,
    put_op,
)
from kproxy.etcd import client as client_module
from kproxy.etcd.errors import Compacted, TooLarge
from tests.support.etcd.embedded import compact, connected, freeze, kill, own_etcd, put_many


async def test_key_is_put_read_changed_and_deleted(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    key = f"{etcd_prefix}/key"
    assert await etcd_client.get(key) is None
    created = await etcd_client.put(key, b"one")
    changed = await etcd_client.put(key, b"two")
    found = await etcd_client.get(key)
    assert found is not None
    assert found == (key, b"two", created, changed, 2, 0)
    assert changed > created
    assert await etcd_client.delete(key)
    assert not await etcd_client.delete(key)
    assert await etcd_client.get(key) is None


async def test_keys_and_values_are_bytes(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    key = f"{etcd_prefix}/\udcff\udc80é"
    await etcd_client.put(key, b"\x00\xff")
    found = await etcd_client.get(key)
    assert found is not None
    assert (found.key, found.value) == (key, b"\x00\xff")


async def test_prefix_pages_are_read_at_one_revision(
    etcd_client: EtcdClient, etcd_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PAGE_KEYS", 7)
    items = [(f"{etcd_prefix}/k/{n:04d}", b"%d" % n) for n in range(100)]
    revision = await put_many(etcd_client, items)
    await etcd_client.put(f"{etcd_prefix}/k0", b"not under the prefix")
    await etcd_client.delete(items[50][0])
    await etcd_client.put(items[51][0], b"changed")
    then = await etcd_client.get_prefix(f"{etcd_prefix}/k/", revision=revision)
    assert [(kv.key, kv.value) for kv in then.kvs] == items
    assert then.revision == revision
    now = await etcd_client.get_prefix(f"{etcd_prefix}/k/")
    assert len(now.kvs) == 99
    assert now.revision >= revision + 3


async def test_later_pages_ignore_concurrent_changes(
    etcd_client: EtcdClient, etcd_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PAGE_KEYS", 2)
    items = [(f"{etcd_prefix}/{n:03d}", b"old") for n in range(60)]
    await put_many(etcd_client, items)
    reading = asyncio.ensure_future(etcd_client.get_prefix(f"{etcd_prefix}/"))
    await asyncio.sleep(0.003)
    await put_many(etcd_client, [(key, b"new") for key, _ in items])
    snapshot = await reading
    assert len({kv.value for kv in snapshot.kvs}) == 1


@pytest.mark.parametrize(("late", "reads"), [({3}, 6), ({3, 4, 5, 6}, None), ({1}, None)])
async def test_late_page_is_requested_again_and_earlier_kept(
    etcd_client: EtcdClient, etcd_prefix: str, monkeypatch: pytest.MonkeyPatch, late: set[int], reads: int | None
) -> None:
    class Late(EtcdClient):
        """Some of its reads are not answered in time."""

        # Counted from the end of `connect` on.
        reads = -1_000

        async def _call(self, name: str, request: Any, *, write: bool) -> Any:
            self.reads += 1
            if self.reads in late:
                raise EtcdUnavailable("not in time")
            return await super()._call(name, request, write=write)

    monkeypatch.setattr(client_module, "PAGE_KEYS", 2)
    items = [(f"{etcd_prefix}/{n}", b"") for n in range(10)]
    await put_many(etcd_client, items)
    async with connected(Late(etcd_client.endpoints.split(","))) as client:
        client.reads = 0
        if reads is None:
            with pytest.raises(EtcdUnavailable):
                await client.get_prefix(f"{etcd_prefix}/")
            assert client.reads == max(late)
        else:
            found = (await client.get_prefix(f"{etcd_prefix}/")).kvs
            assert ([(kv.key, kv.value) for kv in found], client.reads) == (items, reads)


async def test_oversized_page_is_read_in_smaller_ones(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    async with connected(EtcdClient(etcd_client.endpoints.split(","), max_message_bytes=50_000)) as client:
        items = [(f"{etcd_prefix}/{n:03d}", bytes(10_000)) for n in range(100)]
        await put_many(client, items)
        assert [(kv.key, kv.value) for kv in (await client.get_prefix(f"{etcd_prefix}/")).kvs] == items
        await client.put(f"{etcd_prefix}/100", bytes(60_000))
        with pytest.raises(TooLarge):
            await client.get(f"{etcd_prefix}/100")
        with pytest.raises(TooLarge):
            await client.get_prefix(f"{etcd_prefix}/")


async def test_transaction_takes_one_branch_and_returns_results(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    key = f"{etcd_prefix}/key"
    lease = await etcd_client.lease_grant(60)
    first = await etcd_client.txn([key_absent(key)], [put_op(key, b"a", lease.lease_id)], [get_op(key)])
    second = await etcd_client.txn(
        [key_absent(key)], [put_op(key, b"b")], [get_op(key), get_op(key + "x"), delete_op(key)]
    )
    assert (first.succeeded, second.succeeded) == (True, False)
    found, *rest = second.found
    assert found is not None
    assert rest == [None, None]
    assert (found.value, found.lease_id, found.mod_revision) == (b"a", lease.lease_id, first.revision)
    assert await etcd_client.get(key) is None
    assert second.revision == first.revision + 1
    await etcd_client.lease_revoke(lease.lease_id)


async def test_each_comparison_holds_only_for_its_values(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    key = f"{etcd_prefix}/key"
    lease = await etcd_client.lease_grant(60)
    created = await etcd_client.put(key, b"1", lease_id=lease.lease_id)
    changed = await etcd_client.put(key, b"2", lease_id=lease.lease_id)

    async def holds(compare: TxnCompare) -> bool:
        return (await etcd_client.txn([compare], [])).succeeded

    assert not await holds(key_absent(key))
    assert await holds(key_absent(key + "x"))
    assert await holds(create_revision_is(key, created))
    assert not await holds(create_revision_is(key, changed))
    assert await holds(mod_revision_is(key, changed))
    assert not await holds(mod_revision_is(key, created))
    assert await holds(lease_is(key, lease.lease_id))
    assert not await holds(lease_is(key, 0))
    await etcd_client.lease_revoke(lease.lease_id)


async def test_one_of_many_creators_of_a_key_wins(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    key = f"{etcd_prefix}/key"
    tries = [etcd_client.txn([key_absent(key)], [put_op(key, b"%d" % n)], [get_op(key)]) for n in range(20)]
    results = await asyncio.gather(*tries)
    winners = [n for n, result in enumerate(results) if result.succeeded]
    assert len(winners) == 1
    losers_saw = {kv.value for result in results if not result.succeeded for kv in result.found if kv is not None}
    assert losers_saw == {b"%d" % winners[0]}


async def test_compacted_revision_has_its_own_error(tmp_path: Path) -> None:
    async with own_etcd(tmp_path) as (_, client):
        revisions = [await client.put("/a", b"%d" % n) for n in range(5)]
        await compact(client, revisions[-1])
        with pytest.raises(Compacted):
            await client.get_prefix("/", revision=revisions[0])


async def test_key_on_an_unknown_lease_is_refused(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    with pytest.raises(LeaseLost):
        await etcd_client.put(f"{etcd_prefix}/key", b"", lease_id=12345)
    with pytest.raises(LeaseLost):
        await etcd_client.txn([], [put_op(f"{etcd_prefix}/key", b"", 12345)])
    assert await etcd_client.get(f"{etcd_prefix}/key") is None


async def test_reads_survive_restart_and_interrupted_write_is_uncertain(tmp_path: Path) -> None:
    async with own_etcd(tmp_path) as (server, client):
        await client.put("/a", b"1")
        await freeze(server)
        writing = asyncio.ensure_future(client.put("/b", b"1"))
        reading = asyncio.ensure_future(client.get("/a"))
        await asyncio.sleep(0.1)
        await kill(server)
        with pytest.raises(EtcdUnavailable) as raised:
            await writing
        assert raised.value.maybe_applied
        assert server.endpoint in str(raised.value)
        await server.start()
        found = await reading
        assert found is not None
        assert found.value == b"1"
        # A call begun while no server listens waits, unsent, for etcd to return: that is unambiguous.
        await server.stop()
        waiting = asyncio.ensure_future(client.put("/c", b"1"))
        await asyncio.sleep(0.3)
        await server.start()
        assert await waiting > 0


async def test_hung_etcd_is_unavailable_within_the_deadline(tmp_path: Path) -> None:
    async with own_etcd(tmp_path) as (server, _):
        client = EtcdClient([server.endpoint], timeout_s=2)
        await client.connect()
        await freeze(server)
        try:
            with pytest.raises(EtcdUnavailable, match="did not answer Put in time") as raised:
                await client.put("/a", b"")
            assert raised.value.maybe_applied
            # Now it is known to hang: it gets no call before it answers again.
            with pytest.raises(EtcdUnavailable, match="did not answer Put in time") as raised:
                await client.put("/a", b"")
            assert not raised.value.maybe_applied
            with pytest.raises(EtcdUnavailable, match="did not answer Range in time") as raised:
                await client.get("/a")
            assert not raised.value.maybe_applied
            # Closing ends a call in flight with an error, not with a cancellation.
            hanging = asyncio.ensure_future(client.get("/a"))
            await asyncio.sleep(0.05)
            await client.close()
            with pytest.raises(EtcdUnavailable, match="closed"):
                await hanging
        finally:
            os.kill(server.pid, signal.SIGCONT)


async def test_any_of_several_members_is_enough(etcd: EmbeddedEtcd, etcd_prefix: str) -> None:
    async with connected(EtcdClient(["127.0.0.1:1", etcd.endpoint], timeout_s=30)) as client:
        for _ in range(20):
            await client.put(f"{etcd_prefix}/a", b"")


async def test_other_server_is_not_taken_for_etcd() -> None:
    async def not_etcd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(not_etcd, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = EtcdClient([f"127.0.0.1:{port}"], timeout_s=0.5)
    with pytest.raises(EtcdUnavailable, match=str(port)):
        await client.connect()
    await client.close()
    server.close()
