"""`kproxy table`: show which broker owns which partition."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import click
import msgspec

from kproxy.cli import run_async, start_logging
from kproxy.cli.options import EtcdPlace, asked_place, asks_proxy_or_etcd
from kproxy.cli.table_sources import Unanswered, answers, tables_from_admin, tables_from_etcd
from kproxy.cli.table_view import LiveTable, describe_changes, show
from kproxy.observe.table import TablePage


@click.command("table")
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
        # The age of the table shows errors.
        start_logging(context, "error")
        tables = tables_from_etcd(*place, topic)
    else:
        tables = tables_from_admin(place, topic)
    if not watch:
        return run_async(lambda: _show_once(tables, as_json))
    try:
        return run_async(lambda: _follow(tables, as_json))
    except KeyboardInterrupt:
        return 0


async def _show_once(tables: AsyncGenerator[TablePage | Unanswered], as_json: bool) -> None:
    async with aclosing(tables):
        table = await anext(answers(tables))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(table), indent=2).decode())
    else:
        show(table)


async def _follow(tables: AsyncGenerator[TablePage | Unanswered], as_json: bool) -> None:
    """Show a live table on a terminal, else a line for each change, until interrupted."""
    async with aclosing(tables):
        if not as_json and sys.stdout.isatty():
            with LiveTable() as live:
                async for table in tables:
                    if isinstance(table, Unanswered):
                        live.problem(table.reason)
                    else:
                        live.update(table)
        else:
            await _follow_in_lines(tables, as_json)


async def _follow_in_lines(tables: AsyncGenerator[TablePage | Unanswered], as_json: bool) -> None:
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
    """The table without its age, which is no change."""
    return msgspec.structs.replace(table, age_s=None)
