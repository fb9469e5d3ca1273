"""A waiting request keeps its own bytes and not those of others."""

from __future__ import annotations

import pytest

from kproxy.proxy.plain_path import PlainPiece
from kproxy_codec.framing import CHUNK_BYTES
from tests.support.brokers.scripted_upstream import ScriptedUpstream, answers_everything
from tests.support.clients.raw_client import batch, produce_frame
from tests.support.processes.running_proxy import RunningProxy, both_loops, running_proxy
from tests.support.waiting import eventually

NOT_LEADER = 6
TIMED_OUT = 7


def kept(proxy: RunningProxy) -> list[int]:
    """The sizes of the buffers that open requests keep, and of what unanswered pieces keep."""
    requests = [
        exchange.request for session in proxy.listener._sessions for exchange in session._fanout.core._exchanges
    ]
    waiting = [
        (ticket.slot if isinstance(ticket, PlainPiece) else ticket.exchange).request  # type: ignore[attr-defined]
        for session in proxy.listener._sessions
        for upstream in session._connections.by_broker.values()
        for ticket in upstream.unanswered()
    ]
    return [len(request.frame.obj) for request in {id(each): each for each in [*requests, *waiting]}.values()]  # type: ignore[arg-type]


@pytest.mark.parametrize("partitions", [[0], [0, 1]], ids=["whole", "split"])
@both_loops
async def test_a_request_that_waits_long_keeps_its_own_bytes_alone_and_is_sent_again_as_it_was(
    partitions: list[int],
) -> None:
    slow, other = ScriptedUpstream(1), ScriptedUpstream(2, answers_everything)
    async with running_proxy(slow, other) as proxy:
        proxy.own(1)
        proxy.own(2, partitions=[1])
        client = await proxy.client()
        client.send(produce_frame({"t": partitions}, records=batch(7)))
        asked = await slow.next()
        assert kept(proxy) == [CHUNK_BYTES]
        await eventually(lambda: max(kept(proxy)) < 1024)
        asked.answer(results={("t", 0): NOT_LEADER})
        again = await slow.next()
        assert again.records == asked.records == {("t", 0): batch(7)}
        again.answer()
        assert (await client.answer()).codes == {("t", index): 0 for index in partitions}


@both_loops
async def test_a_request_that_was_answered_at_its_deadline_keeps_nothing() -> None:
    slow = ScriptedUpstream(1)
    async with running_proxy(slow) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame({"t": [0]}, timeout_ms=1))
        asked = await slow.next()
        assert (await client.answer()).codes == {("t", 0): TIMED_OUT}
        assert kept(proxy) == [0]
        # The late answer is nobody's, and the next request goes its way.
        asked.answer()
        client.send(produce_frame({"t": [0]}))
        (await slow.next()).answer()
        assert (await client.answer()).codes == {("t", 0): 0}
