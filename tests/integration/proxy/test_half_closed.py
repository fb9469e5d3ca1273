"""A client that closes its sending side gets an answer to each request that it has sent, as from Kafka."""

from __future__ import annotations

import asyncio

import pytest

from kproxy_codec import api_keys as keys
from kproxy_codec.api_keys import FETCH
from tests.support.brokers.scripted_upstream import Asked, ScriptedUpstream, answers_everything
from tests.support.clients.raw_client import (
    RawClient,
    batch,
    control_frame,
    fetch_frame,
    list_offsets_frame,
    produce_frame,
)
from tests.support.processes.running_proxy import RunningProxy, both_loops, running_proxy
from tests.support.waiting import eventually

REQUESTS = 20
T0 = ("t", 0)
FRAMES = {
    "Produce": lambda n: produce_frame(records=batch(n), correlation_id=n),
    "plain Produce": lambda n: produce_frame(records=batch(n, producer_id=-1), correlation_id=n),
    "Fetch": lambda n: fetch_frame(correlation_id=n),
    "ListOffsets": lambda n: list_offsets_frame(correlation_id=n),
    "ApiVersions": lambda n: control_frame(keys.API_VERSIONS, 0, correlation_id=n),
    "Metadata": lambda n: control_frame(keys.METADATA, 9, correlation_id=n, topics=[{"name": "t"}]),
}


async def answered(client: RawClient, count: int) -> None:
    """The answers to requests 1 to `count` come, and then the end."""
    for correlation_id in range(1, count + 1):
        assert int.from_bytes((await client.receive())[4:8], "big") == correlation_id
    assert await client.is_closed()


async def gone(proxy: RunningProxy) -> None:
    await eventually(lambda: not proxy.listener._sessions, "the client's connection is let go")
    assert proxy.context.budget.held == 0


@pytest.mark.parametrize("api", FRAMES)
@both_loops
async def test_half_closed_client_gets_all_answers(api: str) -> None:
    upstream = ScriptedUpstream(1, answers_everything)
    # No broker here answers Metadata.
    async with running_proxy(upstream, limits={"control_timeout_s": 0.5}) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(*(FRAMES[api](n) for n in range(1, REQUESTS + 1)))
        client.end_sending()
        await answered(client, REQUESTS)
        await gone(proxy)


@both_loops
async def test_half_closed_client_waits_for_its_brokers() -> None:
    """On proven routes and new ones, and with answers that come long after the end of what is sent."""
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1, partitions=[0, 1])
        client = await proxy.client()
        client.send(produce_frame(records=batch(0), correlation_id=1))
        (await upstream.next()).answer()
        assert (await client.answer()).codes == {T0: 0}
        client.send(produce_frame(records=batch(1), correlation_id=1))
        client.send(produce_frame({"t": [1]}, correlation_id=2), produce_frame({"t": [1]}, correlation_id=3))
        client.end_sending()
        held = [await upstream.next(), await upstream.next()]
        await asyncio.sleep(0.2)
        for asked in held:
            asked.answer()
        (await upstream.next()).answer()
        await answered(client, 3)
        await gone(proxy)


@both_loops
async def test_half_closed_client_gets_all_its_answers() -> None:
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream, limits={"max_open_requests": 2}) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(*(FRAMES["Produce"](n) for n in range(1, REQUESTS + 1)))
        client.end_sending()
        await answered(client, REQUESTS)
        await gone(proxy)


@both_loops
async def test_half_closed_client_is_not_retried_for() -> None:
    """It may be gone, and come again: what waits to be sent again is answered instead."""
    upstream = ScriptedUpstream(1, lambda asked: asked.answer(results={T0: 19}))
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(
            produce_frame(records=batch(0), correlation_id=1), produce_frame(records=batch(1), correlation_id=2)
        )
        await eventually(lambda: upstream.log, "the first attempt")
        await asyncio.sleep(0.01)
        client.end_sending()
        codes = [(await client.answer()).codes[T0] for _ in range(2)]
        assert codes[0] == 19
        assert codes[1] in (6, 19)
        assert await client.is_closed()
        sent = len(upstream.log)
        await asyncio.sleep(0.3)
        assert len(upstream.log) == sent
        await gone(proxy)


@both_loops
async def test_requests_without_answer_are_still_sent() -> None:
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(*(produce_frame(records=batch(n), acks=0) for n in range(REQUESTS)))
        client.end_sending()
        assert await client.is_closed()
        await eventually(lambda: len(upstream.log) == REQUESTS, "all of them")
        await gone(proxy)


@both_loops
async def test_deadline_ends_half_closed_client() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream, limits={"deadline_cap_ms": 1_500, "drain_s": 0.1}) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(correlation_id=1), fetch_frame(correlation_id=2, max_wait_ms=60_000))
        client.end_sending()
        assert (await client.answer()).codes == {T0: 7}
        assert await client.is_closed()
        await gone(proxy)


@both_loops
async def test_half_closed_client_that_never_reads_ends() -> None:
    records = bytes(16 << 20)

    def script(asked: Asked) -> None:
        asked.answer(results={T0: {"records": records}} if asked.header.api_key == FETCH else {})

    upstream = ScriptedUpstream(1, script)
    async with running_proxy(upstream, limits={"deadline_cap_ms": 1_000}) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.pause_reading()
        client.send(fetch_frame(max_bytes=1 << 24))
        client.end_sending()
        await eventually(lambda: upstream.log, "the fetch")
        await gone(proxy)


@both_loops
async def test_client_within_frame_is_answered_before() -> None:
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(correlation_id=1), produce_frame(correlation_id=2)[:30])
        client.end_sending()
        await answered(client, 1)
        await gone(proxy)
        assert len(upstream.log) == 1
