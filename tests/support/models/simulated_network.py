"""Simulate the network between brokers: fetches arrive late or never, and brokers may not reach each other.

A follower asks on a connection, one request at a time, and names its partition only if its fetch has changed: the
leader keeps fetches open (`open_fetches`). A follower that does not wait for an answer gives up the connection and
sends on a new one. Messages on the earlier one may arrive until the leader knows the new one and ends the earlier one,
as the replication listener does.
"""

from __future__ import annotations

from kproxy.broker.replication.open_fetches import Asked, OpenFetches
from kproxy_codec.fetch import PartitionFetch, PartitionFetched
from tests.support.models.simulated_broker import SimulatedProcess, State

MAX_FETCH_BYTES = 1 << 20
# The limit of requests and answers on their way at a time.
MOST_FLIGHTS = 8


class _Connection:
    """A connection of one process to another, with the state of both sides."""

    def __init__(self, number: int, follower: SimulatedProcess, leader: SimulatedProcess) -> None:
        self.number = number
        self.follower = follower
        self.leader = leader
        self.fetches = OpenFetches(follower.node_id, lambda: leader.time)
        # The fetch of the follower that has no answer yet.
        self.open: PartitionFetch | None = None
        self.is_busy = False


class Flight:
    """A fetch on its way to the leader or, once it has an answer, back; `named` is None if it names nothing."""

    def __init__(self, connection: _Connection, topic_id: bytes, named: PartitionFetch | None, *, withdraws: bool):
        self.connection = connection
        self.topic_id = topic_id
        self.named = named
        self.withdraws = withdraws
        self.fetched: list[PartitionFetched] | None = None


class Network:
    """`processes` are the brokers as they run now, by id; a request may outlive the process that sent it."""

    def __init__(self, processes: dict[int, SimulatedProcess]) -> None:
        self.flights: list[Flight] = []
        self.blocked: set[frozenset[int]] = set()
        # Followers that do not fetch by themselves as time passes.
        self.lagging: set[int] = set()
        self._processes = processes
        self._opened = 0
        # The connection of each follower, and the connection of each follower as its leader knows it.
        self._connections: dict[int, _Connection] = {}
        self._known: dict[tuple[SimulatedProcess, int], _Connection] = {}

    def mend(self) -> None:
        """Drop all messages, and let all brokers reach each other."""
        self.flights.clear()
        self.blocked.clear()
        self.lagging.clear()

    def _connection(self, follower: SimulatedProcess, leader: SimulatedProcess) -> _Connection:
        found = self._connections.get(follower.node_id)
        if found is None or found.is_busy or (found.follower, found.leader) != (follower, leader):
            self._opened += 1
            found = self._connections[follower.node_id] = _Connection(self._opened, follower, leader)
        return found

    def question(self, process: SimulatedProcess) -> Flight | None:
        partition = process.partition
        asked = partition.next_fetch() if partition is not None else None
        if partition is None or asked is None:
            return None
        connection = self._connection(process, self._processes[partition.leader_id])
        is_new = asked != connection.open
        flight = Flight(
            connection,
            partition.topic_id.bytes,
            asked if is_new else None,
            withdraws=is_new and connection.open is not None,
        )
        connection.open, connection.is_busy = asked, True
        return flight

    def ask(self, process: SimulatedProcess) -> None:
        """Send a request, if there is room; it may arrive after the death of its sender."""
        flight = self.question(process)
        if flight is not None and len(self.flights) < MOST_FLIGHTS:
            self.flights.append(flight)

    def round_trip(self, process: SimulatedProcess) -> None:
        flight = self.question(process)
        if flight is not None and self.serve(flight):
            self.take(flight)

    def serve(self, flight: Flight) -> bool:
        """The leader answers, if it runs; return whether it did."""
        connection = flight.connection
        leader, follower_id = self._processes[connection.leader.node_id], connection.follower.node_id
        if leader.state is not State.RUNNING or frozenset((leader.node_id, follower_id)) in self.blocked:
            return False
        known = self._known.get((leader, follower_id))
        if leader is not connection.leader or (known is not None and known.number > connection.number):
            # The leader has ended this connection, or has itself ended, so messages on the connection are lost.
            return False
        if known is not connection:
            if known is not None:
                known.fetches.close()
            self._known[leader, follower_id] = connection
        fetches = connection.fetches
        asked = [] if flight.named is None else [Asked(flight.topic_id, flight.named, leader.partition)]
        withdrawn = [(flight.topic_id, 0)] if flight.withdraws else []
        fetches.take(asked, withdrawn)
        flight.fetched = [fetched for _, fetched in fetches.answer(MAX_FETCH_BYTES)]
        return True

    def take(self, flight: Flight) -> None:
        """The process that asked, or its successor under the same id, gets the answer."""
        connection, asked = flight.connection, flight.connection.open
        process = self._processes[connection.follower.node_id]
        connection.is_busy = False
        if process.state is not State.RUNNING or flight.fetched is None:
            return
        for fetched in flight.fetched:
            connection.open = None
            if process.partition is not None and asked is not None:
                process.partition.take_fetched(asked, fetched)
