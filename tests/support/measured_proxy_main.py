"""`kproxy` on an event loop that measures its own turns: `python -m tests.support.measured_proxy_main serve …`.

Upon SIGUSR1 it prints a line of JSON about all turns since the last such line: how many there were, and the CPU time of
the longest one and of all, in seconds. That is the time of this thread alone, so that a busy machine does not count.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time

import uvloop

from kproxy.cli import main


class MeasuredLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop; a turn is all that it does between two looks at its sockets."""

    turns = 0
    longest_s = 0.0
    cpu_s = 0.0

    def _run_once(self) -> None:
        began = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        self.turns += 1
        took = time.thread_time() - began
        self.cpu_s += took
        self.longest_s = max(self.longest_s, took)

    def report(self) -> None:
        """Print what was measured, and begin anew."""
        said = {"turns": self.turns, "longest_s": self.longest_s, "cpu_s": self.cpu_s}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
        self.turns, self.longest_s, self.cpu_s = 0, 0.0, 0.0


def new_loop() -> MeasuredLoop:
    loop = MeasuredLoop()
    # The line is of whole turns: this handler is run by the loop, within the turn that comes after them.
    loop.add_signal_handler(signal.SIGUSR1, loop.report)
    return loop


if __name__ == "__main__":
    uvloop.new_event_loop = new_loop  # type: ignore[assignment]
    sys.exit(main())
