"""Produce 13 names topics by id (KIP-516): ids that are known, not known yet, and refused.

Their order, and topics that are made again, are in the scripts tests/unit/routing/test_fanout_topology.py.
"""

from __future__ import annotations

from tests.support.brokers.scripted_upstream import Asked, ScriptedUpstream, answers_everything
from tests.support.clients.raw_client import batch, produce_frame
from tests.support.processes.running_proxy import RunningProxy, both_loops, running_proxy
from tests.support.wire.messages import topic_id

UNKNOWN_TOPIC_ID = 100
BY_ID = 13


def forget_id(proxy: RunningProxy, topic: str = "t") -> None:
    proxy.topology.set_topic_id(topic.encode(), None)


def learn_id(proxy: RunningProxy, topic: str = "t") -> None:
    proxy.topology.set_topic_id(topic.encode(), topic_id(topic).bytes)


@both_loops
async def test_unknown_topic_id_gets_an_error_alone() -> None:
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
async def test_topic_id_learnt_by_client_first_is_awaited() -> None:
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
async def test_refused_batch_is_resent_in_order() -> None:
    def refuses_two(asked: Asked) -> None:
        asked.answer(results={("t", 0): UNKNOWN_TOPIC_ID} if len(upstream.log) in (2, 3) else {})

    upstream = ScriptedUpstream(1, refuses_two)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        for numbers in ([0], [1, 2]):
            for number in numbers:
                client.send(produce_frame({"t": [0]}, version=BY_ID, records=batch(number)))
            for _ in numbers:
                assert (await client.answer(api_version=BY_ID)).codes == {("t", 0): 0}
        # What was piped behind a batch that was refused was refused with it, and follows it again.
        sent = [asked.records["t", 0] for asked in upstream.log]
        assert sent == [batch(number) for number in (0, 1, 2, 1, 2)]
