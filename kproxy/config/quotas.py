"""Check the options of quotas, `[[quotas]]`, which only the file has. They are read again when the file changes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kproxy.config.parsing import parse_entry, read_toml
from kproxy.errors import StartupError

QUOTAS: Final = "quotas"
MOST_QUOTAS: Final = 1_000
_Rate = Annotated[float, Meta(gt=0, le=1e15)]
_Name = Annotated[str, Meta(min_length=1, max_length=1_000)]


class QuotaSection(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One of `[[quotas]]`: limits that apply separately to each principal that it matches.

    Rates are per second; `connections` is the number of a principal's connections at a time.
    """

    principal: Annotated[str, Meta(pattern="^User:.", max_length=1_000)] = "User:*"
    client_id: _Name | None = None
    produce_bytes_per_s: _Rate | None = None
    fetch_bytes_per_s: _Rate | None = None
    requests_per_s: _Rate | None = None
    connections: Annotated[int, Meta(ge=1)] | None = None

    @property
    def has_rates(self) -> bool:
        return any((self.produce_bytes_per_s, self.fetch_bytes_per_s, self.requests_per_s))


_TAKES: Final = {
    "principal": "User:NAME, or leave it out for everybody",
    "client_id": "a client id, or leave it out for all",
    **dict.fromkeys(
        ("produce_bytes_per_s", "fetch_bytes_per_s", "requests_per_s"), "a number above 0, or leave it out for no limit"
    ),
    "connections": "a whole number of at least 1, or leave it out for no limit",
}


@dataclass(frozen=True)
class QuotaOptions:
    """The quotas are in `file`. This process has `share`, a part of 1, of each rate at first."""

    file: Path
    share: float = 1.0


def parse_quotas(given: object, where: str) -> tuple[QuotaSection, ...]:
    """Check `[[quotas]]`. Raises StartupError."""
    if not isinstance(given, list) or len(given) > MOST_QUOTAS:
        raise StartupError(f"invalid quotas in {where}; expected at most {MOST_QUOTAS} tables, each a [[quotas]].")
    quotas = tuple(_parse(number, each, where) for number, each in enumerate(given, 1))
    limits: dict[tuple[str, str | None, str], int] = {}
    for number, quota in enumerate(quotas, 1):
        # The rates of a client come from one quota; connections may have a quota of their own.
        kinds = {"rates": quota.has_rates, "connections": quota.connections is not None}
        for kind in (kind for kind, is_set in kinds.items() if is_set):
            first = limits.setdefault((quota.principal, quota.client_id, kind), number)
            if first != number:
                raise StartupError(
                    f"entry {number} of [[quotas]] in {where} limits {kind} of the same clients as entry {first}, and "
                    "only one of the two would apply: put their limits into one entry."
                )
    return quotas


def _parse(number: int, given: object, where: str) -> QuotaSection:
    named = f"entry {number} of [[quotas]] in {where}"
    quota = parse_entry(QuotaSection, given, named, _TAKES)
    if not (quota.has_rates or quota.connections):
        raise StartupError(f"{named} limits nothing: give a rate, or connections.")
    if quota.connections is not None and quota.client_id is not None:
        raise StartupError(f"{named}: connections are limited by principal: leave client_id out.")
    return quota


def read_quotas(file: Path) -> tuple[QuotaSection, ...]:
    """Read only the quotas of a configuration file. Raises StartupError."""
    return parse_quotas(read_toml(file).get(QUOTAS, []), str(file))
