"""`python -m bench.measured_loop serve …`: kproxy on an event loop that measures its turns.

A turn is all work of the loop between two looks at its sockets; every other client waits for its end. uvloop does not
report how long its turns are, so this is asyncio's own loop. On SIGUSR1 the process prints the CPU time of the longest
turn since the last such line, in ms. It is the thread's CPU time, so other processes of a busy machine do not count.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time

import uvloop

from kproxy.__main__ import main


class MeasuredLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop, which measures its longest turn, in seconds of CPU time."""

    longest = 0.0

    def __init__(self) -> None:
        super().__init__()
        # The line covers whole turns: the loop runs this handler within the turn that follows them.
        self.add_signal_handler(signal.SIGUSR1, self._report)

    def _run_once(self) -> None:
        began = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        self.turned(time.thread_time() - began)

    def _report(self) -> None:
        sys.stdout.write(f"{self.measured()}\n")
        sys.stdout.flush()

    def turned(self, took: float) -> None:
        """Note a turn, in seconds of CPU time."""
        self.longest = max(self.longest, took)

    def measured(self) -> str:
        """Return the line about all turns since the last one."""
        line, self.longest = f"{self.longest * 1000:.3f}", 0.0
        return line


def run_kproxy(loop: type[MeasuredLoop]) -> int:
    """Run the command on this kind of loop instead of uvloop's."""
    uvloop.new_event_loop = loop  # type: ignore[assignment, misc]
    return main()


if __name__ == "__main__":
    sys.exit(run_kproxy(MeasuredLoop))
