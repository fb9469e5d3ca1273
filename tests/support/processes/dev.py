"""Run `kproxy` commands as real processes: `kproxy dev` to test against, and any command to see how it ends."""

from __future__ import annotations

import asyncio
import functools
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from kproxy.runtime.process import PARENT_FD, ParentPipe
from tests.support.processes import forked
from tests.support.waiting import PATIENCE_S

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 90.0
# Other processes are forked instead (tests.support.processes.forked).
KPROXY_MAIN = "kproxy.__main__"
KPROXY = (sys.executable, "-P", "-m", "kproxy")


@dataclass(frozen=True)
class Ended:
    """The end of a command: status and output."""

    status: int
    stdout: str
    stderr: str


def run_kproxy(
    *arguments: str | Path,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = READY_TIMEOUT_S,
    command: Sequence[str] | None = None,
) -> Ended:
    """Run a command to its end; kill it and fail the test if that takes too long."""
    environ = {**os.environ, **(environ or {})}
    if command is None:
        return _run_started(list(map(str, arguments)), environ, timeout_s)
    done = subprocess.run(
        [*command, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environ,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def _run_started(arguments: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> Ended:
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = forked.start(
            KPROXY_MAIN,
            arguments,
            stdout=stdout.fileno(),
            stderr=stderr.fileno(),
            environ=environ,
        )
        try:
            status = process.wait(timeout_s)
        finally:
            process.kill()
            process.wait()
        # The file ends where the process wrote last.
        texts = [os.pread(each.fileno(), os.fstat(each.fileno()).st_size, 0).decode() for each in (stdout, stderr)]
    return Ended(status, *texts)


@functools.cache
def _parent_pipe() -> ParentPipe:
    """A pipe that is open as long as this process lives."""
    return ParentPipe()


class KproxyProcess:
    """A command that serves. Its stderr goes to a file, as it may be long.

    Without a `command` it is forked, and runs the `main` of `module`.
    """

    def __init__(
        self,
        arguments: Sequence[str | Path],
        stderr_path: Path,
        command: Sequence[str] | None = None,
        *,
        module: str = KPROXY_MAIN,
    ) -> None:
        self.stderr_path = stderr_path
        # Processes started here do not outlive this one, however it ends.
        parent = _parent_pipe()
        environ = {**os.environ, PARENT_FD: str(parent.read_fd)}
        self._process: forked.Started
        with stderr_path.open("wb") as stderr:
            if command is None:
                self._process = forked.start(
                    module,
                    list(map(str, arguments)),
                    stdout=None,
                    stderr=stderr.fileno(),
                    environ=environ,
                    pass_fds=(parent.read_fd,),
                    new_session=True,
                )
            else:
                self._process = subprocess.Popen(
                    [*command, *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    bufsize=0,
                    start_new_session=True,
                    env=environ,
                    pass_fds=(parent.read_fd,),
                )
        self._unread = b""
        self.fields: dict[str, str] = {}

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def kafka(self) -> str:
        return self.fields["kafka"]

    @property
    def admin(self) -> str:
        return self.fields["admin"]

    @property
    def etcd(self) -> str:
        return self.fields["etcd"]

    def stderr(self) -> str:
        return self.stderr_path.read_text()

    def read_line(self, timeout_s: float = READY_TIMEOUT_S) -> str:
        """Its next line on stdout; empty at its end."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                assert selector.select(deadline - time.monotonic()), f"no line in {timeout_s} s; {self.stderr()[-999:]}"
                data = os.read(self._process.stdout.fileno(), 65536)
                if not data:
                    break
                self._unread += data
        line, end, self._unread = self._unread.partition(b"\n")
        return (line + end).decode()

    def wait_ready(self) -> None:
        line = self.read_line()
        assert line.startswith("ready "), f"{line!r}; {self.stderr()[-2000:]}"
        self.fields = dict(field.partition("=")[::2] for field in line.split()[1:])

    def children(self) -> list[psutil.Process]:
        """Its own child processes, which must end before it does."""
        return psutil.Process(self.pid).children()

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        return self._process.wait(timeout_s)

    def stop(self) -> int:
        """Ctrl-C, then kill -9 if it does not end in time; return the exit status."""
        if self._process.poll() is None:
            self.signal(signal.SIGINT)
        try:
            return self.wait()
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self.wait()
        finally:
            if self._process.stdout is not None:
                self._process.stdout.close()


@contextmanager
def serving(
    arguments: Sequence[str | Path],
    stderr_path: Path,
    command: Sequence[str] | None = None,
    *,
    module: str = KPROXY_MAIN,
) -> Iterator[KproxyProcess]:
    """A command that has printed its ready line, stopped at the end of the block if it still runs."""
    process = KproxyProcess(arguments, stderr_path, command, module=module)
    try:
        process.wait_ready()
        yield process
    finally:
        process.stop()


def dev_arguments(data_dir: Path, *more: str) -> list[str | Path]:
    """`kproxy dev` on free ports."""
    return ["dev", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--data-dir", data_dir, *more]


def gone(processes: Sequence[psutil.Process], timeout_s: float = PATIENCE_S) -> bool:
    """Whether all of them end in time. An orphan that nobody has reaped counts as ended."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [each for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE] == []


@contextmanager
def asyncios_own_loop() -> Iterator[None]:
    """Run coroutines on asyncio's own loop, like those of `kproxy dev` and `kproxy demo`.

    For tests that start processes beside an etcd client: uvloop forks and runs some code in the child of a fork, and
    gRPC's part of that may never return.
    """
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(before)
