"""Order per client connection and partition while ownership moves and batches are refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kproxy.routing import fanout
from tests.support.raw_client import Answer, RawClient, batch, produce_frame
from tests.support.running_proxy import both_loops, eventually, running_proxy
from tests.support.scripted_upstream import Asked, ScriptedUpstream

NOT_LEADER = 6
TIMED_OUT = 7
NOT_ENOUGH_REPLICAS = 19
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
async def test_on_a_proven_route_batches_are_pipelined() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, upstream)
        send(client, [1, 2, 3, 4, 5])
        for asked in await take(upstream, [1, 2, 3, 4, 5]):
            asked.answer()
        assert await answers(client, [1, 2, 3, 4, 5]) == [0] * 5


@both_loops
async def test_on_a_new_route_one_batch_goes_first_and_the_rest_waits_for_its_success() -> None:
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
async def test_another_partition_does_not_wait_for_a_route_to_be_proven() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1, partitions=[0, 1])
        client = await proxy.client()
        client.send(produce_frame({"t": [0]}, correlation_id=1), produce_frame({"t": [0, 1]}, correlation_id=2))
        first, second = await upstream.next(), await upstream.next()
        assert (first.partitions, second.partitions) == ([T0], [("t", 1)])
        first.answer()
        third = await upstream.next()
        assert third.partitions == [T0]
        second.answer()
        third.answer()
        assert [(await client.answer()).correlation_id for _ in range(2)] == [1, 2]


@both_loops
async def test_a_route_is_new_again_when_ownership_has_moved_and_come_back() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, upstream)
        proxy.own(2)
        proxy.own(1)
        send(client, [1, 2])
        first = await take(upstream, [1])
        assert await upstream.is_silent()
        first[0].answer()
        (await take(upstream, [2]))[0].answer()
        assert await answers(client, [1, 2]) == [0, 0]


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


@pytest.mark.parametrize("behind", [NOT_LEADER, NOT_ENOUGH_REPLICAS, OUT_OF_ORDER])
@both_loops
async def test_what_was_piped_behind_a_refused_batch_is_sent_again_behind_it(behind: int) -> None:
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
            each.answer(results={T0: behind})
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
async def test_a_batch_refused_again_while_it_goes_first_goes_first_again() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, upstream)
        send(client, [1, 2])
        for each in await take(upstream, [1, 2]):
            each.answer(results={T0: NOT_LEADER})
        (await take(upstream, [1]))[0].answer(results={T0: NOT_LEADER})
        (await take(upstream, [1]))[0].answer()
        (await take(upstream, [2]))[0].answer()
        assert await answers(client, [1, 2]) == [0, 0]


@both_loops
async def test_the_codes_of_what_was_piped_behind_do_not_count_as_its_attempts() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, upstream)
        send(client, [1, 2])
        for each in await take(upstream, [1, 2]):
            each.answer(results={T0: NOT_LEADER})
        (await take(upstream, [1]))[0].answer()
        (await take(upstream, [2]))[0].answer(results={T0: NOT_LEADER})
        (await take(upstream, [2]))[0].answer(results={T0: NOT_LEADER})
        (await take(upstream, [2]))[0].answer()
        assert await answers(client, [1, 2]) == [0, 0]


@both_loops
async def test_when_a_later_batch_was_appended_after_all_the_first_ones_own_code_is_handed_on() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, upstream)
        send(client, [1, 2, 3, 4])
        asked = await take(upstream, [1, 2, 3, 4])
        asked[0].answer(results={T0: NOT_LEADER})
        asked[1].answer(results={T0: OUT_OF_ORDER})
        asked[2].answer()
        asked[3].answer()
        assert await answers(client, [1, 2, 3, 4]) == [NOT_LEADER, NOT_LEADER, 0, 0]
        assert await upstream.is_silent(0.2)


@both_loops
async def test_when_the_first_is_given_up_so_is_what_waits_behind_it() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, upstream)
        send(client, [1, 2, 3])
        for each in await take(upstream, [1, 2, 3]):
            each.answer(results={T0: NOT_LEADER})
        for _ in range(2):
            (await take(upstream, [1]))[0].answer(results={T0: NOT_LEADER})
        codes = await answers(client, [1, 2, 3])
        assert codes == [NOT_LEADER] * 3
        assert await upstream.is_silent()
        # And nothing is stuck: the client sends them again.
        send(client, [1, 2, 3])
        (await take(upstream, [1]))[0].answer()
        for each in await take(upstream, [2, 3]):
            each.answer()
        assert await answers(client, [1, 2, 3]) == [0, 0, 0]


@both_loops
async def test_a_later_batch_waits_while_an_earlier_one_is_unanswered_at_the_former_owner() -> None:
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
async def test_what_the_former_owner_refuses_goes_before_what_waits_for_the_new_one() -> None:
    former, new = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(former, new) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, former)
        send(client, [1, 2])
        asked = await take(former, [1, 2])
        proxy.own(2)
        send(client, [3])
        asked[0].answer()
        asked[1].answer(results={T0: NOT_LEADER})
        (await take(new, [2]))[0].answer()
        (await take(new, [3]))[0].answer()
        assert await answers(client, [1, 2, 3]) == [0, 0, 0]


@both_loops
async def test_ownership_that_moves_while_a_batch_goes_first_leaves_nothing_stuck() -> None:
    former, new = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(former, new) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, former)
        send(client, [1, 2, 3])
        for each in await take(former, [1, 2, 3]):
            each.answer(results={T0: NOT_LEADER})
        first = await take(former, [1])
        proxy.own(2)
        send(client, [4])
        first[0].answer()
        # The new owner's route is not proven by the former owner's success.
        second = await take(new, [2])
        assert await new.is_silent()
        second[0].answer()
        for each in await take(new, [3, 4]):
            each.answer()
        assert await answers(client, [1, 2, 3, 4]) == [0] * 4
        send(client, [5])
        (await take(new, [5]))[0].answer()
        assert await answers(client, [5]) == [0]


@both_loops
async def test_an_owner_that_changes_its_address_keeps_the_order() -> None:
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
async def test_what_comes_when_its_owner_has_left_waits_for_what_the_owner_has_not_answered() -> None:
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
async def test_after_a_lost_connection_nothing_new_overtakes_what_is_sent_again() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, upstream)
        send(client, [1, 2])
        asked = await take(upstream, [1, 2])
        asked[0].connection.abort()
        await asked[0].connection.until_closed()
        send(client, [3])
        first = await take(upstream, [1])
        assert await upstream.is_silent()
        first[0].answer()
        for each in await take(upstream, [2, 3]):
            each.answer()
        assert await answers(client, [1, 2, 3]) == [0, 0, 0]


@both_loops
async def test_a_batch_given_up_at_its_deadline_takes_what_waits_behind_it_along() -> None:
    """Appended alone, the later batch would be first at a broker that knows nothing of the producer."""
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, upstream)
        send(client, [1], timeout_ms=SHORT_MS)
        send(client, [2])
        for each in await take(upstream, [1, 2]):
            each.answer(results={T0: NOT_ENOUGH_REPLICAS})
        upstream.script = lambda asked: asked.answer(results={T0: NOT_ENOUGH_REPLICAS})
        assert await answers(client, [1]) == [NOT_ENOUGH_REPLICAS]
        upstream.script = None
        assert (await answers(client, [2]))[0] in (NOT_LEADER, NOT_ENOUGH_REPLICAS)
        assert await upstream.is_silent(0.6)
        assert all(each.records == {T0: batch(1)} for each in upstream.log[3:])


@both_loops
async def test_what_was_piped_behind_a_batch_given_up_at_its_deadline_is_not_sent_again() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, upstream)
        send(client, [1], timeout_ms=SHORT_MS)
        send(client, [2])
        asked = await take(upstream, [1, 2])
        asked[0].answer(results={T0: NOT_ENOUGH_REPLICAS})
        assert await answers(client, [1]) == [NOT_ENOUGH_REPLICAS]
        asked[1].answer(results={T0: OUT_OF_ORDER})
        assert await answers(client, [2]) == [NOT_LEADER]
        assert await upstream.is_silent(0.1)
        # What the client sends after it has learnt of it is in order again.
        send(client, [1, 2])
        (await take(upstream, [1]))[0].answer()
        (await take(upstream, [2]))[0].answer()
        assert await answers(client, [1, 2]) == [0, 0]


@both_loops
async def test_after_a_seven_the_lane_waits_for_the_answer_that_is_still_to_come() -> None:
    former, new = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(former, new) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, former)
        send(client, [1], timeout_ms=SHORT_MS)
        late = await take(former, [1])
        assert await answers(client, [1]) == [TIMED_OUT]
        proxy.own(2)
        send(client, [1])
        assert await new.is_silent()
        late[0].answer()
        (await take(new, [1]))[0].answer()
        assert await answers(client, [1]) == [0]


@both_loops
async def test_after_a_seven_the_lane_goes_on_when_the_connection_is_closed() -> None:
    former, new = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(former, new) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, former)
        send(client, [1], timeout_ms=SHORT_MS)
        late = await take(former, [1])
        assert await answers(client, [1]) == [TIMED_OUT]
        proxy.own(2)
        send(client, [1])
        assert await new.is_silent()
        late[0].connection.abort()
        (await take(new, [1]))[0].answer()
        assert await answers(client, [1]) == [0]


@both_loops
async def test_a_former_owner_that_never_answers_does_not_hold_the_lane_for_ever(
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


@both_loops
async def test_a_split_request_waits_only_for_the_partition_that_is_blocked() -> None:
    former, other = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(former, other) as proxy:
        proxy.own(1)
        proxy.own(2, partitions=[1])
        client = await proxy.client()
        client.send(produce_frame({"t": [0]}, correlation_id=1))
        held = await former.next()
        proxy.own(2)
        client.send(produce_frame({"t": [0, 1]}, correlation_id=2))
        early = await other.next()
        assert early.partitions == [("t", 1)]
        early.answer(results={("t", 1): {"base_offset": 3}})
        assert await other.is_silent()
        held.answer()
        late = await other.next()
        assert late.partitions == [T0]
        late.answer(results={T0: {"base_offset": 4}})
        assert (await client.answer()).correlation_id == 1
        answer = await client.answer()
        assert [each.fields["base_offset"] for each in answer.results] == [4, 3]


@both_loops
async def test_unowned_partitions_are_offered_to_a_live_broker_and_no_batch_overtakes() -> None:
    """First touch: the broker may refuse one batch, become the owner, and then accept the next."""
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        client = await proxy.client()
        send(client, [0, 1, 2])
        (await take(upstream, [0]))[0].answer(results={T0: NOT_LEADER})
        again = await take(upstream, [0])
        proxy.own(1)
        again[0].answer()
        await eventually(lambda: len(upstream.log) > 2)
        rest = [await upstream.next()]
        rest[0].answer()
        rest.append(await upstream.next())
        rest[1].answer()
        assert [each.records[T0] for each in rest] == [batch(1), batch(2)]
        assert await answers(client, [0, 1, 2]) == [0, 0, 0]
