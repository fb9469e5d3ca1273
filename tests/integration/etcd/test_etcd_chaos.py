"""A mirror and a lease table under random faults of three etcd members, one after another.

`KPROXY_CHAOS_MINUTES` is the duration, `KPROXY_CHAOS_SEED` the seed of the faults: `make chaos MINUTES=60 SEED=7`. A
seed gives the same faults in the same order; the progress of etcd and the writers during each depends on the machine.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kproxy.etcd import EtcdClient, EtcdUnavailable, PrefixMirror
from kproxy.ownership.leases import LeaseTable
from kproxy.routing.topology import Topology
from tests.support.etcd.embedded import connected, running
from tests.support.etcd.etcd_chaos import Content, Step, Story, Trouble, steps
from tests.support.etcd.etcd_cluster import running_cluster
from tests.support.etcd.etcd_history import Change, Churn, history
from tests.support.waiting import PATIENCE_S, eventually

MINUTES = float(os.environ.get("KPROXY_CHAOS_MINUTES", "0"))
# With this seed each kind of fault is among the first steps, including the loss of the majority for 7 s.
SEED = int(os.environ.get("KPROXY_CHAOS_SEED", "9358"))
LEAST_STEPS = 7
STALE_WITHIN_S = 5.0
# Every second run requests fragments, which etcd sends above this limit plus half a megabyte.
ARGUMENTS = ("--max-request-bytes", "65536")
LEASES = "/p/partition-leases/"


class Run:
    """A mirror, a table and writers, which reach the cluster through `seen` and the fault's relays.

    `content` is etcd's last healthy state, `truth` the history since.
    """

    def __init__(self, trouble: Trouble, client: EtcdClient, writer: EtcdClient, seen: EtcdClient) -> None:
        self._trouble = trouble
        self._client = client
        self._writer = writer
        self._random = random.Random(SEED)
        self.story = Story()
        self._topology = Topology()
        self.mirror = PrefixMirror(seen, [LEASES], self.story, fragments=SEED % 2 == 0)
        self.table = LeaseTable(seen, "/p", self._topology)
        self._content: Content = {}
        self._truth: list[Change] = []
        self._known_to = 1
        self._marks = 0
        self.changes = 0
        self.slowest_s = 0.0

    async def take(self, step: Step) -> None:
        """Make one fault under churn, and recover fully."""
        churn = Churn(self._writer, f"{LEASES}t/", self._random.randrange(1 << 30))
        async with running(churn.run()) as writing:
            if step.what == "compacted":
                await self._compact_unseen(step, churn)
            else:
                await self._trouble.make(step)
            churn.stop()
            await writing
        over_at = time.monotonic()
        mark = await self._come_to_rest()
        await eventually(lambda: self.story.reached(mark), timeout_s=120, what="the mirror has caught up")
        await eventually(lambda: self._topology.revision >= mark, timeout_s=120, what="the table has caught up")
        await eventually(lambda: not self.table.stale, timeout_s=120, what="the table is not stale")
        self.slowest_s = max(self.slowest_s, time.monotonic() - over_at)
        await self._judge(churn)

    async def _compact_unseen(self, step: Step, churn: Churn) -> None:
        """Compact everything that the mirror has missed before it returns."""
        for relay in self._trouble.relays:
            await relay.shut()
        self._trouble.unreachable_since = time.monotonic()
        await churn.goes_on()
        await asyncio.sleep(step.hold_s)
        await self._trouble.compact(await self._mark())
        self._trouble.unreachable_since = None
        for relay in self._trouble.relays:
            await relay.open()

    async def _come_to_rest(self) -> int:
        """Wait until nothing changes: a stopped member may still carry out abandoned writes."""
        while True:
            mark = await self._mark()
            await asyncio.sleep(0.3)
            if (await self._client.get_snapshot(LEASES)).revision == mark:
                return mark

    async def _mark(self) -> int:
        """Write a key, and record the history up to it."""
        self._marks += 1
        async with asyncio.timeout(PATIENCE_S):
            revision = await self._written(f"{LEASES}mark/0", b"%d" % self._marks)
        self._truth += await history(self._client, LEASES, self._known_to, revision)
        # A writer may have continued.
        self._known_to = self._truth[-1][0]
        return revision

    async def _written(self, key: str, value: bytes) -> int:
        while True:
            try:
                return await self._client.put(key, value)
            except EtcdUnavailable:
                await asyncio.sleep(0.1)

    async def _judge(self, churn: Churn) -> None:
        assert set(churn.acknowledged) <= set(self._truth)
        self._content = self.story.judge(self._content, self._truth)
        wanted = {key.removeprefix(LEASES): int(value) for key, value in self._content.items()}
        rows = {f"{row.topic.decode()}/{row.partition_index}": row.owner for row in self._topology.ownerships()}
        assert rows == wanted
        assert self.table.restores == 0
        self.changes += len(self._truth)
        self._truth = []

    async def watch_staleness(self) -> None:
        """Without a majority the table reports it in time, whatever still answers.

        Stalls of this process do not count: data that arrived before them is read afterwards.
        """
        stood_still_s, looked_at = 0.0, time.monotonic()
        while True:
            since, now = self._trouble.unreachable_since, time.monotonic()
            stood_still_s = stood_still_s + max(0.0, now - looked_at - 0.1) if since is not None else 0.0
            looked_at = now
            if since is not None and now > since + STALE_WITHIN_S + 1 + stood_still_s:
                assert self.table.stale, f"not stale after {now - since:.1f} s without a majority"
            await asyncio.sleep(0.05)


@pytest.mark.long
@pytest.mark.timeout(MINUTES * 60 + 300)
async def test_table_is_right_after_random_etcd_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done: list[Step] = []
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(running_cluster(tmp_path, ARGUMENTS))
        client = await stack.enter_async_context(connected(EtcdClient(cluster.endpoints, timeout_s=20)))
        writer = await stack.enter_async_context(connected(EtcdClient(cluster.endpoints, timeout_s=1)))
        trouble = Trouble(cluster, client, LEASES)
        for relay in trouble.relays:
            await stack.enter_async_context(relay)
        seen = EtcdClient([relay.endpoint for relay in trouble.relays])
        await seen.connect()
        stack.push_async_callback(seen.close)
        run = Run(trouble, client, writer, seen)
        for work in (run.mirror.run(), run.table.run(), run.watch_staleness()):
            await stack.enter_async_context(running(work))
        ends_at = time.monotonic() + MINUTES * 60
        try:
            for step in steps(SEED):
                done.append(step)
                await run.take(step)
                if len(done) >= LEAST_STEPS and time.monotonic() >= ends_at:
                    break
        except BaseException as error:
            error.add_note(f"KPROXY_CHAOS_SEED={SEED}, step {len(done)}: {done[-3:]}")
            raise
    with capsys.disabled():
        print(
            f"\nseed {SEED}: {len(done)} troubles {dict(Counter(step.what for step in done))}, {run.changes} changes, "
            f"{run.story.loads} loads; caught up within {run.slowest_s:.1f} s"
        )
