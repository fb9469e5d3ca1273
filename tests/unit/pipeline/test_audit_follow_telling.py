"""The reports of a following audit: each finding once, whatever was reported before; too many are counted."""

from __future__ import annotations

from typing import Any

from kproxy.pipeline.audit.columns import DELETED, FINDINGS, GAP, LOST
from kproxy.pipeline.audit.follow import ALERTS_PER_KIND, FollowState


def lost(first: int, records: int = 1, of_kind: int = 1) -> dict[str, Any]:
    row = dict.fromkeys(FINDINGS)
    offsets = {"first_offset": first, "last_offset": first + records - 1, "records": records}
    return {**row, "kind": LOST, "topic": "t", "partition": 0, **offsets, "of_kind": of_kind, "detail": "Gone."}


def gap(sequence: int) -> dict[str, Any]:
    return {**dict.fromkeys(FINDINGS), "kind": GAP, "sequence": sequence, "of_kind": 1, "detail": "Hole."}


def told(state: FollowState, *findings: dict[str, Any]) -> list[str]:
    return [each.sentence for each in state.alerts(findings)]


def test_new_findings_are_reported_despite_many_earlier_ones() -> None:
    state = FollowState()
    many = [lost(2 * n, of_kind=150) for n in range(150)]
    first = told(state, *many)
    assert len(first) == ALERTS_PER_KIND + 1
    assert first[-1] == "lost: 50 more, too many to tell one by one."
    assert state.failures == 150
    assert told(state, *many) == []
    assert told(state, lost(5000, 500_000)) == ["lost: t/0 offsets 5000 to 504999: Gone."]
    assert state.failures == 151


def test_worst_findings_are_reported_singly() -> None:
    findings = [lost(1000 * n, 1 + n, of_kind=200) for n in range(200)]
    assert told(FollowState(), *findings)[0] == "lost: t/0 offsets 199000 to 199199: Gone."


def test_grown_loss_is_reported_again() -> None:
    state = FollowState()
    assert told(state, lost(5, 10)) == ["lost: t/0 offsets 5 to 14: Gone."]
    assert told(state, lost(5, 10)) == []
    assert told(state, lost(5, 20)) == ["lost: t/0 offsets 5 to 24: Gone."]


def test_unlisted_findings_are_counted() -> None:
    state = FollowState()
    assert told(state, *(lost(2 * n, of_kind=37) for n in range(30)))[-1].startswith("lost: 7 more")
    assert state.failures == 37


def test_unproven_records_are_counted_separately() -> None:
    state = FollowState()
    declared = {**lost(9), "kind": DELETED}
    assert [tuple(each) for each in state.alerts([gap(3), declared])] == [("Hole.", False)]
    assert (state.failures, state.unproven) == (0, 1)
    assert told(state, lost(1), gap(3)) == ["lost: t/0 offsets 1 to 1: Gone."]
