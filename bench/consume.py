"""`make bench SECTION=consume`: what readers get through the proxy, compared with a direct reader and haproxy.

The brokers (`bench.log_broker`) let reads wait, as Kafka's do. A reader has one fetch in flight on each of its
connections: one for each broker if it reads directly, one through a proxy. haproxy has only one broker. The ways take
turns in each round. Latency is from a record's creation in its broker to its arrival in the reader, at ten records a
second. `fetches` are those that brokers receive in that time. The last column is the CPU time for idle readers.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from bench.log_broker import BIRTH, FULL, SLOW
from bench.processes import child, cpu_seconds, first_line, scratch, table_of
from bench.quick import haproxy, serve, write_table
from kproxy_codec.api_keys import FETCH
from kproxy_codec.fetch import FetchApi
from kproxy_codec.framing import request_header
from kproxy_codec.primitives import INT32

SHAPES = ((1, 1), (1, 100), (3, 3), (3, 100))
ROUNDS = 3
RATE = 10.0
SLOW_S, FULL_S, IDLE_S = 6.0, 2.0, 4.0
IDLE_READERS = 20
WAIT_MS = 500
MIB = 1 << 20
VERSION = 11
_PARTITION_BYTES = 1 * MIB


class Way(NamedTuple):
    """A way to read. `endpoints`: the ports to read from, each with its partitions. `pid`: the proxy."""

    name: str
    endpoints: Sequence[tuple[int, Sequence[int]]]
    pid: int | None


def fetch_frame(topic: bytes, offsets: dict[int, int], max_bytes: int) -> bytes:
    """Return a Fetch request of these partitions."""
    body = INT32.pack(-1) + INT32.pack(WAIT_MS) + INT32.pack(1) + INT32.pack(max_bytes) + b"\0" + INT32.pack(0)
    body += INT32.pack(-1) + INT32.pack(1) + len(topic).to_bytes(2, "big") + topic + INT32.pack(len(offsets))
    for index, offset in offsets.items():
        body += INT32.pack(index) + INT32.pack(-1) + offset.to_bytes(8, "big") + b"\xff" * 8
        body += INT32.pack(_PARTITION_BYTES)
    body += INT32.pack(0) + b"\0\0"
    message = request_header(FETCH, VERSION, 7, b"bench") + body
    return INT32.pack(len(message)) + message


class Reader:
    """A reader of all partitions; `latencies` in seconds."""

    def __init__(self, way: Way, topic: bytes) -> None:
        self._way = way
        self._topic = topic
        self.latencies: list[float] = []
        self.read_bytes = 0
        self.answers = 0

    async def run(self, seconds: float) -> None:
        """Read for `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                for port, partitions in self._way.endpoints:
                    group.create_task(self._read(port, partitions))

    async def _read(self, port: int, partitions: Sequence[int]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4 * MIB)
        offsets = dict.fromkeys(partitions, 0)
        is_first = True
        try:
            while True:
                writer.write(fetch_frame(self._topic, offsets, 8 * MIB))
                size = INT32.unpack(await reader.readexactly(4))[0]
                frame = memoryview(bytearray(INT32.pack(size) + await reader.readexactly(size)))
                now = time.monotonic_ns()
                self.answers += 1
                self.read_bytes += size
                for topic in FetchApi().parse_response(frame, VERSION).topics:
                    for index, end, length in zip(topic.partitions, topic.ends, topic.sizes, strict=True):
                        if self._topic == FULL:
                            offsets[index] += bool(length)
                            continue
                        births = frame[end - length : end]
                        offsets[index] += length // BIRTH.size
                        if not is_first:
                            self.latencies += [(now - birth) / 1e9 for (birth,) in BIRTH.iter_unpack(births)]
                # What was there before comes first.
                is_first = is_first and self._topic == SLOW and self.answers < 2 * len(self._way.endpoints) + 2
        finally:
            writer.close()


async def fetches(ports: Sequence[int]) -> int:
    """Return the number of fetches that brokers have received."""
    total = 0
    for port in ports:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(INT32.pack(0))
        total += BIRTH.unpack(await reader.readexactly(BIRTH.size))[0]
        writer.close()
    return total


@contextlib.contextmanager
def setting(brokers: int, partitions: int, directory: Path) -> Iterator[tuple[list[Way], list[int], list[int]]]:
    """Run brokers and proxies; yield the ways to read, the brokers' ports and their processes."""
    with contextlib.ExitStack() as stack:
        owned = [[index for index in range(partitions) if index % brokers == n] for n in range(brokers)]
        processes = [
            stack.enter_context(child(sys.executable, "-m", "bench.log_broker", str(RATE / brokers), *map(str, each)))
            for each in owned
        ]
        ports = [int(first_line(process)) for process in processes]
        owners = {topic: [index % brokers + 1 for index in range(partitions)] for topic in (FULL, SLOW)}
        pid, port = stack.enter_context(serve(write_table(ports, directory, owners)))
        ways = [
            Way("direct", list(zip(ports, owned, strict=True)), None),
            Way("kproxy", [(port, range(partitions))], pid),
        ]
        beside = stack.enter_context(haproxy(ports[0], directory)) if brokers == 1 else None
        if beside is not None:
            ways.append(Way("haproxy", [(beside[1], range(partitions))], beside[0]))
        yield ways, ports, [process.pid for process in processes]


class Figures(NamedTuple):
    """The figures of one round: the best of several counts, by kind."""

    mb_per_s: float
    ms_per_mb: float
    p50_ms: float
    p99_ms: float
    fetches_per_s: float
    idle_cpu: float


async def measure(way: Way, ports: list[int], pids: list[int]) -> Figures:
    """Measure one round of a way."""
    full, slow = Reader(way, FULL), Reader(way, SLOW)
    cpu = cpu_seconds(way.pid) if way.pid else 0.0
    await full.run(FULL_S)
    cpu = cpu_seconds(way.pid) - cpu if way.pid else 0.0
    before = await fetches(ports)
    await slow.run(SLOW_S)
    asked = (await fetches(ports) - before) / SLOW_S
    at_brokers = sum(map(cpu_seconds, pids))
    await asyncio.gather(*(Reader(way, SLOW).run(IDLE_S) for _ in range(IDLE_READERS)))
    at_brokers = (sum(map(cpu_seconds, pids)) - at_brokers) / IDLE_S
    megabytes = full.read_bytes / 1e6
    latencies = sorted(slow.latencies) or [0.0]
    p99 = latencies[min(len(latencies) - 1, len(latencies) * 99 // 100)]
    return Figures(
        megabytes / FULL_S, cpu / megabytes * 1e3, statistics.median(latencies) * 1e3, p99 * 1e3, asked, at_brokers
    )


def consume(console: Console) -> None:
    """Measure, and print the tables of `make bench SECTION=consume`."""
    title = f"Latency at {RATE:.0f} records/s; CPU of {IDLE_READERS} readers"
    numbers = ("MB/s", "proxy\nms/MB", "p50 ms", "p99 ms", "fetches/s", "brokers'\nCPU")
    table = table_of(title, ["brokers, partitions", "way"], numbers)
    for brokers, partitions in SHAPES:
        with scratch() as (stack, directory):
            ways, ports, pids = stack.enter_context(setting(brokers, partitions, directory))
            rounds: dict[str, list[Figures]] = {way.name: [] for way in ways}
            for _ in range(ROUNDS):
                for way in ways:
                    rounds[way.name].append(asyncio.run(measure(way, ports, pids)))
        for name, found in rounds.items():
            middle = Figures(*(statistics.median(values) for values in zip(*found, strict=True)))
            cells = (f"{value:,.{digits}f}" for value, digits in zip(middle, (0, 2, 2, 2, 1, 3), strict=True))
            table.add_row(f"{brokers}, {partitions}", name, *cells)
    console.print(table)
