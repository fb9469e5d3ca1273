"""Order per client connection and partition, on real connections: these close, hang and move.

All that the core decides is in the scripts tests/unit/routing/test_fanout_lanes.py and test_fanout_topology.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kproxy.routing import fanout
from tests.support.brokers.scripted_upstream import Asked, ScriptedUpstream
from tests.support.clients.raw_client import Answer, RawClient, batch, produce_frame
from tests.support.processes.running_proxy import both_loops, in_one_go, running_proxy

NOT_LEADER = 6
TIMED_OUT = 7
OUT_OF_ORDER = 45
T0 = ("t", 0)
SHORT_MS = 1000


def send(client: RawClient, numbers: Sequence[int], **options: int) -> None:
    """One request for each batch number, which is its correlation id too."""
    client.send(*(produce_frame(records=batch(n), correlation_id=n, **options) for n in numbers))


async def take(upstream: ScriptedUpstream, numbers: Sequence[int]) -> list[Asked]:
    """The next requests: just these batches, in this order."""
    asked = [await upstream.next() for _ in numbers]
    assert [each.records for each in asked] == [{T0: batch(n)} for n in numbers]
    return asked


async def answers(client: RawClient, numbers: Sequence[int]) -> list[int]:
    """The codes of the next answers: just these, in this order."""
    came: list[Answer] = [await client.answer() for _ in numbers]
    assert [answer.correlation_id for answer in came] == list(numbers)
    return [answer.codes[T0] for answer in came]


async def prove(client: RawClient, upstream: ScriptedUpstream, number: int = 0) -> None:
    """Have one batch accepted, so that what follows is pipelined."""
    send(client, [number])
    (await take(upstream, [number]))[0].answer()
    assert await answers(client, [number]) == [0]


@both_loops
async def test_new_route_sends_one_batch_first() -> None:
    """Ownership may arrive between two batches, and a broker without the producer's state accepts any sequence."""
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        send(client, [0, 1, 2, 3, 4])
        first = await take(upstream, [0])
        assert await upstream.is_silent()
        first[0].answer()
        for asked in await take(upstream, [1, 2, 3, 4]):
            asked.answer()
        assert await answers(client, [0, 1, 2, 3, 4]) == [0] * 5


@both_loops
async def test_a_route_is_new_again_on_another_connection() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, upstream)
        upstream.connections[0].close()
        await upstream.connections[0].until_closed()
        send(client, [1, 2])
        first = await take(upstream, [1])
        assert await upstream.is_silent()
        first[0].answer()
        (await take(upstream, [2]))[0].answer()
        assert await answers(client, [1, 2]) == [0, 0]


@both_loops
async def test_batches_behind_refused_batch_are_resent_behind_it() -> None:
    former, new = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(former, new) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, former)
        send(client, [1, 2, 3, 4, 5])
        asked = await take(former, [1, 2, 3, 4, 5])
        proxy.own(2)
        asked[0].answer(results={T0: NOT_LEADER})
        # Not before the others are known to be refused as well.
        assert await new.is_silent()
        for each in asked[1:]:
            each.answer(results={T0: OUT_OF_ORDER})
        first = await take(new, [1])
        # Alone, until it has succeeded; what comes meanwhile waits behind.
        send(client, [6])
        assert await new.is_silent()
        first[0].answer()
        for each in await take(new, [2, 3, 4, 5, 6]):
            each.answer()
        assert await answers(client, [1, 2, 3, 4, 5, 6]) == [0] * 6
        assert len(former.log) == 1 + 5
        assert len(new.log) == 6


@both_loops
async def test_later_batch_waits_for_answer_of_former_owner() -> None:
    former, new = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(former, new) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, former)
        send(client, [1, 2])
        asked = await take(former, [1, 2])
        proxy.own(2)
        send(client, [3, 4])
        assert await new.is_silent()
        asked[0].answer()
        assert await new.is_silent()
        asked[1].answer()
        first = await take(new, [3])
        assert await new.is_silent()
        first[0].answer()
        (await take(new, [4]))[0].answer()
        assert await answers(client, [1, 2, 3, 4]) == [0] * 4


@both_loops
async def test_owner_changing_its_address_keeps_the_order() -> None:
    old, new = ScriptedUpstream(1), ScriptedUpstream(1)
    async with running_proxy(old, new) as proxy:
        proxy.topology.set_broker(1, old.address)
        proxy.own(1)
        client = await proxy.client()
        await prove(client, old)
        send(client, [1, 2])
        await take(old, [1, 2])
        proxy.topology.set_broker(1, new.address)
        send(client, [3])
        first = await take(new, [1])
        assert await new.is_silent()
        first[0].answer()
        for each in await take(new, [2, 3]):
            each.answer()
        assert await answers(client, [1, 2, 3]) == [0, 0, 0]


@both_loops
async def test_batch_waits_for_answers_of_departed_owner() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, upstream)
        send(client, [1])
        (asked,) = await take(upstream, [1])
        proxy.topology.remove_broker(1)
        send(client, [2])
        assert await upstream.is_silent()
        proxy.topology.set_broker(1, upstream.address)
        asked.answer()
        for each in await take(upstream, [2]):
            each.answer()
        assert await answers(client, [1, 2]) == [0, 0]


@both_loops
@in_one_go
async def test_silent_former_owner_does_not_block_lane_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stopped, not dead: its connection stays open, and the client's batches go nowhere else until it is closed."""
    monkeypatch.setattr(fanout, "HUNG_AFTER_S", 0.2)
    former, new = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(former, new) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, former)
        send(client, [1], timeout_ms=SHORT_MS)
        await take(former, [1])
        assert await answers(client, [1]) == [TIMED_OUT]
        proxy.own(2)
        send(client, [1])
        (await take(new, [1]))[0].answer()
        assert await answers(client, [1]) == [0]
        assert not former.connections[0].is_open
