"""A command that serves logs a bounded number of lines of one kind, whatever is sent to it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

from tests.support.raw_client import RawClient
from tests.support.served import port_of, static_proxy

LINES = 60


async def test_nonsense_from_hundreds_of_connections_leaves_a_short_log(tmp_path: Path) -> None:
    with static_proxy(tmp_path, {1: 1}) as process:
        for n in range(300):
            client = await RawClient().connect(port_of(process))
            client.send(b"\xff" * (8 + n))
            with contextlib.suppress(ConnectionError):
                assert await client.is_closed()
            client.abort()
        said = process.stderr()
        assert said.count("client connection closed") == LINES, f"{len(said)} bytes"
    # It has ended, before the minute was over.
    said = process.stderr()
    assert '240 lines like "client connection closed" left out' in said
    assert len(said) < 20_000


def test_tracebacks_and_what_libraries_log_are_bounded_as_well() -> None:
    script = """
import logging, structlog
from kproxy.observe.logging import configure_logging
configure_logging("info")
structlog.contextvars.bind_contextvars(worker=3)
for n in range(100):
    try:
        raise ValueError(n)
    except ValueError:
        structlog.get_logger().exception("failed", number=n)
        logging.getLogger("asyncio").error("out of %s", n, exc_info=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    lines = done.stderr.splitlines()
    assert done.stderr.count("Traceback") == 2 * LINES
    assert sum("failed" in line and "number=" in line for line in lines) == LINES
    assert sum(line.startswith("ERROR:asyncio:out of") for line in lines) == LINES
    told = [line for line in lines if "left out in the last minute" in line]
    assert ['40 lines like "failed"' in told[0], '40 lines like "out of %s"' in told[1]] == [True, True]
    assert "worker" in told[0]
