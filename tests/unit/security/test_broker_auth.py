"""Sessions at brokers: their length, their renewal, and whom a refusal concerns. The broker is a script."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from kproxy.config.broker_sasl import BrokerSasl
from kproxy.config.tls import BrokerTls
from kproxy.security import broker_auth
from kproxy.security.broker_auth import (
    EXTRA_S,
    JUDGE_S,
    AccessRefused,
    BrokerAuth,
    IdentityRefused,
    Session,
)
from kproxy.security.sasl_client import Credential
from kproxy_codec import api_keys as keys
from kproxy_codec.control import build_response, encode_response
from kproxy_codec.framing import frame_message, response_header
from tests.support.waiting import PATIENCE_S

OWN = BrokerSasl("PLAIN", "kproxy", "secret")


class Broker:
    """Answers each SASL request; `apis` are the offered APIs with their highest versions."""

    def __init__(
        self,
        *,
        lifetime_ms: int = 0,
        error_code: int = 0,
        message: str | None = None,
        apis: tuple[tuple[int, int], ...] = ((keys.SASL_HANDSHAKE, 1), (keys.SASL_AUTHENTICATE, 2)),
    ) -> None:
        self.asked: list[tuple[int, int]] = []
        self.lifetime_ms = lifetime_ms
        self.error = {"error_code": error_code, "error_message": message}
        self.apis = apis
        self.before_answer: Callable[[int], Awaitable[None]] | None = None

    async def exchange(self, api_key: int, version: int, body: bytes) -> memoryview:
        self.asked.append((api_key, version))
        if self.before_answer is not None:
            await self.before_answer(api_key)
        fields: dict[str, object] = {}
        if api_key == keys.API_VERSIONS:
            offered = [{"api_key": key, "min_version": 0, "max_version": most} for key, most in self.apis]
            fields = {"error_code": 0, "api_keys": offered}
        elif api_key == keys.SASL_HANDSHAKE:
            fields = {"error_code": 0, "mechanisms": ["PLAIN"]}
        else:
            lifetime = {"session_lifetime_ms": self.lifetime_ms} if version else {}
            fields = {**self.error, "auth_bytes": b"", **lifetime}
        answer = encode_response(build_response(api_key, version, **fields))
        return memoryview(frame_message(response_header(api_key, version, 1), answer))


class Client:
    """An identity to forward."""

    def __init__(self) -> None:
        self.number = 1
        self.credential: Credential | None = Credential("PLAIN", b"\0alice\0secret")
        self.refusals: list[IdentityRefused] = []

    def refused(self, error: IdentityRefused) -> None:
        self.refusals.append(error)


async def test_session_is_renewed_before_broker_ends_it() -> None:
    for seed in range(20):
        access = BrokerAuth(sasl=OWN, random=Random(seed))
        session = await access.introduce(Broker(lifetime_ms=10_000).exchange)
        assert (session.lifetime_s, session.authenticate_version) == (10.0, 2)
        assert session.renew_after_s is not None
        assert 8.0 <= session.renew_after_s <= 9.0
    assert await access.introduce(Broker().exchange) == Session(None, 2, 0.0)


async def test_client_session_is_as_long_as_brokers() -> None:
    """The client renews it."""
    access, client = BrokerAuth(), Client()
    carrying = access.carrying(client)
    client.number = 7
    reached: list[bool] = []
    session = await carrying.introduce(Broker(lifetime_ms=4_000).exchange, lambda: reached.append(True))
    assert session == Session(None, 2, 4.0, 7)
    assert reached == [True]
    assert carrying.is_current(session)
    client.number = 8
    assert not carrying.is_current(session)
    assert access.is_current(session)


async def test_plain_access_asks_once_and_presents_nothing() -> None:
    broker, reached = Broker(), list[bool]()
    assert await BrokerAuth().introduce(broker.exchange, lambda: reached.append(True)) == Session()
    assert broker.asked == [(keys.API_VERSIONS, 0)]
    assert await BrokerAuth().authenticate(broker.exchange, 1) == Session()
    assert len(broker.asked) == 1
    await BrokerAuth(sasl=OWN).introduce(Broker().exchange, lambda: reached.append(True))
    assert not reached


@pytest.mark.parametrize("key", [keys.SASL_HANDSHAKE, keys.SASL_AUTHENTICATE])
async def test_broker_without_sasl_gets_no_secret(key: int) -> None:
    apis = tuple((each, most) for each, most in Broker().apis if each != key)
    broker, reached = Broker(apis=apis), list[bool]()
    for access in (BrokerAuth(sasl=OWN), BrokerAuth().carrying(Client())):
        with pytest.raises(AccessRefused, match="offers no SASL"):
            await access.introduce(broker.exchange, lambda: reached.append(True))
    assert broker.asked == [(keys.API_VERSIONS, 0)] * 2
    assert not reached


async def test_refused_identity_gets_the_brokers_message() -> None:
    client = Client()
    access = BrokerAuth().carrying(client)
    with pytest.raises(IdentityRefused, match="SASL_AUTHENTICATION_FAILED") as refused:
        await access.authenticate(Broker(error_code=58, message="no alice here").exchange, 1)
    assert refused.value.to_client == "no alice here"
    assert client.refusals == [refused.value]
    # Any other error does not refuse the identity.
    with pytest.raises(IdentityRefused) as failed:
        await access.authenticate(Broker(error_code=-1, message="disk full").exchange, 1)
    assert failed.value.to_client is None
    assert client.refusals == [refused.value, failed.value]


async def test_refusal_of_replaced_credential_does_not_count() -> None:
    client = Client()
    access = BrokerAuth().carrying(client)
    broker = Broker(error_code=58, message="no alice here")

    async def replace(api_key: int) -> None:
        client.number += api_key == keys.SASL_AUTHENTICATE

    broker.before_answer = replace
    with pytest.raises(IdentityRefused) as refused:
        await access.authenticate(broker.exchange, 1)
    assert refused.value.to_client is None
    assert not client.refusals


async def test_identity_of_disconnected_client_is_not_presented() -> None:
    client, broker = Client(), Broker()
    client.credential = None
    with pytest.raises(IdentityRefused, match="disconnected"):
        await BrokerAuth().carrying(client).authenticate(broker.exchange, 1)
    assert not broker.asked
    assert not client.refusals


@pytest.mark.parametrize(
    ("error", "says"), [(TimeoutError(), "judge"), (OSError("reset"), "reset"), (None, "malformed")]
)
async def test_failing_broker_does_not_judge_the_client(error: OSError | None, says: str) -> None:
    client, broker = Client(), Broker()

    async def fail(api_key: int, version: int, body: bytes) -> memoryview:
        if error is not None:
            raise error
        return (await broker.exchange(api_key, version, body))[:-1]

    with pytest.raises(IdentityRefused, match=says) as refused:
        await BrokerAuth().carrying(client).authenticate(fail, 1)
    assert refused.value.to_client is None
    assert client.refusals == [refused.value]


async def test_wait_for_broker_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_auth, "JUDGE_S", 0.05)
    client, broker = Client(), Broker()

    async def hang(api_key: int) -> None:
        await broker_auth.asyncio.sleep(60)

    broker.before_answer = hang
    with pytest.raises(IdentityRefused, match="does not judge"):
        await BrokerAuth().carrying(client).authenticate(broker.exchange, 1)


async def test_refusal_of_proxy_does_not_concern_clients() -> None:
    with pytest.raises(AccessRefused, match="not you") as refused:
        await BrokerAuth(sasl=OWN).introduce(Broker(error_code=58, message="not you").exchange)
    assert not isinstance(refused.value, IdentityRefused)


@pytest.mark.parametrize(
    ("answer", "says"), [(b"", "it closed the connection"), (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it speaks HTTP")]
)
async def test_first_cause_of_an_end_is_reported(answer: bytes, says: str) -> None:
    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(answer)
        writer.close()

    access = BrokerAuth(sasl=OWN)
    async with await asyncio.start_server(end, "127.0.0.1", 0) as server, asyncio.timeout(PATIENCE_S):
        with pytest.raises(AccessRefused, match=says):
            await access.connect(asyncio.Protocol(), *server.sockets[0].getsockname(), "broker.test")


def test_access_knows_credentials_of_its_connections() -> None:
    plain, own, carrying = BrokerAuth(), BrokerAuth(sasl=OWN), BrokerAuth().carrying(Client())
    assert [each.is_plain for each in (plain, own, carrying)] == [True, False, False]
    assert [each.extra_s for each in (plain, own, carrying)] == [0.0, EXTRA_S, EXTRA_S + JUDGE_S]
    assert (plain.context(), plain.server_name("b"), plain.expires_at) == (None, None, None)
    named = BrokerAuth.once(BrokerTls(server_name="brokers.test"), None)
    assert (named.is_plain, named.server_name("b"), named.extra_s) == (False, "brokers.test", EXTRA_S)
    assert named.expires_at is None
    assert named.context() is not None
    assert BrokerAuth.once(BrokerTls(), None).server_name("b") == "b"
    assert not BrokerAuth.once(None, OWN).is_plain


def test_error_of_plain_dial_is_unchanged() -> None:
    for error in (ConnectionResetError("reset"), ConnectionRefusedError("refused")):
        assert BrokerAuth(sasl=OWN).explain(error, "b") is error
    with_tls = BrokerAuth.once(BrokerTls(), None)
    refused = ConnectionRefusedError("refused")
    # No connection was made, so the error is not about TLS.
    assert with_tls.explain(refused, "b") is refused
    assert isinstance(with_tls.explain(ConnectionResetError("reset"), "b"), AccessRefused)
