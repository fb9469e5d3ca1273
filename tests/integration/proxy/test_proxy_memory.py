"""A waiting request keeps its own bytes and not those of others; a quiet connection holds few objects."""

from __future__ import annotations

import asyncio
import gc
import sys
from types import ModuleType

import pytest

from kproxy.plain import compiled
from kproxy.proxy.plain_path import PlainPiece
from kproxy_codec.framing import CHUNK_BYTES
from tests.support.brokers.scripted_upstream import ScriptedUpstream, answers_everything
from tests.support.clients.raw_client import batch, produce_frame
from tests.support.processes.running_proxy import RunningProxy, both_loops, running_proxy
from tests.support.waiting import eventually

# Bytes of Python objects, a tenth more than there are: of a client connection, and of each broker connection that it
# has. Those of the event loop do not count.
MOST_FOR_A_CLIENT = 5_400 if compiled is not None else 4_800
MOST_FOR_A_BROKER = 3_500 if compiled is not None else 5_100
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
async def test_long_waiting_request_holds_only_its_own_bytes(
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
async def test_request_answered_at_deadline_holds_nothing() -> None:
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


def held_by(session: object, others: list[object]) -> int:
    """The bytes of all objects that `session` leads to, without those of the event loop and `others`."""
    seen, todo, found = {id(each) for each in others}, [session], 0
    while todo:
        each = todo.pop()
        is_foreign = isinstance(each, (type, ModuleType, asyncio.BaseTransport)) or hasattr(
            each, "get_write_buffer_size"
        )
        if id(each) in seen or is_foreign:
            continue
        seen.add(id(each))
        # Python does not track empty dicts, nor those of numbers, such as the versions that all connections share.
        if gc.is_tracked(each) or each == {}:
            found += sys.getsizeof(each)
        todo += gc.get_referents(each)
    return found


@both_loops
async def test_a_quiet_connection_holds_few_objects() -> None:
    upstreams = [ScriptedUpstream(number, answers_everything) for number in (1, 2, 3)]
    async with running_proxy(*upstreams) as proxy:
        for index in range(3):
            proxy.own(index + 1, partitions=[index])
        # All that connections share exists after the first one.
        held = []
        for partitions in ([0, 1, 2], [], [0], [0, 1, 2]):
            gc.collect()
            others = gc.get_objects()
            client = await proxy.client()
            for _ in range(2 if partitions else 0):
                client.send(produce_frame({"t": partitions}, records=batch(0, producer_id=-1)))
                await client.answer()
            await eventually(lambda: proxy.listener._sessions, "the proxy has it")
            held.append(held_by(next(iter(proxy.listener._sessions)), others))
            client.close()
            await eventually(lambda: not proxy.listener._sessions, "the client's connection is let go")
    _, alone, with_one, with_three = held
    assert alone < MOST_FOR_A_CLIENT
    assert with_one < MOST_FOR_A_CLIENT + MOST_FOR_A_BROKER
    assert with_three < MOST_FOR_A_CLIENT + 3 * MOST_FOR_A_BROKER
