"""`python -m bench.measured_loop serve …`: kproxy on an event loop that measures its turns.

A turn is all that the loop does between two looks at its sockets: every other client waits for its end. uvloop does not
tell how long its turns are, so this is asyncio's own loop. Upon SIGUSR1 the process prints the CPU time of the longest
turn since the last such line, in ms: the thread's CPU time, so that other processes of a busy machine do not count.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time

import uvloop

from kproxy.__main__ import main


class MeasuredLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop, and its longest turn so far in seconds of CPU time."""

    longest = 0.0

    def _run_once(self) -> None:
        began = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        self.longest = max(self.longest, time.thread_time() - began)

    def report(self) -> None:
        """Print the longest turn, and begin anew."""
        sys.stdout.write(f"{self.longest * 1000:.3f}\n")
        sys.stdout.flush()
        self.longest = 0.0


def new_loop() -> MeasuredLoop:
    loop = MeasuredLoop()
    loop.add_signal_handler(signal.SIGUSR1, loop.report)
    return loop


if __name__ == "__main__":
    uvloop.new_event_loop = new_loop  # type: ignore[assignment]
    sys.exit(main())
