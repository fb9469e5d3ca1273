"""Many partitions on three reference brokers: how soon all are in sync, what they cost idle, how soon they fail over.

And how soon their first replicas lead again.

One topic of `--replicated-partitions` partitions and three replicas each, created and left alone. What the brokers have
decided is read from etcd.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from rich.console import Console
from rich.table import Table

from bench.brokers import BROKERS, PREFIX, Brokers, brokers
from bench.processes import cpu_seconds, resident_bytes
from kproxy.broker.keys import Keys, StateValue, TopicValue, decode_value
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient

REPLICATED_PARTITIONS = 5_000
TOPIC = "many"
IDLE_S = 20.0
POLL_S = 0.5
ADMIN_TIMEOUT_S = 60.0
SYNC_TIMEOUT_S = 300.0
FAIL_OVER_TIMEOUT_S = 180.0
HAND_BACK_TIMEOUT_S = 900.0


class _Observed:
    """What etcd has of the topic. Every read is of all its partitions."""

    def __init__(self, client: EtcdClient) -> None:
        self._client = client
        self._keys = Keys(PREFIX)

    async def in_sync(self) -> int:
        """The number of partitions whose ISR is full."""
        found = await self._client.get_prefix(f"{self._keys.states}{TOPIC}/")
        states = [decode_value(kv.value, StateValue) for kv in found.kvs]
        return sum(state.leader_epoch >= 0 and len(state.isr) == BROKERS for state in states)

    async def owners(self) -> dict[int, int]:
        """The broker that leads, by partition."""
        prefix = f"{self._keys.leases}{TOPIC}/"
        found = await self._client.get_prefix(prefix)
        return {int(kv.key.removeprefix(prefix)): int(kv.value) for kv in found.kvs}

    async def owned(self, *, without: int) -> int:
        """The number of partitions that a broker other than `without` leads."""
        return sum(owner != without for owner in (await self.owners()).values())

    async def preferred(self) -> int:
        """The number of partitions that their first replica leads."""
        found = await self._client.get(self._keys.topic(TOPIC))
        replicas = decode_value(found.value, TopicValue).replicas if found is not None else []
        return sum(replicas[index][0] == owner for index, owner in (await self.owners()).items())


async def _seconds_until(count: Callable[[], Awaitable[int]], wanted: int, timeout_s: float) -> str:
    """How long it takes; after `timeout_s`, how many there are."""
    began = time.monotonic()
    while (found := await count()) < wanted:
        if time.monotonic() - began > timeout_s:
            return f"{found:,} of {wanted:,} after {timeout_s:.0f} s"
        await asyncio.sleep(POLL_S)
    return f"{time.monotonic() - began:.1f} s"


async def _measure(started: Brokers, client: EtcdClient, partitions: int, table: Table) -> None:
    observed, pids = _Observed(client), started.pids
    admin = AdminClient({"bootstrap.servers": started.addresses, "log_level": 2})
    began, cpu = time.monotonic(), [cpu_seconds(pid) for pid in pids]
    wanted = NewTopic(TOPIC, partitions, BROKERS)
    await asyncio.to_thread(lambda: admin.create_topics([wanted])[TOPIC].result(ADMIN_TIMEOUT_S))
    table.add_row("CreateTopics answered", f"{time.monotonic() - began:.1f} s")
    table.add_row("after that: every ISR full", await _seconds_until(observed.in_sync, partitions, SYNC_TIMEOUT_S))
    spent = [cpu_seconds(pid) - before for pid, before in zip(pids, cpu, strict=True)]
    table.add_row("CPU of each broker until then", ", ".join(f"{each:.1f} s" for each in spent))
    await asyncio.sleep(5.0)
    cpu = [cpu_seconds(pid) for pid in pids]
    await asyncio.sleep(IDLE_S)
    idle = [(cpu_seconds(pid) - before) / IDLE_S for pid, before in zip(pids, cpu, strict=True)]
    table.add_row("idle: of a core, each broker", ", ".join(f"{each:.1%}" for each in idle))
    table.add_row("resident, each broker", ", ".join(f"{resident_bytes(pid) / (1 << 20):.0f} MiB" for pid in pids))
    os.kill(pids[0], signal.SIGKILL)
    others = await _seconds_until(lambda: observed.owned(without=1), partitions, FAIL_OVER_TIMEOUT_S)
    table.add_row("kill -9 of one: every partition led by another", others)
    with started.again(1):
        back = await _seconds_until(observed.preferred, partitions, HAND_BACK_TIMEOUT_S)
        table.add_row("started again: every partition led by its first replica", back)


async def _run(console: Console, partitions: int) -> None:
    table = Table(title=f"{partitions:,} partitions × {BROKERS} replicas on {BROKERS} brokers", title_style="")
    table.add_column("what")
    table.add_column("measured", justify="right")
    with tempfile.TemporaryDirectory(prefix="kproxy-bench-") as name:
        directory = Path(name)
        async with EmbeddedEtcd(directory / "etcd") as etcd:
            client = EtcdClient([etcd.endpoint], timeout_s=10.0)
            await client.connect()
            try:
                with brokers(etcd, directory) as started:
                    await _measure(started, client, partitions, table)
            finally:
                await client.close()
    console.print(table)


def partitions(console: Console, count: int = REPLICATED_PARTITIONS) -> None:
    """Measure, and print the table."""
    asyncio.run(_run(console, count))
