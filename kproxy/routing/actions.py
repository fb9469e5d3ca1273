"""Define the interface of the fan-out (kproxy.routing.fanout): the arguments of its events, and the actions it returns.

The fan-out reads the rest of the process through `View`. The caller carries actions out completely and in order.
Within one event, Hold and NoteLost come before the Close of the connection, Note comes before the answer that it
belongs to, and the actions that end the client's connection come last.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import NamedTuple, Protocol, TypeAlias

from kproxy.routing.merge import Exchange, Partition
from kproxy.routing.retry import BrokerSemantics
from kproxy.routing.split import Entry, Selection
from kproxy.routing.topology import Address, Topology
from kproxy_codec.primitives import Buffer


class View(Protocol):
    """The state that decisions read besides the events, at the moment of an event."""

    @property
    def topology(self) -> Topology: ...

    @property
    def semantics(self) -> BrokerSemantics: ...

    @property
    def keeps_producer_state(self) -> bool:
        """Whether brokers recognise a batch with a producer id that was appended before."""
        ...

    @property
    def gated(self) -> Collection[bytes]:
        """The topics with a writer group."""
        ...

    @property
    def fenced(self) -> bool:
        """Whether brokers keep writer fences, so that no batch of an earlier writer is appended after them."""
        ...

    @property
    def has_claims(self) -> bool:
        """Whether the client has claimed anything."""
        ...

    @property
    def max_nameless(self) -> int:
        """The number of topic ids without a name that are remembered."""
        ...

    def write_fence(self, topic: bytes, partition_index: int) -> int:
        """Return the fence for the client's writes to a claimed partition; 0 if it has no claim now."""
        ...

    def is_reread(self, topic: bytes, partition_index: int) -> bool:
        """Whether a requested read of the partition's owner is still running."""
        ...

    def is_hung(self, address: Address | None) -> bool:
        """Whether the broker at this address is known to hang."""
        ...


class Adopted(NamedTuple):
    """A request that leaves the plain path: `exchange` has its results so far; `parts` are unanswered."""

    exchange: Exchange
    routed_at: int
    parts: Sequence[tuple[int, Selection | None]]


class Loss(Enum):
    """How far a piece had come when its connection ended."""

    LEFT = "it expects no answer, and its last byte had left this process"
    WRITTEN = "the broker may have seen it"
    UNWRITTEN = "the broker has not seen it"


Fenced: TypeAlias = tuple[Partition, int]
"""A partition and the fence for writes to it."""


class Send(NamedTuple):
    """Send a part of a request on a connection; dial it if it is new.

    `part` is None for the whole request. `piece` is the piece's number in later events. `shares` is the number of parts
    that the request is split into. `fences` are the partitions claimed by its client, each with the fence to bind on
    the connection before the part is written. `reader` is the connection's place among those for reads, 0 for the one
    for batches; a read's part waits for `least_bytes` of records.
    """

    connection: int
    broker: int
    piece: int
    exchange: Exchange
    part: Selection | None
    shares: int
    fences: Sequence[Fenced]
    reader: int
    least_bytes: int = 0


class Withdraw(NamedTuple):
    """Do not send these pieces, which wait for a dial."""

    connection: int
    pieces: frozenset[int]


class Respond(NamedTuple):
    """Answer a request. Without buffers its client gets no answer (acks=0), and the request is done."""

    sequence: int
    answer: list[Buffer]


class Drop(NamedTuple):
    """Do not answer a request: its client is gone."""

    sequence: int


class Note(NamedTuple):
    """Note in the audit trail that a broker acknowledged an entry; `result` is its part of the answer."""

    exchange: Exchange
    entry: Entry
    broker: int
    routed_at: int
    result: Buffer


class Proven(NamedTuple):
    """A read is passed on whole from this connection, and no other one waits or is in flight: the next may go there."""

    read: Exchange
    connection: int
    routed_at: int


class Hold(NamedTuple):
    """Hold these partitions until the piece is answered or lost: their writer is gone (claims.inflight_writes)."""

    piece: int
    partitions: list[Partition]


class LetGo(NamedTuple):
    """End the hold of a piece: it is answered or lost."""

    piece: int


class NoteLost(NamedTuple):
    """Note that batches of these partitions were written to a broker that can no longer answer."""

    partitions: list[Partition]


class Reread(NamedTuple):
    """Look up a partition's owner again; the partition was routed at this version of the topology."""

    topic: bytes
    partition_index: int
    routed_at: int


class WakeAt(NamedTuple):
    """Call the event `woken` at this time, in seconds of the clock of the events."""

    at: float


class Close(NamedTuple):
    """End a connection to a broker; `is_untrue` if the broker's own answer is the reason.

    Without a `reason` the broker has done nothing wrong: the connection is not needed.
    """

    connection: int
    reason: str
    is_untrue: bool = False


class Undeliverable(NamedTuple):
    """Report a lost acks=0 part, and end its client's connection."""

    topic: bytes
    error_code: int


class Unconfirmed(NamedTuple):
    """Report acks=0 batches that may or may not have been appended."""

    topic: bytes
    batches: int


class Retried(NamedTuple):
    """Count, for a broker, a partition that is sent again after this event (kproxy.routing.retry)."""

    event: int
    broker: int


class Failed(NamedTuple):
    """Count a partition that is answered with an error; `broker` is the last one that received it.

    `topic` is its name or id.
    """

    api_key: int
    error_code: int
    broker: int
    topic: bytes


class Counted(NamedTuple):
    """Add to a counter."""

    counter: str
    amount: int


Action: TypeAlias = (
    Send
    | Withdraw
    | Respond
    | Drop
    | Note
    | Proven
    | Hold
    | LetGo
    | NoteLost
    | Reread
    | WakeAt
    | Close
    | Undeliverable
    | Unconfirmed
    | Retried
    | Failed
    | Counted
)


class Actions:
    """The actions of the current event, in order."""

    __slots__ = ("_actions", "_last")

    def __init__(self) -> None:
        self._actions: list[Action] = []
        self._last: list[Action] | None = None

    def __len__(self) -> int:
        return len(self._actions) + len(self._last or ())

    def add(self, action: Action) -> None:
        """Append an action."""
        self._actions.append(action)

    def add_last(self, action: Action) -> None:
        """Append an action that ends the client's connection, after all others of the event."""
        if self._last is None:
            self._last = []
        self._last.append(action)

    def take(self) -> list[Action]:
        """Return all actions and end the event."""
        taken, self._actions = self._actions, []
        if self._last:
            taken += self._last
            self._last = None
        return taken
