"""Share the event loop; cancel asyncio tasks, and wait for work that depends on them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

# In one turn of the event loop, requests or answers of one client are taken for this long, in seconds, and one more.
TURN_S = 0.0005

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
