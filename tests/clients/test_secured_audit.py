"""The audit reads a cluster behind a kproxy that requires TLS and SASL, with the options of Kafka's own clients."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kproxy.errors import StartupError
from kproxy.pipeline.audit.judge import Bounds
from kproxy.pipeline.audit.log_client import LogClient, LogReadFailed, TopicPartition
from kproxy.pipeline.audit.logs import LogTask, bounds_now, ends_of, plan
from kproxy.pipeline.audit.run import check_places
from kproxy.pipeline.audit.run_spark import spark_in
from kproxy.pipeline.audit.trail_place import parse_trail
from kproxy.pipeline.kafka_access import KafkaOptions
from tests.support.clients.kafka_io import produce
from tests.support.processes.dev import KproxyProcess, serving
from tests.support.security.sasl_client import ALLOW_ALL, USERS, users_file
from tests.support.security.tls_files import Signer

RECORDS = 300
MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"


@dataclass(frozen=True)
class Site:
    """The address of a proxy with TLS and SASL, its authority, and a topic with RECORDS records."""

    bootstrap: str
    signer: Signer
    topic: str

    def options(self, mechanism: str = "SCRAM-SHA-512", password: str | None = None, **more: str) -> KafkaOptions:
        login = f'{MODULE} required username="alice" password="{password or USERS["alice"]}";'
        return KafkaOptions(
            {
                "security.protocol": "SASL_SSL",
                "sasl.mechanism": mechanism,
                "sasl.jaas.config": login,
                "ssl.truststore.type": "PEM",
                "ssl.truststore.location": str(self.signer.ca),
            }
            | more
        )


@pytest.fixture(scope="module")
def site(dev_cluster: KproxyProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("secured")
    signer = Signer(directory / "ca")
    server = signer.issue("server", "localhost", "127.0.0.1")
    topic = f"secured-{uuid.uuid4().hex[:10]}"
    produce(dev_cluster.kafka, topic, [b"value"] * RECORDS)
    config = directory / "kproxy.toml"
    config.write_text(
        f'[tls]\ncert = "{server.cert}"\nkey = "{server.key}"\n'
        f'[sasl]\nmechanisms = "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512"\nusers = "{users_file(directory)}"\n' + ALLOW_ALL
    )
    arguments = ["serve", "--config", config, "--listen", "127.0.0.1:0", "--etcd", dev_cluster.etcd, "--alone"]
    with serving(arguments, directory / "stderr") as process:
        yield Site(process.kafka, signer, topic)


def bounds_of(site: Site, kafka: KafkaOptions) -> dict[TopicPartition, Bounds]:
    with LogClient(site.bootstrap, kafka) as client:
        return bounds_now(client, [site.topic])


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_logs_are_read(site: Site, mechanism: str) -> None:
    bounds = bounds_of(site, site.options(mechanism))
    assert {which: each[:2] for which, each in bounds.items()} == {(site.topic, 0): (0, RECORDS)}


def test_wrong_password_is_reported_at_once_and_hidden(site: Site) -> None:
    with pytest.raises(LogReadFailed, match=r"refuses access .*SASL_AUTHENTICATION_FAILED") as raised:
        bounds_of(site, site.options(password="wrong-secret"))
    assert "wrong-secret" not in str(raised.value)


def test_untrusted_certificate_is_reported_at_once(site: Site, tmp_path: Path) -> None:
    other = Signer(tmp_path / "other")
    options = site.options(**{"ssl.truststore.location": str(other.ca)})
    with pytest.raises(LogReadFailed, match=r"not signed by the authorities in ssl\.truststore\.location"):
        bounds_of(site, options)


def test_missing_security_options_are_reported(site: Site) -> None:
    with pytest.raises(StartupError, match=f"No Kafka answers at --bootstrap {site.bootstrap}"):
        check_places(site.bootstrap, parse_trail("topic"), site.bootstrap, ())
    without_sasl = {name: value for name, value in site.options().items() if not name.startswith("sasl")}
    only_tls = {**without_sasl, "security.protocol": "SSL"}
    with pytest.raises(StartupError, match="No Kafka answers"):
        check_places(site.bootstrap, parse_trail("topic"), site.bootstrap, (), only_tls)


# The secured demo's audit does so too.
@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_spark_executors_read_with_the_same_access(site: Site, spark: Any, tmp_path: Path) -> None:
    with LogClient(site.bootstrap, site.options()) as client:
        pieces = plan(client, None, ends_of(client, [site.topic]))
        task = LogTask(site.bootstrap, site.options(), client.leaders)
    with spark_in(spark, str(tmp_path / "kept")) as engine:
        batches = [batch for chunk in engine.read(pieces, task.headers) for batch in chunk.batches]
    assert sum(each.last_offset - each.base_offset + 1 for each in batches) == RECORDS
