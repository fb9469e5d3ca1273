"""`make bench SECTION=plain`: the cost of the plain path compared with haproxy's, and its latency; five minutes.

Seven shapes of requests, from one batch of 1 KiB to a hundred of 100 bytes and one of 1 MB; the hundred also in runs
nine times as long. Contestants take turns:

  haproxy   in TCP mode with one thread, before one broker: it reads nothing and splits nothing, so it is the floor
  kproxy    one process with its metrics, its limits and an audit trail that is shipped to files, before three brokers
  peers     any other proxies (`--peer name=host:port,pid`), which the reader has started, before the same brokers

Each round starts new processes, because two processes of one program differ by some percent as long as they live. In a
round each contestant has its connections open and has had some requests before it is measured; the least of its RUNS
there counts. The CPU time of a run is counted until LOOK_S after the last answer, when kproxy has judged the entries
of its trail. The trail judges once what has come for a connection and a partition since its last look, so the shorter
the run, the more of that falls on one request; a busy proxy is like the long runs. The brokers (`bench.fast_broker`) do
not parse known requests, so that no contestant waits for them more than for the machine.

The latency is that of `bench.latency`, at a fixed rate. kproxy's longest turn is measured in one more process, on
asyncio's loop (`bench.measured_loop`), under the same load.

A peer needs the addresses of its brokers: with `--brokers-at 19092` they listen there and on the next two ports. Peers
may be started first. It takes Produce requests of version 9 to the topic `bench`, without ApiVersions before them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import uvloop
from rich.console import Console

from bench.latency import TooSlow, latencies
from bench.load import MANY_PARTITIONS, SHAPES, Load, produce_frame, send_again, shape_load
from bench.plain_figures import (
    DIRECT,
    HAPROXY,
    KPROXY,
    NO_HAPROXY,
    Figures,
    Latency,
    Peer,
    as_json,
    fit_text,
    tables,
)
from bench.processes import child, cpu_seconds, first_line, scratch
from bench.quick import BROKERS, CHECKOUT, START_TIMEOUT_S, WARM_UP_REQUESTS, haproxy, serving, write_table

ROUNDS = 5
# For each contestant and shape in a round, taking turns; quiet moments of a shared machine are short.
RUNS = 3
RATE = 2000
LATENCY_S = 2.0
# Longer than between two looks of the trail.
LOOK_S = 0.7
MIN_WIDTH = 136
SUSTAINED = replace(MANY_PARTITIONS[-1], name="100 × 100 B, long", requests=1800)
MEASURED = (*SHAPES, *MANY_PARTITIONS, SUSTAINED)
LOCAL = "127.0.0.1"


class Way(NamedTuple):
    """A way to the brokers: through the process `pid`."""

    host: str
    port: int
    pid: int


def plain(
    console: Console,
    rounds: int = ROUNDS,
    peers: Sequence[Peer] = (),
    brokers_at: int = 0,
    json_file: Path | None = None,
    svg_directory: Path | None = None,
) -> None:
    """Measure, print the tables, and write JSON and plots. Raise SystemExit if a contestant does not serve."""
    console.width = max(console.width, MIN_WIDTH)
    loads = [shape_load(shape) for shape in MEASURED]
    figures = Figures(
        machine=machine(),
        shapes=MEASURED,
        request_bytes=[load.request_bytes for load in loads],
        brokers=[min(BROKERS, shape.partitions) for shape in MEASURED],
        rate=RATE,
    )
    with scratch() as (stack, directory):
        ports = stack.enter_context(_brokers(brokers_at))
        for peer in peers:
            _expect_peer(peer)
        for number in range(1, rounds + 1):
            console.print(f"round {number} of {rounds} …", highlight=False)
            _round(figures, loads, ports, peers, directory)
    figures.machine["load_after"] = os.getloadavg()
    _print(console, figures)
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(figures), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if svg_directory is not None:
        from bench.plain_plots import write_plots

        written = write_plots(figures, svg_directory)
        console.print(f"plots: {', '.join(str(path) for path in written)}", highlight=False)


def _print(console: Console, figures: Figures) -> None:
    facts = figures.machine
    console.print(
        f"\n{facts['cpu']}, {facts['cores']} cores; {facts['system']}; Python {facts['python']}; "
        f"{facts['haproxy'] or 'no haproxy'}; load {facts['load_before'][0]:.1f} before, "
        f"{facts['load_after'][0]:.1f} after\n",
        highlight=False,
    )
    if HAPROXY not in figures.cpu:
        console.print(NO_HAPROXY + "\n", highlight=False)
    for heading, table in tables(figures):
        console.print(heading, highlight=False)
        console.print(table)
    console.print(fit_text(figures.fit()), highlight=False)


def _round(
    figures: Figures, loads: Sequence[Load], ports: Sequence[int], peers: Sequence[Peer], directory: Path
) -> None:
    with contextlib.ExitStack() as stack:
        table = write_table(ports, directory)
        ways: dict[str, Way] = {}
        floor = stack.enter_context(haproxy(ports[0], directory))
        if floor is not None:
            ways[HAPROXY] = Way(LOCAL, floor[1], floor[0])
        process, port = stack.enter_context(_kproxy(table, directory, "kproxy"))
        ways[KPROXY] = Way(LOCAL, port, process.pid)
        ways.update((peer.name, Way(peer.host, peer.port, peer.pid)) for peer in peers)
        measured, measured_port = stack.enter_context(_kproxy(table, directory, "bench.measured_loop"))
        _longest_turn(measured)
        for load in loads:
            for name, (cpu_us, per_second) in uvloop.run(_take_turns(load, ways)).items():
                figures.add_run(name, load.name, cpu_us, per_second)
            uvloop.run(load.send(measured_port, load.requests))
            figures.turns.setdefault(load.name, []).append(_longest_turn(measured))
        frame = produce_frame(MEASURED[0])
        for name, (host, paced_port) in {
            DIRECT: (LOCAL, ports[0]),
            **{name: (way.host, way.port) for name, way in ways.items()},
        }.items():
            figures.latency.setdefault(name, Latency()).add(_latencies(name, host, paced_port, frame))
        _latencies(KPROXY, LOCAL, measured_port, frame)
        figures.turns.setdefault(figures.paced, []).append(_longest_turn(measured))


async def _take_turns(load: Load, ways: Mapping[str, Way]) -> dict[str, tuple[float, float]]:
    """Return the CPU µs for a request and requests per second of each contestant, in the cheapest of its RUNS."""
    connections = {}
    for name, way in ways.items():
        with _naming(name, way):
            connections[name] = await load.open(way.port, 0, way.host)
            await send_again(connections[name], min(WARM_UP_REQUESTS, load.requests))
    # Work left from the first requests does not count for the following ones.
    await asyncio.sleep(LOOK_S)
    each = load.requests // RUNS
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for name, way in [*ways.items()] * RUNS:
        with _naming(name, way):
            before, began = cpu_seconds(way.pid), time.monotonic()
            await send_again(connections[name], each)
            elapsed = time.monotonic() - began
            await asyncio.sleep(LOOK_S)
            requests = each * load.connections
            found[name].append(((cpu_seconds(way.pid) - before) / requests * 1e6, requests / elapsed))
    for connection in chain.from_iterable(connections.values()):
        connection.close()
    return {name: min(runs) for name, runs in found.items()}


@contextlib.contextmanager
def _naming(name: str, way: Way) -> Iterator[None]:
    """Raise the block's errors as SystemExit that names the contestant."""
    try:
        yield
    except OSError as error:
        raise SystemExit(f"{name} at {way.host}:{way.port} does not pass on requests: {error}") from error


def _latencies(name: str, host: str, port: int, frame: bytes) -> list[float]:
    try:
        return latencies(host, port, frame, RATE, LATENCY_S)
    except (OSError, TooSlow) as error:
        raise SystemExit(f"{name} at {host}:{port} does not serve {RATE:,} requests a second: {error}") from error


def _longest_turn(process: subprocess.Popen[str]) -> float:
    """Return the longest turn in ms since the last such question."""
    process.send_signal(signal.SIGUSR1)
    return float(first_line(process))


@contextlib.contextmanager
def _kproxy(table: Path, directory: Path, module: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run kproxy with metrics, limits and a shipped trail."""
    trail = directory / "trail" / module
    flags = ("--admin", f"{LOCAL}:0", "--audit-sink", f"json:{trail}")
    with serving(table, *flags, command=(module, "--log-level", "error")) as served:
        yield served


@contextlib.contextmanager
def _brokers(first_port: int) -> Iterator[list[int]]:
    """Run brokers; yield their ports: from `first_port` on, or any free ones if it is 0."""
    with contextlib.ExitStack() as stack:
        asked = [first_port + number if first_port else 0 for number in range(BROKERS)]
        command = (sys.executable, "-m", "bench.fast_broker")
        processes = [stack.enter_context(child(*command, str(port))) for port in asked]
        yield [int(first_line(process)) for process in processes]


def _expect_peer(peer: Peer) -> None:
    """Raise SystemExit unless the peer listens, within START_TIMEOUT_S, and its process exists."""
    if not psutil.pid_exists(peer.pid):
        raise SystemExit(f"there is no process {peer.pid}, which --peer names for {peer.name}")
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            socket.create_connection((peer.host, peer.port), 1.0).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"{peer.name} does not listen at {peer.host}:{peer.port}: {error}") from error
            time.sleep(0.2)


def machine() -> dict[str, Any]:
    """Return facts about the machine and the programs of the measurement."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "haproxy": _first_output("haproxy", "-v").partition(" - ")[0],
        "commit": _first_output("git", "rev-parse", "--short", "HEAD"),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load_before": os.getloadavg(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _first_output(*command: str) -> str:
    """Return the first line that a command prints; empty if there is no such command, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=CHECKOUT)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return ""
    return (done.stdout.splitlines() or [""])[0]
