"""Unchanged clients authenticate at the proxy as at a real Kafka broker, and report the same failures."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kproxy_codec import api_keys as keys
from kproxy_codec.framing import frame_message
from tests.support.clients import raw_client
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import kafka_proxy
from tests.support.security import sasl_client as sasl
from tests.support.security.sasl_client import ALLOW_ALL, AUDIENCE, ISSUER, USERS, jwks, token, users_file
from tests.support.security.secured_clients import CLIENTS, OK
from tests.support.security.secured_kafka import SecuredKafka, start_secured_kafka

pytestmark = [pytest.mark.java, pytest.mark.timeout(900)]

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
# What a client does -> mechanism, user, password.
WRONG = {
    "wrong password, PLAIN": ("PLAIN", "alice", "wrong"),
    "wrong password, SCRAM": ("SCRAM-SHA-256", "alice", "wrong"),
    "unknown user, SCRAM": ("SCRAM-SHA-256", "nobody", "wrong"),
    "no SASL": (None, "", ""),
}
# Kafka offers these, and so does the second proxy.
OFFERED = ("PLAIN", "SCRAM-SHA-256", "OAUTHBEARER")
NOT_OFFERED = "SCRAM-SHA-512"
TOKENS: dict[str, Callable[[], str]] = {
    "expired": lambda: token(lifetime_s=-3_600.0),
    "signed by another key": lambda: token(1),
    "for another audience": lambda: token(aud="another"),
    "of another issuer": lambda: token(iss="https://another.test/"),
}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    directory = tmp_path_factory.mktemp("secured")
    keys = directory / "keys.json"
    keys.write_text(jwks(0))
    with start_secured_kafka(directory / "kafka", mechanisms=OFFERED[:2], keys=keys) as kafka:
        yield kafka


@contextlib.contextmanager
def proxy_before(
    kafka: SecuredKafka, directory: Path, mechanisms: tuple[str, ...] = MECHANISMS, more: str = ""
) -> Iterator[KproxyProcess]:
    """A proxy that ends SASL, before the plain listener."""
    config, keys = directory / "kproxy.toml", directory / "keys.json"
    keys.write_text(jwks(0))
    config.write_text(
        f'[sasl]\nmechanisms = "{",".join(mechanisms)}"\nusers = "{users_file(directory)}"\nwithout_tls = true\n{more}'
        + (f'[oauth]\njwks = "{keys}"\nissuer = "{ISSUER}"\naudience = "{AUDIENCE}"\n' * ("OAUTHBEARER" in mechanisms))
        + ALLOW_ALL
    )
    with kafka_proxy(directory, kafka.plain.bootstrap, "--config", str(config)) as process:
        yield process


@pytest.fixture(scope="module")
def proxy(secured: SecuredKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KproxyProcess]:
    with proxy_before(secured, tmp_path_factory.mktemp("proxy")) as process:
        yield process


@pytest.fixture(scope="module")
def topic(secured: SecuredKafka) -> str:
    return secured.plain.create_topic(f"sasl-{uuid.uuid4().hex[:10]}", 1)


@pytest.mark.long(but=4)
@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("client", CLIENTS)
def test_each_mechanism_lets_a_user_write(proxy: KproxyProcess, topic: str, client: str, mechanism: str) -> None:
    assert CLIENTS[client](proxy.kafka, topic, mechanism, "alice", USERS["alice"]) == OK


def told_by(client: str, bootstraps: Sequence[str], topic: str, *credentials: str | None) -> list[str]:
    """What a client tells of each, at the same time: some try again for seconds."""
    with ThreadPoolExecutor(len(bootstraps)) as pool:
        return [*pool.map(lambda each: CLIENTS[client](each, topic, *credentials), bootstraps)]  # type: ignore[arg-type]


@pytest.mark.long(but=2)
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("wrong", WRONG)
def test_client_reports_same_error_as_from_kafka(
    secured: SecuredKafka, proxy: KproxyProcess, topic: str, client: str, wrong: str
) -> None:
    direct, through = told_by(client, [secured.secured, proxy.kafka], topic, *WRONG[wrong])
    print(f"{client}, {wrong}: {direct}")
    assert direct != OK
    assert through == direct


@pytest.fixture(scope="module")
def same_mechanisms(secured: SecuredKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KproxyProcess]:
    """A proxy that offers what Kafka offers, in the same order."""
    with proxy_before(secured, tmp_path_factory.mktemp("same"), OFFERED) as process:
        yield process


@pytest.mark.long(but=2)
@pytest.mark.parametrize("client", CLIENTS)
def test_unoffered_mechanism_is_reported_as_by_kafka(
    secured: SecuredKafka, same_mechanisms: KproxyProcess, topic: str, client: str
) -> None:
    where = [secured.secured, same_mechanisms.kafka]
    direct, through = told_by(client, where, topic, NOT_OFFERED, "alice", "unused")
    print(f"{client}: {direct}")
    assert direct != OK
    assert through == direct


@pytest.mark.long(but=2)
@pytest.mark.parametrize("client", [each for each in CLIENTS if each != "aiokafka"])
@pytest.mark.parametrize("refused", TOKENS)
def test_refused_token_is_reported_as_by_kafka(
    secured: SecuredKafka, same_mechanisms: KproxyProcess, topic: str, client: str, refused: str
) -> None:
    presented = TOKENS[refused]()
    direct, through = told_by(client, [secured.secured, same_mechanisms.kafka], topic, "OAUTHBEARER", "", presented)
    print(f"{client}, {refused}: {direct}")
    assert direct != OK
    assert through == direct
    assert presented not in same_mechanisms.stderr()


def test_aiokafka_with_a_refused_token_cannot_connect(same_mechanisms: KproxyProcess, topic: str) -> None:
    """It takes the refusal for a success, and asks for metadata.

    Kafka answers that with an error, which aiokafka takes for a cluster without topics. The proxy reads nothing but
    SASL before it is authenticated, and closes the connection.
    """
    presented = TOKENS["expired"]()
    assert told_by("aiokafka", [same_mechanisms.kafka], topic, "OAUTHBEARER", "", presented) == ["KafkaConnectionError"]


@pytest.mark.long(but=1)
@pytest.mark.parametrize("client", CLIENTS)
def test_token_lets_its_user_write(same_mechanisms: KproxyProcess, topic: str, client: str) -> None:
    assert told_by(client, [same_mechanisms.kafka], topic, "OAUTHBEARER", "", token()) == [OK]


SESSION_S = 2.0


async def authenticated(address: str, version: int | None) -> raw_client.RawClient:
    """A client by PLAIN, in SaslAuthenticate of that version, or None: in bare messages behind SaslHandshake v0."""
    client = await raw_client.RawClient().connect(int(address.rpartition(":")[2]))
    plain = sasl.plain("alice", USERS["alice"])
    client.send(sasl.handshake("PLAIN", 0 if version is None else 1))
    await client.answer(keys.SASL_HANDSHAKE, 0 if version is None else 1)
    client.send(frame_message(plain) if version is None else sasl.authenticate(plain, version))
    await client.receive()
    return client


@pytest.mark.parametrize("at", [pytest.param("Kafka", marks=pytest.mark.long), "the proxy"])
def test_session_ends_for_each_version(sessions: Mapping[str, str], at: str) -> None:
    """The docs said that clients that do not learn of the end are served on, as by Kafka: neither is so."""

    async def judge() -> None:
        for version in (None, 0, 1, 2):
            client = await authenticated(sessions[at], version)
            asked = raw_client.control_frame(keys.METADATA, 4, topics=[], allow_auto_topic_creation=False)
            client.send(asked)
            await client.receive()
            await asyncio.sleep(SESSION_S + 0.5)
            client.send(asked)
            assert await client.is_closed(), version

    asyncio.run(judge())


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """Where sessions end: a broker, and a proxy before another listener of it."""
    directory = tmp_path_factory.mktemp("sessions")
    more = f"handshake_v0 = true\nsession_lifetime_s = {SESSION_S}\n"
    with (
        start_secured_kafka(directory / "kafka", session_s=SESSION_S) as kafka,
        proxy_before(kafka, directory, ("PLAIN",), more) as proxy,
    ):
        yield {"Kafka": kafka.secured, "the proxy": proxy.kafka}
