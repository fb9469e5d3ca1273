"""The rows of a trail: decode them, and distinguish a proxy's rows from foreign ones. Both engines use it.

Anyone may write to the trail's topic. Rows that no proxy writes must not make the audit fail, by numbers that overflow
or that stand for too much data: they are skipped, like partial rows. Their sequence numbers are then missing, which the
audit reports as a gap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Final

from kproxy.pipeline.audit.judge import Range
from kproxy.pipeline.audit.proof import Stamp
from kproxy.trail.signature import Signatures, digest

if TYPE_CHECKING:
    import msgspec

KINDS: Final = ("begin", "range", "mark", "end")
# Limits far above real values, and far below those whose sums overflow.
LAST_MS: Final = 1 << 47
MOST_OFFSETS: Final = 1 << 60
MOST_RECORDS: Final = 1 << 36
MOST_BYTES: Final = 1 << 48
# A row has at most four times kproxy.trail.acknowledgements.MAX_SPANS numbers.
MOST_IN_SPANS: Final = 10_000


@dataclass(slots=True)
class TrailRow:
    """A row of any kind, as kproxy.trail.rows describes; fields that a kind lacks are None."""

    kind: str
    proxy: str
    incarnation: str
    sequence: int
    at: int
    interval_ms: int | None = None
    mark_ms: int | None = None
    topic: str | None = None
    topic_id: str | None = None
    partition: int | None = None
    owner: int | None = None
    revision: int | None = None
    acks: int | None = None
    connection: int | None = None
    producer_id: int | None = None
    producer_epoch: int | None = None
    first_sequence: int | None = None
    record_count: int | None = None
    batches: int | None = None
    bytes: int | None = None
    first_acked_at: int | None = None
    last_acked_at: int | None = None
    spans: list[int] | None = None
    latency_us: list[int] | None = None
    previous: str | None = None
    shipped_at: int | None = None
    digest: str | None = field(default=None, compare=False)

    def stamp(self) -> Stamp:
        return Stamp(self.sequence, self.at, self.kind, self.interval_ms, self.mark_ms, self.previous, self.digest)

    def acknowledged(self) -> Range:
        """Return the row as the judge's Range. Only for a valid row of kind `range`."""
        return Range(
            self.proxy, self.incarnation, self.sequence, self.at, self.shipped_at, self.owner or 0, self.revision or 0,
            self.acks, self.connection, -1 if self.producer_id is None else self.producer_id, self.producer_epoch,
            self.first_sequence, self.record_count or 0, self.batches or 0, self.bytes or 0, self.first_acked_at or 0,
            self.last_acked_at or 0, self.spans or (), self.latency_us,
        )  # fmt: skip


# How many fields, the first ones, all rows have.
NEEDED_FIELDS: Final = 5


@cache
def _decoder() -> msgspec.json.Decoder[TrailRow]:
    # Imported here, because executors lack it.
    import msgspec

    return msgspec.json.Decoder(TrailRow)


def rows_in(page: bytes, shipped_at: int | None = None, signatures: Signatures | None = None) -> Iterator[TrailRow]:
    """Yield the rows in lines of JSON, without those that no proxy writes, or that are not signed."""
    decode = _decoder().decode
    for line in page.split(b"\n"):
        if signatures is not None and line and not signatures.accept(line):
            continue
        try:
            row = decode(line)
        except ValueError:
            continue
        row.shipped_at, row.digest = shipped_at, digest(line)
        if is_row(row):
            yield row


def is_row(row: TrailRow) -> bool:
    """Return whether a proxy may have written it."""
    if row.kind not in KINDS or not 0 <= row.sequence <= MOST_OFFSETS or not 0 <= row.at <= LAST_MS:
        return False
    if any(value is not None and not 0 <= value <= LAST_MS for value in (row.interval_ms, row.mark_ms)):
        return False
    return row.kind != "range" or _is_range(row)


def _is_range(row: TrailRow) -> bool:
    spans = row.spans
    if not spans or len(spans) % 2 or len(spans) > MOST_IN_SPANS or min(spans) < 0 or max(spans) > MOST_OFFSETS:
        return False
    if max(spans[1::2]) > MOST_RECORDS:
        return False
    if None in (row.topic, row.partition, row.owner, row.revision) or row.producer_id is None:
        return False
    for value, most in (
        (row.record_count, MOST_RECORDS),
        (row.batches, MOST_RECORDS),
        (row.bytes, MOST_BYTES),
        (row.first_acked_at, LAST_MS),
        (row.last_acked_at, LAST_MS),
    ):
        if value is None or not 0 <= value <= most:
            return False
    sequence = -1 if row.first_sequence is None else row.first_sequence
    return row.producer_id < 0 or (row.producer_epoch is not None and sequence >= 0)
