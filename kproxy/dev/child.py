"""Run one kproxy command as a child process of `kproxy dev`.

The child prints `ready ...` on stdout and logs on stderr.

States: MADE --start()--> STARTING --the ready line--> READY --stop()--> ENDED; from STARTING and READY it may also end
by itself, which `wait_ready` and `wait` report.

Invariants
1. A child is in a session of its own: Ctrl-C in a terminal does not reach it, so its parent decides the order.
2. A child does not outlive this process, even if that is killed (`kproxy.runtime.process`).
3. The child's log is kept in one file and one predecessor of bounded size; memory has the last lines too.
4. After `stop` the process is gone and its tasks have ended.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from kproxy.errors import StartupError
from kproxy.runtime.process import PARENT_FD, ParentPipe, send_signal, spawn

LOG_LIMIT_BYTES = 8 << 20
TAIL_BYTES = 8 << 10
MAX_READY_LINE_BYTES = 4096

log = structlog.get_logger(__name__)

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(eq=False)
class Child:
    """A child process. `name` is for people; `arguments` follow `python -m kproxy`. Its stderr goes to `log_path`.

    `configuration` is for options without a flag: environment variables by name.
    """

    name: str
    arguments: Sequence[str]
    log_path: Path
    parent: ParentPipe
    configuration: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._tail = bytearray()
        self._log_problem: OSError | None = None
        self._log_size = 0
        self._ready: asyncio.Future[dict[str, str]] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int:
        """The process id; 0 before the start."""
        return self._process.pid if self._process is not None else 0

    @property
    def runs(self) -> bool:
        """Whether the process exists; a process stopped by SIGSTOP does."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process, without waiting until it is ready."""
        self._log_size = self.log_path.stat().st_size if self.log_path.exists() else 0
        ready = self._ready = asyncio.get_running_loop().create_future()
        # -P: imports must not depend on the files in the working directory.
        process = self._process = await spawn(
            sys.executable,
            *("-P", "-m", "kproxy", *self.arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"KPROXY_LOG_FORMAT": "text"}
            | _environment(os.environ)
            | dict(self.configuration)
            | {PARENT_FD: str(self.parent.read_fd)},
            pass_fds=(self.parent.read_fd,),
            start_new_session=True,
            limit=MAX_READY_LINE_BYTES,
        )
        self._tasks = [
            asyncio.create_task(self._read_stdout(process, ready), name=f"{self.name} stdout"),
            asyncio.create_task(self._read_stderr(process), name=f"{self.name} stderr"),
        ]

    async def wait_ready(self, timeout_s: float) -> dict[str, str]:
        """Wait for the ready line; return its fields.

        Raises StartupError if the child ends before that line, or the line is late.
        """
        if self._ready is None:
            raise RuntimeError(f"{self.name} has not been started")
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._ready)
        except TimeoutError as error:
            raise StartupError(
                f"the {self.name} was not ready within {timeout_s:g} s: its log is {self.log_path}."
            ) from error

    async def wait(self) -> int:
        """Wait until the child ends; return its exit status, negative for a signal.

        The whole log has been read then.
        """
        if self._process is None:
            raise RuntimeError(f"{self.name} has not been started")
        status = await self._process.wait()
        # gather would cancel the tasks with this wait, but they must continue to read.
        done, _ = await asyncio.wait(self._tasks)
        for task in done:
            task.result()
        return status

    async def stop(self, timeout_s: float) -> None:
        """Send SIGTERM, and SIGKILL if it does not end in time; do nothing if no process runs."""
        if self._process is None:
            return
        send_signal(self._process, signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait()
        except TimeoutError:
            await self.kill()
        if self._ready is not None:
            self._ready.cancel()

    async def kill(self) -> None:
        """Send SIGKILL, and wait until the process is gone."""
        if self._process is None:
            return
        send_signal(self._process, signal.SIGKILL)
        await self.wait()

    def last_lines(self, count: int) -> list[str]:
        """Return the last lines of the child's log, without colours."""
        lines = _COLOURS.sub("", self._tail.decode("utf-8", "replace")).splitlines()
        return [line for line in lines if line.strip()][-count:]

    async def _read_stdout(self, process: asyncio.subprocess.Process, ready: asyncio.Future[dict[str, str]]) -> None:
        assert process.stdout is not None  # noqa: S101 - a pipe
        try:
            line = (await process.stdout.readline()).decode("utf-8", "replace")
        except ValueError:  # longer than any ready line
            line = ""
        if line.startswith("ready ") and not ready.done():
            ready.set_result(dict(field.partition("=")[::2] for field in line.split()[1:]))
        while await process.stdout.read(MAX_READY_LINE_BYTES):
            pass
        status = await process.wait()
        if not ready.done():
            ready.set_exception(self._explain(status))
            # Retrieve the error: after a stop before the ready line nobody waits for it.
            ready.exception()

    def _explain(self, status: int) -> StartupError:
        said = self.last_lines(1)
        if status == 2 and said:
            return StartupError(f"the {self.name} did not start: {said[0].removeprefix('kproxy: ')}")
        line = f"its last line is: {said[0]}; " if said else ""
        return StartupError(
            f"the {self.name} ended while it started (status {status}): {line}its log is {self.log_path}."
        )

    async def _read_stderr(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None  # noqa: S101 - a pipe
        while data := await process.stderr.read(1 << 16):
            self._tail += data
            del self._tail[:-TAIL_BYTES]
            if self._log_problem is None:
                try:
                    self._write_log(data)
                except OSError as error:
                    # Continue to read: a full disk must not block the child on its own log.
                    self._log_problem = error
                    log.error("child log not written", child=self.name, log=str(self.log_path), reason=str(error))

    def _write_log(self, data: bytes) -> None:
        if self._log_size + len(data) > LOG_LIMIT_BYTES:
            self.log_path.replace(self.log_path.with_suffix(".log.1"))
            self._log_size = 0
        with self.log_path.open("ab") as file:
            file.write(data)
        self._log_size += len(data)


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Drop variables that configure the user's own `kproxy serve`: a child gets its options as arguments."""
    return {name: value for name, value in environ.items() if not (name.startswith("KPROXY_") and "__" in name)}
