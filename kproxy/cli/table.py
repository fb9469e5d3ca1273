"""`kproxy table`: show which broker owns which partition, boxed on a terminal, else in plain columns."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, Self

import click
import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kproxy.address import Address
from kproxy.cli import run_async, start_logging
from kproxy.cli.options import EtcdPlace, asked_place, asks_proxy_or_etcd
from kproxy.cli.table_sources import NoAnswer, answers, tables_from_admin, tables_from_etcd
from kproxy.observe.table import PartitionRow, TablePage

# Rich lays out every cell before it prints the first; a longer table is printed as plain columns.
MAX_BOXED_ROWS = 2_000
HEADINGS = ("topic", "partition", "owner", "address", "revision")
# The heading of the column with the known replicas.
IN_SYNC = "in sync"
_SOURCES = {"kafka": "the Kafka cluster"}
# Lines around the rows of a live table: headline, box, footer, proxies.
_FRAME_LINES = 9
# The colours of owners; a broker always has the same colour.
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


class Row(NamedTuple):
    topic: str
    partition: int
    owner: int
    address: str
    revision: int
    in_sync: InSync | None = None


class InSync(NamedTuple):
    """The replicas in sync and those missing.

    With `too_few`, marked by `!`, acks=all is refused.
    """

    isr: list[int]
    missing: list[int]
    too_few: bool

    def __str__(self) -> str:
        text = ",".join(map(str, self.isr)) or "none"
        if self.missing:
            text += f" without {','.join(map(str, self.missing))}"
        return f"{text} !" if self.too_few else text

    @property
    def style(self) -> str:
        return "bold red" if self.too_few else "yellow" if self.missing else ""


def rows_of(table: TablePage) -> Iterator[Row]:
    """Yield one row for each owned partition.

    A broker whose key is gone has no address.
    """
    addresses = {broker.id: str(Address(broker.host, broker.port)) for broker in table.brokers}
    for topic in table.topics:
        for each in topic.partitions:
            address = addresses.get(each.owner, "-")
            yield Row(topic.name, each.partition, each.owner, address, each.revision, _in_sync(each))


def _in_sync(row: PartitionRow) -> InSync | None:
    if row.isr is None or row.replicas is None:
        return None
    missing = [each for each in row.replicas if each not in row.isr]
    return InSync(row.isr, missing, len(row.isr) < (row.min_insync_replicas or 0))


def show(table: TablePage) -> None:
    """Print the table."""
    rows = list(rows_of(table))
    if sys.stdout.isatty() and len(rows) <= MAX_BOXED_ROWS:
        Console().print(_boxed(table, rows))
        return
    click.echo(f"# {headline(table)}")
    click.echo(f"# {footline(table, rows)}")
    if table.proxies:
        click.echo(f"# {proxies_line(table)}")
    if any(row.in_sync for row in rows):
        echo_columns((*HEADINGS, IN_SYNC), ((*row[:-1], row.in_sync or "-") for row in rows))
    else:
        echo_columns(HEADINGS, (row[:-1] for row in rows))


def echo_columns(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under headings, each column as wide as its content."""
    cells = [tuple(headings), *(tuple(str(cell) for cell in row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    for row in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def counted(count: int, what: str) -> str:
    """Return a number of things, in words."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def headline(table: TablePage) -> str:
    """Return one line with the age of the table."""
    if table.source == "static":
        return f"revision {table.revision}, a fixed table"
    source = _SOURCES.get(table.source, table.source)
    if table.age_s is None:
        return f"revision {table.revision}, {source} has not been heard yet"
    heard = f"revision {table.revision}, {source} heard {_seconds(table.age_s)} ago"
    return f"{heard}: STALE, the last known owners serve on" if table.stale else heard


def footline(table: TablePage, rows: Sequence[Row]) -> str:
    """Return one line with the partitions of each broker, and the state of replicas."""
    per_owner = Counter(row.owner for row in rows)
    for broker in table.brokers:
        per_owner.setdefault(broker.id, 0)
    total = sum(per_owner.values())
    spread = ", ".join(f"broker {owner}: {count}" for owner, count in sorted(per_owner.items()))
    line = f"{counted(total, 'partition')} owned ({spread or 'no brokers'})"
    lacking = sum(bool(row.in_sync and row.in_sync.missing) for row in rows)
    refused = sum(bool(row.in_sync and row.in_sync.too_few) for row in rows)
    if lacking or refused:
        line += f"; {lacking:,} under-replicated"
    return f"{line}, {refused:,} refuse acks=all (!)" if refused else line


def proxies_line(table: TablePage) -> str:
    """Return one line with the proxies that clients see.

    Sources other than a proxy know only registered proxies.
    """
    named = [
        f"{each.id} at {Address(each.host, each.port)}{' (this one)' if each.this else ''}" for each in table.proxies
    ]
    line = f"{len(named)} {'proxy' if len(named) == 1 else 'proxies'}: {', '.join(named)}"
    return f"{line}; this one is {table.registration}" if table.registration not in ("", "registered") else line


def describe_changes(before: TablePage, after: TablePage) -> list[str]:
    """Return one line for each partition, broker and state that changed."""
    was = {(row.topic, row.partition): row for row in rows_of(before)}
    now = {(row.topic, row.partition): row for row in rows_of(after)}
    lines = []
    for place in sorted(was.keys() | now.keys()):
        old, new = was.get(place), now.get(place)
        owners = (old.owner if old else None, new.owner if new else None)
        if owners[0] != owners[1] or (old and new and old.revision != new.revision):
            revision = new.revision if new else after.revision
            lines.append(f"{place[0]} {place[1]}: {_owner(owners[0])} -> {_owner(owners[1])} at revision {revision}")
        in_sync = (old.in_sync if old else None, new.in_sync if new else None)
        # A complete ISR gets a line only if it was incomplete before.
        if in_sync[1] and in_sync[0] != in_sync[1] and (in_sync[0] or in_sync[1].missing):
            lines.append(f"{place[0]} {place[1]}: in sync {in_sync[1]}")
    brokers_before, brokers_after = set(before.brokers), set(after.brokers)
    for broker in sorted(brokers_before ^ brokers_after, key=lambda each: (each.id, each in brokers_after)):
        what = "is there" if broker in brokers_after else "is gone"
        lines.append(f"broker {broker.id} at {Address(broker.host, broker.port)} {what}")
    if (before.proxies, before.registration) != (after.proxies, after.registration):
        lines.append(proxies_line(after))
    if before.stale != after.stale:
        lines.append(headline(after))
    return lines


class LiveTable:
    """A table on a terminal, updated in place.

    Rows that do not fit are counted.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._last: TablePage | None = None

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, table: TablePage) -> None:
        self._last = table
        most_rows = max(1, self._console.size.height - _FRAME_LINES)
        self._live.update(_boxed(table, list(rows_of(table)), most_rows), refresh=True)

    def problem(self, reason: str) -> None:
        """Show the last known table, and the reason why no newer one is known."""
        said = Text(reason, style="red")
        if self._last is None:
            self._live.update(said, refresh=True)
            return
        most_rows = max(1, self._console.size.height - _FRAME_LINES - 3)
        last = Text("As last told:", style="red")
        self._live.update(Group(last, _boxed(self._last, list(rows_of(self._last)), most_rows), said), refresh=True)


def _boxed(table: TablePage, rows: list[Row], most_rows: int | None = None) -> Group:
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in HEADINGS:
        grid.add_column(heading, justify="left" if heading in ("topic", "address") else "right", no_wrap=True)
    has_replicas = any(row.in_sync for row in rows)
    if has_replicas:
        grid.add_column(IN_SYNC, no_wrap=True)
    shown = rows if most_rows is None or len(rows) <= most_rows else rows[: most_rows - 1]
    previous = ""
    for row in shown:
        style = _COLOURS[row.owner % len(_COLOURS)]
        grid.add_row(
            row.topic if row.topic != previous else "",
            str(row.partition),
            Text(str(row.owner), style=style),
            Text(row.address, style=style if row.address != "-" else "red"),
            f"{row.revision}",
            *([Text(str(row.in_sync or "-"), style=row.in_sync.style if row.in_sync else "")] if has_replicas else []),
        )
        previous = row.topic
    parts: list[RenderableType] = [Text(headline(table), style="bold red" if table.stale else "bold"), grid]
    if len(shown) < len(rows):
        parts.append(Text(f"... and {len(rows) - len(shown):,} more (--topic shows one topic)", style="dim"))
    parts.append(Text(footline(table, rows), style="dim"))
    if table.proxies:
        parts.append(Text(proxies_line(table), style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _owner(owner: int | None) -> str:
    return "nobody" if owner is None else f"broker {owner}"


def _seconds(age_s: float) -> str:
    return f"{age_s:.1f} s" if age_s < 120 else f"{age_s / 60:.0f} min"


@click.command("table", epilog="Exit status: 0, or 1 if no partition of the --topic is in the table.")
@asks_proxy_or_etcd
@click.option("--topic", metavar="NAME", help="Only this topic.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with --watch one line for each change.")
@click.option("--watch", is_flag=True, help="Stay and show changes as they come; Ctrl-C ends it.")
@click.pass_context
def command(context: click.Context, /, topic: str | None, as_json: bool, watch: bool, **where: Any) -> int:
    """Show which broker owns which partition.

    Asks the proxy on this machine by default. A partition that nobody owns at the moment is not in the table.

    \b
      kproxy table
      kproxy table --topic flights --watch
      kproxy table --json | jq '.topics[].partitions[].owner'
      kproxy table --etcd http://127.0.0.1:2379 --prefix /kafscale
    """
    place = asked_place(**where)
    if isinstance(place, EtcdPlace):
        # Warnings are not logged, as the age of the table shows that etcd does not answer.
        start_logging(context, "error")
        tables = tables_from_etcd(*place, topic)
    else:
        tables = tables_from_admin(place, topic)
    if not watch:
        return run_async(lambda: _show_once(tables, as_json, topic))
    try:
        return run_async(lambda: _follow(tables, as_json))
    except KeyboardInterrupt:
        return 0


async def _show_once(tables: AsyncGenerator[TablePage | NoAnswer], as_json: bool, topic: str | None) -> int:
    async with aclosing(tables):
        table = await anext(answers(tables))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(table), indent=2).decode())
    else:
        show(table)
    if topic is None or any(each.partitions for each in table.topics):
        return 0
    reason = "nobody owns one at the moment, or there is no such topic"
    click.echo(f"kproxy: no partition of topic {topic!r} is in the table: {reason}.", err=True)
    return 1


async def _follow(tables: AsyncGenerator[TablePage | NoAnswer], as_json: bool) -> None:
    """Show a live table on a terminal, else a line for each change, until interrupted."""
    async with aclosing(tables):
        if not as_json and sys.stdout.isatty():
            with LiveTable() as live:
                async for table in tables:
                    if isinstance(table, NoAnswer):
                        live.problem(str(table))
                    else:
                        live.update(table)
        else:
            await _follow_in_lines(tables, as_json)


async def _follow_in_lines(tables: AsyncGenerator[TablePage | NoAnswer], as_json: bool) -> None:
    before: TablePage | None = None
    async for table in answers(tables):
        if as_json:
            if before is None or _content(table) != _content(before):
                click.echo(msgspec.json.encode(table))
        elif before is None:
            show(table)
        else:
            for line in describe_changes(before, table):
                click.echo(line)
        sys.stdout.flush()
        before = table


def _content(table: TablePage) -> TablePage:
    """Return the table without its age, which does not count as a change."""
    return msgspec.structs.replace(table, age_s=None)
