"""Numbers from one key in etcd: no number is assigned twice, whatever the outcome of a swap."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kproxy.etcd import EtcdClient, EtcdError, EtcdUnavailable, IdBlocks, TxnCompare, TxnOp, TxnResult
from kproxy.etcd.id_blocks import BLOCK
from tests.support.etcd.embedded import Relay, connected


class Meddled(EtcdClient):
    """A client whose transactions have the outcomes that the test chooses."""

    fails = 0
    applies = False

    async def txn(
        self, compares: Sequence[TxnCompare], success: Sequence[TxnOp], failure: Sequence[TxnOp] = ()
    ) -> TxnResult:
        if self.fails == 0:
            return await super().txn(compares, success, failure)
        self.fails -= 1
        if self.applies:
            await super().txn(compares, success, failure)
        raise EtcdUnavailable("the answer was lost", maybe_applied=True)


@pytest.fixture
def key(etcd_prefix: str) -> str:
    return f"{etcd_prefix}/producer-ids"


async def test_concurrent_takers_get_different_numbers(etcd_client: EtcdClient, key: str) -> None:
    takers = [IdBlocks(etcd_client, key) for _ in range(4)]
    taken = await asyncio.gather(*(taker.allocate() for taker in takers for _ in range(BLOCK + 5)))
    assert len(set(taken)) == len(taken) == 4 * (BLOCK + 5)
    for n in range(4):
        mine = taken[n * (BLOCK + 5) : (n + 1) * (BLOCK + 5)]
        assert mine == sorted(mine), "they only grow"
    found = await etcd_client.get(key)
    # Byte for byte the reference brokers' format: the first unassigned number.
    assert found is not None
    assert found.value == b"8000"


@pytest.mark.parametrize("applies", [True, False])
async def test_uncertain_block_is_left_unused(etcd_client: EtcdClient, key: str, applies: bool) -> None:
    async with connected(Meddled(etcd_client.endpoints.split(","))) as client:
        blocks, other = IdBlocks(client, key), IdBlocks(etcd_client, key)
        client.fails, client.applies = 1, applies
        with pytest.raises(EtcdUnavailable):
            await blocks.allocate()
        # If the swap succeeded, no process gets its block.
        assert [await other.allocate(), await blocks.allocate()] == [BLOCK * applies, BLOCK * (applies + 1)]


async def test_waiters_fail_with_the_failed_attempt(etcd_client: EtcdClient, key: str) -> None:
    async with Relay(etcd_client.endpoints) as relay, connected(EtcdClient([relay.endpoint], timeout_s=3.0)) as client:
        await relay.shut()
        blocks = IdBlocks(client, key)
        started = asyncio.get_running_loop().time()
        outcomes = await asyncio.gather(*(blocks.allocate() for _ in range(100)), return_exceptions=True)
        assert all(isinstance(outcome, EtcdError) for outcome in outcomes)
        assert asyncio.get_running_loop().time() - started < 60, "a hundred attempts of three seconds each"
        await relay.open()
        assert await blocks.allocate() == 0


async def test_cancelled_waiter_does_not_block_others(etcd_client: EtcdClient, key: str) -> None:
    async with Relay(etcd_client.endpoints) as relay, connected(EtcdClient([relay.endpoint], timeout_s=60.0)) as client:
        blocks = IdBlocks(client, key)
        relay.freeze()
        waiting = [asyncio.create_task(blocks.allocate()) for _ in range(2)]
        await asyncio.sleep(0.05)
        waiting[0].cancel()
        # The silent connection is replaced by a working one.
        await relay.cut()
        assert await asyncio.wait_for(waiting[1], 60) % BLOCK == 0


@pytest.mark.parametrize("value", [b"", b"x", b"-1", b" 1", b"1.0", b"9" * 19, b"1" * 4000, b"\xff"])
async def test_key_without_a_number_gives_none(etcd_client: EtcdClient, key: str, value: bytes) -> None:
    await etcd_client.put(key, value)
    with pytest.raises(EtcdError, match="holds no number"):
        await IdBlocks(etcd_client, key).allocate()
    found = await etcd_client.get(key)
    assert found is not None
    assert found.value == value


async def test_decreased_key_repeats_no_number(etcd_client: EtcdClient, key: str) -> None:
    blocks = IdBlocks(etcd_client, key)
    await etcd_client.put(key, b"5000")
    taken = [await blocks.allocate() for _ in range(BLOCK)]
    await etcd_client.put(key, b"3000")
    assert await blocks.allocate() == taken[-1] + 1
