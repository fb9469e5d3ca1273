"""Run work that waits for a disk in threads, so that a disk that hangs for ever blocks nothing else.

A disk that hangs holds at most the threads of the pool; further work waits, and is cancelled at shutdown. The threads
are daemons: unlike those of a ThreadPoolExecutor, they do not keep the process from ending.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class DiskThreads(Executor):
    """Up to `count` threads, started on demand."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = 0
        self._unfinished = 0
        self._is_shut_down = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run `fn` in a thread. Raises RuntimeError after `shutdown`."""
        future: Future[Any] = Future()
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError(f"the {self._name} threads are shut down")
            self._waiting.put((future, lambda: fn(*args, **kwargs)))
            self._unfinished += 1
            if self._threads < min(self._unfinished, self._count):
                self._threads += 1
                threading.Thread(target=self._work, name=f"{self._name}-{self._threads}", daemon=True).start()
        return future

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                try:
                    result = work()
                except BaseException as error:  # noqa: BLE001 - whoever waits for the future gets it
                    future.set_exception(error)
                else:
                    future.set_result(result)
            with self._lock:
                self._unfinished -= 1
            # Otherwise these references would keep a closed log until the next work.
            del item, future, work

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:
        """Cancel work that has not begun. Never waits, whatever the arguments."""
        with self._lock:
            self._is_shut_down = True
            try:
                while (item := self._waiting.get_nowait()) is not None:
                    item[0].cancel()
            except queue.Empty:
                pass
            for _ in range(self._threads):
                self._waiting.put(None)
