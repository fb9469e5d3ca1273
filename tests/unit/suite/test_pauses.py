"""Tests that fail because of a pause of this process are run again, and others are not."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.processes.running_proxy import ATTEMPTS, STOOD_STILL_S, both_loops, in_one_go


def test_failure_during_a_pause_is_rerun() -> None:
    runs = 0

    @both_loops
    @in_one_go
    async def is_in_time() -> None:
        nonlocal runs
        runs += 1
        began = time.monotonic()
        await asyncio.sleep(0)
        if runs < ATTEMPTS:
            time.sleep(2 * STOOD_STILL_S)
        assert time.monotonic() - began < STOOD_STILL_S

    is_in_time(asyncio.SelectorEventLoop)
    assert runs == ATTEMPTS


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
    # Of a busy machine this process may get nothing for a while by itself.
    assert (runs == ATTEMPTS) if pause_s else (runs <= ATTEMPTS)


def test_other_tests_are_run_once() -> None:
    runs = 0

    async def fails() -> None:
        nonlocal runs
        runs += 1
        time.sleep(2 * STOOD_STILL_S)
        raise AssertionError("as it should")

    with pytest.raises(AssertionError, match="as it should"):
        both_loops(fails)(asyncio.SelectorEventLoop)
    assert runs == 1
