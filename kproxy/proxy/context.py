"""What all client connections of one proxy share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from codec.framing import ReceiveArena
from kproxy.config import Limits
from kproxy.proxy.breaker import Breakers
from kproxy.routing.retry import LEASED, Conduct
from kproxy.routing.topology import Address, Topology


class OwnershipSource(Protocol):
    """Where the topology comes from."""

    def refresh(self, topic: bytes, partition_index: int, seen_revision: int) -> Awaitable[object]:
        """Read one partition's owner anew, after a broker refused a request routed at `seen_revision`; coalesced."""
        ...


@dataclass(frozen=True)
class Identity:
    """How clients see this proxy: one virtual broker."""

    node_id: int
    host: str
    port: int


@dataclass
class ProxyContext:
    """Shared by all sessions; on one event loop."""

    topology: Topology
    source: OwnershipSource
    identity: Identity
    limits: Limits
    clock: Callable[[], float]
    random: Random
    arena: ReceiveArena = field(default_factory=ReceiveArena)
    # What each broker said it serves, by (broker, address): API key -> (lowest, highest version).
    version_ranges: dict[tuple[int, Address], dict[int, tuple[int, int]]] = field(default_factory=dict)
    # Brokers that were asked and did not say: not asked again before this time of `clock`.
    silent_until: dict[tuple[int, Address], float] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    conduct: Conduct = LEASED
    breakers: Breakers = field(init=False)

    def __post_init__(self) -> None:
        self.breakers = Breakers(self.topology, self.limits, self.clock, self.arena, self.counters)
