"""A broker that refuses to start: one sentence that names the cause, exit status 2, soon, nothing left behind.

The broker waits for an etcd that does not answer, as a proxy does.

And how its command passes its options.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import grpc
import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy_codec import api_keys
from tests.support.brokers.reference_broker import BrokerProcess, RawClient
from tests.support.processes.dev import KproxyProcess, asyncios_own_loop, serving
from tests.support.processes.ports import free_port
from tests.support.waiting import PATIENCE_S, eventually, wait_for


def refusal(broker: BrokerProcess) -> str:
    """Return the last output of a broker that must not start."""
    try:
        broker.start(wait=False)
        assert broker.process.wait(PATIENCE_S) == 2, broker.log()
    finally:
        broker.stop()
    assert "Traceback" not in broker.log()
    return broker.log().splitlines()[-1]


def waiting_broker(tmp_path: Path, endpoint: str, node_id: int = 1) -> KproxyProcess:
    arguments = ["broker", "--node-id", str(node_id), "--data-dir", tmp_path / str(node_id), "--etcd", endpoint]
    return KproxyProcess([*arguments, "--lease-ttl", "2"], tmp_path / f"stderr-{node_id}")


def until_it_waits(broker: KproxyProcess) -> None:
    wait_for(lambda: "Waiting for it" in broker.stderr(), what=lambda: f"a line that it waits: {broker.stderr()}")


def test_broker_waits_for_an_etcd_started_later(tmp_path: Path) -> None:
    port = free_port()
    broker = waiting_broker(tmp_path, f"http://127.0.0.1:{port}")
    try:
        until_it_waits(broker)
        assert broker.stderr().startswith(f"kproxy: etcd at http://127.0.0.1:{port} does not answer")
        assert "Start etcd, or give its address with --etcd. Waiting for it.\n" in broker.stderr()
        with asyncios_own_loop():
            asyncio.run(serves_with_etcd(broker, tmp_path / "etcd", port))
        assert broker.stderr().count("Waiting for it") == 1
    finally:
        assert broker.stop() == 0, broker.stderr()


async def serves_with_etcd(broker: KproxyProcess, data_dir: Path, port: int) -> None:
    async with EmbeddedEtcd(data_dir, client_port=port):
        await asyncio.to_thread(broker.wait_ready)
        assert broker.etcd == f"http://127.0.0.1:{port}"
        assert await asyncio.to_thread(broker.stop) == 0


@pytest.mark.long
def test_broker_waits_for_a_hanging_etcd(tmp_path: Path) -> None:
    with asyncios_own_loop():
        asyncio.run(start_while_etcd_hangs(tmp_path))


def waits(broker: KproxyProcess) -> bool:
    return "Waiting for it" in broker.stderr()


async def start_while_etcd_hangs(tmp_path: Path) -> None:
    async with EmbeddedEtcd(tmp_path / "etcd") as etcd:
        brokers = []
        try:
            # Each is at a different step of its start when etcd stops.
            for node_id in range(1, 6):
                brokers.append(waiting_broker(tmp_path, etcd.endpoint, node_id))
                await asyncio.sleep(0.25)
            os.kill(etcd.pid, signal.SIGSTOP)
            # On a fast machine all the others are ready now.
            brokers.append(waiting_broker(tmp_path, etcd.endpoint, 6))
            # Longer than the limit of a call and than a lease; a slow machine needs more to get here.
            await asyncio.sleep(6.5)
            await eventually(lambda: any(map(waits, brokers)), what="one of them waits")
            os.kill(etcd.pid, signal.SIGCONT)
            for broker in brokers:
                await asyncio.to_thread(broker.wait_ready)
        finally:
            os.kill(etcd.pid, signal.SIGCONT)
            ended = await asyncio.gather(*(asyncio.to_thread(broker.stop) for broker in brokers))
        for broker in brokers:
            assert "Traceback" not in broker.stderr()
        assert set(ended) == {0}


@pytest.mark.long(but=1)
@pytest.mark.parametrize("silent", [False, True], ids=["refused", "silent"])
def test_waiting_broker_ends_on_request(tmp_path: Path, silent: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] if silent else free_port()
        broker = waiting_broker(tmp_path, f"127.0.0.1:{port}")
        try:
            until_it_waits(broker)
            broker.signal(signal.SIGTERM)
            assert broker.wait() == 0
        finally:
            broker.stop()
        assert len(broker.stderr().splitlines()) == 1, broker.stderr()


async def test_permanent_etcd_error_ends_broker_at_once(tmp_path: Path) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        for endpoint, said in (
            (f"http://127.0.0.1:{port}", "is not etcd"),
            ("ftp://127.0.0.1", "'ftp://127.0.0.1'"),
            (f"https://127.0.0.1:{port}", "does not speak TLS"),
        ):
            broker = waiting_broker(tmp_path, endpoint)
            try:
                assert await asyncio.to_thread(broker.wait) == 2, broker.stderr()
            finally:
                await asyncio.to_thread(broker.stop)
            assert broker.stderr().startswith("kproxy: "), broker.stderr()
            assert len(broker.stderr().splitlines()) == 1, broker.stderr()
            assert said in broker.stderr()
    finally:
        await server.stop(None)


def test_impossible_numbers_are_refused(etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path) -> None:
    assert "--node-id -1" in refusal(BrokerProcess(-1, tmp_path / "1", etcd.endpoint, etcd_prefix))
    no_copy = BrokerProcess(1, tmp_path / "1", etcd.endpoint, etcd_prefix, default_replication_factor=0)
    assert "--replication-factor 0" in refusal(no_copy)
    assert "--lease-ttl 0" in refusal(BrokerProcess(1, tmp_path / "1", etcd.endpoint, etcd_prefix, lease_ttl_s=0))


@pytest.mark.parametrize(("flags", "factor"), [((), "3"), (("--replication-factor", "2"), "2")])
def test_default_replication_factor_is_described(
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
