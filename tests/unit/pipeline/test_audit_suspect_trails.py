"""Suspect trails: proxies that share a name, and rows that no proxy wrote."""

from __future__ import annotations

import json
from typing import Any

from kproxy.pipeline.audit.judge import Batch, Bounds
from kproxy.pipeline.audit.log_client import TopicPartition
from kproxy.pipeline.audit.rules import AuditRules
from kproxy.pipeline.audit.steps import audit_rows
from kproxy.pipeline.audit.trail_rows import rows_in
from tests.support.audit.trails import BEGAN_AT, Row, Trail, batch, bounds, judged_here, shared_names

READ_AT = BEGAN_AT + 500_000


def restarted() -> list[Row]:
    first, again = Trail("restarted:9092", "a"), Trail("restarted:9092", "b", began=50_000)
    first.acked("t", 20, 10, at=20_000)
    again.end(60_000)
    return first.rows + again.rows


def test_foreign_trail_of_same_name_hides_no_hole() -> None:
    rows = shared_names() + restarted()
    results = judged_here(rows, [batch("t", 0, 30)], [bounds("t", 30)], AuditRules(read_at_ms=READ_AT))
    told = {(row["kind"], row["proxy"], row["from_ms"] - BEGAN_AT, row["to_ms"] - BEGAN_AT) for row in results.findings}
    assert told == {
        ("tail", "killed:9092", 15_000, 500_000),
        ("tail", "restarted:9092", 15_000, 50_000),
        ("gap", "headless:9092", -61_000, 25_000),
    }


def good_row() -> dict[str, Any]:
    trail = Trail("p:9092", "a")
    return {name: value for name, value in trail.acked("t", 0, 10).items() if name != "shipped_at"}


HOSTILE: dict[str, dict[str, Any]] = {
    "more offsets than there is room for": {"spans": [0, 1 << 40]},
    "and in a later span": {"spans": [0, 1, 5, 1 << 62]},
    "offsets that overflow": {"spans": [(1 << 63) - 1, 5]},
    "very many spans": {"spans": [0, 1] * 20_000},
    "a span without its count": {"spans": [0, None]},
    "half a span": {"spans": [0, 10, 20]},
    "times that overflow": {"at": (1 << 63) - 1, "first_acked_at": (1 << 63) - 1, "last_acked_at": (1 << 63) - 1},
    "a time before there was any": {"at": -(1 << 63)},
    "counts that overflow": {"record_count": (1 << 63) - 1, "bytes": (1 << 63) - 1, "batches": (1 << 63) - 1},
    "a number that overflows": {"sequence": (1 << 63) - 1},
    "a producer without sequence numbers": {"producer_id": 5, "first_sequence": None},
    "a begin whose promise overflows": {"kind": "begin", "interval_ms": (1 << 63) - 1, "mark_ms": (1 << 63) - 1},
    "no kind of row": {"kind": "other"},
    "another type": {"spans": "many"},
}


def test_foreign_rows_do_not_fail_the_audit() -> None:
    whole = Trail("p:9092", "a")
    whole.acked("t", 0, 10)
    whole.end(5_000)
    own = [{name: value for name, value in row.items() if name != "shipped_at"} for row in whole.rows]
    # Each finding alone would fail the audit, as two do.
    forged = [good_row() | {"incarnation": "b"} | more for more in HOSTILE.values()] * 2
    lines = [json.dumps(row) for row in (*own, *forged)]
    lines += ["", "{", "null", "[1]", '"x"', "\x00\xff", '{"kind":"range","spans":[1', lines[1][:-20]]
    rows = list(rows_in("\n".join(lines).encode()))
    assert len(rows) == len(own)
    log = {TopicPartition("t", 0): [Batch(0, 9, 10, -1, -1, -1, False, True)]}
    limits = {TopicPartition("t", 0): Bounds(0, 10, False, None)}
    results = audit_rows(rows, log, limits, AuditRules(read_at_ms=READ_AT))
    assert [(row["acked"], row["present"], row["unproven"]) for row in results.partitions] == [(10, 10, False)]
    assert results.findings == []
