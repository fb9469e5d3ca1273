"""The identity of each client on its broker connections: what brokers see of it, and the effects of their decisions."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kproxy.security import broker_auth
from kproxy.security.mechanisms import servers
from kproxy.security.sasl_client import Credential
from kproxy_codec.api_keys import METADATA, PRODUCE, SASL_AUTHENTICATE, SASL_HANDSHAKE
from kproxy_codec.error_codes import NONE, SASL_AUTHENTICATION_FAILED, TOPIC_AUTHORIZATION_FAILED
from tests.support.brokers.scripted_upstream import Asked
from tests.support.clients.raw_client import RawClient, batch, control_frame, produce_frame, raw_frame
from tests.support.processes.running_proxy import RunningProxy, both_loops, running_proxy
from tests.support.security import sasl_client as sasl
from tests.support.security.judging_broker import REFUSAL, JudgingBroker
from tests.support.waiting import eventually

T0, T1 = ("t", 0), ("t", 1)
# The end of a broker's answer that no Kafka client can parse.
GARBAGE = b"\x7f\xff\xff\xffHTTP/1.1 200 OK\r\n"


@asynccontextmanager
async def carrying(*brokers: JudgingBroker, users: bool = False, **times: float) -> AsyncIterator[RunningProxy]:
    """A proxy that forwards identities, before brokers of which the first has partition 0 of `t`, and so on."""
    known = sasl.users() if users else None
    offered = servers(("PLAIN", "OAUTHBEARER"), lambda: known, lambda: None, unverified_claim="sub")
    async with running_proxy(*brokers, mechanisms=offered, times=times, carries=True) as proxy:
        for partition, broker in enumerate(brokers):
            proxy.own(broker.node_id, partitions=(partition,))
        yield proxy


async def admitted(proxy: RunningProxy, name: str, version: int = 2) -> RawClient:
    client = await proxy.client()
    answer = await sasl.present(client, sasl.plain(name, sasl.USERS[name]), version=version)
    assert answer.error_code == NONE
    return client


async def produced(client: RawClient, n: int = 0, partitions: tuple[int, ...] = (0,)) -> dict[tuple[str, int], int]:
    client.send(produce_frame({"t": partitions}, records=batch(n, producer_id=-1), correlation_id=n))
    return (await client.answer()).codes


def hangs(asked: Asked) -> bool:
    return asked.header.api_key == SASL_AUTHENTICATE


def holding(held: list[Asked], word: str) -> Callable[[Asked], bool]:
    """Keep each login with `word` in `held`, without an answer."""

    def hold(asked: Asked) -> bool:
        is_meant = hangs(asked) and word.encode() in bytes(asked.body)
        if is_meant:
            held.append(asked)
        return is_meant

    return hold


def have_seen(brokers: Iterable[JudgingBroker], token: str) -> bool:
    """Whether the last login at each broker was with this token."""
    return all(broker.presented[-1][0] == sasl.bearer(token) for broker in brokers)


@both_loops
async def test_each_client_keeps_its_identity_at_every_broker() -> None:
    first, second = JudgingBroker(1), JudgingBroker(2)
    first.may_write = lambda name, topic: name == "alice"
    async with carrying(first, second) as proxy:
        alice, bob = await admitted(proxy, "alice"), await admitted(proxy, "bob")
        assert await produced(alice, partitions=(0, 1)) == {T0: NONE, T1: NONE}
        assert await produced(bob, partitions=(0, 1)) == {T0: TOPIC_AUTHORIZATION_FAILED, T1: NONE}
        for broker in (first, second):
            assert [each for each in broker.requests if each[1] == PRODUCE] == [("alice", PRODUCE), ("bob", PRODUCE)]
            connections = {broker.names[asked.connection] for asked in broker.log}
            assert connections == {"alice", "bob"}
            # As received.
            assert {message for message, _ in broker.presented} == {
                sasl.plain("alice", "alice-secret"),
                sasl.plain("bob", "bob-secret"),
            }


@both_loops
async def test_client_never_gets_the_answer_of_another() -> None:
    """If brokers see one identity, clients that request all topics at once share an answer."""
    broker = JudgingBroker(1)

    def is_slow(asked: Asked) -> bool:
        if asked.header.api_key == METADATA:
            asyncio.get_running_loop().call_later(0.2, broker.serve, asked)
        return asked.header.api_key == METADATA

    async with carrying(broker) as proxy:
        clients = [(name, await admitted(proxy, name)) for name in ("alice", "bob") * 2]
        broker.misbehaves = is_slow
        for _, client in clients:
            client.send(control_frame(METADATA, 9, topics=None, allow_auto_topic_creation=False))
        for name, client in clients:
            topics = (await client.answer(METADATA, 9)).message.topics
            assert [topic.name for topic in topics] == [f"of-{name}"]


@both_loops
async def test_broker_refusal_reaches_client_verbatim() -> None:
    broker = JudgingBroker(1)
    async with carrying(broker) as proxy:
        for mechanism, message in (
            ("PLAIN", sasl.plain("alice", "wrong")),
            ("PLAIN", sasl.plain("nobody", "alice-secret")),
            ("OAUTHBEARER", sasl.bearer(sasl.token())),
        ):
            client = await proxy.client()
            answer = await sasl.present(client, message, mechanism)
            assert (answer.error_code, answer.error_message) == (SASL_AUTHENTICATION_FAILED, REFUSAL)
            assert await client.is_closed()
        assert broker.requests == []
        # Other clients are not affected: the broker does not count as down.
        assert all(map(proxy.context.brokers.is_well, proxy.topology.brokers))
        assert await produced(await admitted(proxy, "alice")) == {T0: NONE}


@both_loops
async def test_locally_failing_login_reaches_no_broker() -> None:
    broker = JudgingBroker(1)
    async with carrying(broker, users=True) as proxy:
        for message in (sasl.plain("alice", "wrong"), sasl.plain("alice", "alice-secret", "bob"), b"x", b""):
            client = await proxy.client()
            assert (await sasl.present(client, message)).error_code == SASL_AUTHENTICATION_FAILED
        client = await proxy.client()
        told = await sasl.present(client, sasl.bearer("no.token.atall"), "OAUTHBEARER")
        assert bytes(told.auth_bytes) == b'{"status":"invalid_token"}'
        assert broker.presented == []
        # A broker must also accept an identity that the proxy accepts.
        del broker.passwords["bob"]
        client = await proxy.client()
        assert (await sasl.present(client, sasl.plain("bob", "bob-secret"))).error_message == REFUSAL
        assert await produced(await admitted(proxy, "alice")) == {T0: NONE}


@both_loops
async def test_token_is_forwarded_and_names_its_principal() -> None:
    broker = JudgingBroker(1)
    token = sasl.token(sub="carol")
    broker.tokens[token] = "carol"
    async with carrying(broker) as proxy:
        proxy.trail.begin()
        client = await proxy.client()
        assert (await sasl.present(client, sasl.bearer(token), "OAUTHBEARER")).error_code == NONE
        assert await produced(client) == {T0: NONE}
        assert ("carol", PRODUCE) in broker.requests
        assert {message for message, _ in broker.presented} == {sasl.bearer(token)}
        assert [row.principal for row in proxy.ranges()] == ["User:carol"]


@both_loops
async def test_session_takes_the_shorter_of_both_lifetimes() -> None:
    for broker_ms, listener_s, told in ((60_000, 0.0, 60_000), (0, 90.0, 90_000), (60_000, 90.0, 60_000), (0, 0.0, 0)):
        broker = JudgingBroker(1)
        broker.lifetime_ms = broker_ms
        async with carrying(broker, lifetime_s=listener_s) as proxy:
            answer = await sasl.present(await proxy.client(), sasl.plain("alice", "alice-secret"))
            assert answer.session_lifetime_ms == told
            # Brokers report the lifetime, whether or not the client sees it.
            await admitted(proxy, "bob", version=0)
            assert broker.presented[-1] == (sasl.plain("bob", "bob-secret"), 1)


@both_loops
async def test_brokers_session_ends_clients_of_old_versions() -> None:
    broker = JudgingBroker(1)
    broker.lifetime_ms = 1_000
    async with carrying(broker) as proxy:
        old, raw = await admitted(proxy, "bob", version=0), await proxy.client()
        raw.send(sasl.handshake("PLAIN", 0))
        assert (await raw.answer(SASL_HANDSHAKE, 0)).message.error_code == NONE
        raw.send(raw_frame(sasl.plain("bob", "bob-secret")))
        assert await raw.receive() == bytes(4)
        for client in (old, raw):
            assert await produced(client) == {T0: NONE}
        await asyncio.sleep(1.3)
        for client in (old, raw):
            client.send(produce_frame())
            assert await client.is_closed()


@both_loops
async def test_renewal_reaches_every_open_connection() -> None:
    """During a pipeline of requests, none of which is lost or refused."""
    brokers = JudgingBroker(1), JudgingBroker(2)
    tokens = [sasl.token(sub="carol", jti=str(number)) for number in range(4)]
    for broker in brokers:
        broker.tokens = dict.fromkeys(tokens, "carol")
    async with carrying(*brokers) as proxy:
        client = await proxy.client()
        await sasl.present(client, sasl.bearer(tokens[0]), "OAUTHBEARER")
        asked = 0
        for token in tokens[1:]:
            # At the earliest a second after the last success.
            ends_at = time.monotonic() + 1.2
            while time.monotonic() < ends_at:
                assert await produced(client, asked, (0, 1)) == {T0: NONE, T1: NONE}
                asked += 1
            client.send(*(produce_frame({"t": (0, 1)}, records=batch(asked + n, producer_id=-1)) for n in range(5)))
            client.send(sasl.handshake("OAUTHBEARER"))
            for _ in range(5):
                assert (await client.answer()).codes == {T0: NONE, T1: NONE}
            assert (await client.answer(SASL_HANDSHAKE, 1)).message.error_code == NONE
            client.send(sasl.authenticate(sasl.bearer(token)))
            assert (await client.answer(SASL_AUTHENTICATE, 2)).message.error_code == NONE
            asked += 5
        assert await produced(client, asked, (0, 1)) == {T0: NONE, T1: NONE}
        await eventually(lambda: have_seen(brokers, tokens[-1]), "each broker has seen the last token")
        for broker in brokers:
            assert sum(each[1] == PRODUCE for each in broker.requests) == asked + 1
        # One of them also has the control connection; no connection was replaced.
        assert sorted(len(broker.names) for broker in brokers) == [1, 2]


@both_loops
async def test_renewal_refused_by_broker_ends_the_client() -> None:
    broker = JudgingBroker(1)
    async with carrying(broker) as proxy:
        client = await admitted(proxy, "alice")
        assert await produced(client) == {T0: NONE}
        broker.passwords["alice"] = "another"
        # Open connections continue, as in Kafka.
        assert await produced(client) == {T0: NONE}
        await asyncio.sleep(1.1)
        answer = await sasl.present(client, sasl.plain("alice", "alice-secret"))
        assert (answer.error_code, answer.error_message) == (SASL_AUTHENTICATION_FAILED, REFUSAL)
        assert await client.is_closed()


@both_loops
async def test_renewal_as_another_reaches_no_broker() -> None:
    broker = JudgingBroker(1)
    async with carrying(broker) as proxy:
        client = await admitted(proxy, "alice")
        await asyncio.sleep(1.1)
        answer = await sasl.present(client, sasl.plain("bob", "bob-secret"))
        assert answer.error_message.startswith("Cannot change principals")
        assert len(broker.presented) == 1


@both_loops
async def test_revoked_client_is_refused_on_reconnect() -> None:
    first, second = JudgingBroker(1), JudgingBroker(2)
    async with carrying(first, second) as proxy:
        revoked, other = await admitted(proxy, "alice"), await admitted(proxy, "bob")
        for broker in (first, second):
            del broker.passwords["alice"]
        # The answer to the first request still comes; the client must repeat the others.
        codes = await produced(revoked, partitions=(0,))
        assert codes[T0] != NONE
        assert await revoked.is_closed()
        answer = await sasl.present(await proxy.client(), sasl.plain("alice", "alice-secret"))
        assert answer.error_message == REFUSAL
        assert await produced(other, partitions=(0, 1)) == {T0: NONE, T1: NONE}
        assert all(map(proxy.context.brokers.is_well, proxy.topology.brokers))


# Ways in which a broker does not answer properly.
WAYS: dict[str, Callable[[Asked], None]] = {
    "hangs": lambda asked: None,
    "closes": lambda asked: asked.connection.close(),
    "talks nonsense": lambda asked: asked.connection.write(GARBAGE),
    "is malformed": lambda asked: asked.connection.write(
        b"\0\0\0\x08" + asked.header.correlation_id.to_bytes(4, "big") + b"\xff\xff\xff\xff"
    ),
}


@pytest.mark.parametrize("way", WAYS)
async def test_broker_without_verdict_affects_no_other_client(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    broker = JudgingBroker(1)

    def misbehave(asked: Asked) -> bool:
        if hangs(asked):
            WAYS[way](asked)
        return hangs(asked)

    async with carrying(broker, timeout_s=4.0) as proxy:
        served = await admitted(proxy, "alice")
        monkeypatch.setattr(broker_auth, "JUDGE_S", 1.5)
        assert await produced(served) == {T0: NONE}
        broker.misbehaves = misbehave
        client = await proxy.client()
        client.send(sasl.handshake("PLAIN"))
        assert (await client.answer(SASL_HANDSHAKE, 1)).message.error_code == NONE
        client.send(sasl.authenticate(sasl.plain("bob", "bob-secret")))
        # Clients get no fatal error, so they retry.
        for n in range(20):
            assert await produced(served, n) == {T0: NONE}
            await asyncio.sleep(0.01)
        assert await client.is_closed(patience_s=4.0)
        assert proxy.counters["sasl.failed.PLAIN"] == 1
        assert proxy.counters["sasl.timed_out.PLAIN"] == 0
        assert all(map(proxy.context.brokers.is_well, proxy.topology.brokers))
        broker.misbehaves = lambda asked: False
        assert await produced(await admitted(proxy, "bob")) == {T0: NONE}
        assert ("secret" in "".join(capsys.readouterr())) is False


async def test_returned_broker_serves_all_clients_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dials to a broker that was down go out one by one until one succeeds."""
    monkeypatch.setattr(broker_auth, "JUDGE_S", 60.0)
    back, other = JudgingBroker(1), JudgingBroker(2)
    held: list[Asked] = []
    async with carrying(back, other) as proxy:
        port = back.port
        await back.stop()
        alice, bob = await admitted(proxy, "alice"), await admitted(proxy, "bob")
        assert (await produced(bob))[T0] != NONE
        assert not proxy.context.brokers.is_well(back.node_id)
        back.misbehaves = holding(held, "alice")
        await back.start(port)

        async def is_held() -> bool:
            # An early request is answered with an unread error.
            alice.send(produce_frame(records=batch(0, producer_id=-1)))
            await asyncio.sleep(0.05)
            return bool(held)

        await eventually(is_held, "alice's dial is under way, and has come to her password")
        assert await produced(bob, 1) == {T0: NONE}
        assert not alice.is_gone
        for asked in held:
            asked.connection.abort()


async def test_another_broker_judges_if_one_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_auth, "JUDGE_S", 1.5)
    brokers = JudgingBroker(1), JudgingBroker(2)
    for hanging in brokers:
        async with carrying(*brokers) as proxy:
            hanging.misbehaves = hangs
            # Each client draws the broker to ask first.
            for _ in range(4):
                await admitted(proxy, "alice")
            hanging.misbehaves = lambda asked: False
        for broker in brokers:
            broker.port = 0


async def test_login_times_out_if_no_broker_judges() -> None:
    broker = JudgingBroker(1)
    broker.misbehaves = hangs
    async with carrying(broker, timeout_s=1.0) as proxy:
        client = await proxy.client()
        client.send(sasl.handshake("PLAIN"), sasl.authenticate(sasl.plain("bob", "bob-secret")))
        await client.answer(SASL_HANDSHAKE, 1)
        assert await client.is_closed()
        assert proxy.counters["sasl.failed.PLAIN"] == 1


async def test_connection_begun_before_renewal_is_renewed_after() -> None:
    """And again after the next renewal, but no earlier than brokers accept it."""
    brokers = JudgingBroker(1), JudgingBroker(2)
    tokens = [sasl.token(sub="carol", jti=str(number)) for number in range(3)]
    for broker in brokers:
        broker.tokens = dict.fromkeys(tokens, "carol")
    held: list[Asked] = []
    async with carrying(*brokers) as proxy:
        client = await proxy.client()
        await sasl.present(client, sasl.bearer(tokens[0]), "OAUTHBEARER")
        await asyncio.sleep(1.1)
        for broker in brokers:
            broker.misbehaves = holding(held, tokens[0])
        client.send(produce_frame({"t": (0, 1)}, records=batch(0, producer_id=-1), acks=0))
        await eventually(lambda: len(held) == 2, "both brokers are dialled")
        assert (await sasl.present(client, sasl.bearer(tokens[1]), "OAUTHBEARER")).error_code == NONE
        await asyncio.sleep(0.7)
        for broker in brokers:
            broker.misbehaves = lambda asked: False
        for asked in held:
            asked.connection.upstream.take(asked)
        await eventually(lambda: have_seen(brokers, tokens[1]), "what began with the first token has the second")
        await asyncio.sleep(0.4)
        assert (await sasl.present(client, sasl.bearer(tokens[2]), "OAUTHBEARER")).error_code == NONE
        assert await produced(client, 1, (0, 1)) == {T0: NONE, T1: NONE}
        await eventually(lambda: have_seen(brokers, tokens[2]), "and then the third")
        assert sorted(len(broker.names) for broker in brokers) == [1, 2]


async def test_credentials_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[weakref.ref[Credential]] = []
    make = Credential.__init__

    def noted(self: Credential, *arguments: Any) -> None:
        make(self, *arguments)
        kept.append(weakref.ref(self))

    monkeypatch.setattr(Credential, "__init__", noted)
    broker = JudgingBroker(1)
    async with carrying(broker) as proxy:
        client = await admitted(proxy, "alice")
        assert await produced(client) == {T0: NONE}
        refused = await proxy.client()
        await sasl.present(refused, sasl.plain("bob", "guess"))

        def alive() -> int:
            gc.collect()
            return sum(each() is not None for each in kept)

        await eventually(lambda: alive() == 1, "what was refused is forgotten")
        assert "secret" not in repr(kept[0]())
        client.abort()
        await eventually(lambda: alive() == 0, "the connection's is forgotten with it")
