"""`make bench SECTION=page`: what browsers with the admin page cost a proxy with many partitions and clients; a minute.

The proxy has PARTITIONS partitions in its table, CLIENTS connected clients, and clients that send RATE requests a
second. It runs on an event loop that measures its turns (`bench.measured_loop`). Each browser has the stream of events
open, and asks for the rows of one view every two seconds, as the page does. The browsers and the clients are other
processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import aiohttp
from rich.console import Console
from rich.table import Table

from bench.connections import allow_files
from bench.latency import latencies
from bench.load import SHAPES, TOPIC, produce_frame
from bench.plain_figures import percentile
from bench.processes import child, cpu_seconds, first_line, resident_bytes
from bench.quick import BROKERS, serving, write_table
from kproxy_codec.api_keys import API_VERSIONS
from kproxy_codec.framing import request_header
from kproxy_codec.primitives import INT32

HOST: Final = "127.0.0.1"
PARTITIONS: Final = 100_000
TOPICS: Final = 1_000
CLIENTS: Final = 10_000
# Of the proxy and of this process.
FILES: Final = CLIENTS + 1_000
RATE: Final = 500
BROWSERS: Final = 3
SECONDS: Final = 15.0
VIEWS: Final = ("/topics?order=rate", "/partitions?limit=50", "/clients?order=slow", "/topics?search=zzz", "/own")


def page(console: Console) -> None:
    """Print the table. SystemExit if the limit of open files is too low."""
    allow_files(FILES)
    title = f"{PARTITIONS:,} partitions of {TOPICS:,} topics, {CLIENTS:,} clients, {RATE} requests/s"
    table = Table(title=title, title_style="")
    for heading in ("browsers", "memory, MB", "longest turn, ms of CPU", "CPU, %", "latency p50, ms", "p99, ms"):
        table.add_column(heading, justify="left" if heading == "browsers" else "right")
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kproxy-bench-")))
        brokers = [stack.enter_context(child(sys.executable, "-m", "bench.fast_broker", "0")) for _ in range(BROKERS)]
        each = [number % BROKERS + 1 for number in range(PARTITIONS // TOPICS)]
        owners = {TOPIC: each, **{b"topic-%04d" % number: each for number in range(1, TOPICS)}}
        ports = [int(first_line(broker)) for broker in brokers]
        ready: list[str] = []
        flags = ("--admin", f"{HOST}:0", "--metrics-topics", "100", "--metrics-clients", "100")
        process, port = stack.enter_context(
            serving(
                write_table(ports, directory, owners),
                *flags,
                command=("bench.measured_loop", "--log-level", "error"),
                on_ready=ready.append,
                environ={"KPROXY_LIMITS__MAX_CONNECTIONS": str(FILES)},
            )
        )
        first_line(stack.enter_context(child(sys.executable, "-m", "bench.page", "clients", str(port))))
        admin = ready[0].partition("admin=")[2].split()[0]
        for browsers in (0, 1, BROWSERS, 0):
            with child(sys.executable, "-m", "bench.page", "browsers", admin, str(browsers)):
                _figures(process, port, 2.0)
                table.add_row(f"{browsers:,}", *_figures(process, port, SECONDS))
    console.print(table)


def _figures(process: subprocess.Popen[str], port: int, seconds: float) -> Iterator[str]:
    _longest_turn(process)
    before = cpu_seconds(process.pid)
    took = latencies(HOST, port, produce_frame(SHAPES[0]), RATE, seconds)
    used = (cpu_seconds(process.pid) - before) / seconds
    longest = _longest_turn(process)
    figures = (resident_bytes(process.pid) / 1e6, longest, 100 * used)
    return iter([*(f"{each:.1f}" for each in figures), *(f"{1000 * percentile(took, each):.2f}" for each in (50, 99))])


def _longest_turn(process: subprocess.Popen[str]) -> float:
    process.send_signal(signal.SIGUSR1)
    return float(first_line(process))


def _connect(port: int) -> None:
    """Be CLIENTS clients that have asked for the versions."""
    with contextlib.ExitStack() as stack:
        number = 0
        while number < CLIENTS:
            client = stack.enter_context(socket.create_connection((HOST, port), 60))
            body = request_header(API_VERSIONS, 0, number, b"client-%d" % number)
            try:
                client.sendall(INT32.pack(len(body)) + body)
                number += bool(client.recv(1 << 16))
            except ConnectionError:
                # The proxy keeps open files for the connections to brokers that new clients may need.
                time.sleep(1)
        sys.stdout.write("connected\n")
        sys.stdout.flush()
        signal.pause()


async def _browse(admin: str, browsers: int) -> None:
    async with aiohttp.ClientSession(f"http://{admin}", timeout=aiohttp.ClientTimeout(None)) as session:

        async def listen() -> None:
            async with session.get("/events") as stream:
                async for _ in stream.content.iter_any():
                    pass

        async def ask(first: int) -> None:
            for place in itertools.count(first):
                async with session.get(VIEWS[place % len(VIEWS)]) as answer:
                    await answer.read()
                await asyncio.sleep(2)

        tasks = [each for number in range(browsers) for each in (listen(), ask(number))]
        await asyncio.gather(asyncio.Event().wait(), *tasks)


if __name__ == "__main__":
    if sys.argv[1] == "clients":
        _connect(int(sys.argv[2]))
    else:
        asyncio.run(_browse(sys.argv[2], int(sys.argv[3])))
