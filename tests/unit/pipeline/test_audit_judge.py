"""The audit's verdicts on trails and logs written by hand."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from kproxy.errors import StartupError
from kproxy.pipeline.audit import columns
from kproxy.pipeline.audit.judge import Batch, Bounds, judge_log
from kproxy.pipeline.audit.log_client import TopicPartition
from kproxy.pipeline.audit.report_facts import SUMMED, Sums, Verdict
from kproxy.pipeline.audit.report_gather import gather
from kproxy.pipeline.audit.report_machine import as_json, write_metrics
from kproxy.pipeline.audit.report_text import headline, summary
from kproxy.pipeline.audit.rules import AuditRules
from kproxy.pipeline.audit.steps import audit_rows
from tests.support.audit.cases import CASES, WINDOW_MS, inputs
from tests.support.audit.trails import BEGAN_AT, Row, Trail, judged_here, trail_rows

ADDED_UP = ("acked", "present", "lost", "removed", "deleted", "gone", "late", "ownership_changes", "batches", "bytes")
COUNTED = (*ADDED_UP[:-2], "duplicated", "overlapped", "unclaimed", "corrupt", "unchecked")


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
    for column in ADDED_UP:
        assert sum(row[column] for row in windows) == told[column], column


def test_ended_trails_leave_nothing_unproven(audited: Audited) -> None:
    assert None not in audited.findings
    told = {name for name, row in audited.partitions.items() if row["unproven"]}
    # A window without new acknowledgements has nothing to prove.
    windows = {name: [row for row in rows if row["acked"]] for name, rows in audited.windows.items()}
    assert told == {name for name, rows in windows.items() if rows and all(row["unproven"] for row in rows)}
    assert told == {name for name, case in CASES.items() if case.counts.get("unproven")}


def test_duplicate_counts_when_either_copy_was_acknowledged(audited: Audited) -> None:
    assert [row["duplicated"] for row in audited.windows["appended-twice"]] == [100]


def test_both_owners_have_their_times(audited: Audited) -> None:
    told = sorted((row["owner"], row["revision"], row["records"]) for row in audited.owners["two-owners-of-one-offset"])
    assert told == [(1, 7, 200), (2, 9, 110)]


DUPLICATES_NOT_KNOWN = "Clean, duplicates not known"
# Ways to tamper with a log: the first finding of an audit of that partition alone, and its exit status.
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


def test_unread_partition_is_unproven_and_others_are_judged() -> None:
    trail = Trail()
    trail.acked("t", 0, 100, partition=0)
    trail.acked("t", 0, 50, partition=1)
    trail.acked("t", 0, 50, 40, 20, partition=1)
    trail.end(60_000)
    unread = {TopicPartition("t", 1): "it has no leader", TopicPartition("t", 2): "refused."}
    log = {TopicPartition("t", 0): [Batch(0, 99, 100, -1, -1, -1, False, True)]}
    bounds = {TopicPartition("t", 0): Bounds(0, 100, False, None)}
    results = audit_rows(trail_rows(trail.rows), log, bounds, AuditRules(read_at_ms=BEGAN_AT + 90_000), unread)
    told = [(row["acked"], row["present"], row["unread"], row["lost"], row["unproven"]) for row in results.partitions]
    assert told == [(100, 100, 0, 0, False), (60, 0, 60, 0, True), (0, 0, 0, 0, True)]
    assert [(row["kind"], row["partition"], row["records"]) for row in results.findings] == [
        ("unread", 1, 60),
        ("unread", 2, 0),
    ]
    assert "t/1 could not be read: it has no leader. It is unknown" in results.findings[0]["detail"]
    facts = gather(results, {})
    assert (headline(facts.verdict), facts.verdict.exit_status()) == ("Unproven", 3)
    assert "60 records are in logs that could not be read" in summary(facts.verdict)


def test_programs_read_json_and_metrics(tmp_path: Path) -> None:
    facts = gather(judged_here(*inputs()), {"made": "now"})
    document = json.loads(as_json(facts, 1))
    assert document["exit_status"] == 1
    assert document["counts"]["lost"] == facts.sums.lost > 0
    assert document["findings_by_kind"]["lost"]["findings"] == facts.finding_counts["lost"].findings
    assert len(document["findings"]) + document["findings_not_listed"] == sum(
        each["findings"] for each in document["findings_by_kind"].values()
    )
    assert {"topic", "partition", "first_offset", "detail"} <= document["findings"][0].keys()
    write_metrics(facts, 1, tmp_path / "audit.prom", now_s=12.0)
    lines = (tmp_path / "audit.prom").read_text().splitlines()
    assert f'kproxy_audit_last_records{{state="lost"}} {facts.sums.lost}' in lines
    assert f'kproxy_audit_last_batches{{state="corrupt"}} {facts.sums.corrupt}' in lines
    assert {"kproxy_audit_last_exit_status 1", "kproxy_audit_last_run_timestamp_seconds 12"} <= set(lines)
    promtool = shutil.which("promtool")
    if promtool is not None:
        checked = subprocess.run([promtool, "check", "metrics"], input="\n".join(lines) + "\n", text=True, check=False)
        assert checked.returncode == 0
    with pytest.raises(StartupError, match="--metrics could not be written to"):
        write_metrics(facts, 1, tmp_path / "no" / "audit.prom")


@pytest.mark.timeout(60)
def test_many_losses_take_time_in_proportion() -> None:
    """Every other batch is missing: a search through the listed losses for each would take minutes."""
    losses = 100_000
    trail = Trail()
    trail.acked("t", 0, 2 * losses)
    (_, row) = trail_rows(trail.rows)
    batches = [Batch(2 * k, 2 * k, 1, -1, -1, -1, False, True) for k in range(losses)]
    rules = AuditRules(read_at_ms=1, window_ms=WINDOW_MS, late_after_ms=1, max_findings=1_000)
    _, part, _ = judge_log([row], batches, Bounds(0, 2 * losses, False, None), rules)
    assert part.found["lost"] == losses
    starts = [island.start for island in part.islands]
    assert starts == [*range(1, 2_001, 2), 2 * losses - 1]
