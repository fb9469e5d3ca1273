"""Write the sentences of a report, and its table for a terminal.

The HTML report has the same sentences. The terminal shows the verdict first, then the worst partitions, then the
findings.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Final

from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from kproxy.pipeline.audit.columns import (
    FINDING_KINDS,
    OVERLAP,
    WRONG_KINDS,
)
from kproxy.pipeline.audit.report_facts import (
    COUNTS,
    TRAIL_READ,
    UNSIGNED,
    Facts,
    Finding,
    Partition,
    State,
    Sums,
    Verdict,
    said,
)

_EPOCH = datetime(1970, 1, 1)
STATE_NAMES = {
    **{state: state.value for state in State},
    State.NOTHING: "nothing acknowledged",
    State.REMOVED: COUNTS["removed"].absent,
}
# The heading of a column of the page, which is also its entry in the list of terms.
TITLES: Final = {name: f"{name} {count.unit}".rstrip() for name, count in COUNTS.items()}
GLOSSARY: Final = {TITLES[name]: count.meaning for name, count in COUNTS.items()} | {
    "unproven": "Windows that cannot be verified: a proxy's trail has a gap or no end, batches are unchecked, or "
    "records are gone."
}


def headline(verdict: Verdict) -> str:
    """Return the verdict in a few words."""
    sums = verdict.sums
    if verdict.failed:
        return _listed([fault.headline for fault, _ in verdict.faults]).capitalize()
    if verdict.unproven:
        return "Unproven"
    if verdict.empty:
        return "Nothing acknowledged"
    if sums.deleted:
        return "Deleted topics"
    return "Clean, duplicates not known" if sums.unsequenced else "Clean"


def summary(verdict: Verdict) -> str:
    """Explain the headline in a few sentences, with the numbers and with what the audit does not know."""
    sums = verdict.sums
    if verdict.failed:
        wrong = [f"{number:,} {said(fault.sentence, number)}" for fault, number in verdict.faults]
        found = f"Of {counted(sums.acked, 'acknowledged record')} {_listed(wrong)}."
    elif sums.acked:
        how_often = ", each at one offset" if sums.unsequenced else ", once and at one offset"
        found = f"{_there(sums)}{'' if verdict.unproven or not sums.present else how_often}."
    else:
        found = "The trail has no acknowledged record in this time and of these topics: there is nothing to check."
    unproven = [_unproven(verdict)] if verdict.unproven else []
    return " ".join([found, *unproven, *([] if verdict.empty else _unknown(sums))])


def _unknown(sums: Sums) -> list[str]:
    """State what an audit of headers can never know."""
    contents = "Contents are not compared."
    if not sums.unsequenced:
        return [contents]
    unknown = f"{batches(sums.unsequenced)} without sequence numbers {_are(sums.unsequenced)} not checked"
    return [f"Duplicates are found only for idempotent producers: {unknown}.", contents]


def _there(sums: Sums) -> str:
    absent = [
        f"{number:,} as {count.absent}"
        for name, count in COUNTS.items()
        if count.absent and (number := getattr(sums, name))
    ]
    if absent:
        return (
            f"All {counted(sums.acked, 'acknowledged record')} are accounted for, {_listed(absent)}; "
            f"{sums.present:,} {_are(sums.present)} in the log"
        )
    if sums.acked == 1:
        return "The one acknowledged record is in the log"
    return f"All {sums.acked:,} acknowledged records are in the log"


def _unproven(verdict: Verdict) -> str:
    """State what is not known, because unknown is not the same as clean."""
    sums, holes = verdict.sums, verdict.trail_faults
    numbers = {count.warning: getattr(sums, name) for name, count in COUNTS.items() if count.warning}
    told = [f"{number:,} {said(warning, number)}" for warning, number in numbers.items() if number]
    if holes or not told:
        what = f"The trails have {counted(holes, 'gap')}" if holes else "The trails are incomplete"
        told.append(f"{what}: further records acknowledged in that time are unknown")
    concerned = f" ({sums.unproven:,} of {counted(sums.partitions, 'partition')} affected)" if sums.unproven else ""
    return f"{'. '.join(told)}{concerned}."


def where(finding: Finding) -> str:
    """Return the partition and the offsets of a finding, else the proxy whose trail it concerns."""
    if finding.topic is None:
        return "all topics" if finding.proxy is None else f"trail of {finding.proxy}"
    place = finding.topic if finding.partition is None else f"{finding.topic}/{finding.partition}"
    if finding.first_offset is None:
        return place
    if finding.last_offset in (None, finding.first_offset):
        return f"{place}, offset {finding.first_offset:,}"
    return f"{place}, offsets {finding.first_offset:,} to {finding.last_offset:,}"


def particulars(finding: Finding) -> list[tuple[str, str]]:
    """Return the known fields of a finding as (label, value), the most important first."""
    known: list[tuple[str, str]] = []
    if finding.records is not None:
        known.append(("records", f"{finding.records:,}"))
    if finding.owner is not None:
        known.append(("owner", owner_in_words(finding.owner, finding.revision)))
    if finding.other_owner is not None:
        known.append(("other owner", owner_in_words(finding.other_owner, finding.other_revision)))
    if finding.proxy is not None:
        known.append(("proxy", finding.proxy + (f", incarnation {finding.incarnation}" if finding.incarnation else "")))
    if finding.producer_id is not None and finding.producer_id >= 0:
        known.append(("producer", f"{finding.producer_id}, epoch {finding.producer_epoch}"))
    if finding.sequence is not None and finding.sequence >= 0:
        known.append(("sequence", str(finding.sequence)))
    if finding.from_ms is not None and finding.to_ms is not None:
        known.append(("time", span_in_words(finding.from_ms, finding.to_ms)))
    return known


def owner_in_words(owner: int, revision: int | None) -> str:
    return f"broker {owner}" if revision is None or revision < 0 else f"broker {owner} at revision {revision}"


def partition_verdict(sums: Sums) -> str:
    """Return the verdict for a table cell; it is "at least once" if duplicates cannot be known."""
    if sums.faults:
        return ", ".join(fault.cell for fault, _ in sums.faults)
    if sums.unproven:
        return "unproven"
    if not sums.acked:
        return "nothing"
    if sums.deleted:
        return "deleted"
    return "at least once" if sums.unsequenced else "clean"


def columns(facts: Facts) -> list[str]:
    """Return the counts that a table shows."""
    return [name for name, count in COUNTS.items() if not count.rare or getattr(facts.sums, name)]


def partition_rows(facts: Facts, most: int | None = None) -> list[tuple[str, Sums, Partition | None]]:
    """Return the rows of the table of partitions: at most `most`, the sum of the others, and the sum of all."""
    shown = facts.partitions[:most]
    rows: list[tuple[str, Sums, Partition | None]] = [(one.name, one.sums, one) for one in shown]
    hidden = facts.sums.without([one.sums for one in shown])
    if hidden.partitions:
        rows.append((f"{hidden.partitions:,} more", hidden, None))
    if facts.sums.partitions > 1:
        rows.append((f"all {facts.sums.partitions:,}", facts.sums, None))
    return rows


# The columns beside the verdict and the counts: those that sums of partitions have too, and the others.
_OF_SUMS: Final[Mapping[str, Callable[[Sums], str]]] = {
    "changes": lambda sums: f"{sums.ownership_changes:,}",
    "bytes": lambda sums: bytes_in_words(sums.bytes),
}
_OF_ONE: Final[Mapping[str, Callable[[Partition], str]]] = {
    "owners": lambda one: ", ".join(map(str, one.owners)) or "–",
    "producers": lambda one: f"{one.producers:,}",
    "median": lambda one: _time_in_words(one.p50_ms),
    "99 %": lambda one: _time_in_words(one.p99_ms),
    "longest": lambda one: _time_in_words(one.max_ms),
    "log": lambda one: "not read" if one.end_offset is None else f"{one.log_start_offset:,} to {one.end_offset:,}",
}
OTHERS: Final = ("owners", "changes", "producers", "bytes", "median", "99 %", "longest", "log")


def cell(name: str, sums: Sums, one: Partition | None) -> tuple[str, str]:
    """Return the text and the tone of a cell: bad, warn, good, idle, zero, or "" for none."""
    if name == "verdict":
        tone = "bad" if sums.failed else "warn" if sums.unproven else "good" if sums.acked else "idle"
        return partition_verdict(sums), tone
    if name in _OF_SUMS:
        return _OF_SUMS[name](sums), ""
    if name in _OF_ONE:
        return "" if one is None else _OF_ONE[name](one), ""
    count, number = COUNTS[name], getattr(sums, name)
    return f"{number:,}", "zero" if not number else "bad" if count.fault else "warn" if count.warning else ""


def kinds_counted(facts: Facts) -> str:
    """Return `3 losses, 1 overlap`; "" without findings."""
    counts = facts.finding_counts
    kinds = [kind for kind in FINDING_KINDS if kind in counts]
    kinds += sorted(set(counts) - set(FINDING_KINDS))
    return ", ".join(counted(counts[kind].findings, *_names(kind)) for kind in kinds)


def kind_in_words(finding: Finding) -> str:
    if finding.kind == OVERLAP and finding.owner != finding.other_owner:
        return "split brain"
    return _names(finding.kind)[0]


def _names(kind: str) -> tuple[str, str]:
    """Return the names of one and of several; foreign tables may have other kinds."""
    return FINDING_KINDS[kind][:2] if kind in FINDING_KINDS else (kind, kind)


def printable(text: str) -> str:
    """Replace control characters and other unprintable ones, which terminals and browsers interpret."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def escaped(text: str) -> str:
    return html.escape(printable(text))


def counted(count: int, one: str, many: str = "") -> str:
    """Return `1 record`, `2,000 records`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def batches(count: int) -> str:
    return counted(count, "batch", "batches")


def utc(ms: int) -> str:
    """Format a time to the millisecond, without its zone; the caller adds UTC."""
    try:
        return (_EPOCH + timedelta(milliseconds=ms)).isoformat(sep=" ", timespec="milliseconds")
    except OverflowError:
        return f"{ms:,} ms after 1970"


def span_in_words(from_ms: int, to_ms: int) -> str:
    """Return `2026-11-21 20:15:00.000 to 20:15:03.500 UTC`."""
    begin, end = utc(from_ms), utc(to_ms)
    same_day = begin[:10] == end[:10]
    return f"{begin} to {end[11:] if same_day else end} UTC" if from_ms != to_ms else f"{begin} UTC"


def duration(ms: float) -> str:
    """Return `250 ms`, `5 s`, `3 min`, `2 h`, `1.5 d`."""
    return _scaled(ms, {"d": 86_400_000, "h": 3_600_000, "min": 60_000, "s": 1000, "ms": 0})


def _time_in_words(ms: float | None) -> str:
    return "–" if ms is None else duration(ms)


def bytes_in_words(count: float) -> str:
    """Return `1.2 GB`, by powers of 1000."""
    return _scaled(count, {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 0})


def _scaled(value: float, units: Mapping[str, float]) -> str:
    unit, size = next((unit, size) for unit, size in units.items() if value >= size)
    return f"{value / (size or 1):.3g} {unit}"


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def shortened(text: str, longest: int) -> str:
    """Shorten `text` in the middle: the beginning and the end tell topic names apart."""
    if len(text) <= longest:
        return text
    tail = longest // 2
    return f"{text[: longest - tail - 1]}…{text[-tail:]}"


ROWS_AT_MOST: Final = 20
FINDINGS_AT_MOST: Final = 10
# The longest name shown takes this part of the terminal's width.
NAME_SHARE: Final = 4
NAME_AT_LEAST: Final = 22
_WIDEST: Final = {"verdict": 13, "owners": 12}
_STYLES: Final = {"bad": "bold red", "warn": "yellow", "good": "green", "idle": "dim", "zero": "dim", "": ""}
# Columns that a narrow terminal drops, in this order.
_LEFT_OUT: Final = ("99 %", "owners", *(name for name in reversed(COUNTS) if COUNTS[name].rare), "present", "verdict")


def show_table(facts: Facts, console: Console) -> None:
    """Print the report; a few dozen lines, whatever the audit's size."""
    verdict = facts.verdict
    style = "red" if verdict.failed else "green" if verdict.clean else "yellow"
    console.print(Text.assemble((f"{headline(verdict)}. ", f"bold {style}"), summary(verdict)), soft_wrap=True)
    if facts.partitions:
        console.print(_partitions(facts, console))
    if facts.findings:
        _show_findings(facts, console)
    if TRAIL_READ in facts.about:
        read_at = f"The trail was read at {facts.about[TRAIL_READ]}; later rows are not included."
        console.print(read_at, style="dim", soft_wrap=True)
    if facts.about.get(UNSIGNED, "0") != "0":
        console.print(f"{UNSIGNED.capitalize()}: {facts.about[UNSIGNED]}.", style="yellow", soft_wrap=True)


def _partitions(facts: Facts, console: Console) -> Table:
    """Return the table of partitions, with as many columns as fit the terminal."""
    names = [*columns(facts), "owners", "99 %", "verdict"]
    for left_out in (None, *_LEFT_OUT):
        names = [name for name in names if name != left_out]
        table = Table(Column("partition", no_wrap=True))
        for name in names:
            justify: JustifyMethod = "left" if name in _WIDEST else "right"
            table.add_column(name, justify=justify, no_wrap=name != "verdict", max_width=_WIDEST.get(name))
        for title, sums, one in partition_rows(facts, ROWS_AT_MOST):
            if one is None:
                table.add_section()
            cells = [cell(name, sums, one) for name in names]
            name = shortened(printable(title), max(NAME_AT_LEAST, console.width // NAME_SHARE))
            table.add_row(Text(name), *(Text(text, style=_STYLES[tone]) for text, tone in cells))
        # The natural width, on a terminal without an end.
        if Measurement.get(console, console.options.update(max_width=10_000), table).maximum <= console.width:
            break
    return table


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
