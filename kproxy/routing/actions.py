"""What the fan-out (kproxy.routing.fanout) has its shell do: values, carried out completely and in order.

The order within one event: what is held or noted as lost comes before the connection's end, what is noted of an answer
before the answer, and what ends the client's connection last.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from kproxy.routing.merge import Exchange
from kproxy.routing.split import Entry, Selection
from kproxy_codec.primitives import Buffer

Partition: TypeAlias = tuple[bytes, int]
"""Topic, as requests name it, and partition index."""


class Send(NamedTuple):
    """Send a part of a request, or all of it where `part` is None, on a connection; dial it where it is new.

    `piece` is what later events call it. `shares` is the number of parts that the request is cut into.
    """

    connection: int
    broker: int
    piece: int
    exchange: Exchange
    part: Selection | None
    shares: int


class Withdraw(NamedTuple):
    """Do not send these: they wait for a dial."""

    connection: int
    pieces: frozenset[int]


class Respond(NamedTuple):
    """Answer a request; with no buffers where its client gets no answer (acks=0) and it is done with."""

    sequence: int
    answer: list[Buffer]


class Drop(NamedTuple):
    """A request is not answered: its client is gone."""

    sequence: int


class Note(NamedTuple):
    """Note for the audit that a broker acknowledged an entry; `result` is its part of the answer."""

    exchange: Exchange
    entry: Entry
    broker: int
    routed_at: int
    result: Buffer


class Hold(NamedTuple):
    """Hold these partitions until the piece is answered or lost: their writer is gone (kproxy.claims.settlement)."""

    piece: int
    partitions: list[Partition]


class LetGo(NamedTuple):
    """The piece is answered or lost."""

    piece: int


class NoteLost(NamedTuple):
    """These were written to a broker whose answer cannot come any more."""

    partitions: list[Partition]


class Reread(NamedTuple):
    """Look a partition's owner up again; it was routed at this revision of the topology."""

    topic: bytes
    partition_index: int
    routed_at: int


class WakeAt(NamedTuple):
    """Bring the event `woken` at this time, in seconds of the clock that events carry."""

    at: float


class Close(NamedTuple):
    """End a connection to a broker; `is_untrue` where that is because of what the broker said."""

    connection: int
    reason: str
    is_untrue: bool = False


class Undeliverable(NamedTuple):
    """An acks=0 part is lost, and its client's connection is to end."""

    topic: bytes
    error_code: int


class Unconfirmed(NamedTuple):
    """Of so many acks=0 batches nobody knows whether they were appended."""

    topic: bytes
    batches: int


class Retried(NamedTuple):
    """Count a partition that is to be sent again after this event (kproxy.routing.retry) at a broker."""

    event: int
    broker: int


class Failed(NamedTuple):
    """Count a partition that is answered with an error; `broker` is where it was sent last."""

    api_key: int
    error_code: int
    broker: int


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
    """The actions of the event that is under way, in order."""

    def __init__(self) -> None:
        self._actions: list[Action] = []
        self._last: list[Action] = []

    def __len__(self) -> int:
        return len(self._actions) + len(self._last)

    def add(self, action: Action) -> None:
        """Behind those that are there."""
        self._actions.append(action)

    def add_last(self, action: Action) -> None:
        """Behind all others of the event: it ends the client's connection."""
        self._last.append(action)

    def take(self) -> list[Action]:
        """All of them; the event is over."""
        taken, self._actions = self._actions, []
        if self._last:
            taken += self._last
            self._last = []
        return taken
