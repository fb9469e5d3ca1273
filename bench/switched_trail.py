"""`python -m bench.switched_trail serve …`: run kproxy, and tell its trail when to look and which topics to leave out.

Each line on stdin is a list of topics separated by commas, or `look`. After the first, later connections' writes
to these topics are not noted. `look` is one look, as if half a second had passed since the last one. Each line is
answered by one on stdout: the CPU nanoseconds of the look, and how many of them closed rows.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from kproxy.__main__ import main
from kproxy.trail.trail import LOOK_S, Trail

_Result = TypeVar("_Result")
_closing_ns = 0


def _timed(work: Callable[..., _Result]) -> Callable[..., _Result]:
    def timed(*given: Any) -> _Result:
        global _closing_ns
        before = time.thread_time_ns()
        result = work(*given)
        _closing_ns += time.thread_time_ns() - before
        return result

    return timed


async def _obey(trail: Trail) -> None:
    """Execute the lines on stdin; this replaces `Trail.keep_looking`."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    now = trail._clock()
    trail._clock = lambda: now
    while line := (await lines.readline()).decode().strip():
        closed_before = _closing_ns
        before = time.thread_time_ns()
        if line == "look":
            now += LOOK_S
            trail.look()
        else:
            trail.left_out = frozenset(line.encode().split(b","))
        sys.stdout.write(f"{time.thread_time_ns() - before} {_closing_ns - closed_before}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    Trail.keep_looking = _obey  # type: ignore[assignment, method-assign]
    Trail._close_row = _timed(Trail._close_row)  # type: ignore[method-assign]
    main()
