"""What a partition remembers of its idempotent producers (KIP-98), so that a resend is not a second record.

State: per producer id its epoch and its last RETAINED_BATCHES batches, oldest first. Rebuilt from the log when the log
is opened, kept current by each append.

Verdict on a batch of (producer_id, epoch, base_sequence .. last_sequence)
  duplicate          a retained batch of this epoch has the same sequences: answered with its first offset
  producer fenced    the epoch is below the one remembered
  out of order       the sequence does not follow; a new epoch begins at 0
  accepted           anything else. A producer id that is not remembered may begin at any sequence, as at Apache Kafka
                     since 2.5 (KIP-360): its state may have been dropped.

Invariants
1. At most `max_producers` ids are remembered; the one that wrote longest ago is dropped first.
2. A verdict changes nothing; only `update`, called once a batch is in the log, does.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from enum import Enum
from typing import NamedTuple

from codec.record_batch import NO_PRODUCER_ID, RecordBatch, add_sequence

RETAINED_BATCHES = 5
MAX_PRODUCERS = 5000


class _Retained(NamedTuple):
    base_sequence: int
    last_sequence: int
    base_offset: int
    last_offset: int


class _Producer:
    __slots__ = ("batches", "epoch")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.batches: deque[_Retained] = deque(maxlen=RETAINED_BATCHES)

    def copy(self) -> _Producer:
        copied = _Producer(self.epoch)
        copied.batches = self.batches.copy()
        return copied


class Verdict(Enum):
    """What to do with a batch."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    OUT_OF_ORDER = "out of order"
    FENCED = "producer fenced"


class Judgement(NamedTuple):
    """`base_offset` and `last_offset` are those of a duplicate, -1 otherwise; `detail` says what was expected."""

    verdict: Verdict
    base_offset: int = -1
    last_offset: int = -1
    detail: str = ""


_ACCEPTED = Judgement(Verdict.ACCEPTED)


class ProducerStates:
    """The producers of one partition."""

    def __init__(self, max_producers: int = MAX_PRODUCERS) -> None:
        self._producers: OrderedDict[int, _Producer] = OrderedDict()
        self._max_producers = max_producers

    def __len__(self) -> int:
        return len(self._producers)

    def copy(self) -> ProducerStates:
        """The same producers, which go their own way from here."""
        copied = ProducerStates(self._max_producers)
        copied._producers.update((producer_id, known.copy()) for producer_id, known in self._producers.items())
        return copied

    def judge(self, batch: RecordBatch) -> Judgement:
        """Whether `batch` may be appended."""
        if batch.producer_id == NO_PRODUCER_ID:
            return _ACCEPTED
        known = self._producers.get(batch.producer_id)
        if known is None:
            return _ACCEPTED
        if batch.producer_epoch < known.epoch:
            detail = f"producer {batch.producer_id} has epoch {known.epoch}, the batch {batch.producer_epoch}"
            return Judgement(Verdict.FENCED, detail=detail)
        if batch.producer_epoch > known.epoch:
            if batch.base_sequence == 0:
                return _ACCEPTED
            return _out_of_order(batch, 0)
        last_sequence = batch.last_sequence
        for retained in known.batches:
            if retained.base_sequence == batch.base_sequence and retained.last_sequence == last_sequence:
                return Judgement(Verdict.DUPLICATE, retained.base_offset, retained.last_offset)
        expected = add_sequence(known.batches[-1].last_sequence, 1)
        return _ACCEPTED if batch.base_sequence == expected else _out_of_order(batch, expected)

    def update(self, batch: RecordBatch, base_offset: int) -> None:
        """Remember that `batch` stands in the log at `base_offset`."""
        producer_id = batch.producer_id
        if producer_id == NO_PRODUCER_ID or batch.is_control:
            return
        known = self._producers.get(producer_id)
        if known is None or known.epoch != batch.producer_epoch:
            known = self._producers[producer_id] = _Producer(batch.producer_epoch)
        last_offset = base_offset + batch.last_offset_delta
        known.batches.append(_Retained(batch.base_sequence, batch.last_sequence, base_offset, last_offset))
        self._producers.move_to_end(producer_id)
        if len(self._producers) > self._max_producers:
            self._producers.popitem(last=False)


def _out_of_order(batch: RecordBatch, expected: int) -> Judgement:
    who = f"producer {batch.producer_id} epoch {batch.producer_epoch}"
    detail = f"{who}: sequence {expected} expected, {batch.base_sequence} came"
    return Judgement(Verdict.OUT_OF_ORDER, detail=detail)
