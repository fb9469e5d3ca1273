"""Define the fixtures and settings of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.processes.dev import KproxyProcess, dev_arguments, serving
from tests.support.processes.served import kafka_proxy
from tests.support.security.tls_files import Signer

if TYPE_CHECKING:
    from tests.support.brokers.real_kafka import RealKafka

# Tests read the logs of commands as text, but commands log JSON if stderr is not a terminal.
os.environ["KPROXY_LOG_FORMAT"] = "text"

pytest_plugins = [
    "tests.support.rules",
    "tests.support.lanes",
    "tests.support.etcd.embedded",
    "tests.support.etcd.etcd_cluster",
    "tests.support.brokers.reference_broker",
    "tests.support.brokers.real_kafka",
    "tests.support.claims.own_proxies",
    "tests.support.claims.owned_topics",
    "tests.support.clients.spark",
]


@pytest.fixture(autouse=True, scope="session")
def logging_is_nobodys() -> Iterator[None]:
    """A command that runs in this process must not leave all later logs on the stderr of its own test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kproxy.observe.logging.configure_logging", lambda level, log_format=None: None)
        yield


@pytest.fixture(scope="session")
def dev_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KproxyProcess]:
    """One `kproxy dev` for the whole run, for tests that only use it: etcd, three brokers and the proxy."""
    directory = tmp_path_factory.mktemp("dev")
    with serving(dev_arguments(directory / "data"), directory / "stderr") as dev:
        yield dev
    assert dev.wait() == 0, dev.stderr()[-2000:]


@pytest.fixture(scope="module")
def proxy(real_kafka: RealKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KproxyProcess]:
    """A proxy before the shared Apache Kafka, unless the module has a proxy of its own."""
    with kafka_proxy(tmp_path_factory.mktemp("proxy"), real_kafka.bootstrap) as process:
        yield process


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> Signer:
    """A certificate authority of the module's own."""
    return Signer(tmp_path_factory.mktemp("signer") / "ca")
