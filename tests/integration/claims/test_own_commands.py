"""`kproxy own` and the admin page on real proxies and a real etcd: they show the true claims, and free them."""

from __future__ import annotations

import asyncio
import http.client
import signal
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from kproxy.claims.admin import free
from kproxy.claims.keys import ClaimValue, MemberValue, OwnKeys, encode_value
from kproxy.cli.options import AdminPlace
from kproxy.cli.own_sources import AdminClaims, Claims, EtcdClaims
from kproxy.cli.own_view import members_line
from kproxy.config import parse_address
from kproxy.config.etcd import EtcdOptions
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient, put_op
from kproxy.observe.table import MAX_CLAIM_ROWS, ClaimRow, ClaimsPage, FreeOrder
from kproxy_codec.error_codes import NONE, POLICY_VIOLATION, REQUEST_TIMED_OUT
from tests.support.claims.own_client import OwnClient
from tests.support.etcd.embedded import connected
from tests.support.processes.dev import KproxyProcess, run_kproxy
from tests.support.processes.served import counted, page, port_of
from tests.support.waiting import PATIENCE_S, eventually

# The answer to a claim that cannot be confirmed comes after this time.
OWN_TIMEOUT_S = 4.0
TOPIC = "gated"
HOST = "127.0.0.1"


class Site(NamedTuple):
    """Two proxies, the first of two workers, before a broker and an etcd."""

    etcd: str
    prefix: str
    one: KproxyProcess
    other: KproxyProcess

    @property
    def keys(self) -> OwnKeys:
        return OwnKeys(self.prefix)

    @property
    def at_etcd(self) -> EtcdClaims:
        return EtcdClaims([self.etcd], EtcdOptions(), self.prefix)

    @property
    def at_proxy(self) -> AdminClaims:
        return AdminClaims(AdminPlace(parse_address(self.one.admin, "admin")))

    @property
    def asks_etcd(self) -> list[str]:
        return ["--etcd", self.etcd, "--prefix", self.prefix]

    @property
    def asks_proxy(self) -> list[str]:
        return ["--admin", self.one.admin]


@pytest.fixture(scope="module")
def site(etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("own")
    prefix = f"/own-{uuid.uuid4().hex}"
    there = ["--etcd", etcd.endpoint, "--prefix", prefix, "--listen", "127.0.0.1:0", "--lease-ttl", "60"]
    config = directory / "kproxy.toml"
    config.write_text(f"[limits]\nown_timeout_s = {OWN_TIMEOUT_S}\n[own]\nwriter_group = '{TOPIC}=writers'\n")
    broker = ["broker", "--node-id", "1", "--replication-factor", "1", "--data-dir", str(directory / "data")]
    serve = ["serve", "--config", str(config), "--admin", "127.0.0.1:0", *there]
    commands = {"broker": [*broker, *there], "one": [*serve, "--workers", "2"], "other": serve}
    with ExitStack() as stack:
        # All at once: none waits for another.
        started = {name: KproxyProcess(arguments, directory / name) for name, arguments in commands.items()}
        for process in started.values():
            stack.callback(process.stop)
        for process in started.values():
            process.wait_ready()
        yield Site(etcd.endpoint, prefix, started["one"], started["other"])


@pytest.fixture
def group() -> str:
    """A group in which no other test has claims."""
    return f"g-{uuid.uuid4().hex}"


@asynccontextmanager
async def client(proxy: KproxyProcess, name: str) -> AsyncIterator[OwnClient]:
    made = await OwnClient.connect(HOST, port_of(proxy), client_id=name)
    try:
        yield made
    finally:
        await made.close()


async def claimed(owner: OwnClient, group: str, resources: Sequence[tuple[str, int]] | None) -> None:
    """Wait until all is granted, which may exceed the proxies' timeout on a busy machine."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        response = await owner.own(group, resources)
        codes = {each.error_code for each in response.resources}
        if REQUEST_TIMED_OUT not in codes:
            break
        assert time.monotonic() < deadline, response
        resources = None if resources is None else [(each, max(generation, 1)) for each, generation in resources]
    assert (response.error_code, codes) == (NONE, {NONE}), response


@contextmanager
def running(directory: Path, *arguments: str) -> Iterator[KproxyProcess]:
    """Run a command for the length of the block."""
    process = KproxyProcess(["own", *arguments], directory / f"stderr-{uuid.uuid4().hex}")
    try:
        yield process
    finally:
        process.stop()


async def told(process: KproxyProcess, part: str) -> None:
    """Wait until its stderr contains `part`."""
    await eventually(lambda: part in process.stderr(), process.stderr)


async def line_of(process: KproxyProcess) -> str:
    return (await asyncio.to_thread(process.read_line, PATIENCE_S)).rstrip("\n")


async def own(*arguments: str) -> tuple[int, list[str], list[str]]:
    """Run a command to its end; return its status and output lines."""
    ended = await asyncio.to_thread(run_kproxy, "own", *arguments)
    return ended.status, ended.stdout.splitlines(), ended.stderr.splitlines()


async def owned(claims: Claims, group: str) -> list[str]:
    """The owned resources of the group."""
    return [each.resource for each in (await claims.page(group)).claims]


async def until_owned(site: Site, group: str, resources: Sequence[str]) -> None:
    """Wait until exactly these are owned, and the proxy knows it."""
    deadline = time.monotonic() + PATIENCE_S
    for claims in (site.at_etcd, site.at_proxy):
        while (found := await owned(claims, group)) != list(resources):
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.02)


async def test_proxy_and_etcd_list_the_same_claims(site: Site, group: str) -> None:
    async with client(site.one, "first") as first, client(site.other, "second") as second:
        await claimed(first, group, [("x", 1), ("orders/0", 1)])
        await claimed(second, group, [("x", 5)])
        assert await first.wait_closed()
        async with client(site.one, "third") as third, client(site.one, "whole") as whole:
            await claimed(third, group, [("y ü", 1)])
            await claimed(whole, f"{group}/other", None)
            await until_owned(site, group, ["x", "y ü"])
            shown = []
            for where in (site.asks_proxy, site.asks_etcd):
                status, out, err = await own("list", "--json", *where)
                assert (status, err) == (0, [])
                shown.append(msgspec.json.decode("\n".join(out), type=ClaimsPage))
            for each in shown:
                rows = [
                    (claim.resource, claim.generation, named(claim), claim.address)
                    for claim in each.claims
                    if claim.group.startswith(group)
                ]
                assert rows == [
                    ("x", 5, "second", site.other.kafka),
                    ("y ü", 1, "third", site.one.kafka),
                    ("", 1, "whole", site.one.kafka),
                ]
                addresses = sorted(member.address for member in each.members)
                assert addresses == sorted([site.one.kafka] * 2 + [site.other.kafka])
            assert shown[0].claims == shown[1].claims
            status, out, _ = await own("list", "--group", f"{group}/other", *site.asks_proxy)
            assert [line.split()[1:3] for line in out if line.startswith(group)] == [["(whole", "group)"]]


def named(claim: ClaimRow) -> str:
    """The owner's name without its location."""
    return claim.client.partition("@")[0]


async def test_pages_are_read_and_freed_to_the_end(site: Site, group: str) -> None:
    names = [f"r{number:04}" for number in range(MAX_CLAIM_ROWS + 1)]
    async with connected(EtcdClient([site.etcd])) as etcd:
        value = encode_value(ClaimValue("57c", 1, 1))
        for first in range(0, len(names), 100):
            puts = [put_op(site.keys.claim(group, name), value) for name in names[first : first + 100]]
            await etcd.txn([], success=puts)
    await until_owned(site, group, names)
    status, out, err = await own("free", group, "--all", *site.asks_proxy)
    assert (status, len(out), err) == (0, len(names), [])
    assert await owned(site.at_etcd, group) == []


async def test_claim_is_held_until_interrupted(site: Site, group: str, tmp_path: Path) -> None:
    with running(tmp_path, "claim", group, "a", "b=7", "--bootstrap", site.one.kafka, "--client-id", "me") as holder:
        lines = [await line_of(holder), await line_of(holder)]
        shown = (await site.at_etcd.page(group)).claims
        # An unowned resource is granted with generation 1.
        assert lines == [f"{each.resource}: granted with generation 1, fence {each.fence}" for each in shown]
        assert [each.resource for each in shown] == ["a", "b"]
        assert set(map(named, shown)) == {"me"}
        await told(holder, f"Holding a, b of group {group} until Ctrl-C.")
        holder.signal(signal.SIGINT)
        assert await asyncio.to_thread(holder.wait) == 0
        assert holder.stderr().splitlines()[-1] == f"Ctrl-C: a, b of group {group} is free."
        await until_owned(site, group, [])


async def test_severed_holder_names_the_new_owner(site: Site, group: str, tmp_path: Path) -> None:
    asks = [*site.asks_proxy, "--bootstrap", site.one.kafka]
    # It asks once, and its worker may learn of the claim later than etcd.
    with running(tmp_path, "claim", group, "a", *site.asks_etcd, "--bootstrap", site.one.kafka) as holder:
        await line_of(holder)
        async with client(site.other, "successor") as successor:
            await claimed(successor, group, [("a", 4)])
            assert await asyncio.to_thread(holder.wait) == 3
            sentence = holder.stderr().splitlines()[-1]
            assert sentence.startswith(f"kproxy: severed: {site.one.kafka} has closed the connection")
            assert "a is owned by successor@" in sentence
            assert "with generation 4." in sentence
            # A claim with a lower generation gets the current one.
            await until_owned(site, group, ["a"])
            status, out, err = await own("claim", group, "a=3", *asks)
            assert (status, out) == (1, [])
            assert "a is refused: successor@" in err[0]
            assert "owns it with generation 4" in err[0]
            # Set by variables alone, both name one place; otherwise a page from a variable may be another proxy's.
            by_variables = {"KPROXY_BOOTSTRAP": site.one.kafka, "KPROXY_ADMIN": site.one.admin}
            ended = await asyncio.to_thread(run_kproxy, "own", "claim", group, "a=3", environ=by_variables)
            assert "a is refused: successor@" in ended.stderr
            by_flag = ("own", "claim", group, "a=3", "--bootstrap", site.one.kafka)
            ended = await asyncio.to_thread(run_kproxy, *by_flag, environ=by_variables)
            assert ended.status == 1
            assert "somebody owns it with a higher generation (`kproxy own list` shows who)" in ended.stderr
            assert not successor.closed


async def test_missing_partition_cannot_be_claimed_for_writing(site: Site) -> None:
    status, out, err = await own("claim", "writers", f"{TOPIC}/77", "--bootstrap", site.one.kafka)
    assert (status, out) == (1, [])
    assert err[0].startswith(f"kproxy: {TOPIC}/77 is refused: no broker has such a partition; create the topic")


async def test_freed_holder_reports_it(site: Site, group: str, tmp_path: Path) -> None:
    with running(tmp_path, "claim", group, "--all", "--bootstrap", site.one.kafka, *site.asks_etcd) as holder:
        assert (await line_of(holder)).startswith("(whole group): granted with generation 1, fence ")
        status, out, err = await own("free", group, "a", *site.asks_proxy)
        assert (status, out) == (1, [])
        assert "but the whole group is owned by kproxy-own@" in err[0]
        status, out, err = await own("free", group, "--all", *site.asks_proxy)
        assert (status, err) == (0, [])
        assert out[0].startswith(f"{group} (whole group) is free: kproxy-own@")
        assert await asyncio.to_thread(holder.wait) == 3
        assert "(whole group) of group" in holder.stderr().splitlines()[-1]


async def test_unconfirmed_claim_is_awaited(site: Site, group: str, tmp_path: Path) -> None:
    stuck = site.keys.member("57c")
    async with connected(EtcdClient([site.etcd])) as etcd, AsyncExitStack() as stack:
        await etcd.put(stuck, encode_value(MemberValue("nowhere", 9, seen=1)))
        stack.push_async_callback(etcd.delete, stuck)
        with running(tmp_path, "claim", group, "a=0", "--bootstrap", site.other.kafka) as holder:
            await told(holder, "a: claimed, but not confirmed")
            page = await site.at_etcd.page(group)
            assert "nowhere:9 [has confirmed no claim since revision 1]" in members_line(page)
            (claim,) = page.claims
            # It repeats the request for this claim.
            timed_out = 'kproxy_own_requests_total{outcome="timed_out"}'
            await eventually(lambda: counted(site.other.admin, timed_out) >= 2)
            assert holder.stderr().count("not confirmed") == 1
            await etcd.delete(stuck)
            assert await line_of(holder) == f"a: granted with generation 1, fence {claim.fence}"


@pytest.mark.parametrize("asks", ["asks_proxy", "asks_etcd"])
async def test_only_the_freed_owner_is_severed(site: Site, group: str, asks: str) -> None:
    where = getattr(site, asks)
    async with client(site.other, "owner") as owner, client(site.one, "neighbour") as neighbour:
        await claimed(owner, group, [("a", 1), ("b", 1)])
        await claimed(neighbour, group, [("c", 1)])
        status, out, err = await own("free", group, "a", "nothing", *where)
        assert status == 1
        assert [line.partition(":")[0] for line in out] == [f"{group} a is free"]
        assert "owner@" in out[0]
        assert err == [f"kproxy: nobody owns nothing of group {group}."]
        assert await owner.wait_closed()
        # All claims of the connection end with it.
        await until_owned(site, group, ["c"])
        assert not neighbour.closed
        status, _, err = await own("free", f"{group}-none", "--all", *where)
        assert (status, err) == (1, [f"kproxy: nobody owns anything of group {group}-none."])


class Interposing(EtcdClient):
    """Another client claims `key` again just before each transaction."""

    key, value = "", b""

    async def txn(self, *arguments: Any, **named: Any) -> Any:
        await self.put(self.key, self.value)
        return await super().txn(*arguments, **named)


async def test_claimant_during_a_free_keeps_its_claim(site: Site, group: str) -> None:
    async with connected(Interposing([site.etcd])) as etcd, client(site.one, "owner") as owner:
        await claimed(owner, group, [("a", 1), ("b", 1)])
        etcd.key = site.keys.claim(group, "a")
        found = await etcd.get(etcd.key)
        assert found is not None
        etcd.value = found.value
        outcome = await free(etcd, site.keys, FreeOrder(group))
        assert ([each.resource for each in outcome.freed], outcome.changed) == (["b"], ["a"])
        assert await owner.wait_closed()
        await etcd.delete(etcd.key)


@pytest.mark.parametrize("asks", ["asks_proxy", "asks_etcd"])
async def test_each_change_is_reported_at_once(site: Site, group: str, tmp_path: Path, asks: str) -> None:
    where: list[str] = getattr(site, asks)
    async with client(site.one, "first") as first, client(site.other, "second") as second:
        await claimed(first, group, [("a", 1)])
        with running(tmp_path, "watch", "--json", "--group", group, *where) as watch:

            async def change() -> tuple[str, str, int, str]:
                said = msgspec.json.decode(await line_of(watch))
                before = said["before"]["client"].partition("@")[0] if said["before"] else ""
                claim = said["claim"]
                return said["change"], claim["client"].partition("@")[0], claim["generation"], before

            assert await change() == ("is owned", "first", 1, "")
            await claimed(first, f"{group}", [("a", 2)])
            assert await change() == ("raised", "first", 2, "first")
            await claimed(second, group, [("a", 2)])
            assert await change() == ("taken over", "second", 2, "first")
            await claimed(second, group, [("a", 0)])
            assert await change() == ("reset", "second", 1, "second")
            await second.close()
            assert await change() == ("freed", "second", 1, "")
            async with client(site.one, "third") as third:
                await claimed(third, group, [("b", 1)])
                assert await change() == ("claimed", "third", 1, "")
            watch.signal(signal.SIGINT)
            assert await asyncio.to_thread(watch.wait) == 0
            assert watch.stderr() == ""


async def test_watch_prints_lines_for_people_too(site: Site, group: str, tmp_path: Path) -> None:
    with running(tmp_path, "watch", "--group", group, *site.asks_etcd) as watch:
        assert (await line_of(watch)).endswith(f"nobody owns anything of group {group}")
        assert "proxies offer the Own API" in await line_of(watch)
        assert (await line_of(watch)).endswith(f"writer groups: {TOPIC}=writers")
        assert (await line_of(watch)).split()[0] == "group"
        async with client(site.one, "first") as first:
            await claimed(first, group, [("a", 1)])
            line = await line_of(watch)
            assert f" {group} a claimed by first@" in line
            assert line[2] == line[5] == ":"
        assert f" {group} a freed, it was owned by first@" in await line_of(watch)
        # A process that dies removes its own entry along with its claims.
        async with connected(EtcdClient([site.etcd])) as etcd:
            lease_id = (await etcd.lease_grant(60)).lease_id
            value = encode_value(ClaimValue("57c", 1, 1, "late"))
            member = put_op(site.keys.member("57c"), encode_value(MemberValue("nowhere", 9)), lease_id)
            await etcd.txn([], success=[member, put_op(site.keys.claim(group, "a"), value, lease_id)])
            assert f" {group} a claimed by late (connection 1 of nowhere:9)" in await line_of(watch)
            await etcd.lease_revoke(lease_id)
        assert f" {group} a freed, it was owned by late (connection 1 of nowhere:9)" in await line_of(watch)


async def test_claim_outcomes_are_counted(site: Site, group: str) -> None:
    """At a proxy whose workers' counts are summed; the group is the topic's writer group."""

    def count(name: str) -> float:
        return counted(site.one.admin, name)

    async def grown(name: str, by: int, act: Callable[[], Awaitable[object]], before: float | None = None) -> None:
        wanted = (count(name) if before is None else before) + by
        await act()
        await eventually(lambda: count(name) >= wanted, name)
        assert count(name) == wanted, name

    async with client(site.one, "first") as first, client(site.one, "second") as second:
        await second.create_topic(TOPIC, 1)
        outcome = 'kproxy_own_requests_total{outcome="%s"}'
        await grown(outcome % "granted", 2, lambda: claimed(first, "writers", [(f"{TOPIC}/0", 1), ("x", 1)]))
        await grown(outcome % "refused", 1, lambda: second.own("writers", [("x", -1)]))
        await grown(outcome % "granted", 1, lambda: claimed(first, "writers", [("x", 2)]))
        await grown(outcome % "fenced", 1, lambda: second.own("writers", [("x", 1)]))
        assert (count("kproxy_own_claims "), count("kproxy_own_members ")) == (2, 3)
        gated = 'kproxy_own_gated_total{api="%s"}'
        await grown(gated % "PRODUCE", 1, lambda: refused(second.produce(TOPIC, 0, b"no")))
        await grown(gated % "FETCH", 1, lambda: refused(second.fetch(TOPIC, 0, 0)))
        released = count("kproxy_own_released_total")
        async with client(site.other, "third") as third:
            await grown("kproxy_own_severed_total", 1, lambda: claimed(third, "writers", [("x", 9)]))
            assert await first.wait_closed()
        await until_owned(site, "writers", [])
        assert count("kproxy_own_claims ") == 0
        # The partition's leader knows that there is no writer any more.
        await grown("kproxy_own_released_total", 1, lambda: asyncio.sleep(0), released)


async def refused(answer: Awaitable[Any]) -> None:
    assert (await answer).error_code == POLICY_VIOLATION


def post(admin: str, body: bytes, content_type: str = "application/json") -> tuple[int, str]:
    host, _, port = admin.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
    try:
        connection.request("POST", "/own/free", body, {"Content-Type": content_type})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_pages_refuse_invalid_requests(site: Site) -> None:
    for proxy in (site.one, site.other):
        for query in ("limit=0", "limit=x", "after=x", "after=%00"):
            assert page(proxy.admin, f"/own?{query}")[0] == 400, query
        assert page(proxy.admin, "/own/free")[0] == 405
        assert post(proxy.admin, b'{"group": "g", "resources": null}')[0] == 200
        for body in (
            b"",
            b"{}",
            b"[]",
            b'{"group": 1}',
            b'{"group": "g", "resource": "a"}',
            b'{"group": "g", "resources": [1]}',
        ):
            assert post(proxy.admin, body)[0] == 400, body
        status, text = post(proxy.admin, b'{"group": "g", "resources": ["%s"]}' % (b"a" * 40_000))
        assert (status, text) == (400, "the body has 40033 bytes; expected 32768 at most: name fewer claims\n")
        # A form on a web page in this machine's browser.
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            assert post(proxy.admin, b'{"group": "g"}', kind)[0] == 415
        assert page(proxy.admin, "/own?limit=1")[0] == 200
