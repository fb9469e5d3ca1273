"""Define handwritten trails and logs with the audit's expected results; each topic is a case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from kproxy.pipeline.audit.rules import AuditRules
from tests.support.audit.trails import BEGAN_AT, Row, Trail, batch, bounds

WINDOW_MS = 10_000
LAP = 1 << 31
TOPIC_ID = "0f"


class Case(NamedTuple):
    """`counts`: the partition's, except zeros; `findings`: kind, first and last offset, and more."""

    tell: Callable[[Trail, str], None]
    log: list[tuple[Any, ...]]
    counts: dict[str, Any]
    findings: Sequence[dict[str, Any]] = ()
    end: int = 300
    start: int = 0
    compacted: bool = False


def acked(*calls: dict[str, Any]) -> Callable[[Trail, str], None]:
    def tell(trail: Trail, topic: str) -> None:
        for call in calls:
            more = {name: value for name, value in call.items() if name != "spans"}
            trail.acked(topic, *call["spans"], **more)

    return tell


def ack(*spans: int, **more: Any) -> dict[str, Any]:
    return {"spans": spans, **more}


def found(kind: str, first_offset: int | None = None, last_offset: int | None = None, **more: Any) -> dict[str, Any]:
    """What is compared of a finding."""
    offsets = {"first_offset": first_offset, "last_offset": last_offset}
    return {"kind": kind, **{name: offset for name, offset in offsets.items() if offset is not None}, **more}


P = {"producer": 5}

CASES: dict[str, Case] = {
    "all-there": Case(
        acked(ack(0, 100), ack(100, 200, **P)), [(0, 100), (100, 200, P)], {"acked": 300, "present": 300}
    ),
    "in-other-batches": Case(acked(ack(0, 300)), [(k * 10, 10) for k in range(30)], {"acked": 300, "present": 300}),
    "interleaved": Case(
        acked(ack(0, 10, 20, 10, 40, 10, producer=1), ack(10, 10, 30, 10, 50, 250, producer=2)),
        [
            (0, 10, {"producer": 1}),
            (10, 10, {"producer": 2}),
            (20, 10, {"producer": 1, "sequence": 10}),
            (30, 10, {"producer": 2, "sequence": 10}),
            (40, 10, {"producer": 1, "sequence": 20}),
            (50, 250, {"producer": 2, "sequence": 20}),
        ],
        {"acked": 300, "present": 300},
    ),
    "lost-in-the-middle": Case(
        acked(ack(0, 300, **P)),
        [(0, 100, P), (150, 150, {"producer": 5, "sequence": 150})],
        {"acked": 300, "present": 250, "lost": 50},
        [found("lost", 100, 149, records=50, owner=1, producer_id=5)],
    ),
    "lost-behind-the-end": Case(
        acked(ack(0, 300)),
        [(0, 290)],
        {"acked": 300, "present": 290, "lost": 10},
        [found("lost", 290, 299, revision=7, from_ms=BEGAN_AT + 1000)],
        end=290,
    ),
    "lost-with-acks-1": Case(
        acked(ack(0, 300, acks=1)),
        [(0, 290)],
        {"acked": 300, "present": 290, "lost": 10},
        [found("lost", 290, 299, detail="acks=1")],
    ),
    "another-record-in-its-place": Case(
        acked(ack(0, 100, **P)),
        [(0, 90, P), (90, 10, {"producer": 6})],
        {"acked": 100, "present": 90, "lost": 10},
        [found("lost", 90, 99, detail="the log has other records there")],
    ),
    "removed-by-retention": Case(
        acked(ack(0, 300)), [(200, 100)], {"acked": 300, "present": 100, "removed": 200}, start=200
    ),
    "lost-and-removed": Case(
        acked(ack(0, 300)),
        [(250, 50)],
        {"acked": 300, "present": 50, "removed": 200, "lost": 50},
        [found("lost", 200, 249, records=50)],
        start=200,
    ),
    "removed-by-compaction": Case(
        acked(ack(0, 300)),
        [(0, 100), (200, 100, {"records": 40})],
        {"acked": 300, "present": 140, "removed": 160},
        compacted=True,
    ),
    # Compaction removes nothing at a log's end, and never puts another record at an offset.
    "compacted-and-cut-off": Case(
        acked(ack(0, 300)),
        [(0, 100), (200, 50)],
        {"acked": 300, "present": 150, "removed": 100, "lost": 50},
        [found("lost", 250, 299, records=50, detail="the log ends earlier")],
        end=250,
        compacted=True,
    ),
    "compacted-and-cut-off-before-all-of-it": Case(
        acked(ack(100, 50)),
        [],
        {"acked": 50, "lost": 50},
        [found("lost", 100, 149)],
        end=100,
        compacted=True,
    ),
    "compacted-with-another-record-in-its-place": Case(
        acked(ack(0, 100, **P)),
        [(0, 40, P), (60, 30, {"producer": 6}), (90, 10, {"producer": 5, "sequence": 90})],
        {"acked": 100, "present": 50, "removed": 20, "lost": 30},
        [found("lost", 60, 89, detail="the log has other records there")],
        compacted=True,
    ),
    "fewer-records-than-offsets": Case(
        acked(ack(0, 300)),
        [(0, 300, {"records": 299})],
        {"acked": 300, "present": 299, "lost": 1},
        [
            found(
                "lost",
                0,
                299,
                records=1,
                detail="and the batch there lacks one of its records, and does not say which.",
            )
        ],
    ),
    "corrupt": Case(
        acked(ack(0, 300)),
        [(0, 200), (200, 50, {"crc_ok": False}), (250, 50)],
        {"acked": 300, "present": 250, "lost": 50, "corrupt": 1, "unsequenced": 2},
        [
            found("corrupt", 200, 249, records=50),
            found("lost", 200, 249),
        ],
    ),
    "checksums-not-looked-at": Case(
        acked(ack(0, 300)),
        [(0, 200), (200, 50, {"crc_ok": None}), (250, 50, {"crc_ok": None})],
        {"acked": 300, "present": 300, "unchecked": 2, "unsequenced": 3, "unproven": True},
        [found("unchecked", detail="the checksums of 2 batches were not checked")],
    ),
    "nobody-was-told": Case(
        acked(ack(0, 100)), [(0, 100), (100, 200)], {"acked": 100, "present": 100, "unclaimed": 200}
    ),
    "markers-are-nobody's": Case(
        acked(ack(0, 100), ack(101, 199)),
        [(0, 100), (100, 1, {"producer": 5, "is_control": True}), (101, 199)],
        {"acked": 299, "present": 299},
    ),
    "two-owners-of-one-offset": Case(
        acked(ack(0, 200, owner=1, revision=7, **P), ack(190, 110, owner=2, revision=9, producer=6)),
        [(0, 190, P), (190, 110, {"producer": 6})],
        {"acked": 300, "present": 300, "overlapped": 10, "ownership_changes": 1, "owners": [1, 2], "producers": 2},
        [found("overlap", 190, 199, records=10, owner=1, revision=7, other_owner=2, other_revision=9)],
    ),
    "two-owners-and-the-first-again": Case(
        acked(
            ack(0, 200, owner=1, revision=7, **P),
            ack(190, 10, owner=2, revision=9, at=2_000, producer=6),
            ack(190, 10, owner=1, revision=11, at=3_000, producer=7),
        ),
        [(0, 200, P)],
        {"acked": 200, "present": 200, "overlapped": 10, "ownership_changes": 2},
        [
            found(
                "overlap",
                190,
                199,
                owner=1,
                other_owner=2,
                other_revision=9,
                detail="by broker 1 at revision 7 and by broker 2 at revision 9.",
            )
        ],
        end=200,
    ),
    "one-owner-at-two-revisions": Case(
        acked(ack(0, 300), ack(100, 10, revision=9)),
        [(0, 300)],
        {"acked": 300, "present": 300, "overlapped": 10},
        [found("overlap", other_revision=9, detail="by broker 1 at revision 7 and again at revision 9.")],
    ),
    "one-owner-twice": Case(
        acked(ack(0, 300), ack(100, 10)),
        [(0, 300)],
        {"acked": 300, "present": 300, "overlapped": 10},
        [found("overlap", 100, 109, owner=1, other_owner=1, detail="twice")],
    ),
    "twice-in-one-row": Case(
        acked(ack(0, 200, 200, 100, 200, 100)),
        [(0, 300)],
        {"acked": 300, "present": 300, "overlapped": 100},
        [found("overlap", 200, 299, owner=1, other_owner=1)],
    ),
    "sent-again": Case(
        acked(ack(0, 300, **P), ack(100, 50, producer=5, sequence=100, owner=2, revision=9)),
        [(0, 300, P)],
        {"acked": 300, "present": 300, "ownership_changes": 1, "owners": [1, 2], "batches": 2, "unsequenced": 0},
    ),
    "sent-again-and-gone-on": Case(
        acked(ack(0, 200, **P), ack(150, 150, producer=5, sequence=150)),
        [(0, 200, P), (200, 100, {"producer": 5, "sequence": 200})],
        {"acked": 300, "present": 300},
    ),
    "sent-again-in-two-spans": Case(
        acked(ack(0, 50, 100, 50, **P), ack(50, 50), ack(120, 30, 200, 100, producer=5, sequence=70)),
        [
            (0, 50, P),
            (50, 50),
            (100, 50, {"producer": 5, "sequence": 50}),
            (150, 50),
            (200, 100, {"producer": 5, "sequence": 100}),
        ],
        {"acked": 250, "present": 250, "unclaimed": 50},
    ),
    "same-sequence-of-another-epoch": Case(
        acked(ack(0, 300, **P), ack(100, 10, producer=5, epoch=1, sequence=100)),
        [(0, 300, P)],
        {"acked": 300, "present": 300, "overlapped": 10},
        [found("overlap", 100, 109)],
    ),
    "sequence-wraps": Case(
        acked(ack(0, 300, producer=5, sequence=LAP - 100), ack(150, 10, producer=5, sequence=50)),
        [(0, 100, {"producer": 5, "sequence": LAP - 100}), (100, 200, P)],
        {"acked": 300, "present": 300},
    ),
    "appended-twice": Case(
        acked(ack(0, 100, **P)),
        [(0, 100, P), (100, 100, P), (200, 100, {"producer": 5, "sequence": 100})],
        {"acked": 100, "present": 100, "duplicated": 100, "unclaimed": 200},
        [found("duplicate", 100, 199, producer_id=5, detail="is already at offset 0")],
    ),
    # Without sequence numbers, no check can tell these from acknowledged records.
    "appended-twice-unsequenced": Case(
        acked(ack(0, 100)),
        [(0, 100), (100, 100)],
        {"acked": 100, "present": 100, "unclaimed": 100, "unsequenced": 2},
    ),
    "swapped": Case(
        acked(ack(0, 20, **P)),
        [(0, 10, {"producer": 5, "sequence": 10}), (10, 10, P)],
        {"acked": 20, "lost": 20, "unsequenced": 0},
        [found("lost", 0, 19, detail="the log has other records there")],
    ),
    "swapped-unsequenced": Case(acked(ack(0, 20)), [(0, 10), (10, 10)], {"acked": 20, "present": 20, "unsequenced": 2}),
    # A header describes no record, except by the checksum, which was made to match.
    "altered-under-a-matching-checksum": Case(
        acked(ack(0, 20, **P)), [(0, 20, P)], {"acked": 20, "present": 20, "unsequenced": 0}
    ),
    "made-anew": Case(
        acked(ack(0, 300, topic_id="aa", **P), ack(0, 100, topic_id=TOPIC_ID, **P)),
        [(0, 100, P)],
        {"acked": 400, "present": 100, "gone": 300, "unproven": True},
        [found("gone", records=300, detail="give --deleted-topic made-anew")],
        end=100,
    ),
    # The first fifty were acknowledged again, and so were the offsets that two rows share.
    "made-anew-and-sent-again-before": Case(
        acked(
            ack(0, 60, 70, 230, topic_id="aa", **P),
            ack(0, 50, topic_id="aa", at=12_000, **P),
            ack(40, 10, topic_id="aa", owner=2, at=23_000),
            ack(0, 20, topic_id="ab"),
            ack(0, 100, topic_id=TOPIC_ID, **P),
        ),
        [(0, 100, P)],
        {"acked": 410, "present": 100, "gone": 310, "unproven": True, "ownership_changes": 1},
        [found("gone", records=290), found("gone", records=20)],
        end=100,
    ),
    "declared-made-anew": Case(
        acked(ack(0, 300, topic_id="aa", **P), ack(0, 100, topic_id=TOPIC_ID, **P)),
        [(0, 100, P)],
        {"acked": 400, "present": 100, "deleted": 300, "unproven": False},
        [found("deleted", records=300)],
        end=100,
    ),
    "same-sequence-a-lap-later": Case(
        acked(ack(0, 10, **P), ack(LAP, 10, **P)),
        [(0, 10, P), (LAP, 10, P)],
        {"acked": 20, "present": 20},
        end=LAP + 10,
    ),
    "markers-have-the-same-sequence": Case(
        acked(ack(0, 10, **P)),
        [(0, 10, P), (10, 1, {**P, "is_control": True}), (11, 1, {**P, "is_control": True})],
        {"acked": 10, "present": 10, "unsequenced": 0},
    ),
    "no-log-at-all": Case(
        acked(ack(0, 300)),
        [],
        {"acked": 300, "lost": 300, "log_start_offset": None, "end_offset": None},
        [found("lost", 0, 299, detail="give --deleted-topic no-log-at-all")],
        end=-1,
    ),
    "deleted-and-made-anew": Case(
        acked(ack(0, 300, topic_id="aa"), ack(0, 100, topic_id=TOPIC_ID), ack(100, 100)),
        [(0, 150)],
        {"acked": 500, "present": 150, "gone": 300, "lost": 50, "unproven": True},
        [
            found("gone", records=300, detail="its id was aa, and the topic of that name now has 0f"),
            found("lost", 150, 199),
        ],
    ),
    "declared-deleted": Case(
        acked(ack(0, 300, topic_id="aa"), ack(0, 20, topic_id="ab"), ack(300, 100)),
        [],
        {"acked": 420, "deleted": 420, "unproven": False, "log_start_offset": None, "end_offset": None},
        [found("deleted", detail="no topic has that name now")] * 3,
        end=-1,
    ),
    "declared-deleted-and-made-anew": Case(
        acked(ack(0, 300, topic_id="aa"), ack(0, 100, topic_id=TOPIC_ID), ack(100, 100)),
        [(0, 150)],
        {"acked": 500, "present": 150, "deleted": 300, "lost": 50, "unproven": False},
        [
            found("deleted", records=300, detail="its id was aa, and the topic of that name now has 0f."),
            found("lost", 150, 199),
        ],
    ),
    "many-lost": Case(
        acked(ack(0, 300)),
        [(k * 10, 5) for k in range(30)],
        {"acked": 300, "present": 150, "lost": 150},
        [found("lost", k * 10 + 5, k * 10 + 9) for k in range(30)],
    ),
    "closed-late": Case(
        acked(ack(0, 300, at=1_000, closed_at=20_000)), [(0, 300)], {"acked": 300, "present": 300, "late": 300}
    ),
    "shipped-late": Case(
        acked(ack(0, 200, shipped_at=100_000), ack(200, 100, shipped_at=2_000)),
        [(0, 300)],
        {"acked": 300, "present": 300, "late": 200},
    ),
    "latencies": Case(
        acked(*(ack(k, 1, latency_us=[1000 * (k + 1)]) for k in range(100))),
        [(0, 100)],
        {
            "acked": 100,
            "present": 100,
            "batches": 100,
            "bytes": 1000,
            "p50_ms": pytest.approx(50, rel=0.02),
            "p95_ms": pytest.approx(95, rel=0.02),
            "p99_ms": pytest.approx(99, rel=0.02),
            "max_ms": 100.0,
        },
    ),
    "producers": Case(
        acked(
            ack(0, 10, **P), ack(10, 10, connection=3), ack(20, 10, connection=4), ack(30, 10, producer=5, sequence=10)
        ),
        [(0, 10, P), (10, 20), (30, 10, {"producer": 5, "sequence": 10})],
        {"acked": 40, "present": 40, "producers": 3},
    ),
}


def inputs() -> tuple[list[Row], list[Row], list[Row], AuditRules]:
    """The rows of all trails, batches, bounds, and the rules."""
    trails = {name: Trail(proxy=f"{name}:9092", incarnation=name) for name in CASES}
    log: list[Row] = []
    limits: list[Row] = []
    for name, case in CASES.items():
        case.tell(trails[name], name)
        trails[name].end(200_000)
        for base, count, *more in case.log:
            log.append(batch(name, base, count, **(more[0] if more else {})))
        if case.end >= 0:
            limits.append(bounds(name, case.end, start=case.start, is_compacted=case.compacted, topic_id=TOPIC_ID))
    rows = [row for trail in trails.values() for row in trail.rows]
    declared = tuple(name for name in CASES if name.startswith("declared-"))
    return rows, log, limits, AuditRules(read_at_ms=BEGAN_AT + 300_000, window_ms=WINDOW_MS, deleted_topics=declared)
