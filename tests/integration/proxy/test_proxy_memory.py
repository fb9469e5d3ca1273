"""A waiting request keeps only its own bytes; a quiet connection holds few objects."""

from __future__ import annotations

import asyncio
import gc
import sys
from types import ModuleType

import pytest

from kproxy.plain import compiled
from kproxy.proxy.connections import PieceTicket
from kproxy_codec.framing import CHUNK_BYTES
from tests.support.clients.raw_client import batch, produce_frame
from tests.support.processes.running_proxy import RunningProxy
from tests.support.scene import ANSWERS, HOLDS, T0, Scene, scene
from tests.support.waiting import eventually

# Limits of the Python objects of a client connection, and of each of its broker connections, in bytes: a tenth above
# the present. The event loop's do not count.
MOST_FOR_A_CLIENT = 5_700 if compiled is not None else 4_800
MOST_FOR_A_BROKER = 3_500 if compiled is not None else 5_100
NOT_LEADER = 6
TIMED_OUT = 7


def kept(proxy: RunningProxy) -> list[int]:
    """The sizes of the buffers kept by open requests, and by unanswered pieces."""
    requests = [
        exchange.request for session in proxy.listener._sessions for exchange in session._fanout.core._exchanges
    ]
    waiting = [
        (ticket.exchange if isinstance(ticket, PieceTicket) else ticket.slot).request  # type: ignore[attr-defined]
        for session in proxy.listener._sessions
        for upstream in session._connections.by_place.values()
        for ticket in upstream.unanswered()
    ]
    return [len(request.frame.obj) for request in {id(each): each for each in [*requests, *waiting]}.values()]  # type: ignore[arg-type]


@pytest.mark.parametrize("partitions", [[0], [0, 1]], ids=["whole", "split"])
@scene(HOLDS, ANSWERS)
async def test_long_waiting_request_holds_only_its_own_bytes(s: Scene, partitions: list[int]) -> None:
    slow, _ = s.brokers
    s.send(produce_frame({"t": partitions}, records=batch(7)))
    asked = await slow.next()
    assert kept(s.proxy) == [CHUNK_BYTES]
    await eventually(lambda: max(kept(s.proxy)) < 1024)
    asked.answer(results={T0: NOT_LEADER})
    again = await slow.next()
    assert again.records == asked.records == {T0: batch(7)}
    again.answer()
    assert await s.codes() == {("t", index): 0 for index in partitions}


@scene(HOLDS)
async def test_request_answered_at_deadline_holds_nothing(s: Scene) -> None:
    s.send(produce_frame({"t": [0]}, timeout_ms=1))
    asked = await s.next()
    assert await s.codes() == {T0: TIMED_OUT}
    assert kept(s.proxy) == [0]
    # The late answer is dropped, and the next request is sent.
    asked.answer()
    s.send(produce_frame({"t": [0]}))
    (await s.next()).answer()
    assert await s.codes() == {T0: 0}


def held_by(session: object, others: list[object]) -> int:
    """The bytes of all objects reachable from `session`, except the event loop and `others`."""
    seen, todo, found = {id(each) for each in others}, [session], 0
    while todo:
        each = todo.pop()
        is_foreign = isinstance(each, (type, ModuleType, asyncio.BaseTransport)) or hasattr(
            each, "get_write_buffer_size"
        )
        if id(each) in seen or is_foreign:
            continue
        seen.add(id(each))
        # Python tracks neither empty dicts nor those of numbers, such as the versions shared by all connections.
        if gc.is_tracked(each) or each == {}:
            found += sys.getsizeof(each)
        todo += gc.get_referents(each)
    return found


@scene(ANSWERS, ANSWERS, ANSWERS, clients=0)
async def test_quiet_connection_holds_few_objects(s: Scene) -> None:
    # All shared objects exist after the first connection. `get_objects` leaves out what the collection has frozen.
    gc.unfreeze()
    held = []
    for partitions in ([0, 1, 2], [], [0], [0, 1, 2]):
        gc.collect()
        others = gc.get_objects()
        client = await s.proxy.client()
        for _ in range(2 if partitions else 0):
            client.send(produce_frame({"t": partitions}, records=batch(0, producer_id=-1)))
            await client.answer()
        await s.until_sessions(1)
        held.append(held_by(next(iter(s.proxy.listener._sessions)), others))
        client.close()
        await s.until_sessions()
    _, alone, with_one, with_three = held
    assert alone < MOST_FOR_A_CLIENT
    assert with_one < MOST_FOR_A_CLIENT + MOST_FOR_A_BROKER
    assert with_three < MOST_FOR_A_CLIENT + 3 * MOST_FOR_A_BROKER
