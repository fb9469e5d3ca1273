"""A listener with SASL: what it serves before and after authentication, how sessions end, and harmless strangers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import struct
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import FrameType

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
from tests.support.brokers.scripted_upstream import Asked, ScriptedUpstream, answers_everything
from tests.support.clients.raw_client import RawClient, batch, control_frame, produce_frame, raw_frame
from tests.support.processes.running_proxy import RunningProxy, both_loops, in_one_go, running_proxy
from tests.support.processes.served import ServedBroker, page, port_of, samples, static_proxy
from tests.support.security import sasl_client as sasl
from tests.support.waiting import eventually

T0 = ("t", 0)
# What decides who may do what, and how much; and what a request passes beside that.
SECURITY = ("/security/", "/proxy/access.py", "/proxy/admission.py", "/proxy/metering.py", "/proxy/acl_filter.py")
PASSED = ("/proxy/client_session.py", "/proxy/context.py", "/proxy/fanout.py", "/routing/fanout.py", "/proxy/run.py")


def mechanisms(*names: str) -> Servers:
    known = sasl.users()
    return servers(names or ("PLAIN", "SCRAM-SHA-256"), lambda: known, lambda: None)


@contextlib.asynccontextmanager
async def guarded(**times: float) -> AsyncIterator[tuple[RunningProxy, ScriptedUpstream]]:
    """A proxy with SASL before a broker that answers all requests."""
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream, mechanisms=mechanisms(), times=times) as proxy:
        proxy.own(1)
        yield proxy, upstream


async def authenticate(client: RawClient, name: str = "alice") -> None:
    client.send(sasl.handshake("PLAIN"))
    assert (await client.answer(SASL_HANDSHAKE, 1)).message.error_code == NONE
    client.send(sasl.authenticate(sasl.plain(name, sasl.USERS[name])))
    assert (await client.answer(SASL_AUTHENTICATE, 2)).message.error_code == NONE


@both_loops
@in_one_go
async def test_authenticated_client_is_served_and_named_in_trail() -> None:
    async with guarded() as (proxy, _):
        proxy.trail.begin()
        client = await proxy.client()
        client.send(control_frame(API_VERSIONS, 0))
        offered = {each.api_key: each.max_version for each in (await client.answer(API_VERSIONS, 0)).message.api_keys}
        assert (offered[SASL_HANDSHAKE], offered[SASL_AUTHENTICATE]) == (1, 2)
        await authenticate(client)
        for n in range(3):
            client.send(produce_frame(records=batch(n), correlation_id=n))
            assert (await client.answer()).codes == {T0: NONE}
        assert [row.principal for row in proxy.ranges()] == ["User:alice"]
        assert proxy.counters["sasl.succeeded.PLAIN"] == 1


@both_loops
@in_one_go
async def test_a_pipelined_exchange_is_served_in_order() -> None:
    """As Kafka does, which reads one request of a connection at a time."""
    async with guarded() as (proxy, _):
        client = await proxy.client()
        client.send(
            control_frame(API_VERSIONS, 0),
            sasl.handshake("PLAIN"),
            sasl.authenticate(sasl.plain("alice", "alice-secret")),
            produce_frame(records=batch(0), correlation_id=9),
        )
        for key, version in ((API_VERSIONS, 0), (SASL_HANDSHAKE, 1), (SASL_AUTHENTICATE, 2)):
            assert (await client.answer(key, version)).message.error_code == NONE
        assert (await client.answer()).codes == {T0: NONE}


@both_loops
@in_one_go
async def test_unauthenticated_request_reaches_no_broker() -> None:
    async with guarded() as (proxy, upstream):
        for frames in (
            [produce_frame()],
            [control_frame(METADATA, 9, topics=None)],
            [sasl.handshake("PLAIN"), produce_frame()],
            [sasl.handshake("PLAIN"), sasl.authenticate(sasl.plain("alice", "wrong")), produce_frame()],
        ):
            client = await proxy.client()
            client.send(*frames)
            await client.rest(1.0)
            assert await client.is_closed()
        assert upstream.log == []


@both_loops
@in_one_go
async def test_refusal_is_delayed_and_ends_the_connection() -> None:
    async with guarded() as (proxy, _):
        client = await proxy.client()
        client.send(sasl.handshake("PLAIN"))
        await client.answer(SASL_HANDSHAKE, 1)
        began = time.monotonic()
        client.send(sasl.authenticate(sasl.plain("alice", "wrong")))
        answer = (await client.answer(SASL_AUTHENTICATE, 2)).message
        assert answer.error_code == SASL_AUTHENTICATION_FAILED
        assert time.monotonic() - began >= 0.1
        assert await client.is_closed()
        assert proxy.counters["sasl.failed.PLAIN"] == 1


@both_loops
@in_one_go
async def test_unauthenticated_client_is_closed_in_time() -> None:
    async with guarded(timeout_s=0.4) as (proxy, _):
        silent, begun, served = [await proxy.client() for _ in range(3)]
        begun.send(sasl.handshake("SCRAM-SHA-256"))
        await begun.answer(SASL_HANDSHAKE, 1)
        await authenticate(served)
        assert await silent.is_closed()
        assert await begun.is_closed()
        served.send(produce_frame())
        assert (await served.answer()).codes == {T0: NONE}


@both_loops
@in_one_go
async def test_ended_session_must_be_renewed_first() -> None:
    async with guarded(lifetime_s=1.2) as (proxy, _):
        renewing, late, idle = [await proxy.client() for _ in range(3)]
        for client in (renewing, late, idle):
            await authenticate(client)
        # Too early: Kafka says so, and goes on.
        late.send(sasl.handshake("PLAIN"))
        assert (await late.answer(SASL_HANDSHAKE, 1)).message.error_code == ILLEGAL_SASL_STATE
        await asyncio.sleep(1.05)
        await authenticate(renewing)
        await asyncio.sleep(0.4)
        renewing.send(produce_frame())
        assert (await renewing.answer()).codes == {T0: NONE}
        late.send(produce_frame())
        assert await late.is_closed()
        # An idle one may still renew, as in Kafka.
        await authenticate(idle)
        idle.send(produce_frame())
        assert (await idle.answer()).codes == {T0: NONE}


@both_loops
@in_one_go
async def test_client_idle_past_its_session_may_renew() -> None:
    """As in Kafka. The time to authenticate counted from the end of the session, and was over when it began."""
    async with guarded(lifetime_s=0.2, timeout_s=0.5) as (proxy, _):
        client = await proxy.client()
        await authenticate(client)
        await asyncio.sleep(1.2)
        client.send(sasl.handshake("PLAIN"))
        assert (await client.answer(SASL_HANDSHAKE, 1)).message.error_code == NONE
        # At least one look at deadlines.
        await asyncio.sleep(0.2)
        client.send(sasl.authenticate(sasl.plain("alice", sasl.USERS["alice"])))
        assert (await client.answer(SASL_AUTHENTICATE, 2)).message.error_code == NONE
        # The time for a renewal is bounded all the same.
        await asyncio.sleep(1.2)
        client.send(sasl.handshake("PLAIN"))
        assert (await client.answer(SASL_HANDSHAKE, 1)).message.error_code == NONE
        assert await client.is_closed()
        assert proxy.counters["sasl.timed_out.PLAIN"] == 1


@both_loops
async def test_session_ends_with_its_user() -> None:
    """A removed user's session went on for ever; its last answer is still sent."""
    known = [Users({name: sasl.credentials_of(name) for name in sasl.USERS}, {"alice": 7})]
    offered = servers(("PLAIN", "SCRAM-SHA-256"), lambda: known[0], lambda: None)
    held: list[Asked] = []
    upstream = ScriptedUpstream(1, held.append)
    async with running_proxy(upstream, mechanisms=offered) as proxy:
        proxy.admissions[""].users = lambda: known[0]
        proxy.own(1)
        alice, bob = await proxy.client(), await proxy.client()
        await authenticate(alice)
        await authenticate(bob, "bob")
        # A changed password, or another user, ends no session.
        known[0] = Users({"alice": sasl.credentials_of("bob"), "bob": sasl.credentials_of("bob")}, {"alice": 7})
        await asyncio.sleep(3 * server.DEADLINE_TICK_S)
        alice.send(produce_frame())
        await eventually(lambda: len(held) == 1)
        # Removed and added again.
        known[0] = sasl.users()
        await asyncio.sleep(3 * server.DEADLINE_TICK_S)
        answers_everything(held[0])
        assert (await alice.answer()).codes == {T0: NONE}
        assert await alice.is_closed()
        bob.send(produce_frame())
        await eventually(lambda: len(held) == 2)
        answers_everything(held[1])
        assert (await bob.answer()).codes == {T0: NONE}
        known[0] = sasl.users("alice")
        assert await bob.is_closed()


@both_loops
async def test_exchange_of_removed_user_ends() -> None:
    """It began with the users of before: the session ends at the next look."""
    left = sasl.users("bob")
    async with guarded() as (proxy, _):
        proxy.admissions[""].users = lambda: left
        client = await proxy.client()
        await authenticate(client)
        assert await client.is_closed()


@both_loops
@in_one_go
async def test_a_renewal_as_another_user_ends_the_connection() -> None:
    async with guarded() as (proxy, _):
        client = await proxy.client()
        await authenticate(client, "alice")
        await asyncio.sleep(1.05)
        client.send(sasl.handshake("PLAIN"))
        await client.answer(SASL_HANDSHAKE, 1)
        client.send(sasl.authenticate(sasl.plain("bob", "bob-secret")))
        assert (await client.answer(SASL_AUTHENTICATE, 2)).message.error_code == SASL_AUTHENTICATION_FAILED
        assert await client.is_closed()


@both_loops
async def test_a_new_quota_holds_for_open_connections() -> None:
    """A connection that was made before it was not limited, for as long as it was open."""
    quotas = Quotas(parse_quotas([{"principal": "User:bob", "requests_per_s": 1}], "here"))
    async with guarded() as (proxy, _):
        proxy.context.quotas = lambda: quotas
        client = await proxy.client()
        await authenticate(client)

        async def throttled_ms() -> int:
            client.send(produce_frame(records=batch(0, producer_id=-1)))
            answer = await client.answer()
            assert answer.codes == {T0: NONE}
            return int(answer.fields["throttle_time_ms"])

        assert [await throttled_ms() for _ in range(20)] == [0] * 20
        quotas = Quotas(parse_quotas([{"principal": "User:alice", "requests_per_s": 1}], "here"))
        await asyncio.sleep(0.3)
        assert max([await throttled_ms() for _ in range(3)]) > 0
        # One that is taken back does not hold any more.
        quotas = Quotas(())
        await asyncio.sleep(0.3)
        assert [await throttled_ms() for _ in range(20)][1:] == [0] * 19


@both_loops
@in_one_go
async def test_large_requests_are_admitted_after_the_proof_alone() -> None:
    async with guarded() as (proxy, _):
        client = await proxy.client()
        client.send(struct.pack(">i", 65_537))
        assert await client.is_closed()
        client = await proxy.client()
        await authenticate(client)
        client.send(produce_frame(records=batch(0, producer_id=-1) + bytes(200_000)))
        assert (await client.answer()).codes == {T0: NONE}


async def _stranger(port: int, kind: int, rng: random.Random) -> None:
    """Do one of several bad things for a while."""
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


async def test_hundreds_of_strangers_do_not_block_a_client(tmp_path: Path) -> None:
    """500 that announce 2 GiB, 200 slow ones, and 300 that send garbage or guess passwords, in a process of its own."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    broker = ServedBroker(1, answers_everything)
    await broker.start()
    rooms = f'[sasl]\nmechanisms = ["PLAIN", "SCRAM-SHA-256"]\nusers = "{sasl.users_file(tmp_path)}"\n'
    rooms += "without_tls = true\n" + sasl.ALLOW_ALL
    manager = static_proxy(tmp_path, {1: broker.port}, rooms=rooms)
    process = await asyncio.to_thread(manager.__enter__)
    try:
        port = port_of(process)
        client = await RawClient().connect(port)
        await authenticate(client)
        kinds = [0] * 500 + [1] * 200 + [2] * 100 + [3] * 100 + [4] * 100
        rng.shuffle(kinds)
        strangers = [asyncio.create_task(_stranger(port, kind, rng)) for kind in kinds]
        answered = 0
        ends_at = time.monotonic() + 6
        while time.monotonic() < ends_at or answered <= 20:
            client.send(produce_frame(records=batch(answered), correlation_id=answered))
            assert (await client.answer(patience_s=60.0)).codes == {T0: NONE}
            answered += 1
            await asyncio.sleep(0.01)
        # Newcomers that know a password get in.
        another = await RawClient().connect(port)
        await authenticate(another, "bob")
        for task in strangers:
            task.cancel()
        await asyncio.gather(*strangers, return_exceptions=True)
        counts = samples((await asyncio.to_thread(page, process.admin, "/metrics"))[1])
        assert counts[("kproxy_authentications_total", (("mechanism", "PLAIN"), ("outcome", "failed")))] > 0
        resident = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        assert resident < 400 << 20
        for secret in (*sasl.USERS.values(), "guess 0"):
            assert secret not in process.stderr()
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)
        await broker.stop()


@pytest.mark.parametrize("way", ["change", "SIGHUP"])
async def test_users_are_read_again(tmp_path: Path, way: str) -> None:
    broker = ServedBroker(1, answers_everything)
    await broker.start()
    users = tmp_path / "users.toml"
    users.touch(0o600)
    rooms = f'[sasl]\nmechanisms = ["PLAIN"]\nusers = "{users}"\nwithout_tls = true\n'
    manager = static_proxy(tmp_path, {1: broker.port}, rooms=rooms)
    process = await asyncio.to_thread(manager.__enter__)
    try:
        # It starts without a user, and says so.
        assert "no users" in process.stderr()
        assert f"kproxy user add --users {users} NAME" in process.stderr()
        client = await RawClient().connect(port_of(process))
        client.send(sasl.handshake("PLAIN"), sasl.authenticate(sasl.plain("bob", "bob-secret")))
        await client.answer(SASL_HANDSHAKE, 1)
        assert (await client.answer(SASL_AUTHENTICATE, 2)).message.error_code == SASL_AUTHENTICATION_FAILED
        sasl.users_file(tmp_path, "bob")
        if way == "SIGHUP":
            os.kill(process.pid, signal.SIGHUP)
        await eventually(lambda: "reloaded" in process.stderr(), "the file is read again", timeout_s=60)
        await authenticate(await RawClient().connect(port_of(process)), "bob")
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)
        await broker.stop()


@contextlib.contextmanager
def calls(*files: str) -> Iterator[set[str]]:
    """The functions in Python of these files that this thread calls, other than at the ticks of sessions."""
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
    """Send requests whose routes are all proven but the first one's."""
    for n in range(20):
        client.send(produce_frame(records=batch(n), correlation_id=n))
        assert (await client.answer()).codes == {T0: NONE}


async def calls_where_nothing_is_configured() -> set[str]:
    """The functions that plain requests call."""
    async with running_proxy(ScriptedUpstream(1, answers_everything)) as proxy:
        proxy.own(1)
        client = await proxy.client()
        with calls(*SECURITY, *PASSED) as called:
            await send_plain(client)
            # The connection to the broker was made.
            assert any(part in each for part in SECURITY for each in called)
            called.clear()
            await send_plain(client)
    return called


@both_loops
async def test_plain_request_calls_no_unconfigured_security_code() -> None:
    called = await calls_where_nothing_is_configured()
    assert not {each for each in called if any(part in each for part in SECURITY)}


@pytest.mark.skipif(compiled is None, reason="the plain path is not compiled here")
@pytest.mark.parametrize("names", [{}, {"client_id": "tests"}], ids=["everybody", "client_id"])
@both_loops
async def test_admitted_clients_plain_request_adds_no_python_call(names: dict[str, str]) -> None:
    rules = Rules(acls_of(parse_acls([{"principal": "User:*", "operations": ["write"], "topics": ["*"]}], "here")))
    some = Quotas(parse_quotas([{"produce_bytes_per_s": 1e9, "requests_per_s": 1e9, **names}], "here"))
    async with guarded() as (proxy, _):
        proxy.context.access = AccessControl(lambda: rules, proxy.counters)
        proxy.context.quotas = lambda: some
        client = await proxy.client()
        await authenticate(client)
        await send_plain(client)
        with calls(*SECURITY, *PASSED) as called:
            await send_plain(client)
        (account,) = some._accounts._accounts.values()
        assert account.requests is not None
        assert account.requests.used == 40
    assert called <= await calls_where_nothing_is_configured()
