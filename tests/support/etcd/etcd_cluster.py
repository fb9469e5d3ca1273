"""Run a real cluster of three etcd members of a current release, for tests that take members down.

The release on PyPI is from 2021 and has a known fault: it revokes leases early. The release built here, once per user,
is the one to run in production. `etcd_cluster` is one cluster for the whole run, for tests that leave it healthy;
others use one of their own: `async with running_cluster(tmp_path)`.

A whole run builds the release before its first test: beside other tests the build may take longer than the time limit
of the test that needs it.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import http.client
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from kproxy.etcd import EtcdClient, EtcdError
from kproxy.pipeline.java import user_cache_dir
from tests.support.processes.ports import free_ports
from tests.support.rules import is_whole_run

ETCD_VERSION = "3.6.16"
HOST = "127.0.0.1"
BUILD_TIMEOUT_S = 900.0
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
START_ATTEMPTS = 3
# An election takes a fifth of its default time, and this machine's power is not cut.
_QUICK = ("--heartbeat-interval", "50", "--election-timeout", "500", "--unsafe-no-fsync")
# `go install` refuses etcd's modules because of their replace directives.
_MODULE = f"""\
module kproxy.test/etcd

go 1.24

require (
	go.etcd.io/etcd/etcdutl/v3 v{ETCD_VERSION}
	go.etcd.io/etcd/server/v3 v{ETCD_VERSION}
)
"""
_IMPORTS = """\
//go:build tools

package tools

import (
	_ "go.etcd.io/etcd/etcdutl/v3"
	_ "go.etcd.io/etcd/server/v3"
)
"""


def pytest_sessionstart(session: pytest.Session) -> None:
    if is_whole_run(session.config) and not hasattr(session.config, "workerinput"):
        with suppress(pytest.skip.Exception):
            etcd_binaries()


@functools.cache
def etcd_binaries() -> Path:
    """The directory of `server` and `etcdutl`, or a skip. The first call builds them, in about a minute."""
    built = user_cache_dir() / "etcd" / ETCD_VERSION
    built.parent.mkdir(parents=True, exist_ok=True)
    with (built.parent / f"{ETCD_VERSION}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (built / "etcdutl").exists():
            _build(built)
    return built


def _build(built: Path) -> None:
    go = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if go is None:
        pytest.skip("etcd 3.6 is built from its source, and there is no Go on this machine")
    print(f"Building etcd {ETCD_VERSION} for the tests, once (some minutes)", flush=True)
    aside = built.with_suffix(".building")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    (aside / "go.mod").write_text(_MODULE)
    (aside / "tools.go").write_text(_IMPORTS)
    modules = ["go.etcd.io/etcd/server/v3", "go.etcd.io/etcd/etcdutl/v3"]
    for command in (["mod", "tidy"], ["build", "-o", ".", *modules]):
        done = subprocess.run(
            [go, *command], cwd=aside, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"etcd {ETCD_VERSION} could not be built: {done.stderr[-500:]}")
    shutil.rmtree(built, ignore_errors=True)
    aside.rename(built)


class Member:
    """One member of a cluster; its log goes to `{directory}/log`."""

    def __init__(self, name: str, client_port: int, peer_port: int, directory: Path) -> None:
        self.name = name
        self.client_port = client_port
        self.peer_url = f"http://{HOST}:{peer_port}"
        self.directory = directory
        self.data = directory / "data"
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True)

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.client_port}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def start(self, initial_cluster: str, token: str, arguments: Sequence[str]) -> None:
        """Start without waiting."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    etcd_binaries() / "server",
                    *("--name", self.name, "--data-dir", self.data),
                    *("--listen-client-urls", self.endpoint, "--advertise-client-urls", self.endpoint),
                    *("--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url),
                    *("--initial-cluster", initial_cluster, "--initial-cluster-token", token),
                    *_QUICK,
                    *arguments,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environ,
            )

    def kill(self) -> None:
        """kill -9; no effect if it is not running."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(STOP_TIMEOUT_S)

    async def stop(self) -> None:
        """SIGTERM: afterwards its data is on the disk."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(self._process.wait, STOP_TIMEOUT_S)

    async def freeze(self) -> None:
        """SIGSTOP: it keeps its connections and does nothing."""
        assert self._process is not None, "not started"
        self._process.send_signal(signal.SIGSTOP)
        process = psutil.Process(self._process.pid)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while process.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline, f"{self.name} does not stop"
            await asyncio.sleep(0.01)

    def thaw(self) -> None:
        assert self._process is not None, "not started"
        self._process.send_signal(signal.SIGCONT)

    def leads(self) -> bool:
        """Whether it considers itself the cluster's leader."""
        connection = http.client.HTTPConnection(HOST, self.client_port, timeout=5)
        try:
            connection.request("GET", "/metrics")
            return "\netcd_server_is_leader 1\n" in connection.getresponse().read().decode()
        except OSError:
            return False
        finally:
            connection.close()


class EtcdCluster:
    """Three members on free ports. `arguments` are etcd's own flags, the same for all."""

    def __init__(self, directory: Path, arguments: Sequence[str] = ()) -> None:
        self.directory = directory
        self.members: list[Member] = []
        self._arguments = tuple(arguments)
        self._token = "kproxy"
        self._attempt = 0

    @property
    def endpoints(self) -> list[str]:
        return [member.endpoint for member in self.members]

    async def start(self) -> None:
        """Start all three and wait until they answer."""
        for attempt in range(START_ATTEMPTS):
            self._choose_places(attempt)
            for member in self.members:
                self.start_member(member)
            try:
                await self.healthy()
                return
            except AssertionError:
                # Another process took a port between finding free ports and etcd's binding them.
                taken = any("address already in use" in member.log() for member in self.members)
                self.kill()
                if not taken or attempt == START_ATTEMPTS - 1:
                    raise

    def _choose_places(self, attempt: int) -> None:
        ports = free_ports(6)
        self.members = [
            Member(f"m{n}", ports[2 * n], ports[2 * n + 1], self.directory / f"{attempt}" / f"m{n}") for n in range(3)
        ]

    def start_member(self, member: Member) -> None:
        """Start one, for the first time or again, without waiting."""
        member.start(self._initial_cluster, self._token, self._arguments)

    @property
    def _initial_cluster(self) -> str:
        return ",".join(f"{member.name}={member.peer_url}" for member in self.members)

    async def healthy(self, *members: Member) -> None:
        """Wait until each of these members, or all, answers a linearizable read."""
        deadline = time.monotonic() + START_TIMEOUT_S
        for member in members or self.members:
            while not await _answers(member):
                assert member.running, f"{member.name} ended: {member.log()[-2000:]}"
                assert time.monotonic() < deadline, f"{member.name} does not answer: {member.log()[-2000:]}"
                await asyncio.sleep(0.05)

    def leader(self) -> Member:
        """The current leader."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            for member in self.members:
                if member.running and member.leads():
                    return member
            assert time.monotonic() < deadline, "no member leads"
            time.sleep(0.05)

    def followers(self) -> list[Member]:
        leader = self.leader()
        return [member for member in self.members if member is not leader]

    def kill(self) -> None:
        for member in self.members:
            member.kill()

    async def snapshot(self, file: Path) -> None:
        """Save the content of the cluster; one follower is down for a moment."""
        member = self.followers()[0]
        await member.stop()
        shutil.copyfile(member.data / "member" / "snap" / "db", file)
        self.start_member(member)
        await self.healthy(member)

    async def restore(self, file: Path, *, same_cluster: bool, bump_revision: int = 0) -> None:
        """Kill all members and continue with the content of `file`; with another id unless `same_cluster`.

        `bump_revision`: revisions continue this far above the snapshot's, compacted up to there: watchers notice.
        """
        self.kill()
        bump = ("--bump-revision", str(bump_revision), "--mark-compacted") if bump_revision else ()
        if not same_cluster:
            self._token += "-restored"
        for member in self.members:
            shutil.rmtree(member.data)
            done = await asyncio.to_thread(
                subprocess.run,
                [
                    etcd_binaries() / "etcdutl",
                    *("snapshot", "restore", file, "--skip-hash-check", "--name", member.name),
                    *("--data-dir", member.data, "--initial-advertise-peer-urls", member.peer_url),
                    *("--initial-cluster", self._initial_cluster, "--initial-cluster-token", self._token),
                    *bump,
                ],
                capture_output=True,
                text=True,
                timeout=START_TIMEOUT_S,
                check=False,
            )
            assert done.returncode == 0, done.stderr
        for member in self.members:
            self.start_member(member)
        await self.healthy()


async def _answers(member: Member) -> bool:
    client = EtcdClient([member.endpoint], timeout_s=2.0)
    try:
        await client.connect()
        await client.get("health")
    except EtcdError:
        return False
    finally:
        await client.close()
    return True


@asynccontextmanager
async def running_cluster(directory: Path, arguments: Sequence[str] = ()) -> AsyncIterator[EtcdCluster]:
    """A cluster of the test's own."""
    etcd_binaries()
    cluster = EtcdCluster(directory, arguments)
    try:
        await cluster.start()
        yield cluster
    finally:
        cluster.kill()
        # Each member's log is 128 MB.
        for member in cluster.members:
            shutil.rmtree(member.data, ignore_errors=True)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def etcd_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EtcdCluster]:
    """One cluster for the whole run; a test that takes a member down brings it back."""
    async with running_cluster(tmp_path_factory.mktemp("etcd-cluster")) as cluster:
        yield cluster
