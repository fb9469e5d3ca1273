"""Keep a proxy's list of all proxies (`Fleet`) current with the proxies registered in etcd.

Their keys are under `{prefix}/kproxy/proxies/`.

This proxy finds its own entry by its advertised address, so processes that share one address (workers) find their id
without asking each other.

States: ALONE, before the first snapshot, and CURRENT. While etcd is away the last known fleet stays.

Invariants
1. This proxy does not drop itself, whatever etcd says: its lease may have ended because etcd was away, and it still
   serves. It keeps its last id, unless another proxy now has that id; then it is left out until it has a new one. Only
   a leaving proxy drops itself, if there is another.
2. A proxy that never had an id names the others or, if there are none, itself as `FIRST_NODE_ID`.
3. An address is named once, under the lowest of its ids; at most MAX_PROXIES are named, those of the lowest ids.
4. An invalid key or value is skipped, counted by reason, and logged once per key.
5. Changes of the other proxies are logged, those of this proxy are not.
6. The fleet of a named listener has the proxies that have a listener of that name, under the same ids and with the
   addresses of those listeners. This proxy is one of them while `fleet` names it, or if there is no other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import structlog

from kproxy.address import Address
from kproxy.etcd import EtcdClient, KeyValue, PrefixMirror, Snapshot, WatchEvent
from kproxy.fleet.registration import NO_LISTENERS, Listeners, parse_listeners, parse_proxy, proxies_prefix
from kproxy.ownership.lease_keys import InvalidEntry, SkippedKeys
from kproxy.routing.fleet import FIRST_NODE_ID, Fleet, Proxy

MAX_PROXIES = 1_000
MAX_LOGGED_KEYS = 100
# The most proxies in one log line.
MAX_LOGGED_PROXIES = 10

log = structlog.get_logger(__name__)


def alone(host: str, port: int) -> Proxy:
    """Return this proxy as the only member, while it knows no other."""
    return Proxy(FIRST_NODE_ID, host, port)


class FleetView:
    """Feeds `fleet` from etcd. `run` is one coroutine that the caller owns.

    `listeners` are the advertised addresses of this proxy's named listeners; `by_listener` the fleets that their
    clients see. `prefix` is that of all keys, `host` and `port` are advertised by this proxy.
    Skipped entries are counted in `counters` as `fleet.skipped.{reason}`.
    """

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        fleet: Fleet,
        host: str,
        port: int,
        *,
        counters: Counter[str] | None = None,
        listeners: Listeners = NO_LISTENERS,
        by_listener: Mapping[str, Fleet] = MappingProxyType({}),
    ) -> None:
        counts = Counter[str]() if counters is None else counters
        self._skipped = SkippedKeys(
            "proxy key ignored", counts, counted_as="fleet.skipped.", most_logged=MAX_LOGGED_KEYS
        )
        self._fleet = fleet
        self._alone = alone(host, port)
        self._prefix = proxies_prefix(prefix)
        self._mirror = PrefixMirror(client, [self._prefix], self)
        self._found: dict[str, Proxy] = {}
        self._listeners = listeners
        self._by_listener = by_listener
        # The named listeners of entries, by key, if an entry has any.
        self._found_listeners: dict[str, Listeners] = {}
        self._mine: Proxy | None = None
        self._leaving = False
        self._named = asyncio.Event()

    async def run(self) -> None:
        """Keep the fleet current until cancelled."""
        await self._mirror.run()

    async def wait_synced(self) -> None:
        """Wait until the proxies have been read once."""
        await self._mirror.wait_synced()

    async def wait_named(self) -> None:
        """Wait until etcd names this proxy for the first time."""
        await self._named.wait()

    def leave(self) -> None:
        """Name only the others once etcd does not name this proxy any more."""
        self._leaving = True
        self._tell()

    # Calls of the mirror

    def on_restored(self) -> None:
        """Do nothing: the snapshot that follows has everything."""

    def on_snapshot(self, snapshot: Snapshot) -> None:
        self._found.clear()
        self._found_listeners.clear()
        for kv in snapshot.kvs:
            self._take(kv)
        self._tell()

    def on_events(self, events: list[WatchEvent], revision: int) -> None:
        for event in events:
            self._found.pop(event.kv.key, None)
            self._found_listeners.pop(event.kv.key, None)
            if not event.deleted:
                self._take(event.kv)
        self._tell()

    def _take(self, kv: KeyValue) -> None:
        try:
            proxy = parse_proxy(kv.key.removeprefix(self._prefix), kv.value)
            if self._by_listener:
                self._found_listeners[kv.key] = parse_listeners(kv.value)
            self._found[kv.key] = proxy
        except InvalidEntry as reason:
            self._skipped.skip(kv, reason)

    def _tell(self) -> None:
        named = distinct(self._found.values())
        mine = next((proxy for proxy in named if proxy.address == self._alone.address), None)
        if mine is not None:
            self._mine = mine
            self._named.set()
        elif self._mine is not None and not self._leaving and all(each.node_id != self._mine.node_id for each in named):
            named.append(self._mine)
        before = set(self._others())
        self._fleet.replace(named or [self._mine or self._alone])
        if self._by_listener:
            self._tell_listeners()
        now = set(self._others())
        changes = {"come": _in_words(now - before), "gone": _in_words(before - now)}
        if now != before:
            log.info("proxies changed", others=len(now), **{what: who for what, who in changes.items() if who})

    def _tell_listeners(self) -> None:
        """Replace the fleets of the named listeners (invariant 6)."""
        addresses = {self._found[key].node_id: listeners for key, listeners in self._found_listeners.items()}
        own_id = next((each.node_id for each in self._fleet.proxies if each.address == self._alone.address), None)
        if own_id is not None:
            addresses[own_id] = self._listeners
        for name, fleet in self._by_listener.items():
            ids = {each.node_id for each in self._fleet.proxies}
            named = distinct(
                Proxy(node_id, *each[name]) for node_id, each in addresses.items() if node_id in ids and name in each
            )
            fleet.replace(named or [Proxy(self._alone.node_id, *self._listeners[name])])

    def _others(self) -> Iterable[Proxy]:
        """Return all proxies but this one, whose entry the registrar reports."""
        return (proxy for proxy in self._fleet.proxies if proxy.address != self._alone.address)


def _in_words(proxies: Iterable[Proxy]) -> str:
    ordered = sorted(proxies)
    words = [f"{proxy.node_id} at {Address(*proxy.address)}" for proxy in ordered[:MAX_LOGGED_PROXIES]]
    more = len(ordered) - len(words)
    return ", ".join(words) + (f" and {more} more" if more else "")


async def named_in(client: EtcdClient, prefix: str) -> list[Proxy]:
    """Return the proxies under this prefix as clients see them, read once.

    Raises EtcdError.
    """
    proxies = []
    for kv in (await client.get_prefix(proxies_prefix(prefix))).kvs:
        with contextlib.suppress(InvalidEntry):
            proxies.append(parse_proxy(kv.key.removeprefix(proxies_prefix(prefix)), kv.value))
    return distinct(proxies)


def distinct(proxies: Iterable[Proxy]) -> list[Proxy]:
    """Return one proxy per address (invariant 3)."""
    by_address: dict[tuple[str, int], Proxy] = {}
    for proxy in sorted(proxies):
        by_address.setdefault(proxy.address, proxy)
    return list(by_address.values())[:MAX_PROXIES]
