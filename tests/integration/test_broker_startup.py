"""How a broker refuses to start: one sentence that names the thing, exit status 2, soon, nothing left behind.

And how its command starts it with what it was told.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from codec import api_keys
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.ownership.etcd import EtcdClient
from tests.support.dev import serving
from tests.support.record_batches import build_batch
from tests.support.reference_broker import BrokerProcess, RawClient, start_broker

pytest_plugins = ["tests.support.etcd", "tests.support.reference_broker"]


def refusal(broker: BrokerProcess, within_s: float = 25.0) -> str:
    """What a broker that must not start says last."""
    started = time.monotonic()
    try:
        broker.start(wait=False)
        assert broker.process.wait(within_s + 5) == 2, broker.log()
    finally:
        broker.stop()
    assert time.monotonic() - started < within_s
    assert "Traceback" not in broker.log()
    return broker.log().splitlines()[-1]


def test_a_port_in_use(etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refusal(BrokerProcess(1, tmp_path / "1", etcd.endpoint, etcd_prefix, listen=port))
    assert f"cannot listen on 127.0.0.1:{port}" in said
    assert "--listen" in said


async def test_an_etcd_that_is_not_there(etcd_prefix: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    broker = BrokerProcess(1, tmp_path / "1", f"127.0.0.1:{port}", etcd_prefix, etcd_timeout_s=1)
    said = refusal(broker, within_s=6)
    assert str(port) in said
    assert "--etcd" in said


def test_an_etcd_that_does_not_answer(etcd_prefix: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        broker = BrokerProcess(1, tmp_path / "1", f"127.0.0.1:{port}", etcd_prefix, etcd_timeout_s=1)
        said = refusal(broker, within_s=6)
    assert str(port) in said


async def test_a_data_directory_that_another_broker_uses(
    etcd: EmbeddedEtcd, etcd_prefix: str, etcd_client: EtcdClient, tmp_path: Path
) -> None:
    with start_broker(1, tmp_path / "data", etcd.endpoint, etcd_prefix) as running:
        second = BrokerProcess(2, tmp_path / "data", etcd.endpoint, etcd_prefix)
        second.stderr_path = tmp_path / "second.stderr"
        assert "another broker uses the data directory" in refusal(second)
        with running.client() as client:
            assert client.leaders("t") == {0: 1}
            assert client.produce("t", 0, build_batch()).error_code == 0
    assert await etcd_client.get(f"{etcd_prefix}/brokers/2") is None


def test_a_data_directory_of_another_broker_id(etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path) -> None:
    with start_broker(1, tmp_path / "data", etcd.endpoint, etcd_prefix) as broker:
        broker.terminate()
    said = refusal(BrokerProcess(2, tmp_path / "data", etcd.endpoint, etcd_prefix))
    assert "belongs to broker 1, not 2" in said


@pytest.mark.parametrize("kind", ["a file", "below a file"])
def test_a_data_directory_that_cannot_be(etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("not a directory")
    path = tmp_path / "file" if kind == "a file" else tmp_path / "file" / "below"
    broker = BrokerProcess(1, path, etcd.endpoint, etcd_prefix)
    broker.stderr_path = tmp_path / "stderr"
    assert "cannot be used" in refusal(broker)


def test_numbers_that_cannot_be(etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path) -> None:
    assert "--node-id -1" in refusal(BrokerProcess(-1, tmp_path / "1", etcd.endpoint, etcd_prefix))
    no_copy = BrokerProcess(1, tmp_path / "1", etcd.endpoint, etcd_prefix, default_replication_factor=0)
    assert "--replication-factor 0" in refusal(no_copy)
    assert "--lease-ttl 0" in refusal(BrokerProcess(1, tmp_path / "1", etcd.endpoint, etcd_prefix, lease_ttl_s=0))


@pytest.mark.parametrize(("flags", "factor"), [((), "3"), (("--replication-factor", "2"), "2")])
def test_the_default_replication_factor_is_told(
    etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path, flags: tuple[str, ...], factor: str
) -> None:
    arguments = ["broker", "--node-id", "1", "--etcd", etcd.endpoint, "--prefix", etcd_prefix]
    asked = [{"resource_type": 4, "resource_name": "1", "configuration_keys": ["default.replication.factor"]}]
    with serving([*arguments, "--data-dir", tmp_path / "data", *flags], tmp_path / "stderr") as broker:
        host, _, port = broker.kafka.rpartition(":")
        with RawClient(host, int(port)) as client:
            [described] = client.request(api_keys.DESCRIBE_CONFIGS, 4, resources=asked).results
            assert [each.value for each in described.configs] == [factor]
            alone = client.metadata("t").topics[0].partitions[0]
    assert alone.replica_nodes == [1], "as many copies as brokers live"
