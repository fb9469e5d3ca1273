"""The compiled plain path checks each index, size and view from Python: it raises, and touches no other memory.

Each call runs in a copy of this process, because a call without its check may end the interpreter.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Callable
from ctypes import Structure
from types import SimpleNamespace
from typing import Any

import pytest

from kproxy.observe.busiest import Use
from kproxy.observe.tally import BrokerCounts, Durations
from kproxy.plain import compiled as built
from kproxy.proxy.memory_budget import Budget
from tests.support.clients.raw_client import produce_frame

pytestmark = pytest.mark.skipif(built is None, reason="the plain path is not built")
compiled: Any = built

RAISED = 0
RETURNED = 3
OTHER_ERROR = 4


def chunk(*spans: int, record_count: int = 1) -> Any:
    return compiled.Chunk(1, 0, 0, array("q", spans), record_count, 1, 100)


def reader() -> Any:
    return compiled.FrameReader(1 << 20)


def arriving() -> Any:
    """A reader with the beginning of a frame."""
    begun = reader()
    begun.get_buffer()[:8] = bytes((0, 0, 0, 100, 1, 2, 3, 4))
    begun.buffer_updated(8)
    return begun


def frame() -> memoryview:
    return memoryview(produce_frame({"t": [0, 1]}))


def negative_read_size() -> None:
    lean = reader()
    lean.most_shared = -100
    lean.get_buffer()


def answer_reader(counts: Any) -> Any:
    return compiled.AnswerReader(1 << 20, None, 512, None, lambda: 0.0, counts)


def counted_in(numbers: Any) -> Any:
    """An outbox that adds times to `numbers`."""
    loop, times = asyncio.new_event_loop(), Durations((1.0,))
    times.numbers = numbers
    return compiled.TimedOutbox(loop, None, times, lambda: 0.0)


def swapped(kind: type[Structure]) -> Structure:
    """A structure with the same fields in reverse."""

    class Swapped(Structure):
        _fields_ = kind._fields_[::-1]

    return Swapped()


def miscounted() -> None:
    transport = SimpleNamespace(is_closing=lambda: False, write=lambda data: None)
    outbox = compiled.Outbox(asyncio.new_event_loop(), transport)
    outbox.put_one(b"x" * 10)
    outbox._bytes = 4_000
    outbox.flush()


def forwarded(size: int) -> None:
    class Ticket:
        expects_answer = False

    answer_reader(BrokerCounts((1.0,))).forward(Ticket(), memoryview(bytearray(size)))


CALLS: dict[str, Callable[[], object]] = {
    "spans of bytes": lambda: compiled.Chunk(1, 0, 0, array("b", [1] * 64), 1, 1, 100),
    "shortened to a negative number": lambda: chunk(0, 1, 5, 1).shorten(-(1 << 40)),
    "joined with none": lambda: compiled.join([], [], [None]),
    "intervals without ends": lambda: compiled.join(list(range(10_000)), [], []),
    "a read beyond the buffer": lambda: reader().buffer_updated(1 << 40),
    "a negative read": lambda: arriving().buffer_updated(-(1 << 40)),
    "a read beyond an own buffer": lambda: arriving().buffer_updated(1 << 40),
    "reads of a negative size": negative_read_size,
    "moved to a buffer that is too small": lambda: arriving().move_to(bytearray(1)),
    "an index of no view": lambda: compiled.index(b"abc"),
    "an index of a reversed view": lambda: compiled.index(frame()[::-1]),
    "a part of an unknown topic": lambda: compiled.part(frame(), [(1 << 30, [0])], 1),
    "a part of an unknown partition": lambda: compiled.part(frame(), [(0, [1 << 30])], 1),
    "a part of too many partitions": lambda: compiled.part(frame(), [(0, [0] * 100_000)], 1),
    "a part of a negative partition": lambda: compiled.part(frame(), [(0, [-1])], 1),
    "results of an unknown partition": lambda: compiled.results(frame(), [(0, [1 << 30])], memoryview(bytearray(64))),
    "results in no view": lambda: compiled.results(frame(), [(0, [0])], bytearray(64)),
    "a short request forwarded": lambda: forwarded(4),
    "a slot without an order": lambda: compiled.Slot(None, 1, 1, 0.0).fill([b""]),
    "a slot of another order": lambda: compiled.Slot(object(), 1, 1, 1.0),
    "more bytes counted than put": miscounted,
    "a connection without counts": lambda: answer_reader(SimpleNamespace()),
    "a connection with other counts": lambda: answer_reader(Budget(1)),
    "a histogram without an end": lambda: counted_in(array("d", [0.0, 1.0, 0.0])),
    "a histogram of integers": lambda: counted_in(array("q", [0, 1, 0])),
    "a histogram without numbers": lambda: counted_in(None),
    "votes in other fields": lambda: compiled.vote(Budget(1), [(0, 1)]),
    "votes in swapped fields": lambda: compiled.vote(swapped(Use), [(0, 1)]),
    "votes in bytes": lambda: compiled.vote(bytearray(56), [(0, 1)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_call_out_of_bounds_raises(name: str) -> None:
    child = os.fork()
    if not child:
        status = OTHER_ERROR
        try:
            CALLS[name]()
            status = RETURNED
        except (IndexError, OverflowError, TypeError, ValueError):
            status = RAISED
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == RAISED
