"""Keep the audit trail of one process: turn acknowledgements into rows, and offer the rows in pages.

States
  not begun   nothing has been shipped
  running     rows are closed and offered in pages
  ended       the last row is the end

Transitions
  not begun -> running   `begin`: the process serves
  running   -> ended     `end`: its last client is gone
  any       -> running   `go_on_as` with an `offer`: a trail of another incarnation, for another sink; without: ended

Invariants
1. The next look (`look`), at most LOOK_S later, judges acknowledged offsets, whether anything is shipped or not.
2. An acknowledgement is in a row that is closed at most `interval_s` later; LATE_S is allowed for a late event loop.
3. Rows get sequence numbers in the order in which they are closed, each once, and the digest of the row before. An
   acknowledgement that cannot be put into a row also takes a number, which is not shipped. So every gap means that
   something is missing.
4. Without acknowledgements a mark comes about `interval_s` after the last row of acknowledgements, then every MARK_S.
   Durations are measured on the monotonic clock; the wall clock only dates rows.
5. Memory is bounded: MAX_OPEN_ROWS rows with twice MAX_SPANS spans each, and the acknowledgements between two looks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from typing import Final, TypedDict

import structlog

from kproxy.routing.retry import deadline_s
from kproxy.routing.topology import Topology
from kproxy.trail.acknowledgements import Acked, Asked, ConnectionAcks
from kproxy.trail.overlaps import Overlap, OverlapDetector
from kproxy.trail.rows import Begin, End, Mark, Row, encode_range, encode_row, encode_stamp
from kproxy.trail.signature import chained, digest, signed
from kproxy.trail.spans import Chunk, OpenRow

log = structlog.get_logger(__name__)

LOOK_S: Final = 0.5
MARK_S: Final = 10.0
LATE_S: Final = 1.0
# Above this number the oldest row is closed.
MAX_OPEN_ROWS: Final = 20_000
# A page is one record; brokers accept at least 1 MiB.
MAX_PAGE_BYTES: Final = 256 << 10
# How many partitions or rows are processed before clients are served again, and for how many seconds: a partition may
# have thousands of spans.
MAX_STEP: Final = 200
STEP_S: Final = 0.003
# Partitions that are processed between two readings of the clock.
AT_ONCE: Final = 10
# At most this many overlaps are logged in one look.
MAX_OVERLAPS_LOGGED: Final = 20

OfferPage = Callable[[bytes, int, int], None]
"""Takes a page with its first and last sequence; never waits."""


class _Stamp(TypedDict):
    proxy: str
    incarnation: str
    sequence: int
    at: int


class Trail:
    """The trail of one process.

    `offer` None: nothing is shipped, but offsets are still judged. Rows are signed with `key`, if there is one.

    `proxy` and `incarnation` are as in the rows. `clock` is in seconds, `wall_ms` in milliseconds since the epoch.
    `left_out` are topics without a trail. `on_overlap` is called with each overlap.
    """

    def __init__(
        self,
        proxy: str,
        incarnation: str,
        *,
        clock: Callable[[], float],
        wall_ms: Callable[[], int],
        deadline_cap_ms: int,
        interval_s: float,
        offer: OfferPage | None = None,
        key: bytes | None = None,
        left_out: Collection[bytes] = frozenset(),
        on_overlap: Callable[[Overlap], None] = lambda overlap: None,
    ) -> None:
        self.left_out = frozenset(left_out)
        self._proxy = proxy
        self._incarnation = incarnation
        self._encoded_stamp = encode_stamp(proxy, incarnation)
        self._clock = clock
        self._wall_ms = wall_ms
        self.deadline_cap_ms = deadline_cap_ms
        self._interval_s = interval_s
        self._offer = offer
        self._key = key
        self._on_overlap = on_overlap
        self._overlaps = OverlapDetector()
        self._connections = 0
        # Something was acknowledged since the last look.
        self.woken: list[Acked] = []
        # Those that the current look has yet to process, the next one at the end.
        self._taking: list[Acked] = []
        self._open: dict[Acked, OpenRow] = {}
        # The lines of the next page, their length, and the first one's sequence.
        self._lines: list[bytes] = []
        self._page_bytes = 0
        self._page_from = 0
        self._sequence = 0
        self._previous = ""
        self._running = False
        # Whether a row of acknowledgements was closed since the last mark.
        self._has_told = False
        self._at = self._looked_at = wall_ms()
        self._now = self._looked = self._told = clock()

    def connection(self, topology: Topology) -> ConnectionAcks:
        """Note the acknowledgements of another client connection."""
        self._connections += 1
        return ConnectionAcks(self, topology, self._connections)

    def seconds_since(self, asked: Asked) -> float:
        """Return the seconds since the first byte of a request."""
        # The cap may be another one than when the request came.
        return max(0.0, self._clock() - asked.deadline + deadline_s(asked.timeout_ms, self.deadline_cap_ms))

    def begin(self) -> None:
        """Write the first row: the process serves from now on."""
        self._read_clocks()
        # The trail may have been constructed long ago.
        self._looked_at, self._looked = self._at, self._now
        self._running = True
        mark_ms = round(MARK_S * 1000)
        promised_ms = round((self._interval_s + LATE_S) * 1000)
        self._close(Begin(**self._stamp(), interval_ms=promised_ms, mark_ms=mark_ms))
        self._offer_page()

    def end(self) -> None:
        """Close all rows and write the last one: no more acknowledgements come."""
        self.look()
        if not self._running:
            return
        for acked in list(self._open):
            self._close_row(acked)
        self._close(End(**self._stamp()))
        self._running = False
        self._offer_page()

    def go_on_as(
        self, incarnation: str, *, interval_s: float, offer: OfferPage | None, key: bytes | None, left_out: set[bytes]
    ) -> None:
        """End the trail. With an `offer`, which leads to another sink, begin another trail."""
        self.end()
        self.left_out = frozenset(left_out)
        self._incarnation, self._encoded_stamp = incarnation, encode_stamp(self._proxy, incarnation)
        self._interval_s, self._offer, self._key = interval_s, offer, key
        self._sequence, self._previous = 0, ""
        if offer is not None:
            self.begin()

    def look(self) -> None:
        """Judge the acknowledgements since the last look, and close due rows."""
        for _ in self._look():
            pass

    async def keep_looking(self) -> None:
        """Look every LOOK_S, until cancelled.

        Serve clients between the steps of a long look.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                for _ in self._look():
                    await asyncio.sleep(0)
            except Exception:  # the boundary: the next look may succeed, and the gap shows this failure
                log.exception("audit trail maintenance failed")
                self._miss()

    def _look(self) -> Iterator[None]:
        """Look in steps. The next look continues an abandoned one."""
        self._read_clocks()
        looked_at, looked = self._at, self._now
        self._taking[:0] = reversed(self.woken)
        self.woken.clear()
        while self._taking:
            self._take_some()
            if self._taking:
                yield
        overlaps = 0
        while self._overlaps.has_added:
            overlaps += self._judge_some(overlaps)
            yield
        if overlaps > MAX_OVERLAPS_LOGGED:
            log.error("more offsets assigned twice", intervals=overlaps)
        while self._close_some():
            yield
        self._mark()
        # Acknowledgements that come during a look are later than its beginning.
        self._looked_at, self._looked = looked_at, looked
        self._offer_page()

    def _take_some(self) -> None:
        self._read_clocks()
        left = max(len(self._taking) - MAX_STEP, 0)
        while len(self._taking) > left:
            for _ in range(min(AT_ONCE, len(self._taking) - left)):
                acked = self._taking.pop()
                try:
                    self._take(acked)
                except Exception:  # the boundary: an error here must not reach clients; the gap shows it
                    log.exception("acknowledgements not noted", topic=acked.key.topic, partition=acked.key.partition)
                    self._miss()
            if self._step_is_over():
                break

    def _mark(self) -> None:
        """Write a mark when there are no rows: soon after the last row, then every MARK_S."""
        if self.woken:
            return
        quiet_s = self._interval_s if self._has_told else MARK_S
        if self._running and not self._open and self._now - self._told >= quiet_s:
            self._close(Mark(**self._stamp()))
            self._has_told = False

    def _close_some(self) -> bool:
        """Close rows that would be too old at the next look, oldest first; return whether more may remain."""
        self._read_clocks()
        due = self._now - self._interval_s + LOOK_S
        for _ in range(MAX_STEP):
            acked, row = next(iter(self._open.items()), (None, None))
            if acked is None or row is None or (row.began > due and len(self._open) <= MAX_OPEN_ROWS):
                return False
            self._close_row(acked)
            if self._step_is_over():
                break
        return True

    def _step_is_over(self) -> bool:
        """Return whether this step of a look has taken long enough, so that clients are served next."""
        return self._clock() - self._now > STEP_S

    def _read_clocks(self) -> None:
        self._now = self._clock()
        # Times must not decrease within the trail, even if the clock is set back.
        self._at = max(self._at, self._wall_ms())

    def _take(self, acked: Acked) -> None:
        row = None
        for chunk in acked.take():
            self._overlaps.add(acked, chunk)
            if self._running:
                row = acked.row
                if row is None or not row.take(chunk, acked.acks, self._at):
                    row = self._begin_row(acked, chunk)
        if row is not None:
            row.sample(acked.latency_s)
        if acked.unread:
            acked.unread = 0
            log.warning("acknowledged batches not read", topic=acked.key.topic, client=acked.client)
            self._miss()

    def _begin_row(self, acked: Acked, chunk: Chunk) -> OpenRow:
        if acked.row is not None:
            self._close_row(acked)
        acked.row = row = OpenRow(chunk, acked.acks, self._looked, self._looked_at, self._at)
        self._open[acked] = row
        return row

    def _judge_some(self, found_before: int) -> int:
        """Judge one step of the added chunks; return the number of overlaps."""
        self._read_clocks()
        overlaps = self._overlaps.judge(AT_ONCE)
        while self._overlaps.has_added and not self._step_is_over():
            overlaps += self._overlaps.judge(AT_ONCE)
        for number, overlap in enumerate(overlaps, found_before):
            self._on_overlap(overlap)
            if number < MAX_OVERLAPS_LOGGED:
                _log(overlap)
        return len(overlaps)

    # Rows

    def _stamp(self) -> _Stamp:
        return {"proxy": self._proxy, "incarnation": self._incarnation, "sequence": self._sequence, "at": self._at}

    def _close_row(self, acked: Acked) -> None:
        closed = self._open.pop(acked)
        acked.row = None
        self._has_told = True
        key, origin = acked.key, acked.origin
        self._put(
            encode_range(
                self._encoded_stamp,
                self._sequence,
                self._at,
                key.topic,
                key.topic_id,
                key.partition,
                origin.owner,
                origin.revision,
                closed.acks,
                origin.connection,
                acked.peer,
                acked.client,
                acked.principal,
                closed.as_json(),
            )
        )

    def _close(self, row: Row) -> None:
        self._put(encode_row(row))

    def _put(self, line: bytes) -> None:
        line = chained(line, self._previous)
        if self._key is not None:
            line = signed(line, self._key)
        self._previous = digest(line)
        if self._page_bytes + len(line) + 1 > MAX_PAGE_BYTES:
            self._offer_page()
        if not self._lines:
            self._page_from = self._sequence
        self._lines.append(line)
        self._page_bytes += len(line) + 1
        self._sequence += 1
        self._told = self._now

    def _miss(self) -> None:
        """Leave a gap in the sequence numbers: an acknowledgement could not be put into a row."""
        self._offer_page()
        self._sequence += 1

    def _offer_page(self) -> None:
        lines, self._lines, self._page_bytes = self._lines, [], 0
        if lines and self._offer is not None:
            self._offer(b"\n".join(lines), self._page_from, self._sequence - 1)


def _log(overlap: Overlap) -> None:
    origin, earlier = overlap.origin, overlap.earlier
    log.error(
        "offsets assigned twice",
        topic=overlap.topic,
        partition=overlap.partition,
        first_offset=overlap.first_offset,
        last_offset=overlap.last_offset,
        owner=origin.owner,
        revision=origin.revision,
        client=origin.client,
        earlier_owner=earlier.owner if earlier is not None else "not known any more",
        earlier_revision=earlier.revision if earlier is not None else None,
        earlier_client=earlier.client if earlier is not None else None,
    )
