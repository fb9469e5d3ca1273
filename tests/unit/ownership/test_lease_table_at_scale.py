"""The cost of loading very many leases: little memory besides the table, and no long turn of the event loop."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest

from kproxy.etcd import EtcdClient, Snapshot
from kproxy.etcd.messages import KeyValue, Pages, key_value, rpc
from kproxy.ownership.directory import PORTION_ENTRIES
from kproxy.ownership.leases import LeaseTable
from kproxy.routing.topology import NO_OWNER, Topology

TOPICS, PARTITIONS, PAGE = 20, 1_000, 3_000
ROWS = TOPICS * PARTITIONS


def page(numbers: range) -> object:
    return rpc.RangeResponse(
        kvs=[
            {
                "key": f"/p/partition-leases/topic-{number // PARTITIONS}/{number % PARTITIONS}".encode(),
                "value": b"%d" % (number % 3),
                "mod_revision": number + 1,
            }
            for number in numbers
        ]
    )


def pages(count: int) -> Pages:
    found = Pages()
    for start in range(0, count, PAGE):
        found.add(page(range(start, min(start + PAGE, count))))
    return found


def table() -> tuple[LeaseTable, Topology]:
    topology = Topology()
    return LeaseTable(EtcdClient(["127.0.0.1"]), "/p", topology), topology


def test_pages_repeat_the_etcd_order_on_each_walk() -> None:
    kvs = pages(2 * PAGE + 1)
    assert len(kvs) == 2 * PAGE + 1
    first = key_value(page(range(1)).kvs[0])  # type: ignore[attr-defined]
    assert first == KeyValue("/p/partition-leases/topic-0/0", b"0", 0, 1, 0, 0)
    for _ in range(2):
        assert [kv.mod_revision for kv in kvs] == list(range(1, 2 * PAGE + 2))
    assert (kvs[0], kvs[PAGE].mod_revision, kvs[-1].mod_revision) == (first, PAGE + 1, 2 * PAGE + 1)
    assert not Pages()


def test_load_uses_little_memory_beyond_the_table() -> None:
    leases, topology = table()
    kvs = pages(ROWS)
    # The first load makes all objects whose number does not depend on the size; they are not measured.
    asyncio.run(leases.on_snapshot(Snapshot(PARTITIONS, 1, pages(PARTITIONS))))
    tracemalloc.start()
    try:
        asyncio.run(leases.on_snapshot(Snapshot(ROWS, 1, kvs)))
        kept, peak = (each / ROWS for each in tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
    assert topology.owned_count == ROWS
    # Each row needs twenty-four bytes in growing arrays, and one more byte during a load.
    assert kept < 28, kept
    assert peak < 40, peak


@pytest.mark.parametrize("empties", [False, True], ids=["fills", "empties"])
def test_large_load_lets_other_tasks_run(empties: bool) -> None:
    leases, topology = table()
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def load() -> None:
        if empties:
            await leases.on_snapshot(Snapshot(ROWS, 1, pages(ROWS)))
        counting = asyncio.create_task(count_turns())
        await asyncio.sleep(0)
        before = turns
        revision, kvs = (ROWS + 1, pages(1)) if empties else (ROWS, pages(ROWS))
        await leases.on_snapshot(Snapshot(revision, 1, kvs))
        # One pass over the received entries, and one over the existing ones.
        assert turns - before >= ROWS // PORTION_ENTRIES * (1 if empties else 2) - 1
        counting.cancel()

    asyncio.run(load())
    assert topology.owned_count == (1 if empties else ROWS)
    assert topology.owner(b"topic-1", 0) == (NO_OWNER if empties else PARTITIONS % 3)
