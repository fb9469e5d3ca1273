"""Wait until a condition holds: the only such helper, for tests that block and for coroutines.

The time limit is for hangs and much longer than a busy machine needs. A wait that times out fails the test and reports
the missing condition; `what` may be a function, which is called then, such as one for the stderr of a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 60.0
What = str | Callable[[], object]


def wait_for(condition: Callable[[], Any], timeout_s: float = PATIENCE_S, what: What = "") -> Any:
    """Poll, blocking, until `condition()` is true; return its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, _in_vain(timeout_s, condition, what)
        time.sleep(0.02)
    return value


async def eventually(
    condition: Callable[[], Any],
    what: What = "",
    *,
    timeout_s: float = PATIENCE_S,
    ignored: tuple[type[Exception], ...] = (),
) -> Any:
    """Poll until `condition()`, awaited if it is a coroutine's, is true; return its value.

    An exception in `ignored` counts as not true.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(*ignored):
            value = condition()
            if inspect.isawaitable(value):
                value = await value
            if value:
                return value
        assert time.monotonic() < deadline, _in_vain(timeout_s, condition, what)
        await asyncio.sleep(0.01)


def _in_vain(timeout_s: float, condition: Callable[[], Any], what: What) -> str:
    said = what() if callable(what) else what
    return f"not within {timeout_s} s: {said or condition}"
