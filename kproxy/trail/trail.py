"""The trail of one serving process: its rows, from what was noted of acknowledgements to the pages that are shipped.

States
  not begun   nothing has been shipped
  running     rows are closed and handed on
  ended       the last row is the end

Transitions
  not begun -> running   `begin`: the process serves
  running   -> ended     `end`: its last client is gone

Invariants
1. What is acknowledged is judged by the next look (`look`), LOOK_S later at most, whether anything is shipped or not.
2. It is in a row that is closed `interval_s` later at most; LATE_S is allowed for an event loop that is late.
3. Sequence numbers are given in the order in which rows are closed, and each once. What cannot be told takes one as
   well and is not shipped: a gap says that something is missing, and nothing else may make one.
4. While it runs a row comes every MARK_S at least, and a mark within `interval_s` of the last row. How long that is
   tells the clock that nobody sets; by the other one only the rows are dated.
5. What is held here is bounded: MAX_OPEN_ROWS rows with twice MAX_SPANS each, and what comes between two looks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Final, TypedDict

import structlog

from kproxy.routing.retry import deadline_s
from kproxy.routing.topology import Topology
from kproxy.trail.acked import MAX_SPANS, Acked, Asked
from kproxy.trail.chunks import Chunk, extend_spans
from kproxy.trail.given_out import GivenOut, Overlap
from kproxy.trail.noted import ConnectionAcks
from kproxy.trail.rows import Begin, End, Mark, Range, Row, encode_page

log = structlog.get_logger(__name__)

LOOK_S: Final = 0.5
MARK_S: Final = 10.0
LATE_S: Final = 1.0
# One more, and the one that was begun first is closed.
MAX_OPEN_ROWS: Final = 20_000
MAX_LATENCIES: Final = 32
# A page is a record; brokers take 1 MiB at least.
MAX_PAGE_BYTES: Final = 256 << 10
# So many partitions or rows are looked at before clients are served again: some milliseconds.
MAX_STEP: Final = 200
# Of so many overlaps in one look each has a line in the log.
MAX_OVERLAPS_LOGGED: Final = 20
_MICROS: Final = 1_000_000

OfferPage = Callable[[bytes, int, int], None]
"""Takes a page with its first and last sequence; never waits."""


class _Stamp(TypedDict):
    proxy: str
    incarnation: str
    sequence: int
    at: int


class _OpenRow:
    """What a row will say. It goes on while chunks go on."""

    __slots__ = (
        "acks",
        "batches",
        "began",
        "bytes",
        "first",
        "first_acked_at",
        "last_acked_at",
        "latency_us",
        "next_sequence",
        "record_count",
        "spans",
    )

    def __init__(self, acks: int, first: Chunk, first_acked_at: int, acked_at: int, began: float) -> None:
        """`began` is by the trail's clock in seconds, and the times are by the other one, in milliseconds."""
        self.acks = acks
        self.began = began
        self.first = first
        self.first_acked_at = first_acked_at
        self.last_acked_at = acked_at
        self.latency_us: list[int] = []
        # They grow; the chunk's are also remembered by those who judge.
        self.spans = first.spans.copy()
        self.record_count = first.record_count
        self.batches = first.batches
        self.bytes = first.bytes
        self.next_sequence = first.next_sequence

    def takes(self, acks: int, chunk: Chunk) -> bool:
        """Whether a chunk goes on where the row is; without idempotence every one does."""
        return (
            chunk.first_sequence == self.next_sequence
            and chunk.producer_id == self.first.producer_id
            and chunk.producer_epoch == self.first.producer_epoch
            and acks == self.acks
            and len(self.spans) < 2 * MAX_SPANS
        )

    def extend(self, chunk: Chunk, acked_at: int) -> None:
        extend_spans(self.spans, chunk.spans)
        self.record_count += chunk.record_count
        self.batches += chunk.batches
        self.bytes += chunk.bytes
        self.next_sequence = chunk.next_sequence
        self.last_acked_at = acked_at


class Trail:
    """One process's trail. `offer` None: nothing is shipped, and offsets are judged all the same.

    `proxy` and `incarnation` are as in the rows. `clock` is in seconds, `wall_ms` in milliseconds since the epoch.
    `left_out` are topics that are not noted. `on_overlap` is told of each offset that was given out twice.
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
        left_out: Collection[bytes] = frozenset(),
        on_overlap: Callable[[Overlap], None] = lambda overlap: None,
    ) -> None:
        self.left_out = frozenset(left_out)
        self._proxy = proxy
        self._incarnation = incarnation
        self._clock = clock
        self._wall_ms = wall_ms
        self._deadline_cap_ms = deadline_cap_ms
        self._interval_s = interval_s
        self._offer = offer
        self._on_overlap = on_overlap
        self._given_out = GivenOut()
        self._connections = 0
        self._woken: list[Acked] = []
        # What a look that has begun has not taken yet.
        self._taking: deque[Acked] = deque()
        self._open: dict[Acked, _OpenRow] = {}
        # The lines of a page to come, how long they are together, and the first one's sequence.
        self._lines: list[bytes] = []
        self._page_bytes = 0
        self._page_from = 0
        self._sequence = 0
        self._running = False
        # Whether acknowledgements were told since the last mark.
        self._has_told = False
        self._at = self._looked_at = wall_ms()
        self._now = self._looked = self._told = clock()

    def connection(self, topology: Topology) -> ConnectionAcks:
        """For one more client connection."""
        self._connections += 1
        return ConnectionAcks(self, topology, self._connections)

    def woken(self, acked: Acked, asked: Asked) -> None:
        """It has something for the next look; the first of it tells how long acknowledgements take."""
        self._woken.append(acked)
        began = asked.deadline - deadline_s(asked.request.timeout_ms, self._deadline_cap_ms)
        acked.latencies_s.append(self._clock() - began)

    def begin(self) -> None:
        """The process serves from now on."""
        self._tell_the_time()
        # It may have been made long ago.
        self._looked_at, self._looked = self._at, self._now
        self._running = True
        mark_ms = round(MARK_S * 1000)
        promised_ms = round((self._interval_s + LATE_S) * 1000)
        self._close(Begin(**self._stamp(), interval_ms=promised_ms, mark_ms=mark_ms))
        self._hand_on()

    def end(self) -> None:
        """Nothing is acknowledged any more: all that is known is told, and that this is all."""
        self.look()
        if not self._running:
            return
        for acked in list(self._open):
            self._close_row(acked)
        self._close(End(**self._stamp()))
        self._running = False
        self._hand_on()

    def look(self) -> None:
        """Judge what was acknowledged since the last look, and close the rows whose time has come."""
        for _ in self._look():
            pass

    async def keep_looking(self) -> None:
        """Look every LOOK_S, until cancelled; clients are served in between where there is much to look at."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                for _ in self._look():
                    await asyncio.sleep(0)
            except Exception:  # the boundary: the next look may do better, and the gap tells of this one
                log.exception("the audit trail could not be looked after")
                self._miss()

    def _look(self) -> Iterator[None]:
        """In steps; where it is left before its end, the next look has the rest as well."""
        self._tell_the_time()
        looked_at, looked = self._at, self._now
        self._taking += self._woken
        self._woken = []
        while self._taking:
            self._take_some()
            if self._taking:
                yield
        self._tell_the_time()
        overlaps = 0
        while self._given_out.has_added:
            overlaps += self._judge_some(overlaps)
            yield
        if overlaps > MAX_OVERLAPS_LOGGED:
            log.error("more offsets given out twice than are logged", intervals=overlaps)
        while self._close_some():
            yield
        self._mark()
        # What comes during a look was acknowledged after it began.
        self._looked_at, self._looked = looked_at, looked
        self._hand_on()

    def _take_some(self) -> None:
        self._tell_the_time()
        for _ in range(min(MAX_STEP, len(self._taking))):
            acked = self._taking.popleft()
            try:
                self._take(acked)
            except Exception:  # the boundary: whatever is wrong here must not reach the clients; the gap tells of it
                log.exception("acknowledgements could not be noted", topic=acked.topic, partition=acked.partition)
                self._miss()

    def _mark(self) -> None:
        """Say that there is nothing more to tell: soon after the last that there was, and then now and then."""
        if self._woken:
            return
        quiet_s = self._interval_s if self._has_told else MARK_S
        if self._running and not self._open and self._now - self._told >= quiet_s:
            self._close(Mark(**self._stamp()))
            self._has_told = False

    def _close_some(self) -> bool:
        """Close rows that would be too old at the next look, those that were begun first; whether there may be more."""
        self._tell_the_time()
        due = self._now - self._interval_s + LOOK_S
        for _ in range(MAX_STEP):
            acked, row = next(iter(self._open.items()), (None, None))
            if acked is None or row is None or (row.began > due and len(self._open) <= MAX_OPEN_ROWS):
                return False
            self._close_row(acked)
        return True

    def _tell_the_time(self) -> None:
        self._now = self._clock()
        # A clock that is set back must not make times fall within the trail.
        self._at = max(self._at, self._wall_ms())

    def _take(self, acked: Acked) -> None:
        chunks, unread, latencies_s = acked.take()
        for chunk in chunks:
            self._given_out.add(acked.topic, acked.topic_id, acked.partition, acked.giver, chunk)
            if self._running:
                self._note(acked, chunk)
        if unread:
            log.warning("acknowledged batches that cannot be read", topic=acked.topic, client=acked.client)
            self._miss()
        row = self._open.get(acked)
        if row is not None and len(row.latency_us) < MAX_LATENCIES:
            row.latency_us += [round(seconds * _MICROS) for seconds in latencies_s]

    def _note(self, acked: Acked, chunk: Chunk) -> None:
        row = self._open.get(acked)
        if row is not None and row.takes(acked.acks, chunk):
            row.extend(chunk, self._at)
            return
        if row is not None:
            self._close_row(acked)
        self._open[acked] = _OpenRow(acked.acks, chunk, self._looked_at, self._at, self._looked)

    def _judge_some(self, found_before: int) -> int:
        """Judge a step of what a look has added; how many offsets given out twice that has found."""
        overlaps = self._given_out.judge(MAX_STEP)
        for number, overlap in enumerate(overlaps, found_before):
            self._on_overlap(overlap)
            if number < MAX_OVERLAPS_LOGGED:
                _log(overlap)
        return len(overlaps)

    # Rows

    def _stamp(self) -> _Stamp:
        return {"proxy": self._proxy, "incarnation": self._incarnation, "sequence": self._sequence, "at": self._at}

    def _close_row(self, acked: Acked) -> None:
        row = self._open.pop(acked)
        self._has_told = True
        chunk = row.first
        self._close(
            Range(
                **self._stamp(),
                topic=acked.topic,
                topic_id=None if acked.topic_id is None else acked.topic_id.hex(),
                partition=acked.partition,
                owner=acked.giver.owner,
                revision=acked.giver.revision,
                acks=row.acks,
                connection=acked.giver.connection,
                peer=acked.peer,
                client_id=acked.client,
                principal=None,
                producer_id=chunk.producer_id,
                producer_epoch=chunk.producer_epoch,
                first_sequence=chunk.first_sequence,
                base_offset=chunk.spans[0],
                record_count=row.record_count,
                batches=row.batches,
                bytes=row.bytes,
                first_acked_at=row.first_acked_at,
                last_acked_at=row.last_acked_at,
                spans=row.spans,
                latency_us=row.latency_us,
            )
        )

    def _close(self, row: Row) -> None:
        line = encode_page([row])
        if self._page_bytes + len(line) + 1 > MAX_PAGE_BYTES:
            self._hand_on()
        if not self._lines:
            self._page_from = self._sequence
        self._lines.append(line)
        self._page_bytes += len(line) + 1
        self._sequence += 1
        self._told = self._now

    def _miss(self) -> None:
        """Something is not told: what is closed goes out, and the next row's sequence leaves a gap behind it."""
        self._hand_on()
        self._sequence += 1

    def _hand_on(self) -> None:
        lines, self._lines, self._page_bytes = self._lines, [], 0
        if lines and self._offer is not None:
            self._offer(b"\n".join(lines), self._page_from, self._sequence - 1)


def _log(overlap: Overlap) -> None:
    giver, earlier = overlap.giver, overlap.earlier
    log.error(
        "offsets given out twice",
        topic=overlap.topic,
        partition=overlap.partition,
        first_offset=overlap.first_offset,
        last_offset=overlap.last_offset,
        owner=giver.owner,
        revision=giver.revision,
        client=giver.client,
        earlier_owner=earlier.owner if earlier is not None else "not known any more",
        earlier_revision=earlier.revision if earlier is not None else None,
        earlier_client=earlier.client if earlier is not None else None,
    )
