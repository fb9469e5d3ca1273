"""`kproxy own`: show, claim and free resources by the Own API."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kproxy.cli import run_async, start_logging
from kproxy.cli.options import Asked, EtcdPlace, asked_place, asks_proxy_or_etcd, bootstrap_option
from kproxy.errors import StartupError

if TYPE_CHECKING:
    from kproxy.cli.own_sources import Change, Claims


@click.group(
    "own",
    epilog="Exit status: 0 done, 1 refused or not owned, 2 wrong usage or no answer, 3 severed.",
)
def command() -> None:
    """Show, take and free claims of the Own API.

    At any time at most one claimant in a group owns a resource, through whichever proxy. Only owners may write to a
    topic with a writer group (--writer-group).

    \b
      kproxy own list
      kproxy own claim writers orders/0
      kproxy own free writers orders/0
      kproxy own watch
    """


@command.command("list")
@click.option("--group", metavar="NAME", help="Only this group.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@asks_proxy_or_etcd
@click.pass_context
def list_command(context: click.Context, /, group: str | None, as_json: bool, **where: Any) -> int:
    """Show who owns what.

    Asks the proxy on this machine by default. Resources without an owner are not in the table.

    \b
      kproxy own list
      kproxy own list --group writers --json | jq '.claims[].resource'
      kproxy own list --etcd http://127.0.0.1:2379
    """
    from kproxy.cli.own_view import show

    async def show_once(claims: Claims) -> None:
        page = await claims.page(group)
        if as_json:
            click.echo(msgspec.json.format(msgspec.json.encode(page), indent=2).decode())
        else:
            show(page, group)

    claims = _claims(context, where)
    return run_async(lambda: show_once(claims))


@command.command("claim")
@click.argument("group")
@click.argument("resources", metavar="[RESOURCE[=GENERATION]]...", nargs=-1)
@click.option("--all", "whole", is_flag=True, help="Claim the whole group.")
@bootstrap_option("The proxy to claim at; of several the first that answers.")
@click.option("--client-id", metavar="NAME", default="kproxy-own", show_default=True, help="The name shown to others.")
@asks_proxy_or_etcd
@click.pass_context
def claim_command(
    context: click.Context,
    /,
    group: str,
    resources: tuple[str, ...],
    whole: bool,
    bootstrap: Asked,
    client_id: str,
    **where: Any,
) -> int:
    """Claim resources and hold them until Ctrl-C.

    A claim takes over a resource that is owned with the same or a lower generation, and severs the owner. Generation 0
    takes over in any case. The default is 1. Status 3: another claim or `kproxy own free` took the resource away, or
    the proxy ended. --admin or --etcd names the source that knows the owners of refused or lost resources.

    \b
      kproxy own claim writers orders/0
      kproxy own claim writers orders/0=2 orders/1=2
      kproxy own claim writers --all --bootstrap 127.0.0.1:9092
    """
    from kproxy.cli.own_claim import claim, parse_wanted

    wanted = parse_wanted(group, resources, whole)
    proxies = bootstrap.addresses()
    # Without a flag the admin page may belong to another proxy, which has other claims.
    may_ask = where["etcd"] is not None or where["admin"].rank >= bootstrap.rank
    known = _claims(context, where) if may_ask else None
    try:
        return run_async(lambda: claim(proxies, wanted, client_id, known))
    except KeyboardInterrupt:
        return 0


@command.command("free")
@click.argument("group")
@click.argument("resources", metavar="[RESOURCE]...", nargs=-1)
@click.option("--all", "whole", is_flag=True, help="Free every claim of the group.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@asks_proxy_or_etcd
@click.pass_context
def free_command(
    context: click.Context, /, group: str, resources: tuple[str, ...], whole: bool, as_json: bool, **where: Any
) -> int:
    """Free resources, and sever the connections that own them.

    All other resources of such a connection are freed as well. Its client may connect and claim again.

    \b
      kproxy own free writers orders/0
      kproxy own free writers --all
    """
    from kproxy.cli.own_view import show_freed
    from kproxy.observe.table import FreeOrder

    if whole == bool(resources):
        raise StartupError("name the RESOURCEs to free, or give --all for every claim of the group.")
    order = FreeOrder(group, None if whole else list(resources))
    claims = _claims(context, where)
    outcomes = []

    async def free_all() -> int:
        outcomes.append(await claims.free(order))
        while outcomes[-1].more:
            outcomes.append(await claims.free(order))
        return show_freed(order, outcomes, as_json)

    return run_async(free_all)


@command.command("watch")
@click.option("--group", metavar="NAME", help="Only this group.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, a line for each change.")
@asks_proxy_or_etcd
@click.pass_context
def watch_command(context: click.Context, /, group: str | None, as_json: bool, **where: Any) -> int:
    """Show who owns what, and then each change as it comes; Ctrl-C ends it.

    A proxy is asked once a second; --etcd uses a watch. Changes within one second appear as one.

    \b
      kproxy own watch
      kproxy own watch --group writers --etcd http://127.0.0.1:2379 --json
    """
    claims = _claims(context, where)
    try:
        return run_async(lambda: _follow(claims, group, as_json))
    except KeyboardInterrupt:
        return 0


def _claims(context: click.Context, where: Mapping[str, Any]) -> Claims:
    """Return the source that the flags name. Raises StartupError."""
    from kproxy.cli.own_sources import AdminClaims, EtcdClaims

    place = asked_place(**where)
    if not isinstance(place, EtcdPlace):
        return AdminClaims(place)
    start_logging(context, "error")
    return EtcdClaims(*place)


async def _follow(claims: Claims, group: str | None, as_json: bool) -> None:
    """Print a line for each change, until interrupted."""
    from kproxy.cli.own_view import show_change, show_first
    from kproxy.cli.table_sources import answers
    from kproxy.observe.table import ClaimsPage

    news: AsyncIterator[ClaimsPage | Change]
    async with aclosing(claims.follow(group)) as told:
        news = answers(told)
        async for each in news:
            if isinstance(each, ClaimsPage):
                show_first(each, as_json, group)
            else:
                show_change(each, as_json)
            sys.stdout.flush()
