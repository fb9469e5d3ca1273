"""A report takes a fixed number of rows, the worst, from an audit's tables of any size, and counts the rest."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from kproxy.pipeline.audit.bags import Here, Step
from kproxy.pipeline.audit.columns import TABLES
from kproxy.pipeline.audit.report_facts import Grid, Holding, State, Sums
from kproxy.pipeline.audit.report_gather import Limits, gather
from kproxy.pipeline.audit.report_html import report_page
from kproxy.pipeline.audit.steps import Results

# 21 November 2026, 20:00 UTC, in seconds.
START_S = 1_795_291_200
Rows = Sequence[dict[str, Any]]


class _Apart(Here):
    """A bag in which each value is a part, as on many executors."""

    def over(self, step: Step) -> Here:
        return Here(each for value in self for each in step([value]))


def _tables(**rows: Rows) -> Results:
    """Tables of these rows; missing columns are None."""
    return Results(
        **{name: _Apart({each: row.get(each) for each in TABLES[name]} for row in rows[name]) for name in rows}
    )


def _window(topic: str, partition: int, minute: int, **counts: Any) -> dict[str, Any]:
    start = START_S + minute * 60
    nought = dict.fromkeys(("acked", "present", "lost", "removed", "duplicated", "overlapped", "late"), 0)
    times = {f"window_{name}": datetime.fromtimestamp(at, UTC) for name, at in (("start", start), ("end", start + 60))}
    return {"topic": topic, "partition": partition, **times, **nought, "unproven": False, **counts}


def _partition(topic: str, partition: int, **counts: Any) -> dict[str, Any]:
    nought = dict.fromkeys((name for name in Sums.__slots__ if name not in ("partitions", "unproven")), 0)
    others = {"unproven": False, "owners": [1], "producers": 2, "log_start_offset": 0, "end_offset": 100}
    return {"topic": topic, "partition": partition, **nought, **others, **counts}


def test_each_table_enters_the_report_unchanged() -> None:
    start_ms = START_S * 1000
    tables = _tables(
        partitions=[
            _partition(
                "a", 0, acked=30, present=30, corrupt=7, batches=3, bytes=300, p50_ms=1.5, p99_ms=9.0, max_ms=20.0
            ),
            _partition("a", 1, acked=10, present=8, lost=2, ownership_changes=1, owners=[1, 2]),
            _partition("b", 0, acked=5, present=5, unproven=True, unchecked=6, unsequenced=5, late=1, unclaimed=4),
        ],
        windows=[
            _window("a", 0, 0, acked=20),
            _window("a", 0, 2, acked=10, removed=1),
            _window("a", 1, 0, acked=10, lost=2, overlapped=2, unproven=True),
            _window("b", 0, 1, acked=5, unproven=True),
        ],
        findings=[
            {"kind": "tail", "proxy": "p:1", "incarnation": "0f", "from_ms": start_ms + 70_000, "detail": "No end."},
            {"kind": "lost", "topic": "a", "partition": 1, "records": 2, "owner": 1, "revision": 7, "detail": "Gone."},
            {"kind": "corrupt", "topic": "a", "partition": 0, "records": 9, "detail": "Broken."},
            {"kind": "overlap", "topic": "a", "partition": 1, "owner": 1, "other_owner": 2, "detail": "Both."},
            {"kind": "overlap", "topic": "a", "partition": 1, "owner": 1, "other_owner": 1, "detail": "Twice."},
        ],
        owners=[
            {"topic": "a", "partition": 1, "owner": owner, "revision": 6 + owner, "first_acked_at": start_ms + owner}
            | {"last_acked_at": start_ms + owner + 10, "records": 5, "bytes": 50}
            for owner in (2, 1)
        ],
    )
    facts = gather(tables, {"Bootstrap": "here"})
    assert facts.about == {"Bootstrap": "here"}
    assert facts.sums == Sums(
        partitions=3,
        acked=45,
        present=43,
        lost=2,
        unclaimed=4,
        # The count includes findings that are not listed.
        corrupt=7,
        unchecked=6,
        unsequenced=5,
        late=1,
        batches=3,
        bytes=300,
        ownership_changes=1,
        unproven=1,
    )
    assert facts.topics == 2
    assert [(one.name, one.owners, one.p50_ms) for one in facts.partitions] == [
        *(("a/1", (1, 2), None), ("b/0", (1,), None), ("a/0", (1,), 1.5))
    ]
    assert facts.grid == Grid(start_ms, 60_000, 3, 1)
    assert facts.states == {
        ("a", 0): (State.COMPLETE, State.NOTHING, State.REMOVED),
        ("a", 1): (State.LOST, State.NOTHING, State.NOTHING),
        ("b", 0): (State.NOTHING, State.UNPROVEN, State.NOTHING),
    }
    # The gap has no end, so all later time is unproven.
    assert facts.trail_holes == (1, 2)
    assert facts.holdings == {
        ("a", 1): [Holding(1, 7, start_ms + 1, start_ms + 11, 5), Holding(2, 8, start_ms + 2, start_ms + 12, 5)]
    }
    assert [(finding.kind, finding.detail) for finding in facts.findings] == [
        *(("lost", "Gone."), ("overlap", "Both."), ("overlap", "Twice."), ("corrupt", "Broken."), ("tail", "No end."))
    ]
    assert (facts.verdict.trail_faults, facts.verdict.conflicts) == (1, 1)
    assert "Loss and corrupt batches" in report_page(facts)


def test_worst_rows_are_kept_and_others_counted() -> None:
    """Whether the tables grow in partitions, windows, findings, owners or changes of owner."""
    partitions = [_partition("t", number, acked=100, present=100, owners=[*range(40)]) for number in range(200)]
    partitions[150] |= {"lost": 1, "present": 99}
    partitions[30] |= {"overlapped": 1}
    windows = [_window("t", number, minute * 7, acked=1) for number in (150, 30, 0, 1) for minute in range(100)]
    windows[3] |= {"lost": 1}
    start_ms = START_S * 1000
    tables = _tables(
        partitions=partitions,
        windows=windows,
        findings=[
            {"kind": "lost", "topic": "t", "partition": 150, "records": number, "detail": f"{number}", "of_kind": 9000}
            for number in range(300)
        ],
        owners=[
            {"topic": "t", "partition": 150, "owner": turn % 5, "revision": turn, "first_acked_at": start_ms + turn}
            | {"last_acked_at": start_ms + turn, "records": 1, "bytes": 1}
            for turn in range(50)
        ],
    )
    limits = Limits(partitions=10, drawn=3, columns=20, findings=5, holdings=4)
    facts = gather(tables, {}, limits)
    assert facts.sums.partitions == 200
    assert [one.partition for one in facts.partitions] == [150, 30, 0, 1, 2, 3, 4, 5, 6, 7]
    assert len(facts.partitions[0].owners) == 16
    assert facts.sums.without([one.sums for one in facts.partitions]) == Sums(190, 19_000, 19_000)
    assert [finding.detail for finding in facts.findings] == ["299", "298", "297", "296", "295"]
    # Findings outside the tables count too.
    assert facts.hidden_findings == 8995
    assert facts.grid is not None
    # 694 windows of a minute, including idle ones.
    assert facts.grid == Grid(start_ms, 35 * 60_000, 20, 35)
    assert facts.states.keys() == {("t", 150), ("t", 30), ("t", 0)}
    lost = {
        which: [step for step, state in enumerate(each) if state is State.LOST] for which, each in facts.states.items()
    }
    assert lost == {("t", 150): [0], ("t", 30): [], ("t", 0): []}
    assert all(len(each) == 20 and State.NOTHING not in each for each in facts.states.values())
    assert [holding.revision for holding in facts.holdings["t", 150]] == [0, 1, 2, 3]
    assert facts.hidden_holdings == 46
    assert len(report_page(facts)) < 1_000_000


def test_holes_around_acknowledgements_are_drawn() -> None:
    """Holes are drawn up to a quarter of the windows' time, or one window, on either side."""
    start_ms = START_S * 1000
    tables = _tables(
        partitions=[_partition("t", 0, acked=8, unproven=True)],
        windows=[_window("t", 0, minute, acked=1) for minute in range(8)],
        findings=[
            {"kind": "gap", "from_ms": start_ms - 70_000, "to_ms": start_ms - 65_000, "detail": "Before."},
            {"kind": "tail", "from_ms": start_ms + 500_000, "to_ms": start_ms + 86_400_000, "detail": "Behind."},
        ],
    )
    facts = gather(tables, {})
    assert facts.grid == Grid(start_ms - 120_000, 60_000, 12, 1)
    assert facts.trail_holes == (0, 10, 11)


def test_audit_of_nothing_has_a_report_too() -> None:
    facts = gather(_tables(), {"Bootstrap": "here"})
    assert (facts.sums, facts.grid, facts.states, facts.partitions) == (Sums(), None, {}, ())
    assert "Nothing acknowledged" in report_page(facts)
