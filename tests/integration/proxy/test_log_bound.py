"""A serving command logs a bounded number of lines of one kind, whatever it receives."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes.served import Served, served

LINES = 60


async def says_garbage(s: Served, size: int) -> None:
    client = await s.client()
    client.send(b"\xff" * size)
    with contextlib.suppress(ConnectionError):
        assert await client.is_closed()
    client.abort()


async def test_garbage_from_hundreds_of_connections_logs_little(tmp_path: Path) -> None:
    async with served(tmp_path) as s:
        for n in range(300):
            await says_garbage(s, 8 + n)
        said = s.process.stderr()
        assert said.count("client connection closed") == LINES, f"{len(said)} bytes"
    # The process ended within the minute.
    said = s.process.stderr()
    told = [line for line in said.splitlines() if "similar lines left out" in line]
    assert ["lines=240" in line and "of='client connection closed'" in line for line in told] == [True]
    assert len(said) < 20_000


def test_tracebacks_and_library_logs_are_bounded() -> None:
    script = """
import logging, structlog
from kproxy.observe.logging import configure_logging
configure_logging("info", "text")
structlog.contextvars.bind_contextvars(worker=3)
for n in range(100):
    try:
        raise ValueError(n)
    except ValueError:
        structlog.get_logger().exception("failed", number=n)
        logging.getLogger("asyncio").error("out of %s", n, exc_info=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
    lines = done.stderr.splitlines()
    assert done.stderr.count("Traceback") == 2 * LINES
    assert sum("failed" in line and "number=" in line for line in lines) == LINES
    assert sum("out of" in line and "[asyncio]" in line for line in lines) == LINES
    told = [line for line in lines if "similar lines left out" in line]
    assert ["of=failed" in told[0], "of='out of %s'" in told[1]] == [True, True]
    assert all("lines=40" in line and "worker=3" in line for line in told)


async def test_command_without_terminal_logs_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KPROXY_LOG_FORMAT")
    async with served(tmp_path) as s:
        await says_garbage(s, 8)
    lines = [json.loads(line) for line in s.process.stderr().splitlines()]
    closed = [line for line in lines if line["event"] == "client connection closed"]
    assert [line["level"] for line in closed] == ["warning"]
    assert closed[0]["client"].startswith("127.0.0.1:")
    assert all(line["timestamp"].endswith("Z") for line in lines)
