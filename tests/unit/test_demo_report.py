"""The table at the end, and the lines where there is no terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kproxy.pipeline.judge import Judge
from kproxy.pipeline.report import Outcome, Report


def _outcome(seen: int = 2, owners: dict[int, int] | None = None) -> Outcome:
    """Of two rows the first `seen` came back, n=1 in partition 0 and n=2 in partition 1; more are doubles of n=1."""
    court = Judge([hash((None, b'{"n":1}')), hash((None, b'{"n":2}'))])
    for offset, n in enumerate([1, 2, 1, 1][:seen]):
        court.see(n - 1, offset, None, b'{"n":%d}' % n)
    return Outcome(court.verdict(sent=2), owners, 2.0, 0.5, 30.0, 1)


def _shown(outcome: Outcome) -> str:
    output = io.StringIO()
    Report(output=Console(file=output, width=100)).show(outcome)
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
def test_the_sentence_and_the_exit_status_say_the_same(seen: int, status: int, sentence: str) -> None:
    outcome = _outcome(seen)

    assert sentence in _shown(outcome)
    assert outcome.exit_status == status


def test_every_fault_has_its_row_with_examples() -> None:
    lines = _shown(_outcome(4)).splitlines()

    assert any("duplicated" in line and " 2 │ n=1 again at offset 2" in line for line in lines)
    for fault in ("missing", "out of order", "altered", "keys in two partitions", "offsets not rising"):
        assert any(line.startswith(f"│ {fault} ") and " 0 │" in line for line in lines), fault


def test_rows_are_added_up_by_owner_and_those_without_one_are_shown() -> None:
    lines = _shown(_outcome(4, {0: 7})).splitlines()

    assert any("rows on broker 7" in line and " 3 │ 1 partition" in line for line in lines)
    assert any("rows, no owner now" in line and " 1 │ 1 partition" in line for line in lines)


def test_unknown_owners_are_said_to_be_unknown() -> None:
    assert "not known without --etcd" in _shown(_outcome())


def test_throughput_is_rows_by_seconds() -> None:
    shown = _shown(_outcome())

    assert "1 rows/s" in shown
    assert "4 rows/s" in shown


def test_without_a_terminal_a_finished_stage_is_one_plain_line_and_bars_are_none() -> None:
    progress = io.StringIO()
    with Report(progress=Console(file=progress, width=100)) as report:
        stage = report.stage("writing", "planning", total=10)
        stage.advance_to(5)
        stage.say("half")
        assert progress.getvalue() == ""
        stage.finish("10 rows")

    assert progress.getvalue().startswith("writing   10 rows, ")
    assert progress.getvalue().count("\n") == 1


def test_on_a_terminal_the_stage_stands_beside_its_bar() -> None:
    progress = io.StringIO()
    with Report(progress=Console(file=progress, width=100, force_terminal=True)) as report:
        stage = report.stage("writing", "planning", total=10)
        stage.advance_to(5)
        stage.finish("10 rows")

    assert "━" in progress.getvalue()
    assert "10 rows, " in progress.getvalue()
