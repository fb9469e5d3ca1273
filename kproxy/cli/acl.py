"""`kproxy acl`: test the access rules, and add, list and remove those in etcd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kproxy.cli import run_async
from kproxy.cli.options import EtcdPlace, entries_in_etcd, etcd_client, etcd_place, etcd_place_flags
from kproxy.config.etcd import etcd_options_from
from kproxy.config.parsing import check_prefix, split_list
from kproxy.errors import StartupError

if TYPE_CHECKING:
    from kproxy.config.access import AclSection
    from kproxy.security.acls import Acl

_OPERATIONS = ("read", "write", "describe", "create", "delete", "alter", "own", "admin")


@click.group("acl")
def command() -> None:
    """Test the rules of access, and change those in etcd.

    Rules are in [[acls]] of the configuration file, and in etcd for all proxies together (access.acls_in_etcd). Both
    apply: an operation is allowed if some rule allows it and no rule denies it.

    \b
      kproxy acl check --config kproxy.toml --principal User:alice --operation write --topic orders
      kproxy acl add --etcd http://127.0.0.1:2379 --principal User:alice --operation write --topic orders
      kproxy acl list --etcd http://127.0.0.1:2379
      kproxy acl remove --etcd http://127.0.0.1:2379 5b1de9a03c7f
    """


@command.command("check", epilog="Exit status: 0 allowed, 1 denied, 2 wrong usage or a file that cannot be used.")
@click.option("--config", metavar="FILE", type=click.Path(path_type=Path), help="The TOML file with [[acls]].")
@etcd_place_flags("The etcd with rules, which apply beside those of --config.")
@click.option("--principal", metavar="User:NAME", required=True, help="The principal.")
@click.option("--group", "groups", metavar="NAME", multiple=True, help="A group of the principal. May be repeated.")
@click.option("--operation", type=click.Choice(_OPERATIONS), required=True, help="The operation.")
@click.option("--topic", metavar="NAME", help="The topic.")
@click.option("--consumer-group", metavar="NAME", help="The consumer group, or the group of the Own API.")
@click.option("--transactional-id", metavar="NAME", help="The transactional id.")
@click.option("--cluster", is_flag=True, help="The cluster.")
def check(
    config: Path | None,
    etcd: str | None,
    prefix: str,
    principal: str,
    groups: tuple[str, ...],
    operation: str,
    topic: str | None,
    consumer_group: str | None,
    transactional_id: str | None,
    cluster: bool,
    **etcd_access: str | None,
) -> int:
    """Say whether a principal may do something, and which rules decide.

    \b
      kproxy acl check --config kproxy.toml --principal User:alice --operation write --topic orders
      kproxy acl check --config new.toml --principal User:bob --group team --operation read --consumer-group app
      kproxy acl check --etcd http://127.0.0.1:2379 --principal User:alice --operation write --topic orders
    """
    from kproxy.security.acls import CLUSTER_NAME, Operation, Resource, Rules, acls_of
    from kproxy.security.principals import USER, Principal

    if not principal.startswith(USER) or principal == USER:
        raise StartupError(f"invalid --principal {principal[:100]}; expected User:NAME.")
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
    rules = Rules(acls_of(_all_rules(config, etcd, prefix, etcd_access)))
    permissions = rules.of(Principal(principal.removeprefix(USER), frozenset(groups)))
    is_allowed = permissions.allows(Operation(operation), resource, name)
    click.echo("allowed" if is_allowed else "denied")
    reasons = permissions.reasons(Operation(operation), resource, name)
    for effect, acls in reasons.items():
        for acl in acls:
            click.echo(f"  {effect}: {_told(acl)}")
    if not any(reasons.values()) and not is_allowed:
        click.echo("  no rule allows it")
    return 0 if is_allowed else 1


def _all_rules(
    config: Path | None, etcd: str | None, prefix: str, etcd_access: Mapping[str, str | None]
) -> list[AclSection]:
    """Return the rules of the file and of etcd. Raises StartupError."""
    from kproxy.config.access import has_acls_in_etcd, read_acls

    place = etcd_place(etcd, check_prefix(prefix, "--prefix"), etcd_access)
    if config is None and place is None:
        raise StartupError("the place of the rules is missing: give --config FILE, --etcd URL or both.")
    sections = [] if config is None else list(read_acls(config))
    if place is not None:
        run_async(lambda: _collect(place, sections))
    elif config is not None and has_acls_in_etcd(config):
        click.echo("kproxy: the rules in etcd are not checked: give --etcd URL as well.", err=True)
    return sections


async def _collect(place: EtcdPlace, sections: list[AclSection]) -> None:
    rules, _ = await _read(place)
    sections.extend(rules.values())


def _told(acl: Acl) -> str:
    operations = ", ".join(sorted(operation.value for operation in acl.operations))
    return f"{acl.subject} {operations} on {acl.resource.value} {acl.name}{'*' if acl.is_prefix else ''}"


# Rules in etcd

_in_etcd = etcd_place_flags("The etcd with the rules.", required=True)


def _place(etcd: str, prefix: str, etcd_access: Mapping[str, str | None]) -> EtcdPlace:
    return EtcdPlace(split_list(etcd, "--etcd"), etcd_options_from(etcd_access), check_prefix(prefix, "--prefix"))


async def _read(place: EtcdPlace) -> tuple[dict[str, AclSection], int]:
    """Return the rules by id, and the number of entries that proxies ignore."""
    from kproxy.security.in_etcd import AccessKeys, check_acl_id, decode_acl

    return await entries_in_etcd(place, AccessKeys(place.prefix).acls, check_acl_id, decode_acl)


@command.command("add")
@_in_etcd
@click.option("--principal", metavar="User:NAME|Group:NAME", required=True, help="The principal; User:* is everybody.")
@click.option(
    "--operation",
    "operations",
    type=click.Choice(_OPERATIONS),
    required=True,
    multiple=True,
    help="An operation. May be repeated.",
)
@click.option("--topic", "topics", metavar="NAME", multiple=True, help="A topic; NAME* is a prefix. May be repeated.")
@click.option(
    "--consumer-group",
    "groups",
    metavar="NAME",
    multiple=True,
    help="A consumer group, or a group of the Own API; NAME* is a prefix. May be repeated.",
)
@click.option(
    "--transactional-id",
    "transactional_ids",
    metavar="NAME",
    multiple=True,
    help="A transactional id; NAME* is a prefix. May be repeated.",
)
@click.option("--cluster", is_flag=True, help="The cluster.")
@click.option("--deny", is_flag=True, help="Deny it, whatever other rules allow.")
@click.option("--id", "acl_id", metavar="ID", help="The rule's id; a rule that has it is replaced. [made of the rule]")
def add(
    etcd: str,
    prefix: str,
    principal: str,
    operations: Sequence[str],
    topics: Sequence[str],
    groups: Sequence[str],
    transactional_ids: Sequence[str],
    cluster: bool,
    deny: bool,
    acl_id: str | None,
    **etcd_access: str | None,
) -> int:
    """Add a rule in etcd, which counts at once on every proxy with access.acls_in_etcd.

    Prints its id. The same rule added again changes nothing.

    \b
      kproxy acl add --etcd http://127.0.0.1:2379 --principal User:alice --operation write --topic 'orders-*'
      kproxy acl add --etcd http://127.0.0.1:2379 --principal 'User:*' --operation admin --topic 'secret-*' --deny
    """
    from kproxy.config.access import parse_acl
    from kproxy.security.in_etcd import check_acl_id, make_acl_id

    place = _place(etcd, prefix, etcd_access)
    if not principal.startswith(("User:", "Group:")):
        raise StartupError(f"invalid --principal {principal[:100]}; expected User:NAME or Group:NAME.")
    resources = {"topics": topics, "groups": groups, "transactional_ids": transactional_ids}
    named = {key: list(names) for key, names in resources.items() if names}
    if not named and not cluster:
        raise StartupError("name a resource: --topic, --consumer-group, --transactional-id or --cluster.")
    given = {"principal": principal, "operations": list(dict.fromkeys(operations)), **named}
    rule = parse_acl({**given, "cluster": cluster, "effect": "deny" if deny else "allow"}, "the rule")
    try:
        chosen = make_acl_id(rule) if acl_id is None else check_acl_id(acl_id)
    except ValueError as error:
        raise StartupError(f"--id {str(acl_id)[:100]!r}: {error}.") from None
    return run_async(lambda: _put(place, chosen, rule, may_replace=acl_id is not None))


async def _put(place: EtcdPlace, acl_id: str, rule: AclSection, *, may_replace: bool) -> None:
    from kproxy.config.access import MOST_ACLS
    from kproxy.security.in_etcd import MOST_ACL_BYTES, AccessKeys, encode_acl

    keys, value = AccessKeys(place.prefix), encode_acl(rule)
    if len(value) > MOST_ACL_BYTES:
        raise StartupError(f"the rule has {len(value)} bytes; proxies accept at most {MOST_ACL_BYTES}: use prefixes.")
    key = keys.acl(acl_id)
    async with etcd_client(place) as client:
        found = await client.get(key)
        if found is not None and found.value == value:
            click.echo(f"{acl_id} is there already")
            return
        if found is not None and not may_replace:
            raise StartupError(f"{key} already has another rule: give the new rule another id with --id.")
        if found is None and len((await client.get_prefix(keys.acls)).kvs) >= MOST_ACLS:
            raise StartupError(f"{keys.acls} has {MOST_ACLS} rules, and no more are allowed: use prefixes and groups.")
        await client.put(key, value)
    click.echo(f"{'added' if found is None else 'changed'} {acl_id}")


@command.command("list")
@_in_etcd
def list_rules(etcd: str, prefix: str, **etcd_access: str | None) -> int:
    """List the rules in etcd: id, effect, and one line for each resource.

    Exit status 1 if etcd has an entry that proxies ignore, which is named on stderr.
    """
    return run_async(lambda: _list(_place(etcd, prefix, etcd_access)))


async def _list(place: EtcdPlace) -> int:
    from kproxy.security.acls import acls_of

    rules, ignored = await _read(place)
    for acl_id, rule in sorted(rules.items()):
        for acl in acls_of([rule]):
            click.echo(f"{acl_id}\t{rule.effect}\t{_told(acl)}")
    return 1 if ignored else 0


@command.command("remove")
@_in_etcd
@click.argument("acl_id", metavar="ID")
def remove(etcd: str, prefix: str, acl_id: str, **etcd_access: str | None) -> int:
    """Remove a rule in etcd, at once for open connections too."""
    return run_async(lambda: _delete(_place(etcd, prefix, etcd_access), acl_id))


async def _delete(place: EtcdPlace, acl_id: str) -> None:
    from kproxy.security.in_etcd import AccessKeys

    keys = AccessKeys(place.prefix)
    async with etcd_client(place) as client:
        if not await client.delete(keys.acl(acl_id)):
            raise StartupError(f"unknown rule {acl_id[:100]!r} in {keys.acls}: `kproxy acl list` shows all rules.")
    click.echo(f"removed {acl_id}")
