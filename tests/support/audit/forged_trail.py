"""Write trails by hand, as a proxy would have written them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from kproxy.trail.rows import Begin, End, Mark, Range, Row

INTERVAL_MS = 2_000
MARK_MS = 10_000


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass
class ForgedTrail:
    """Rows of one incarnation, a second apart from `began_ms` on."""

    incarnation: str
    proxy: str = "proxy:9092"
    began_ms: int = field(default_factory=lambda: now_ms() - 60_000)
    sequence: int = 0

    @property
    def at(self) -> int:
        return self.began_ms + 1_000 * self.sequence

    def begin(self) -> Row:
        return self._next(Begin, interval_ms=INTERVAL_MS, mark_ms=MARK_MS)

    def mark(self) -> Row:
        return self._next(Mark)

    def end(self) -> Row:
        return self._next(End)

    def acked(
        self, topic: str, first: int, count: int, *, owner: int = 1, revision: int = 1, topic_id: str | None = None
    ) -> Row:
        """Offsets of partition 0 from `first` on, of a producer without an id."""
        return self._next(
            Range,
            topic=topic,
            topic_id=topic_id,
            partition=0,
            owner=owner,
            revision=revision,
            acks=-1,
            connection=owner,
            peer="127.0.0.1:1",
            client_id="forged",
            principal=None,
            producer_id=-1,
            producer_epoch=-1,
            first_sequence=-1,
            base_offset=first,
            record_count=count,
            batches=1,
            bytes=100 * count,
            first_acked_at=self.at - 500,
            last_acked_at=self.at - 500,
            spans=[first, count],
            latency_us=[1_500],
        )

    def skip(self) -> None:
        """A row that is never shipped."""
        self.sequence += 1

    def _next(self, kind: type[Row], **columns: Any) -> Row:
        row = kind(proxy=self.proxy, incarnation=self.incarnation, sequence=self.sequence, at=self.at, **columns)
        self.sequence += 1
        return row
