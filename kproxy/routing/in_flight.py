"""What of one client connection brokers have not answered, by connection and by partition.

A connection to a broker is a number, never used again. What is sent on it is a piece: a part of a request, with a
number of its own.

States of a connection
  dialling   what is sent on it waits here, and can be withdrawn
  open       what is sent on it is written: its broker may see it
  closed     nothing is sent on it any more; its pieces are about to be lost

Transitions
  dialling -> open     `opened`
  dialling, open -> closed     `closed`

Invariants
1. A broker has at most one connection that is not closed.
2. `of` names exactly the sequences with a piece under way for a partition, as the partition is called now.
3. Of each connection at most MAX_PARTITIONS partitions are known by name for each WINDOW_S (`Unconfirmed`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from enum import IntEnum, auto
from itertools import count
from typing import Final

from kproxy.routing.identity import lane_key
from kproxy.routing.merge import Exchange
from kproxy.routing.split import Entry, Selection

# acks=0 batches are in doubt that left in this time before a connection's end, or up to twice as long, in seconds.
WINDOW_S: Final = 1.0
MAX_PARTITIONS: Final = 4096


class ConnectionState(IntEnum):
    """See the module's text."""

    DIALLING = auto()
    OPEN = auto()
    CLOSED = auto()


_NEXT: Final[Mapping[ConnectionState, Sequence[ConnectionState]]] = {
    ConnectionState.DIALLING: (ConnectionState.OPEN, ConnectionState.CLOSED),
    ConnectionState.OPEN: (ConnectionState.CLOSED,),
    ConnectionState.CLOSED: (),
}


class BrokerConnection:
    """One connection to `broker`."""

    __slots__ = ("broker", "number", "pieces", "state", "unconfirmed")

    def __init__(self, number: int, broker: int) -> None:
        self.number = number
        self.broker = broker
        self.state = ConnectionState.DIALLING
        self.pieces: dict[int, Piece] = {}
        self.unconfirmed: Unconfirmed | None = None

    def move(self, state: ConnectionState) -> None:
        """Raises ValueError where there is no such transition."""
        if state not in _NEXT[self.state]:
            raise ValueError(
                f"connection {self.number} cannot go from {self.state.name.lower()} to {state.name.lower()}"
            )
        self.state = state


class Piece:
    """What one broker is asked on behalf of an exchange; all of it where `part` is None.

    `routed_at` is the topology's revision when it was sent, `keys` are the lanes in which it is counted.
    `is_held`: its writer is gone, and it is waited for.
    """

    __slots__ = ("connection", "exchange", "is_held", "keys", "number", "part", "routed_at")

    def __init__(
        self, number: int, exchange: Exchange, connection: BrokerConnection, part: Selection | None, routed_at: int
    ) -> None:
        self.number = number
        self.exchange = exchange
        self.connection = connection
        self.part = part
        self.routed_at = routed_at
        self.keys: Sequence[Hashable] = ()
        self.is_held = False

    @property
    def selection(self) -> Selection:
        """The entries asked for."""
        return self.exchange.selection(self.part)

    def entries(self) -> Iterable[Entry]:
        return entries_of(self.selection)


def entries_of(selection: Selection) -> Iterable[Entry]:
    for topic_place, ordinals in selection:
        for ordinal in ordinals:
            yield topic_place, ordinal


class InFlight:
    """The connections and pieces of one client connection, but for those of the plain path."""

    def __init__(self) -> None:
        self.connections: dict[int, BrokerConnection] = {}
        self.pieces: dict[int, Piece] = {}
        self._by_broker: dict[int, BrokerConnection] = {}
        self._connection_numbers = count(1)
        self._piece_numbers = count(1)
        # Made when it is first asked for, which is seldom, and kept until nobody needs it.
        self._sequences: dict[Hashable, set[int]] | None = None

    # Connections

    def connection_to(self, broker: int) -> BrokerConnection:
        """The one that leads to a broker, or a new one."""
        connection = self._by_broker.get(broker)
        if connection is None:
            connection = BrokerConnection(next(self._connection_numbers), broker)
            self.connections[connection.number] = self._by_broker[broker] = connection
        return connection

    def opened(self, number: int) -> None:
        """The dial has succeeded."""
        connection = self.connections[number]
        if connection.state is ConnectionState.DIALLING:
            connection.move(ConnectionState.OPEN)

    def closed(self, connection: BrokerConnection) -> None:
        """Nothing more is to be sent on it; no change where that is so already."""
        if connection.state is not ConnectionState.CLOSED:
            connection.move(ConnectionState.CLOSED)
            del self._by_broker[connection.broker]

    # Pieces

    def add(self, exchange: Exchange, connection: BrokerConnection, part: Selection | None, routed_at: int) -> Piece:
        """A piece is sent, or waits for its dial."""
        piece = Piece(next(self._piece_numbers), exchange, connection, part, routed_at)
        self.pieces[piece.number] = connection.pieces[piece.number] = piece
        if self._sequences is not None and exchange.is_ordered:
            self._count(piece, self._sequences)
        return piece

    def _count(self, piece: Piece, counted: dict[Hashable, set[int]]) -> None:
        exchange = piece.exchange
        piece.keys = [lane_key(exchange, entry) for entry in piece.entries()]
        for key in piece.keys:
            sequences = counted.get(key)
            if sequences is None:
                counted[key] = {exchange.sequence}
            else:
                sequences.add(exchange.sequence)

    def remove(self, piece: Piece) -> None:
        """A piece is answered, lost or withdrawn."""
        del self.pieces[piece.number], piece.connection.pieces[piece.number]
        exchange = piece.exchange
        if self._sequences is None or not exchange.is_ordered:
            return
        for key in piece.keys:
            sequences = self._sequences[key]
            sequences.discard(exchange.sequence)
            if not sequences:
                del self._sequences[key]

    def of(self, key: Hashable) -> Collection[int]:
        """The sequences that are unanswered in a lane."""
        if self._sequences is None:
            self._sequences = {}
            for piece in self.ordered():
                self._count(piece, self._sequences)
        return self._sequences.get(key, ())

    def forget(self) -> None:
        """Nobody asks `of` at the moment, or partitions are called something else now."""
        self._sequences = None

    def ordered(self) -> list[Piece]:
        """The pieces whose order matters."""
        return [piece for piece in self.pieces.values() if piece.exchange.is_ordered]

    def withdraw(self, is_meant: Callable[[Piece], bool]) -> list[Piece]:
        """Remove pieces that no broker has seen."""
        withdrawn = [
            piece
            for connection in self.connections.values()
            if connection.state is ConnectionState.DIALLING
            for piece in connection.pieces.values()
            if is_meant(piece)
        ]
        for piece in withdrawn:
            self.remove(piece)
        return withdrawn


Batches = dict[tuple[bytes, int], tuple[int, int]]
"""By topic and partition index: how many batches, and the topology's revision that the last of them was sent at."""


class Unconfirmed:
    """What was sent on one connection with acks=0 in the last moments: since `since`, and in the window before.

    Nobody says whether such a batch was appended. A broker that refuses one closes the connection, as Apache Kafka
    does; one that is killed or cut off does so as well. Bytes that left this process shortly before may have arrived or
    not. Brokers close within milliseconds, so bytes that left long before are not in doubt.
    """

    __slots__ = ("_before", "_now", "_since")

    def __init__(self, since: float) -> None:
        self._since = since
        self._now: Batches = {}
        self._before: Batches = {}

    def _advance(self, now: float) -> None:
        """Begin a new window where this one is over."""
        elapsed = now - self._since
        if elapsed >= WINDOW_S:
            self._before = self._now if elapsed < 2 * WINDOW_S else {}
            self._now = {}
            self._since = now

    def note(self, partition: tuple[bytes, int], routed_at: int, now: float) -> None:
        """A batch has left this process."""
        self._advance(now)
        known = self._now.get(partition)
        if known is not None or len(self._now) < MAX_PARTITIONS:
            self._now[partition] = (_batches(known) + 1, routed_at)

    def take(self, now: float) -> Batches:
        """What is in doubt now that the connection has ended."""
        self._advance(now)
        doubted = dict(self._before)
        for partition, (batches, routed_at) in self._now.items():
            doubted[partition] = (_batches(doubted.get(partition)) + batches, routed_at)
        return doubted


def _batches(known: tuple[int, int] | None) -> int:
    return known[0] if known is not None else 0
