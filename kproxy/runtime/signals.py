"""Handle the signals that stop a serving process or make it reload its configuration."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kproxy.runtime.tasks import cancel

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_signals(stop: Callable[[], None], numbers: Sequence[signal.Signals] = _STOP_SIGNALS) -> Iterator[None]:
    """Call `stop` on the running loop on SIGTERM and SIGINT, or other signals, on Windows too."""
    loop = asyncio.get_running_loop()
    try:
        for number in numbers:
            loop.add_signal_handler(number, stop)
    except NotImplementedError:  # On Windows the loop handles no signals, so a plain handler wakes it.
        for number in numbers:
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop))
        yield
        return
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


class Signals:
    """Events for the signals of a process that serves.

    The first SIGTERM or SIGINT sets `stop`, a second one `insists`. SIGHUP sets `hangup`, or `stop` if the terminal has
    been closed.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.insists = asyncio.Event()
        self.hangup = asyncio.Event()
        self._had_terminal = _has_terminal()

    def __enter__(self) -> Signals:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_stop)
        loop.add_signal_handler(signal.SIGINT, self._on_stop)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        # Held back since the start of the command (kproxy.runtime.interrupts).
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)

    def _on_stop(self) -> None:
        (self.insists if self.stop.is_set() else self.stop).set()

    def _on_hangup(self) -> None:
        if self._had_terminal and not _has_terminal():
            self.stop.set()
        else:
            self.hangup.set()


def _has_terminal() -> bool:
    try:
        return os.isatty(0)
    except OSError:
        return False


async def until_stopped(serve: Callable[[Signals], Coroutine[Any, Any, None]]) -> None:
    """Run `serve` until `Signals.stop` is set, then cancel it; `serve` stops in order when it is cancelled."""
    with Signals() as signals:
        serving = asyncio.create_task(serve(signals))
        stopping = asyncio.create_task(signals.stop.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        await cancel(stopping)
        if serving.done():
            serving.result()
        await cancel(serving)
