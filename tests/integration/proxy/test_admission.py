"""A listener with SASL: requests before and after authentication, ends of sessions, and harmless strangers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from kproxy.config.access import parse_acls
from kproxy.config.quotas import parse_quotas
from kproxy.plain import compiled
from kproxy.proxy import server
from kproxy.proxy.access import AccessControl
from kproxy.security.acls import Rules, acls_of
from kproxy.security.mechanisms import Servers, servers
from kproxy.security.quotas import Quotas
from kproxy.security.users import Users
from kproxy_codec.api_keys import API_VERSIONS, METADATA, SASL_AUTHENTICATE, SASL_HANDSHAKE
from kproxy_codec.error_codes import ILLEGAL_SASL_STATE, NONE, SASL_AUTHENTICATION_FAILED
from tests.support.clients.raw_client import RawClient, batch, control_frame, produce_frame, raw_frame
from tests.support.processes.running_proxy import both_loops
from tests.support.processes.served import port_of, served
from tests.support.scene import ANSWERS, HOLDS, T0, Scene, scene, staged
from tests.support.security import sasl_client as sasl
from tests.support.waiting import eventually

# Code of permissions and quotas, and other code that a request passes.
SECURITY = ("/security/", "/proxy/access.py", "/proxy/admission.py", "/proxy/metering.py", "/proxy/acl_filter.py")
PASSED = ("/proxy/client_session.py", "/proxy/context.py", "/proxy/fanout.py", "/routing/fanout.py", "/proxy/run.py")


def mechanisms(*names: str) -> Servers:
    known = sasl.users()
    return servers(names or ("PLAIN", "SCRAM-SHA-256"), lambda: known, lambda: None)


def guarded(**options: Any) -> Callable[[Any], Any]:
    """A proxy with SASL before a broker that answers all requests."""
    return scene(ANSWERS, mechanisms=mechanisms(), **options)


async def shake(client: RawClient, mechanism: str = "PLAIN") -> int:
    """Begin to authenticate; return the error code."""
    client.send(sasl.handshake(mechanism))
    code: int = (await client.answer(SASL_HANDSHAKE, 1)).message.error_code
    return code


async def prove(client: RawClient, name: str = "alice", password: str | None = None) -> int:
    """Continue the exchange; return the error code."""
    client.send(sasl.authenticate(sasl.plain(name, password or sasl.USERS[name])))
    code: int = (await client.answer(SASL_AUTHENTICATE, 2)).message.error_code
    return code


async def is_served(client: RawClient) -> bool:
    client.send(produce_frame())
    return (await client.answer()).codes == {T0: NONE}


@guarded(one_go=True)
async def test_authenticated_client_is_served_and_named_in_trail(s: Scene) -> None:
    s.proxy.trail.begin()
    s.send(control_frame(API_VERSIONS, 0))
    offered = {each.api_key: each.max_version for each in (await s.answer(API_VERSIONS, 0)).message.api_keys}
    assert (offered[SASL_HANDSHAKE], offered[SASL_AUTHENTICATE]) == (1, 2)
    await sasl.logged_in(s.client)
    for n in range(3):
        s.produces(n)
        assert await s.gets(n) == [NONE]
    assert [row.principal for row in s.proxy.ranges()] == ["User:alice"]
    assert s.proxy.counters["sasl.succeeded.PLAIN"] == 1


@guarded(one_go=True)
async def test_pipelined_exchange_is_served_in_order(s: Scene) -> None:
    """Like Kafka, which reads one request of a connection at a time."""
    proof = sasl.authenticate(sasl.plain("alice", "alice-secret"))
    s.send(control_frame(API_VERSIONS, 0), sasl.handshake("PLAIN"), proof, produce_frame())
    for key, version in ((API_VERSIONS, 0), (SASL_HANDSHAKE, 1), (SASL_AUTHENTICATE, 2)):
        assert (await s.answer(key, version)).message.error_code == NONE
    assert await s.codes() == {T0: NONE}


@guarded(clients=4, one_go=True)
async def test_unauthenticated_request_reaches_no_broker(s: Scene) -> None:
    for client, frames in zip(
        s.clients,
        (
            [produce_frame()],
            [control_frame(METADATA, 9, topics=None)],
            [sasl.handshake("PLAIN"), produce_frame()],
            [sasl.handshake("PLAIN"), sasl.authenticate(sasl.plain("alice", "wrong")), produce_frame()],
        ),
        strict=True,
    ):
        client.send(*frames)
        await client.rest(1.0)
        assert await client.is_closed()
    assert s.broker.log == []


@guarded(clients=3, times={"lifetime_s": 1.2}, one_go=True)
async def test_ended_session_must_be_renewed_first(s: Scene) -> None:
    renewing, late, idle = s.clients
    for client in s.clients:
        await sasl.logged_in(client)
    # Too early: Kafka returns an error and keeps the connection.
    assert await shake(late) == ILLEGAL_SASL_STATE
    await asyncio.sleep(1.05)
    await sasl.logged_in(renewing)
    await asyncio.sleep(0.4)
    assert await is_served(renewing)
    late.send(produce_frame())
    assert await late.is_closed()
    # An idle one may still renew, as in Kafka.
    await sasl.logged_in(idle)
    assert await is_served(idle)


@both_loops
async def test_session_ends_with_its_user() -> None:
    """A removed user's session never ended; its last answer is still sent."""
    known = [Users({name: sasl.credentials_of(name) for name in sasl.USERS}, {"alice": 7})]
    offered = servers(("PLAIN", "SCRAM-SHA-256"), lambda: known[0], lambda: None)
    async with staged(HOLDS, clients=2, mechanisms=offered) as s:
        s.proxy.admissions[""].users = lambda: known[0]
        alice, bob = s.clients
        await sasl.logged_in(alice)
        await sasl.logged_in(bob, "bob")
        # A changed password, or a change of another user, ends no session.
        known[0] = Users({"alice": sasl.credentials_of("bob"), "bob": sasl.credentials_of("bob")}, {"alice": 7})
        await asyncio.sleep(3 * server.DEADLINE_TICK_S)
        alice.send(produce_frame())
        held = await s.next()
        # Removed and added again.
        known[0] = sasl.users()
        await asyncio.sleep(3 * server.DEADLINE_TICK_S)
        held.answer()
        assert (await alice.answer()).codes == {T0: NONE}
        assert await alice.is_closed()
        bob.send(produce_frame())
        (await s.next()).answer()
        assert (await bob.answer()).codes == {T0: NONE}
        known[0] = sasl.users("alice")
        assert await bob.is_closed()


def quotas_of(**quota: Any) -> Quotas:
    return Quotas(parse_quotas([quota], "here"))


@guarded()
async def test_new_quota_holds_for_open_connections(s: Scene) -> None:
    """An earlier connection was never limited."""
    quotas = quotas_of(principal="User:bob", requests_per_s=1)
    s.proxy.context.quotas = lambda: quotas
    await sasl.logged_in(s.client)

    async def throttled_ms(times: int) -> list[int]:
        found = []
        for _ in range(times):
            s.send(produce_frame(records=batch(0, producer_id=-1)))
            answer = await s.answer()
            assert answer.codes == {T0: NONE}
            found.append(int(answer.fields["throttle_time_ms"]))
        return found

    assert await throttled_ms(20) == [0] * 20
    quotas = quotas_of(principal="User:alice", requests_per_s=1)
    await asyncio.sleep(0.3)
    assert max(await throttled_ms(3)) > 0
    # A withdrawn quota no longer applies.
    quotas = Quotas(())
    await asyncio.sleep(0.3)
    assert (await throttled_ms(20))[1:] == [0] * 19


@guarded(clients=2, one_go=True)
async def test_large_requests_are_admitted_only_after_authentication(s: Scene) -> None:
    s.send(struct.pack(">i", 65_537))
    assert await s.client.is_closed()
    client = await sasl.logged_in(s.clients[1])
    client.send(produce_frame(records=batch(0, producer_id=-1) + bytes(200_000)))
    assert (await client.answer()).codes == {T0: NONE}


async def _stranger(port: int, kind: int, rng: random.Random) -> None:
    """Misbehave in one of several ways for a while."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
        client = await RawClient().connect(port)
        if kind == 0:
            client.send(struct.pack(">i", 0x7FFFFFFF) + bytes(100))
        elif kind == 1:
            for byte in sasl.handshake("PLAIN"):
                client.send(bytes([byte]))
                await asyncio.sleep(0.3)
        elif kind == 2:
            client.send(raw_frame(rng.randbytes(rng.randrange(200))))
        elif kind == 3:
            client.send(sasl.handshake("SCRAM-SHA-256"), sasl.authenticate(rng.randbytes(300)))
        else:
            client.send(sasl.handshake("PLAIN"), sasl.authenticate(sasl.plain("alice", f"guess {rng.random()}")))
        await client.rest(5.0)
        client.abort()


async def test_unauthenticated_connections_do_not_block_a_client(tmp_path: Path) -> None:
    """In a separate process, 500 announce 2 GiB, 200 are slow, and 300 send garbage or guess passwords."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    rooms = sasl.plain_users(tmp_path, '["PLAIN", "SCRAM-SHA-256"]') + sasl.ALLOW_ALL
    async with served(tmp_path, ANSWERS, rooms=rooms) as s:
        client = await sasl.logged_in(await s.client())
        kinds = [0] * 500 + [1] * 200 + [2] * 100 + [3] * 100 + [4] * 100
        rng.shuffle(kinds)
        strangers = [asyncio.create_task(_stranger(port_of(s.process), kind, rng)) for kind in kinds]
        answered = 0
        ends_at = time.monotonic() + 6
        while time.monotonic() < ends_at or answered <= 20:
            client.send(produce_frame(records=batch(answered), correlation_id=answered))
            assert (await client.answer(patience_s=60.0)).codes == {T0: NONE}
            answered += 1
            await asyncio.sleep(0.01)
        # Newcomers with a password get in.
        await sasl.logged_in(await s.client(), "bob")
        for task in strangers:
            task.cancel()
        await asyncio.gather(*strangers, return_exceptions=True)
        counts = await s.samples()
        assert counts[("kproxy_authentications_total", (("mechanism", "PLAIN"), ("outcome", "failed")))] > 0
        resident = int(Path(f"/proc/{s.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        assert resident < 400 << 20
        for secret in (*sasl.USERS.values(), "guess 0"):
            assert secret not in s.process.stderr()


@pytest.mark.parametrize("way", ["change", "SIGHUP"])
async def test_users_are_read_again(tmp_path: Path, way: str) -> None:
    rooms, users = sasl.plain_users(tmp_path), tmp_path / "users.toml"
    users.write_text("")
    async with served(tmp_path, ANSWERS, rooms=rooms) as s:
        # It starts without users, and reports it.
        assert "user list is empty" in s.process.stderr()
        assert f"kproxy user add --users {users} NAME" in s.process.stderr()
        client = await s.client()
        await shake(client)
        assert await prove(client, "bob") == SASL_AUTHENTICATION_FAILED

        def change(name: str) -> None:
            sasl.users_file(tmp_path, name)
            if way == "SIGHUP":
                s.process.signal(signal.SIGHUP)

        change("bob")
        await eventually(lambda: "reloaded" in s.process.stderr(), "the file is read again", timeout_s=60)
        bob = await sasl.logged_in(await s.client(), "bob")
        await asyncio.sleep(3 * server.DEADLINE_TICK_S)
        # He is a user since.
        bob.send(control_frame(API_VERSIONS, 0))
        assert (await bob.answer(API_VERSIONS, 0)).message.error_code == NONE
        change("alice")
        assert await bob.is_closed(60)


@contextlib.contextmanager
def calls(*files: str) -> Iterator[set[str]]:
    """The Python functions of these files that this thread calls, except in ticks of sessions."""
    called: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        code, caller = frame.f_code, frame
        if event == "call" and any(part in code.co_filename for part in files):
            while caller.f_code.co_name != "expire":
                if caller.f_back is None:
                    called.add(f"{code.co_filename}: {code.co_name}")
                    return
                caller = caller.f_back

    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(None)


async def send_plain(client: RawClient) -> None:
    """Send requests on proven routes, except the first."""
    for n in range(20):
        client.send(produce_frame(records=batch(n), correlation_id=n))
        assert (await client.answer()).codes == {T0: NONE}


async def calls_where_nothing_is_configured() -> set[str]:
    """The functions that plain requests call."""
    async with staged(ANSWERS) as s:
        with calls(*SECURITY, *PASSED) as called:
            await send_plain(s.client)
            # The connection to the broker was made.
            assert any(part in each for part in SECURITY for each in called)
            called.clear()
            await send_plain(s.client)
    return called


@both_loops
async def test_plain_request_calls_no_unconfigured_security_code() -> None:
    called = await calls_where_nothing_is_configured()
    assert not {each for each in called if any(part in each for part in SECURITY)}


@pytest.mark.skipif(compiled is None, reason="the plain path is not compiled here")
@pytest.mark.parametrize("names", [{}, {"client_id": "tests"}], ids=["everybody", "client_id"])
@guarded()
async def test_admitted_clients_plain_request_adds_only_its_charge(s: Scene, names: dict[str, str]) -> None:
    rules = Rules(acls_of(parse_acls([{"principal": "User:*", "operations": ["write"], "topics": ["*"]}], "here")))
    some = quotas_of(produce_bytes_per_s=1e9, requests_per_s=1e9, **names)
    s.proxy.context.access = AccessControl(lambda: rules, s.proxy.counters)
    s.proxy.context.quotas = lambda: some
    await sasl.logged_in(s.client)
    await send_plain(s.client)
    with calls(*SECURITY, *PASSED) as called:
        await send_plain(s.client)
    (account,) = some._accounts._accounts.values()
    assert account.requests is not None
    assert account.requests.used == 40
    added = called - await calls_where_nothing_is_configured()
    assert {each.rpartition("/")[2] for each in added} == {"metering.py: take", "quotas.py: use"}
