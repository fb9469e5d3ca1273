"""What all client connections of one proxy share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from codec.framing import ReceiveArena
from kproxy.routing.topology import Address, Topology


class OwnershipSource(Protocol):
    """Where the topology comes from."""

    def refresh(self, topic: bytes, partition_index: int, seen_revision: int) -> Awaitable[object]:
        """Read one partition's owner anew, after a broker refused a request routed at `seen_revision`; coalesced."""
        ...


@dataclass(frozen=True)
class Limits:
    """Bounds of one listener: bytes, seconds, milliseconds, counts."""

    max_request_bytes: int = 100 << 20
    max_control_request_bytes: int = 1 << 20
    max_answer_bytes: int = 128 << 20
    max_connections: int = 10_000
    max_in_flight_bytes: int = 64 << 20
    max_open_requests: int = 1_000
    connect_timeout_s: float = 1.0
    control_timeout_s: float = 30.0
    control_attempt_s: float = 5.0
    deadline_cap_ms: int = 120_000
    drain_s: float = 10.0


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
    counters: Counter[str] = field(default_factory=Counter)
