"""Detect brokers that keep a client's requests waiting, and have them probed.

Requests are not timed: a request waits as long as its connection has the same next answer at each check. After
SUSPICIOUS_S its broker is probed (kproxy.proxy.broker_watch). The network may cut off one connection to a broker that
answers on others, so the path of each waiting connection is watched as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import inf
from types import MappingProxyType
from typing import Final

from kproxy.proxy.broker_connection import Oldest, Upstream
from kproxy.proxy.broker_watch import Brokers
from kproxy.routing.broker_health import SUSPICIOUS_S, is_cut_off


def _may_wait_until(upstream: Upstream) -> float:
    """The time until which the request itself lets its answer wait: a fetch that waits for data."""
    ticket = upstream.oldest_unanswered()
    return ticket.may_wait_until if ticket is not None else -inf


_NO_UPSTREAMS: Final = frozenset[Upstream]()
_NOTHING_SEEN: Final[Mapping[Upstream, tuple[Oldest, float]]] = MappingProxyType({})


class Waiting:
    """The waiting requests of one client connection's broker connections, as seen in checks at intervals."""

    __slots__ = ("_brokers", "_looked_at", "_seen", "_watched")

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        # The next answer of each connection, and the time since when it has been the next.
        self._seen = _NOTHING_SEEN
        self._looked_at = -inf
        # The connections that the kernel watches closely.
        self._watched = _NO_UPSTREAMS

    @property
    def watches(self) -> bool:
        """Whether the next check has something to undo."""
        return bool(self._watched)

    def unanswered(self, upstreams: Iterable[Upstream], now: float) -> Iterator[tuple[int, int, int, float]]:
        """For each connection with unanswered requests: its broker, their number and bytes, and for how long it waits.

        That is for how long its next answer has been the next, as of the last check, without the time that the request
        itself lets its answer wait.
        """
        for upstream in upstreams:
            count = upstream.unanswered_count
            if count:
                oldest, since = self._seen.get(upstream, (None, now))
                waits_s = now - max(since, _may_wait_until(upstream)) if oldest == upstream.oldest() else 0.0
                yield upstream.owner, count, upstream.unanswered_bytes, max(0.0, waits_s)

    def look(self, upstreams: Iterable[Upstream], now: float) -> None:
        """Suspect the brokers that let a request wait; report those that have answered since the last check."""
        seen: dict[Upstream, tuple[Oldest, float]] = {}
        waiting: dict[Upstream, float] = {}
        for upstream in upstreams:
            oldest = upstream.oldest()
            before, since = self._seen.get(upstream, (None, now))
            if oldest != before:
                since = now
                if before is not None and before.written and not upstream.closed:
                    self._brokers.heard(upstream.address, self._looked_at)
            if oldest is None:
                continue
            seen[upstream] = (oldest, since)
            waits_s = now - max(since, _may_wait_until(upstream))
            if waits_s >= SUSPICIOUS_S:
                self._brokers.at(upstream.owner, upstream.address).suspect()
                waiting[upstream] = waits_s
        self._seen = seen or _NOTHING_SEEN
        self._looked_at = now
        if waiting or self._watched:
            self._watch(waiting)

    def _watch(self, waiting: Mapping[Upstream, float]) -> None:
        """Watch the paths of waiting connections and no others; give up connections on which nothing gets through."""
        for upstream in waiting.keys() - self._watched:
            upstream.watch_path(closely=True)
        for upstream in self._watched - waiting.keys():
            upstream.watch_path(closely=False)
        self._watched = frozenset(waiting) if waiting else _NO_UPSTREAMS
        for upstream, waits_s in waiting.items():
            if self._is_cut_off(upstream, waits_s):
                upstream.cut()

    def _is_cut_off(self, upstream: Upstream, waits_s: float) -> bool:
        """Whether nothing gets through on a connection on which a request has waited for `waits_s`.

        The time allowed is a probe's timeout; probes use another connection, so they do not show the loss.
        """
        patience_s = self._brokers.limits.probe_timeout_s
        told = upstream.delivery() if waits_s >= patience_s else None
        return told is not None and is_cut_off(**told._asdict(), patience_s=patience_s)
