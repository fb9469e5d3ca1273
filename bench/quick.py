"""Measure the proxy's cost per request and per megabyte, compared with haproxy, in about a minute.

The figure is the CPU time of the proxy process, user and system, over runs of the same load in front of three null
brokers. kproxy and haproxy take turns, and the least of their runs counts: on a shared machine the least is the least
disturbed. haproxy in TCP mode parses nothing and splits nothing: it is the floor for a proxy of one address, here in
front of one broker. The last column is kproxy without the compiled plain path (KPROXY_PLAIN=off), as a multiple of it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from rich.console import Console

from bench.load import CONNECTIONS, IN_FLIGHT, SHAPES, TOPIC, Load, shape_load
from bench.processes import child, first_line, measure_run, scratch, started, table_of

BROKERS = 3
ROUNDS = 4
WARM_UP_REQUESTS = 50
PARTITIONS = 100
START_TIMEOUT_S = 20.0
UNITS = ("µs/req", "ms/MB", "req/s")
CHECKOUT = Path(__file__).parents[1]
# Of the environment.
NO_CHANGES: Mapping[str, str] = {}
OWNERS = {TOPIC: [index % BROKERS + 1 for index in range(PARTITIONS)]}


def write_table(ports: Sequence[int], directory: Path, owners: Mapping[bytes, Sequence[int]] = OWNERS) -> Path:
    """Write a static table of brokers at these ports, numbered from 1, and of topics: the owner of each partition."""
    lines = ["[brokers]", *(f'{number} = "127.0.0.1:{port}"' for number, port in enumerate(ports, 1))]
    for topic, brokers in owners.items():
        lines += ["[[topics]]", f'name = "{topic.decode()}"', f"owners = {list(brokers)}"]
    table = directory / "table.toml"
    table.write_text("\n".join(lines) + "\n")
    return table


@contextlib.contextmanager
def kproxy(ports: list[int], directory: Path, *flags: str) -> Iterator[tuple[int, int]]:
    """Run kproxy in front of the brokers; yield (pid, port)."""
    with serve(write_table(ports, directory), *flags) as proxy:
        yield proxy


def environment_of(checkout: Path) -> dict[str, str]:
    """Return this environment, in which Python finds a checkout's packages."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), str(checkout / "codec")])}


@contextlib.contextmanager
def serve(
    table: Path, *flags: str, checkout: Path = CHECKOUT, environ: Mapping[str, str] = NO_CHANGES
) -> Iterator[tuple[int, int]]:
    """Run a checkout's kproxy before the brokers of a static table; yield (pid, port)."""
    with serving(table, *flags, checkout=checkout, environ=environ) as (process, port):
        yield process.pid, port


@contextlib.contextmanager
def serving(
    table: Path,
    *flags: str,
    checkout: Path = CHECKOUT,
    command: Sequence[str] = ("kproxy",),
    on_ready: Callable[[str], object] = lambda line: None,
    environ: Mapping[str, str] = NO_CHANGES,
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """As `serve`, but yield the process. `command`: the command up to `serve`. `on_ready` gets the ready line."""
    arguments = ("--ownership", "static", "--table", str(table), "--listen", "127.0.0.1:0", *flags)
    # `python -m` looks in the working directory first, and elsewhere for modules that it does not have.
    environment = {**environment_of(checkout), **environ}
    with child(sys.executable, "-m", *command, "serve", *arguments, cwd=checkout, env=environment) as process:
        ready = first_line(process)
        on_ready(ready)
        address = ready.partition("kafka=")[2].split()[0]
        yield process, int(address.rpartition(":")[2])


@contextlib.contextmanager
def haproxy(port: int, directory: Path, certificate: Path | None = None) -> Iterator[tuple[int, int] | None]:
    """Run haproxy in TCP mode before a broker, with TLS by `certificate`; yield (pid, port), None if not installed."""
    binary = shutil.which("haproxy")
    if binary is None:
        yield None
        return
    listen = free_port()
    configuration = directory / f"haproxy-{listen}.cfg"
    tls = "" if certificate is None else f" ssl crt {certificate}"
    configuration.write_text(
        "global\n  nbthread 1\n  maxconn 4000\ndefaults\n  mode tcp\n  timeout connect 5s\n  timeout client 60s\n"
        f"  timeout server 60s\nfrontend f\n  bind 127.0.0.1:{listen}{tls}\n  default_backend b\n"
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
    """Return a port that was free a moment ago."""

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Cost(NamedTuple):
    """The cost of one run: CPU seconds of the proxy, and elapsed seconds."""

    cpu: float
    elapsed: float


def take_turns(load: Load, proxies: Mapping[str, tuple[int, int]], rounds: int) -> dict[str, Cost]:
    """Return the least cost of each proxy's runs, after one that warms it up."""
    best: dict[str, Cost] = {}
    warm_up = min(WARM_UP_REQUESTS * CONNECTIONS // load.connections, load.requests)
    for pid, port in proxies.values():
        measure_run(pid, load.send(port, warm_up))
    for _ in range(rounds):
        for name, (pid, port) in proxies.items():
            cost = Cost(*measure_run(pid, load.send(port, load.requests)))
            best[name] = min(best.get(name, cost), cost)
    return best


def per_request(load: Load, cost: Cost) -> tuple[float, float, float]:
    """Return CPU µs per request, CPU ms per MB, requests per second."""
    requests = load.requests * load.connections
    return (
        cost.cpu / requests * 1e6,
        cost.cpu / (requests * load.request_bytes / 1e6) * 1e3,
        requests / cost.elapsed,
    )


def cells(load: Load, cost: Cost) -> list[str]:
    """Return the same as a row of a table, below UNITS."""
    return [f"{value:,.{digits}f}" for value, digits in zip(per_request(load, cost), (1, 3, 0), strict=True)]


def quick(console: Console) -> None:
    """Measure, and print the table of `make bench-quick`."""
    with scratch() as (stack, directory):
        ports = started(stack, *["null_broker"] * BROKERS)
        proxies = {"kproxy": stack.enter_context(kproxy(ports, directory))}
        core = {"core": stack.enter_context(serve(write_table(ports, directory), environ={"KPROXY_PLAIN": "off"}))}
        beside = stack.enter_context(haproxy(ports[0], directory))
        if beside is None:
            console.print("haproxy is not installed (apt-get install haproxy): kproxy is measured alone")
        else:
            proxies["haproxy"] = beside
        title = f"CPU of the proxy process; {CONNECTIONS} connections, {IN_FLIGHT} in flight"
        numbers = [f"{name}\n{unit}" for name in proxies for unit in UNITS]
        table = table_of(title, ["request"], [*numbers, "kproxy /\nhaproxy", "not compiled /\nkproxy"])
        for load in map(shape_load, SHAPES):
            costs = take_turns(load, {**proxies, **core}, ROUNDS)
            slower = costs.pop("core").cpu / costs["kproxy"].cpu
            ratio = f"{costs['kproxy'].cpu / costs['haproxy'].cpu:.2f}" if "haproxy" in costs else "-"
            shown = (cell for cost in costs.values() for cell in cells(load, cost))
            table.add_row(load.name, *shown, ratio, f"{slower:.1f}")
        console.print(table)
