"""The network between simulated brokers: fetches that arrive late, or never; brokers that cannot reach each other."""

from __future__ import annotations

from kproxy_codec import error_codes
from kproxy_codec.fetch import PartitionFetch, PartitionFetched
from tests.support.models.simulated_broker import PARTITION_INDEX, SimulatedProcess, State

MAX_FETCH_BYTES = 1 << 20
# The limit of requests and answers on their way at a time.
MOST_FLIGHTS = 8


class Flight:
    """A fetch on its way to the leader or, once it has an answer, back."""

    def __init__(self, asker: SimulatedProcess, leader_id: int, asked: PartitionFetch) -> None:
        self.asker = asker
        self.leader_id = leader_id
        self.asked = asked
        self.fetched: PartitionFetched | None = None


class Network:
    """`processes` are the brokers as they run now, by id; a request may outlive the process that sent it."""

    def __init__(self, processes: dict[int, SimulatedProcess]) -> None:
        self.flights: list[Flight] = []
        self.blocked: set[frozenset[int]] = set()
        # Followers that do not fetch by themselves as time passes.
        self.lagging: set[int] = set()
        self._processes = processes

    def mend(self) -> None:
        """Nothing is under way, and all brokers reach each other."""
        self.flights.clear()
        self.blocked.clear()
        self.lagging.clear()

    def question(self, process: SimulatedProcess) -> Flight | None:
        partition = process.partition
        asked = partition.next_fetch() if partition is not None else None
        if partition is None or asked is None:
            return None
        return Flight(process, partition.leader_id, asked)

    def ask(self, process: SimulatedProcess) -> None:
        """A request is under way, if there is room; it may arrive after the process that sent it is dead."""
        flight = self.question(process)
        if flight is not None and len(self.flights) < MOST_FLIGHTS:
            self.flights.append(flight)

    def round_trip(self, process: SimulatedProcess) -> None:
        flight = self.question(process)
        if flight is not None and self.serve(flight):
            self.take(flight)

    def serve(self, flight: Flight) -> bool:
        """The leader answers, if it runs; return whether it did."""
        leader, asker = self._processes[flight.leader_id], flight.asker
        if leader.state is not State.RUNNING or frozenset((leader.node_id, asker.node_id)) in self.blocked:
            return False
        partition = leader.partition
        if partition is None:
            flight.fetched = PartitionFetched(PARTITION_INDEX, error_codes.NOT_LEADER_OR_FOLLOWER)
        else:
            flight.fetched = partition.fetch_as_replica(asker.node_id, flight.asked, MAX_FETCH_BYTES)
        return True

    def take(self, flight: Flight) -> None:
        """The process that asked, or its successor under the same id, gets the answer."""
        process = self._processes[flight.asker.node_id]
        partition = process.partition
        if process.state is State.RUNNING and partition is not None and flight.fetched is not None:
            partition.take_fetched(flight.asked, flight.fetched)
