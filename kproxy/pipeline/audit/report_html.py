"""Write the report as one HTML file.

It shows the verdict, the numbers, the findings, the plots and the table of partitions. The file loads nothing: it
contains its style and drawings, has no script, and its content policy forbids requests. Text from outside (names of
topics, clients, files) is escaped, and unprintable characters are replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kproxy.errors import StartupError
from kproxy.pipeline.audit.columns import WRONG_KINDS
from kproxy.pipeline.audit.report_facts import COUNTS, Facts, Finding, Partition, Sums, Verdict
from kproxy.pipeline.audit.report_plots import plots
from kproxy.pipeline.audit.report_text import (
    GLOSSARY,
    TITLES,
    batches,
    bytes_in_words,
    columns,
    counted,
    escaped,
    headline,
    kind_in_words,
    kinds_counted,
    owners_in_words,
    particulars,
    partition_verdict,
    summary,
    time_in_words,
    tone,
    where,
)

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
# Findings shown at once; the others are folded.
OPEN_FINDINGS: Final = 8
# Numbers from this one on need a smaller font in their card.
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
        plots(facts),
        _partitions(facts),
        f"<h2>What the words mean</h2>{_terms(GLOSSARY)}",
        f'<footer><h2>What was audited</h2>{_terms(facts.about)}<p class="muted">All times are UTC.</p></footer>',
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


def _tone(verdict: Verdict) -> str:
    if verdict.failed:
        return "bad"
    if verdict.unproven or verdict.sums.deleted:
        return "warn"
    return "idle" if verdict.empty else "good"


def _verdict(verdict: Verdict) -> str:
    kind = _tone(verdict)
    icon = "split" if verdict.conflicts else kind
    return (
        f'<header class="verdict {kind}" data-verdict="{kind}"><div>'
        '<svg viewBox="0 0 48 48" fill="none" stroke="currentColor" stroke-width="4" stroke-linecap="round" '
        f'stroke-linejoin="round" aria-hidden="true"><circle cx="24" cy="24" r="21" stroke-width="3"/>'
        f"{_ICONS[icon]}</svg>"
        f"<h1>{escaped(headline(verdict))}</h1><p>{escaped(summary(verdict))}</p></div></header>"
    )


def _numbers(facts: Facts) -> str:
    sums, holes = facts.sums, facts.verdict.trail_faults
    log = f"and {sums.removed:,} {COUNTS['removed'].absent}" if sums.removed else "of those acknowledged"
    if went := sums.deleted + sums.gone:
        log += f"; {went:,} went with their topics"
    cards = [
        ("Acknowledged", sums.acked, f"in {batches(sums.batches)}, {bytes_in_words(sums.bytes)}", ""),
        ("In the log", sums.present, log, ""),
    ]
    for name in columns(facts):
        if fault := COUNTS[name].fault:
            # Omit the verb of the sentence.
            note = fault.said(2).partition(" ")[2]
            if name == "duplicated" and sums.unsequenced:
                note += f"; {batches(sums.unsequenced)} not checked"
            cards.append((TITLES[name].capitalize(), getattr(sums, name), note, "bad"))
    note = f"of {counted(sums.partitions, 'partition')}" + (f"; {counted(holes, 'gap')} in the trails" if holes else "")
    if sums.unchecked:
        note += f"; {batches(sums.unchecked)} not checked"
    if holes and not sums.unproven:
        note = "gaps in the trails"
    cards.append(("Unproven", sums.unproven or holes, note, "warn"))
    cells = "".join(
        f'<div class="{f"is-{kind}" if number else ""}"><dt>{name}</dt>'
        f'<dd class="number{" long" if number >= LONG_NUMBER else ""}">{number:,}</dd>'
        f'<dd class="muted">{escaped(note)}</dd></div>'
        for name, number, note, kind in cards
    )
    return f'<dl class="numbers">{cells}</dl>'


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
    known = "".join(
        f"<div><dt>{escaped(label)}</dt><dd>{escaped(text)}</dd></div>" for label, text in particulars(finding)
    )
    return (
        f'<li><span class="tag {"bad" if finding.kind in WRONG_KINDS else "warn"}">{escaped(kind_in_words(finding))}'
        f"</span> <b>{escaped(where(finding))}</b><p>{escaped(finding.detail)}</p><dl>{known}</dl></li>"
    )


_OTHERS: Final = ("owners", "producers", "bytes", "median", "99 %", "longest", "log")


def _partitions(facts: Facts) -> str:
    if not facts.partitions:
        return ""
    counts = columns(facts)
    titles = ("partition", "verdict", *(TITLES[name] for name in counts), *_OTHERS)
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    rows = "".join(_row(one.name, one.sums, counts, one) for one in facts.partitions)
    foot, hidden, order = "", facts.rest, ""
    if hidden.partitions:
        foot += _row(f"{counted(hidden.partitions, 'more partition')}, together", hidden, counts)
        order = f"The worst {len(facts.partitions):,} of {facts.sums.partitions:,}. "
    if facts.sums.partitions > 1:
        foot += _row(f"all {counted(facts.sums.partitions, 'partition')}", facts.sums, counts)
    return (
        '<h2>Partitions</h2><div class="scroll" role="region" aria-label="Table of partitions" tabindex="0">'
        f'<table class="partitions"><caption>{order}{counted(facts.topics, "topic")}. Counts are of records; times are '
        f"until a request's acknowledgement.</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
        f"<tfoot>{foot}</tfoot></table></div>"
    )


def _row(title: str, sums: Sums, counts: list[str], one: Partition | None = None) -> str:
    """Return the row of a partition, or of the sum of several."""
    cells = "".join(f'<td class="{_shade(name, sums)}">{getattr(sums, name):,}</td>' for name in counts)
    others = ["", "", bytes_in_words(sums.bytes), "", "", "", ""]
    if one is not None:
        changes = f" ({counted(sums.ownership_changes, 'change')})" if sums.ownership_changes else ""
        read = one.log_start_offset is not None and one.end_offset is not None
        others = [
            *(owners_in_words(one.owners) + changes, f"{one.producers:,}", bytes_in_words(sums.bytes)),
            *(time_in_words(ms) for ms in (one.p50_ms, one.p99_ms, one.max_ms)),
            f"{one.log_start_offset:,} to {one.end_offset:,}" if read else "not read",
        ]
    return (
        f'<tr><th scope="row">{escaped(title)}</th><td><span class="tag {tone(sums)}">'
        f"{partition_verdict(sums)}</span></td>{cells}{''.join(f'<td>{text}</td>' for text in others)}</tr>"
    )


def _shade(name: str, sums: Sums) -> str:
    count = COUNTS[name]
    if not getattr(sums, name):
        return "zero"
    return "bad" if count.fault else "warn" if count.warning else ""


def _terms(terms: Mapping[str, str]) -> str:
    items = "".join(f"<dt>{escaped(term)}</dt><dd>{escaped(text)}</dd>" for term, text in terms.items())
    return f'<dl class="words">{items}</dl>'


# Fonts of the system, light or dark by the reader's setting, fit for phones and for print. Contrast with the paper: at
# least 7:1 for text, 4.5:1 for muted text, 3:1 for drawings.
STYLE: Final = """
:root { color-scheme: light dark;
  --paper:#ffffff; --raised:#f5f6f8; --ink:#16191d; --muted:#58606b; --line:#c9ced6; --hatch:#16191d55;
  --good:#146c43; --bad:#b3261e; --warn:#8a5300; --idle:#58606b;
  --good-bg:#e3f4ea; --bad-bg:#fdeae8; --warn-bg:#fff1d6; --idle-bg:#eef0f3;
  --complete:#2f9e6e; --removed:#7f93ad; --unproven:#e8ae3c; --duplicated:#c2660a; --overlapped:#8430c2; --lost:#c8201a;
  --owner-0:#8db8ea; --owner-1:#f3b77a; --owner-2:#93d3a4; --owner-3:#d8a4dd; --owner-4:#e5d36b; --owner-5:#8fd5d8;
  --owner-6:#f0a3a3; --owner-7:#bfb2ee; }
@media (prefers-color-scheme: dark) { :root {
  --paper:#14171b; --raised:#1d2127; --ink:#eceff3; --muted:#a4adb8; --line:#434b56; --hatch:#ffffff3d;
  --good:#6fd6a0; --bad:#ff9a92; --warn:#f5c266; --idle:#a4adb8;
  --good-bg:#12301f; --bad-bg:#421815; --warn-bg:#3a2a0a; --idle-bg:#242930;
  --complete:#2c8a60; --removed:#61748c; --unproven:#b98516; --duplicated:#e0812a; --overlapped:#b678ea; --lost:#f2564d;
  --owner-0:#2f5f98; --owner-1:#94591a; --owner-2:#2c7443; --owner-3:#7d4186; --owner-4:#75681a; --owner-5:#1f6f74;
  --owner-6:#943f3f; --owner-7:#5b4c9e; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main, .verdict > div { max-width: 80rem; margin: 0 auto; padding: 0 1.25rem; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 2.5rem 0 .5rem; }
p { margin: .4rem 0; } dd, figure { margin: 0; }
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
.numbers div { background: var(--raised); border-radius: .5rem; padding: .75rem .7rem; border-left: .3rem solid #0000; }
.numbers dt { color: var(--muted); font-size: .9rem; } .numbers .muted { font-size: .82rem; line-height: 1.35; }
.numbers .number { font-size: 1.45rem; font-weight: 650; line-height: 1.35; letter-spacing: -.02em; }
.numbers .long { font-size: 1rem; line-height: 1.96; }
.numbers .is-bad { border-left-color: var(--bad); } .numbers .is-bad .number { color: var(--bad); }
.numbers .is-warn { border-left-color: var(--warn); } .numbers .is-warn .number { color: var(--warn); }
.findings { list-style: none; padding: 0; margin: .75rem 0 0; }
.findings li { background: var(--raised); border-radius: .5rem; padding: .75rem 1rem; margin: 0 0 .6rem;
  overflow-wrap: anywhere; }
.findings dl { display: flex; flex-wrap: wrap; gap: .1rem 1.25rem; margin: 0; font-size: .9rem; }
.findings dl div { display: flex; gap: .4rem; } .findings dt { color: var(--muted); white-space: nowrap; }
summary { cursor: pointer; padding: .4rem 0; font-weight: 600; }
.tag { display: inline-block; padding: .05rem .55rem; border-radius: 1rem; font-size: .85rem; font-weight: 650;
  border: 1px solid currentColor; white-space: nowrap; }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; list-style: none; padding: 0; margin: .5rem 0;
  font-size: .9rem; }
.key svg { vertical-align: -.15rem; margin-right: .35rem; }
.patterns { position: absolute; } pattern path { fill: none; stroke-width: 1.2; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
.plot th { padding: 0 .75rem 0 0; font-weight: 400; text-align: right; white-space: nowrap; }
.plot td { padding: 0; width: 100%; } .plot svg { display: block; width: 100%; overflow: visible; }
.plot text { font-size: 12px; fill: var(--ink); } .plot line { stroke: var(--line); } .plot .edge { fill: var(--ink); }
.plot tfoot th, .plot tfoot text { font-size: 12px; color: var(--muted); fill: var(--muted); }
.plot .narrow { display: none; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem; }
.scroll:focus-visible { outline: 2px solid var(--ink); outline-offset: 2px; }
caption { text-align: left; padding: .6rem .5rem; }
.partitions, .partitions .tag { font-size: .82rem; }
.partitions :is(th, td) { padding: .35rem .4rem; text-align: right; border-top: 1px solid var(--line);
  white-space: nowrap; }
.partitions thead th { color: var(--muted); font-weight: 600; vertical-align: bottom; }
.partitions tr > :nth-child(-n+2) { text-align: left; }
.partitions [scope=row] { font-weight: 600; white-space: normal; overflow-wrap: anywhere; min-width: 6.5rem; }
.partitions td:nth-last-child(7) { white-space: normal; min-width: 7rem; }
td.bad, td.warn { font-weight: 650; } td.zero { color: var(--muted); } .partitions tfoot { background: var(--raised); }
.words { display: grid; grid-template-columns: minmax(7rem, auto) 1fr; gap: .35rem 1.25rem; margin: .5rem 0; }
.words dt { font-weight: 600; } .words dd { overflow-wrap: anywhere; }
footer { margin: 3rem 0 2rem; padding-top: 1rem; border-top: 1px solid var(--line); }
@media (max-width: 46rem) {
  main, .verdict > div { padding: 0 .9rem; }
  .verdict svg { width: 3rem; height: 3rem; } .verdict p { font-size: 1.05rem; }
  .numbers { grid-template-columns: repeat(2, 1fr); } .words { grid-template-columns: 1fr; }
  .words dd { margin-bottom: .5rem; }
  .plot :is(tbody, tfoot, tr, th, td) { display: block; text-align: left; } .plot th { padding: .3rem 0 0; }
  .plot .wide { display: none; } .plot .narrow { display: revert; }
}
@media print { .findings li, figure, tr { break-inside: avoid; } .scroll { overflow: visible; } }
"""
