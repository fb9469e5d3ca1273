"""All faults at once, at random: several producers of each kind before brokers with all possible behaviours.

`KPROXY_SEEDS` is the number of seeds and `KPROXY_FIRST_SEED` the first. A seed decides the actions; the event loop and
the machine decide their timing, so a seed that fails once may need several runs.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from random import Random

import pytest
import uvloop

from kproxy.routing import fanout
from kproxy.routing.retry import KAFKA, LEASED
from tests.support.brokers.scripted_upstream import Partition
from tests.support.models.model_cluster import ModelCluster
from tests.support.models.model_producers import Idempotent, Plain, Producer, Silent, Violation
from tests.support.processes.at_rest import what_is_left
from tests.support.processes.running_proxy import RunningProxy, run_on, running_proxy
from tests.support.waiting import eventually

FIRST_SEED = int(os.environ.get("KPROXY_FIRST_SEED", "0"))
SEEDS = int(os.environ.get("KPROXY_SEEDS", "6"))
REQUESTS = 150
# Then all faults end, and every batch can be acknowledged.
TROUBLE_S = 2.0
PATIENCE_S = 120.0


def some_producers(random: Random, partitions: list[Partition], proxy: RunningProxy) -> list[Producer]:
    kinds: list[type[Producer]] = [Idempotent, Plain, Silent]
    kinds += random.choices([Idempotent, Plain, Plain, Silent], k=random.randint(0, 3))
    return [
        kind(name, partitions, Random(random.random()), proxy.client, count=REQUESTS)
        for name, kind in enumerate(kinds, start=1)
    ]


def still_open(cluster: ModelCluster) -> list[str]:
    return [
        f"{broker.node_id}/{number}, {len(connection.got)} bytes came"
        for broker in cluster.brokers
        for number, connection in enumerate(broker.connections)
        if connection.is_open
    ]


def explain(error: BaseException, producers: list[Producer], cluster: ModelCluster, proxy: RunningProxy) -> None:
    """Add the known facts about these batches."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            if isinstance(each, Violation) and each.partition is not None:
                each.add_note(cluster.history_of(each.producer.name, each.partition))
    if isinstance(error, TimeoutError):
        for producer in producers:
            for partition in producer.open_partitions():
                error.add_note(f"{producer} is not done with {partition}: {producer.tail(partition)}")
                error.add_note(cluster.history_of(producer.name, partition))
        error.add_note(f"not at rest: {what_is_left(proxy)}; owners: {cluster.owners}")


async def produce_in_trouble(seed: int) -> None:
    random = Random(seed)
    partitions = [(topic, index) for topic in ("t", "u") for index in range(3)][: random.randint(1, 6)]
    semantics = random.choice((LEASED, KAFKA))
    cluster = ModelCluster(partitions, seed, semantics=semantics, trouble=random.choice((0.0, 0.02, 0.1, 0.3)))
    async with running_proxy(*cluster.brokers) as proxy:
        proxy.context.semantics = semantics
        for (topic, index), owner in cluster.owners.items():
            proxy.own(owner, topic, [index])
        producers = some_producers(random, partitions, proxy)
        trouble = asyncio.create_task(cluster.make_trouble(proxy))
        try:
            async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as running:
                for producer in producers:
                    running.create_task(producer.run())
                await asyncio.wait((trouble,), timeout=TROUBLE_S)
                trouble.cancel()
                await asyncio.gather(trouble, return_exceptions=True)
                await cluster.heal(proxy)
        except BaseException as error:
            explain(error, producers, cluster, proxy)
            raise
        finally:
            trouble.cancel()
            await asyncio.gather(trouble, return_exceptions=True)
        try:
            await eventually(lambda: not what_is_left(proxy))
        except AssertionError:
            raise AssertionError(f"not at rest: {what_is_left(proxy)}") from None
        if os.environ.get("KPROXY_TELL"):
            codes = Counter(code for producer in producers for batch in producer.batches for code in batch.codes)
            print(f"seed {seed}: {dict(cluster.happened)} answers {dict(codes)} proxy {dict(proxy.counters)}")
        found = [each for producer in producers for each in producer.judge(cluster.logs)]
        found += [
            cluster.history_of(producer.name, partition, 4000)
            for producer in producers
            for partition in producer.suspects
        ]
        assert not found, "\n".join(found)
        known = {batch.records for producer in producers for batch in producer.batches}
        assert all(records in known for log in cluster.logs.values() for records in log), "bytes were changed"
        for producer in producers:
            assert await producer.unasked() == b"", f"{producer} got an answer too many"
            if producer.client is not None:
                producer.client.close()
        await eventually(lambda: not proxy.listener._sessions, "no client connection left")
        try:
            await eventually(lambda: not still_open(cluster))
        except AssertionError:
            raise AssertionError(f"broker connections left: {still_open(cluster)}") from None


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + SEEDS))
def test_random_faults_lose_duplicate_or_reorder_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanout, "HUNG_AFTER_S", 0.5)
    try:
        run_on(asyncio.SelectorEventLoop if seed % 3 == 0 else uvloop.new_event_loop, produce_in_trouble(seed))
    except BaseException as error:
        error.add_note(f"seed {seed}: KPROXY_FIRST_SEED={seed} KPROXY_SEEDS=1")
        raise
