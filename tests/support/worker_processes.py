"""The processes of a `kproxy serve --workers N`, as the system shows them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import psutil

from tests.support.dev import KproxyProcess, gone
from tests.support.raw_client import RawClient
from tests.support.served import Samples, page, port_of, samples

PATIENCE_S = 30.0


def worker_pids(process: KproxyProcess) -> dict[int, int]:
    """The process id of each worker that runs, by its number."""
    found = {}
    for child in process.descendants():
        try:
            arguments = child.cmdline()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if "--number" in arguments:
            found[int(arguments[arguments.index("--number") + 1])] = child.pid
    return found


def connections_of(pid: int, port: int) -> int:
    """How many clients' connections to `port` a process holds."""
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
        # It is accepted a moment after it is connected.
        while (after := of_each()) == before:
            assert time.monotonic() < deadline, f"no connection reaches some worker: {held}"
            await asyncio.sleep(0.01)
        (number,) = [number for number in pids if after[number] > before[number]]
        held[number].append(client)
    return held


async def shown(process: KproxyProcess) -> Samples:
    """Every sample of its `/metrics`."""
    status, text = await asyncio.to_thread(page, process.admin, "/metrics")
    assert status == 200
    return samples(text)


async def until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    """Until it holds; it is asked in a thread."""
    deadline = time.monotonic() + PATIENCE_S
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, what()
        await asyncio.sleep(0.05)


def all_gone(processes: list[psutil.Process]) -> bool:
    return gone(processes, timeout_s=PATIENCE_S)
