"""Define small handwritten trails and logs: one topic per case, so that one audit judges all of them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from kproxy.pipeline.audit.judge import Batch, Bounds
from kproxy.pipeline.audit.log_client import TopicPartition, Unread
from kproxy.pipeline.audit.rules import AuditRules
from kproxy.pipeline.audit.steps import Results, audit_rows
from kproxy.pipeline.audit.trail_rows import TrailRow

BEGAN_AT = 1_760_000_000_000
INTERVAL_MS = 5_000

Row = dict[str, Any]


# Invalid lines.
BAD_LINES = [
    '{"kind":"range","proxy":"p","incarnation":"p","sequence":900,"at":1,"topic":"t","spans":[1]}',
    '{"kind":"range","proxy":"p","incarnation":"p","sequence":901,"at":1}',
    '{"kind":"begin","proxy":"p","sequence":902,"at":1}',
    '{"kind":"other","proxy":"p","incarnation":"p","sequence":903,"at":1}',
    '{"kind":"mark","proxy":"p","incarn',
    "",
]


class Trail:
    """The trail of one proxy; times are milliseconds after BEGAN_AT."""

    def __init__(self, proxy: str = "proxy:9092", incarnation: str = "a", began: int = 0) -> None:
        self._who = {"proxy": proxy, "incarnation": incarnation}
        self.rows: list[Row] = []
        self._add("begin", began, interval_ms=INTERVAL_MS, mark_ms=10_000)

    def _add(self, kind: str, at: int, **columns: Any) -> Row:
        row = {"kind": kind, "sequence": len(self.rows), "at": BEGAN_AT + at, **self._who, **columns}
        self.rows.append(row)
        return row

    def mark(self, at: int) -> None:
        self._add("mark", at)

    def end(self, at: int) -> None:
        self._add("end", at)

    def acked(
        self,
        topic: str,
        *spans: int,
        at: int = 1_000,
        partition: int = 0,
        owner: int = 1,
        revision: int = 7,
        producer: int = -1,
        epoch: int = 0,
        sequence: int = 0,
        acks: int = -1,
        first_at: int | None = None,
        closed_at: int | None = None,
        shipped_at: int | None = None,
        connection: int = 1,
        latency_us: Sequence[int] = (),
        topic_id: str | None = None,
    ) -> Row:
        """`spans`: offset, count, offset, count, …; `sequence`: the first one's, if there is a `producer`."""
        records = sum(spans[1::2])
        return self._add(
            "range",
            at if closed_at is None else closed_at,
            topic=topic,
            topic_id=topic_id,
            partition=partition,
            owner=owner,
            revision=revision,
            acks=acks,
            connection=connection,
            peer="192.0.2.1:50000",
            client_id="test",
            producer_id=producer,
            producer_epoch=epoch if producer >= 0 else -1,
            first_sequence=sequence if producer >= 0 else -1,
            base_offset=spans[0],
            record_count=records,
            batches=len(spans) // 2,
            bytes=records * 10,
            first_acked_at=BEGAN_AT + (at if first_at is None else first_at),
            last_acked_at=BEGAN_AT + at,
            spans=list(spans),
            latency_us=list(latency_us),
            shipped_at=None if shipped_at is None else BEGAN_AT + shipped_at,
        )


def batch(
    topic: str,
    base: int,
    count: int,
    *,
    partition: int = 0,
    producer: int = -1,
    epoch: int = 0,
    sequence: int = 0,
    records: int | None = None,
    is_control: bool = False,
    crc_ok: bool | None = True,
) -> Row:
    """A batch header: offsets [base, base + count), of which `records` exist (all)."""
    return {
        "topic": topic,
        "partition": partition,
        "base_offset": base,
        "last_offset": base + count - 1,
        "record_count": count if records is None else records,
        "producer_id": producer,
        "producer_epoch": epoch if producer >= 0 else -1,
        "base_sequence": sequence if producer >= 0 else -1,
        "is_control": is_control,
        "crc_ok": crc_ok,
    }


def bounds(
    topic: str,
    end: int,
    *,
    start: int = 0,
    partition: int = 0,
    is_compacted: bool = False,
    topic_id: str | None = None,
) -> Row:
    return {
        "topic": topic,
        "partition": partition,
        "log_start_offset": start,
        "end_offset": end,
        "is_compacted": is_compacted,
        "topic_id": topic_id,
    }


def page(rows: Iterable[Row]) -> str:
    return "\n".join(json.dumps({name: value for name, value in row.items() if value is not None}) for row in rows)


def trail_rows(rows: Iterable[Row]) -> list[TrailRow]:
    names = TrailRow.__slots__
    return [TrailRow(**{name: value for name, value in row.items() if name in names}) for row in rows]


def batches_in(log: Iterable[Row]) -> dict[TopicPartition, list[Batch]]:
    batches: dict[TopicPartition, list[Batch]] = defaultdict(list)
    for row in log:
        batches[TopicPartition(row["topic"], row["partition"])].append(Batch(*(row[name] for name in Batch._fields)))
    return batches


def bounds_in(limits: Iterable[Row]) -> dict[TopicPartition, Bounds]:
    return {
        TopicPartition(row["topic"], row["partition"]): Bounds(*(row[name] for name in Bounds._fields))
        for row in limits
    }


def judged_here(
    rows: Iterable[Row], log: Iterable[Row], limits: Iterable[Row], rules: AuditRules, unread: Unread | None = None
) -> Results:
    """Audit in this process."""
    return audit_rows(trail_rows(rows), batches_in(log), bounds_in(limits), rules, unread or {})


def shared_names() -> list[Row]:
    """Two pairs of proxies that share a name. The first one continues; or it was killed, or its first row is lost."""
    killed, other = Trail("killed:9092", "a"), Trail("killed:9092", "b", began=10_000)
    killed.acked("t", 0, 10, at=20_000)
    other.end(30_000)
    headless, before = Trail("headless:9092", "b", began=20_000), Trail("headless:9092", "a")
    headless.acked("t", 10, 10, at=25_000)
    headless.end(26_000)
    before.end(40_000)
    del headless.rows[0]
    return [row for trail in (killed, other, headless, before) for row in trail.rows]
