"""Handshakes begin in order, and leave the event loop most of its time."""

from __future__ import annotations

import asyncio
import time

from kproxy.security.entrance import MOST_STEP_S, PACE, _Pace


async def test_handshakes_begin_in_order_and_each_waits_for_the_work_of_the_last() -> None:
    pace, began, order = _Pace(), time.monotonic(), []

    async def handshake(number: int) -> None:
        await pace.turn()
        order.append(number)
        pace.worked(MOST_STEP_S)

    await asyncio.gather(*(handshake(number) for number in range(10)))
    assert order == list(range(10))
    assert time.monotonic() - began >= 9 * PACE * MOST_STEP_S


async def test_an_interrupted_step_delays_the_next_handshake_by_a_bounded_time() -> None:
    pace = _Pace()
    pace.worked(60.0)
    async with asyncio.timeout(10.0):
        await pace.turn()


async def test_a_cancelled_wait_leaves_the_turn_to_the_next() -> None:
    pace = _Pace()
    pace.worked(MOST_STEP_S)
    waiting = [asyncio.create_task(pace.turn()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    async with asyncio.timeout(10.0):
        await asyncio.gather(*waiting[1:])
    assert waiting[0].cancelled()
