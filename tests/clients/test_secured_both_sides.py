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
import pytest

from tests.support.clients.kafka_io import read_values
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


class Site:
    def __init__(self, process: KproxyProcess, kafka: TlsKafka, signer: Signer) -> None:
        self.process = process
        self.kafka = kafka
        self.signer = signer

    def topic(self, kind: str) -> str:
        return self.kafka.plain.create_topic(f"{kind}-{uuid.uuid4().hex[:10]}", 3)

    def librdkafka(self, name: str, password: str = "") -> dict[str, Any]:
        return {
            "bootstrap.servers": self.process.kafka,
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(self.signer.ca),
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": name,
            "sasl.password": password or USERS[name],
        }

    def aiokafka(self, name: str) -> dict[str, Any]:
        return {
            "bootstrap_servers": self.process.kafka,
            "security_protocol": "SASL_SSL",
            "ssl_context": client_context(self.signer.ca),
            "sasl_mechanism": "SCRAM-SHA-512",
            "sasl_plain_username": name,
            "sasl_plain_password": USERS[name],
        }


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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    signer = Signer(directory / "ca")
    server = signer.issue("server", "localhost")
    with start_tls_kafka(directory / "kafka") as kafka:
        file = configuration(directory, kafka, server)
        with serving(["serve", "--config", file], directory / "stderr") as process:
            yield Site(process, kafka, signer)


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


def test_librdkafka_does_what_it_may_and_nothing_else(site: Site) -> None:
    topic, secret = site.topic("open"), site.topic("secret")
    alice = site.librdkafka("alice")
    values = [b"%d" % number for number in range(RECORDS)]
    assert write({**alice, "enable.idempotence": True}, topic, values) == [None] * RECORDS
    assert read_values(alice, topic, RECORDS, TIMEOUT_S) == set(values)
    assert write(alice, secret, [b"x"]) == ["TOPIC_AUTHORIZATION_FAILED"]
    seen = confluent_kafka.admin.AdminClient(alice).list_topics(timeout=TIMEOUT_S).topics
    assert topic in seen
    assert secret not in seen
    assert counted(site.process.admin, "kproxy_denials_total") > 0
    assert counted(site.process.admin, "kproxy_throttled_requests_total") == 0


def test_librdkafka_is_told_that_it_is_throttled(site: Site) -> None:
    topic, told = site.topic("open"), list[float]()
    bob = {**site.librdkafka("bob"), "throttle_cb": lambda event: told.append(event.throttle_time), "linger.ms": 0}
    bob |= {"batch.num.messages": 1}
    began = time.monotonic()
    assert write(bob, topic, [bytes(RATE // 5)] * 20) == [None] * 20
    # A second's worth at once. The last requests are answered before their wait.
    assert time.monotonic() - began >= 1.5
    assert told
    assert counted(site.process.admin, "kproxy_throttled_requests_total") > 0


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


def test_aiokafka_does_what_it_may_and_nothing_else(site: Site) -> None:
    topic, secret = site.topic("open"), site.topic("secret")

    async def run() -> set[bytes]:
        producer = aiokafka.AIOKafkaProducer(**site.aiokafka("alice"), enable_idempotence=True)
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
            topic, **site.aiokafka("alice"), group_id=topic, auto_offset_reset="earliest"
        )
        await consumer.start()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return {(await consumer.getone()).value for _ in range(RECORDS)}
        finally:
            await consumer.stop()

    assert asyncio.run(run()) == {b"%d" % number for number in range(RECORDS)}
