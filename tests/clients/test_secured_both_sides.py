"""TLS, SCRAM, ACLs and quotas together for unchanged clients, before a Kafka cluster that requires TLS and SCRAM."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiokafka  # type: ignore[import-untyped]
import confluent_kafka
import kafka
import kafka.errors
import pytest

from tests.support.brokers.kafka_jars import client_classpath
from tests.support.clients.java_client import run_java_client
from tests.support.clients.kafka_io import Record, read_values
from tests.support.processes.dev import KproxyProcess, serving
from tests.support.processes.served import counted
from tests.support.security.sasl_client import USERS, users_file
from tests.support.security.tls_files import Pair, Signer, client_context
from tests.support.security.tls_kafka import PASSWORD, USER, TlsKafka, start_tls_kafka

pytestmark = [pytest.mark.java, pytest.mark.timeout(600)]

TIMEOUT_S = 60.0
RECORDS = 300
RATE = 50_000
# Alice and bob use the topics of this run alone, and bob as much as the quota says.
RULES = f"""
[[acls]]
principal = "User:*"
operations = ["read", "write"]
topics = ["open-*"]
groups = ["open-*"]

[[quotas]]
principal = "User:bob"
produce_bytes_per_s = {RATE}
"""


# The whole of a client's name, as the proxy knows it.
NAMED_BY_CERTIFICATE = 'principal_mapping_rules = ["RULE:^CN=([^,]+),.*$/$1/"]'
_SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"


class Site:
    """A proxy before `kafka`. Its clients come over TLS, with SCRAM or, `by_certificate`, with certificates."""

    def __init__(self, process: KproxyProcess, kafka: TlsKafka, signer: Signer, *, by_certificate: bool) -> None:
        self.process = process
        self.kafka = kafka
        self.signer = signer
        self._by_certificate = by_certificate

    def topic(self, kind: str) -> str:
        return self.kafka.plain.create_topic(f"{kind}-{uuid.uuid4().hex[:10]}", 3)

    def _pair(self, name: str) -> Pair | None:
        return self.signer.issue(name, f"{name}.example.org", common_name=name) if self._by_certificate else None

    def librdkafka(self, name: str, password: str = "") -> dict[str, Any]:
        settings = {"bootstrap.servers": self.process.kafka, "ssl.ca.location": str(self.signer.ca)}
        if (pair := self._pair(name)) is not None:
            shown = {"ssl.certificate.location": str(pair.cert), "ssl.key.location": str(pair.key)}
            return {**settings, "security.protocol": "SSL", **shown}
        known = {"sasl.username": name, "sasl.password": password or USERS[name]}
        return {**settings, "security.protocol": "SASL_SSL", "sasl.mechanism": "SCRAM-SHA-512", **known}

    def python(self, name: str) -> dict[str, Any]:
        """For kafka-python and aiokafka."""
        pair = self._pair(name)
        settings: dict[str, Any] = {"bootstrap_servers": self.process.kafka}
        settings["ssl_context"] = client_context(self.signer.ca, pair)
        if pair is not None:
            return {**settings, "security_protocol": "SSL"}
        known = {"sasl_plain_username": name, "sasl_plain_password": USERS[name]}
        return {**settings, "security_protocol": "SASL_SSL", "sasl_mechanism": "SCRAM-SHA-512", **known}

    def java(self, name: str) -> dict[str, object]:
        settings: dict[str, object] = {"bootstrap.servers": self.process.kafka, "ssl.truststore.type": "PEM"}
        settings["ssl.truststore.location"] = self.signer.ca
        if (pair := self._pair(name)) is not None:
            store = pair.cert.with_suffix(".store.pem")
            store.write_bytes(pair.key.read_bytes() + pair.cert.read_bytes())
            return {**settings, "security.protocol": "SSL", "ssl.keystore.type": "PEM", "ssl.keystore.location": store}
        jaas = f'{_SCRAM} required username="{name}" password="{USERS[name]}";'
        known = {"sasl.mechanism": "SCRAM-SHA-512", "sasl.jaas.config": jaas}
        return {**settings, "security.protocol": "SASL_SSL", **known}


def configuration(directory: Path, kafka: TlsKafka, server: Pair) -> Path:
    (directory / "broker-password").write_text(PASSWORD)
    file = directory / "kproxy.toml"
    file.write_text(
        f'[listen]\nlisten = "localhost:0"\nadmin = ":0"\n'
        f'[ownership]\nownership = "kafka"\nbootstrap = "{kafka.sasl}"\n'
        f'[tls]\ncert = "{server.cert}"\nkey = "{server.key}"\n'
        f'[sasl]\nmechanisms = "SCRAM-SHA-512"\nusers = "{users_file(directory)}"\n'
        f'[broker_tls]\nca = "{kafka.signer.ca}"\n'
        f'[broker_sasl]\nmechanism = "SCRAM-SHA-256"\nusername = "{USER}"\n'
        f'password_file = "{directory / "broker-password"}"\n{RULES}'
    )
    return file


def configuration_by_certificate(directory: Path, kafka: TlsKafka, server: Pair, clients: Signer) -> Path:
    own = kafka.signer.issue("proxy", "proxy.example.org", common_name="kproxy")
    file = directory / "kproxy.toml"
    file.write_text(
        f'[listen]\nlisten = "localhost:0"\nadmin = ":0"\n'
        f'[ownership]\nownership = "kafka"\nbootstrap = "{kafka.mutual}"\n'
        f'[tls]\ncert = "{server.cert}"\nkey = "{server.key}"\nclient_ca = "{clients.ca}"\n{NAMED_BY_CERTIFICATE}\n'
        f'[broker_tls]\nca = "{kafka.signer.ca}"\ncert = "{own.cert}"\nkey = "{own.key}"\n{RULES}'
    )
    return file


@pytest.fixture(scope="module")
def kafka_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsKafka]:
    with start_tls_kafka(tmp_path_factory.mktemp("kafka")) as kafka:
        yield kafka


@pytest.fixture(scope="module")
def site(kafka_behind: TlsKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """SASL_SSL with SCRAM on both sides."""
    directory = tmp_path_factory.mktemp("site")
    signer = Signer(directory / "ca")
    file = configuration(directory, kafka_behind, signer.issue("server", "localhost"))
    with serving(["serve", "--config", file], directory / "stderr") as process:
        yield Site(process, kafka_behind, signer, by_certificate=False)


@pytest.fixture(scope="module")
def certificate_site(kafka_behind: TlsKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Client certificates on both sides."""
    directory = tmp_path_factory.mktemp("certificates")
    signer = Signer(directory / "ca")
    file = configuration_by_certificate(directory, kafka_behind, signer.issue("server", "localhost"), signer)
    with serving(["serve", "--config", file], directory / "stderr") as process:
        yield Site(process, kafka_behind, signer, by_certificate=True)


@pytest.fixture(params=["site", "certificate_site"])
def each_site(request: pytest.FixtureRequest) -> Site:
    found: Site = request.getfixturevalue(request.param)
    return found


def write(settings: dict[str, Any], topic: str, values: list[bytes]) -> list[object]:
    """Write the values; the outcomes, None for each that is written."""
    outcomes: list[object] = []
    producer = confluent_kafka.Producer(settings)
    for value in values:
        producer.produce(
            topic, value, on_delivery=lambda error, _: outcomes.append(None if error is None else error.name())
        )
        producer.poll(0)
    assert producer.flush(TIMEOUT_S) == 0
    return outcomes


def test_librdkafka_does_what_it_may_and_nothing_else(each_site: Site) -> None:
    site = each_site
    topic, secret = site.topic("open"), site.topic("secret")
    alice = site.librdkafka("alice")
    values = [b"%d" % number for number in range(RECORDS)]
    before = counted(site.process.admin, "kproxy_denials_total")
    assert write({**alice, "enable.idempotence": True}, topic, values) == [None] * RECORDS
    assert read_values(alice, topic, RECORDS, TIMEOUT_S) == set(values)
    assert write(alice, secret, [b"x"]) == ["TOPIC_AUTHORIZATION_FAILED"]
    seen = confluent_kafka.admin.AdminClient(alice).list_topics(timeout=TIMEOUT_S).topics
    assert topic in seen
    assert secret not in seen
    assert counted(site.process.admin, "kproxy_denials_total") > before


def test_librdkafka_is_told_that_it_is_throttled(site: Site) -> None:
    topic, told = site.topic("open"), list[float]()
    before = counted(site.process.admin, "kproxy_throttled_requests_total")
    bob = {**site.librdkafka("bob"), "throttle_cb": lambda event: told.append(event.throttle_time), "linger.ms": 0}
    bob |= {"batch.num.messages": 1}
    began = time.monotonic()
    assert write(bob, topic, [bytes(RATE // 5)] * 20) == [None] * 20
    # A second's worth at once. The last requests are answered before their wait.
    assert time.monotonic() - began >= 1.5
    assert told
    assert counted(site.process.admin, "kproxy_throttled_requests_total") > before


def test_librdkafka_with_a_wrong_password(site: Site) -> None:
    seen: list[str] = []
    settings = {**site.librdkafka("alice", "wrong"), "error_cb": lambda error: seen.append(error.name())}
    producer = confluent_kafka.Producer(settings)
    deadline = time.monotonic() + TIMEOUT_S
    while "_AUTHENTICATION" not in seen:
        assert time.monotonic() < deadline, seen
        producer.poll(0.2)
    assert "alice-secret" not in site.process.stderr()
    assert PASSWORD not in site.process.stderr()


def test_aiokafka_does_what_it_may_and_nothing_else(each_site: Site) -> None:
    site = each_site
    topic, secret = site.topic("open"), site.topic("secret")

    async def run() -> set[bytes]:
        producer = aiokafka.AIOKafkaProducer(**site.python("alice"), enable_idempotence=True)
        await producer.start()
        try:
            for number in range(RECORDS):
                await producer.send(topic, b"%d" % number)
            await producer.flush()
            with pytest.raises(aiokafka.errors.TopicAuthorizationFailedError):
                await producer.send_and_wait(secret, b"x")
        finally:
            await producer.stop()
        consumer = aiokafka.AIOKafkaConsumer(
            topic, **site.python("alice"), group_id=topic, auto_offset_reset="earliest"
        )
        await consumer.start()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return {(await consumer.getone()).value for _ in range(RECORDS)}
        finally:
            await consumer.stop()

    assert asyncio.run(run()) == {b"%d" % number for number in range(RECORDS)}


def test_kafka_python_does_what_it_may_and_nothing_else(each_site: Site) -> None:
    topic, secret = each_site.topic("open"), each_site.topic("secret")
    alice = each_site.python("alice")
    producer = kafka.KafkaProducer(**alice, enable_idempotence=True)
    try:
        placed = [producer.send(topic, b"%d" % number) for number in range(RECORDS)]
        producer.flush(TIMEOUT_S)
        assert len({(each.get(0).partition, each.get(0).offset) for each in placed}) == RECORDS
        with pytest.raises(kafka.errors.TopicAuthorizationFailedError):
            producer.send(secret, b"x").get(TIMEOUT_S)
    finally:
        producer.close(0)
    consumer = kafka.KafkaConsumer(
        topic, **alice, group_id=topic, auto_offset_reset="earliest", consumer_timeout_ms=60_000
    )
    read = {next(consumer).value for _ in range(RECORDS)}
    consumer.close()
    assert read == {b"%d" % number for number in range(RECORDS)}


def test_java_writes_and_reads(each_site: Site) -> None:
    topic = each_site.topic("open")
    records = [Record(None, b"%d" % number) for number in range(RECORDS)]
    run = run_java_client(client_classpath("4.3.1"), topic, records, each_site.java("alice"), read_back=3)
    assert (run.errors, len(run.acknowledged)) == ({}, RECORDS)
    assert {each.value for each in run.read} == {record.value for record in records}
