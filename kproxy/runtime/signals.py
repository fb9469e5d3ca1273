"""What signals ask of a process that serves."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from kproxy.runtime.tasks import cancel


class Signals:
    """`stop` is set by SIGTERM and SIGINT, `insists` by one more of them, `hangup` by SIGHUP.

    A terminal that is closed sends SIGHUP as well: then nobody wants this process any more.
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
    """Run `serve` until SIGTERM or SIGINT, upon which it is cancelled: what it does then is its way of stopping."""
    with Signals() as signals:
        serving = asyncio.create_task(serve(signals))
        stopping = asyncio.create_task(signals.stop.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        await cancel(stopping)
        if serving.done():
            serving.result()
        await cancel(serving)
