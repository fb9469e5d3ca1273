"""What the broker is told by its operating system: signals."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on the running loop upon SIGTERM and SIGINT."""
    loop = asyncio.get_running_loop()
    try:
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, stop)
    except NotImplementedError:  # Windows: the loop cannot be told by the system, so a plain handler wakes it
        for number in _STOP_SIGNALS:
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop))
        yield
        return
    try:
        yield
    finally:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)
