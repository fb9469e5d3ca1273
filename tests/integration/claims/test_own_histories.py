"""Ownership under random faults: random histories of claims, writes and deaths, checked for linearizability.

`KPROXY_OWN_HISTORIES` sets their number, `KPROXY_OWN_SEED` their seed: `make own-histories HISTORIES=500 SEED=1`. A
seed gives the same clients and faults; their interleaving depends on the machine.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from itertools import pairwise
from math import isinf
from random import Random

import pytest
import pytest_asyncio

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient
from kproxy_codec.error_codes import NONE, REQUEST_TIMED_OUT
from tests.support.claims.own_histories import GOES_ON_S, History, Member, close_all, group_of, run_histories, topic_of
from tests.support.claims.own_model import OwnModel, operations, places
from tests.support.claims.own_site import UNBOUND, OwnSite, own_site, with_proxies
from tests.support.claims.own_troubles import Trouble, Troublemaker, troubles
from tests.support.etcd.embedded import connected
from tests.support.models.linearizability import check
from tests.support.rules import examples
from tests.support.waiting import eventually

HISTORIES = int(os.environ.get("KPROXY_OWN_HISTORIES", examples(60)))
SEED = int(os.environ.get("KPROXY_OWN_SEED", "1"))
AT_A_TIME = 40
# Numbers below 0: histories that are printed in full.
TOLD = 3


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OwnSite]:
    """One site for all histories; each has its own topic and writer group."""
    groups = {topic_of(number): group_of(number) for number in range(-TOLD, HISTORIES)}
    async with connected(EtcdClient([etcd.endpoint])) as client:
        prefix, directory = f"/histories-{os.getpid()}", tmp_path_factory.mktemp("histories")
        async with own_site(etcd.endpoint, client, prefix, directory, groups) as site:
            yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unbound(site: OwnSite) -> AsyncIterator[OwnSite]:
    """The same brokers, behind proxies that bind no fences."""
    async with with_proxies(site, UNBOUND) as unbound:
        yield unbound


async def run_batch(site: OwnSite, histories: list[History], befalling: list[Trouble]) -> Counter[str]:
    """Run histories and faults concurrently until all is healthy; then judge them. Return the totals."""
    maker = Troublemaker(site)
    times = [time.monotonic()]
    try:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(run_histories(histories))
            making = [(each, tasks.create_task(maker.make(each))) for each in befalling]
            await running
            for trouble, task in making:
                if isinf(trouble.hold_s):
                    task.cancel()
        times.append(time.monotonic())
        await site.heal()
        await asyncio.gather(*(each.settle() for each in histories))
        site.release()
        await site.all_arrived()
        times.append(time.monotonic())
        for place, proxy in enumerate(site.proxies):
            if proxy.has_lost_claims():
                maker.faults.setdefault(place, times[0])
        counts = sum(await asyncio.gather(*(each.judge(maker.faults) for each in histories)), Counter[str]())
    except BaseException as error:
        error.add_note(f"seed {SEED}, histories from {histories[0].number} on: {'; '.join(map(str, befalling))}")
        raise
    finally:
        await close_all(histories)
    times.append(time.monotonic())
    took = "+".join(f"{after - before:.1f}" for before, after in pairwise(times))
    print(f"histories from {histories[0].number} on, {took} s: {'; '.join(map(str, befalling))}")
    return counts


@pytest.mark.timeout(HISTORIES + 300)
async def test_only_the_owner_writes(site: OwnSite, capsys: pytest.CaptureFixture[str]) -> None:
    counts: Counter[str] = Counter()
    began = time.monotonic()
    for first, befalling in zip(range(0, HISTORIES, AT_A_TIME), troubles(SEED), strict=False):
        batch = [History(site, number, SEED) for number in range(first, min(first + AT_A_TIME, HISTORIES))]
        with capsys.disabled():
            counts += await run_batch(site, batch, befalling)
    with capsys.disabled():
        print(f"seed {SEED}: {HISTORIES} histories in {time.monotonic() - began:.0f} s, {dict(counts)}")


async def test_write_of_replaced_writer_in_flight_is_dropped(site: OwnSite) -> None:
    history = History(site, -1, SEED)
    async with history:
        await replaced_in_mid_write(site, history)
        history.judge_partition(0, await site.log(history.topic, 0, at_least=2), {})


async def test_owner_with_cut_connection_writes_over_another(site: OwnSite) -> None:
    """A binding belongs to one connection: the next one binds before it writes."""
    history = History(site, -3, SEED)
    async with history:
        owner = Member(history, "owner", Random(0))
        connection = await owner.insists(0)
        for _ in range(3):
            while (codes := await owner.send(connection, 0)) != [NONE]:
                # The write in flight when it was cut; the owner is never refused.
                assert codes == [REQUEST_TIMED_OUT]
            await asyncio.gather(*(broker.way.cut() for broker in site.brokers.values()))
        history.judge_partition(0, await site.log(history.topic, 0, at_least=3), {})


async def test_missing_fence_lets_late_write_through_visibly(unbound: OwnSite) -> None:
    """Severing is not fencing: an earlier write is still in flight, and is appended after the next owner's."""
    history = History(unbound, -2, SEED)
    async with history:
        await replaced_in_mid_write(unbound, history)
        log = await unbound.log(history.topic, 0, at_least=3)
        with pytest.raises(AssertionError, match="stands behind"):
            history.judge_partition(0, log, {})
        assert check(operations(history.recorded(0, {}), places(log)), OwnModel()) is not None


async def replaced_in_mid_write(site: OwnSite, history: History) -> None:
    """A write is in flight while its writer is replaced, and reaches the broker after the next writer's."""
    old, new = (Member(history, name, Random(0)) for name in ("old", "new"))
    ways = [each.way for each in site.brokers.values()]
    await old.connect(proxy=0)
    first = await old.insists(0)
    ports = await asyncio.to_thread(site.proxies[first.proxy].upstream_ports)
    assert sum(way.hold(ports.__contains__) for way in ways) > 0
    late = asyncio.create_task(old.send(first, 0))
    await eventually(lambda: any(way.held() for way in ways), what="the write is under way")
    await new.connect(proxy=1)
    await new.insists(0)
    assert await first.client.wait_closed(GOES_ON_S), "who lost it is not severed"
    assert await late == [None]
    assert any(way.left_behind() for way in ways)
    site.release()
    await site.all_arrived()
