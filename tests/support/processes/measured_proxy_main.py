"""Run `kproxy` on an event loop that measures its own turns.

Run it with `python -m tests.support.processes.measured_proxy_main serve …`.
On SIGUSR1 it prints a line of JSON about all turns since the last such line: how many there were, how long the longest
one was, and the CPU time of all in seconds. That is the time of this thread alone, so that a busy machine does not
count.

The length of a turn is a ratio: its CPU time divided by the time that this thread needs, right after it, to decode a
produce request of 4,096 partitions. A neighbour on the same core doubles both, and so does a slower machine.
"""

from __future__ import annotations

import json
import sys
import time

from bench.measured_loop import MeasuredLoop, run_kproxy
from kproxy_codec.framing import parse_request_header
from kproxy_codec.produce import parse_produce
from tests.support.clients.raw_client import produce_frame

# Shorter turns are not compared with the reference; in seconds.
SHORT_S = 0.01
REFERENCE_ROUNDS = 5
REFERENCE_FRAME = memoryview(produce_frame({"t": range(4096)}, version=9))


def reference_s() -> float:
    """CPU time of decoding a produce request of 4,096 partitions, in seconds."""
    began = time.thread_time()
    for _ in range(REFERENCE_ROUNDS):
        parse_produce(REFERENCE_FRAME, parse_request_header(REFERENCE_FRAME))
    return (time.thread_time() - began) / REFERENCE_ROUNDS


class ComparedLoop(MeasuredLoop):
    """Also counts the turns, and compares the longest with the reference."""

    turns = 0
    cpu_s = 0.0

    def turned(self, took: float) -> None:
        self.turns += 1
        self.cpu_s += took
        if took > SHORT_S:
            super().turned(took / reference_s())

    def measured(self) -> str:
        said = {"turns": self.turns, "longest": self.longest, "cpu_s": self.cpu_s}
        self.turns, self.longest, self.cpu_s = 0, 0.0, 0.0
        return json.dumps(said)


def main() -> int:
    return run_kproxy(ComparedLoop)


if __name__ == "__main__":
    sys.exit(main())
