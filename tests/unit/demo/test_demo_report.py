"""The table at the end, and the lines without a terminal."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from kproxy.demo.judge import Judge
from kproxy.demo.report import DemoOutcome, KilledOwner, brokers_in_words, show
from kproxy.pipeline.audit.report_facts import Facts, Sums, Verdict
from kproxy.pipeline.progress import Report


def _outcome(seen: int = 2, owners: dict[int, int] | None = None, killed: KilledOwner | None = None) -> DemoOutcome:
    """The outcome for n=1 in partition 0 and n=2 in partition 1: the first `seen` arrived; more duplicate n=1."""
    court = Judge([hash((None, b'{"n":1}')), hash((None, b'{"n":2}'))])
    for offset, n in enumerate([1, 2, 1, 1][:seen]):
        court.see(n - 1, offset, None, b'{"n":%d}' % n)
    return DemoOutcome(court.verdict(sent=2), owners, 2.0, 0.5, 30.0, 1, killed)


def _killed(taken_by: dict[int, int]) -> KilledOwner:
    """The outcome after the kill of broker 7, owner of two of three partitions."""
    taken_s = dict(zip(taken_by, (3.0, 4.04), strict=False))
    return KilledOwner(7, 72_900, {0: 7, 1: 7, 2: 8}, taken_by, taken_s, 5.5)


def _shown(outcome: DemoOutcome) -> str:
    output = io.StringIO()
    show(outcome, Console(file=output, width=100))
    return output.getvalue()


@pytest.mark.parametrize(
    ("seen", "status", "sentence"),
    [
        (2, 0, "Every row arrived: once, unchanged and in order."),
        (1, 1, "Not as sent: 1 missing."),
        (0, 1, "Not as sent: 2 missing."),
        (4, 1, "Not as sent: 2 duplicated."),
    ],
)
def test_sentence_and_exit_status_agree(seen: int, status: int, sentence: str) -> None:
    outcome = _outcome(seen)

    assert sentence in _shown(outcome)
    assert outcome.exit_status == status


@pytest.mark.parametrize(
    ("sums", "trail_faults", "status", "sentence"),
    [
        pytest.param(Sums(1, acked=2, present=2), 0, 0, "Clean. All 2 acknowledged records", id="clean"),
        pytest.param(Sums(1, acked=2, present=1, lost=1), 0, 1, "Loss. Of 2 acknowledged records", id="loss"),
        pytest.param(Sums(1, acked=2, present=2, overlapped=1), 0, 1, "Offsets assigned twice. ", id="overlap"),
        pytest.param(Sums(1, acked=2, present=2, unproven=1), 1, 0, "Unproven. ", id="unproven"),
    ],
)
def test_audit_findings_count_too(sums: Sums, trail_faults: int, status: int, sentence: str) -> None:
    facts = Facts(Verdict(sums, trail_faults=trail_faults), 1, (), (), {})
    outcome = dataclasses.replace(_outcome(2), audit=facts)

    assert sentence in _shown(outcome)
    assert outcome.exit_status == status


def test_every_fault_has_its_row_with_examples() -> None:
    lines = _shown(_outcome(4)).splitlines()

    assert any("duplicated" in line and " 2 │ n=1 again at offset 2" in line for line in lines)
    for fault in ("missing", "out of order", "altered", "keys in two partitions", "offsets not rising"):
        assert any(line.startswith(f"│ {fault} ") and " 0 │" in line for line in lines), fault


def test_rows_are_summed_by_owner_or_without_one() -> None:
    lines = _shown(_outcome(4, {0: 7})).splitlines()

    assert any("rows on broker 7" in line and " 3 │ 1 partition" in line for line in lines)
    assert any("rows, no owner now" in line and " 1 │ 1 partition" in line for line in lines)


def test_unknown_owners_are_reported_as_unknown() -> None:
    assert "not known without --etcd" in _shown(_outcome())


def _cells(outcome: DemoOutcome) -> dict[str, tuple[str, str]]:
    """Map each row's first cell to the other two."""
    rows = [[cell.strip() for cell in line.split("│")[1:4]] for line in _shown(outcome).splitlines() if "│" in line]
    return {name: (value, detail) for name, value, detail in rows}


def test_killed_owner_is_reported_with_times_and_successors() -> None:
    cells = _cells(_outcome(4, {0: 8, 1: 9}, _killed({0: 8, 1: 9})))

    assert cells["broker killed"] == ("7", "after about 72,900 rows")
    assert cells["its partitions"] == ("2", "of 3")
    assert cells["without an owner"] == ("4.0 s", "until brokers 8 and 9 took over")
    assert cells["broker back"] == ("5.5 s", "after the kill")
    assert cells["rows on broker 7"] == ("0", "0 partitions, 2 before the kill")
    assert cells["rows on broker 8"] == ("3", "1 partition, 1 before the kill")
    assert cells["rows on broker 9"] == ("1", "1 partition, 0 before the kill")


def test_missing_recovery_after_a_kill_is_reported() -> None:
    cells = _cells(_outcome(4, {0: 8}, _killed({0: 8})))

    assert cells["without an owner"] == ("1 never", "until broker 8 took over")


def test_broker_regaining_its_partitions_is_no_successor() -> None:
    cells = _cells(_outcome(4, {0: 7, 1: 7}, _killed({0: 7, 1: 7})))

    assert cells["without an owner"] == ("4.0 s", "until it was back itself")


def test_missing_kill_is_not_mentioned() -> None:
    assert "kill" not in _shown(_outcome(4, {0: 7, 1: 8}))


@pytest.mark.parametrize(
    ("brokers", "words"),
    [([], ""), ([2, 2], "broker 2"), ([3, 1, 3], "brokers 1 and 3"), ([3, 1, 2], "brokers 1, 2 and 3")],
)
def test_brokers_are_named_in_words(brokers: list[int], words: str) -> None:
    assert brokers_in_words(brokers) == words


def test_throughput_is_rows_by_seconds() -> None:
    shown = _shown(_outcome())

    assert "1 rows/s" in shown
    assert "4 rows/s" in shown


def test_finished_stage_without_terminal_is_one_line() -> None:
    progress = io.StringIO()
    with Report(progress=Console(file=progress, width=100)) as report:
        stage = report.stage("writing", "planning", total=10)
        stage.advance_to(5)
        stage.say("half")
        assert progress.getvalue() == ""
        stage.finish("10 rows")

    assert progress.getvalue().startswith("writing   10 rows, ")
    assert progress.getvalue().count("\n") == 1


@pytest.mark.parametrize("is_terminal", [False, True])
def test_line_printed_during_a_stage_remains(is_terminal: bool) -> None:
    progress = io.StringIO()
    with Report(progress=Console(file=progress, width=40, force_terminal=is_terminal)) as report:
        stage = report.stage("kill", "kill -9")
        stage.tell("a line that is longer than the terminal is wide, and not broken")

    assert "kill      a line that is longer than the terminal is wide, and not broken\n" in progress.getvalue()


def test_stage_stands_beside_its_bar_on_terminal() -> None:
    progress = io.StringIO()
    with Report(progress=Console(file=progress, width=100, force_terminal=True)) as report:
        stage = report.stage("writing", "planning", total=10)
        stage.advance_to(5)
        stage.finish("10 rows")

    assert "━" in progress.getvalue()
    assert "10 rows, " in progress.getvalue()
