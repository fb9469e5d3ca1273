"""The audit's verdicts on trails and logs written by hand."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import pytest

from kproxy.pipeline.audit import columns
from kproxy.pipeline.audit.report_facts import SUMMED, Sums, Verdict
from kproxy.pipeline.audit.report_text import headline, summary
from tests.support.audit.cases import CASES, inputs
from tests.support.audit.trails import Row, judged_here

COUNTED = (
    *("acked", "present", "lost", "removed", "duplicated", "overlapped", "unclaimed", "corrupt", "unchecked", "late"),
    *("deleted", "gone", "ownership_changes"),
)


class Audited(NamedTuple):
    partitions: dict[str, Row]
    windows: dict[str, list[Row]]
    findings: dict[str | None, list[Row]]
    owners: dict[str, list[Row]]


@pytest.fixture(scope="module")
def audited() -> Audited:
    results = judged_here(*inputs())
    for name in ("windows", "partitions", "findings", "owners", "throughput"):
        assert {tuple(row) for row in getattr(results, name)} == {tuple(getattr(columns, name.upper()))}

    def by_topic(rows: list[Row]) -> dict[str, list[Row]]:
        grouped = defaultdict(list)
        for row in rows:
            grouped[row["topic"]].append(row)
        return grouped

    partitions = {topic: rows[0] for topic, rows in by_topic(results.partitions).items()}
    return Audited(partitions, by_topic(results.windows), by_topic(results.findings), by_topic(results.owners))


@pytest.mark.parametrize("name", CASES)
def test_every_acknowledged_record_is_accounted_for(audited: Audited, name: str) -> None:
    told = audited.partitions[name]
    expected = dict.fromkeys(COUNTED, 0) | CASES[name].counts
    assert {column: told[column] for column in expected} == expected
    assert told["acked"] == sum(told[name] for name in ("present", "lost", "removed", "deleted", "gone"))


@pytest.mark.parametrize("name", CASES)
def test_only_real_faults_are_named(audited: Audited, name: str) -> None:
    told = sorted(
        audited.findings.get(name, []), key=lambda row: (row["kind"], row["first_offset"] or 0, -(row["records"] or 0))
    )
    expected = CASES[name].findings
    assert [row["kind"] for row in told] == [row["kind"] for row in expected]
    for row, wanted in zip(told, expected, strict=True):
        assert wanted.get("detail", "") in row["detail"]
        columns = wanted.keys() - {"detail"}
        assert {column: row[column] for column in columns} == {column: wanted[column] for column in columns}


GIVEN_OUT_TWICE = {name for name, case in CASES.items() if case.counts.get("overlapped")}


@pytest.mark.parametrize("name", sorted(CASES.keys() - GIVEN_OUT_TWICE))
def test_windows_sum_to_partitions_without_double_offsets(audited: Audited, name: str) -> None:
    told, windows = audited.partitions[name], audited.windows[name]
    for column in (
        "acked",
        "present",
        "lost",
        "removed",
        "deleted",
        "gone",
        "late",
        "batches",
        "bytes",
        "ownership_changes",
    ):
        assert sum(row[column] for row in windows) == told[column], column


def test_ended_trails_leave_nothing_unproven(audited: Audited) -> None:
    assert None not in audited.findings
    told = {name for name, row in audited.partitions.items() if row["unproven"]}
    # A window in which nothing was acknowledged that was not before has nothing to prove.
    windows = {name: [row for row in rows if row["acked"]] for name, rows in audited.windows.items()}
    assert told == {name for name, rows in windows.items() if rows and all(row["unproven"] for row in rows)}
    assert told == {name for name, case in CASES.items() if case.counts.get("unproven")}


def test_a_duplicate_counts_when_either_copy_was_acknowledged(audited: Audited) -> None:
    assert [row["duplicated"] for row in audited.windows["appended-twice"]] == [100]


def test_both_owners_have_their_times(audited: Audited) -> None:
    told = sorted((row["owner"], row["revision"], row["records"]) for row in audited.owners["two-owners-of-one-offset"])
    assert told == [(1, 7, 200), (2, 9, 110)]


DUPLICATES_NOT_KNOWN = "Clean, duplicates not known"
# Ways to tamper with a log: what an audit of that partition alone would say first, and its exit status.
TAMPERED = {
    "lost-in-the-middle": ("Loss", 1),
    "lost-behind-the-end": ("Loss", 1),
    "swapped": ("Loss", 1),
    "swapped-unsequenced": (DUPLICATES_NOT_KNOWN, 0),
    "altered-under-a-matching-checksum": ("Clean", 0),
    "corrupt": ("Loss and corrupt batches", 1),
    "checksums-not-looked-at": ("Unproven", 3),
    "appended-twice": ("Duplicates", 1),
    "appended-twice-unsequenced": (DUPLICATES_NOT_KNOWN, 0),
    "no-log-at-all": ("Loss", 1),
    "declared-deleted": ("Deleted topics", 0),
    "made-anew": ("Unproven", 3),
    "declared-made-anew": ("Deleted topics", 0),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_verdict_states_exactly_what_is_known(audited: Audited, name: str) -> None:
    row = audited.partitions[name]
    verdict = Verdict(Sums(partitions=1, unproven=int(row["unproven"]), **{each: row[each] for each in SUMMED}))
    assert (headline(verdict), verdict.exit_status()) == TAMPERED[name]
    said = summary(verdict)
    assert said.endswith("Contents are not compared.")
    assert ("Duplicates are found only for idempotent producers" in said) == (row["unsequenced"] > 0)
    is_known = row["present"] > 0 and row["unsequenced"] == 0 and not verdict.failed and not verdict.unproven
    assert (", once and at one offset." in said) == is_known
