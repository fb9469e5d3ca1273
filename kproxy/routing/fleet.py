"""The proxies that clients are told of, and what each is said to be: leader, coordinator, controller.

Every proxy serves every partition and every group; whom clients are told of only spreads them. So a choice that is out
of date for a moment costs nothing but an uneven spread, and a proxy that is asked for what another one is said to lead
serves it all the same.

State: a tuple of proxies, replaced as a whole. One instance per process, changed by whoever watches the proxies and
read by everything else, on one event loop: what is read within one synchronous step is one view.

Invariants
1. There is always a proxy to name.
2. No two proxies have the same node id or the same address, and they stand in the order of their ids.
3. From the same proxies everybody chooses the same (`rendezvous`). When one leaves only its share moves, and when one
   comes only what it gets does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from kproxy.routing.rendezvous import preferred, preferred_by_index

# The first virtual node id, and that of a proxy that is alone; far above any real broker's.
FIRST_NODE_ID: Final = 1_000_000


class Proxy(NamedTuple):
    """One proxy as clients see it: a broker. `host` has no brackets, also where it is an IPv6 address."""

    node_id: int
    host: str
    port: int

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port


class Fleet:
    """The proxies of now."""

    def __init__(self, proxies: Iterable[Proxy]) -> None:
        self._by_id: dict[int, Proxy] = {}
        self.replace(proxies)

    @property
    def proxies(self) -> Sequence[Proxy]:
        """By node id, lowest first."""
        return tuple(self._by_id.values())

    def replace(self, proxies: Iterable[Proxy]) -> bool:
        """Name these from now on; whether that is a change. ValueError where invariants 1 or 2 do not hold."""
        ordered = sorted(proxies)
        by_id = {proxy.node_id: proxy for proxy in ordered}
        if not by_id:
            raise ValueError("a fleet without a proxy")
        if not len(ordered) == len(by_id) == len({proxy.address for proxy in ordered}):
            raise ValueError("two proxies of one id or one address")
        changed = by_id != self._by_id
        self._by_id = by_id
        return changed

    @property
    def controller(self) -> Proxy:
        """The one with the lowest id: it changes only when that one goes."""
        return next(iter(self._by_id.values()))

    def leaders(self, topic: bytes, partition_indexes: Sequence[int]) -> list[Proxy]:
        """Who is said to lead each of these partitions; `topic` is its name."""
        return [self._by_id[chosen] for chosen in preferred_by_index(topic, partition_indexes, self._by_id)]

    def coordinator(self, key_type: int, key: str) -> Proxy:
        """Who is said to coordinate a group or a transactional id; `key_type` as in FindCoordinator."""
        chosen = preferred(b"%d/%b" % (key_type, key.encode("utf-8", "surrogatepass")), self._by_id)
        return self._by_id[chosen] if chosen is not None else self.controller
