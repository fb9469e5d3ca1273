"""Write the report as one HTML file.

It shows the verdict, the numbers, the findings, the plots and the table of partitions. The file loads nothing: it
contains its style and drawings, has no script, and its content policy forbids requests. Text from outside (names of
topics, clients, files) is escaped, and unprintable characters are replaced.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kproxy.errors import StartupError
from kproxy.pipeline.audit.columns import WRONG_KINDS
from kproxy.pipeline.audit.report_facts import Facts, Finding, Partition, State, Sums, Verdict
from kproxy.pipeline.audit.report_plots import Plot, plots
from kproxy.pipeline.audit.report_text import (
    GLOSSARY,
    STATE_NAMES,
    bytes_in_words,
    counted,
    duration,
    headline,
    kind_in_words,
    kinds_counted,
    owners_in_words,
    particulars,
    partition_verdict,
    printable,
    summary,
    where,
)

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
# Findings shown at once; the others are folded.
OPEN_FINDINGS: Final = 8
# Numbers from here on need a smaller font in their card.
LONG_NUMBER: Final = 10**9
_ICONS: Final = {
    "good": '<path d="M14 25l8 8 14-17"/>',
    "bad": '<path d="M16 16l16 16M32 16L16 32"/>',
    "split": '<path d="M24 38V26L13 14M24 26l11-12M12 21v-8h8M36 21v-8h-8"/>',
    "warn": '<path d="M18 19a6 6 0 1 1 8.500 5.500c-1.700.9-2.500 2-2.500 4.500M24 34.500v.2"/>',
    "idle": '<path d="M15 24h18"/>',
}


def write_report(facts: Facts, path: Path) -> None:
    """Write the report to `path`, whole or not at all. Raise StartupError if that fails."""
    text = report_page(facts)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise StartupError(
            f"The report could not be written to {path} ({error.strerror}): name another file."
        ) from error


def report_page(facts: Facts) -> str:
    """Return the HTML, the same for the same facts."""
    parts = [
        _verdict(facts.verdict),
        "<main>",
        _numbers(facts),
        _findings(facts),
        *[_plot(plot, facts) for plot in plots(facts)],
        _partitions(facts),
        _words(),
        _about(facts),
        "</main>",
    ]
    title = f"{headline(facts.verdict)} – kproxy audit"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title>{escaped(title)}</title><style>{STYLE}</style></head>\n<body>\n'
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def escaped(text: str) -> str:
    return html.escape(printable(text))


def _tone(verdict: Verdict) -> str:
    if verdict.failed:
        return "bad"
    if verdict.unproven or verdict.sums.deleted:
        return "warn"
    return "idle" if verdict.empty else "good"


def _verdict(verdict: Verdict) -> str:
    tone = _tone(verdict)
    icon = "split" if verdict.conflicts else tone
    return (
        f'<header class="verdict {tone}" data-verdict="{tone}"><div>'
        '<svg viewBox="0 0 48 48" fill="none" stroke="currentColor" stroke-width="4" stroke-linecap="round" '
        f'stroke-linejoin="round" aria-hidden="true"><circle cx="24" cy="24" r="21" stroke-width="3"/>'
        f"{_ICONS[icon]}</svg>"
        f"<h1>{escaped(headline(verdict))}</h1><p>{escaped(summary(verdict))}</p></div></header>"
    )


def _numbers(facts: Facts) -> str:
    sums, holes = facts.sums, facts.verdict.trail_faults
    in_holes = counted(holes, "gap") + " in the trails"
    unproven = f"of {counted(sums.partitions, 'partition')}" + (f"; {in_holes}" if holes else "")
    if sums.unchecked:
        unproven += f"; {counted(sums.unchecked, 'batch', 'batches')} not checked"
    removed = f"and {sums.removed:,} removed by retention or compaction" if sums.removed else "of those acknowledged"
    if sums.deleted or sums.gone:
        removed += f"; {sums.deleted + sums.gone:,} went with their topics"
    twice = "in the log more than once"
    if sums.unsequenced:
        twice += f"; {counted(sums.unsequenced, 'batch', 'batches')} not checked"
    cards = [
        (
            "Acknowledged",
            sums.acked,
            f"in {counted(sums.batches, 'batch', 'batches')}, {bytes_in_words(sums.bytes)}",
            "",
        ),
        ("In the log", sums.present, removed, ""),
        ("Lost", sums.lost, "acknowledged and not in the log", "bad"),
        ("Overlapped", sums.overlapped, "assigned an offset that another record has too", "bad"),
        ("Duplicated", sums.duplicated, twice, "bad"),
        ("Unproven", sums.unproven or holes, unproven if sums.unproven or not holes else "gaps in the trails", "warn"),
    ]
    cells = [
        f'<div class="{f"is-{tone}" if tone and number else "is-plain"}"><dt>{name}</dt>'
        f'<dd class="{"number" if number < LONG_NUMBER else "number long"}">{number:,}</dd>'
        f'<dd class="muted">{escaped(note)}</dd></div>'
        for name, number, note, tone in cards
    ]
    return f'<dl class="numbers">{"".join(cells)}</dl>'


def _findings(facts: Facts) -> str:
    if not facts.finding_counts:
        return ""
    items = [_finding(finding) for finding in facts.findings]
    first, others = "".join(items[:OPEN_FINDINGS]), "".join(items[OPEN_FINDINGS:])
    listed = f'<ul class="findings">{first}</ul>'
    if others:
        said = counted(len(items) - OPEN_FINDINGS, "more finding")
        listed += f'<details><summary>{said}</summary><ul class="findings">{others}</ul></details>'
    hidden = facts.hidden_findings
    more = ""
    if hidden > 0:
        said = f"{counted(hidden, 'finding')} more: the first of each kind are in the table “findings”."
        more = f'<p class="muted">{said}</p>'
    return f'<h2>Findings</h2><p class="muted">{escaped(kinds_counted(facts))}</p>{listed}{more}'


def _finding(finding: Finding) -> str:
    tone = "bad" if finding.kind in WRONG_KINDS else "warn"
    known = "".join(
        f"<div><dt>{escaped(label)}</dt><dd>{escaped(text)}</dd></div>" for label, text in particulars(finding)
    )
    return (
        f'<li><span class="tag {tone}">{escaped(kind_in_words(finding))}</span> '
        f"<b>{escaped(where(finding))}</b><p>{escaped(finding.detail)}</p><dl>{known}</dl></li>"
    )


def _plot(plot: Plot, facts: Facts) -> str:
    """Return both drawings, of which the page shows one by its width, with the text for screen readers."""
    drawings = "".join(
        svg.replace("<svg ", f'<svg class="{size}" role="img" aria-label="{escaped(plot.alternative)}" ', 1)
        for size, svg in (("wide", plot.wide), ("narrow", plot.narrow))
    )
    key = _key(facts) if plot.name == "completeness" else ""
    return (
        f'<h2 id="{plot.name}">{escaped(plot.title)}</h2><figure aria-labelledby="{plot.name}">'
        f"<figcaption>{escaped(plot.caption)}</figcaption>{key}{drawings}</figure>"
    )


_KEY_MARKS: Final = {
    State.LOST: '<path d="M4.500 4.500l7 7M11.500 4.500l-7 7" stroke="var(--paper)" stroke-width="2"/>',
    State.OVERLAPPED: '<path d="M8 3.500L12.500 8L8 12.500L3.500 8z" fill="var(--paper)"/>',
    State.DUPLICATED: '<path d="M8 3.500v9M3.500 8h9" stroke="var(--paper)" stroke-width="2"/>',
    State.UNPROVEN: '<path d="M0 10L10 0M4 16L16 4M0 3L3 0M11 16L16 11" stroke="var(--hatch)" stroke-width="1.500"/>',
}


def _key(facts: Facts) -> str:
    """Return the key of the completeness plot: its colours and marks, only those that occur."""
    seen = {cell.state for cell in facts.cells} | ({State.UNPROVEN} if facts.trail_holes else set()) | {State.NOTHING}
    items = []
    for state in reversed([state for state in State if state in seen]):
        box = '<rect y="7" width="16" height="2" fill="var(--line)"/>'
        if state is not State.NOTHING:
            box = f'<rect width="16" height="16" rx="2" fill="var(--{state.value})"/>'
        mark = _KEY_MARKS.get(state, "")
        items.append(
            f'<li><svg viewBox="0 0 16 16" fill="none" aria-hidden="true">{box}{mark}</svg>{STATE_NAMES[state]}</li>'
        )
    return f'<ul class="key">{"".join(items)}</ul>'


@dataclass(frozen=True, slots=True)
class _Count:
    """A column of the table. `rare`: left out if 0 everywhere. `tone`: of values other than 0."""

    name: str
    title: str
    rare: bool = False
    tone: str = ""


_COUNTS: Final = (
    _Count("acked", "acked"),
    _Count("present", "present"),
    _Count("lost", "lost", tone="bad"),
    _Count("overlapped", "overlapped", tone="bad"),
    _Count("duplicated", "duplicated", tone="bad"),
    _Count("removed", "removed", rare=True),
    _Count("deleted", "deleted", rare=True),
    _Count("gone", "gone", rare=True, tone="warn"),
    _Count("unclaimed", "unclaimed", rare=True),
    _Count("corrupt", "corrupt batches", rare=True, tone="bad"),
    _Count("unsequenced", "unsequenced batches", rare=True),
    _Count("unchecked", "unchecked batches", rare=True, tone="warn"),
    _Count("late", "late", rare=True),
)


def _partitions(facts: Facts) -> str:
    if not facts.partitions:
        return ""
    counts = [count for count in _COUNTS if not count.rare or getattr(facts.sums, count.name)]
    titles = "".join(f'<th scope="col">{count.title}</th>' for count in counts)
    head = (
        '<tr><th scope="col" class="left">partition</th><th scope="col" class="left">verdict</th>'
        f'{titles}<th scope="col" class="left">owners</th><th scope="col">producers</th>'
        '<th scope="col">bytes</th><th scope="col">median</th><th scope="col">99 %</th><th scope="col">longest</th>'
        '<th scope="col">log</th></tr>'
    )
    rows = "".join(_row(partition, counts) for partition in facts.partitions)
    foot = ""
    hidden = facts.rest
    if hidden.partitions:
        foot += _foot(f"{counted(hidden.partitions, 'more partition')}, together", hidden, counts)
    if facts.sums.partitions > 1:
        foot += _foot(f"all {counted(facts.sums.partitions, 'partition')}", facts.sums, counts)
    order = f"The worst {len(facts.partitions):,} of {facts.sums.partitions:,}. " if hidden.partitions else ""
    return (
        f'<h2>Partitions</h2><div class="scroll" role="region" aria-label="Table of partitions" tabindex="0"><table>'
        f"<caption>{order}{counted(facts.topics, 'topic')}. Counts are of records; times are until a request's "
        f"acknowledgement.</caption><thead>{head}</thead><tbody>{rows}</tbody>"
        f"{f'<tfoot>{foot}</tfoot>' if foot else ''}"
        "</table></div>"
    )


def _row(partition: Partition, counts: Sequence[_Count]) -> str:
    times = (partition.p50_ms, partition.p99_ms, partition.max_ms)
    bounds = (partition.log_start_offset, partition.end_offset)
    log = "not read" if None in bounds else f"{bounds[0]:,} to {bounds[1]:,}"
    return (
        f'<tr><th scope="row">{escaped(partition.name)}</th>{_verdict_cell(partition.sums)}'
        f'{_counts(partition.sums, counts)}<td class="left owners">{_owners(partition)}</td>'
        f"<td>{partition.producers:,}</td>"
        f"<td>{bytes_in_words(partition.sums.bytes)}</td>"
        + "".join(f"<td>{'–' if time is None else duration(time)}</td>" for time in times)
        + f"<td>{log}</td></tr>"
    )


def _owners(partition: Partition) -> str:
    changes = partition.sums.ownership_changes
    said = f" ({counted(changes, 'change')})" if changes else ""
    return escaped(owners_in_words(partition.owners) + said)


def _foot(name: str, sums: Sums, counts: Sequence[_Count]) -> str:
    return (
        f'<tr><th scope="row">{name}</th>{_verdict_cell(sums)}{_counts(sums, counts)}<td></td>'
        f"<td></td><td>{bytes_in_words(sums.bytes)}</td><td></td><td></td><td></td><td></td></tr>"
    )


def _verdict_cell(sums: Sums) -> str:
    tone = "bad" if sums.failed else "warn" if sums.unproven else "good" if sums.acked else "idle"
    return f'<td class="left"><span class="tag {tone}">{partition_verdict(sums)}</span></td>'


def _counts(sums: Sums, counts: Sequence[_Count]) -> str:
    cells = []
    for count in counts:
        number = getattr(sums, count.name)
        tone = count.tone if number else "zero"
        cells.append(f'<td class="{tone}">{number:,}</td>' if tone else f"<td>{number:,}</td>")
    return "".join(cells)


def _words() -> str:
    items = "".join(f"<dt>{escaped(word)}</dt><dd>{escaped(meaning)}</dd>" for word, meaning in GLOSSARY.items())
    return f'<h2>What the words mean</h2><dl class="words">{items}</dl>'


def _about(facts: Facts) -> str:
    items = "".join(f"<dt>{escaped(label)}</dt><dd>{escaped(text)}</dd>" for label, text in facts.about.items())
    table = f'<dl class="words">{items}</dl>' if items else ""
    return f'<footer><h2>What was audited</h2>{table}<p class="muted">All times are UTC.</p></footer>'


# Fonts of the system, light or dark by the reader's setting, fit for phones and for print. Contrast with the paper: at
# least 7:1 for text, 4.5:1 for muted text, 3:1 for drawings.
STYLE: Final = """
:root { color-scheme: light dark;
  --paper:#ffffff; --raised:#f5f6f8; --ink:#16191d; --muted:#58606b; --line:#c9ced6;
  --good:#146c43; --bad:#b3261e; --warn:#8a5300; --idle:#58606b;
  --good-bg:#e3f4ea; --bad-bg:#fdeae8; --warn-bg:#fff1d6; --idle-bg:#eef0f3;
  --complete:#2f9e6e; --removed:#7f93ad; --unproven:#e8ae3c; --duplicated:#c2660a; --overlapped:#8430c2; --lost:#c8201a;
  --hatch:#16191d55;
  --owner-0:#8db8ea; --owner-1:#f3b77a; --owner-2:#93d3a4; --owner-3:#d8a4dd; --owner-4:#e5d36b; --owner-5:#8fd5d8;
  --owner-6:#f0a3a3; --owner-7:#bfb2ee; --owner-8:#c3c8cf; }
@media (prefers-color-scheme: dark) { :root {
  --paper:#14171b; --raised:#1d2127; --ink:#eceff3; --muted:#a4adb8; --line:#434b56;
  --good:#6fd6a0; --bad:#ff9a92; --warn:#f5c266; --idle:#a4adb8;
  --good-bg:#12301f; --bad-bg:#421815; --warn-bg:#3a2a0a; --idle-bg:#242930;
  --complete:#2c8a60; --removed:#61748c; --unproven:#b98516; --duplicated:#e0812a; --overlapped:#b678ea; --lost:#f2564d;
  --hatch:#ffffff3d;
  --owner-0:#2f5f98; --owner-1:#94591a; --owner-2:#2c7443; --owner-3:#7d4186; --owner-4:#75681a; --owner-5:#1f6f74;
  --owner-6:#943f3f; --owner-7:#5b4c9e; --owner-8:#59616c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main, .verdict > div { max-width: 74rem; margin: 0 auto; padding: 0 1.25rem; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 2.5rem 0 .5rem; }
p { margin: .4rem 0; }
a { color: inherit; }
.muted, caption, figcaption { color: var(--muted); font-size: .9rem; }
.verdict { padding: 1.75rem 0 1.5rem; border-bottom: 4px solid currentColor; }
.verdict > div { display: grid; grid-template-columns: auto 1fr; gap: 0 1.25rem; align-items: center; }
.verdict svg { width: 4.5rem; height: 4.5rem; }
.verdict h1 { font-size: clamp(2rem, 6vw, 3.25rem); line-height: 1.1; margin: 0; overflow-wrap: anywhere; }
.verdict p { grid-column: 1 / -1; margin: .9rem 0 0; color: var(--ink); font-size: 1.15rem; max-width: 60rem; }
.good { background: var(--good-bg); color: var(--good); } .bad { background: var(--bad-bg); color: var(--bad); }
.warn { background: var(--warn-bg); color: var(--warn); } .idle { background: var(--idle-bg); color: var(--idle); }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem;
  margin: 1.5rem 0 0; }
.numbers div { background: var(--raised); border-radius: .5rem; padding: .75rem .7rem;
  border-left: .3rem solid transparent; }
.numbers dt { color: var(--muted); font-size: .9rem; }
.numbers dd { margin: 0; }
.numbers .number { font-size: 1.45rem; font-weight: 650; line-height: 1.35; letter-spacing: -.02em; }
.numbers .long { font-size: 1rem; line-height: 1.96; }
.numbers dd.muted { font-size: .82rem; line-height: 1.35; }
.numbers .is-bad { border-left-color: var(--bad); } .numbers .is-bad .number { color: var(--bad); }
.numbers .is-warn { border-left-color: var(--warn); } .numbers .is-warn .number { color: var(--warn); }
.findings { list-style: none; padding: 0; margin: .75rem 0 0; }
.findings li { background: var(--raised); border-radius: .5rem; padding: .75rem 1rem; margin: 0 0 .6rem;
  overflow-wrap: anywhere; }
.findings p { margin: .35rem 0; }
.findings dl { display: flex; flex-wrap: wrap; gap: .1rem 1.25rem; margin: 0; font-size: .9rem; }
.findings dl div { display: flex; gap: .4rem; } .findings dt { color: var(--muted); white-space: nowrap; }
.findings dd { margin: 0; font-variant-numeric: tabular-nums; }
summary { cursor: pointer; padding: .4rem 0; font-weight: 600; }
.tag { display: inline-block; padding: .05rem .55rem; border-radius: 1rem; font-size: .85rem; font-weight: 650;
  border: 1px solid currentColor; white-space: nowrap; }
figure { margin: 0; } figcaption { margin-bottom: .5rem; }
figure svg { display: block; width: 100%; height: auto; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figure .narrow { display: none; }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; list-style: none; padding: 0; margin: 0 0 .5rem;
  font-size: .9rem; }
.key svg { display: inline-block; width: 1.1rem; height: 1.1rem; vertical-align: -.2rem; margin-right: .35rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem; }
.scroll:focus-visible { outline: 2px solid var(--ink); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .6rem .5rem; }
th, td { padding: .4rem .5rem; text-align: right; border-top: 1px solid var(--line); white-space: nowrap; }
thead th { color: var(--muted); font-weight: 600; vertical-align: bottom; }
th.left, td.left { text-align: left; }
tbody th, tfoot th { font-weight: 600; text-align: left; white-space: normal; overflow-wrap: anywhere;
  min-width: 9rem; max-width: 22rem; }
td.owners { white-space: normal; min-width: 7.5rem; }
td.bad, td.warn { font-weight: 650; } td.zero { color: var(--muted); }
tfoot td, tfoot th { background: var(--raised); }
.words { display: grid; grid-template-columns: minmax(7rem, auto) 1fr; gap: .35rem 1.25rem; margin: .5rem 0; }
.words dt { font-weight: 600; } .words dd { margin: 0; overflow-wrap: anywhere; }
footer { margin: 3rem 0 2rem; padding-top: 1rem; border-top: 1px solid var(--line); }
@media (max-width: 46rem) {
  figure .wide { display: none; } figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figure .narrow { display: block; }
  main, .verdict > div { padding: 0 .9rem; }
  .verdict svg { width: 3rem; height: 3rem; } .verdict p { font-size: 1.05rem; }
  .numbers { grid-template-columns: repeat(2, 1fr); }
  .numbers .number { font-size: 1.3rem; } .numbers .long { font-size: 1.05rem; }
  .words { grid-template-columns: 1fr; } .words dd { margin-bottom: .5rem; }
  tbody th, tfoot th { min-width: 9rem; max-width: 11rem; }
}
@media print { .findings li, figure, tr { break-inside: avoid; } .scroll { overflow: visible; } }
"""
