"""Produce 13 names topics by id (KIP-516): ids that are known, not known yet, and not known any more."""

from __future__ import annotations

import pytest

from tests.support.at_rest import what_is_left
from tests.support.messages import topic_id
from tests.support.raw_client import batch, produce_frame
from tests.support.running_proxy import RunningProxy, both_loops, eventually, running_proxy
from tests.support.scripted_upstream import Asked, ScriptedUpstream, answers_everything

NOT_LEADER = 6
UNKNOWN_TOPIC_ID = 100
BY_ID = 13


def forget_id(proxy: RunningProxy, topic: str = "t") -> None:
    proxy.topology.set_topic_id(topic.encode(), None)


def learn_id(proxy: RunningProxy, topic: str = "t") -> None:
    proxy.topology.set_topic_id(topic.encode(), topic_id(topic).bytes)


@both_loops
async def test_an_unknown_id_is_said_to_be_unknown_and_the_rest_goes_its_way() -> None:
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream) as proxy:
        proxy.own(1, "u")
        client = await proxy.client()
        client.send(produce_frame({"t": [0, 4], "u": [0]}, version=BY_ID))
        answer = await client.answer(api_version=BY_ID)
        assert answer.codes == {("t", 0): UNKNOWN_TOPIC_ID, ("t", 4): UNKNOWN_TOPIC_ID, ("u", 0): 0}
        for result in answer.results[:2]:
            assert (result.fields["base_offset"], result.fields["log_start_offset"]) == (-1, -1)
        # The source was asked to look again, as for an owner, before that was said.
        assert {index for _, index, _ in proxy.source.refreshed} == {0, 4}
        assert [asked.partitions for asked in upstream.log] == [[("u", 0)]]


@both_loops
async def test_an_id_that_the_client_learnt_first_is_waited_for() -> None:
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        forget_id(proxy)
        proxy.source.on_refresh = lambda topic, index, revision: learn_id(proxy)
        client = await proxy.client()
        for number in range(3):
            client.send(produce_frame({"t": [0]}, version=BY_ID, records=batch(number), correlation_id=number))
        answers = [await client.answer(api_version=BY_ID) for _ in range(3)]
        assert [(answer.correlation_id, answer.codes) for answer in answers] == [(n, {("t", 0): 0}) for n in range(3)]
        assert [asked.records["t", 0] for asked in upstream.log] == [batch(number) for number in range(3)]


@both_loops
async def test_the_id_of_a_topic_made_again_leads_to_the_new_one_alone() -> None:
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame({"t": [0]}, version=BY_ID))
        assert (await client.answer(api_version=BY_ID)).codes == {("t", 0): 0}
        proxy.topology.set_topic_id(b"t", topic_id("t, made again").bytes)
        client.send(produce_frame({"t": [0]}, version=BY_ID))
        assert (await client.answer(api_version=BY_ID)).codes == {("t", 0): UNKNOWN_TOPIC_ID}
        client.send(produce_frame({"t, made again": [0]}, version=BY_ID))
        assert (await client.answer(api_version=BY_ID)).codes == {("t, made again", 0): 0}


@pytest.mark.parametrize("acks", [-1, 1])
@pytest.mark.parametrize("code", [NOT_LEADER, UNKNOWN_TOPIC_ID])
@both_loops
async def test_what_a_broker_refuses_is_sent_again_in_order(code: int, acks: int) -> None:
    def refuses_two(asked: Asked) -> None:
        asked.answer(results={("t", 0): code} if len(upstream.log) in (2, 3) else {})

    upstream = ScriptedUpstream(1, refuses_two)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        for numbers in ([0], [1, 2]):
            for number in numbers:
                client.send(produce_frame({"t": [0]}, version=BY_ID, acks=acks, records=batch(number)))
            for _ in numbers:
                assert (await client.answer(api_version=BY_ID)).codes == {("t", 0): 0}
        # What was piped behind a batch that was refused was refused with it, and follows it again.
        sent = [asked.records["t", 0] for asked in upstream.log]
        assert sent == [batch(number) for number in (0, 1, 2, 1, 2)]


@both_loops
async def test_a_broker_that_never_knows_the_id_is_believed_in_the_end() -> None:
    upstream = ScriptedUpstream(1, lambda asked: asked.answer(results={("t", 0): UNKNOWN_TOPIC_ID}))
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame({"t": [0]}, version=BY_ID))
        assert (await client.answer(api_version=BY_ID)).codes == {("t", 0): UNKNOWN_TOPIC_ID}
        assert len(upstream.log) == 3


@pytest.mark.parametrize("versions", [(12, 13), (13, 12)])
@both_loops
async def test_a_partition_keeps_its_order_whatever_it_is_called(versions: tuple[int, int]) -> None:
    """franz-go names topics by id where it knows all ids of a request, and by name where it does not."""

    former, owner = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(former, owner) as proxy:
        proxy.own(1)
        client = await proxy.client()
        for number in range(2):
            client.send(produce_frame({"t": [0]}, version=versions[number], records=batch(number)))
            (await former.next()).answer()
            await client.answer(api_version=versions[number])
        # One route is proven, and on it the next two are piped one behind the other.
        for number, version in enumerate(versions, 2):
            client.send(produce_frame({"t": [0]}, version=version, records=batch(number)))
        refused = [await former.next() for _ in versions]
        proxy.own(2)
        for asked in refused:
            asked.answer(results={("t", 0): NOT_LEADER})
        first = await owner.next()
        assert first.records["t", 0] == batch(2)
        assert await owner.is_silent(), "on a new route one goes first"
        first.answer()
        second = await owner.next()
        assert second.records["t", 0] == batch(3)
        second.answer()
        for version in versions:
            assert (await client.answer(api_version=version)).codes == {("t", 0): 0}


@both_loops
async def test_what_waits_for_an_id_to_be_known_is_not_overtaken_by_name() -> None:
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        forget_id(proxy)
        client = await proxy.client()
        client.send(produce_frame({"t": [0]}, version=BY_ID, records=batch(0), correlation_id=0))
        await eventually(lambda: proxy.source.refreshed)
        learn_id(proxy)
        for number, version in ((1, BY_ID), (2, 12), (3, BY_ID)):
            client.send(produce_frame({"t": [0]}, version=version, records=batch(number), correlation_id=number))
        for number, version in enumerate((BY_ID, BY_ID, 12, BY_ID)):
            answer = await client.answer(api_version=version)
            assert (answer.correlation_id, answer.codes) == (number, {("t", 0): 0})
        assert [asked.records["t", 0] for asked in upstream.log] == [batch(number) for number in range(4)]


@both_loops
async def test_a_topic_named_by_id_and_by_name_before_its_id_is_known_keeps_one_order() -> None:
    """Batches of one partition wait under two names; when these turn out to be one topic, they follow one another."""
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        forget_id(proxy)
        client = await proxy.client()
        client.send(produce_frame(version=BY_ID, correlation_id=1, records=batch(0)))
        client.send(produce_frame(correlation_id=2, records=batch(1)))
        asked = await upstream.next()
        assert asked.records == {("t", 0): batch(1)}
        learn_id(proxy)
        client.send(produce_frame(correlation_id=3, records=batch(2)))
        assert await upstream.is_silent()
        asked.answer()
        # The second was appended before the first could be: what waits is the client's to send again, in its order.
        codes = [(await client.answer(api_version=version)).codes["t", 0] for version in (BY_ID, 9, 9)]
        assert codes == [UNKNOWN_TOPIC_ID, 0, NOT_LEADER]
        assert await upstream.is_silent()
        await eventually(lambda: what_is_left(proxy) == [], "nothing is left behind")
