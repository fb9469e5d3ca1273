"""Write the report as one HTML file.

It shows the verdict, the numbers, the findings, the plots and the table of partitions. The file loads nothing: it
contains its style and drawings, has no script, and its content policy forbids requests. Text from outside (names of
topics, clients, files) is escaped, and unprintable characters are replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from string import Template
from typing import Final

from kproxy.pipeline.audit.columns import WRONG_KINDS
from kproxy.pipeline.audit.report_facts import COUNTS, Facts, Finding, Verdict, said
from kproxy.pipeline.audit.report_plots import plots
from kproxy.pipeline.audit.report_text import (
    GLOSSARY,
    OTHERS,
    TITLES,
    batches,
    bytes_in_words,
    cell,
    columns,
    counted,
    escaped,
    headline,
    kind_in_words,
    kinds_counted,
    particulars,
    partition_rows,
    summary,
    where,
)
from kproxy.pipeline.preflight import write_whole

TEMPLATE: Final = resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
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
    write_whole(path, report_page(facts), "The report")


def report_page(facts: Facts) -> str:
    """Return the HTML, the same for the same facts."""
    parts = (_numbers(facts), _findings(facts), plots(facts), _partitions(facts))
    return Template(TEMPLATE).substitute(
        title=escaped(headline(facts.verdict)),
        verdict=_verdict(facts.verdict),
        body="\n".join(filter(None, parts)),
        glossary=_terms(GLOSSARY),
        about=_terms(facts.about),
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
            note = said(fault.sentence, 2).partition(" ")[2]
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
        told = counted(len(items) - OPEN_FINDINGS, "more finding")
        listed += f'<details><summary>{told}</summary><ul class="findings">{others}</ul></details>'
    hidden = facts.hidden_findings
    more = ""
    if hidden > 0:
        told = f"{counted(hidden, 'finding')} more: the first of each kind are in the table “findings”."
        more = f'<p class="muted">{told}</p>'
    return f'<h2>Findings</h2><p class="muted">{escaped(kinds_counted(facts))}</p>{listed}{more}'


def _finding(finding: Finding) -> str:
    known = "".join(
        f"<div><dt>{escaped(label)}</dt><dd>{escaped(text)}</dd></div>" for label, text in particulars(finding)
    )
    return (
        f'<li><span class="tag {"bad" if finding.kind in WRONG_KINDS else "warn"}">{escaped(kind_in_words(finding))}'
        f"</span> <b>{escaped(where(finding))}</b><p>{escaped(finding.detail)}</p><dl>{known}</dl></li>"
    )


def _partitions(facts: Facts) -> str:
    if not facts.partitions:
        return ""
    names = ("verdict", *columns(facts), *OTHERS)
    head = "".join(f'<th scope="col">{TITLES.get(name, name)}</th>' for name in ("partition", *names))
    body = foot = ""
    for title, sums, one in partition_rows(facts):
        cells = ""
        for name in names:
            text, tone = cell(name, sums, one)
            is_tag = name == "verdict"
            cells += f'<td><span class="tag {tone}">{text}</span></td>' if is_tag else f'<td class="{tone}">{text}</td>'
        row = f'<tr><th scope="row">{escaped(title)}</th>{cells}</tr>'
        body, foot = (body + row, foot) if one is not None else (body, foot + row)
    worst, every = len(facts.partitions), facts.sums.partitions
    order = f"The worst {worst:,} of {every:,}. " if worst < every else ""
    return (
        '<h2>Partitions</h2><div class="scroll" role="region" aria-label="Table of partitions" tabindex="0">'
        f'<table class="partitions"><caption>{order}{counted(facts.topics, "topic")}. Counts are of records; times are '
        f"until a request's acknowledgement.</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        f"<tfoot>{foot}</tfoot></table></div>"
    )


def _terms(terms: Mapping[str, str]) -> str:
    items = "".join(f"<dt>{escaped(term)}</dt><dd>{escaped(text)}</dd>" for term, text in terms.items())
    return f'<dl class="words">{items}</dl>'
