"""Limit the CPU time of work that has no bound of its own, such as matching an operator's pattern.

A timer of the process's CPU time interrupts the work by a signal. Python's `re` checks for signals while it matches,
but no thread or time-out of the event loop could stop it. Windows has no such timer, so there is no limit there.

Invariants
1. TookTooLong is raised only inside `within`: a signal that arrives later does nothing.
2. The handler of the signal stays installed after the first work: without it a late signal would end the process.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

_is_working = False


class TookTooLong(Exception):
    """The work exceeded its CPU time."""


def within(cpu_s: float, work: Callable[[], T]) -> T:
    """Run `work` on the main thread. Raises TookTooLong at any point of `work`, which must therefore change nothing."""
    global _is_working
    if sys.platform == "win32":
        return work()
    if signal.getsignal(signal.SIGVTALRM) is not _interrupt:
        signal.signal(signal.SIGVTALRM, _interrupt)
    try:
        _is_working = True
        signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
        return work()
    finally:
        _is_working = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _is_working
    if _is_working:
        _is_working = False
        raise TookTooLong
