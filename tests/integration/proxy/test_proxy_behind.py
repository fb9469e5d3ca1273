"""Batches behind an unresolved one, when later requests take the plain path.

What the core decides about it is in the scripts tests/unit/routing/test_fanout_lanes.py and test_fanout_retries.py.
"""

from __future__ import annotations

from tests.support.brokers.scripted_upstream import ScriptedUpstream
from tests.support.clients.raw_client import RawClient, batch, produce_frame
from tests.support.processes.running_proxy import both_loops, running_proxy

NOT_LEADER = 6
TIMED_OUT = 7
OUT_OF_ORDER = 45
STORAGE_ERROR = 56
T0 = ("t", 0)
SHORT_MS = 1000


async def prove(client: RawClient, upstream: ScriptedUpstream, producer_id: int) -> None:
    """Have one batch accepted, so that what follows is pipelined."""
    client.send(produce_frame(records=batch(producer_id=producer_id)))
    (await upstream.next()).answer()
    await client.answer()


@both_loops
async def test_out_of_order_behind_resent_batch_is_hidden() -> None:
    """librdkafka would begin a new epoch, and send again in it what is in doubt in its other partitions."""
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, upstream, 7)
        client.send(*(produce_frame(records=batch(n), correlation_id=n) for n in (1, 2)))
        first, second = await upstream.next(), await upstream.next()
        first.answer(results={T0: STORAGE_ERROR})
        assert (await client.answer()).codes == {T0: STORAGE_ERROR}
        # Its client has not read that yet. What it sends now waits for the batch that is still at the broker.
        client.send(produce_frame(records=batch(3), correlation_id=3))
        assert await upstream.is_silent()
        second.answer(results={T0: OUT_OF_ORDER})
        assert (await client.answer()).codes == {T0: NOT_LEADER}
        (await upstream.next()).answer(results={T0: OUT_OF_ORDER})
        assert (await client.answer()).codes == {T0: NOT_LEADER}
        # Once it has come again, what is still out of order is so by itself.
        client.send(*(produce_frame(records=batch(n), correlation_id=n) for n in (1, 3)))
        for result in (0, OUT_OF_ORDER):
            (await upstream.next()).answer(results={T0: result})
            assert (await client.answer()).codes == {T0: result}
        assert await upstream.is_silent()


@both_loops
async def test_plain_request_behind_expired_batch_is_not_resent() -> None:
    """The first waited for its route to be proven, the second did not; nobody answers, and the connection is lost."""
    now = [100.0]
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream, clock=lambda: now[0]) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(*(produce_frame(records=batch(n), correlation_id=n, timeout_ms=SHORT_MS) for n in (0, 1)))
        (await upstream.next()).answer()
        await client.answer()
        asked = await upstream.next()
        client.send(produce_frame(records=batch(2), correlation_id=2, timeout_ms=30 * SHORT_MS))
        await upstream.next()
        now[0] += 1.5
        assert (await client.answer()).codes == {T0: TIMED_OUT}
        asked.connection.abort()
        assert (await client.answer()).codes == {T0: TIMED_OUT}
        assert await upstream.is_silent(0.3)
