"""A connection without requests is closed after `limits.idle_s`; one that waits or works is not."""

from __future__ import annotations

import asyncio

from kproxy.proxy.client_session import ClientSession
from tests.support.brokers.scripted_upstream import ScriptedUpstream
from tests.support.clients.raw_client import batch, produce_frame
from tests.support.processes.running_proxy import both_loops, running_proxy
from tests.support.waiting import eventually

IDLE_S = 0.4


@both_loops
async def test_idle_connection_is_closed() -> None:
    async with running_proxy(limits={"idle_s": IDLE_S}) as proxy:
        began = asyncio.get_running_loop().time()
        client = await proxy.client()
        assert await client.is_closed()
        assert asyncio.get_running_loop().time() - began >= IDLE_S
        await eventually(lambda: proxy.counters["clients.idle"] == 1)


@both_loops
async def test_session_without_its_connection_is_not_idle() -> None:
    """A session is looked at from its creation on; the loop hands over the connection in a later turn."""
    async with running_proxy() as proxy:
        session = ClientSession(proxy.context, lambda session: None)
        session.expire(proxy.context.clock())
        assert not session.closed
        await session.close()


@both_loops
async def test_zero_lets_connections_idle_for_ever() -> None:
    async with running_proxy(limits={"idle_s": 0.0}) as proxy:
        assert await (await proxy.client()).is_silent(3 * IDLE_S)


@both_loops
async def test_connection_that_waits_is_not_idle() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream, limits={"idle_s": IDLE_S}) as proxy:
        proxy.own(1)
        waits, arrives, idle = [await proxy.client() for _ in range(3)]
        waits.send(produce_frame(records=batch(0)))
        asked = await upstream.next()
        # A request that arrives slowly is judged by its pace.
        arrives.send(produce_frame(records=batch(0))[:20])
        assert await idle.is_closed()
        assert await waits.is_silent(2 * IDLE_S)
        asked.answer()
        assert (await waits.answer()).codes == {("t", 0): 0}
        assert not arrives.is_gone
        assert await waits.is_closed()
        assert proxy.counters["clients.idle"] == 2
