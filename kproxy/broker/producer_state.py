"""Track the idempotent producers of a partition (KIP-98), and decide whether a batch is new, a resend or invalid.

Their state identifies resends, so that a resend adds no second record.

State: per producer id its epoch, the time of its last write, and its last RETAINED_BATCHES batches, oldest first.
Opening reads it from the log's snapshot and the batches after it; each append updates it.

Verdict on a batch of (producer_id, epoch, base_sequence .. last_sequence)
  duplicate          a retained batch of this epoch has the same sequences: answered with its first offset
  producer fenced    the epoch is below the one remembered
  out of order       the sequence does not follow; a new epoch begins at 0
  accepted           anything else. An unknown producer id may begin at any sequence, as in Apache Kafka since 2.5
                     (KIP-360): its state may have been dropped.

Invariants
1. A producer that has not written for EXPIRATION_MS (Kafka's producer.id.expiration.ms) is forgotten as others write.
   An appended batch counts as written now, a batch read from the log as written at its timestamp. Since producers
   choose timestamps, nothing expires in the first GRACE_MS after states are read (Kafka checks periodically too).
2. At most `max_producers` ids are remembered, to bound memory. Beyond that the one that wrote longest ago is dropped;
   if it had not expired, it is counted and each doubling of the count logged: its resend would be a second record.
3. A verdict changes nothing; only `update`, called once a batch is in the log, does.
4. The remembered state of a producer is replaced, never changed: copies share it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from itertools import islice
from struct import Struct
from typing import NamedTuple

import structlog

from kproxy_codec.record_batch import NO_PRODUCER_ID, NO_TIMESTAMP, RecordBatch, add_sequence

HISTORY_INTERVAL_BYTES = 8 << 20
HISTORY_BYTES_PER_PRODUCER = 1 << 10
HISTORY_COPIES = 2

RETAINED_BATCHES = 5
EXPIRATION_MS = 86_400_000
GRACE_MS = 600_000
# The memory limit of one partition, and the maximum that one producer costs, including the copies of ProducerHistory.
MAX_BYTES = 64 << 20
BYTES_EACH = 640
MAX_PRODUCERS = MAX_BYTES // BYTES_EACH

# A producer: epoch, time of the last write; then for each batch base_sequence, base_offset, last_offset_delta.
_PRODUCER = Struct("<hq")
_BATCH = Struct("<iqi")
# In a snapshot, before a producer: its id and the number of bytes.
_KEPT = Struct("<qH")
# How many expired producers one update forgets at most: thousands may expire together.
_EXPIRED_AT_ONCE = 8
_logger = structlog.get_logger(__name__)


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


class BatchVerdict(Enum):
    """The decision on a batch."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    OUT_OF_ORDER = "out of order"
    FENCED = "producer fenced"


class Judgement(NamedTuple):
    """`base_offset` and `last_offset` are a duplicate's, otherwise -1; `detail` names the expected values."""

    verdict: BatchVerdict
    base_offset: int = -1
    last_offset: int = -1
    detail: str = ""


_ACCEPTED = Judgement(BatchVerdict.ACCEPTED)


class ProducerStates:
    """The producers of one partition.

    `clock` returns milliseconds since the epoch. `expired` and `evicted` count producers forgotten by age and for lack
    of room since the log was opened. Truncating the log resets the counts to those of the copy.
    """

    def __init__(self, max_producers: int = MAX_PRODUCERS, clock: Callable[[], int] = wall_ms) -> None:
        self.expired = 0
        self.evicted = 0
        # Ordered by the last write, oldest first.
        self._producers: OrderedDict[int, bytes] = OrderedDict()
        self._max_producers = max_producers
        self._clock = clock
        self._expires_from_ms = clock() + GRACE_MS

    def __len__(self) -> int:
        return len(self._producers)

    def copy(self) -> ProducerStates:
        """Return an independent copy, in which no producer expires for another GRACE_MS."""
        copied = ProducerStates(self._max_producers, self._clock)
        copied.expired, copied.evicted = self.expired, self.evicted
        copied._producers = self._producers.copy()
        return copied

    def to_bytes(self) -> bytes:
        """Return the producers for `from_bytes`; the counts are left out."""
        return b"".join(_KEPT.pack(each, len(known)) + known for each, known in self._producers.items())

    @classmethod
    def from_bytes(cls, kept: bytes) -> ProducerStates:
        """Return the producers from `to_bytes`; none expires for GRACE_MS."""
        states, position = cls(), 0
        while position < len(kept):
            producer_id, length = _KEPT.unpack_from(kept, position)
            position += _KEPT.size
            states._producers[producer_id] = kept[position : position + length]
            position += length
        return states

    def judge(self, batch: RecordBatch) -> Judgement:
        """Decide whether `batch` may be appended."""
        if batch.producer_id == NO_PRODUCER_ID:
            return _ACCEPTED
        known = self._producers.get(batch.producer_id)
        if known is None:
            return _ACCEPTED
        epoch: int = _PRODUCER.unpack_from(known)[0]
        if batch.producer_epoch < epoch:
            detail = f"producer {batch.producer_id} has epoch {epoch}, the batch {batch.producer_epoch}"
            return Judgement(BatchVerdict.FENCED, detail=detail)
        if batch.producer_epoch > epoch:
            if batch.base_sequence == 0:
                return _ACCEPTED
            return _out_of_order(batch, 0)
        expected = 0
        for base_sequence, base_offset, last_offset_delta in _BATCH.iter_unpack(known[_PRODUCER.size :]):
            if (base_sequence, last_offset_delta) == (batch.base_sequence, batch.last_offset_delta):
                return Judgement(BatchVerdict.DUPLICATE, base_offset, base_offset + last_offset_delta)
            expected = add_sequence(base_sequence, last_offset_delta + 1)
        return _ACCEPTED if batch.base_sequence == expected else _out_of_order(batch, expected)

    def update(self, batch: RecordBatch, base_offset: int, written_ms: int | None = None) -> None:
        """Remember that `batch` is in the log at `base_offset`, written at `written_ms` (default: now)."""
        producer_id = batch.producer_id
        if producer_id == NO_PRODUCER_ID or batch.is_control:
            return
        now_ms = self._clock()
        if written_ms is None or written_ms == NO_TIMESTAMP:
            written_ms = now_ms
        known = self._producers.get(producer_id, b"")
        same_epoch = known and _PRODUCER.unpack_from(known)[0] == batch.producer_epoch
        batches = known[max(_PRODUCER.size, len(known) - (RETAINED_BATCHES - 1) * _BATCH.size) :] if same_epoch else b""
        self._producers[producer_id] = (
            _PRODUCER.pack(batch.producer_epoch, min(written_ms, now_ms))
            + batches
            + _BATCH.pack(batch.base_sequence, base_offset, batch.last_offset_delta)
        )
        self._producers.move_to_end(producer_id)
        self._forget(now_ms)

    def _forget(self, now_ms: int) -> None:
        """Drop some expired producers, and one if there are too many."""
        producers, expired_until_ms = self._producers, now_ms - EXPIRATION_MS
        if now_ms >= self._expires_from_ms:
            for producer_id in tuple(islice(producers, _EXPIRED_AT_ONCE)):
                if _written_ms(producers[producer_id]) > expired_until_ms:
                    break
                del producers[producer_id]
                self.expired += 1
        if len(producers) > self._max_producers:
            _, dropped = producers.popitem(last=False)
            if _written_ms(dropped) <= expired_until_ms:
                self.expired += 1
                return
            self.evicted += 1
            if self.evicted & (self.evicted - 1) == 0:
                _logger.warning(
                    "oldest producer ids forgotten",
                    remembered=self._max_producers,
                    evicted=self.evicted,
                )


def _written_ms(known: bytes) -> int:
    written_ms: int = _PRODUCER.unpack_from(known)[1]
    return written_ms


def _out_of_order(batch: RecordBatch, expected: int) -> Judgement:
    who = f"producer {batch.producer_id} epoch {batch.producer_epoch}"
    detail = f"{who}: sequence {expected} expected, {batch.base_sequence} came"
    return Judgement(BatchVerdict.OUT_OF_ORDER, detail=detail)


class ProducerHistory:
    """Earlier copies of a log's producer states, at most HISTORY_COPIES.

    Each belongs to the offset that follows it. With a copy, a truncation need not read the log from its beginning: most
    truncations are short. The number of bytes between two copies grows with the number of producers, because copying
    would otherwise cost more than appending.
    """

    def __init__(self) -> None:
        self._before: dict[int, ProducerStates] = {}
        self._bytes_since = 0

    def note_batch(self, offset: int, size_in_bytes: int, producers: ProducerStates) -> None:
        """Count a batch of that size at `offset`; `producers` are the states before it."""
        self._bytes_since += size_in_bytes
        if self._bytes_since >= HISTORY_INTERVAL_BYTES + len(producers) * HISTORY_BYTES_PER_PRODUCER:
            self.keep(offset, producers)

    def keep(self, offset: int, producers: ProducerStates) -> None:
        """Keep a copy of the states before `offset`."""
        self._bytes_since = 0
        self._before[offset] = producers.copy()
        if len(self._before) > HISTORY_COPIES:
            del self._before[min(self._before)]

    def newest_up_to(self, offset: int) -> tuple[int, ProducerStates] | None:
        """Return the newest copy at or below `offset`, which must not be changed, and its offset."""
        newest = max((each for each in self._before if each <= offset), default=None)
        return None if newest is None else (newest, self._before[newest])

    def restore(self, log_end_offset: int, log_start_offset: int) -> tuple[int, ProducerStates]:
        """Go back to a log that ends at `log_end_offset`.

        Return the offset from which its batches must be read, and the states to apply them to.
        """
        self._before = {offset: states for offset, states in self._before.items() if offset <= log_end_offset}
        self._bytes_since = 0
        if not self._before:
            return log_start_offset, ProducerStates()
        latest = max(self._before)
        return latest, self._before[latest].copy()

    def clear(self) -> None:
        self._before.clear()
        self._bytes_since = 0
