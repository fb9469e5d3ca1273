"""Unchanged clients whose own identities the proxy carries on to a real Kafka broker with SASL and ACLs."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AclBinding, AclOperation, AclPermissionType, ResourcePatternType, ResourceType

from kproxy.security.users import SCRAM_MECHANISMS, make_credential, write_users
from tests.support.clients.kafka_io import read_values, write
from tests.support.processes.dev import KproxyProcess, serving
from tests.support.processes.served import counted, kafka_proxy, page
from tests.support.security.sasl_client import ALLOW_ALL, USERS
from tests.support.security.secured_kafka import PROXY, PROXY_SECRET, SecuredKafka, start_secured_kafka
from tests.support.security.tls_files import Signer
from tests.support.security.tls_kafka import PASSWORD, USER, start_tls_kafka, unsecured_token

pytestmark = [pytest.mark.java, pytest.mark.timeout(900)]

TIMEOUT_S = 60.0
RECORDS = 300
# Shorter than a test that renews takes.
SESSION_S = 4.0
CONFIG = f"""
[sasl]
mechanisms = ["PLAIN", "OAUTHBEARER"]
identity = "client"
without_tls = true

[broker_sasl]
mechanism = "PLAIN"
username = "{PROXY}"
password = "{PROXY_SECRET}"
allow_plain_text = true
"""
SECRETS = (PROXY_SECRET, *USERS.values())


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    with start_secured_kafka(tmp_path_factory.mktemp("kafka"), session_s=SESSION_S, tokens=True) as kafka:
        yield kafka


@contextlib.contextmanager
def carrying(kafka: SecuredKafka, directory: Path) -> Iterator[KproxyProcess]:
    """A proxy that knows no user, and carries on what its clients present."""
    config = directory / "kproxy.toml"
    config.write_text(CONFIG + ALLOW_ALL)
    with kafka_proxy(directory, kafka.secured, "--config", str(config)) as process:
        yield process
        told = process.stderr() + page(process.admin, "/metrics")[1] + page(process.admin, "/table")[1]
        assert [secret for secret in SECRETS if secret in told] == []


@pytest.fixture(scope="module")
def proxy(kafka: SecuredKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KproxyProcess]:
    with carrying(kafka, tmp_path_factory.mktemp("proxy")) as process:
        yield process


def topic_of(kafka: SecuredKafka, *names: str) -> str:
    """A topic that these users alone may use; so may they a group of that name."""
    topic = kafka.plain.create_topic(f"carried-{uuid.uuid4().hex[:10]}", 3)
    rules = []
    for name in names:
        for kind, operations in (
            (ResourceType.TOPIC, (AclOperation.WRITE, AclOperation.READ)),
            (ResourceType.GROUP, (AclOperation.READ,)),
        ):
            rules += [
                AclBinding(kind, topic, ResourcePatternType.LITERAL, f"User:{name}", "*", each, AclPermissionType.ALLOW)
                for each in operations
            ]
    for made in kafka.plain.admin().create_acls(rules).values():
        made.result(30)
    return topic


def plain(bootstrap: str, name: str) -> dict[str, Any]:
    return {
        "bootstrap.servers": bootstrap,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": name,
        "sasl.password": USERS[name],
    }


def bearer(bootstrap: str, name: str, valid_s: float = 3600) -> dict[str, Any]:
    return {
        "bootstrap.servers": bootstrap,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "oauth_cb": lambda _: (unsecured_token(name, valid_s), time.time() + max(valid_s, 60.0)),
    }


WAYS: dict[str, Callable[[str, str], dict[str, Any]]] = {"PLAIN": plain, "OAUTHBEARER": bearer}


@pytest.mark.long(but=1)
@pytest.mark.parametrize("way", WAYS)
def test_brokers_tell_clients_apart(kafka: SecuredKafka, proxy: KproxyProcess, way: str) -> None:
    topics = {name: topic_of(kafka, name) for name in USERS}
    values = [b"%d" % number for number in range(RECORDS)]
    for name, other in (("alice", "bob"), ("bob", "alice")):
        settings = WAYS[way](proxy.kafka, name)
        assert write({**settings, "enable.idempotence": True}, topics[name], values) == [None] * RECORDS
        assert read_values(settings, topics[name], RECORDS, TIMEOUT_S) == set(values)
        direct = write(WAYS[way](kafka.secured, name), topics[other], [b"x"])
        assert write(settings, topics[other], [b"x"]) == direct == ["TOPIC_AUTHORIZATION_FAILED"]
        # Metadata, too, is what the broker tells this client.
        seen = confluent_kafka.admin.AdminClient(settings).list_topics(timeout=TIMEOUT_S).topics
        assert topics[name] in seen
        assert topics[other] not in seen


def errors_of(settings: dict[str, Any], until: str) -> set[tuple[str, str]]:
    """The errors that librdkafka tells, up to one of this name, with the broker's words for that one."""
    seen: list[tuple[str, str]] = []

    def tell(error: confluent_kafka.KafkaError) -> None:
        seen.append((str(error.name()), error.str()))

    producer = confluent_kafka.Producer({"log_level": 0, **settings, "error_cb": tell})
    deadline = time.monotonic() + TIMEOUT_S
    while until not in [name for name, _ in seen]:
        assert time.monotonic() < deadline, seen
        producer.poll(0.2)
    return {(name, text.partition("failed: ")[2].partition(" (after")[0]) for name, text in seen if name == until}


@pytest.mark.parametrize("way", WAYS)
def test_client_gets_the_brokers_error_message(kafka: SecuredKafka, proxy: KproxyProcess, way: str) -> None:
    def settings(bootstrap: str) -> dict[str, Any]:
        wrong = {"sasl.password": "wrong"}
        return {**plain(bootstrap, "alice"), **wrong} if way == "PLAIN" else bearer(bootstrap, "alice", valid_s=-30.0)

    direct, through = (errors_of(settings(each), "_AUTHENTICATION") for each in (kafka.secured, proxy.kafka))
    print(direct)
    assert through == direct


def renewals(proxy: KproxyProcess) -> float:
    """How often clients have authenticated beyond the first time on each connection."""
    accepted = counted(proxy.admin, "kproxy_client_connections_accepted_total")
    return counted(proxy.admin, "kproxy_authentications_total") - accepted


@pytest.mark.long(but=1)
@pytest.mark.parametrize("way", WAYS)
def test_session_renewals_lose_no_record(kafka: SecuredKafka, proxy: KproxyProcess, way: str) -> None:
    """For longer than two sessions, under load; the client renews its own, and with it those at the broker."""
    topic = topic_of(kafka, "alice")
    before = renewals(proxy)
    told = len(proxy.stderr())
    ends_at = time.monotonic() + 2.5 * SESSION_S
    values: list[bytes] = []

    def numbers() -> Iterator[bytes]:
        while time.monotonic() < ends_at:
            values.append(b"%d" % len(values))
            yield values[-1]

    settings = {**WAYS[way](proxy.kafka, "alice"), "linger.ms": 0, "enable.idempotence": True}
    if way == "OAUTHBEARER":
        # Each token lasts for as long as the broker's sessions do.
        settings["oauth_cb"] = lambda _: (unsecured_token("alice", 60.0), time.time() + SESSION_S)
    outcomes = write(settings, topic, numbers(), pause_s=0.005)
    assert outcomes == [None] * len(values)
    assert read_values(WAYS[way](proxy.kafka, "alice"), topic, len(values), TIMEOUT_S) == set(values)
    assert renewals(proxy) - before >= 2
    assert "client connection closed" not in proxy.stderr()[told:]
    assert "broker connection lost" not in proxy.stderr()[told:]
    assert "broker connection abandoned" not in proxy.stderr()[told:]


@pytest.mark.long
def test_revoked_client_is_told_and_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "proxy").mkdir()
    with start_secured_kafka(tmp_path / "kafka") as kafka, carrying(kafka, tmp_path / "proxy") as proxy:
        topic = topic_of(kafka, "alice", "bob")
        seen: list[str] = []
        alice = confluent_kafka.Producer(
            {**plain(proxy.kafka, "alice"), "log_level": 0, "error_cb": lambda error: seen.append(error.name())}
        )
        alice.produce(topic, b"a")
        assert alice.flush(TIMEOUT_S) == 0
        bob = confluent_kafka.Producer({**plain(proxy.kafka, "bob"), "log_level": 0})
        bob.produce(topic, b"b")
        assert bob.flush(TIMEOUT_S) == 0
        kafka.revoke("alice")
        deadline = time.monotonic() + TIMEOUT_S
        while "_AUTHENTICATION" not in seen:
            assert time.monotonic() < deadline, (seen, proxy.stderr()[-3000:])
            alice.produce(topic, b"a")
            alice.poll(0.2)
        alice.purge()
        outcomes: list[object] = []
        bob.produce(topic, b"b", on_delivery=lambda error, _: outcomes.append(error))
        assert bob.flush(TIMEOUT_S) == 0
        assert outcomes == [None]
        assert "SASL_AUTHENTICATION_FAILED" in proxy.stderr()


@pytest.mark.long
def test_identity_is_forwarded_over_tls_on_both_ends(tmp_path: Path) -> None:
    """By passwords that the proxy checks first, and by tokens that the broker alone judges."""
    signer = Signer(tmp_path / "ca")
    server = signer.issue("server", "localhost")
    credentials = {kind: make_credential(kind, PASSWORD, 4_096, b"salt" * 5) for kind in SCRAM_MECHANISMS}
    write_users(tmp_path / "users.toml", {USER: credentials, "alice": credentials})
    (tmp_path / "password").write_text(PASSWORD)
    with start_tls_kafka(tmp_path / "kafka") as kafka:
        config = tmp_path / "kproxy.toml"
        config.write_text(
            f'[listen]\nlisten = "localhost:0"\n[tls]\ncert = "{server.cert}"\nkey = "{server.key}"\n'
            f'[sasl]\nmechanisms = "PLAIN,OAUTHBEARER"\nidentity = "client"\nusers = "{tmp_path / "users.toml"}"\n'
            f'[broker_tls]\nca = "{kafka.signer.ca}"\n[broker_sasl]\nmechanism = "SCRAM-SHA-512"\n'
            f'username = "{USER}"\npassword_file = "{tmp_path / "password"}"\n{ALLOW_ALL}'
        )
        arguments: list[str | Path] = ["serve", "--config", config, "--ownership", "kafka", "--bootstrap", kafka.sasl]
        with serving(arguments, tmp_path / "stderr") as process:
            topic = kafka.plain.create_topic(f"tls-{uuid.uuid4().hex[:10]}", 3)
            secured = {"security.protocol": "SASL_SSL", "ssl.ca.location": str(signer.ca)}
            known = {"sasl.username": USER, "sasl.password": PASSWORD}
            assert write({**plain(process.kafka, "alice"), **secured, **known}, topic, [b"a"] * 9) == [None] * 9
            assert write({**bearer(process.kafka, "alice"), **secured}, topic, [b"a"] * 9) == [None] * 9
            # The proxy takes alice's password, and the broker does not.
            for password, is_judged in (("wrong", False), (PASSWORD, True)):
                wrong = {**plain(process.kafka, "alice"), **secured, "sasl.password": password}
                errors_of(wrong, "_AUTHENTICATION")
                assert ("it refuses the identity" in process.stderr()) == is_judged
            assert PASSWORD not in process.stderr()
