"""Print claims of the Own API in a table, boxed on a terminal, and each change in one line."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence

import click
import msgspec
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kproxy.cli.own_sources import Change
from kproxy.cli.table import MAX_BOXED_ROWS, counted, echo_columns
from kproxy.observe.table import (
    WHOLE_GROUP_TEXT,
    ClaimRow,
    ClaimsPage,
    FreeOrder,
    FreeOutcome,
    MemberRow,
)

HEADINGS = ("group", "resource", "generation", "fence", "client", "proxy", "connection", "since")
_RIGHT = ("generation", "fence", "connection", "since")
# Headings on a terminal, which may be narrow.
_SHORT = {"generation": "gen"}
_LEFT_OUT = "connection"
_FOLDED = ("group", "resource", "client")
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))
NO_ADDRESS = "-"
MAX_SHOWN_WRITER_GROUPS = 10


def show(page: ClaimsPage, group: str | None = None, now_s: float | None = None) -> None:
    """Print a page of claims, of one group if named.

    `now_s` is the time in seconds since 1970.
    """
    now_ms = int(1000 * (time.time() if now_s is None else now_s))
    rows = [_cells(claim, now_ms) for claim in page.claims]
    if sys.stdout.isatty() and len(rows) <= MAX_BOXED_ROWS:
        Console().print(_boxed(page, group, rows))
        return
    click.echo(f"# {headline(page, group)}")
    click.echo(f"# {members_line(page)}")
    click.echo(f"# {writers_line(page)}")
    echo_columns(HEADINGS, rows)


def show_first(page: ClaimsPage, as_json: bool, group: str | None = None) -> None:
    """Print the claims when a watch begins; in JSON each claim as a change."""
    if not as_json:
        show(page, group)
        return
    for claim in page.claims:
        click.echo(msgspec.json.encode(Change("is owned", claim)))


def show_change(change: Change, as_json: bool) -> None:
    """Print a change with the time of day."""
    if as_json:
        click.echo(msgspec.json.encode(change))
    else:
        click.echo(f"{time.strftime('%H:%M:%S')} {describe(change)}")


def show_freed(order: FreeOrder, outcomes: Sequence[FreeOutcome], as_json: bool) -> int:
    """Print the outcomes of an order; return the exit status."""
    if as_json:
        freed = [claim for outcome in outcomes for claim in outcome.freed]
        click.echo(msgspec.json.format(msgspec.json.encode(freed), indent=2).decode())
    problems = []
    for outcome in outcomes:
        for claim in () if as_json else outcome.freed:
            click.echo(f"{place(claim)} is free: {who(claim)} is severed")
        for resource in outcome.missing:
            owner = (
                f", but the whole group is owned by {who(outcome.whole)}: free that with --all" if outcome.whole else ""
            )
            problems.append(f"nobody owns {resource_text(resource)} of group {printable(order.group)}{owner}")
        problems += [
            f"{resource_text(resource)} of group {printable(order.group)} has got another owner just now, who keeps it"
            for resource in outcome.changed
        ]
    if order.resources is None and not any(outcome.freed or outcome.changed for outcome in outcomes):
        problems.append(f"nobody owns anything of group {printable(order.group)}")
    for problem in problems:
        click.echo(f"kproxy: {problem}.", err=True)
    return int(bool(problems))


def headline(page: ClaimsPage, group: str | None = None) -> str:
    """Return one line with the numbers of claims and groups."""
    count, groups = len(page.claims), len({claim.group for claim in page.claims})
    if not count:
        of_group = "" if group is None else f" of group {printable(group)}"
        return f"revision {page.revision}, nobody owns anything{of_group}"
    return f"revision {page.revision}, {counted(count, 'claim')} in {counted(groups, 'group')}"


def members_line(page: ClaimsPage) -> str:
    """Return one line with the proxies that offer the Own API, and those that delay claims."""
    if not page.members:
        return "no proxy offers the Own API"
    processes = Counter(_shown_member(member, page.claims) for member in page.members)
    named = [each if count == 1 else f"{each} ({count} processes)" for each, count in sorted(processes.items())]
    addresses = len({member.address for member in page.members})
    return f"{addresses} {'proxy offers' if addresses == 1 else 'proxies offer'} the Own API: {', '.join(named)}"


def writers_line(page: ClaimsPage) -> str:
    """Return one line with the topics to which only owners write."""
    if not page.writer_groups:
        return "no topic has a writer group: anybody writes (--writer-group TOPIC=GROUP)"
    shown = ", ".join(map(printable, page.writer_groups[:MAX_SHOWN_WRITER_GROUPS]))
    more = ", ..." if len(page.writer_groups) > MAX_SHOWN_WRITER_GROUPS else ""
    differ = "; NOT THE SAME at all proxies: give all of them the same --writer-group" if page.differ else ""
    return f"writer groups: {shown}{more}{differ}"


def _shown_member(member: MemberRow, claims: Iterable[ClaimRow]) -> str:
    # A process confirms only the claims made through other processes.
    last = max((claim.fence for claim in claims if claim.proxy != member.proxy), default=0)
    waits = []
    if member.seen < last:
        waits.append(f"has confirmed no claim since revision {member.seen}")
    if member.unsettled:
        waits.append(f"{counted(member.unsettled, 'partition')} not settled")
    return f"{member.address} [{'; '.join(waits)}]" if waits else member.address


def describe(change: Change) -> str:
    """Describe a change in one line."""
    claim, before = change.claim, change.before
    which = f"generation {claim.generation}, fence {claim.fence}"
    match change.change:
        case "taken over" if before is not None and before.resource and not claim.resource:
            return f"{place(before)} taken over with the whole group by {who(claim)} from {who(before)}, {which}"
        case "taken over" if before is not None:
            return f"{place(claim)} taken over by {who(claim)} from {who(before)}, {which}"
        case "raised" | "reset":
            return f"{place(claim)} {change.change} by {who(claim)}, {which}"
        case "freed":
            return f"{place(claim)} freed, it was owned by {who(claim)}, {which}"
        case "is owned":
            return f"{place(claim)} is owned by {who(claim)}, {which}"
        case _:
            return f"{place(claim)} claimed by {who(claim)}, {which}"


def place(claim: ClaimRow) -> str:
    return f"{printable(claim.group)} {resource_text(claim.resource)}"


def resource_text(resource: str) -> str:
    return printable(resource) or WHOLE_GROUP_TEXT


def who(claim: ClaimRow) -> str:
    """Return the owner of a claim, for a sentence."""
    client = printable(claim.client) or "a client"
    return f"{client} (connection {claim.connection} of {claim.address or 'a proxy that is gone'})"


def printable(text: str) -> str:
    """Replace unprintable characters: names must not control the terminal."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def age(since_ms: int, now_ms: int) -> str:
    """Return the age in one unit."""
    seconds = max(0, now_ms - since_ms) // 1000
    for length, unit in _UNITS:
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def _cells(claim: ClaimRow, now_ms: int) -> tuple[str, ...]:
    return (
        printable(claim.group),
        resource_text(claim.resource),
        str(claim.generation),
        str(claim.fence),
        printable(claim.client) or "-",
        claim.address or NO_ADDRESS,
        str(claim.connection),
        age(claim.since, now_ms) if claim.since else "-",
    )


def _boxed(page: ClaimsPage, group: str | None, rows: Iterable[tuple[str, ...]]) -> Group:
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    shown = [column for column, heading in enumerate(HEADINGS) if heading != _LEFT_OUT]
    for heading in (HEADINGS[column] for column in shown):
        grid.add_column(
            _SHORT.get(heading, heading),
            justify="right" if heading in _RIGHT else "left",
            no_wrap=heading not in _FOLDED,
            overflow="fold",
        )
    previous = ""
    for row in rows:
        of_group, *rest = (row[column] for column in shown)
        grid.add_row(Text(of_group if of_group != previous else ""), *map(Text, rest))
        previous = of_group
    lines = [
        Text(members_line(page), style="dim"),
        Text(writers_line(page), style="bold red" if page.differ else "dim"),
    ]
    headlined = Text(headline(page, group), style="bold")
    if not page.claims:
        return Group(headlined, Text("`kproxy own claim GROUP RESOURCE` claims something.", style="dim"), *lines)
    return Group(headlined, grid, *lines)
