"""Fork processes from one that has already imported kproxy, so that they start fast.

A proxy takes most of a second of CPU for its imports, and a test run starts more than a thousand. `start` asks the
*fork server* of this test process: a process that has imported all of it, runs nothing and has one thread. It forks,
and the copy takes the given descriptors, environment, directory and arguments and runs a module's `main`, as `python
-m` would. Tests of the start itself need a command of its own (`KPROXY`).

The copy's command line and the environment in /proc are the server's. Variables that are read while modules are
imported cannot be changed afterwards: a start with other values (`AT_IMPORT`) runs the interpreter (see `can_fork`).
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, NoReturn

ROOT: Final = Path(__file__).parents[3]
# The modules that commands import when they run.
PRELOADED: Final = (
    "kproxy.__main__",
    "kproxy.cli.acl",
    "kproxy.cli.broker",
    "kproxy.cli.check_config",
    "kproxy.cli.dev",
    "kproxy.cli.doctor",
    "kproxy.cli.own",
    "kproxy.cli.serve",
    "kproxy.cli.table",
    "kproxy.cli.user",
    "kproxy.dev.cluster",
    "kproxy.proxy.run",
    "kproxy.workers.supervisor",
    "kproxy.workers.worker",
    "tests.support.brokers.broker_main",
    "uvloop",
)
AT_IMPORT: Final = (
    "KPROXY_PLAIN",
    "GRPC_VERBOSITY",
    "LD_PRELOAD",
    "PYTHONHASHSEED",
    "PYTHONPATH",
    "PYTHONWARNINGS",
    "SSLKEYLOGFILE",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
)
# The fork server's values; a test may change them for its own processes.
_AT_START: Final = {name: os.environ[name] for name in AT_IMPORT if name in os.environ}
_MOST_BYTES: Final = 1 << 20
_MOST_DESCRIPTORS: Final = 16
_NUMBER_BYTES: Final = 4


class _Asked(NamedTuple):
    """The order for a copy; its descriptors come beside it, the first three as stdin, stdout and stderr."""

    module: str
    arguments: list[str]
    environ: dict[str, str]
    directory: str
    numbers: list[int]
    new_session: bool


class Forked:
    """A forked process, with as much of `subprocess.Popen` as tests use."""

    def __init__(self, arguments: Sequence[str], status_fd: int, stdout: IO[Any] | None) -> None:
        self.args = [*arguments]
        self.stdout = stdout
        self.returncode: int | None = None
        self._status_fd = status_fd
        self._lock = threading.Lock()
        self.pid = self._read()

    def _read(self) -> int:
        number = os.read(self._status_fd, _NUMBER_BYTES)
        if len(number) < _NUMBER_BYTES:
            raise RuntimeError("the fork server has ended; its error is on the stderr of the tests")
        return int.from_bytes(number, "big", signed=True)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, negative for a signal. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            if self.returncode is None:
                poll = select.poll()
                poll.register(self._status_fd, select.POLLIN)
                left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
                if not poll.poll(left_ms):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
                self.returncode = self._read()
                os.close(self._status_fd)
            return self.returncode

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # The fork server may have seen its end and not reported it yet.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Started = Forked | subprocess.Popen[Any]
"""A process of `start`."""


class ForkServer:
    """A fork server; its end does not end the processes that it has forked."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            for end in (self._control, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_BYTES)
            # -P as for `kproxy`: nothing is imported from the working directory.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.support.processes.forked", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                cwd=ROOT,
                env={name: value for name, value in os.environ.items() if name not in AT_IMPORT} | _AT_START,
            )

    def fork(self, asked: _Asked, descriptors: Sequence[int]) -> int:
        """Order a copy; return the descriptor that reports the process id and then the exit status."""
        reader, writer = os.pipe()
        try:
            socket.send_fds(self._control, [json.dumps(asked).encode()], [writer, *descriptors])
        finally:
            os.close(writer)
        return reader

    def stop(self) -> None:
        """End it; its forked processes continue."""
        self._control.close()
        self._process.wait()


_lock = threading.Lock()


@functools.cache
def _server() -> ForkServer:
    server = ForkServer()
    atexit.register(stop_fork_server)
    return server


def stop_fork_server() -> None:
    """End the fork server, if there is one; the next start makes another."""
    with _lock:
        if _server.cache_info().currsize:
            _server().stop()
            _server.cache_clear()


def can_fork(environ: Mapping[str, str]) -> bool:
    """Whether a process with this environment may be forked."""
    return sys.platform == "linux" and all(environ.get(name) == _AT_START.get(name) for name in AT_IMPORT)


def start(
    module: str,
    arguments: Sequence[str],
    *,
    stdout: int | None,
    stderr: int,
    environ: Mapping[str, str],
    directory: Path | None = None,
    pass_fds: Sequence[int] = (),
    new_session: bool = False,
    text: bool = False,
) -> Started:
    """Run the `main` of `module` in a process with empty stdin: forked if possible, else by `python -m`.

    `stdout` and `stderr` are descriptors; without one, stdout is a pipe, whose other end is its `stdout`.
    `pass_fds` have the same numbers there.
    """
    if not can_fork(environ):
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if stdout is None else stdout,
            stderr=stderr,
            bufsize=-1 if text else 0,
            text=text,
            env=environ,
            cwd=directory,
            pass_fds=pass_fds,
            start_new_session=new_session,
        )
    asked = _Asked(module, [*arguments], {**environ}, str(directory or Path.cwd()), [0, 1, 2, *pass_fds], new_session)
    piped: IO[Any] | None = None
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 -- a device
        written = stdout
        if written is None:
            reader, written = os.pipe()
            piped = open(reader, "r" if text else "rb", buffering=-1 if text else 0)  # noqa: PTH123, SIM115 -- a pipe
        try:
            with _lock:
                status_fd = _server().fork(asked, [nothing.fileno(), written, stderr, *pass_fds])
        finally:
            if stdout is None:
                os.close(written)
    return Forked([module, *arguments], status_fd, piped)


# The server's side


def _serve(control: socket.socket) -> tuple[_Asked, list[int]] | None:
    """Fork as ordered, and report each copy's end. Return a copy's order in the copy, None after the last order."""
    woken, waker = os.pipe()
    for end in (woken, waker):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    status_fds: dict[int, int] = {}
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        for number, _ in poll.poll():
            if number == woken:
                os.read(woken, _MOST_BYTES)
                _tell_ends(status_fds)
                continue
            message, descriptors, _, _ = socket.recv_fds(control, _MOST_BYTES, _MOST_DESCRIPTORS)
            if not message:
                return None
            status_fd, *others = descriptors
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return _Asked(*json.loads(message)), others
            for each in others:
                os.close(each)
            _tell(status_fd, pid)
            status_fds[pid] = status_fd


def _tell_ends(status_fds: dict[int, int]) -> None:
    """Report every copy that has ended."""
    while status_fds:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        status_fd = status_fds.pop(pid)
        _tell(status_fd, os.waitstatus_to_exitcode(status))
        os.close(status_fd)


def _tell(status_fd: int, number: int) -> None:
    try:
        os.write(status_fd, number.to_bytes(_NUMBER_BYTES, "big", signed=True))
    except BrokenPipeError:
        # The client has gone.
        return


def _become(asked: _Asked, descriptors: Sequence[int]) -> Callable[[], Any]:
    """Take the given descriptors and settings; return the `main` to run."""
    above = max((*asked.numbers, *descriptors)) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in descriptors]
    for each, number in zip(moved, asked.numbers, strict=True):
        os.dup2(each, number)
    first = 0
    for number in (*sorted(asked.numbers), os.sysconf("SC_OPEN_MAX")):
        # closerange(0, 0) closes all descriptors.
        if first < number:
            os.closerange(first, number)
        first = number + 1
    if asked.new_session:
        os.setsid()
    os.chdir(asked.directory)
    os.environ.clear()
    os.environ.update(asked.environ)
    time.tzset()
    sys.argv = [asked.module, *asked.arguments]
    main: Callable[[], Any] = importlib.import_module(asked.module).main
    return main


def main() -> NoReturn:
    # kproxy.__main__ does this before anything else is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    for module in PRELOADED:
        importlib.import_module(module)
    threads = [*Path("/proc/self/task").iterdir()]
    if len(threads) != 1:
        sys.exit("the fork server has several threads: something that it imports starts them")
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as control:
        asked = _serve(control)
        if asked is None:
            sys.exit()
        # The copy may need the descriptor's number.
        control.detach()
    status = _become(*asked)()
    # As at the end of `python -m`, but without taking the interpreter apart: that is a quarter of a short process.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


if __name__ == "__main__":
    main()
