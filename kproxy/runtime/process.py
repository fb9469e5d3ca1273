"""End this process with its parent, start child processes, and raise the limit of open files.

`kproxy dev`, the supervisor of workers and a test run keep a pipe open (`ParentPipe`). They pass its read end to their
children, and its number in the environment. A thread of the child blocks on it (`end_with_parent`). Nothing is ever
written, so the thread wakes only when the parent has ended, even by SIGKILL. This works on Linux and macOS alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if sys.platform != "win32":
    import resource

PARENT_FD = "KPROXY_PARENT_FD"
# The time that the process has to stop after SIGTERM, before SIGKILL.
GRACE_S = 8.0
INSISTS_AFTER_S = 0.2

# The highest limit to set: some programs close every possible descriptor when they start another program.
MOST_OPEN_FILES = 1 << 20
# macOS calls its hard limit infinite, and accepts no soft limit above about OPEN_MAX.
OPEN_MAX = 10_240


class ParentPipe:
    """The parent's end of the pipe. One pipe serves all children.

    `close` closes both ends.
    """

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self._write_fd)


def end_with_parent(*, insist: bool = False, remove: Path | None = None) -> None:
    """If the parent has requested it, end this process after the parent: by SIGTERM, and by SIGKILL after GRACE_S.

    `insist`: send SIGTERM twice, to a process that continues to serve for a while after the first. `remove`: a
    directory of the parent to remove, as the parent no longer can.
    """
    number = os.environ.pop(PARENT_FD, "")
    if not number.isdigit():
        return
    threading.Thread(target=_watch, args=(int(number), insist, remove), name="parent-watch", daemon=True).start()


def _watch(read_fd: int, insist: bool, remove: Path | None) -> None:
    try:
        while os.read(read_fd, 1):
            pass
    except OSError:
        # The pipe does not exist: another program set the variable, so there is no parent to wait for.
        return
    if remove is not None:
        import shutil  # takes 10 ms, which other commands need not spend

        shutil.rmtree(remove, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    if insist:
        # The system merges two signals that are sent at the same instant.
        time.sleep(INSISTS_AFTER_S)
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


class _Collector:
    """The garbage collector, switched off while anything is `spared`."""

    def __init__(self) -> None:
        self._spared = 0
        self._was_on = True

    @contextlib.contextmanager
    def spared(self) -> Iterator[None]:
        if not self._spared:
            self._was_on = gc.isenabled()
        self._spared += 1
        gc.disable()
        try:
            yield
        finally:
            self._spared -= 1
            if not self._spared and self._was_on:
                gc.enable()


_collector = _Collector()


async def spawn(*command: str, **options: Any) -> asyncio.subprocess.Process:
    """Start a child process; the arguments are those of asyncio.create_subprocess_exec.

    uvloop forks this process, and the copy still runs Python before it becomes the command. A garbage collection in the
    copy may end objects with threads, such as gRPC's, and wait for threads that do not exist there, while this process
    waits for the copy.
    """
    with _collector.spared():
        return await asyncio.create_subprocess_exec(*command, **options)


def send_signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Signal a child, unless it has ended.

    The method of `process` waits for an ended child itself, and then asyncio reports the exit status as 255.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def raise_open_file_limit() -> int | None:
    """Raise the soft limit of open files (descriptors) to the hard one, at most to MOST_OPEN_FILES.

    Return the new limit as `open_file_limit` does.

    Each connection and each segment of a broker's log uses one descriptor. Child processes inherit the limit.
    """
    if sys.platform == "win32":
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES), OPEN_MAX):
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            break
        # The system may refuse less than its hard limit.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            break
    return open_file_limit()


def open_file_limit() -> int | None:
    """The soft limit of open files; None if the system has no limit."""
    if sys.platform == "win32":
        return None
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft
