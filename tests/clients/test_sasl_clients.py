"""Unchanged clients authenticate at the proxy as at a real Kafka broker, and report the same failures."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.dev import KproxyProcess, serving
from tests.support.security.sasl_client import ALLOW_ALL, USERS, users_file
from tests.support.security.secured_clients import CLIENTS, OK
from tests.support.security.secured_kafka import SecuredKafka, start_secured_kafka

pytestmark = [pytest.mark.java, pytest.mark.timeout(900)]

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
# What a client does -> mechanism, user, password.
WRONG = {
    "wrong password, PLAIN": ("PLAIN", "alice", "wrong"),
    "wrong password, SCRAM": ("SCRAM-SHA-256", "alice", "wrong"),
    "unknown user, SCRAM": ("SCRAM-SHA-512", "nobody", "wrong"),
    "no SASL": (None, "", ""),
}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    with start_secured_kafka(tmp_path_factory.mktemp("secured")) as kafka:
        yield kafka


@contextlib.contextmanager
def proxy_before(
    kafka: SecuredKafka, directory: Path, mechanisms: tuple[str, ...] = MECHANISMS
) -> Iterator[KproxyProcess]:
    """A proxy that ends SASL, before the plain listener."""
    config = directory / "kproxy.toml"
    config.write_text(
        f'[sasl]\nmechanisms = "{",".join(mechanisms)}"\nusers = "{users_file(directory)}"\nwithout_tls = true\n'
        + ALLOW_ALL
    )
    arguments = ["serve", "--config", config, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    arguments += ["--ownership", "kafka", "--bootstrap", kafka.plain.bootstrap]
    with serving(arguments, directory / "stderr") as process:
        yield process


@pytest.fixture(scope="module")
def proxy(secured: SecuredKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KproxyProcess]:
    with proxy_before(secured, tmp_path_factory.mktemp("proxy")) as process:
        yield process


@pytest.fixture(scope="module")
def topic(secured: SecuredKafka) -> str:
    return secured.plain.create_topic(f"sasl-{uuid.uuid4().hex[:10]}", 1)


@pytest.mark.long(but=6)
@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("client", CLIENTS)
def test_each_mechanism_lets_a_user_write(proxy: KproxyProcess, topic: str, client: str, mechanism: str) -> None:
    assert CLIENTS[client](proxy.kafka, topic, mechanism, "alice", USERS["alice"]) == OK


@pytest.mark.long(but=6)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_tells_the_same_as_of_kafka(
    secured: SecuredKafka, proxy: KproxyProcess, topic: str, client: str, wrong: str
) -> None:
    mechanism, name, password = WRONG[wrong]
    direct = CLIENTS[client](secured.secured, topic, mechanism, name, password)
    through = CLIENTS[client](proxy.kafka, topic, mechanism, name, password)
    print(f"{client}, {wrong}: {direct}")
    assert direct != OK
    assert through == direct


@pytest.mark.long(but=1)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_mechanism_that_is_not_offered_is_told_as_by_kafka(
    secured: SecuredKafka, topic: str, client: str, tmp_path: Path
) -> None:
    # The broker offers three; the proxy is told to offer one of the two that this client does not ask for.
    with proxy_before(secured, tmp_path, ("SCRAM-SHA-512",)) as process:
        through = CLIENTS[client](process.kafka, topic, "PLAIN", "alice", USERS["alice"])
        assert through != OK
        assert "alice-secret" not in process.stderr()
