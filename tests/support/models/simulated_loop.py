"""Simulate an event loop and its clock: a test moves the time, and callbacks run in a defined order.

Each simulated process has one. A stopped process is a loop that nobody runs; a killed one is a loop that is never run
again. Work that product code hands to a thread is done at once, in the caller's step.

Invariants
1. Callbacks run in the order in which they became ready, timers by their time and then in the order they were set.
2. `run_ready` ends: a callback that never stops making itself ready is an error, not a hang.
3. Loops nest: one may be run within a callback of another, as others continue while a process is stopped in a call.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from itertools import count
from typing import Any

# Far more callbacks than any simulated process runs between two waits.
MOST_CALLBACKS = 20_000


class NeverRests(AssertionError):
    """A callback makes itself ready again without end."""


class SimulatedLoop(asyncio.AbstractEventLoop):
    """The part of asyncio's loop that code without sockets needs. `clock` gives this process's time in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._running = False
        self.errors: list[dict[str, Any]] = []

    # Driving it

    def run_ready(self) -> None:
        """Run everything that can run at the present time."""
        for _ in range(MOST_CALLBACKS):
            self._collect_due()
            if not self._ready:
                return
            handle = self._ready.popleft()
            if not handle.cancelled():
                self._run(handle._run)
        raise NeverRests(f"a simulated process does not come to rest: {self._ready[0]!r}")

    def _run(self, callback: Callable[[], object]) -> None:
        outer, self._running = events._get_running_loop(), True
        events._set_running_loop(self)
        try:
            callback()
        finally:
            self._running = False
            events._set_running_loop(outer)

    def _collect_due(self) -> None:
        now = self.time()
        while self._timers and (self._timers[0][0] <= now or self._timers[0][2].cancelled()):
            handle = heapq.heappop(self._timers)[2]
            if not handle.cancelled():
                self._ready.append(handle)

    @property
    def next_timer(self) -> float | None:
        """The time of its next work on this loop's clock; None for never."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def finish(self) -> None:
        """End every task, so that none is left to the garbage collector."""
        for _ in range(10):
            pending = [task for task in self._tasks if not task.done()]
            if not pending:
                return
            for task in pending:
                task.cancel()
            self.run_ready()
        raise AssertionError(f"tasks that do not end: {pending}")

    # Methods that asyncio requires of a loop

    def time(self) -> float:
        return self._clock()

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: cancelled timers are skipped when their time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        task = asyncio.Task(coro, loop=self, **options)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the caller gets it
            done.set_exception(error)
        return done

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)
