"""Clients use TLS, SCRAM, ACLs and quotas together, before a Kafka cluster that requires TLS and SCRAM.

Some tests use client certificates on both sides, or exchange all files of a proxy under load, with no failed request.
"""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka
import psutil
import pytest

from kproxy.security.users import SCRAM_MECHANISMS, make_credential, write_users
from tests.support.brokers.kafka_jars import client_classpath
from tests.support.clients.java_client import run_java_client
from tests.support.clients.kafka_io import Record, read_topic, read_values, write
from tests.support.clients.steady_writers import IN_PRODUCER, MODES, Found, Writer, find, writing
from tests.support.processes.dev import KproxyProcess, serving
from tests.support.processes.served import counted, page
from tests.support.security.sasl_client import USERS, users_file
from tests.support.security.tls_files import Pair, Signer, client_context
from tests.support.security.tls_kafka import PASSWORD, USER, TlsKafka, start_tls_kafka
from tests.support.waiting import wait_for

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


@pytest.mark.long(but=1)
def test_librdkafka_does_only_what_is_allowed(each_site: Site) -> None:
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


def test_librdkafka_learns_its_throttle_time(site: Site) -> None:
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


def test_librdkafka_with_wrong_password_is_rejected(site: Site) -> None:
    seen: list[str] = []
    settings = {**site.librdkafka("alice", "wrong"), "error_cb": lambda error: seen.append(error.name())}
    producer = confluent_kafka.Producer(settings)
    deadline = time.monotonic() + TIMEOUT_S
    while "_AUTHENTICATION" not in seen:
        assert time.monotonic() < deadline, seen
        producer.poll(0.2)
    assert "alice-secret" not in site.process.stderr()
    assert PASSWORD not in site.process.stderr()


@pytest.mark.long(but=1)
def test_java_writes_and_reads(each_site: Site) -> None:
    topic = each_site.topic("open")
    records = [Record(None, b"%d" % number) for number in range(RECORDS)]
    unknown = 'kproxy_errors_total{api="PRODUCE",error="UNKNOWN_TOPIC_ID",'
    before = counted(each_site.process.admin, unknown)
    run = run_java_client(client_classpath("4.3.1"), topic, records, each_site.java("alice"), read_back=3)
    assert (run.errors, len(run.acknowledged)) == ({}, RECORDS)
    assert {each.value for each in run.read} == {record.value for record in records}
    # It names the topic by an id that is new to the proxy, which looks the name up at once.
    assert counted(each_site.process.admin, unknown) - before <= 9


# Files exchanged under load

STEADY_RULES = """
[[acls]]
principal = "User:*"
operations = ["read", "write"]
topics = ["open-*"]
"""
CAROLS_RULE = """
[[acls]]
principal = "User:carol"
operations = ["write"]
topics = ["carols-*"]
"""
NEW_RULE = """
[[acls]]
principal = "User:alice"
operations = ["write"]
topics = ["granted-*"]
"""
FAILED = 'kproxy_authentications_total{mechanism="SCRAM-SHA-512",outcome="failed"}'


def put(file: Path, content: bytes) -> None:
    """Replace a file as one should: whole, by its name."""
    beside = file.with_name(f".{file.name}")
    beside.write_bytes(content)
    beside.replace(file)


def give_users(file: Path, *names: str, **passwords: str) -> None:
    """Without one of their own, passwords are the names and "-secret", as those of USERS are."""
    kinds = {name: f"{name}-secret" for name in names} | passwords
    write_users(
        file,
        {
            name: {kind: make_credential(kind, password, 4_096, name.encode().ljust(18)) for kind in SCRAM_MECHANISMS}
            for name, password in kinds.items()
        },
    )


class Loaded:
    """A proxy under load, all of whose files are exchanged; SCRAM for clients, certificates towards brokers."""

    def __init__(self, directory: Path, kafka: TlsKafka, workers: str) -> None:
        self.kafka, self._workers, self._directory = kafka, workers, directory
        self.users, self.config = directory / "users.toml", directory / "kproxy.toml"
        self.signer = Signer(directory / "ca")
        self.server = self.signer.issue("server", "localhost", days=30)
        # The proxy's own, which are copies.
        self.own = Pair(directory / "own.pem", directory / "own.key")
        self.brokers_ca = directory / "brokers-ca.pem"
        give_users(self.users, "alice", "bob", "carol")
        self.show_brokers(kafka.signer.issue("first", "proxy.example.org", days=30), kafka.signer)
        self.allow(STEADY_RULES, CAROLS_RULE)

    def show_brokers(self, pair: Pair, *authorities: Signer) -> None:
        put(self.brokers_ca, b"".join(each.ca.read_bytes() for each in authorities))
        for source, target in zip(pair, self.own, strict=True):
            put(target, source.read_bytes())

    def allow(self, *rules: str) -> None:
        fixed = (
            f'[listen]\nlisten = "localhost:0"\nadmin = ":0"\nworkers = {self._workers}\n'
            f'[ownership]\nownership = "kafka"\nbootstrap = "{self.kafka.mutual}"\n'
            f'[tls]\ncert = "{self.server.cert}"\nkey = "{self.server.key}"\n'
            f'[sasl]\nmechanisms = "SCRAM-SHA-512"\nusers = "{self.users}"\n'
            f'[broker_tls]\nca = "{self.brokers_ca}"\ncert = "{self.own.cert}"\nkey = "{self.own.key}"\n'
        )
        put(self.config, "".join((fixed, *rules)).encode())

    @contextmanager
    def serve(self) -> Iterator[Site]:
        with serving(["serve", "--config", self.config], self._directory / "stderr") as process:
            yield Site(process, self.kafka, self.signer, by_certificate=False)


def log_in(site: Site, name: str, topic: str) -> str:
    """How a new producer fares: "ok", or librdkafka's name of the error."""
    told: list[str] = []
    settings = {**site.librdkafka(name, f"{name}-secret"), "log_level": 0, "reconnect.backoff.ms": 10_000}

    def note(error: Any, _: object = None) -> None:
        told.append("ok" if error is None else error.name())

    producer = confluent_kafka.Producer({**settings, "error_cb": note})
    producer.produce(topic, b"log in", partition=0, on_delivery=note)
    wait_for(lambda: (producer.poll(0.05) and told) or told, TIMEOUT_S, site.process.stderr)
    producer.purge()
    return told[0]


def connections(site: Site) -> set[tuple[int, int]]:
    """Those of this process and of its clients in Java to the proxy: process id and port of each."""
    port = int(site.process.kafka.rpartition(":")[2])
    processes = [psutil.Process(), *(each for each in psutil.Process().children() if each.name() == "java")]
    return {
        (process.pid, each.laddr.port)
        for process in processes
        for each in process.net_connections("tcp")
        if each.raddr and each.raddr.port == port and each.status == psutil.CONN_ESTABLISHED
    }


def expiry(site: Site, use: str) -> float:
    """When the certificate in use ends, the one that ends first of several workers'."""
    return counted(site.process.admin, f'kproxy_tls_certificate_expiry_timestamp_seconds{{listener="",use="{use}"}}')


@pytest.mark.long
@pytest.mark.parametrize("workers", ["1", "2"])
def test_file_exchange_under_load_fails_no_request(kafka_behind: TlsKafka, tmp_path: Path, workers: str) -> None:
    """Nobody tries again, each connection stays, and one producer after another logs in meanwhile."""
    loaded = Loaded(tmp_path, kafka_behind, workers)
    with loaded.serve() as site:
        kafka, process = kafka_behind.plain, site.process
        topic = kafka.create_topic(f"open-{uuid.uuid4().hex[:10]}", 6)
        hers, granted = site.topic("carols"), site.topic("granted")
        mode, once = MODES["acks-all"], {"retries": 0}

        def writer(name: str, where: int, settings: dict[str, Any], **more: Any) -> Writer:
            return Writer(name, process.kafka, topic, where, mode, settings, **more)

        alice = {**site.librdkafka("alice"), **once}
        steady = [
            writer("librdkafka", 0, alice),
            writer("kafka-python", 1, {**site.python("alice"), **once}),
            # It has no such setting; the proxy's count of errors shows the first attempts.
            writer("aiokafka", 2, site.python("alice")),
            writer("librdkafka", 3, {**site.librdkafka("bob"), **once}),
        ]
        if workers != "1":
            steady.append(writer("java 4.3.1", 4, {**site.java("alice"), **once}))
        renewed = writer("librdkafka", 5, alice, is_renewed=True)
        carol = Writer("librdkafka", process.kafka, hers, 0, mode, {**site.librdkafka("carol", "carol-secret"), **once})
        failures = 0.0

        with writing(steady) as stays, writing([renewed]) as comes:
            assert stays.all_acknowledged(0.0, 10, time.monotonic() + TIMEOUT_S)
            held = connections(site)

            def goes_on() -> None:
                now = time.monotonic()
                assert stays.all_acknowledged(now, 10, now + TIMEOUT_S), process.stderr()[-2000:]
                assert comes.all_acknowledged(now, 2 * IN_PRODUCER, now + TIMEOUT_S), process.stderr()[-2000:]
                assert [each.problems for each in (*steady, renewed)] == [[]] * (len(steady) + 1)
                assert counted(process.admin, FAILED) == failures

            with writing([carol]) as carols:
                goes_on()
                # Some clients give up the connection that they have begun with.
                held &= connections(site)
                assert len(held) >= len(steady)
                change_the_listeners_certificate(loaded, site)
                goes_on()
                failures = change_the_users(loaded, site, topic)
                goes_on()
                assert carols.all_acknowledged(time.monotonic(), 10, time.monotonic() + TIMEOUT_S)
                assert carol.problems == []
                assert write(alice, granted, [b"x"]) == ["TOPIC_AUTHORIZATION_FAILED"]
                loaded.allow(STEADY_RULES, NEW_RULE)
                process.signal(signal.SIGHUP)
                wait_for(lambda: carols.check() or carol.problems, TIMEOUT_S, process.stderr)
            wait_for(lambda: write(alice, granted, [b"x"]) == [None], TIMEOUT_S, process.stderr)
            assert {each.partition("code=")[2].partition(",")[0] for each in carol.problems} == {
                "TOPIC_AUTHORIZATION_FAILED"
            }
            goes_on()
            change_the_authority_of_brokers(loaded, site, goes_on)
            assert held <= connections(site)
            assert counted(process.admin, "kproxy_client_connections ") >= len(held)
        # A client that gets no CPU for ten seconds is timed out, and connects again.
        outcomes = [
            counted(process.admin, f'kproxy_client_handshakes_total{{outcome="{each}"}}')
            for each in ("done", "timeout")
        ]
        assert counted(process.admin, "kproxy_client_handshakes_total") == sum(outcomes) > len(held)
        for name in ("client_connections_cut", "client_connections_refused", 'tls_reloads_total{outcome="failed"}'):
            assert counted(process.admin, f"kproxy_{name}") == 0, name
        errors = [each for each in page(process.admin, "/metrics")[1].splitlines() if "kproxy_errors_total{" in each]
        assert [each for each in errors if "TOPIC_AUTHORIZATION_FAILED" not in each] == []
        written = read_topic(kafka.bootstrap, topic, 6, sum(len(each.kept) for each in (*steady, renewed)))
        ours = [each for each in written if each.value != b"log in"]
        assert [find(each, ours) for each in (*steady, renewed)] == [Found(0, 0, True)] * (len(steady) + 1)


def change_the_listeners_certificate(loaded: Loaded, site: Site) -> None:
    before, signed = expiry(site, "listener"), loaded.signer.issue("next", "localhost", days=60)
    for source, target in zip(signed, loaded.server, strict=True):
        source.replace(target)
    site.process.signal(signal.SIGHUP)
    wait_for(lambda: expiry(site, "listener") > before, TIMEOUT_S, site.process.stderr)


def change_the_users(loaded: Loaded, site: Site, topic: str) -> float:
    """Dave may log in then, and bob with another password alone; return how many attempts have failed until then.

    Bob's connections stay, as with Kafka: only the removal of a user closes them (test_admission).
    The proxy notices the file by itself.
    """
    assert log_in(site, "dave", topic) == "_AUTHENTICATION"
    assert log_in(site, "bob", topic) == "ok"
    before = site.process.stderr().count("what=users")
    give_users(loaded.users, "alice", "carol", "dave", bob="another-secret")
    wait_for(lambda: site.process.stderr().count("what=users") > before, TIMEOUT_S, site.process.stderr)
    wait_for(lambda: log_in(site, "bob", topic) == "_AUTHENTICATION", TIMEOUT_S, site.process.stderr)
    wait_for(lambda: log_in(site, "dave", topic) == "ok", TIMEOUT_S, site.process.stderr)
    return counted(site.process.admin, FAILED)


def change_the_authority_of_brokers(loaded: Loaded, site: Site, goes_on: Callable[[], None]) -> None:
    """Another authority signs the proxy's certificate and the broker's; both accept both for a while, as they should.

    Producers that come afterwards have broker connections that only the new certificates make possible.
    """
    kafka, first = site.kafka, site.kafka.signer
    second = Signer(loaded.signer.directory / "second")
    earlier, later = loaded.own, second.issue("proxy", "proxy.example.org", days=60)
    both = second.directory / "both.pem"
    both.write_bytes(first.ca.read_bytes() + second.ca.read_bytes())
    held_before = Pair(second.directory / "earlier.pem", second.directory / "earlier.key")
    for source, target in zip(earlier, held_before, strict=True):
        target.write_bytes(source.read_bytes())
    try:
        kafka.present(kafka.server, both)
        wait_for(lambda: kafka.always_lets_in(later, first.ca), TIMEOUT_S)
        before = expiry(site, "broker")
        loaded.show_brokers(later, first, second)
        site.process.signal(signal.SIGHUP)
        wait_for(lambda: expiry(site, "broker") > before, TIMEOUT_S, site.process.stderr)
        goes_on()
        kafka.present(second.issue("broker", "localhost"), second.ca)
        wait_for(lambda: kafka.always_lets_in(later, second.ca), TIMEOUT_S)
        assert not kafka.lets_in(held_before, second.ca)
        goes_on()
        assert "broker became unreachable" not in site.process.stderr()
        assert "broker connection lost" not in site.process.stderr()
    finally:
        kafka.present(kafka.server, first.ca)
