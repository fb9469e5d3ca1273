"""What the proxy costs per request and per megabyte, beside haproxy, in about a minute.

CPU time of the proxy process, user and system, over runs of the same load in front of three null brokers; kproxy and
haproxy take turns, and the least of their runs counts: on a shared machine the least is the least disturbed. haproxy in
TCP mode reads nothing and splits nothing: it is the floor for a proxy of one address, here in front of one broker.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from bench.load import CONNECTIONS, IN_FLIGHT, SHAPES, TOPIC, Shape, produce_frame
from bench.processes import child, first_line, measure

BROKERS = 3
ROUNDS = 4
WARM_UP_REQUESTS = 50
PARTITIONS = 12
START_TIMEOUT_S = 20.0


def write_table(ports: list[int], directory: Path) -> Path:
    """A static table of the load's topic, its partitions spread over brokers at these ports."""
    owners = [index % len(ports) + 1 for index in range(PARTITIONS)]
    brokers = "".join(f'{number} = "127.0.0.1:{port}"\n' for number, port in enumerate(ports, 1))
    table = directory / "table.toml"
    table.write_text(f'[brokers]\n{brokers}[[topics]]\nname = "{TOPIC.decode()}"\nowners = {owners}\n')
    return table


@contextlib.contextmanager
def kproxy(ports: list[int], directory: Path, *flags: str) -> Iterator[tuple[int, int]]:
    """(pid, port) of kproxy in front of the brokers."""
    table = write_table(ports, directory)
    arguments = ("--ownership", "static", "--table", str(table), "--listen", "127.0.0.1:0", *flags)
    with child(sys.executable, "-m", "kproxy", "serve", *arguments) as process:
        address = first_line(process).partition("kafka=")[2].split()[0]
        yield process.pid, int(address.rpartition(":")[2])


@contextlib.contextmanager
def haproxy(port: int, directory: Path) -> Iterator[tuple[int, int] | None]:
    """(pid, port) of haproxy in TCP mode in front of one broker; None where it is not installed."""
    binary = shutil.which("haproxy")
    if binary is None:
        yield None
        return
    listen = free_port()
    configuration = directory / "haproxy.cfg"
    configuration.write_text(
        "global\n  nbthread 1\n  maxconn 1000\ndefaults\n  mode tcp\n  timeout connect 5s\n  timeout client 60s\n"
        f"  timeout server 60s\nfrontend f\n  bind 127.0.0.1:{listen}\n  default_backend b\n"
        f"backend b\n  server s 127.0.0.1:{port}\n"
    )
    with child(binary, "-db", "-q", "-f", str(configuration)) as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not any(c.laddr.port == listen for c in psutil.Process(process.pid).net_connections("tcp") if c.laddr):
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit("haproxy did not start")
            time.sleep(0.05)
        yield process.pid, listen


def free_port() -> int:
    """A port that was free a moment ago."""

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def compare(shape: Shape, proxies: dict[str, tuple[int, int]]) -> dict[str, tuple[float, float, float]]:
    """For each proxy: CPU µs per request, CPU ms per MB, requests per second; the least CPU of the rounds."""
    frame = produce_frame(shape)
    best: dict[str, tuple[float, float]] = {}
    for pid, port in proxies.values():
        measure(pid, port, frame, min(WARM_UP_REQUESTS, shape.requests))
    for _ in range(ROUNDS):
        for name, (pid, port) in proxies.items():
            best[name] = min(best.get(name, (1e9, 1e9)), measure(pid, port, frame, shape.requests))
    requests = shape.requests * CONNECTIONS
    megabytes = requests * len(frame) / 1e6
    return {
        name: (cpu / requests * 1e6, cpu / megabytes * 1e3, requests / elapsed) for name, (cpu, elapsed) in best.items()
    }


def quick(console: Console) -> None:
    """The table that `make bench-quick` prints."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kproxy-bench-")))
        brokers = [stack.enter_context(child(sys.executable, "-m", "bench.null_broker")) for _ in range(BROKERS)]
        ports = [int(first_line(broker)) for broker in brokers]
        proxies = {"kproxy": stack.enter_context(kproxy(ports, directory))}
        beside = stack.enter_context(haproxy(ports[0], directory))
        if beside is None:
            console.print("haproxy is not installed (apt-get install haproxy): kproxy is measured alone")
        else:
            proxies["haproxy"] = beside
        table = Table(
            title=f"CPU of the proxy process; {CONNECTIONS} connections, {IN_FLIGHT} in flight", title_style=""
        )
        table.add_column("request", no_wrap=True)
        for name in proxies:
            for unit in ("µs/req", "ms/MB", "req/s"):
                table.add_column(f"{name}\n{unit}", justify="right")
        table.add_column("kproxy /\nhaproxy", justify="right")
        for shape in SHAPES:
            results = compare(shape, proxies)
            cells = [
                f"{value:,.{digits}f}"
                for each in results.values()
                for value, digits in zip(each, (1, 3, 0), strict=True)
            ]
            ratio = f"{results['kproxy'][0] / results['haproxy'][0]:.2f}" if "haproxy" in results else "-"
            table.add_row(shape.name, *cells, ratio)
        console.print(table)
