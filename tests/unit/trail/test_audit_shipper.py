"""Offered rows leave in order and at least once, or are dropped whole and counted; no caller ever waits."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random

import pytest

from kproxy.trail.shipper import PAGE_OVERHEAD_BYTES, Shipper
from kproxy.trail.sink import BatchPreference, SinkFailed
from tests.support.waiting import eventually

PAGE = bytes(1000)
COST = len(PAGE) + PAGE_OVERHEAD_BYTES


class Scripted:
    """A sink that a test can hold up or make fail."""

    def __init__(self, preference: BatchPreference = BatchPreference(10 * COST)) -> None:  # noqa: B008 - it is a constant
        self.preference = preference
        self.tried: list[list[bytes]] = []
        self.taken: list[bytes] = []
        self.failures: list[Exception] = []
        self.open = asyncio.Event()
        self.open.set()
        self.closed = False

    async def write(self, pages: Sequence[bytes]) -> None:
        self.tried.append(list(pages))
        await self.open.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.taken += pages

    async def close(self) -> None:
        self.closed = True


@asynccontextmanager
async def shipping(sink: Scripted, max_bytes: int = 100 * COST) -> AsyncIterator[tuple[Shipper, Counter[str]]]:
    counters = Counter[str]()
    shipper = Shipper(sink, max_bytes=max_bytes, counters=counters, clock=time.monotonic, random=Random(1))
    shipper.start()
    try:
        yield shipper, counters
    finally:
        await shipper.close(0.0)


def page(number: int) -> bytes:
    return b"%1000d" % number


async def test_pages_leave_in_order_and_are_retried() -> None:
    sink = Scripted()
    sink.failures = [SinkFailed("no"), SinkFailed("no"), ValueError("nobody thought of this")]
    async with shipping(sink) as (shipper, counters):
        for number in range(20):
            shipper.offer(page(number), 2 * number, 2 * number + 1)
        await eventually(lambda: len(sink.taken) == 20)
        assert sink.taken == [page(number) for number in range(20)]
        assert counters == {"audit.rows_shipped": 40, "audit.sink_failures": 3}
        assert shipper.vitals.waiting_bytes == 0
        # Failed rows were offered again unchanged, at most as many at once as the sink takes.
        assert [len(tried) for tried in sink.tried[-2:]] == [10, 10]


async def test_pages_beyond_the_bound_are_dropped_whole() -> None:
    sink = Scripted()
    sink.open.clear()
    async with shipping(sink, max_bytes=5 * COST + 10) as (shipper, counters):
        for number in range(8):
            shipper.offer(page(number), 10 * number, 10 * number + 9)
            assert shipper.vitals.waiting_bytes <= 5 * COST + 10
        assert counters == {"audit.pages_dropped": 3, "audit.rows_dropped": 30}
        sink.open.set()
        await eventually(lambda: len(sink.taken) == 5)
        shipper.offer(page(8), 80, 89)
        await eventually(lambda: len(sink.taken) == 6)
        assert sink.taken == [page(number) for number in (0, 1, 2, 3, 4, 8)]


@pytest.mark.parametrize("number", [100, 100_000])
async def test_hung_sink_does_not_delay_offers(number: int) -> None:
    """Offers return at once, whatever their number, and the shipper closes in time too."""
    sink = Scripted()
    sink.open.clear()
    async with shipping(sink, max_bytes=50 * COST) as (shipper, counters):
        for n in range(number):
            shipper.offer(PAGE, n, n)
        assert shipper.vitals.waiting_bytes <= 50 * COST
        began = time.monotonic()
        await shipper.close(0.2)
        assert 0.19 <= time.monotonic() - began < 20
        assert sink.closed
        assert counters["audit.rows_dropped"] == number
        shipper.offer(PAGE, number, number)
        assert shipper.vitals.waiting_bytes == 0


async def test_first_page_is_not_held_back() -> None:
    sink = Scripted(BatchPreference(4 * COST, seconds=600))
    async with shipping(sink) as (shipper, _):
        shipper.offer(page(0), 0, 0)
        await eventually(lambda: sink.taken == [page(0)])


@asynccontextmanager
async def under_way(sink: Scripted) -> AsyncIterator[Shipper]:
    """A running shipper that has shipped a first message, which the sink has forgotten."""
    async with shipping(sink) as (shipper, _):
        shipper.offer(PAGE, 0, 0)
        await eventually(lambda: len(sink.taken) == 1)
        sink.tried.clear()
        sink.taken.clear()
        yield shipper


async def test_pages_are_gathered_for_a_batching_sink() -> None:
    sink = Scripted(BatchPreference(4 * COST, seconds=60))
    async with under_way(sink) as shipper:
        for number in range(3):
            shipper.offer(page(number), number, number)
        await asyncio.sleep(0.2)
        assert sink.tried == [], "it was to wait for more"
        for number in range(3, 6):
            shipper.offer(page(number), number, number)
        await eventually(lambda: len(sink.taken) == 4)
        # The rest is sent, because the trail closes.
        await shipper.close(60)
        assert [len(tried) for tried in sink.tried] == [4, 2]
        assert sink.taken == [page(number) for number in range(6)]


async def test_pages_are_gathered_no_longer_than_allowed() -> None:
    sink = Scripted(BatchPreference(100 * COST, seconds=2))
    async with under_way(sink) as shipper:
        began = time.monotonic()
        shipper.offer(page(0), 0, 0)
        await asyncio.sleep(0.1)
        shipper.offer(page(1), 1, 1)
        await eventually(lambda: len(sink.taken) == 2)
        assert time.monotonic() - began >= 1.9
        assert len(sink.tried) == 1


async def test_remaining_pages_are_shipped_at_the_end() -> None:
    sink = Scripted()
    sink.failures = [SinkFailed("no")] * 8
    async with shipping(sink) as (shipper, counters):
        shipper.offer(page(0), 0, 4)
        # Its pauses are long by now.
        await eventually(lambda: len(sink.tried) >= 7)
        sink.failures.clear()
        shipper.offer(page(1), 5, 9)
        began = time.monotonic()
        await shipper.close(240)
        assert time.monotonic() - began < 60
        assert sink.taken == [page(0), page(1)]
        assert counters["audit.rows_dropped"] == 0


async def test_unshipped_rows_are_counted_as_lost() -> None:
    sink = Scripted()
    sink.failures = [SinkFailed("no")] * 1000
    async with shipping(sink) as (shipper, counters):
        shipper.offer(page(0), 0, 4)
        shipper.offer(page(1), 5, 6)
        await shipper.close(0.5)
        assert sink.taken == []
        assert (counters["audit.pages_dropped"], counters["audit.rows_dropped"]) == (2, 7)
        assert len(sink.tried) < 12, "it was tried without a pause"


async def test_duration_of_sink_failure_is_known() -> None:
    sink = Scripted()
    sink.open.clear()
    async with shipping(sink) as (shipper, _):
        shipper.offer(page(0), 0, 0)
        await asyncio.sleep(0.3)
        assert shipper.vitals.age_s >= 0.25
        opened = time.monotonic()
        sink.open.set()
        # However late the age is read.
        await eventually(lambda: shipper.vitals.age_s <= time.monotonic() - opened)
