"""What every sink is, and how those that block are kept from the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

_Result = TypeVar("_Result")


class SinkFailed(Exception):
    """Some of the pages may not be durable; the text says why. They are to be written again."""


class Appetite(NamedTuple):
    """How a sink likes its pages: as many as have come, or `seconds` of them, but not more than `bytes` at once."""

    bytes: int
    seconds: float = 0.0


class Sink(Protocol):
    """Takes pages, one call at a time."""

    appetite: Appetite

    async def write(self, pages: Sequence[bytes]) -> None:
        """Returns when they are durable. Raises SinkFailed, after which the next call begins anew."""
        ...

    async def close(self) -> None:
        """Let go of everything; a write may have been cancelled before, and still be under way on its thread."""
        ...


async def on_thread(work: Callable[[], _Result]) -> _Result:
    """What blocking `work` comes to, on a thread of its own that keeps no process from ending.

    The threads of an executor are waited for when the interpreter ends, and a disk or a broker may hang for longer than
    anybody wants to wait. Pages are written some times a minute: a thread for each costs nothing.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Result] = loop.create_future()

    def settle(result: _Result | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # it is one where there is no error

    def run() -> None:
        result: _Result | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            failure = error
        # Nobody waits any more where the loop has been closed.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="audit-sink", daemon=True).start()
    return await done
