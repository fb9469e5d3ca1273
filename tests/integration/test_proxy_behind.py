"""What is behind a batch in trouble: found by test_proxy_random, each kept as the shortest story that shows it."""

from __future__ import annotations

import pytest

from kproxy.routing.retry import KAFKA
from tests.support.raw_client import RawClient, batch, produce_frame
from tests.support.running_proxy import both_loops, running_proxy
from tests.support.scripted_upstream import ScriptedUpstream

NOT_LEADER = 6
TIMED_OUT = 7
NOT_ENOUGH_REPLICAS = 19
OUT_OF_ORDER = 45
INVALID_RECORD = 87
T0 = ("t", 0)
SHORT_MS = 1000


async def prove(client: RawClient, upstream: ScriptedUpstream, producer_id: int) -> None:
    """Have one batch accepted, so that what follows is pipelined."""
    client.send(produce_frame(records=batch(producer_id=producer_id)))
    (await upstream.next()).answer()
    await client.answer()


@pytest.mark.parametrize("producer_id", [-1, 7], ids=["plain", "idempotent"])
@both_loops
async def test_where_a_refusal_may_follow_an_append_a_lane_makes_no_second_sending_safe(producer_id: int) -> None:
    """Real Kafka's NOT_LEADER_OR_FOLLOWER to acks=all with an offset means that the batch is in its log."""
    former, new = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(former, new) as proxy:
        proxy.context.conduct = KAFKA
        proxy.own(1)
        client = await proxy.client()
        await prove(client, former, producer_id)
        first, second = (batch(n, producer_id=producer_id) for n in (1, 2))
        client.send(produce_frame(records=first))
        asked = await former.next()
        proxy.own(2)
        client.send(produce_frame(records=second))
        assert await new.is_silent()
        asked.answer(results={T0: {"error_code": NOT_LEADER, "base_offset": 5}})
        if producer_id < 0:
            assert [(await client.answer()).codes[T0] for _ in range(2)] == [TIMED_OUT, NOT_LEADER]
        else:
            for records in (first, second):
                again = await new.next()
                assert again.records == {T0: records}
                again.answer()
            assert [(await client.answer()).codes[T0] for _ in range(2)] == [0, 0]
        assert await new.is_silent()
        assert len(former.log) == 2


@both_loops
async def test_out_of_order_behind_a_refused_batch_is_not_handed_on_at_the_deadline() -> None:
    """Producers end, or begin a new epoch, at OUT_OF_ORDER_SEQUENCE_NUMBER for the batch that is next in line."""
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, upstream, 7)
        client.send(produce_frame(records=batch(1)))
        client.send(produce_frame(records=batch(2), timeout_ms=SHORT_MS))
        first, second = await upstream.next(), await upstream.next()
        first.answer(results={T0: NOT_ENOUGH_REPLICAS})
        second.answer(results={T0: OUT_OF_ORDER})
        again = await upstream.next()
        assert again.records == {T0: batch(1)}
        # The second one's deadline passes while the first is under way.
        assert await upstream.is_silent(1.3)
        again.answer()
        assert (await client.answer()).codes == {T0: 0}
        assert (await client.answer()).codes == {T0: NOT_LEADER}
        assert await upstream.is_silent()


@pytest.mark.parametrize("code", [56, 3])
@both_loops
async def test_out_of_order_behind_a_batch_that_its_client_sends_again_is_not_handed_on(code: int) -> None:
    """librdkafka would begin a new epoch, and send again in it what is in doubt in its other partitions."""
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, upstream, 7)
        client.send(*(produce_frame(records=batch(n), correlation_id=n) for n in (1, 2)))
        first, second = await upstream.next(), await upstream.next()
        first.answer(results={T0: code})
        assert (await client.answer()).codes == {T0: code}
        # Its client has not read that yet.
        client.send(produce_frame(records=batch(3), correlation_id=3))
        third = await upstream.next()
        for each in (second, third):
            each.answer(results={T0: OUT_OF_ORDER})
            assert (await client.answer()).codes == {T0: NOT_LEADER}
        # Once it has come again, what is still out of order is so by itself.
        client.send(*(produce_frame(records=batch(n), correlation_id=n) for n in (1, 3)))
        for result in (0, OUT_OF_ORDER):
            (await upstream.next()).answer(results={T0: result})
            assert (await client.answer()).codes == {T0: result}
        assert await upstream.is_silent()


@pytest.mark.parametrize(("code", "waiting"), [(56, "given up"), (3, "given up"), (2, "given up"), (87, "sent")])
@both_loops
async def test_what_waits_behind_a_batch_that_its_client_sends_again_is_not_sent_before_it(
    code: int, waiting: str
) -> None:
    """On a new route, to a broker that knows nothing of the producer: it would accept the later batch as the first."""
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=batch(0)), produce_frame(records=batch(1)))
        (await upstream.next()).answer(results={T0: code})
        assert (await client.answer()).codes == {T0: code}
        if waiting == "sent":
            (await upstream.next()).answer(results={T0: INVALID_RECORD})
        assert (await client.answer()).codes == {T0: NOT_LEADER if waiting == "given up" else INVALID_RECORD}
        assert await upstream.is_silent()


@both_loops
async def test_a_batch_waits_for_one_that_its_broker_was_sent_under_an_earlier_ownership() -> None:
    """The broker refuses the first because it is not the owner, becomes it again, and would take the second one."""
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream, ScriptedUpstream(2)) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, upstream, -1)
        first, second = (batch(n, producer_id=-1) for n in (1, 2))
        client.send(produce_frame(records=first))
        asked = await upstream.next()
        proxy.own(2)
        proxy.own(1)
        client.send(produce_frame(records=second))
        assert await upstream.is_silent()
        asked.answer(results={T0: NOT_LEADER})
        for records in (first, second):
            again = await upstream.next()
            assert again.records == {T0: records}
            again.answer()
        assert [(await client.answer()).codes[T0] for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("kind", ["plain", "transactional"])
@both_loops
async def test_what_is_behind_a_batch_that_is_left_to_its_client_is_left_to_it_as_well(kind: str) -> None:
    """A leader is deposed with the first in its log and has refused the others: sent on, they would come before it."""
    former, new = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(former, new) as proxy:
        proxy.context.conduct = KAFKA
        proxy.own(1)
        client = await proxy.client()
        await prove(client, former, -1)
        options = {"is_transactional": True} if kind == "transactional" else {"producer_id": -1}
        client.send(*(produce_frame(records=batch(n, **options), correlation_id=n) for n in range(4)))
        asked = [await former.next() for _ in range(4)]
        proxy.own(2)
        for n, each in enumerate(asked):
            each.answer(results={T0: {"error_code": NOT_LEADER, "base_offset": 9 if n == 0 else -1}})
        assert [(await client.answer()).codes[T0] for _ in range(4)] == [TIMED_OUT, *[NOT_LEADER] * 3]
        assert await new.is_silent()
        client.send(*(produce_frame(records=batch(n, **options), correlation_id=n) for n in range(2)))
        for n in range(2):
            again = await new.next()
            assert again.records == {T0: batch(n, **options)}
            again.answer()
        assert [(await client.answer()).codes[T0] for _ in range(2)] == [0, 0]


@both_loops
async def test_what_is_lost_with_a_batch_whose_time_is_over_is_not_sent_again() -> None:
    """A broker connection is lost with both: for the first it is too late, for the second there would be time."""
    now = [100.0]
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream, clock=lambda: now[0]) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, upstream, 7)
        for n, timeout_ms in ((1, SHORT_MS), (2, 30 * SHORT_MS)):
            client.send(produce_frame(records=batch(n), correlation_id=n, timeout_ms=timeout_ms))
        asked = [await upstream.next() for _ in range(2)]
        now[0] += 0.99
        asked[0].connection.abort()
        assert [(await client.answer()).codes[T0] for _ in range(2)] == [TIMED_OUT, TIMED_OUT]
        assert await upstream.is_silent()


@both_loops
async def test_what_goes_the_plain_path_behind_a_batch_whose_time_is_over_is_not_sent_again() -> None:
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
        assert await upstream.is_silent()
