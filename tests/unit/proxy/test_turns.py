"""Steps are spread over turns of the event loop (kproxy.runtime.tasks)."""

from __future__ import annotations

import asyncio

import pytest

from kproxy.runtime.tasks import MOST_STEPS, TURN_S, Turns

STEPS = 3 * MOST_STEPS + 1


class Clock:
    """A clock that moves when a step takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def taken_by_turn(clock: Clock, step_s: float) -> list[list[int]]:
    """The number of steps in each turn if all are given at once and each takes `step_s`."""
    turns, taken = Turns(clock), list[int]()

    def step(number: int) -> None:
        clock.now += step_s
        taken.append(number)

    for number in range(STEPS):
        turns.take(lambda number=number: step(number))  # type: ignore[misc]
    by_turn = []
    while taken:
        by_turn.append(list(taken))
        taken.clear()
        await asyncio.sleep(0)
    return by_turn


@pytest.mark.parametrize(("step_s", "most"), [(0.0, MOST_STEPS), (TURN_S * 0.4, 3), (TURN_S * 100, 1)])
async def test_turns_keep_order_and_bounds(step_s: float, most: int) -> None:
    by_turn = await taken_by_turn(Clock(), step_s)
    assert by_turn[0] == [0]
    assert [number for turn in by_turn for number in turn] == list(range(STEPS))
    assert max(map(len, by_turn)) == most


async def test_failed_step_keeps_others_turn() -> None:
    loop = asyncio.get_running_loop()
    reported: list[object] = []
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    turns, taken = Turns(lambda: 0.0), list[int]()
    turns.take(lambda: None)
    turns.take(lambda: 1 // 0)
    turns.take(lambda: taken.append(1))
    await turns.all_taken()
    assert taken == [1]
    assert [type(error) for error in reported] == [ZeroDivisionError]


async def test_first_failing_step_raises_at_its_caller() -> None:
    turns, taken = Turns(lambda: 0.0), list[int]()
    with pytest.raises(ZeroDivisionError):
        turns.take(lambda: 1 // 0)
    turns.take(lambda: taken.append(1))
    await turns.all_taken()
    assert taken == [1]


async def test_wait_covers_steps_that_steps_add() -> None:
    turns, taken = Turns(lambda: 0.0), list[int]()

    def first() -> None:
        turns.take(lambda: taken.append(2))
        taken.append(1)

    turns.take(lambda: None)
    turns.take(first)
    await turns.all_taken()
    assert taken == [1, 2]
