"""A proxy's entry in etcd and its view of the other proxies, against a real etcd."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient, TxnCompare, TxnOp, TxnResult
from kproxy.fleet.registration import Registrar, RegistrarState, proxies_prefix
from kproxy.fleet.view import FleetView, alone
from kproxy.routing.fleet import FIRST_NODE_ID, Fleet, Proxy
from tests.support.etcd.embedded import Relay, connected, own_etcd, running
from tests.support.waiting import PATIENCE_S, eventually

TTL_S = 8
HOST = "proxy.test"


class Member:
    """A registrar and a view with one address."""

    def __init__(self, client: EtcdClient, prefix: str, port: int) -> None:
        self.fleet = Fleet([alone(HOST, port)])
        self.counters = Counter[str]()
        self.view = FleetView(client, prefix, self.fleet, HOST, port, counters=self.counters)
        self.registrar = Registrar(client, prefix, HOST, port, ttl_s=TTL_S)

    @property
    def named(self) -> dict[int, int]:
        """Ports by id."""
        return {each.node_id: each.port for each in self.fleet.proxies}


@asynccontextmanager
async def member(client: EtcdClient, prefix: str, port: int) -> AsyncIterator[Member]:
    one = Member(client, prefix, port)
    async with running(one.view.run()), running(one.registrar.run()):
        async with asyncio.timeout(PATIENCE_S):
            await one.registrar.wait_entered()
            await one.view.wait_named()
        yield one


async def entries(client: EtcdClient, prefix: str) -> dict[int, int]:
    """Ports by id, as stored in etcd."""
    kvs = (await client.get_prefix(proxies_prefix(prefix))).kvs
    return {int(kv.key.rpartition("/")[2]): json.loads(kv.value)["port"] for kv in kvs}


def entry(node_id: int, port: int, **more: Any) -> bytes:
    return json.dumps({"node_id": node_id, "host": HOST, "port": port, **more}).encode()


FIRST, SECOND, THIRD = range(FIRST_NODE_ID, FIRST_NODE_ID + 3)


async def test_all_proxies_are_named_until_they_end(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    async with AsyncExitStack() as stack:
        members = [await stack.enter_async_context(member(etcd_client, etcd_prefix, port)) for port in (1, 2)]
        expected = {FIRST: 1, SECOND: 2}
        async with member(etcd_client, etcd_prefix, 3) as third:
            for each in (*members, third):
                await eventually(lambda each=each: each.named == {**expected, THIRD: 3})
        # The lease is revoked when a registrar has ended.
        assert await entries(etcd_client, etcd_prefix) == expected
        for each in members:
            await eventually(lambda each=each: each.named == expected)


async def test_key_and_value_match_the_documentation(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    async with member(etcd_client, etcd_prefix, 9092):
        found = await etcd_client.get(f"{etcd_prefix}/kproxy/proxies/1000000")
        assert found is not None
        assert json.loads(found.value) == {"node_id": 1_000_000, "host": HOST, "port": 9092}
        assert found.lease_id != 0, "it stands on a lease"


async def test_simultaneously_started_proxies_get_different_ids(etcd: EmbeddedEtcd, etcd_prefix: str) -> None:
    async with AsyncExitStack() as whole:
        clients = [await whole.enter_async_context(connected(EtcdClient([etcd.endpoint]))) for _ in range(3)]
        for attempt in range(20):
            prefix = f"{etcd_prefix}/{attempt}"
            registrars = [Registrar(client, prefix, HOST, port, ttl_s=60) for port, client in enumerate(clients, 1)]
            async with AsyncExitStack() as stack:
                for registrar in registrars:
                    await stack.enter_async_context(running(registrar.run()))
                async with asyncio.timeout(PATIENCE_S):
                    await asyncio.gather(*(registrar.wait_entered() for registrar in registrars))
                assert {registrar.node_id for registrar in registrars} == {FIRST, SECOND, THIRD}
                assert await entries(clients[0], prefix) == {
                    registrar.node_id: port for port, registrar in enumerate(registrars, 1)
                }


async def left_behind(client: EtcdClient, prefix: str, node_id: int, port: int) -> None:
    """The entry of a killed proxy, whose lease lives on for a while."""
    lease = await client.lease_grant(600)
    await client.put(f"{proxies_prefix(prefix)}{node_id}", entry(node_id, port), lease_id=lease.lease_id)


async def test_returning_proxy_gets_its_id_before_lease_ends(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    await left_behind(etcd_client, etcd_prefix, FIRST, 1)
    await left_behind(etcd_client, etcd_prefix, SECOND, 2)
    async with member(etcd_client, etcd_prefix, 2) as back:
        assert back.registrar.state is RegistrarState.REGISTERED
        assert back.registrar.node_id == SECOND
    assert await entries(etcd_client, etcd_prefix) == {FIRST: 1}, "the entry stood on the new lease and went with it"


async def test_held_id_goes_to_no_other_address(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    await left_behind(etcd_client, etcd_prefix, FIRST, 1)
    await etcd_client.put(f"{proxies_prefix(etcd_prefix)}{SECOND}", b"no sense")
    async with member(etcd_client, etcd_prefix, 7) as other:
        assert other.registrar.node_id == THIRD
        assert other.named == {FIRST: 1, THIRD: 7}


async def test_later_proxy_of_one_address_has_the_entry(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    with capture_logs() as logs:
        async with member(etcd_client, etcd_prefix, 1) as earlier:
            async with member(etcd_client, etcd_prefix, 1) as later:
                assert later.registrar.node_id == FIRST
                await eventually(lambda: earlier.registrar.state is RegistrarState.STANDING_BY)
                # They do not compete: three more rounds change nothing.
                held = await etcd_client.get(f"{proxies_prefix(etcd_prefix)}{FIRST}")
                await asyncio.sleep(3 * TTL_S / 4)
                assert await etcd_client.get(f"{proxies_prefix(etcd_prefix)}{FIRST}") == held
                assert later.registrar.state is RegistrarState.REGISTERED
                assert earlier.named == later.named == {FIRST: 1}
            # The later one has ended, and the earlier one is registered again with the same id.
            await eventually(lambda: earlier.registrar.state is RegistrarState.REGISTERED)
            assert await entries(etcd_client, etcd_prefix) == {FIRST: 1}
    said = [(each["log_level"], each["address"]) for each in logs if "--advertise" in each.get("advice", "")]
    assert [level for level, _ in said] == ["warning", "error"]
    assert all(address == "proxy.test:1" for _, address in said)


async def test_deleted_entry_is_put_back(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    async with member(etcd_client, etcd_prefix, 1) as one:
        await etcd_client.delete(f"{proxies_prefix(etcd_prefix)}{FIRST}")
        assert one.named == {FIRST: 1}, "a proxy does not drop itself"
        async with asyncio.timeout(PATIENCE_S):
            while await entries(etcd_client, etcd_prefix) != {FIRST: 1}:
                await asyncio.sleep(0.05)


# The port of a proxy, the entries that are put or, without a port, deleted one after another, and whom it names then.
VIEWS: dict[str, tuple[int, list[tuple[int, int | None, dict[int, int]]]]] = {
    "another has its id": (1, [(FIRST, 1, {FIRST: 1}), (FIRST, 2, {FIRST: 2}), (SECOND, 1, {FIRST: 2, SECOND: 1})]),
    # The last event has been received, and so has the deletion.
    "its own entry is deleted": (
        1,
        [
            (FIRST, 2, {FIRST: 2}),
            (SECOND, 1, {FIRST: 2, SECOND: 1}),
            (SECOND, None, {FIRST: 2, SECOND: 1}),
            (THIRD, 3, {FIRST: 2, SECOND: 1, THIRD: 3}),
        ],
    ),
    "an address stands twice": (9, [(SECOND, 1, {SECOND: 1}), (FIRST, 1, {FIRST: 1}), (FIRST, None, {SECOND: 1})]),
}


@pytest.mark.parametrize("what", VIEWS)
async def test_view_follows_each_entry(etcd_client: EtcdClient, etcd_prefix: str, what: str) -> None:
    port, steps = VIEWS[what]
    one = Member(etcd_client, etcd_prefix, port)
    async with running(one.view.run()):
        await one.view.wait_synced()
        for node_id, other, expected in steps:
            key = f"{proxies_prefix(etcd_prefix)}{node_id}"
            await (etcd_client.delete(key) if other is None else etcd_client.put(key, entry(node_id, other)))
            await eventually(lambda expected=expected: one.named == expected)


class Outrun(EtcdClient):
    """An event occurs between each read of the entries and the first claim after it."""

    def __init__(self, endpoint: str, happens: Callable[[], Awaitable[object]]) -> None:
        super().__init__([endpoint])
        self._happens: Callable[[], Awaitable[object]] | None = happens

    async def txn(
        self, compares: Sequence[TxnCompare], success: Sequence[TxnOp], failure: Sequence[TxnOp] = ()
    ) -> TxnResult:
        happens, self._happens = self._happens, None
        if happens is not None:
            await happens()
        return await super().txn(compares, success, failure)


@pytest.mark.parametrize("before", [None, entry(FIRST, 1)], ids=["was free", "was its own"])
async def test_entry_taken_by_another_is_left_alone(
    etcd: EmbeddedEtcd, etcd_client: EtcdClient, etcd_prefix: str, before: bytes | None
) -> None:
    key = f"{proxies_prefix(etcd_prefix)}{FIRST}"
    if before is not None:
        await etcd_client.put(key, before)
    async with (
        connected(Outrun(etcd.endpoint, lambda: etcd_client.put(key, entry(FIRST, 2)))) as client,
        member(client, etcd_prefix, 1) as one,
    ):
        assert one.registrar.node_id == SECOND
        assert await entries(etcd_client, etcd_prefix) == {FIRST: 2, SECOND: 1}


async def test_leaving_proxy_names_itself_only_when_alone(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    prefix = proxies_prefix(etcd_prefix)
    await etcd_client.put(f"{prefix}{FIRST}", entry(FIRST, 1))
    await etcd_client.put(f"{prefix}{SECOND}", entry(SECOND, 2))
    one = Member(etcd_client, etcd_prefix, 2)
    async with running(one.view.run()):
        await eventually(lambda: one.named == {FIRST: 1, SECOND: 2})
        one.view.leave()
        await etcd_client.delete(f"{prefix}{SECOND}")
        await eventually(lambda: one.named == {FIRST: 1})
        await etcd_client.delete(f"{prefix}{FIRST}")
        await eventually(lambda: one.named == {SECOND: 2})


SENSELESS = {
    "no id": ("x", b"{}"),
    "an id of a broker": ("1", entry(1, 5)),
    "not JSON": (str(THIRD), b"{"),
    "another id": (str(THIRD), entry(SECOND, 5)),
    "no port": (str(THIRD), json.dumps({"node_id": THIRD, "host": HOST}).encode()),
    "a port out of range": (str(THIRD), entry(THIRD, 70_000)),
    "no host": (str(THIRD), json.dumps({"node_id": THIRD, "host": "", "port": 5}).encode()),
    "too long": (str(THIRD), entry(THIRD, 5, more="x" * 5_000)),
}


@pytest.mark.parametrize(("key", "value"), SENSELESS.values(), ids=SENSELESS)
async def test_invalid_entries_are_skipped_and_counted(
    etcd_client: EtcdClient, etcd_prefix: str, key: str, value: bytes
) -> None:
    prefix = proxies_prefix(etcd_prefix)
    await etcd_client.put(f"{prefix}{key}", value)
    await etcd_client.put(f"{prefix}{FIRST}", entry(FIRST, 1, rack="later versions may say more"))
    one = Member(etcd_client, etcd_prefix, 9)
    async with running(one.view.run()):
        await one.view.wait_synced()
        assert one.named == {FIRST: 1}
        assert one.counters.total() == 1
        # An invalid value removes the entry.
        if key == str(THIRD):
            await etcd_client.put(f"{prefix}{THIRD}", entry(THIRD, 3))
            await eventually(lambda: one.named == {FIRST: 1, THIRD: 3})
            await etcd_client.put(f"{prefix}{THIRD}", value)
            await eventually(lambda: one.named == {FIRST: 1})
            assert one.counters.total() == 2


@pytest_asyncio.fixture
async def relay(etcd: EmbeddedEtcd) -> AsyncIterator[tuple[Relay, EtcdClient]]:
    """A client whose connection to etcd can be cut."""
    async with Relay(etcd.endpoint) as one, connected(EtcdClient([one.endpoint])) as client:
        yield one, client


async def test_proxy_cut_off_past_ttl_keeps_naming_others(
    relay: tuple[Relay, EtcdClient], etcd_client: EtcdClient, etcd_prefix: str
) -> None:
    way, client = relay
    async with member(etcd_client, etcd_prefix, 1) as other, member(client, etcd_prefix, 2) as one:
        everyone = {FIRST: 1, SECOND: 2}
        await eventually(lambda: one.named == other.named == everyone)
        await way.shut()
        await eventually(lambda: other.named == {FIRST: 1}, what="the end of its lease")
        assert one.named == everyone
        with capture_logs() as logs:
            await way.open()
            await eventually(lambda: other.named == everyone)
        assert "proxy entry lost" in [log["event"] for log in logs]
        assert one.named == everyone
        await eventually(lambda: one.registrar.state is RegistrarState.REGISTERED)


async def test_proxy_started_before_etcd_registers_later(tmp_path: Path) -> None:
    async with own_etcd(tmp_path) as (server, client), Relay(server.endpoint) as way:
        await way.shut()
        late = EtcdClient([way.endpoint], timeout_s=2)
        one = Member(late, "/late", 1)
        async with running(one.view.run()), running(one.registrar.run()):
            await asyncio.sleep(0.3)
            assert one.fleet.proxies == (Proxy(FIRST, HOST, 1),)
            assert one.registrar.state is RegistrarState.OUT
            await way.open()
            await late.connect()
            async with asyncio.timeout(PATIENCE_S):
                await one.view.wait_named()
            assert await entries(client, "/late") == {FIRST: 1}
        await late.close()


async def test_proxies_register_again_in_restored_etcd(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        old, old_client = await stack.enter_async_context(own_etcd(tmp_path / "old"))
        new, new_client = await stack.enter_async_context(own_etcd(tmp_path / "new"))
        way = await stack.enter_async_context(Relay(old.endpoint))
        client = await stack.enter_async_context(connected(EtcdClient([way.endpoint])))
        one = await stack.enter_async_context(member(client, "/k", 1))
        await old_client.put(f"{proxies_prefix('/k')}{SECOND}", entry(SECOND, 2))
        await eventually(lambda: one.named == {FIRST: 1, SECOND: 2})
        way.target(new.endpoint)
        await way.cut()
        async with asyncio.timeout(PATIENCE_S):
            while await entries(new_client, "/k") != {FIRST: 1}:
                await asyncio.sleep(0.05)
        await eventually(lambda: one.named == {FIRST: 1}, what="nobody knows of the other any more")
