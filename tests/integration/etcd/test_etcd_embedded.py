"""The embedded etcd: it starts or reports the reason, stops, and does not outlive its parent."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from kproxy.dev import embedded_etcd
from kproxy.dev.embedded_etcd import EmbeddedEtcd, find_etcd
from kproxy.errors import StartupError
from kproxy.etcd import EtcdClient
from kproxy.installed import install_command
from tests.support.etcd.embedded import QUICK, connected, kill
from tests.support.processes.dev import gone


async def put_and_close(endpoint: str) -> None:
    async with connected(EtcdClient([endpoint])) as client:
        await client.put("/a", b"kept")


async def read_and_close(endpoint: str) -> bytes:
    async with connected(EtcdClient([endpoint])) as client:
        found = await client.get("/a")
    return found.value if found else b""


async def test_embedded_etcd_keeps_data_and_address_after_kill(tmp_path: Path) -> None:
    server = EmbeddedEtcd(tmp_path / "new" / "directory", extra_arguments=QUICK)
    await server.start()
    endpoint, first_pid = server.endpoint, server.pid
    await put_and_close(endpoint)
    await server.stop()
    assert not psutil.pid_exists(first_pid)
    await server.start()
    assert server.endpoint == endpoint
    assert await read_and_close(endpoint) == b"kept"
    await kill(server)
    await server.start()
    assert server.endpoint == endpoint
    assert await read_and_close(endpoint) == b"kept"
    await server.stop()
    await server.stop()


async def test_end_of_embedded_etcd_is_noticed(tmp_path: Path) -> None:
    async with EmbeddedEtcd(tmp_path, extra_arguments=QUICK) as server:
        os.kill(server.pid, signal.SIGKILL)
        assert await server.wait() == -signal.SIGKILL


async def test_child_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_etcd, "STOP_TIMEOUT_S", 0.2)
    server = EmbeddedEtcd(tmp_path, extra_arguments=QUICK)
    await server.start()
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    await server.stop()
    assert not psutil.pid_exists(pid)


async def test_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"127.0.0.1:{port}: another program"):
            await EmbeddedEtcd(tmp_path, client_port=port, extra_arguments=QUICK).start()


async def test_foreign_etcd_on_port_is_not_ours(tmp_path: Path) -> None:
    async with EmbeddedEtcd(tmp_path / "one", extra_arguments=QUICK) as server:
        port = int(server.endpoint.rpartition(":")[2])
        with pytest.raises(StartupError, match="another program has that port"):
            await EmbeddedEtcd(tmp_path / "two", client_port=port, extra_arguments=QUICK).start()


async def test_free_port_taken_meanwhile_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = embedded_etcd._free_ports
        races = iter([(port, found()[1]), found()])
        monkeypatch.setattr(embedded_etcd, "_free_ports", lambda: next(races))
        async with EmbeddedEtcd(tmp_path, extra_arguments=QUICK) as server:
            assert server.endpoint != f"http://127.0.0.1:{port}"


async def test_data_directory_in_use_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with EmbeddedEtcd(data, extra_arguments=QUICK):
        assert data.stat().st_mode & 0o777 == 0o700
        with pytest.raises(StartupError, match="in use by another program"):
            await EmbeddedEtcd(data, extra_arguments=QUICK).start()


async def test_uncreatable_data_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match=str(tmp_path / "file")):
        await EmbeddedEtcd(tmp_path / "file" / "data", extra_arguments=QUICK).start()


async def test_immediately_ending_etcd_is_explained_by_its_log(tmp_path: Path) -> None:
    server = EmbeddedEtcd(tmp_path, extra_arguments=["--no-such-flag"])
    with pytest.raises(StartupError, match=str(tmp_path / "etcd.log")):
        await server.start()
    assert b"no-such-flag" in (tmp_path / "etcd.log").read_bytes()
    assert server.pid == 0
    # Nothing remains that would prevent a good start.
    async with EmbeddedEtcd(tmp_path, extra_arguments=QUICK):
        pass


async def test_foreign_etcd_settings_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_LISTEN_CLIENT_URLS", "http://127.0.0.1:1")
    monkeypatch.setenv("ETCD_INITIAL_CLUSTER_STATE", "existing")
    async with EmbeddedEtcd(tmp_path, extra_arguments=QUICK):
        pass


def test_missing_etcd_error_explains_the_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    packaged = find_etcd()
    assert packaged.name == "etcd"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StartupError, match=re.escape(install_command("dev"))):
        find_etcd()


def test_etcd_on_path_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = tmp_path / "etcd"
    mine.write_text("#!/bin/sh\n")
    mine.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_etcd() == mine


PARENT = """
import asyncio, pathlib, sys
from kproxy.dev.embedded_etcd import EmbeddedEtcd

async def main():
    async with EmbeddedEtcd(pathlib.Path(sys.argv[1])) as server:
        print("pids", server.pid, server._guard.pid, flush=True)
        await server.wait()

asyncio.run(main())
"""


@contextmanager
def parent_of_etcd(data_dir: Path) -> Iterator[tuple[subprocess.Popen[str], psutil.Process, psutil.Process]]:
    """A process that runs an etcd, as the leader of its own group; returns it with etcd and its guard."""
    command = [sys.executable, "-c", PARENT, str(data_dir)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert parent.stdout is not None
        pids = next(line.split()[1:] for line in parent.stdout if line.startswith("pids "))
        yield parent, psutil.Process(int(pids[0])), psutil.Process(int(pids[1]))
    finally:
        parent.kill()
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()


def test_etcd_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    with parent_of_etcd(tmp_path) as (parent, etcd, guard):
        assert not gone([etcd], 0)
        assert not gone([guard], 0)
        parent.kill()
        assert gone([etcd, guard], 10)


def test_ctrl_c_does_not_reach_etcd_directly(tmp_path: Path) -> None:
    with parent_of_etcd(tmp_path) as (parent, etcd, guard):
        assert os.getpgid(etcd.pid) not in (parent.pid, os.getpgid(guard.pid))
        # As in a terminal: the signal goes to the whole foreground group.
        os.killpg(parent.pid, signal.SIGINT)
        parent.wait(60)
        assert gone([etcd, guard], 0), "it was stopped in order, before its parent ended"
