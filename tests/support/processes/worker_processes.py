"""Find the processes of a `kproxy serve --workers N`, as the system shows them."""

from __future__ import annotations

import asyncio
import http.client
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.support.clients.raw_client import RawClient
from tests.support.processes.dev import KproxyProcess, gone
from tests.support.processes.served import Samples, page, port_of, samples
from tests.support.waiting import PATIENCE_S, eventually


def worker_pids(process: KproxyProcess) -> dict[int, int]:
    """The process id of each worker that runs, by its number."""
    return {number: pid for number, (pid, _) in _workers(process).items()}


def page_sockets(process: KproxyProcess) -> dict[int, Path]:
    """The socket of each worker's own admin page."""
    return {
        number: Path(arguments[arguments.index("--page") + 1]) for number, (_, arguments) in _workers(process).items()
    }


def _workers(process: KproxyProcess) -> dict[int, tuple[int, list[str]]]:
    """The process id and the command of each."""
    found = {}
    for child in process.descendants():
        try:
            arguments = child.cmdline()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if "--number" in arguments:
            found[int(arguments[arguments.index("--number") + 1])] = (child.pid, arguments)
    return found


def page_at(path: Path, what: str) -> tuple[int, str]:
    """The status and the text of a page at a unix socket."""
    connection = http.client.HTTPConnection("worker", timeout=PATIENCE_S)
    connection.sock = socket.socket(socket.AF_UNIX)
    try:
        connection.sock.settimeout(PATIENCE_S)
        connection.sock.connect(str(path))
        connection.request("GET", what)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def connections_of(pid: int, port: int) -> int:
    """The number of clients' connections to `port` that a process holds."""
    held = psutil.Process(pid).net_connections("tcp")
    return sum(each.status == psutil.CONN_ESTABLISHED and each.laddr.port == port for each in held if each.laddr)


async def clients_of_each(process: KproxyProcess) -> dict[int, list[RawClient]]:
    """At least one connection to every worker, by the worker's number."""
    pids, port = worker_pids(process), port_of(process)
    held: dict[int, list[RawClient]] = {number: [] for number in pids}

    def of_each() -> dict[int, int]:
        return {number: connections_of(pid, port) for number, pid in pids.items()}

    deadline = time.monotonic() + PATIENCE_S
    while not all(held.values()):
        before = of_each()
        client = await RawClient().connect(port)
        # The worker accepts a moment after the connection is made.
        while (after := of_each()) == before:
            assert time.monotonic() < deadline, f"no connection reaches some worker: {held}"
            await asyncio.sleep(0.01)
        (number,) = [number for number in pids if after[number] > before[number]]
        held[number].append(client)
    return held


async def shown(process: KproxyProcess) -> Samples:
    """Every sample of a worker's `/metrics`."""
    status, text = await asyncio.to_thread(page, process.admin, "/metrics")
    assert status == 200
    return samples(text)


async def until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    """Wait until the condition holds; a thread evaluates it."""
    await eventually(lambda: asyncio.to_thread(condition), what)


def all_gone(processes: list[psutil.Process]) -> bool:
    return gone(processes, timeout_s=PATIENCE_S)
