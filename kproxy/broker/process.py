"""What the broker asks of its operating system: signals and open files."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

if sys.platform != "win32":
    import resource

WANTED_FILES = 65_536
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_logger = structlog.get_logger(__name__)


def allow_many_files() -> None:
    """Raise the soft limit on open files: each segment and each connection is one, and 256 or 1024 is soon reached."""
    if sys.platform != "win32":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            return
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            _logger.warning("limit on open files not raised", limit=soft, wanted=wanted, error=str(error))


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
