"""Keep the unanswered pieces of one client connection, by broker connection and by partition.

A piece is a part of a request that is sent on one connection to a broker; it has a number of its own. A connection to a
broker has a number that is never reused.

States of a connection
  dialling   pieces wait here and can be withdrawn
  open       pieces are written: their broker may see them
  closed     nothing more is sent on it; its pieces are about to be lost

Transitions
  dialling -> open     `opened`
  dialling, open -> closed     `closed`

A broker answers a connection in order, and lets a read wait for data. So reads have other connections than batches
(kproxy.routing.reads). ListOffsets goes on one of the read connections that is free, else on that of batches.

Invariants
1. Of the connections to a broker that are not closed at most one has batches, and at most READERS have reads.
2. `of` has exactly the ordered requests (`is_ordered`) with a piece in flight for a partition, by its current name.
3. A connection's `open_count` is the number of its pieces; `reading` is the one that is a read, one at a time.
4. At most MAX_PARTITIONS partitions of a connection are remembered for each WINDOW_S (`RecentBatches`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import IntEnum, auto
from typing import Final, TypeAlias

from kproxy.routing.actions import Actions, Close, Withdraw
from kproxy.routing.identity import LaneKey, lane_key
from kproxy.routing.merge import Exchange, Partition
from kproxy.routing.split import Entry, Selection, entries_of

# acks=0 batches sent within this time before a connection's end, or up to twice as long, are in doubt; in seconds.
WINDOW_S: Final = 1.0
MAX_PARTITIONS: Final = 4096
# Connections for reads to one broker: while a read waits on one, what has been asked for since goes on the other.
READERS: Final = 2

Batches: TypeAlias = dict[Partition, tuple[int, int]]
"""By topic and partition index: the number of batches, and the topology's version that the last one was sent at."""


class ConnectionState(IntEnum):
    """See the module's docstring."""

    DIALLING = auto()
    OPEN = auto()
    CLOSED = auto()


_NEXT: Final[Mapping[ConnectionState, Sequence[ConnectionState]]] = {
    ConnectionState.DIALLING: (ConnectionState.OPEN, ConnectionState.CLOSED),
    ConnectionState.OPEN: (ConnectionState.CLOSED,),
    ConnectionState.CLOSED: (),
}


class BrokerConnection:
    """One connection to `broker`; `reader` is its place among those for reads, from 1 on, or 0 for batches."""

    __slots__ = ("_unconfirmed", "broker", "number", "open_count", "reader", "reading", "state")

    def __init__(self, number: int, broker: int, reader: int) -> None:
        self.number = number
        self.broker = broker
        self.reader = reader
        self.state = ConnectionState.DIALLING
        self.open_count = 0
        self.reading: Piece | None = None
        self._unconfirmed: RecentBatches | None = None

    def move(self, state: ConnectionState) -> None:
        """Change the state. Raises ValueError if there is no such transition."""
        if state not in _NEXT[self.state]:
            raise ValueError(
                f"connection {self.number} cannot go from {self.state.name.lower()} to {state.name.lower()}"
            )
        self.state = state

    def note_unconfirmed(self, partition: Partition, routed_at: int, now: float) -> None:
        """Note an acks=0 batch that has left this process."""
        if self._unconfirmed is None:
            self._unconfirmed = RecentBatches(now)
        self._unconfirmed.note(partition, routed_at, now)

    def take_unconfirmed(self, now: float) -> Batches:
        """Return the acks=0 batches in doubt, now that the connection has ended."""
        return self._unconfirmed.take(now) if self._unconfirmed is not None else {}


class Piece:
    """A part of an exchange that is sent to one broker.

    `part` is None for the whole exchange. `routed_at` is the topology's version when it was sent, `keys` are the lanes
    in which it is counted. `is_held`: its writer is gone, and its partitions are held until it is answered or lost.
    `due` is when a read's wait ends; `targets` are the entries of the client's present read that it asks for, by its
    own entries, if it is a part of an earlier one. It waits for `least_bytes` of records.
    """

    __slots__ = (
        "connection",
        "due",
        "exchange",
        "is_held",
        "keys",
        "least_bytes",
        "number",
        "part",
        "routed_at",
        "targets",
    )

    def __init__(
        self, number: int, exchange: Exchange, connection: BrokerConnection, part: Selection | None, routed_at: int
    ) -> None:
        self.number = number
        self.exchange = exchange
        self.connection = connection
        self.part = part
        self.routed_at = routed_at
        self.keys: Sequence[LaneKey] = ()
        self.is_held = False
        self.due = 0.0
        self.least_bytes = 0
        self.targets: Mapping[Entry, Entry] | None = None

    @property
    def selection(self) -> Selection:
        """The entries of this piece."""
        return self.exchange.selection(self.part)

    def entries(self) -> Iterable[Entry]:
        return entries_of(self.selection)


class InFlight:
    """The connections and pieces of one client connection, except the pieces of the plain path.

    Actions go into `actions`.
    """

    __slots__ = (
        "_actions",
        "_by_broker",
        "_newest_connection",
        "_newest_piece",
        "_readers",
        "_sequences",
        "connections",
        "pieces",
    )

    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        self.connections: dict[int, BrokerConnection] = {}
        self.pieces: dict[int, Piece] = {}
        self._by_broker: dict[int, BrokerConnection] = {}
        # None while there are none, because most clients have no reads.
        self._readers: dict[int, list[BrokerConnection]] | None = None
        self._newest_connection = 0
        self._newest_piece = 0
        # Built on the first call of `of`, which is rare, and kept until `forget`.
        self._sequences: dict[LaneKey, set[int]] | None = None

    # Connections

    def connection_to(self, broker: int) -> BrokerConnection:
        """Return the connection to a broker, or a new one."""
        connection = self._by_broker.get(broker)
        if connection is None:
            connection = self._by_broker[broker] = self._new_connection(broker, 0)
        return connection

    def _new_connection(self, broker: int, reader: int) -> BrokerConnection:
        self._newest_connection += 1
        connection = BrokerConnection(self._newest_connection, broker, reader)
        self.connections[connection.number] = connection
        return connection

    def readers(self, broker: int) -> Sequence[BrokerConnection]:
        """The connections for reads to a broker."""
        return self._readers.get(broker, ()) if self._readers else ()

    def free_reader(self, broker: int) -> BrokerConnection | None:
        """A connection for reads on which nothing is unanswered, or a new one; None if all READERS are busy."""
        self._readers = self._readers or {}
        readers = self._readers.setdefault(broker, [])
        for connection in readers:
            if not connection.open_count:
                return connection
        if len(readers) == READERS:
            return None
        place = next(each for each in range(1, READERS + 1) if all(each != other.reader for other in readers))
        readers.append(self._new_connection(broker, place))
        return readers[-1]

    def reading(self) -> list[Piece]:
        """The reads in flight."""
        readers = [connection for each in (self._readers or {}).values() for connection in each]
        return [connection.reading for connection in readers if connection.reading is not None]

    def opened(self, number: int) -> None:
        """Note that the dial has succeeded."""
        connection = self.connections[number]
        if connection.state is ConnectionState.DIALLING:
            connection.move(ConnectionState.OPEN)

    def closed(self, connection: BrokerConnection) -> None:
        """Send nothing more on this connection; has no effect if it is closed."""
        if connection.state is not ConnectionState.CLOSED:
            connection.move(ConnectionState.CLOSED)
            if connection.reader and self._readers:
                self._readers[connection.broker].remove(connection)
            else:
                del self._by_broker[connection.broker]

    def close(self, connection: BrokerConnection, reason: str, *, is_untrue: bool = False) -> None:
        """End a connection. Its loss, with the pieces on it, is a separate event. No `reason`: it is not needed."""
        if connection.state is not ConnectionState.CLOSED:
            self.closed(connection)
            self._actions.add(Close(connection.number, reason, is_untrue))

    # Pieces

    def add(self, exchange: Exchange, connection: BrokerConnection, part: Selection | None, routed_at: int) -> Piece:
        """Add a piece that is sent or waits for the connection's dial."""
        self._newest_piece += 1
        piece = self.pieces[self._newest_piece] = Piece(self._newest_piece, exchange, connection, part, routed_at)
        connection.open_count += 1
        if exchange.is_read:
            connection.reading = piece
        if self._sequences is not None and exchange.is_ordered:
            self._count(piece, self._sequences)
        return piece

    def _count(self, piece: Piece, counted: dict[LaneKey, set[int]]) -> None:
        exchange = piece.exchange
        piece.keys = [lane_key(exchange, entry) for entry in piece.entries()]
        for key in piece.keys:
            counted.setdefault(key, set()).add(exchange.sequence)

    def remove(self, piece: Piece) -> None:
        """Remove a piece that is answered, lost or withdrawn."""
        del self.pieces[piece.number]
        exchange, connection = piece.exchange, piece.connection
        connection.open_count -= 1
        if exchange.is_read:
            connection.reading = None
        if self._sequences is None or not exchange.is_ordered:
            return
        for key in piece.keys:
            sequences = self._sequences[key]
            sequences.discard(exchange.sequence)
            if not sequences:
                del self._sequences[key]

    def shrink(self) -> None:
        """Shrink the tables. Call only while nothing is in flight."""
        self.pieces.clear()

    def of(self, key: LaneKey) -> Collection[int]:
        """The unanswered sequences in a lane."""
        if self._sequences is None:
            self._sequences = {}
            for piece in self.ordered():
                self._count(piece, self._sequences)
        return self._sequences.get(key, ())

    def forget(self) -> None:
        """Discard the index of `of`: it is not needed now, or partitions have new names."""
        self._sequences = None

    def ordered(self) -> list[Piece]:
        """The pieces whose order matters."""
        return [piece for piece in self.pieces.values() if piece.exchange.is_ordered]

    def withdraw(self, is_meant: Callable[[Piece], bool]) -> list[Piece]:
        """Withdraw matching pieces that no broker has seen."""
        withdrawn = [
            piece
            for piece in self.pieces.values()
            if piece.connection.state is ConnectionState.DIALLING and is_meant(piece)
        ]
        withdrawn.sort(key=lambda piece: piece.connection.number)
        by_connection: dict[int, set[int]] = {}
        for piece in withdrawn:
            self.remove(piece)
            by_connection.setdefault(piece.connection.number, set()).add(piece.number)
        for connection, pieces in by_connection.items():
            self._actions.add(Withdraw(connection, frozenset(pieces)))
        return withdrawn


class RecentBatches:
    """The acks=0 batches sent on one connection since `since`, and in the window before.

    No answer says whether such a batch was appended. A broker that refuses one closes the connection, as Apache Kafka
    does; so does a broker that is killed or cut off. Bytes sent shortly before may or may not have arrived. Brokers
    close within milliseconds, so bytes sent long before are not in doubt.
    """

    __slots__ = ("_before", "_now", "_since")

    def __init__(self, since: float) -> None:
        self._since = since
        self._now: Batches = {}
        self._before: Batches = {}

    def _advance(self, now: float) -> None:
        """Begin a new window if this one is over."""
        elapsed = now - self._since
        if elapsed >= WINDOW_S:
            self._before = self._now if elapsed < 2 * WINDOW_S else {}
            self._now = {}
            self._since = now

    def note(self, partition: Partition, routed_at: int, now: float) -> None:
        """Note a batch that has left this process."""
        self._advance(now)
        known = self._now.get(partition)
        if known is not None or len(self._now) < MAX_PARTITIONS:
            self._now[partition] = (_batches(known) + 1, routed_at)

    def take(self, now: float) -> Batches:
        """Return the batches in doubt, now that the connection has ended."""
        self._advance(now)
        doubted = dict(self._before)
        for partition, (batches, routed_at) in self._now.items():
            doubted[partition] = (_batches(doubted.get(partition)) + batches, routed_at)
        return doubted


def _batches(known: tuple[int, int] | None) -> int:
    return known[0] if known is not None else 0
