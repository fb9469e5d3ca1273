"""Ownership under whatever befalls it: random histories of claims, writes and deaths, checked for linearizability.

`KPROXY_OWN_HISTORIES` is how many, `KPROXY_OWN_SEED` what they are: `make own-histories HISTORIES=500 SEED=1`. A seed
gives the same clients and the same troubles; how far they come in the midst of each other is up to the machine.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.ownership.etcd import EtcdClient
from tests.support.own_histories import History, close_all, group_of, run_histories, topic_of
from tests.support.own_site import OwnSite, own_site
from tests.support.own_troubles import Trouble, Troublemaker, troubles

HISTORIES = int(os.environ.get("KPROXY_OWN_HISTORIES", "50"))
SEED = int(os.environ.get("KPROXY_OWN_SEED", "1"))
AT_A_TIME = 25


@asynccontextmanager
async def site_for(
    etcd: str, client: EtcdClient, prefix: str, directory: Path, count: int, *, is_bound: bool = True
) -> AsyncIterator[OwnSite]:
    """A site with writer groups for so many histories."""
    groups = {topic_of(number): group_of(number) for number in range(count)}
    async with own_site(etcd, client, prefix, directory, groups, is_bound=is_bound) as site:
        yield site


async def run_batch(site: OwnSite, histories: list[History], befalling: list[Trouble]) -> Counter[str]:
    """Histories and troubles side by side, until all is well again, and judged: what there was of everything."""
    maker = Troublemaker(site)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run_histories(histories))
            for trouble in befalling:
                tasks.create_task(maker.make(trouble))
        await site.heal()
        await asyncio.gather(*(each.settle() for each in histories))
        counts = [await each.judge(maker.faults) for each in histories]
    finally:
        await close_all(histories)
    return sum(counts, Counter[str]())


@pytest.mark.timeout(HISTORIES + 300)
async def test_nobody_writes_but_the_owner(
    etcd: EmbeddedEtcd, etcd_client: EtcdClient, etcd_prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts: Counter[str] = Counter()
    began = time.monotonic()
    async with site_for(etcd.endpoint, etcd_client, etcd_prefix, tmp_path, HISTORIES) as site:
        for first, befalling in zip(range(0, HISTORIES, AT_A_TIME), troubles(SEED), strict=False):
            batch = [History(site, number, SEED) for number in range(first, min(first + AT_A_TIME, HISTORIES))]
            batch_began = time.monotonic()
            try:
                counts += await run_batch(site, batch, befalling)
            except BaseException as error:
                error.add_note(f"seed {SEED}, histories from {first} on: {'; '.join(map(str, befalling))}")
                raise
            with capsys.disabled():
                took = time.monotonic() - batch_began
                print(f"\n{first + len(batch)} histories; {'; '.join(map(str, befalling))}; {took:.1f} s", end="")
    with capsys.disabled():
        print(f"\nseed {SEED}: {HISTORIES} histories in {time.monotonic() - began:.0f} s, {dict(counts)}")
