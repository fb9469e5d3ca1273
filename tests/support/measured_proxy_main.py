"""`kproxy` on an event loop that measures its own turns: `python -m tests.support.measured_proxy_main serve …`.

Upon SIGUSR1 it prints a line of JSON about all turns since the last such line: how many there were, how long the
longest one was, and the CPU time of all in seconds. That is the time of this thread alone, so that a busy machine does
not count.

How long a turn was is a ratio: its CPU time beside what this thread needs, right after it, to decode a produce request
of 4,096 partitions. A neighbour on the same core doubles both, and so does a slower machine.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time

import uvloop

from kproxy.cli import main
from kproxy_codec.framing import parse_request_header
from kproxy_codec.produce import parse_produce
from tests.support.raw_client import produce_frame

# Shorter turns are not measured beside the reference, in seconds.
SHORT_S = 0.01
REFERENCE_ROUNDS = 5
REFERENCE_FRAME = memoryview(produce_frame({"t": range(4096)}, version=9))


def reference_s() -> float:
    """CPU time of decoding a produce request of 4,096 partitions, in seconds."""
    began = time.thread_time()
    for _ in range(REFERENCE_ROUNDS):
        parse_produce(REFERENCE_FRAME, parse_request_header(REFERENCE_FRAME))
    return (time.thread_time() - began) / REFERENCE_ROUNDS


class MeasuredLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop; a turn is all that it does between two looks at its sockets."""

    turns = 0
    longest = 0.0
    cpu_s = 0.0

    def _run_once(self) -> None:
        began = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        self.turns += 1
        took = time.thread_time() - began
        self.cpu_s += took
        if took > SHORT_S:
            self.longest = max(self.longest, took / reference_s())

    def report(self) -> None:
        """Print what was measured, and begin anew."""
        said = {"turns": self.turns, "longest": self.longest, "cpu_s": self.cpu_s}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
        self.turns, self.longest, self.cpu_s = 0, 0.0, 0.0


def new_loop() -> MeasuredLoop:
    loop = MeasuredLoop()
    # The line is of whole turns: this handler is run by the loop, within the turn that comes after them.
    loop.add_signal_handler(signal.SIGUSR1, loop.report)
    return loop


if __name__ == "__main__":
    uvloop.new_event_loop = new_loop  # type: ignore[assignment]
    sys.exit(main())
