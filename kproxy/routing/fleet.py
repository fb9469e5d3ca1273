"""Choose the proxy that clients are told is a leader, a coordinator or the controller.

Clients see the proxies of the fleet as virtual brokers. Every proxy serves every partition and every group; naming
different proxies only spreads the clients. So an outdated choice only makes the spread uneven for a moment: a proxy
also serves partitions whose named leader is another proxy.

State: the proxies, replaced as a whole. One instance per process, changed by the watch of the proxies and read by
everything else, on one event loop: a synchronous step reads one consistent view.

Invariants
1. There is always at least one proxy.
2. No two proxies have the same node id or the same address, and they are ordered by node id.
3. The same proxies give the same choice everywhere. When a proxy leaves, only its share of leaders and coordinators
   moves (`rendezvous`); when one comes, only the share that it gets moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from kproxy.routing.rendezvous import preferred, preferred_by_index

# The first virtual node id, used by a single proxy; far above the ids of real brokers.
FIRST_NODE_ID: Final = 1_000_000


class Proxy(NamedTuple):
    """One proxy as clients see it: a virtual broker. `host` has no brackets, even if it is an IPv6 address."""

    node_id: int
    host: str
    port: int

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port


class Fleet:
    """The current proxies."""

    def __init__(self, proxies: Iterable[Proxy]) -> None:
        self._by_id: dict[int, Proxy] = {}
        self.replace(proxies)

    @property
    def proxies(self) -> Sequence[Proxy]:
        """By node id, lowest first."""
        return tuple(self._by_id.values())

    def replace(self, proxies: Iterable[Proxy]) -> bool:
        """Replace the proxies; return whether they changed. Raises ValueError if invariant 1 or 2 would not hold."""
        ordered = sorted(proxies)
        by_id = {proxy.node_id: proxy for proxy in ordered}
        if not by_id:
            raise ValueError("a fleet needs at least one proxy")
        if not len(ordered) == len(by_id) == len({proxy.address for proxy in ordered}):
            raise ValueError("two proxies have the same id or address")
        changed = by_id != self._by_id
        self._by_id = by_id
        return changed

    @property
    def controller(self) -> Proxy:
        """The proxy with the lowest id. The choice changes when that proxy leaves, or one with a lower id comes."""
        return next(iter(self._by_id.values()))

    def leaders(self, topic: bytes, partition_indexes: Sequence[int]) -> list[Proxy]:
        """The proxy to name as leader of each of these partitions; `topic` is a name."""
        return [self._by_id[chosen] for chosen in preferred_by_index(topic, partition_indexes, self._by_id)]

    def coordinator(self, key_type: int, key: str) -> Proxy:
        """The proxy to name as coordinator of a group or a transactional id; `key_type` as in FindCoordinator."""
        chosen = preferred(b"%d/%b" % (key_type, key.encode("utf-8", "surrogatepass")), self._by_id)
        return self._by_id[chosen] if chosen is not None else self.controller
