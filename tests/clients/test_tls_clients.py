"""Unchanged clients over TLS with client certificates, through `kproxy serve` to the brokers of `kproxy dev`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from tests.support.brokers.kafka_jars import kafka_classpath
from tests.support.clients.java_client import run_java_client
from tests.support.clients.kafka_io import Record
from tests.support.clients.python_clients import CLIENTS, IDEMPOTENT, check, read, write
from tests.support.processes.dev import KproxyProcess, serving
from tests.support.security.tls_files import Pair, Signer, client_context

TIMEOUT_S = 60.0
PARTITIONS = 6
RECORDS = 400


class Site:
    """A proxy whose clients come over TLS, and the files of one."""

    def __init__(self, process: KproxyProcess, signer: Signer, client: Pair) -> None:
        self.process = process
        self.signer = signer
        self.client = client
        # Java wants key and chain in one file.
        self.store = signer.directory / "store.pem"
        self.store.write_bytes(client.key.read_bytes() + client.cert.read_bytes())

    @property
    def bootstrap(self) -> str:
        return self.process.kafka

    @property
    def librdkafka(self) -> dict[str, Any]:
        return {
            "bootstrap.servers": self.bootstrap,
            "security.protocol": "SSL",
            "ssl.ca.location": str(self.signer.ca),
            "ssl.certificate.location": str(self.client.cert),
            "ssl.key.location": str(self.client.key),
        }

    @property
    def python(self) -> dict[str, Any]:
        """For kafka-python and aiokafka."""
        context = client_context(self.signer.ca, self.client)
        return {"bootstrap_servers": self.bootstrap, "security_protocol": "SSL", "ssl_context": context}


@contextmanager
def tls_site(etcd: str, directory: Path, *more: str) -> Iterator[Site]:
    signer = Signer(directory / "ca")
    # Clients are told the address, and verify it.
    server = signer.issue("server", "localhost", "127.0.0.1")
    client = signer.issue("client", "client.example.org")
    arguments = ["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--etcd", etcd, "--alone"]
    arguments += [
        "--tls-cert",
        str(server.cert),
        "--tls-key",
        str(server.key),
        "--tls-client-ca",
        str(signer.ca),
        *more,
    ]
    with serving(arguments, directory / "stderr") as process:
        yield Site(process, signer, client)


@pytest.fixture(scope="module")
def site(dev_cluster: KproxyProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with tls_site(dev_cluster.etcd, tmp_path_factory.mktemp("site")) as site:
        yield site


@pytest.fixture
def topic(dev_cluster: KproxyProcess) -> str:
    name = f"tls-{uuid.uuid4().hex[:10]}"
    admin = AdminClient({"bootstrap.servers": dev_cluster.kafka})
    admin.create_topics([NewTopic(name, PARTITIONS)])[name].result(30)
    return name


def values() -> list[bytes]:
    """Small ones, and some that are longer than a record of TLS."""
    return [b"%d:" % number + bytes(number % 7 * 9_000) for number in range(RECORDS)]


@pytest.mark.parametrize("client", CLIENTS)
def test_client_writes_by_tls(site: Site, topic: str, client: str) -> None:
    settings = site.librdkafka if client == "librdkafka" else site.python
    records = [(b"%d" % (number % 60), value) for number, value in enumerate(values())]
    written = write(client, {**settings, **IDEMPOTENT[client]}, topic, records)
    check(written, read(client, settings, topic, PARTITIONS, RECORDS), PARTITIONS)


@pytest.mark.java
@pytest.mark.timeout(600)
def test_java_writes_by_tls(site: Site, topic: str) -> None:
    settings = {
        "bootstrap.servers": site.bootstrap,
        "security.protocol": "SSL",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": site.signer.ca,
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": site.store,
    }
    records = [Record(None, value) for value in values()]
    run = run_java_client(kafka_classpath(), topic, records, settings, read_back=PARTITIONS)
    assert (run.errors, len(run.acknowledged)) == ({}, RECORDS)
    assert sorted(each.value or b"" for each in run.read) == sorted(values())


def stranger(site: Site) -> Path:
    return Signer(site.signer.directory / "stranger").ca


# What the user of librdkafka changes, and what it tells him.
MISTAKES: dict[str, tuple[Callable[[Site], dict[str, Any]], str]] = {
    "no certificate": (
        lambda site: {"ssl.certificate.location": None, "ssl.key.location": None},
        "certificate required",
    ),
    "another authority": (lambda site: {"ssl.ca.location": str(stranger(site))}, "certificate verify failed"),
    "another name": (
        lambda site: {"bootstrap.servers": site.bootstrap.replace("127.0.0.1", "127.0.0.2")},
        "certificate verify failed",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_client_shows_the_error_to_its_user(dev_cluster: KproxyProcess, tmp_path: Path, mistake: str) -> None:
    change, says = MISTAKES[mistake]
    with tls_site(dev_cluster.etcd, tmp_path, "--listen", "0.0.0.0:0", "--advertise", "127.0.0.1:0") as site:
        settings = {**site.librdkafka, "bootstrap.servers": f"127.0.0.1:{site.bootstrap.rpartition(':')[2]}"}
        site.process.fields["kafka"] = settings["bootstrap.servers"]
        settings = {key: value for key, value in {**settings, **change(site)}.items() if value is not None}
        told: list[str] = []
        producer = confluent_kafka.Producer({**settings, "error_cb": lambda error: told.append(str(error).lower())})
        deadline = time.monotonic() + TIMEOUT_S
        while not any(says in each for each in told):
            assert time.monotonic() < deadline, f"{told}; {site.process.stderr()[-2000:]}"
            producer.poll(0.1)
