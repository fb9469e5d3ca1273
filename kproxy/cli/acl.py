"""`kproxy acl`: the rules of access."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kproxy.errors import StartupError

if TYPE_CHECKING:
    from kproxy.security.acls import Acl

_OPERATIONS = ("read", "write", "describe", "create", "delete", "alter", "own", "admin")


@click.group("acl")
def command() -> None:
    """Try the rules of access ([[acls]]) before a proxy uses them.

    \b
      kproxy acl check --config kproxy.toml --principal User:alice --operation write --topic orders
    """


@command.command("check", epilog="Exit status: 0 allowed, 1 denied, 2 wrong usage or a file that cannot be used.")
@click.option(
    "--config", metavar="FILE", type=click.Path(path_type=Path), required=True, help="The TOML file with [[acls]]."
)
@click.option("--principal", metavar="User:NAME", required=True, help="Who asks.")
@click.option("--group", "groups", metavar="NAME", multiple=True, help="A group of the principal. May be repeated.")
@click.option("--operation", type=click.Choice(_OPERATIONS), required=True, help="The operation.")
@click.option("--topic", metavar="NAME", help="The topic.")
@click.option("--consumer-group", metavar="NAME", help="The consumer group, or the group of the Own API.")
@click.option("--transactional-id", metavar="NAME", help="The transactional id.")
@click.option("--cluster", is_flag=True, help="The cluster.")
def check(
    config: Path,
    principal: str,
    groups: tuple[str, ...],
    operation: str,
    topic: str | None,
    consumer_group: str | None,
    transactional_id: str | None,
    cluster: bool,
) -> int:
    """Say whether a principal may do something, and which rules decide.

    \b
      kproxy acl check --config kproxy.toml --principal User:alice --operation write --topic orders
      kproxy acl check --config new.toml --principal User:bob --group team --operation read --consumer-group app
    """
    from kproxy.config.access import read_acls
    from kproxy.security.acls import CLUSTER_NAME, Operation, Resource, Rules, acls_of
    from kproxy.security.principals import USER, Principal

    if not principal.startswith(USER) or principal == USER:
        raise StartupError(f"--principal {principal[:100]}: write it as User:NAME.")
    asked = {
        Resource.TOPIC: topic,
        Resource.GROUP: consumer_group,
        Resource.TRANSACTIONAL_ID: transactional_id,
        Resource.CLUSTER: CLUSTER_NAME if cluster else None,
    }
    named = [(resource, name) for resource, name in asked.items() if name is not None]
    if len(named) != 1:
        raise StartupError("name one resource: --topic, --consumer-group, --transactional-id or --cluster.")
    [(resource, name)] = named
    rules = Rules(acls_of(read_acls(config)))
    permissions = rules.of(Principal(principal.removeprefix(USER), frozenset(groups)))
    is_allowed = permissions.allows(Operation(operation), resource, name)
    click.echo("allowed" if is_allowed else "denied")
    for effect, acls in permissions.reasons(Operation(operation), resource, name).items():
        for acl in acls:
            click.echo(f"  {effect}: {_told(acl)}")
    return 0 if is_allowed else 1


def _told(acl: Acl) -> str:
    operations = ", ".join(sorted(operation.value for operation in acl.operations))
    return f"{acl.subject} {operations} on {acl.resource.value} {acl.name}{'*' if acl.is_prefix else ''}"
