"""The arguments of the fan-out's events, and its view of the process.

See kproxy.routing.fanout.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from kproxy.routing.merge import Exchange
from kproxy.routing.retry import Conduct
from kproxy.routing.split import Selection
from kproxy.routing.topology import Address, Topology


class View(Protocol):
    """State that decisions read, besides the events, as it is at the moment of an event."""

    @property
    def topology(self) -> Topology: ...

    @property
    def conduct(self) -> Conduct: ...

    @property
    def knows_batches_again(self) -> bool:
        """Whether brokers recognise a batch with a producer id that was appended before."""
        ...

    @property
    def gated(self) -> Collection[bytes]:
        """The topics with a writer group."""
        ...

    @property
    def fenced(self) -> bool:
        """Whether brokers keep writer fences, so that no batch of an earlier writer is appended behind them."""
        ...

    @property
    def has_claims(self) -> bool:
        """Whether the client has claimed anything."""
        ...

    @property
    def max_nameless(self) -> int:
        """How many topic ids without a name are remembered."""
        ...

    def write_fence(self, topic: bytes, partition_index: int) -> int:
        """Return the fence for the client's writes to a claimed partition; 0: it has no claim of it, or none now."""
        ...

    def is_hung(self, address: Address | None) -> bool:
        """Whether the broker at this address is known to hang."""
        ...


class Adopted(NamedTuple):
    """A request that leaves the plain path: `exchange` has its results so far, `parts` are unanswered."""

    exchange: Exchange
    routed_at: int
    parts: Sequence[tuple[int, Selection | None]]


class Loss(Enum):
    """How far a piece got whose connection has ended."""

    LEFT = "it expects no answer, and its last byte had left this process"
    WRITTEN = "the broker may have seen it"
    UNWRITTEN = "the broker has not seen it"
