"""Replicated brokers under several random faults at a time, with every kind of client.

`KPROXY_STORM_MINUTES` is the duration, `KPROXY_STORM_SEED` the seed of the faults: `make storm MINUTES=60 SEED=7`. A
seed gives the same faults in the same order; the progress of clients and brokers during each depends on the machine.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support.brokers.faulty_site import FaultySite, faulty_site
from tests.support.brokers.replication_storm import BROKERS, Reader, Step, Trouble, steps
from tests.support.clients.attempts import Writer, judge, stored
from tests.support.clients.idempotent_writers import IdempotentWriter
from tests.support.etcd.etcd_cluster import running_cluster
from tests.support.processes.dev import serving
from tests.support.processes.served import port_of

MINUTES = float(os.environ.get("KPROXY_STORM_MINUTES", "0"))
SEED = int(os.environ.get("KPROXY_STORM_SEED", "1"))
LEAST_STEPS = 4
TTL_S = 2
PARTITIONS = 2
PLAIN, TOTAL = "plain", "idempotent"
PATIENCE_S = 90


class Storm:
    """The clients of one run, and the checks at its end."""

    def __init__(self, site: FaultySite, proxy_port: int) -> None:
        self.site = site
        proxy = ("127.0.0.1", proxy_port)
        self.idempotent = [
            IdempotentWriter(
                bootstrap, f"{TOTAL}-{way}", PARTITIONS, per_second=200, log=site.directory / f"librdkafka-{way}"
            )
            for way, bootstrap in (("proxied", f"{proxy[0]}:{proxy[1]}"), ("direct", site.bootstrap))
        ]
        self.direct = self.idempotent[-1]
        self.writers = [
            Writer(
                PLAIN, site.addresses, partition=partition, acks=acks, pause_s=0.03, name=f"direct{acks}-{partition}"
            )
            for partition in range(PARTITIONS)
            for acks in (-1, 1, 0)
        ]
        self.writers += [
            Writer(PLAIN, lambda: [proxy], acks=acks, pause_s=0.03, name=f"proxied{acks}") for acks in (-1, 1)
        ]
        self.readers = [Reader(PLAIN, partition, site.addresses) for partition in range(PARTITIONS)]
        self.readers.append(Reader(f"{TOTAL}-proxied", 0, lambda: [proxy]))

    @property
    def topics(self) -> list[str]:
        return [PLAIN, *(writer.topic for writer in self.idempotent)]

    async def all_in_sync(self) -> None:
        for topic in self.topics:
            for partition in range(PARTITIONS):
                await self.site.in_sync(topic, partition, BROKERS, PATIENCE_S)

    async def goes_on(self) -> None:
        """Wait until every persistent client is acknowledged again."""
        since = time.monotonic()
        for writer in self.idempotent:
            await asyncio.to_thread(writer.wait_for_more, 20, PATIENCE_S)
        for plain in self.writers:
            if plain.acks:
                await asyncio.to_thread(plain.next_ack, since, PATIENCE_S)

    async def judge(self) -> Counter[str]:
        """After all clients have stopped: check that all replicas are equal and match the clients' acknowledgements."""
        await self.all_in_sync()
        counts: Counter[str] = Counter()
        for partition in range(PARTITIONS):
            log = await self.site.same_logs(PLAIN, partition, BROKERS)
            for plain in self.writers:
                if plain.partition == partition:
                    judge(log, plain.attempts, may_lose=plain.acks == 1)
                    counts[f"acks={plain.acks} acknowledged"] += len(plain.acked)
                    counts[f"acks={plain.acks} lost"] += len({each.value for each in plain.acked} - {v for _, v in log})
            for reader in self.readers:
                if (reader.topic, reader.partition) == (PLAIN, partition):
                    reader.judge(log)
            for idempotent in self.idempotent:
                whole = await self.site.same_log_bytes(idempotent.topic, partition, BROKERS)
                repeated = idempotent.judge(partition, whole, may_repeat=idempotent is self.direct)
                log = stored(whole)
                counts["idempotent acknowledged"] += len(idempotent.acked[partition])
                counts["direct, written again in a new epoch"] += repeated
                for reader in self.readers:
                    if (reader.topic, reader.partition) == (idempotent.topic, partition):
                        reader.judge(log)
        counts["read"] = sum(len(reader.seen) for reader in self.readers)
        return counts


@pytest.mark.long
@pytest.mark.timeout(MINUTES * 60 + 300)
async def test_broker_promises_hold_under_random_faults(
    etcd_prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[Step] = []
    async with AsyncExitStack() as stack:
        etcd = await stack.enter_async_context(running_cluster(tmp_path / "etcd"))
        site = await stack.enter_async_context(faulty_site(etcd, etcd_prefix, tmp_path))
        await site.add(BROKERS, lease_ttl_s=TTL_S, isr_lag_s=1.0)
        arguments = ["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--prefix", etcd_prefix]
        proxy = stack.enter_context(serving([*arguments, "--etcd", ",".join(etcd.endpoints)], tmp_path / "proxy"))
        storm = Storm(site, port_of(proxy))
        for number, topic in enumerate(storm.topics):
            first = [BROKERS[(number + shift) % 3 :] + BROKERS[: (number + shift) % 3] for shift in range(PARTITIONS)]
            await site.put_topic(topic, [list(each) for each in first])
        await storm.all_in_sync()
        trouble = Trouble(site, storm.topics, PARTITIONS)
        stack.push_async_callback(trouble.close)
        began = time.monotonic()
        with_clients = AsyncExitStack()
        async with with_clients:
            for client in (*storm.idempotent, *storm.writers, *storm.readers):
                await with_clients.enter_async_context(client)
            await storm.goes_on()
            for step in steps(SEED):
                if step.settled:
                    await storm.all_in_sync()
                done.append(step)
                try:
                    await trouble.make(step)
                    if step.healed:
                        await storm.goes_on()
                except BaseException as error:
                    error.add_note(
                        f"seed {SEED}, step {len(done)}: {step}; before it: {'; '.join(map(str, done[-6:-1]))}"
                    )
                    raise
                if len(done) >= LEAST_STEPS and time.monotonic() - began > MINUTES * 60:
                    break
            await trouble.heal()
            await storm.goes_on()
        try:
            counts = await storm.judge()
        except BaseException as error:
            error.add_note(f"seed {SEED}, steps: {'; '.join(map(str, done))}")
            raise
        with capsys.disabled():
            print(f"\nseed {SEED}: {len(done)} steps in {time.monotonic() - began:.0f} s, ", end="")
            print(f"{trouble.wipes} disks wiped, {dict(counts)}")
