"""Run three reference brokers, each in a process of its own, on one etcd."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.processes import child, first_line
from kproxy.dev.embedded_etcd import EmbeddedEtcd

BROKERS = 3
PREFIX = "/kafscale"


class Brokers(NamedTuple):
    """`addresses` is a bootstrap list; `data_dirs` has the directory of each broker's logs, by its id."""

    addresses: str
    pids: list[int]
    data_dirs: dict[int, Path]
    endpoint: str

    @contextlib.contextmanager
    def again(self, number: int) -> Iterator[None]:
        """Run the broker of that id, whose process has ended, in another process."""
        with child(*_command(self.endpoint, number, self.data_dirs[number])) as process:
            first_line(process)
            yield


def _command(endpoint: str, number: int, data_dir: Path) -> tuple[str, ...]:
    command = (sys.executable, "-m", "kproxy", "--log-level", "error", "broker", "--etcd", endpoint)
    return *command, "--node-id", str(number), "--data-dir", str(data_dir), "--prefix", PREFIX


@contextlib.contextmanager
def brokers(etcd: EmbeddedEtcd, directory: Path) -> Iterator[Brokers]:
    """Run brokers with their data under `directory`."""
    with contextlib.ExitStack() as stack:
        data_dirs = {number: directory / f"broker-{number}" for number in range(1, BROKERS + 1)}
        processes = [
            stack.enter_context(child(*_command(etcd.endpoint, number, data_dir)))
            for number, data_dir in data_dirs.items()
        ]
        addresses = ",".join(first_line(process).partition("kafka=")[2].split()[0] for process in processes)
        yield Brokers(addresses, [process.pid for process in processes], data_dirs, etcd.endpoint)
