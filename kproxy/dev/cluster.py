"""Run etcd, reference brokers and a proxy as processes on this machine, with a common data directory.

States: STOPPED --start()--> RUNNING --a process ends by itself--> BROKEN (which `wait` reports) --stop()--> STOPPED.
A failed `start` stops everything it started before it raises. After `kill_broker` a cluster is still RUNNING, and
`restart_broker` brings that broker back. A BROKEN cluster is RUNNING again once `restart` has started the ended process
again (kproxy.dev.restarter).

Invariants
1. Start order is etcd, brokers, proxy; stop order is the reverse, so that a process with work left finds the servers it
   needs.
2. The addresses for clients are tried before anything is started, so a taken port leaves no files or processes.
3. Topics and records are in `data_dir` and survive a restart; ports may differ. The replication factor applies to new
   topics; an existing topic keeps its replicas.
4. A broker is in `_brokers` while it is expected to run. It moves to `_down` just before it is killed, or restarted
   after it ended by itself, and back when it is ready.
5. A part whose restart failed has no process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Literal, NamedTuple, Self

import msgspec

from kproxy.config import DEFAULT_PREFIX, WILDCARDS, Address, parse_address, parse_writer_groups
from kproxy.dev.child import Child
from kproxy.dev.embedded_etcd import EmbeddedEtcd, take_lock
from kproxy.errors import StartupError
from kproxy.runtime.process import ParentPipe


class Layout(msgspec.Struct):
    """The file `cluster.json`: later starts must agree with it, since each broker has partitions of its own."""

    brokers: int


def default_data_dir() -> Path:
    """Return kproxy/dev in XDG_DATA_HOME if set, else in ~/Library/Application Support (macOS) or ~/.local/share."""
    configured = os.environ.get("XDG_DATA_HOME", "")
    if configured and Path(configured).is_absolute():
        return Path(configured) / "kproxy" / "dev"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "kproxy" / "dev"
    return Path.home() / ".local" / "share" / "kproxy" / "dev"


class ClusterDir:
    """A locked data directory. `open` raises StartupError. The lock ends with `close` or with the process."""

    def __init__(self, path: Path, lock: IO[bytes]) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def open(cls, path: Path, brokers: int) -> ClusterDir:
        """Create and lock the directory; check that `brokers` includes every broker with data in it."""
        try:
            # Other users of this machine must not read records or etcd's data.
            path.mkdir(0o700, parents=True, exist_ok=True)
            (path / "logs").mkdir(exist_ok=True)
            lock = (path / "lock").open("ab")
        except OSError as error:
            raise StartupError(
                f"the data directory {path} cannot be used ({error.strerror}): choose another --data-dir."
            ) from error
        opened = cls(path, lock)
        try:
            take_lock(
                lock,
                f"the data directory {path} is in use by another `kproxy dev`: "
                f"stop that one, or choose another --data-dir.",
            )
            opened._check_layout(brokers)
        except BaseException:
            opened.close()
            raise
        return opened

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._lock.close()

    def _check_layout(self, brokers: int) -> None:
        file = self.path / "cluster.json"
        try:
            before = msgspec.json.decode(file.read_bytes(), type=Layout).brokers if file.exists() else 0
            if before > brokers:
                raise StartupError(
                    f"the data in {self.path} lies on {before} brokers: give --brokers {before} or another --data-dir."
                )
            if before < brokers:
                aside = file.with_suffix(".new")
                aside.write_bytes(msgspec.json.encode(Layout(brokers)))
                aside.replace(file)
        except (OSError, msgspec.DecodeError) as error:
            raise StartupError(f"{file} cannot be used ({error}): choose another --data-dir.") from error


MAX_BROKERS = 100
DEFAULT_REPLICATION_FACTOR = 3
DEFAULT_LEASE_TTL_S = 10
NAMED_TOPICS = 100
READY_TIMEOUT_S = 60.0
# The proxy drains for up to 10 s and ships the rest of its audit trail for up to 5 s, a broker syncs its logs to the
# disk; a process that takes longer hangs.
STOP_TIMEOUT_S = 20.0
# The interval is short, so that users who try the audit need not wait.
AUDIT_INTERVAL_S = 1.0
LAST_LINES = 10


class Part(NamedTuple):
    """One process of the cluster; `node_id` is a broker's."""

    kind: Literal["etcd", "broker", "proxy"]
    node_id: int = 0

    def __str__(self) -> str:
        return {"etcd": "etcd", "broker": f"broker {self.node_id}", "proxy": "the proxy"}[self.kind]


class End(NamedTuple):
    """The end of a process: its exit status, negative for a signal, and the last lines of its log, without colours."""

    status: int
    pid: int
    log_path: Path
    last_lines: list[str]


class ChildEnded(Exception):
    """A process of the cluster ended by itself. `last_lines` are the end of its log."""

    def __init__(self, part: Part, end: End) -> None:
        how = f"was ended by signal {-end.status}" if end.status < 0 else f"ended with status {end.status}"
        super().__init__(f"the {str(part).removeprefix('the ')} {how}; its log is {end.log_path}")
        self.last_lines = end.last_lines


class DevCluster:
    """`brokers` reference brokers behind one proxy. Use as `async with`.

    Raises StartupError if a part does not start.

    `listen` and `admin` are `HOST:PORT`; port 0 is any free port, and `admin` None no admin page. `replication_factor`
    None is 3, or the number of brokers if that is less. `writer_groups` has, as `TOPIC=GROUP`, the topics that only
    owners write to. With `audit` the proxy's audit trail is shipped to its topic. `max_connections` None is the proxy's
    default. `proxy_config` is a file for the proxy. `on_step` is called with each part that is ready. After the start:
    `kafka` and `admin` (`HOST:PORT`), `etcd` (URL), and of the brokers that are not killed `broker_pids` and
    `broker_addresses` by node id.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        brokers: int = 3,
        replication_factor: int | None = None,
        listen: str = "127.0.0.1:0",
        admin: str | None = "127.0.0.1:0",
        lease_ttl_s: int = DEFAULT_LEASE_TTL_S,
        writer_groups: Sequence[str] = (),
        audit: bool = True,
        max_connections: int | None = None,
        proxy_config: Path | None = None,
        on_step: Callable[[str], None] | None = None,
    ) -> None:
        if not 1 <= brokers <= MAX_BROKERS:
            raise StartupError(f"invalid --brokers {brokers}; expected a number from 1 to {MAX_BROKERS}.")
        if replication_factor is not None and not 1 <= replication_factor <= brokers:
            raise StartupError(
                f"invalid --replication-factor {replication_factor}: each replica needs a broker of its own; expected "
                f"a number from 1 to {brokers}, or more --brokers."
            )
        self.data_dir = Path(data_dir)
        self.replication_factor = replication_factor or min(DEFAULT_REPLICATION_FACTOR, brokers)
        self.lease_ttl_s = lease_ttl_s
        self.kafka = self.admin = self.etcd = ""
        self.broker_addresses: dict[int, str] = {}
        self._brokers_wanted = brokers
        self._listen = parse_address(listen, "--listen")
        if self._listen.host in WILDCARDS:
            raise StartupError(
                f"--listen {listen}: clients cannot be told to connect there: "
                f"name one address of this machine, for example 127.0.0.1:{self._listen.port}."
            )
        self._admin = parse_address(admin, "--admin") if admin is not None else None
        self._writer_groups = parse_writer_groups(writer_groups, "--writer-group")
        self._audit = audit
        self._max_connections = max_connections
        self._proxy_config = proxy_config
        self._on_step = on_step or (lambda _: None)
        self._dir: ClusterDir | None = None
        self._pipe: ParentPipe | None = None
        self._etcd: EmbeddedEtcd | None = None
        self._brokers: dict[int, Child] = {}
        self._down: dict[int, Child] = {}
        self._children_changed = asyncio.Event()
        self._proxy: Child | None = None

    @property
    def broker_pids(self) -> dict[int, int]:
        return {node_id: child.pid for node_id, child in self._brokers.items()}

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start everything and return when the proxy serves."""
        if self._dir is not None:
            raise RuntimeError("this cluster already runs; stop it first")
        await check_free(self._listen, "--listen")
        if self._admin is not None:
            await check_free(self._admin, "--admin")
        self._dir = ClusterDir.open(self.data_dir, self._brokers_wanted)
        try:
            self._pipe = ParentPipe()
            await self._start_etcd()
            await self._start_brokers(self._pipe)
            await self._start_proxy(self._pipe)
        except BaseException:
            await self.stop()
            raise

    async def wait(self) -> None:
        """Wait until a process of the cluster ends by itself; raise ChildEnded."""
        while True:
            self._children_changed.clear()
            ends = {asyncio.ensure_future(self.ended(part)): part for part in self._expected_to_live()}
            changed = asyncio.ensure_future(self._children_changed.wait())
            try:
                done, _ = await asyncio.wait([*ends, changed], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (*ends, changed):
                    task.cancel()
                await asyncio.gather(*ends, changed, return_exceptions=True)
            # A broker killed meanwhile is in none of these any more.
            for task, part in ends.items():
                if task in done and part in self._expected_to_live():
                    raise ChildEnded(part, task.result())

    def _expected_to_live(self) -> list[Part]:
        return [part for part in self.parts if part.kind != "broker" or part.node_id in self._brokers]

    @property
    def parts(self) -> list[Part]:
        """The parts in start order."""
        brokers = (Part("broker", node_id) for node_id in range(1, self._brokers_wanted + 1))
        return [Part("etcd"), *brokers, Part("proxy")]

    async def ended(self, part: Part) -> End:
        """Wait until the process of a part ends."""
        process = self._process_of(part)
        status = await process.wait()
        last_lines = process.last_lines(LAST_LINES) if isinstance(process, Child) else []
        return End(status, process.pid, process.log_path, last_lines)

    async def restart(self, part: Part) -> str:
        """Restart an ended part with its data, etcd and the proxy at their former address.

        Returns its address and pid once it is ready. Raises StartupError if it does not become ready.
        """
        if part.kind == "broker":
            await self.restart_broker(part.node_id)
        elif part.kind == "etcd":
            if self._etcd is None:
                raise RuntimeError("this cluster has not been started")
            await self._etcd.stop()
            await self._etcd.start()
        else:
            await self._restart_proxy()
        return self._where(part)

    def _process_of(self, part: Part) -> Child | EmbeddedEtcd:
        process = {"etcd": self._etcd, "broker": self._brokers.get(part.node_id), "proxy": self._proxy}[part.kind]
        if process is None:
            raise RuntimeError(f"{part} does not run")
        return process

    def _where(self, part: Part) -> str:
        address = {"etcd": self.etcd, "broker": self.broker_addresses.get(part.node_id), "proxy": self.kafka}
        return f"{address[part.kind]} (pid {self._process_of(part).pid})"

    async def kill_broker(self, node_id: int) -> None:
        """Kill a broker with SIGKILL, which `wait` does not report, and wait until it is gone. The data stays."""
        self._down[node_id] = child = self._brokers.pop(node_id)
        del self.broker_addresses[node_id]
        self._children_changed.set()
        await child.kill()

    async def restart_broker(self, node_id: int) -> None:
        """Restart an ended broker with its id and its data, perhaps at another port; return when it serves.

        This takes until the lease of the former process ends. Raises StartupError if the new process ends before.
        """
        if self._pipe is None:
            raise RuntimeError("this cluster has not been started")
        if node_id in self._brokers and self._brokers[node_id].runs:
            raise RuntimeError(f"broker {node_id} has not ended")
        self._brokers.pop(node_id, None)
        self.broker_addresses.pop(node_id, None)
        self._down[node_id] = child = self._broker(node_id, self._pipe)
        await child.start()
        try:
            await self._broker_ready(node_id, child)
        except StartupError:
            # The process may still run, waiting for something that does not come.
            await child.stop(STOP_TIMEOUT_S)
            raise
        self._brokers[node_id] = self._down.pop(node_id)
        self._children_changed.set()

    async def stop(self) -> None:
        """Stop everything, clients before servers; return when all processes are gone."""
        try:
            await self._stop_children()
        finally:
            if self._etcd is not None:
                await self._etcd.stop()
                self._etcd = None
            if self._pipe is not None:
                self._pipe.close()
                self._pipe = None
            if self._dir is not None:
                self._dir.close()
                self._dir = None

    async def _stop_children(self) -> None:
        if self._proxy is not None:
            await self._proxy.stop(STOP_TIMEOUT_S)
            self._proxy = None
        brokers = (*self._brokers.values(), *self._down.values())
        await asyncio.gather(*(child.stop(STOP_TIMEOUT_S) for child in brokers))
        self._brokers.clear()
        self._down.clear()

    async def _start_etcd(self) -> None:
        self._etcd = EmbeddedEtcd(self.data_dir / "etcd")
        await self._etcd.start()
        self.etcd = self._etcd.endpoint
        self._on_step(f"etcd      {self._where(Part('etcd'))}")

    async def _start_brokers(self, pipe: ParentPipe) -> None:
        for node_id in range(1, self._brokers_wanted + 1):
            self._brokers[node_id] = self._broker(node_id, pipe)
            await self._brokers[node_id].start()
        ready = [asyncio.ensure_future(self._broker_ready(*each)) for each in self._brokers.items()]
        try:
            # The first failure ends the wait, with its own error and not a group.
            done, _ = await asyncio.wait(ready, return_when=asyncio.FIRST_EXCEPTION)
            for each in done:
                each.result()
        finally:
            for waiting in ready:
                waiting.cancel()
            await asyncio.gather(*ready, return_exceptions=True)
        for node_id in self._brokers:
            self._on_step(f"broker {node_id:<2} {self._where(Part('broker', node_id))}")

    def _broker(self, node_id: int, pipe: ParentPipe) -> Child:
        arguments = ["broker", "--node-id", str(node_id), "--listen", "127.0.0.1:0", "--etcd", self.etcd]
        arguments += ["--prefix", DEFAULT_PREFIX, "--lease-ttl", str(self.lease_ttl_s)]
        arguments += ["--replication-factor", str(self.replication_factor)]
        arguments += ["--data-dir", str(self.data_dir / f"broker-{node_id}")]
        return Child(f"broker {node_id}", arguments, self._log_path(f"broker-{node_id}"), pipe)

    async def _broker_ready(self, node_id: int, child: Child) -> None:
        # The lease of the broker's former process may not have ended.
        fields = await child.wait_ready(READY_TIMEOUT_S + self.lease_ttl_s)
        self.broker_addresses[node_id] = fields["kafka"]

    async def _start_proxy(self, pipe: ParentPipe) -> None:
        self._proxy = self._proxy_child(self._listen, self._admin, pipe)
        await self._proxy.start()
        fields = await self._proxy.wait_ready(READY_TIMEOUT_S)
        self.kafka, self.admin = fields["kafka"], fields.get("admin", "")
        self._on_step(f"proxy     {self._where(Part('proxy'))}")

    async def _restart_proxy(self) -> None:
        if self._pipe is None:
            raise RuntimeError("this cluster has not been started")
        listen = Address(self._listen.host, _port_of(self.kafka))
        admin = Address(self._admin.host, _port_of(self.admin)) if self._admin is not None else None
        self._proxy = self._proxy_child(listen, admin, self._pipe)
        await self._proxy.start()
        try:
            await self._proxy.wait_ready(READY_TIMEOUT_S)
        except StartupError:
            await self._proxy.stop(STOP_TIMEOUT_S)
            raise

    def _proxy_child(self, listen: Address, admin: Address | None, pipe: ParentPipe) -> Child:
        limits = {} if self._max_connections is None else {"KPROXY_LIMITS__MAX_CONNECTIONS": str(self._max_connections)}
        return Child("proxy", self._proxy_arguments(listen, admin), self._log_path("proxy"), pipe, limits)

    def _proxy_arguments(self, listen: Address, admin: Address | None) -> list[str]:
        arguments = ["serve", "--listen", str(listen), "--etcd", self.etcd, "--prefix", DEFAULT_PREFIX]
        arguments += ["--lease-ttl", str(self.lease_ttl_s)]
        if self._proxy_config is not None:
            arguments += ["--config", str(self._proxy_config)]
        if admin is not None:
            arguments += ["--admin", str(admin)]
            if self._proxy_config is None:
                # With these counts the page shows all of its views.
                arguments += ["--metrics-topics", str(NAMED_TOPICS)]
        if self._audit:
            arguments += ["--audit-sink", "topic", "--audit-interval-s", str(AUDIT_INTERVAL_S)]
        for topic, group in self._writer_groups.items():
            arguments += ["--writer-group", f"{topic}={group}"]
        return arguments

    def _log_path(self, log_name: str) -> Path:
        return self.data_dir / "logs" / f"{log_name}.log"


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def check_free(address: Address, flag: str) -> None:
    """Check that the address can be listened on. Raises StartupError."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise StartupError(f"{flag} {address}: unknown host ({error.strerror}); expected a local one.") from error
    for family, kind, protocol, _, where in found[:1]:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(where)
            except OSError as error:
                raise StartupError(
                    f"{flag} {address}: port {address.port} cannot be listened on ({error.strerror}): stop what uses "
                    f"it, or give another {flag}, for example {flag} {Address(address.host, 0)} for any free port."
                ) from error
