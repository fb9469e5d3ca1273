"""Check the options of authorisation: `[access]`, and the rules, `[[acls]]`.

Rules are in the configuration file, and are read again when it changes. With `access.acls_in_etcd` they are also in
etcd (kproxy.security.in_etcd). The environment and flags have no rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import Meta

from kproxy.config.parsing import parse_entry, read_toml
from kproxy.errors import StartupError

ACLS: Final = "acls"
MOST_ACLS: Final = 10_000
_Names = Annotated[list[Annotated[str, Meta(min_length=1, max_length=1_000)]], Meta(min_length=1)]
_Operation = Literal["read", "write", "describe", "create", "delete", "alter", "own", "admin"]


class AclSection(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One of `[[acls]]`: the operations that a principal may do with these resources, or may not.

    A name is literal; with a `*` at its end it is a prefix, and `*` alone is every name.
    """

    principal: Annotated[str, Meta(pattern="^(User|Group):.", max_length=1_000)]
    operations: Annotated[list[_Operation], Meta(min_length=1)]
    effect: Literal["allow", "deny"] = "allow"
    topics: _Names | None = None
    groups: _Names | None = None
    transactional_ids: _Names | None = None
    cluster: bool = False


_TAKES: Final = {
    "principal": "User:NAME, User:* for everybody, or Group:NAME",
    "operations": f"a list of {', '.join(get_args(_Operation))}",
    "effect": "allow or deny",
    **dict.fromkeys(("topics", "groups", "transactional_ids"), "a list of names, each of which may end with *"),
    "cluster": "true or false",
}


class AccessSection(msgspec.Struct, kw_only=True):
    """The section `[access]`. `events` is the file of kproxy.security.events, which is written even without rules."""

    dry_run: bool = False
    acls_in_etcd: bool = False
    events: str | None = None


@dataclass(frozen=True)
class AccessOptions:
    """The checked options of `[access]` and `[[acls]]`. `file` has the rules, if any, and is read again."""

    dry_run: bool = False
    acls: tuple[AclSection, ...] = ()
    file: Path | None = field(default=None, compare=False)
    acls_in_etcd: bool = False


def parse_acls(given: object, where: str) -> tuple[AclSection, ...]:
    """Check `[[acls]]`. Raises StartupError."""
    if not isinstance(given, list):
        raise StartupError(f"invalid acls in {where}; expected tables, each written as [[acls]].")
    if len(given) > MOST_ACLS:
        raise StartupError(f"{where} has {len(given)} acls; at most {MOST_ACLS} are allowed: use prefixes and groups.")
    return tuple(parse_acl(each, f"entry {number} of [[acls]] in {where}") for number, each in enumerate(given, 1))


def parse_acl(given: object, named: str) -> AclSection:
    """Check one rule, which errors call `named`. Raises StartupError."""
    acl = parse_entry(AclSection, given, named, _TAKES)
    if not (acl.topics or acl.groups or acl.transactional_ids or acl.cluster):
        raise StartupError(f"{named} names no resource: give topics, groups, transactional_ids or cluster = true.")
    return acl


def read_acls(file: Path) -> tuple[AclSection, ...]:
    """Read only the rules of a configuration file. Raises StartupError."""
    content: Mapping[str, Any] = read_toml(file)
    return parse_acls(content.get(ACLS, []), str(file))


def has_acls_in_etcd(file: Path) -> bool:
    """Whether a configuration file sets `acls_in_etcd`. Raises StartupError."""
    access = read_toml(file).get("access")
    return isinstance(access, dict) and access.get("acls_in_etcd") is True


def shown(entries: Sequence[msgspec.Struct]) -> list[dict[str, object]]:
    """Return rules or quotas as they were given, for people and programs."""
    return [
        {key: value for key, value in msgspec.structs.asdict(entry).items() if value not in (None, False)}
        for entry in entries
    ]
