"""A client that closes its sending side gets an answer to each of its requests, as from Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kproxy_codec import api_keys as keys
from tests.support.brokers.scripted_upstream import Asked
from tests.support.clients.raw_client import batch, control_frame, fetch_frame, list_offsets_frame, produce_frame
from tests.support.processes.running_proxy import both_loops
from tests.support.scene import ANSWERS, HOLDS, T0, Scene, scene, staged
from tests.support.waiting import eventually

REQUESTS = 20
FRAMES: dict[str, Callable[[int], bytes]] = {
    "Produce": lambda n: produce_frame(records=batch(n), correlation_id=n),
    "plain Produce": lambda n: produce_frame(records=batch(n, producer_id=-1), correlation_id=n),
    "Fetch": lambda n: fetch_frame(correlation_id=n),
    "ListOffsets": lambda n: list_offsets_frame(correlation_id=n),
    "ApiVersions": lambda n: control_frame(keys.API_VERSIONS, 0, correlation_id=n),
    # No broker here answers this.
    "Metadata": lambda n: control_frame(keys.METADATA, 9, correlation_id=n, topics=[{"name": "t"}]),
}


async def gone(s: Scene) -> None:
    await s.until_sessions()
    assert s.proxy.context.budget.held == 0


async def answered(s: Scene, count: int) -> None:
    """Check that the answers to requests 1 to `count` come, followed by the end."""
    for correlation_id in range(1, count + 1):
        assert int.from_bytes((await s.client.receive())[4:8], "big") == correlation_id
    assert await s.client.is_closed()
    await gone(s)


@pytest.mark.parametrize(("api", "more"), [*((api, {}) for api in FRAMES), ("Produce", {"max_open_requests": 2})])
@both_loops
async def test_half_closed_client_gets_all_answers(api: str, more: dict[str, int]) -> None:
    async with staged(ANSWERS, limits={"control_timeout_s": 0.5, **more}) as s:
        s.send(*(FRAMES[api](n) for n in range(1, REQUESTS + 1)))
        s.client.end_sending()
        await answered(s, REQUESTS)


@scene(HOLDS, owners=[1, 1])
async def test_half_closed_client_waits_for_its_brokers(s: Scene) -> None:
    """On proven and new routes, with answers that come long after the end of the data."""
    await s.prove()
    s.produces(1)
    s.produces(2, 3, partitions={"t": [1]})
    s.client.end_sending()
    held = [await s.next(), await s.next()]
    await asyncio.sleep(0.2)
    for asked in held:
        asked.answer()
    (await s.next()).answer()
    await answered(s, 3)


@scene(lambda asked: asked.answer(results={T0: 19}))
async def test_requests_of_half_closed_client_are_not_retried(s: Scene) -> None:
    """It may be gone and return: requests that wait for a resend are answered instead."""
    s.produces(1, 2)
    await eventually(lambda: s.broker.log, "the first attempt")
    await asyncio.sleep(0.01)
    s.client.end_sending()
    first, second = await s.gets(1, 2)
    assert first == 19
    assert second in (6, 19)
    assert await s.client.is_closed()
    sent = len(s.broker.log)
    await asyncio.sleep(0.3)
    assert len(s.broker.log) == sent
    await gone(s)


@scene(ANSWERS)
async def test_requests_without_answer_are_still_sent(s: Scene) -> None:
    s.produces(*range(REQUESTS), acks=0)
    s.client.end_sending()
    assert await s.client.is_closed()
    await eventually(lambda: len(s.broker.log) == REQUESTS, "all of them")
    await gone(s)


@scene(HOLDS, limits={"deadline_cap_ms": 1_500, "drain_s": 0.1})
async def test_deadline_ends_half_closed_client(s: Scene) -> None:
    s.send(produce_frame(correlation_id=1), fetch_frame(correlation_id=2, max_wait_ms=60_000))
    s.client.end_sending()
    assert await s.codes() == {T0: 7}
    assert await s.client.is_closed()
    await gone(s)


def answers_fat(asked: Asked) -> None:
    asked.answer(results={T0: {"records": bytes(16 << 20)}} if asked.header.api_key == keys.FETCH else {})


@scene(answers_fat, limits={"deadline_cap_ms": 1_000})
async def test_half_closed_client_that_never_reads_ends(s: Scene) -> None:
    s.client.pause_reading()
    s.send(fetch_frame(max_bytes=1 << 24))
    s.client.end_sending()
    await eventually(lambda: s.broker.log, "the fetch")
    await gone(s)


@scene(ANSWERS)
async def test_client_ending_within_frame_gets_earlier_answers(s: Scene) -> None:
    s.send(produce_frame(correlation_id=1), produce_frame(correlation_id=2)[:30])
    s.client.end_sending()
    await answered(s, 1)
    assert len(s.broker.log) == 1
