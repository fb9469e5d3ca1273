"""`kproxy top`: show the admin page of a proxy or a reference broker in a terminal.

The command asks the page for the overview and the rows of one view, once a second. On a terminal it redraws the
screen and takes keys; otherwise it prints once, in plain columns.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeVar

import click
import msgspec
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kproxy.cli import run_async, start_logging
from kproxy.cli.options import AdminPlace, Asked, admin_option, admin_place, flag
from kproxy.cli.table import counted, echo_columns
from kproxy.cli.table_sources import NoAnswer, ask, decoded, not_ours
from kproxy.observe.overview import (
    CLIENT_ORDERS,
    TOPIC_ORDERS,
    ClientsPage,
    Event,
    Overview,
    PartitionLine,
    PartitionsPage,
    TopicLine,
    TopicsPage,
)

EVERY_S: Final = 1.0
FRAME_LINES: Final = 8
# The most printed rows, the most characters of a filter, and the most of a column of text that is not cut.
PRINTED_ROWS: Final = 100
MAX_SEARCH: Final = 200
MAX_KEPT: Final = 24
_STYLES: Final = {
    "good": "green",
    "warn": "yellow",
    "bad": "red",
    "up": "green",
    "slow": "yellow",
    "down": "red",
    "hung": "red",
}
_NONE, _ESCAPE, _BACKSPACE, _INTERRUPT = "-", "\x1b", ("\x7f", "\b"), ("\x03", "\x04")

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class Column(NamedTuple):
    """A column: the value of a row, its text, and whether numbers are in it (and rows can be sorted by it)."""

    heading: str
    value: Callable[[Any], Any]
    text: Callable[[Any], str] = str
    is_number: bool = False


def _text(heading: str, name: str) -> Column:
    return Column(heading, attrgetter(name), lambda value: str(value) or _NONE)


def _number(heading: str, name: str, unit: str = "") -> Column:
    return Column(heading, attrgetter(name), lambda value: _some(value, unit), is_number=True)


def _some(value: float | None, unit: str) -> str:
    if value is None:
        return _NONE
    return f"{value:,.0f}{unit}" if value >= 100 or value == int(value) else f"{value:.1f}{unit}"


def in_bytes(value: float) -> str:
    """Return a number of bytes in the unit that suits it."""
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"


def _clock(at_ms: int | None) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_ms / 1000)) if at_ms is not None else "the start"


def _in_sync(line: PartitionLine) -> str:
    missing = [each for each in line.replicas or () if each not in (line.isr or ())]
    text = ",".join(map(str, line.isr or ())) or _NONE
    return f"{text} without {','.join(map(str, missing))}" if missing else text


def _busiest(topic: TopicLine) -> str:
    if topic.busiest is None or not topic.busiest_bytes or not topic.received_bytes or topic.partitions < 2:
        return _NONE
    return f"{topic.busiest}: {100 * topic.busiest_bytes / topic.received_bytes:.0f} %"


def _owners(line: TopicLine) -> str:
    owned = [f"{broker} ({count:,})" for broker, count in line.owners.items()]
    return ", ".join([*owned, *([f"nobody ({line.unowned:,})"] if line.unowned else [])])


def _bytes(heading: str, name: str) -> Column:
    return Column(heading, attrgetter(name), lambda value: _NONE if value is None else in_bytes(value), is_number=True)


VIEWS: Final[dict[str, Sequence[Column]]] = {
    "brokers": (
        _number("broker", "id"),
        _text("address", "address"),
        _text("state", "state"),
        _number("parts", "partitions"),
        _number("produce/s", "requests"),
        _number("latency", "latency_ms", " ms"),
        _number("99 %", "slowest_ms", " ms"),
        _number("in flight", "in_flight"),
        _number("oldest", "oldest_s", " s"),
        _number("errors/min", "errors"),
        _number("conns", "connections"),
        _number("lacking", "lacking"),
    ),
    "partitions": (
        _text("topic", "topic"),
        _number("partition", "partition"),
        Column("owner", attrgetter("owner"), lambda value: "nobody" if value < 0 else str(value), is_number=True),
        Column("since", attrgetter("since"), _clock),
        _number("moves", "moves"),
        Column("in sync", _in_sync),
    ),
    "clients": (
        _text("client id", "client_id"),
        _text("software", "software"),
        _text("principal", "principal"),
        _text("address", "address"),
        _number("requests/s", "requests"),
        _bytes("received/s", "received_bytes"),
        _bytes("sent/s", "sent_bytes"),
        _number("in flight", "in_flight"),
        _number("oldest", "oldest_s", " s"),
        Column("at broker", attrgetter("oldest_at"), lambda value: _NONE if value < 0 else str(value), is_number=True),
        Column("slow", lambda each: f"{each.slow_s:.1f} s {each.slow_at}" if each.slow_at else _NONE),
    ),
    "lately": (
        Column("time", attrgetter("at"), _clock),
        _text("kind", "kind"),
        _number("times", "count"),
        _text("what", "text"),
    ),
    "limits": (
        _text("limit", "name"),
        Column("used", lambda each: in_bytes(each.used) if each.unit else _some(each.used, "")),
        Column("of", lambda each: in_bytes(each.limit) if each.unit else _some(each.limit, "")),
        Column("share", lambda each: 100 * each.used / each.limit, lambda value: _some(value, " %"), is_number=True),
        _text("key", "key"),
    ),
    "topics": (
        _text("topic", "topic"),
        _number("parts", "partitions"),
        Column("owners (parts)", _owners),
        _number("produce/s", "requests"),
        _bytes("received/s", "received_bytes"),
        Column("hot part", _busiest),
        _number("moves", "moves"),
        _number("errors", "errors"),
    ),
}
# Views whose rows the page sorts.
ORDERS: Final = {"clients": tuple(CLIENT_ORDERS), "topics": tuple(TOPIC_ORDERS)}
NOT_COUNTED: Final = "requests and bytes of topics are not counted: start kproxy serve with --metrics-topics 100"


class Shown(NamedTuple):
    """The page's answer: the overview, and rows."""

    view: str
    overview: Overview
    rows: Sequence[Any]
    total: int
    hint: str = ""

    @property
    def cells(self) -> list[list[str]]:
        """The texts of the rows."""
        return [[column.text(column.value(row)) for column in VIEWS[self.view]] for row in self.rows]


class Screen:
    """The state of the screen: a view, an order and a filter; `typed` is the filter that is being typed."""

    def __init__(self, view: str, order: str, search: str) -> None:
        self.view = view
        # Of topics and clients; the others are sorted by `column`, None: as they come.
        self.order = order
        self.column: int | None = None
        self.search = search
        self.typed: str | None = None

    def press(self, key: str) -> bool:
        """Take a key; return False to end."""
        if key in _INTERRUPT:
            return False
        if self.typed is not None:
            self._type(key)
            return True
        if key.isdigit() and 1 <= int(key) <= len(VIEWS):
            self.view, self.column = list(VIEWS)[int(key) - 1], None
        elif key == "s":
            self._sort()
        elif key == "/":
            self.typed = self.search
        elif key == _ESCAPE:
            self.search = ""
        return key != "q"

    def _type(self, key: str) -> None:
        typed = self.typed or ""
        if key in ("\r", "\n", _ESCAPE):
            self.search, self.typed = (self.search if key == _ESCAPE else typed), None
        elif key in _BACKSPACE:
            self.typed = typed[:-1]
        elif key.isprintable():
            self.typed = (typed + key)[:MAX_SEARCH]

    def _sort(self) -> None:
        if self.view in ORDERS:
            orders = ORDERS[self.view]
            self.order = orders[(orders.index(self._ordered) + 1) % len(orders)]
            return
        last = -1 if self.column is None else self.column
        numbers = (place for place, column in enumerate(VIEWS[self.view]) if column.is_number and place > last)
        self.column = next(numbers, None)

    @property
    def _ordered(self) -> str:
        """The order, if the view has one."""
        return self.order if self.order in ORDERS[self.view] else ORDERS[self.view][0]

    def read(self, place: AdminPlace, most: int) -> Shown:
        """Ask the page for at most `most` rows. Raises NoAnswer; blocks."""
        overview, view, search = _asked(place, "/overview", Overview), self.view, self.search
        if view == "partitions":
            partitions = _asked(place, "/partitions", PartitionsPage, search=search, limit=str(most)).partitions
            return Shown(view, overview, self._sorted(partitions), overview.partitions or 0)
        if view in ORDERS and overview.kind == "proxy":
            query = {"search": search, "limit": str(most), "order": self._ordered}
            if view == "clients":
                page = _asked(place, "/clients", ClientsPage, **query)
                return Shown(view, overview, page.clients, page.total)
            topics = _asked(place, "/topics", TopicsPage, **query)
            return Shown(view, overview, topics.topics, topics.total, "" if topics.is_counted else NOT_COUNTED)
        every: dict[str, Any] = {"brokers": overview.brokers, "lately": overview.events, "limits": overview.limits}
        known, wanted = Shown(view, overview, every.get(view) or [], 0), search.lower()
        found = [row for row, cells in zip(known.rows, known.cells, strict=True) if wanted in " ".join(cells).lower()]
        return Shown(view, overview, self._sorted(found)[:most], len(found))

    def _sorted(self, rows: Sequence[Any]) -> Sequence[Any]:
        if self.column is None:
            return rows
        value = VIEWS[self.view][self.column].value
        return sorted(rows, key=lambda row: value(row) or 0, reverse=True)

    def draw(self, shown: Shown, problem: str) -> Group:
        """Return the whole screen; `problem`: why it is not newer."""
        overview = shown.overview
        grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
        for place, column in enumerate(VIEWS[shown.view]):
            mark = " ▼" if place == self.column else ""
            least = 0 if column.is_number else max((len(cells[place]) for cells in shown.cells), default=0)
            side: Any = "right" if column.is_number else "left"
            grid.add_column(column.heading + mark, justify=side, no_wrap=True, min_width=min(least, MAX_KEPT))
        for row, cells in zip(shown.rows, shown.cells, strict=True):
            style = _STYLES.get(row.level if isinstance(row, Event) else "", "")
            grid.add_row(*(Text(cell, style=_STYLES.get(cell, style)) for cell in cells))
        tabs = [Text(f" {n} {name} ", "reverse" if name == shown.view else "") for n, name in enumerate(VIEWS, 1)]
        order = f", by {self._ordered}" if shown.view in ORDERS else ""
        found = f"{len(shown.rows):,} of {shown.total:,}{order}{f', with {self.search!r}' if self.search else ''}"
        keys = "1-6 view   s sort   / filter   Esc all   q quit" if self.typed is None else f"filter: {self.typed}_"
        return Group(
            Text(problem or overview.verdict.text, _STYLES["bad" if problem else overview.verdict.level]),
            Text(summary(overview), "dim"),
            Text(" ").join(tabs),
            grid,
            Text(found + (f"; {shown.hint}" if shown.hint else ""), "dim"),
            Text(keys, "dim" if self.typed is None else ""),
        )


def summary(overview: Overview) -> str:
    """Return a line with the counts and the rates."""
    rates, words = overview.rates, f"{overview.name}   {counted(overview.clients or 0, 'client')}   "
    words += counted(overview.partitions or 0, "partition")
    if rates is None:
        return words
    received, sent = in_bytes(rates.received_bytes), in_bytes(rates.sent_bytes)
    return f"{words}   {_some(rates.requests, '')} requests/s   {received}/s received   {sent}/s sent"


def _asked(place: AdminPlace, path: str, kind: type[_Struct], **query: str) -> _Struct:
    status, body = ask(place, path, query)
    if status in (400, 503):
        raise NoAnswer(f"the admin page {place} says: {body[:500].decode(errors='replace').strip()}.")
    if status != 200:
        raise not_ours(place, f"{path} has status {status}: it is an older kproxy, or another server")
    return decoded(place, (status, body), kind)


@click.command("top", epilog="Keys: 1 to 6 choose the view, s the order, / filters, Esc shows all, q ends.")
@admin_option("Ask the proxy, or the reference broker, with this admin page.")
@flag("--view", None, "What to show first.", type=click.Choice(list(VIEWS)), default="brokers")
@flag(
    "--order",
    None,
    "The order of clients (rate, oldest, slow) or of topics (rate, moves, errors, name).",
    type=click.Choice(list(dict.fromkeys([*CLIENT_ORDERS, *TOPIC_ORDERS]))),
    default="rate",
)
@flag("--search", "TEXT", "Only rows with this text.", default="", show_default=False)
@click.option("--once", is_flag=True, help="Print once, also on a terminal, and end.")
@click.pass_context
def command(
    context: click.Context, /, admin: Asked, view: str, order: str, search: str, *, once: bool, **access: Any
) -> int:
    """Show brokers, topics, partitions, clients, what changed lately, and limits, as they are now.

    It shows the views of the admin page, which names this command beside each. Without a terminal it prints once.

    \b
      kproxy top
      kproxy top --view topics
      kproxy top --view clients --order oldest
      kproxy top --admin https://proxy-0.example.org:9644 --admin-ca ca.pem
    """
    start_logging(context, "error")
    place, screen = admin_place(admin, access), Screen(view, order, search[:MAX_SEARCH])
    show = _print if once or not (sys.stdout.isatty() and sys.stdin.isatty()) else _follow
    return run_async(lambda: show(place, screen))


async def _print(place: AdminPlace, screen: Screen) -> int:
    shown = await asyncio.to_thread(screen.read, place, PRINTED_ROWS)
    said = [shown.overview.verdict.text, summary(shown.overview), *([shown.hint] if shown.hint else [])]
    click.echo("\n".join(f"# {each}" for each in said))
    echo_columns([column.heading for column in VIEWS[shown.view]], shown.cells)
    return 1 if shown.overview.verdict.level == "bad" else 0


async def _follow(place: AdminPlace, screen: Screen) -> int:
    """Redraw every second and after each key, until q or Ctrl-C."""
    console, keys = Console(), asyncio.Queue[str](64)
    shown, problem, due = None, "", 0.0
    with _raw_keys(keys), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            if time.monotonic() >= due:
                try:
                    shown = await asyncio.to_thread(screen.read, place, max(1, console.size.height - FRAME_LINES))
                    problem = ""
                except NoAnswer as no_answer:
                    if shown is None:
                        raise
                    problem = str(no_answer)
                due = time.monotonic() + EVERY_S
            if shown is not None:
                live.update(screen.draw(shown, problem), refresh=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - time.monotonic())):
                    if not screen.press(await keys.get()):
                        return 0
                    due = due if screen.typed is not None else 0.0


@contextlib.contextmanager
def _raw_keys(keys: asyncio.Queue[str]) -> Iterator[None]:
    """Put pressed keys into the queue; a full queue drops them."""
    import termios
    import tty

    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def read() -> None:
        for key in os.read(descriptor, 64).decode(errors="ignore"):
            with contextlib.suppress(asyncio.QueueFull):
                keys.put_nowait(key)

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
