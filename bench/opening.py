"""Measure how a broker opens a log of small batches: without snapshots, after a stop, and after kill -9.

The segments are written directly. Child processes open the log, and stop or append as a broker does.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from array import array
from dataclasses import dataclass
from pathlib import Path

from crc32c import crc32c
from rich.console import Console

from bench.load import Shape, batch_of
from bench.processes import child, first_line, table_of
from kproxy.broker.config import LogOptions
from kproxy.broker.leader_epochs import NO_LEADERSHIP, Leadership
from kproxy.broker.log import Log
from kproxy.broker.log_maintenance import LogMaintenance
from kproxy.broker.segment import SUFFIX
from kproxy_codec.record_batch import ATTRIBUTES_OFFSET, assign_offsets, parse_header

OPENED_GB = 1
SHAPE = Shape("1 × 190 B", 1, 190, 0)
SEGMENT_BYTES = 256 << 20
APPENDED_BYTES = 200_000_000
FETCHED_BYTES = 1 << 20
FLUSH_INTERVAL_S = 1.0
_CRC = slice(17, ATTRIBUTES_OFFSET)


def batches(base_offset: int, count: int) -> bytearray:
    """Return batches of one record each, as a leader of epoch 0 sends them."""
    one = bytearray(batch_of(SHAPE))
    assign_offsets(one, parse_header(one), base_offset, leader_epoch=0)
    one[_CRC] = crc32c(one[ATTRIBUTES_OFFSET:]).to_bytes(4, "big")
    data, offsets = one * count, array("q", range(base_offset, base_offset + count))
    if sys.byteorder == "little":
        offsets.byteswap()
    packed = offsets.tobytes()
    for place in range(offsets.itemsize):
        data[place :: len(one)] = packed[place :: offsets.itemsize]
    return data


def _write_segments(directory: Path, size_in_bytes: int) -> None:
    per_segment = SEGMENT_BYTES // SHAPE.batch_bytes
    directory.mkdir()
    count = size_in_bytes // SHAPE.batch_bytes
    for base_offset in range(0, count, per_segment):
        segment = batches(base_offset, min(per_segment, count - base_offset))
        directory.joinpath(f"{base_offset:020d}{SUFFIX}").write_bytes(segment)


@dataclass
class _Replica:
    """A replica whose whole log is committed."""

    log: Log
    topic: str = "bench"
    partition_index: int = 0
    leadership: Leadership = NO_LEADERSHIP
    # It is appended to all the time.
    is_at_rest: bool = False

    @property
    def high_watermark(self) -> int:
        return self.log.log_end_offset

    def rest(self) -> None: ...
    def log_shortened(self) -> None: ...


def _maintenance(log: Log) -> LogMaintenance:
    return LogMaintenance(lambda: [_Replica(log)], flush_interval_s=FLUSH_INTERVAL_S, retention_check_interval_s=3600.0)


def _bytes_read() -> int:
    """Return the bytes that this process has read; 0 if the system does not report it (only Linux does)."""
    counters = Path("/proc/self/io")
    return int(counters.read_text().split()[1]) if counters.exists() else 0


def _opened(directory: Path) -> Log:
    """Open the log, and print the elapsed seconds, the CPU seconds, and the bytes read."""
    began, cpu, before = time.monotonic(), time.process_time(), _bytes_read()
    log = Log.open(directory, options=LogOptions(SEGMENT_BYTES))
    print(time.monotonic() - began, time.process_time() - cpu, _bytes_read() - before, flush=True)  # noqa: T201 -- for the parent
    return log


async def _stop(directory: Path) -> None:
    log = _opened(directory)
    maintenance = _maintenance(log)
    await maintenance.flush(whatever_the_policy=True)
    await maintenance.checkpoint(is_last=True)
    maintenance.close()
    log.close()


async def _append(directory: Path) -> None:
    """Append as a follower does, print a line, and wait for the end."""
    log = _opened(directory)
    running = asyncio.create_task(_maintenance(log).run())
    fetched = FETCHED_BYTES // SHAPE.batch_bytes
    for _ in range(APPENDED_BYTES // FETCHED_BYTES):
        log.append_replicated(batches(log.log_end_offset, fetched))
        await asyncio.sleep(0)
    print("appended", flush=True)  # noqa: T201 -- for the parent
    await running


def _open_in_child(directory: Path, then: str) -> str:
    """Open the log in a child, and return its output. The child then stops in order, or appends and is killed."""
    with child(sys.executable, "-m", "bench.opening", then, str(directory)) as process:
        opened = first_line(process)
        if then == "append":
            first_line(process)
            process.kill()
        status = process.wait()
    if then == "stop" and status:
        raise RuntimeError(f"the process that opened {directory} and stopped ended with {status}")
    return opened


def opening(console: Console, gigabytes: float = OPENED_GB) -> None:
    """Measure, and print the table."""
    title = f"a log of {gigabytes:g} GB, batches of {SHAPE.batch_bytes} bytes"
    table = table_of(title, ["opened"], ["seconds", "CPU seconds", "MB read"])

    def add(what: str, line: str) -> None:
        seconds, cpu, read = line.split()
        table.add_row(what, f"{float(seconds):,.2f}", f"{float(cpu):,.2f}", f"{int(read) / 1e6:,.1f}")

    with tempfile.TemporaryDirectory(prefix="kproxy-bench-") as name:
        directory = Path(name) / "bench-0"
        _write_segments(directory, int(gigabytes * 1e9))
        add("without snapshots", _open_in_child(directory, "stop"))
        add("after a stop", _open_in_child(directory, "stop"))
        _open_in_child(directory, "append")
        add(f"after kill -9, {APPENDED_BYTES / 1e6:.0f} MB appended", _open_in_child(directory, "stop"))
    console.print(table)


if __name__ == "__main__":
    asyncio.run({"stop": _stop, "append": _append}[sys.argv[1]](Path(sys.argv[2])))
