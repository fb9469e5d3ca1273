"""A test that may be repeated after a pause of this process still fails if it fails each time."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.processes.running_proxy import ATTEMPTS, STOOD_STILL_S, both_loops, in_one_go


@pytest.mark.parametrize("pause_s", [0.0, 2 * STOOD_STILL_S], ids=["at once", "after a pause each time"])
def test_failure_without_a_pause_counts(pause_s: float) -> None:
    runs = 0

    @both_loops
    @in_one_go
    async def fails() -> None:
        nonlocal runs
        runs += 1
        time.sleep(pause_s)
        raise AssertionError("as it should")

    with pytest.raises(AssertionError, match="as it should"):
        fails(asyncio.SelectorEventLoop)
    # On a busy machine this process may get no time for a while.
    assert (runs == ATTEMPTS) if pause_s else (runs <= ATTEMPTS)
