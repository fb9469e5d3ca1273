"""`kproxy top` before a real proxy: on a terminal with keys, and printed once; the screen's decisions by themselves."""

from __future__ import annotations

import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path

import pytest

from kproxy.cli.top import Screen, in_bytes, summary
from kproxy.observe.overview import Overview, Verdict
from tests.support.processes.dev import KPROXY, run_kproxy
from tests.support.processes.ports import free_port
from tests.support.processes.served import static_proxy
from tests.support.waiting import PATIENCE_S

TOPICS = "".join(f'[[topics]]\nname = "orders-{number}"\nowners = [1, 1]\n' for number in range(3))


class Terminal:
    """A command on a terminal of 120 columns and 30 lines."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.shown = ""

    def press(self, keys: str) -> None:
        self.shown = ""
        os.write(self._descriptor, keys.encode())

    def until(self, text: str) -> None:
        """Wait until it shows a text."""
        ends = time.monotonic() + PATIENCE_S
        while text not in self.shown:
            assert time.monotonic() < ends, f"{text!r} is not in {self.shown[-3000:]!r}"
            if select.select([self._descriptor], [], [], 1)[0]:
                self.shown += os.read(self._descriptor, 65536).decode(errors="replace")


@contextmanager
def on_terminal(*arguments: str) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "30"}
    with subprocess.Popen([*KPROXY, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environ) as process:
        os.close(theirs)
        try:
            yield Terminal(ours), process
        finally:
            process.kill()
            os.close(ours)


def test_keys_choose_view_and_filter(tmp_path: Path) -> None:
    with (
        static_proxy(tmp_path, {1: free_port()}, rooms=TOPICS) as proxy,
        on_terminal("top", "--admin", proxy.admin) as (terminal, process),
    ):
        terminal.until("no broker answers: 1 asked")
        terminal.until("down")
        terminal.press("2")
        terminal.until("orders-2")
        terminal.press("/orders-1\r")
        terminal.until("with 'orders-1'")
        terminal.press("5")
        terminal.until("0 of 0")
        terminal.press("\x1b")
        terminal.until("limits.max_connections")
        terminal.press("q")
        assert process.wait(PATIENCE_S) == 0


def test_lost_proxy_is_told_on_the_screen(tmp_path: Path) -> None:
    with static_proxy(tmp_path, {1: free_port()}) as proxy, on_terminal("top", "--admin", proxy.admin) as (terminal, _):
        terminal.until("no broker answers")
        proxy.stop()
        terminal.until("no admin page answers at")


def test_top_prints_once_without_terminal(tmp_path: Path) -> None:
    with static_proxy(tmp_path, {1: free_port()}, rooms=TOPICS) as proxy:
        done = run_kproxy("top", "--admin", proxy.admin, "--view", "partitions", "--search", "orders-1")
        # No broker answers, so the proxy does not serve.
        assert (done.status, done.stdout.count("orders-1")) == (1, 2)
        assert "orders-2" not in done.stdout
        done = run_kproxy("top", "--admin", f"127.0.0.1:{free_port()}")
        assert (done.status, "no admin page answers" in done.stderr) == (2, True)


def test_screen_takes_keys() -> None:
    screen = Screen("brokers", "rate", "")
    for key in "3s":
        assert screen.press(key)
    assert (screen.view, screen.order) == ("clients", "oldest")
    for key in "/qx\x7fab":
        assert screen.press(key)
    assert screen.typed == "qab"
    screen.press("\r")
    assert (screen.search, screen.typed) == ("qab", None)
    screen.press("\x1b")
    assert screen.search == ""
    screen.press("1")
    columns = []
    for _ in range(12):
        screen.press("s")
        columns.append(screen.column)
    assert columns[0] == 0
    assert None in columns
    assert not screen.press("q")


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (999, "999 B"), (1_500, "1.5 kB"), (2_500_000_000, "2.5 GB")])
def test_bytes_are_readable(size: int, text: str) -> None:
    assert in_bytes(size) == text


def test_counts_agree_with_their_nouns() -> None:
    verdict = Verdict("good", "serving")
    told = Overview(kind="proxy", name="p", version="1", at=0, started=0, verdict=verdict, clients=1, partitions=1000)
    assert summary(told) == "p   1 client   1,000 partitions"
