"""Acknowledged batches of one producer, put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kproxy_codec.record_batch import NO_SEQUENCE, add_sequence


class Chunk(NamedTuple):
    """Batches of one producer whose sequence numbers have no gap; all as in `rows.Range`."""

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


def extend_spans(spans: list[int], more: Sequence[int]) -> None:
    """Put more spans behind; the first of them may go on where the last one ends."""
    if spans and spans[-2] + spans[-1] == more[0]:
        spans[-1] += more[1]
        spans.extend(more[2:])
    else:
        spans.extend(more)
