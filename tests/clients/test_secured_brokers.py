"""`kproxy serve` before a real Apache Kafka cluster that requires TLS, client certificates and SASL."""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import confluent_kafka
import pytest

from kproxy.address import Address
from kproxy.config import load_proxy_config
from kproxy.config.parsing import parse_address
from kproxy.config.tls import AuditTls
from kproxy.security.broker_auth import BrokerAuth
from kproxy.trail import topic_sink
from kproxy.trail.sink import SinkFailed
from kproxy.trail.topic_sink import TopicSink
from tests.support.audit.audit_trails import is_whole, trails_in_topic
from tests.support.clients.kafka_io import produce, read_values
from tests.support.processes.dev import KproxyProcess, run_kproxy, serving
from tests.support.processes.served import counted, kafka_proxy, page
from tests.support.security.tls_files import Pair, Signer
from tests.support.security.tls_kafka import PASSWORD, USER, TlsKafka, start_tls_kafka, unsecured_token
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.java, pytest.mark.timeout(600)]

TIMEOUT_S = 60.0
RELOADS = 'kproxy_tls_reloads_total{outcome="done"}'
RECORDS = 300


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsKafka]:
    # Longer than a proxy needs to begin, and shorter than some tests take.
    with start_tls_kafka(tmp_path_factory.mktemp("secured"), session_s=10) as kafka:
        yield kafka


@pytest.fixture(scope="module")
def client(secured: TlsKafka) -> Pair:
    return secured.signer.issue("proxy", "proxy.example.org", common_name="kproxy")


def until_told(process: KproxyProcess, text: str) -> None:
    wait_for(lambda: text in process.stderr(), TIMEOUT_S, process.stderr)


def mutual(secured: TlsKafka, client: Pair) -> list[str]:
    return [
        *("--broker-tls-ca", str(secured.signer.ca)),
        *("--broker-tls-cert", str(client.cert), "--broker-tls-key", str(client.key)),
    ]


def sasl(secured: TlsKafka, mechanism: str, directory: Path) -> list[str]:
    secret = directory / "secret"
    flags = ["--broker-tls-ca", str(secured.signer.ca), "--broker-sasl-mechanism", mechanism]
    if mechanism == "OAUTHBEARER":
        secret.write_text(unsecured_token(USER))
        return [*flags, "--broker-sasl-token-file", str(secret)]
    secret.write_text(PASSWORD + "\n")
    return [*flags, "--broker-sasl-username", USER, "--broker-sasl-password-file", str(secret)]


def write_and_read(process: KproxyProcess, secured: TlsKafka, *, seconds: float = 0.0) -> None:
    """Write records through the proxy, for some time if asked to, and read all of them back by a consumer group."""
    topic = secured.plain.create_topic(f"t-{uuid.uuid4().hex[:10]}", 3)
    failed: list[object] = []
    places: list[tuple[int, int]] = []

    def delivered(error: object, message: confluent_kafka.Message) -> None:
        if error is not None:
            failed.append(error)
        else:
            places.append((message.partition(), message.offset()))

    producer = confluent_kafka.Producer({"bootstrap.servers": process.kafka, "enable.idempotence": True})
    ends_at, count = time.monotonic() + seconds, 0
    while count < RECORDS or time.monotonic() < ends_at:
        producer.produce(topic, b"%d" % count, b"%d" % count, on_delivery=delivered)
        producer.poll(0)
        count += 1
        if seconds:
            time.sleep(0.005)
    assert producer.flush(TIMEOUT_S) == 0
    assert (failed, len(places), len(set(places))) == ([], count, count), process.stderr()[-3000:]
    read_values({"bootstrap.servers": process.kafka}, topic, count, TIMEOUT_S)


def test_proxy_logs_in_with_a_client_certificate(secured: TlsKafka, client: Pair, tmp_path: Path) -> None:
    with kafka_proxy(tmp_path, secured.mutual, *mutual(secured, client)) as process:
        write_and_read(process, secured)
        assert page(process.admin, "/readyz") == (200, "ready\n")
        assert counted(process.admin, 'kproxy_tls_certificate_expiry_timestamp_seconds{listener="",use="broker"}') > 0


@pytest.mark.long(but_one=True)
@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-512", "PLAIN", "SCRAM-SHA-256", "OAUTHBEARER"])
def test_proxy_identity_outlives_a_session(secured: TlsKafka, tmp_path: Path, mechanism: str) -> None:
    with kafka_proxy(tmp_path, secured.sasl, *sasl(secured, mechanism, tmp_path)) as process:
        write_and_read(process, secured, seconds=22.0)
        assert page(process.admin, "/readyz") == (200, "ready\n")
        assert PASSWORD not in process.stderr()
        # Each was renewed in time: none was ended by the broker.
        assert "broker connection lost" not in process.stderr()
        assert "broker connection abandoned" not in process.stderr()


def stranger(directory: Path) -> Pair:
    return Signer(directory / "stranger").issue("stranger", "proxy.example.org")


# Flags, and what is said to whoever started the proxy.
REFUSED: dict[str, tuple[Callable[[TlsKafka, Pair, Path], tuple[str, list[str]]], str]] = {
    "another authority": (
        lambda kafka, client, tmp: (kafka.mutual, ["--broker-tls-ca", str(Signer(tmp / "other").ca)]),
        "its certificate is not signed by the authorities in broker_tls.ca",
    ),
    "another name": (
        lambda kafka, client, tmp: (kafka.mutual.replace("localhost", "127.0.0.1"), mutual(kafka, client)),
        "its certificate is for another name than 127.0.0.1",
    ),
    "no client certificate": (
        lambda kafka, client, tmp: (kafka.mutual, ["--broker-tls-ca", str(kafka.signer.ca)]),
        "it requires a client certificate: set broker_tls.cert",
    ),
    "another client certificate": (
        lambda kafka, client, tmp: (kafka.mutual, mutual(kafka, stranger(tmp))),
        "the proxy's certificate",
    ),
    "plain text to TLS": (
        lambda kafka, client, tmp: (kafka.mutual, []),
        "it speaks TLS, which is not spoken here: set broker_tls",
    ),
    "TLS to plain text": (
        lambda kafka, client, tmp: (kafka.plain.bootstrap, mutual(kafka, client)),
        "it closed the connection during the TLS handshake",
    ),
    "SASL where there is none": (
        lambda kafka, client, tmp: (kafka.mutual, [*mutual(kafka, client), *sasl(kafka, "PLAIN", tmp)[2:]]),
        "it offers no SASL there",
    ),
    "no SASL where there is some": (
        lambda kafka, client, tmp: (kafka.sasl, ["--broker-tls-ca", str(kafka.signer.ca)]),
        "cannot be reached|did not answer",
    ),
}


@pytest.mark.long(but=3)
@pytest.mark.parametrize("case", REFUSED)
def test_wrong_credentials_are_reported_at_the_start(
    secured: TlsKafka, client: Pair, tmp_path: Path, case: str
) -> None:
    make, says = REFUSED[case]
    bootstrap, flags = make(secured, client, tmp_path)
    arguments = ["serve", "--listen", "127.0.0.1:0", "--ownership", "kafka", "--bootstrap", bootstrap, *flags]
    process = KproxyProcess(arguments, tmp_path / "stderr")
    try:
        wait_for(lambda: re.search(says, process.stderr()) is not None, TIMEOUT_S, process.stderr)
        assert "Traceback" not in process.stderr()
    finally:
        process.stop()


@pytest.mark.long
def test_doctor_has_the_same_access(secured: TlsKafka, client: Pair, tmp_path: Path) -> None:
    for bootstrap, flags in (
        (secured.mutual, mutual(secured, client)),
        (secured.sasl, sasl(secured, "SCRAM-SHA-512", tmp_path)),
    ):
        ended = run_kproxy("doctor", "--bootstrap", bootstrap, *flags)
        assert (ended.status, "FAIL" in ended.stdout) == (0, False), ended.stdout
        assert "read it back" in ended.stdout
    ended = run_kproxy("doctor", "--bootstrap", secured.mutual, "--broker-tls-ca", str(secured.signer.ca))
    assert ended.status == 1
    assert "it requires a client certificate" in ended.stdout
    variables = {"KPROXY_BROKER_SASL__PASSWORD": "hunter2"}
    flags = ["--broker-tls-ca", str(secured.signer.ca), "--broker-sasl-mechanism", "PLAIN"]
    ended = run_kproxy("doctor", "--bootstrap", secured.sasl, *flags, "--broker-sasl-username", USER, environ=variables)
    assert (ended.status, "SASL_AUTHENTICATION_FAILED" in ended.stdout, "hunter2" in ended.stdout) == (1, True, False)
    ended = run_kproxy("doctor", "--broker-tls-enabled")
    assert (ended.status, "give --bootstrap" in ended.stderr) == (2, True)


def test_wrong_password_is_named_and_not_shown(secured: TlsKafka, tmp_path: Path) -> None:
    for mechanism in ("PLAIN", "SCRAM-SHA-512"):
        flags = sasl(secured, mechanism, tmp_path)
        (tmp_path / "secret").write_text("hunter2")
        arguments = ["serve", "--listen", "127.0.0.1:0", "--ownership", "kafka", "--bootstrap", secured.sasl, *flags]
        process = KproxyProcess(arguments, tmp_path / "stderr")
        try:
            until_told(process, "SASL_AUTHENTICATION_FAILED")
            assert "hunter2" not in process.stderr()
        finally:
            process.stop()


def test_new_files_are_used_by_new_connections(secured: TlsKafka, tmp_path: Path) -> None:
    """A client certificate that has ended is replaced, and then the proxy gets through."""
    wrong, right = stranger(tmp_path), secured.signer.issue("fresh", "proxy.example.org")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    for source, target in ((right.cert, cert), (right.key, key)):
        target.write_bytes(source.read_bytes())
    with kafka_proxy(tmp_path, secured.mutual, *mutual(secured, Pair(cert, key))) as process:
        write_and_read(process, secured)
        for source, target in ((wrong.cert, cert), (wrong.key, key)):
            target.write_bytes(source.read_bytes())
            os.utime(target)
        wait_for(lambda: counted(process.admin, RELOADS) == 1, TIMEOUT_S, process.stderr)
        for source, target in ((right.cert, cert), (right.key, key)):
            target.write_bytes(source.read_bytes())
            os.utime(target)
        wait_for(lambda: counted(process.admin, RELOADS) == 2, TIMEOUT_S, process.stderr)
        write_and_read(process, secured)


def trail_options(secured: TlsKafka, client: Pair, mechanism: str, directory: Path) -> tuple[str, str]:
    """The address that accepts it, and the section [audit] for it."""
    lines = [f'tls.ca = "{secured.signer.ca}"']
    if mechanism == "a certificate":
        lines += [f'tls.cert = "{client.cert}"', f'tls.key = "{client.key}"']
        return secured.mutual, "\n".join(lines)
    secret = directory / "trail-secret"
    secret.touch(0o600)
    lines.append(f'sasl.mechanism = "{mechanism}"')
    if mechanism == "OAUTHBEARER":
        secret.write_text(unsecured_token(USER))
        lines.append(f'sasl.token_file = "{secret}"')
    else:
        secret.write_text(PASSWORD + "\n")
        lines += [f'sasl.username = "{USER}"', f'sasl.password_file = "{secret}"']
    return secured.sasl, "\n".join(lines)


@contextmanager
def shipping(directory: Path, upstream: str, bootstrap: str, topic: str, options: str) -> Iterator[KproxyProcess]:
    """A proxy in front of a plain listener whose trail goes to a secured one."""
    file = directory / "kproxy.toml"
    audit = f'[audit]\nsink = "topic:{topic}"\nbootstrap = "{bootstrap}"\ninterval_s = 0.2\n{options}\n'
    file.write_text(f'[ownership]\nownership = "kafka"\nbootstrap = "{upstream}"\n{audit}')
    arguments = ["serve", "--config", file, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    with serving(arguments, directory / "serve.stderr") as process:
        yield process


@pytest.mark.long(but=2)
@pytest.mark.parametrize("mechanism", ["a certificate", "SCRAM-SHA-512", "PLAIN", "SCRAM-SHA-256", "OAUTHBEARER"])
def test_trail_goes_to_a_secured_cluster(secured: TlsKafka, client: Pair, tmp_path: Path, mechanism: str) -> None:
    topic, trail = f"t-{uuid.uuid4().hex[:10]}", f"trail-{uuid.uuid4().hex[:10]}"
    bootstrap, options = trail_options(secured, client, mechanism, tmp_path)
    with shipping(tmp_path, secured.plain.bootstrap, bootstrap, trail, options) as process:
        produce(process.kafka, topic, [b"v"] * 100)
        assert process.stop() == 0
        assert "audit" not in process.stderr()
        assert PASSWORD not in process.stderr()
    (rows,) = trails_in_topic(secured.plain.bootstrap, trail).values()
    assert is_whole(rows)
    assert sum(getattr(row, "record_count", 0) for row in rows) == 100


# What is changed of the options for SCRAM-SHA-512, and what the error says.
TRAIL_REFUSED: dict[str, tuple[str, str, str]] = {
    "another authority": ("{ours}", "{theirs}", "not signed by the authorities in audit.tls.ca: set audit.tls.ca"),
    "another name": ("sasl.mechanism", 'tls.server_name = "other.test"\nsasl.mechanism', "for another name than other"),
    "a wrong password": ("trail-secret", "wrong-secret", "refuses access .*invalid credentials"),
    "no secret any more": ("trail-secret", "lost-secret", "audit.sasl.password_file .*lost-secret cannot be read"),
}


@pytest.mark.long(but=2)
@pytest.mark.parametrize("case", TRAIL_REFUSED)
async def test_cluster_refusing_the_trail_is_reported_with_reason(
    secured: TlsKafka, client: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    bootstrap, options = trail_options(secured, client, "SCRAM-SHA-512", tmp_path)
    (tmp_path / "wrong-secret").write_text("guessed-password")
    (tmp_path / "lost-secret").write_text("lost-password")
    before, after, says = TRAIL_REFUSED[case]
    before, after = before.format(ours=secured.signer.ca), after.format(theirs=Signer(tmp_path / "theirs").ca)
    assert options.count(before) == 1
    file = tmp_path / "kproxy.toml"
    audit = f'[audit]\nsink = "topic"\nbootstrap = "{bootstrap}"\n{options.replace(before, after)}\n'
    file.write_text(f'[ownership]\netcd = "http://127.0.0.1:1"\n{audit}')
    configured = load_proxy_config(file, environ={}).audit
    (tmp_path / "lost-secret").unlink()
    access = BrokerAuth.once(configured.tls, configured.sasl)
    monkeypatch.setattr(topic_sink, "OPEN_S", 1.5)
    sink = TopicSink("trail", "0" * 16, bootstrap=configured.bootstrap, access=access)
    with pytest.raises(SinkFailed, match=says) as raised:
        await sink.write([b"{}"])
    await sink.close()
    assert "password" not in str(raised.value).replace("password_file", "")


@pytest.mark.long
async def test_cluster_without_tls_is_given_up_after_seconds(
    secured: TlsKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_sink, "OPEN_S", 0.5)
    access = BrokerAuth.once(AuditTls(ca=secured.signer.ca), None)
    sink = TopicSink("trail", "0" * 16, bootstrap=[parse_address(secured.plain.bootstrap, "")], access=access)
    with pytest.raises(SinkFailed, match=r"audit\.tls|closed the connection"):
        await sink.write([b"{}"])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sink = TopicSink("trail", "0" * 16, bootstrap=[Address(*silent.getsockname())], access=access)
        began = time.monotonic()
        with pytest.raises(SinkFailed, match="no answer in time"):
            await sink.write([b"{}"])
        assert time.monotonic() - began < 10
