"""Notifications to systemd arrive, and a failure to send one has no effect."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kproxy.runtime.notify import TIMEOUT_S, notify, say_waiting

# Only Linux has abstract socket names.
NAMES = ("path", "abstract") if sys.platform == "linux" else ("path",)


@pytest.fixture(params=NAMES)
def manager(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket of a service manager, named in the environment."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@kproxy-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("\0" + name[1:] if name.startswith("@") else name)
        listening.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        yield listening


def test_assignments_arrive_as_one_message(manager: socket.socket) -> None:
    notify("READY=1", "STATUS=serves")
    assert manager.recv(1024) == b"READY=1\nSTATUS=serves"


def test_waiting_reason_is_the_one_line_status(manager: socket.socket) -> None:
    say_waiting("No etcd\nanswers.")
    assert manager.recv(1024) == b"STATUS=No etcd answers. Waiting for it."


def test_missing_socket_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")


@pytest.mark.parametrize("name", ["/nowhere/notify", "@nobody-listens-here", "vsock:2:1234", "/" + "x" * 200, ""])
def test_socket_that_cannot_be_used_raises_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    notify("READY=1")


def test_unresponsive_manager_delays_at_most_the_timeout(manager: socket.socket) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as filler:
        filler.setblocking(False)
        filler.connect(manager.getsockname())
        with suppress(BlockingIOError):
            while True:
                filler.send(b"x")
    began = time.monotonic()
    notify("READY=1")
    assert time.monotonic() - began < TIMEOUT_S + 30
