"""Divide the event loop's time among steps, cancel asyncio tasks, and wait for work that depends on tasks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

# In one turn of the event loop, one client's requests or answers are handled for this time, in seconds, plus one more.
TURN_S = 0.0005
# The most steps that `Turns` runs in one turn of the event loop, because TURN_S does not cover the work they schedule.
MOST_STEPS = 8

_Result = TypeVar("_Result")
_Thing = TypeVar("_Thing")


async def in_portions(things: Iterable[_Thing], clock: Callable[[], float]) -> AsyncIterator[_Thing]:
    """Yield things for TURN_S in each turn of the event loop."""
    began = clock()
    for thing in things:
        if clock() - began > TURN_S:
            await asyncio.sleep(0)
            began = clock()
        yield thing


async def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def unless_failed(work: Awaitable[_Result], running: Sequence[asyncio.Future[Any]]) -> _Result:
    """Return the result of `work`.

    If a `running` task fails, end `work` and raise that error itself, not in a group.
    """
    working = asyncio.ensure_future(work)
    try:
        ending = {working, *running}
        while not working.done():
            done, ending = await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {working}:
                task.result()
        return working.result()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def in_time(work: Awaitable[None], running: asyncio.Task[None], seconds: float) -> bool:
    """Return whether `work`, which waits for the `running` task, ends in time.

    Raise the error of that task.
    """
    try:
        async with asyncio.timeout(seconds):
            await unless_failed(work, [running])
    except TimeoutError:
        return False
    return True


class Turns:
    """Spread steps over turns of the event loop, so that a thousand connections that end together delay no other.

    `clock` is in seconds. Each connection has only a few steps, which bounds the number that waits.

    Invariants
    1. Steps run in the order of the calls of `take`.
    2. The first step of a turn runs at once. The others run in later turns, for at most TURN_S and MOST_STEPS per turn.
    3. An error in a step does not prevent the other steps.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: deque[Callable[[], object]] = deque()
        self._is_taken = False

    def take(self, step: Callable[[], object]) -> None:
        """Run the step now or in a later turn: the step itself checks whether it is still due."""
        if self._is_taken:
            self._waiting.append(step)
            return
        self._is_taken = True
        asyncio.get_running_loop().call_soon(self._go_on)
        step()

    def _go_on(self) -> None:
        began = self._clock()
        try:
            for _ in range(MOST_STEPS):
                if not self._waiting or self._clock() - began > TURN_S:
                    break
                self._waiting.popleft()()
        finally:
            self._is_taken = bool(self._waiting)
            if self._is_taken:
                asyncio.get_running_loop().call_soon(self._go_on)

    async def all_taken(self) -> None:
        """Wait until all steps have run."""
        while self._waiting:
            passed = asyncio.Event()
            self._waiting.append(passed.set)
            await passed.wait()
