"""Measure many partitions on three reference brokers: the time until all are in sync, the idle cost, and failover.

It also measures when their first replicas lead again, and when brokers know topics that are created meanwhile.

There is one topic of `--replicated-partitions` partitions with three replicas each and no writers. The decisions of the
brokers are read from etcd.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import statistics
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from rich.console import Console
from rich.table import Table

from bench.brokers import BROKERS, PREFIX, Brokers, brokers
from bench.processes import cpu_seconds, resident_bytes, table_of
from kproxy.broker.keys import Keys, StateValue, TopicValue, decode_value, encode_value
from kproxy.config import parse_address
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient
from kproxy.ownership.kafka_client import KafkaConnection
from kproxy_codec import api_keys as keys
from kproxy_codec import error_codes

REPLICATED_PARTITIONS = 5_000
TOPIC = "many"
IDLE_S = 20.0
POLL_S = 0.5
# For topics created while the many partitions get their leaders and followers.
OTHER_TOPICS_EVERY_S = 1.0
OTHER_POLL_S = 0.02
# The last version of Metadata that names topics by name alone.
BY_NAME = 9
ADMIN_TIMEOUT_S = 60.0
SYNC_TIMEOUT_S = 300.0
FAIL_OVER_TIMEOUT_S = 180.0
HAND_BACK_TIMEOUT_S = 900.0


class _Observed:
    """The topic's state in etcd. Every read is of all partitions."""

    def __init__(self, client: EtcdClient) -> None:
        self._client = client
        self._keys = Keys(PREFIX)

    async def in_sync(self) -> int:
        """Return the number of partitions whose ISR is full."""
        found = await self._client.get_prefix(f"{self._keys.states}{TOPIC}/")
        states = [decode_value(kv.value, StateValue) for kv in found.kvs]
        return sum(state.leader_epoch >= 0 and len(state.isr) == BROKERS for state in states)

    async def owners(self) -> dict[int, int]:
        """Return the broker that leads, by partition."""
        prefix = f"{self._keys.leases}{TOPIC}/"
        found = await self._client.get_prefix(prefix)
        return {int(kv.key.removeprefix(prefix)): int(kv.value) for kv in found.kvs}

    async def owned(self, *, without: int) -> int:
        """Return the number of partitions that a broker other than `without` leads."""
        return sum(owner != without for owner in (await self.owners()).values())

    async def preferred(self) -> int:
        """Return the number of partitions that their first replica leads."""
        found = await self._client.get(self._keys.topic(TOPIC))
        replicas = decode_value(found.value, TopicValue).replicas if found is not None else []
        return sum(replicas[index][0] == owner for index, owner in (await self.owners()).items())


async def _seconds_until(count: Callable[[], Awaitable[int]], wanted: int, timeout_s: float) -> str:
    """Return the time until `count` reaches `wanted`; after `timeout_s`, the count that was reached."""
    began = time.monotonic()
    while (found := await count()) < wanted:
        if time.monotonic() - began > timeout_s:
            return f"{found:,} of {wanted:,} after {timeout_s:.0f} s"
        await asyncio.sleep(POLL_S)
    return f"{time.monotonic() - began:.1f} s"


async def _known(broker: KafkaConnection, topic: str, since: float) -> float:
    """Wait until a broker knows the topic; return the seconds since then."""
    while True:
        answer = await broker.ask(keys.METADATA, BY_NAME, topics=[{"name": topic}], allow_auto_topic_creation=False)
        if answer.topics[0].error_code != error_codes.UNKNOWN_TOPIC_OR_PARTITION:
            return time.monotonic() - since
        await asyncio.sleep(OTHER_POLL_S)


async def _other_topics(client: EtcdClient, addresses: str, took: list[float]) -> None:
    """Create small topics one after the other; add to `took` how soon each broker knows each."""
    brokers_at = [parse_address(address, "a broker's ready line") for address in addresses.split(",")]
    asked = [await KafkaConnection.open(address, ADMIN_TIMEOUT_S) for address in brokers_at]
    try:
        for number in itertools.count():
            topic, since = f"other-{number}", time.monotonic()
            value = encode_value(TopicValue(topic_id=uuid.uuid4(), replicas=[[1]], configs={}))
            await client.put(Keys(PREFIX).topic(topic), value)
            took += await asyncio.gather(*(_known(broker, topic, since) for broker in asked))
            await asyncio.sleep(OTHER_TOPICS_EVERY_S)
    finally:
        for each in asked:
            await each.close()


async def _measure(started: Brokers, client: EtcdClient, partitions: int, table: Table) -> None:
    observed, pids = _Observed(client), started.pids
    admin = AdminClient({"bootstrap.servers": started.addresses, "log_level": 2})
    began, cpu = time.monotonic(), [cpu_seconds(pid) for pid in pids]
    wanted = NewTopic(TOPIC, partitions, BROKERS)
    await asyncio.to_thread(lambda: admin.create_topics([wanted])[TOPIC].result(ADMIN_TIMEOUT_S))
    table.add_row("CreateTopics answered", f"{time.monotonic() - began:.1f} s")
    known: list[float] = []
    async with asyncio.TaskGroup() as group:
        beside = group.create_task(_other_topics(client, started.addresses, known))
        table.add_row("after that: every ISR full", await _seconds_until(observed.in_sync, partitions, SYNC_TIMEOUT_S))
        beside.cancel()
    soon = f"median {statistics.median(known):.2f} s, longest {max(known):.2f} s" if known else "nothing"
    table.add_row(f"other topics meanwhile: a broker knows of one ({len(known)} seen)", soon)
    spent = [cpu_seconds(pid) - before for pid, before in zip(pids, cpu, strict=True)]
    table.add_row("CPU of each broker until then", ", ".join(f"{each:.1f} s" for each in spent))
    await asyncio.sleep(5.0)
    cpu = [cpu_seconds(pid) for pid in pids]
    await asyncio.sleep(IDLE_S)
    idle = [(cpu_seconds(pid) - before) / IDLE_S for pid, before in zip(pids, cpu, strict=True)]
    table.add_row("idle: of a core, each broker", ", ".join(f"{each:.1%}" for each in idle))
    table.add_row("resident, each broker", ", ".join(f"{resident_bytes(pid) / (1 << 20):.0f} MiB" for pid in pids))
    os.kill(pids[0], signal.SIGKILL)
    elsewhere = await _seconds_until(lambda: observed.owned(without=1), partitions, FAIL_OVER_TIMEOUT_S)
    table.add_row("kill -9 of one: every partition led by another", elsewhere)
    with started.again(1):
        back = await _seconds_until(observed.preferred, partitions, HAND_BACK_TIMEOUT_S)
        table.add_row("started again: every partition led by its first replica", back)


async def _run(console: Console, partitions: int) -> None:
    table = table_of(f"{partitions:,} partitions × {BROKERS} replicas on {BROKERS} brokers", ["what"], ["measured"])
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
