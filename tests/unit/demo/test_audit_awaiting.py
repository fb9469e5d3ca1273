"""The demo recognizes by the received rows when the trails cover all time before a given moment."""

from __future__ import annotations

import pytest

from kproxy.demo.run import cover
from kproxy.pipeline.audit.proof import Stamp, TrailName
from kproxy.pipeline.audit.trail_place import SHIPPING_MS
from kproxy.pipeline.audit.trail_rows import rows_in
from kproxy.trail.rows import Begin, End, Mark, Range, Row, encode_page

UNTIL_MS = 100_000
INTERVAL_MS, MARK_MS = 2_000, 10_000


def begin(at: int, incarnation: str = "a") -> Begin:
    return Begin(
        proxy="p:1", incarnation=incarnation, sequence=0, at=at, interval_ms=INTERVAL_MS, mark_ms=MARK_MS
    )  # fmt: skip


def mark(at: int, incarnation: str = "a") -> Mark:
    return Mark(proxy="p:1", incarnation=incarnation, sequence=1, at=at)


def end(at: int, incarnation: str = "a") -> End:
    return End(proxy="p:1", incarnation=incarnation, sequence=2, at=at)


def acked(at: int) -> Range:
    return Range(
        proxy="p:1", incarnation="a", sequence=1, at=at, topic="t", topic_id=None, partition=0, owner=1, revision=1,
        acks=-1, connection=1, peer="", client_id="", principal=None, producer_id=-1, producer_epoch=-1,
        first_sequence=-1, base_offset=0, record_count=1, batches=1, bytes=1, first_acked_at=at, last_acked_at=at,
        spans=[0, 1], latency_us=[],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        pytest.param([], False, id="no trail"),
        pytest.param([begin(90_000)], False, id="one that has begun"),
        pytest.param([begin(102_000)], True, id="one that began later"),
        pytest.param([begin(90_000), mark(99_999)], False, id="idle before"),
        pytest.param([begin(90_000), mark(100_000)], True, id="idle since"),
        pytest.param([begin(90_000), acked(101_999)], False, id="a row that may have been closed too early"),
        pytest.param([begin(90_000), acked(102_000)], True, id="a row that was closed late enough"),
        pytest.param([begin(90_000), end(95_000)], True, id="ended before"),
        pytest.param([begin(90_000), mark(100_000), begin(91_000, "b")], False, id="another is behind"),
        pytest.param(
            [begin(90_000), mark(100_000), begin(91_000, "b"), end(92_000, "b")], True, id="another has ended"
        ),
    ],
)
def test_audit_waits_until_every_trail_is_complete(rows: list[Row], told: bool) -> None:
    assert cover(stamps(rows), UNTIL_MS, now_ms=UNTIL_MS + 1_000) is told


def test_overdue_silent_trail_is_not_awaited() -> None:
    read = stamps([begin(90_000), mark(UNTIL_MS), begin(50_000, "killed")])
    silent_ms = 50_000 + INTERVAL_MS + MARK_MS + SHIPPING_MS

    assert not cover(read, UNTIL_MS, silent_ms)
    assert cover(read, UNTIL_MS, silent_ms + 1)


def stamps(rows: list[Row]) -> dict[TrailName, list[Stamp]]:
    read: dict[TrailName, list[Stamp]] = {}
    for row in rows_in(encode_page(rows)):
        read.setdefault((row.proxy, row.incarnation), []).append(row.stamp())
    return read
