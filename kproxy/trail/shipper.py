"""Ship the pages of a trail to their sink, through a bounded queue.

States
  shipping   pages are written as they come; from the second write on, they are gathered as the sink prefers
  failing    the last write failed: it is tried again after a pause that grows up to MAX_PAUSE_S
  closing    queued pages are written at once, without gathering and with short pauses, until none or no time is left
  closed     no page is taken any more

Invariants
1. `offer` never waits and never raises: a slow sink never delays clients.
2. A page is in the queue until the sink has made it durable. So pages leave in order, none is skipped, and a page is
   written again after a failure: at least once.
3. Queued pages cost at most `max_bytes`. A page without room is dropped whole and counted: the numbers of its rows are
   missing from the trail, so readers see the gap.
4. The first page does not wait for others: an audit does not know a process without a page in the sink.
5. No failure is silent: the log has a line when one begins, when pages are dropped, and when it ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import structlog

from kproxy.trail.sink import Sink, SinkFailed

PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
CLOSING_PAUSE_S = 0.5
# The cost of a page besides its bytes.
PAGE_OVERHEAD_BYTES = 256

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ShipperVitals:
    """The current state.

    `age_s`: seconds since the sink last took pages, or since the start. Beyond `max_bytes` pages are lost.
    """

    waiting_bytes: int
    age_s: float
    max_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Page:
    data: bytes
    rows: int
    came_at: float

    @property
    def cost(self) -> int:
        return len(self.data) + PAGE_OVERHEAD_BYTES


class Shipper:
    """`counters` gets `audit.rows_shipped`, `audit.pages_dropped`, `audit.rows_dropped`, `audit.sink_failures`.

    `clock` in seconds; `random` spreads pauses. `start` comes first and `close` last.
    """

    def __init__(
        self, sink: Sink, *, max_bytes: int, counters: Counter[str], clock: Callable[[], float], random: Random
    ) -> None:
        self._sink = sink
        self._max_bytes = max_bytes
        self._counters = counters
        self._clock = clock
        self._random = random
        self._queue: deque[_Page] = deque()
        self._queued_bytes = 0
        self._changed = asyncio.Event()
        self._closing = False
        self._closed = False
        self._task: asyncio.Task[None] | None = None
        self._shipped_at = clock()
        self._has_shipped = False
        self._failures = 0
        self._drops = 0

    @property
    def vitals(self) -> ShipperVitals:
        return ShipperVitals(self._queued_bytes, max(0.0, self._clock() - self._shipped_at), self._max_bytes)

    def start(self) -> None:
        """Start to write."""
        self._task = asyncio.get_running_loop().create_task(self._ship(), name="audit shipper")

    def offer(self, page: bytes, first_sequence: int, last_sequence: int) -> None:
        """Queue a page with rows of these sequence numbers, or drop it."""
        queued = _Page(page, last_sequence - first_sequence + 1, self._clock())
        if self._closed or self._queued_bytes + queued.cost > self._max_bytes:
            self._drop(queued)
            return
        self._queue.append(queued)
        self._queued_bytes += queued.cost
        self._changed.set()

    def _drop(self, page: _Page) -> None:
        self._counters["audit.pages_dropped"] += 1
        self._counters["audit.rows_dropped"] += page.rows
        if not self._drops:
            log.error(
                "audit rows dropped",
                consequence="what is acknowledged cannot be proven until the sink takes rows again",
                waiting_bytes=self._queued_bytes,
            )
        self._drops += 1

    async def close(self, timeout_s: float) -> None:
        """Write the queued pages, for at most `timeout_s` seconds; close the sink."""
        self._closing = True
        self._changed.set()
        try:
            if self._task is not None:
                await asyncio.wait((self._task,), timeout=timeout_s)
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
        finally:
            self._closed = True
            lost = sum(page.rows for page in self._queue)
            # A process whose shipper never started has served no client.
            if lost and self._task is not None:
                log.error("audit trail not shipped completely", consequence="its last rows are lost", rows=lost)
                self._counters["audit.pages_dropped"] += len(self._queue)
                self._counters["audit.rows_dropped"] += lost
            self._queue.clear()
            self._queued_bytes = 0
            await self._close_sink()

    async def _close_sink(self) -> None:
        try:
            await self._sink.close()
        except Exception:  # the boundary: the caller has other things to stop
            log.exception("audit sink not closed")

    async def _ship(self) -> None:
        while True:
            await self._wanted()
            if not self._queue:
                return
            pages = self._next_pages()
            try:
                await self._sink.write([page.data for page in pages])
            except SinkFailed as error:
                await self._failed(str(error))
            except Exception as error:  # the boundary: an error of the sink must not end the trail
                log.exception("audit sink failed")
                await self._failed(f"{type(error).__name__}: {error}")
            else:
                self._shipped(pages)

    async def _wanted(self) -> None:
        """Wait until there are pages to write; return with an empty queue only when closing."""
        preference = self._sink.preference
        while not self._closing:
            self._changed.clear()
            patience_s: float | None = None
            if self._queue:
                gathering_s = preference.seconds if self._has_shipped else 0.0
                patience_s = self._queue[0].came_at + gathering_s - self._clock()
                if patience_s <= 0 or self._queued_bytes >= preference.bytes or self._failures:
                    return
            try:
                async with asyncio.timeout(patience_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _next_pages(self) -> list[_Page]:
        """Return the first pages of the queue, as many as the sink accepts at once; at least one."""
        pages: list[_Page] = []
        room = self._sink.preference.bytes
        for page in self._queue:
            room -= page.cost
            if pages and room < 0:
                break
            pages.append(page)
        return pages

    def _shipped(self, pages: list[_Page]) -> None:
        for page in pages:
            self._queue.popleft()
            self._queued_bytes -= page.cost
            self._counters["audit.rows_shipped"] += page.rows
        self._shipped_at = self._clock()
        self._has_shipped = True
        if self._failures or (self._drops and not self._queue):
            log.warning("audit sink recovered", failures=self._failures, pages_dropped=self._drops)
            # A slow sink must not log this for every page.
            self._drops = 0
        self._failures = 0

    async def _failed(self, reason: str) -> None:
        self._counters["audit.sink_failures"] += 1
        if not self._failures:
            log.warning("audit sink failing", consequence="rows wait, clients do not", reason=reason)
        self._failures += 1
        pause_s = min(PAUSE_S * 2.0 ** min(self._failures - 1, 10), MAX_PAUSE_S)
        until = self._clock() + pause_s * self._random.uniform(0.5, 1.0)
        while (left_s := until - self._clock()) > 0:
            # `close` does not wait until a long pause ends.
            self._changed.clear()
            if self._closing:
                await asyncio.sleep(min(left_s, CLOSING_PAUSE_S))
                return
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                return
