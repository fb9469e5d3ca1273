"""Choose ports for servers that need a given port; other servers choose a port and report it when they serve."""

from __future__ import annotations

import itertools
import os
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

HOST = "127.0.0.1"
# Below the ports that the system assigns, to listen or to connect: some seconds pass between choosing one and listening
# on it, and it has to stay free while its server is down. No port is given twice, also not by two processes that run
# tests side by side.
_PORTS = range(
    10_000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]),
    32_000,
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")),
)
_ports: Iterator[int] = itertools.cycle(random.SystemRandom().sample(_PORTS, len(_PORTS)))


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens."""
    found: list[int] = []
    with ExitStack() as held:
        for port in itertools.islice(_ports, len(_PORTS)):
            with suppress(OSError):
                held.enter_context(socket.create_server((HOST, port)))
                found.append(port)
            if len(found) == count:
                return found
    raise AssertionError(f"no {count} free ports in {_PORTS}")


def free_port() -> int:
    """A port on which nobody listens."""
    return free_ports(1)[0]
