"""Share the event loop; cancel asyncio tasks, and wait for work that depends on them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

# In one turn of the event loop, requests or answers of one client are taken for this long, in seconds, and one more.
TURN_S = 0.0005
# Steps that `Turns` takes in one turn of the event loop at most: what they schedule is not timed.
MOST_STEPS = 8

_Result = TypeVar("_Result")


async def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def unless_failed(work: Awaitable[_Result], running: Sequence[asyncio.Task[None]]) -> _Result:
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
    """Spread steps over turns of the event loop: those of a thousand connections that end at once hold nobody up.

    `clock` is in seconds. There is at most a handful of steps for each connection, which bounds those that wait.

    Invariants
    1. Steps are taken in the order in which they were handed in.
    2. A step is taken at once if none was in this turn; otherwise in a later one, TURN_S and MOST_STEPS to a turn.
    3. An error of a step does not keep the others from their turn.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: deque[Callable[[], object]] = deque()
        self._is_taken = False

    def take(self, step: Callable[[], object]) -> None:
        """Take this step in its turn. Time may have passed by then: the step checks whether it is still due."""
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
        """Wait until no step waits."""
        while self._waiting:
            passed = asyncio.Event()
            self._waiting.append(passed.set)
            await passed.wait()
