"""Decide which options of a new configuration a serving proxy takes and which need a restart, as pure functions.

`RELOADED` has the sections and keys that a reload applies (kproxy.proxy.reload). Some need a restart all the same:
listeners if more than values of TLS options changes, rules if access control starts or ends, owners of another source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from kproxy.config.access import ACLS
from kproxy.config.listeners import SECTION as LISTENERS
from kproxy.config.listeners import ListenerConfig
from kproxy.config.proxy import Given, ProxyConfig, Setting
from kproxy.config.quotas import QUOTAS
from kproxy.config.static_table import STATIC_TABLE_SECTIONS

_OWNERS: Final = (*STATIC_TABLE_SECTIONS, "ownership.table")
RELOADED: Final = frozenset({"limits", "log", "audit", "tls", LISTENERS, ACLS, QUOTAS, *_OWNERS})


def merge(started: ProxyConfig, now: ProxyConfig) -> tuple[Given, list[str]]:
    """Return the options as `started`, with those of `now` that a reload applies, and the keys that need a restart.

    Both are checked; the result is not.
    """
    if started.given is None or now.given is None:
        raise ValueError("both configurations must have been given")
    before, after, stay = started.given.settings, now.given.settings, set[str]()
    if _shape(started) != _shape(now):
        stay |= {LISTENERS, "tls"}
    if (started.access is None) is not (now.access is None):
        stay.add(ACLS)
    if started.ownership != now.ownership:
        stay.update(_OWNERS)
    paths = dict.fromkeys([*before, *after])
    taken = {path: after if not _of(path, stay) and _of(path, RELOADED) else before for path in paths}
    merged = {path: of[path] for path, of in taken.items() if path in of}
    return replace(now.given, settings=merged), differing(merged, after)


def differing(before: Mapping[str, Setting], after: Mapping[str, Setting]) -> list[str]:
    """Return the keys with different values."""
    paths = dict.fromkeys([*before, *after])
    return [path for path in paths if _value(before, path) != _value(after, path)]


def _value(settings: Mapping[str, Setting], path: str) -> object:
    return settings[path].value if path in settings else None


def _of(path: str, among: set[str] | frozenset[str]) -> bool:
    return path in among or path.partition(".")[0] in among


def _shape(config: ProxyConfig) -> list[tuple[ListenerConfig | None, bool]]:
    """Return the options of listeners that need a restart: all but the values of their TLS options."""
    listeners = config.listeners
    # The options of a listener without a name are keys of their own.
    return [(replace(each, tls=None) if each.name else None, each.tls is None) for each in listeners]
