"""The report on a terminal: the verdict in its first line, the partitions, worst first, and the findings in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from kproxy.pipeline.audit.report_facts import TRAIL_READ, Facts, Partition, Sums
from kproxy.pipeline.audit.report_words import (
    counted,
    duration,
    headline,
    kind_in_words,
    kinds_counted,
    owners_in_words,
    particulars,
    partition_verdict,
    printable,
    shortened,
    summary,
    where,
)
from kproxy.pipeline.audit.schemas import WRONG_KINDS

ROWS_AT_MOST: Final = 20
FINDINGS_AT_MOST: Final = 10
# Of a topic's name, where there is room and where there is not.
NAME_LENGTHS: Final = (40, 22)
# To measure what a table would like to have.
_UNBOUNDED: Final = Console(width=10_000)
OWNERS_AT_MOST: Final = 12
VERDICT_AT_MOST: Final = 13
# Columns of counts, in their order, with what stands over them. Only those of trouble are coloured.
_TITLES: Final = {
    "acked": "acked",
    "present": "present",
    "lost": "lost",
    "overlapped": "overlapped",
    "duplicated": "dupl.",
    "removed": "removed",
    "deleted": "deleted",
    "gone": "gone",
    "unclaimed": "unclaimed",
    "corrupt": "corrupt",
    "unchecked": "unchecked",
    "late": "late",
}
_BAD: Final = ("lost", "overlapped", "duplicated", "corrupt")
# What is nought for all partitions needs no column, except for these.
_ALWAYS: Final = ("acked", "present", "lost", "overlapped", "duplicated")
# What a narrow terminal does without, by and by.
_LEFT_OUT: Final = (
    "99 %",
    "owners",
    "late",
    "unclaimed",
    "unchecked",
    "corrupt",
    "removed",
    "deleted",
    "gone",
    "present",
    "verdict",
)


def show_table(facts: Facts, console: Console) -> None:
    """Print it; some dozens of lines, whatever the audit's size."""
    verdict = facts.verdict
    style = "red" if verdict.failed else "green" if verdict.clean else "yellow"
    console.print(Text.assemble((f"{headline(verdict)}. ", f"bold {style}"), summary(verdict)), soft_wrap=True)
    if facts.partitions:
        console.print(_partitions(facts, console))
    if facts.findings:
        _show_findings(facts, console)
    if TRAIL_READ in facts.about:
        read_at = f"The trail was read at {facts.about[TRAIL_READ]}: of what came later nothing is said."
        console.print(read_at, style="dim", soft_wrap=True)


def _partitions(facts: Facts, console: Console) -> Table:
    """With as many columns as the terminal is wide enough for."""
    names = [*(name for name in _TITLES if name in _ALWAYS or getattr(facts.sums, name)), "owners", "99 %", "verdict"]
    table = _table(facts, names, NAME_LENGTHS[0])
    for left_out in range(len(_LEFT_OUT) + 1):
        if Measurement.get(console, _UNBOUNDED.options, table).maximum <= console.width:
            break
        kept = [name for name in names if name not in _LEFT_OUT[:left_out]]
        table = _table(facts, kept, NAME_LENGTHS[1])
    return table


def _table(facts: Facts, names: Sequence[str], longest: int) -> Table:
    shown = facts.partitions[:ROWS_AT_MOST]
    table = Table(Column("partition", no_wrap=True))
    for name in names:
        if name in _TITLES:
            table.add_column(_TITLES[name], justify="right", no_wrap=True)
        elif name == "verdict":
            table.add_column(name, max_width=VERDICT_AT_MOST)
        else:
            table.add_column(
                name, no_wrap=True, max_width=OWNERS_AT_MOST, justify="right" if name == "99 %" else "left"
            )
    for partition in shown:
        others = {
            "verdict": _verdict(partition.sums),
            "owners": Text(owners_in_words(partition.owners)),
            "99 %": Text("–" if partition.p99_ms is None else duration(partition.p99_ms)),
        }
        _add(table, _name(partition, longest), partition.sums, names, others)
    hidden = facts.sums.without([partition.sums for partition in shown])
    if hidden.partitions:
        table.add_section()
        _add(table, f"{hidden.partitions:,} more", hidden, names, {"verdict": _verdict(hidden)})
    if facts.sums.partitions > 1:
        table.add_section()
        _add(table, f"all {facts.sums.partitions:,}", facts.sums, names, {"verdict": _verdict(facts.sums)})
    return table


def _add(table: Table, title: str, sums: Sums, names: Sequence[str], others: Mapping[str, Text]) -> None:
    cells = [_count(sums, name) if name in _TITLES else others.get(name, Text()) for name in names]
    table.add_row(Text(title), *cells)


def _count(sums: Sums, name: str) -> Text:
    count = getattr(sums, name)
    style = "" if name not in _BAD else "bold red" if count else "dim"
    return Text(f"{count:,}", style=style, no_wrap=True)


def _name(partition: Partition, longest: int) -> str:
    return f"{shortened(printable(partition.topic), longest)}/{partition.partition}"


def _verdict(sums: Sums) -> Text:
    style = "bold red" if sums.failed else "yellow" if sums.unproven else "green" if sums.acked else "dim"
    return Text(partition_verdict(sums), style=style)


def _show_findings(facts: Facts, console: Console) -> None:
    shown = facts.findings[:FINDINGS_AT_MOST]
    hidden = facts.hidden_findings + len(facts.findings) - len(shown)
    console.print(Text.assemble(("Findings: ", "bold"), kinds_counted(facts), "."), soft_wrap=True)
    for finding in shown:
        style = "bold red" if finding.kind in WRONG_KINDS else "yellow"
        told = printable(f" {where(finding)}: {finding.detail}")
        console.print(Text.assemble("  ", (printable(kind_in_words(finding)), style), told), soft_wrap=True)
        if known := "; ".join(f"{label} {text}" for label, text in particulars(finding)):
            console.print(Text(printable(f"    {known}"), style="dim"), soft_wrap=True)
    if hidden > 0:
        console.print(f"  and {counted(hidden, 'more finding')}: the results have the first of each kind.", style="dim")
