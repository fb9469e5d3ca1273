"""Outboxes gather the messages of one step of the event loop, however many they are."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterable
from types import ModuleType
from typing import Any, cast

import pytest

from kproxy.observe.tally import Durations
from kproxy.proxy import outbox as imported
from kproxy.proxy.outbox import FLUSH_BYTES, LAST_PART_BYTES, PART_BYTES, Outbox
from tests.support.twins import in_python

OUTBOXES = 1000
MESSAGE = bytes(100)
# Much less than a large block for each outbox.
MOST_BYTES = OUTBOXES * (20 << 10) + (16 << 20)


class Transport:
    """The part of a transport that an outbox needs."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def is_closing(self) -> bool:
        return False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return 0

    def writelines(self, buffers: Iterable[Any]) -> None:
        self.written.append(b"".join(buffers))


class ClientMemory:
    """What a paced outbox needs of `ClientMemory`."""

    def leave_untaken(self, nbytes: int) -> None:
        pass

    def has_room(self, buffer: Any) -> bool:
        return True


@pytest.mark.parametrize("messages", [1, 200])
async def test_outboxes_write_once_a_step_with_little_memory(messages: int) -> None:
    loop = asyncio.get_running_loop()
    transports = [Transport() for _ in range(OUTBOXES if messages == 1 else 100)]
    outboxes = [Outbox(loop, cast(asyncio.Transport, each)) for each in transports]
    for _ in range(2):
        tracemalloc.start()
        try:
            for number, outbox in enumerate(outboxes):
                for _ in range(messages):
                    outbox.put_one(MESSAGE[:-4] + number.to_bytes(4, "big"))
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert held < MOST_BYTES
        await asyncio.sleep(0)
        for number, transport in enumerate(transports):
            assert transport.written == [(MESSAGE[:-4] + number.to_bytes(4, "big")) * messages]
            transport.written.clear()


@pytest.fixture(params=["imported", "python"])
def twin(request: pytest.FixtureRequest) -> ModuleType:
    """The module in use, and one with its classes in Python."""
    if request.param == "imported":
        return imported
    return in_python(imported)


@pytest.mark.parametrize("paced", [False, True])
@pytest.mark.parametrize("size", [100, 5_000, 300_000])
async def test_outbox_writes_beyond_flush_bytes_at_once(twin: ModuleType, paced: bool, size: int) -> None:
    loop, transport = asyncio.get_running_loop(), Transport()
    outbox = paced_outbox(twin, transport) if paced else twin.Outbox(loop, transport)
    for put in range(1, 2 * FLUSH_BYTES // size + 3):
        outbox.put_one(bytes(size))
        written = sum(map(len, transport.written))
        assert written == outbox.written_bytes
        # No turn of the event loop has passed.
        assert put * size - written <= FLUSH_BYTES
    await asyncio.sleep(0)
    assert sum(map(len, transport.written)) == put * size


def paced_outbox(twin: ModuleType, transport: Transport, writing: Durations | None = None, at: Any = None) -> Any:
    loop = asyncio.get_running_loop()
    times = writing or Durations((1.0,))
    return twin.PacedOutbox(loop, transport, ClientMemory(), times, at or (lambda: 0.0))


@pytest.mark.parametrize("buffers", [[(1 << 20) + 74], [74, 1 << 20, 0], [0] * 50 + [600_000] + [0] * 50])
async def test_large_answer_ends_with_no_small_write(twin: ModuleType, buffers: list[int]) -> None:
    transport = Transport()
    outbox = paced_outbox(twin, transport)
    outbox.put([bytes(size) for size in buffers])
    await asyncio.sleep(0)
    sizes = [len(each) for each in transport.written if each]
    assert sum(sizes) == sum(buffers)
    assert max(sizes) <= LAST_PART_BYTES
    assert min(sizes) > LAST_PART_BYTES - PART_BYTES


@pytest.mark.parametrize("first", [memoryview(b""), b"head", bytes(9_000)])
async def test_empty_view_costs_no_other_message(twin: ModuleType, first: bytes | memoryview) -> None:
    transport = Transport()
    outbox = twin.Outbox(asyncio.get_running_loop(), transport)
    messages = [first, memoryview(b""), b"next", memoryview(bytearray(4))[4:], b"last"]
    outbox.put(messages)
    await asyncio.sleep(0)
    assert b"".join(transport.written) == b"".join(messages)


async def test_answers_are_timed_until_they_are_written(twin: ModuleType) -> None:
    """Those of a client that does not read wait here, each from when it was put, but for more than MOST_RUNS times."""
    now, writing, transport = 0.0, Durations((0.5, 1.5, 2.5, 3.5, 4.5, 6.5)), Transport()
    outbox = paced_outbox(twin, transport, writing, lambda: now)
    outbox.put_one(b"a")
    outbox.add_answers(1, now)
    await asyncio.sleep(0)
    assert (writing.buckets, writing.seconds) == ([1, 0, 0, 0, 0, 0, 0], 0.0)
    outbox.pause()
    for now in (1.0, 2.0, 3.0, 4.0, 5.0):
        outbox.put_one(b"b")
        outbox.add_answers(2, now)
        await asyncio.sleep(0)
    assert sum(writing.buckets) == 1
    now = 7.0
    outbox.resume()
    # The last two times count as one: waits of 6, 5, 4 and 3 seconds.
    assert (writing.buckets, writing.seconds) == ([1, 0, 0, 4, 2, 4, 0], 2 * (6 + 5 + 4 + 3 + 3))
    outbox.pause()
    outbox.put_one(b"c")
    outbox.add_answers(1, now)
    outbox.discard()
    outbox.resume()
    outbox.put_one(b"d")
    await asyncio.sleep(0)
    assert sum(writing.buckets) == 11
