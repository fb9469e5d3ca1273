"""Child processes: no garbage collection in the copy that becomes one, and the exit status of one that is signalled."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from kproxy.runtime.process import send_signal, spawn


class Ends:
    """Garbage that reports the process in which it is collected."""

    def __init__(self, file: Path) -> None:
        self.itself = self
        self.file = file
        self.made_by = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.made_by:
            self.file.touch()


class Busy:
    """Allocate in each copy of this process while `is_on`, as Python's own work after a fork does."""

    is_on = False

    def __call__(self) -> None:
        if self.is_on:
            gc.set_threshold(10)
            [[each] for each in range(10_000)]


busy = Busy()
# The module cannot be removed.
os.register_at_fork(after_in_child=busy)


@pytest.fixture
def busy_copies() -> Iterator[None]:
    usual, busy.is_on = gc.get_threshold(), True
    # Existing garbage stays until the fork.
    gc.set_threshold(1_000_000)
    yield
    gc.set_threshold(*usual)
    busy.is_on = False


@pytest.mark.usefixtures("busy_copies")
def test_garbage_collector_is_idle_between_fork_and_command(tmp_path: Path) -> None:
    async def start() -> None:
        process = await spawn("/bin/true")
        assert await process.wait() == 0

    async def start_two() -> None:
        Ends(tmp_path / "collected")
        await asyncio.gather(start(), start())

    uvloop.run(start_two())
    assert gc.isenabled()
    assert not list(tmp_path.iterdir())


def test_signal_leaves_the_status_of_an_ended_child(monkeypatch: pytest.MonkeyPatch) -> None:
    signalled, waitpid = threading.Event(), os.waitpid

    def wait_later(pid: int, options: int) -> tuple[int, int]:
        """In asyncio's own thread, where it has one: the child has ended and is not waited for yet."""
        if threading.current_thread() is not threading.main_thread():
            signalled.wait(10)
        return waitpid(pid, options)

    monkeypatch.setattr(os, "waitpid", wait_later)

    async def end() -> int:
        process = await spawn("/bin/true")
        while Path(f"/proc/{process.pid}/stat").read_text().split()[2] != "Z":
            pass
        send_signal(process, signal.SIGTERM)
        signalled.set()
        return await process.wait()

    usual = asyncio.get_event_loop_policy()
    # asyncio's own loop, which runs the supervisor and kproxy dev.
    asyncio.set_event_loop_policy(None)
    try:
        assert asyncio.run(end()) == 0
    finally:
        asyncio.set_event_loop_policy(usual)
