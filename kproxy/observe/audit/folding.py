"""What was noted of batches one by one, put together: batches that go on where the last one ended are one chunk.

Most of what comes is one producer's batches without a gap; that is found out for hundreds of them with a few calls
that run at C's speed. Only what is otherwise is looked at one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, compress
from operator import add, ne, sub
from struct import Struct
from typing import Final, NamedTuple

from codec.record_batch import MAGIC, NO_PRODUCER_ID, NO_SEQUENCE, add_sequence

HEAD: Final = Struct(">8xi4xb6xi16xqhi")
"""Of a batch: batch_length, magic, last_offset_delta, producer_id, producer_epoch, base_sequence."""
HEAD_FIELDS: Final = 6
_LENGTHS, _MAGICS, _DELTAS, _IDS, _EPOCHS, _SEQUENCES = range(HEAD_FIELDS)
# What batch_length does not count.
_OVERHEAD_BYTES = 12
# For fewer batches the calls cost more than they save.
_FEW = 4


class Chunk(NamedTuple):
    """Batches of one producer whose sequence numbers have no gap; all but `spans` as in `rows.Range`."""

    producer_id: int
    producer_epoch: int
    first_sequence: int
    spans: list[int]
    record_count: int
    batches: int
    bytes: int

    @property
    def next_sequence(self) -> int:
        """What the producer's next batch begins with."""
        return add_sequence(self.first_sequence, self.record_count) if self.first_sequence >= 0 else NO_SEQUENCE


def fold(bases: Sequence[int], heads: Sequence[int]) -> list[Chunk] | None:
    """Chunks in the order of the answers; None where something was no batch of the kind that we read.

    `bases` are the offsets that brokers gave to the batches, `heads` the fields of HEAD, batch after batch.
    """
    if len(bases) == 1:
        length, magic, delta, producer_id, epoch, sequence = heads
        if magic != MAGIC or delta < 0 or bases[0] < 0:
            return None
        return [_single(bases[0], length, delta, producer_id, epoch, sequence)]
    magics = heads[_MAGICS::HEAD_FIELDS]
    deltas = heads[_DELTAS::HEAD_FIELDS]
    if magics.count(MAGIC) != len(bases) or min(deltas) < 0 or min(bases) < 0:
        return None
    if len(bases) >= _FEW:
        chunk = _fold_alike(bases, heads, deltas)
        if chunk is not None:
            return [chunk]
    return _fold_singly(bases, heads)


def _fold_alike(bases: Sequence[int], heads: Sequence[int], deltas: Sequence[int]) -> Chunk | None:
    """One chunk, where all are one producer's and nothing is missing between them."""
    batches = len(bases)
    ids, epochs = heads[_IDS::HEAD_FIELDS], heads[_EPOCHS::HEAD_FIELDS]
    if ids.count(ids[0]) != batches or epochs.count(epochs[0]) != batches:
        return None
    counts = [delta + 1 for delta in deltas]
    sequences = heads[_SEQUENCES::HEAD_FIELDS]
    # Where sequence numbers wrap, which is once in 2^31 records, this is not so and each is looked at.
    if ids[0] != NO_PRODUCER_ID and list(accumulate(counts[:-1], initial=sequences[0])) != list(sequences):
        return None
    return Chunk(
        ids[0],
        epochs[0],
        NO_SEQUENCE if ids[0] == NO_PRODUCER_ID else sequences[0],
        _spans(bases, counts),
        sum(counts),
        batches,
        sum(heads[_LENGTHS::HEAD_FIELDS]) + _OVERHEAD_BYTES * batches,
    )


def _spans(bases: Sequence[int], counts: Sequence[int]) -> list[int]:
    ends = list(map(add, bases, counts))
    if ends[:-1] == list(bases[1:]):
        return [bases[0], ends[-1] - bases[0]]
    # Others write in between: a span begins where the one before did not end.
    begins = list(map(ne, bases[1:], ends))
    firsts = [bases[0], *compress(bases[1:], begins)]
    lasts = [*compress(ends, begins), ends[-1]]
    return list(chain.from_iterable(zip(firsts, map(sub, lasts, firsts), strict=True)))


def _fold_singly(bases: Sequence[int], heads: Sequence[int]) -> list[Chunk]:
    chunks: list[Chunk] = []
    last: Chunk | None = None
    fields = [heads[place::HEAD_FIELDS] for place in range(HEAD_FIELDS)]
    for base, length, _, *rest in zip(bases, *fields, strict=True):
        batch = _single(base, length, *rest)
        if (
            last is not None
            and batch.first_sequence == last.next_sequence
            and batch.producer_id == last.producer_id
            and batch.producer_epoch == last.producer_epoch
        ):
            extend_spans(last.spans, batch.spans)
            last = last._replace(
                record_count=last.record_count + batch.record_count,
                batches=last.batches + 1,
                bytes=last.bytes + batch.bytes,
            )
            chunks[-1] = last
        else:
            last = batch
            chunks.append(last)
    return chunks


def _single(base: int, length: int, delta: int, producer_id: int, epoch: int, sequence: int) -> Chunk:
    # Clients that are not idempotent write what they like where the sequence stands.
    first_sequence = NO_SEQUENCE if producer_id == NO_PRODUCER_ID else sequence
    return Chunk(producer_id, epoch, first_sequence, [base, delta + 1], delta + 1, 1, length + _OVERHEAD_BYTES)


def extend_spans(spans: list[int], more: Sequence[int]) -> None:
    """Put more spans behind; the first of them may go on where the last one ends."""
    if spans and spans[-2] + spans[-1] == more[0]:
        spans[-1] += more[1]
        spans.extend(more[2:])
    else:
        spans.extend(more)
