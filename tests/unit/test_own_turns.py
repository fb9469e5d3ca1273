"""Whose turn it is: one at a time for each name, in order, and nothing is left behind."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from kproxy.fencing.turns import Turns


async def test_one_at_a_time_for_each_name_in_the_order_in_which_they_came() -> None:
    turns, begun, ended = Turns(), asyncio.Event(), []
    under_way = {"a": 0, "b": 0}

    async def take(name: str, number: int) -> None:
        async with turns.of(name):
            under_way[name] += 1
            assert under_way[name] == 1
            await begun.wait()
            under_way[name] -= 1
            ended.append((name, number))

    tasks = [asyncio.create_task(take(name, number)) for number in range(5) for name in ("a", "b")]
    await asyncio.sleep(0)
    assert under_way == {"a": 1, "b": 1}
    assert len(turns) == 2
    begun.set()
    await asyncio.gather(*tasks)
    assert [number for name, number in ended if name == "a"] == list(range(5))
    assert len(turns) == 0


async def test_who_gives_up_or_fails_holds_up_nobody() -> None:
    turns, order = Turns(), []

    async def take(name: str, failure: BaseException | None = None) -> None:
        async with turns.of("one"):
            await asyncio.sleep(0)
            order.append(name)
            if failure is not None:
                raise failure

    first = asyncio.create_task(take("first", ValueError()))
    waiting, last = asyncio.create_task(take("never")), asyncio.create_task(take("last"))
    await asyncio.sleep(0)
    waiting.cancel()
    with suppress(ValueError):
        await first
    await last
    assert order == ["first", "last"]
    assert len(turns) == 0
