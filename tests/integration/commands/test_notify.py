"""Real commands report to a service manager that they wait, serve and stop."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.ports import free_ports
from tests.support.processes.served import ServedBroker, static_proxy

PATIENCE_S = 60.0


@contextmanager
def manager(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket of a service manager for processes that start from now on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(directory / "notify"))
        listening.settimeout(PATIENCE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(directory / "notify"))
        yield listening


async def told(listening: socket.socket) -> list[str]:
    """The assignments of the next message."""
    return (await asyncio.to_thread(listening.recv, 4096)).decode().split("\n")


@pytest.mark.long(but=1)
@pytest.mark.parametrize("workers", [1, 2])
async def test_proxy_notifies_readiness_and_stopping(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream = await ServedBroker(1).start()
    with (
        manager(tmp_path, monkeypatch) as listening,
        static_proxy(tmp_path, {1: upstream.port}, more=["--workers", str(workers)]) as process,
    ):
        assert await told(listening) == ["READY=1", f"STATUS=ready kafka={process.kafka} admin={process.admin}"]
        process.signal(signal.SIGTERM)
        assert await told(listening) == ["STOPPING=1"]
        assert await asyncio.to_thread(process.wait) == 0
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.recv(4096)
    await upstream.stop()


async def test_broker_notifies_waiting_readiness_and_stopping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_ports(1)[0]
    arguments = ["broker", "--node-id", "1", "--data-dir", tmp_path / "data", "--etcd", f"http://127.0.0.1:{port}"]
    with manager(tmp_path, monkeypatch) as listening:
        process = KproxyProcess(arguments, tmp_path / "broker.stderr")
        try:
            status = (await told(listening))[0]
            assert status.startswith("STATUS=")
            assert status.endswith("Waiting for it.")
            monkeypatch.delenv("NOTIFY_SOCKET")
            async with EmbeddedEtcd(tmp_path / "etcd", client_port=port):
                await asyncio.to_thread(process.wait_ready)
                said = await told(listening)
                while "READY=1" not in said:
                    assert said[0].startswith("STATUS=")
                    said = await told(listening)
                assert said[1].startswith("STATUS=ready kafka=")
                process.signal(signal.SIGTERM)
                assert await told(listening) == ["STOPPING=1"]
                assert await asyncio.to_thread(process.wait) == 0
        finally:
            process.stop()


async def test_missing_manager_has_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    upstream = await ServedBroker(1).start()
    with static_proxy(tmp_path, {1: upstream.port}) as process:
        process.signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait) == 0
        assert "service manager not notified" in process.stderr()
    await upstream.stop()
