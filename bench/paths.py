"""`make bench SECTION=paths`: the cost of a request that does not take the plain path; half a minute.

Connections send batches of 1 KiB, IN_FLIGHT requests at a time. One connection:

  plain             all to one partition, whose route is proven after the first: the others are compared with this
  first batches     each to another partition, so that its route is new: it is probed, and proven by its answer

REFUSED_CONNECTIONS at once, because a refused batch waits for its back-off, and a process that rests between
requests pays for waking up:

  refused, alone    by turns to more partitions than are in flight; the broker refuses each tenth batch once with
                    NOT_LEADER_OR_FOLLOWER (`bench.refusing_broker`), so that nothing is under way behind it
  refused, behind   all to one partition; what is under way behind the refused batch is refused too, and sent again

The refused batches are an idempotent producer's. Every answer must be a success, because a proxy that passes a
refusal on does not do the measured work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path

from rich.console import Console

from bench.load import (
    IN_FLIGHT,
    VERSION,
    Connection,
    Frames,
    Load,
    ProducerFrames,
    Shape,
    produce_frame,
)
from bench.processes import scratch, started, table_of
from bench.quick import BROKERS, OWNERS, UNITS, cells, per_request, serve, take_turns, write_table
from kproxy_codec.produce import PRODUCE_API

ROUNDS = 5
FIRST_PARTITIONS = 2000
TURNS = 7
REFUSED_CONNECTIONS = 64
REFUSED_REQUESTS = 160
PLAIN_REQUESTS = 10_000
FIRST, REFUSED = b"first", b"refused"
REFUSING = BROKERS + 1
ALL_OWNERS: Mapping[bytes, Sequence[int]] = {
    **OWNERS,
    FIRST: [index % BROKERS + 1 for index in range(FIRST_PARTITIONS)],
    REFUSED: [REFUSING] * TURNS,
}
SHAPE = Shape("", 1, 1 << 10, 0)
_FIRSTS = [produce_frame(SHAPE, index, topic=FIRST) for index in range(FIRST_PARTITIONS)]


class Successes(Connection):
    """A connection that fails at the first answer that is not a success."""

    def _take(self, frames: Sequence[memoryview]) -> None:
        for frame in frames:
            codes = [code for topic in PRODUCE_API.parse_response(frame, VERSION).topics for code in topic.error_codes]
            if any(codes) and not self.done.done():
                self.done.set_exception(SystemExit(f"the proxy has answered with the error codes {codes}"))
                self._transport.abort()
                return
        super()._take(frames)


def first_batches() -> Frames:
    """Return one request for each partition."""
    return iter(_FIRSTS).__next__


def refused_alone() -> Frames:
    """Return requests to each of TURNS partitions in rotation, as idempotent producers send them."""
    following = cycle([ProducerFrames(SHAPE, index, REFUSED) for index in range(TURNS)])
    return lambda: next(following)()


def path_loads() -> list[Load]:
    """Return the rows, for proxies in front of `path_table`."""
    plain = produce_frame(SHAPE)

    def row(name: str, frames: Callable[[], Frames], requests: int, connections: int) -> Load:
        return Load(name, frames, requests, len(plain), connections, Successes)

    return [
        row("plain", lambda: plain, PLAIN_REQUESTS, 1),
        row("first batches", first_batches, FIRST_PARTITIONS, 1),
        row("refused, alone", refused_alone, REFUSED_REQUESTS, REFUSED_CONNECTIONS),
        row("refused, behind", lambda: ProducerFrames(SHAPE, topic=REFUSED), REFUSED_REQUESTS, REFUSED_CONNECTIONS),
    ]


@contextlib.contextmanager
def path_table(directory: Path) -> Iterator[Path]:
    """Run null brokers and a refusing one; yield a static table of them and all topics."""
    with contextlib.ExitStack() as stack:
        ports = started(stack, *["null_broker"] * BROKERS, "refusing_broker")
        yield write_table(ports, directory, ALL_OWNERS)


def paths(console: Console) -> None:
    """Measure, and print the table."""
    with scratch() as (stack, directory):
        proxy = stack.enter_context(serve(stack.enter_context(path_table(directory))))
        title = f"CPU of the proxy process; {IN_FLIGHT} requests in flight"
        table = table_of(title, ["path"], ["connections", *UNITS, "µs / plain"])
        plain = 0.0
        for load in path_loads():
            cost = take_turns(load, {"kproxy": proxy}, ROUNDS)["kproxy"]
            cpu = per_request(load, cost)[0]
            plain = plain or cpu
            table.add_row(load.name, str(load.connections), *cells(load, cost), f"{cpu / plain:.2f}")
        console.print(table)
