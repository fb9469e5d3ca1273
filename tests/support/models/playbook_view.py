"""Simulate the view that the core of a Playbook (tests.support.models.playbook) reads besides its events."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kproxy.routing.retry import BrokerSemantics
from kproxy.routing.topology import Address, Topology

BROKERS = (1, 2, 3, 4)


class View:
    """A script may change all fields. `hung`: brokers known not to answer; `rereads`: partitions being re-read."""

    max_nameless = 100

    def __init__(self, topology: Topology, semantics: BrokerSemantics) -> None:
        self.topology = topology
        self.semantics = semantics
        self.keeps_producer_state = True
        self.gated: Collection[bytes] = ()
        self.fenced = False
        self.hung: set[int] = set()
        self.rereads: set[tuple[bytes, int]] = set()
        # The fences of the client's claims, by partition.
        self.fences: dict[tuple[bytes, int], int] = {}

    @property
    def has_claims(self) -> bool:
        return bool(self.fences)

    def write_fence(self, topic: bytes, partition_index: int) -> int:
        return self.fences.get((topic, partition_index), 0)

    def is_hung(self, address: Address | None) -> bool:
        return address is not None and address.port in self.hung

    def is_reread(self, topic: bytes, partition_index: int) -> bool:
        return (topic, partition_index) in self.rereads


def topology_of(owners: Mapping[str, Sequence[int | None]], *, offers_unowned: bool) -> Topology:
    """Brokers 1 to 4, and the owners of each topic's partitions by index."""
    topology = Topology(offers_unowned=offers_unowned)
    for broker in BROKERS:
        topology.set_broker(broker, Address("brokers", broker))
    for topic, brokers in owners.items():
        for index, owner in enumerate(brokers):
            if owner is not None:
                topology.set_owner(topic.encode(), index, owner, topology.revision + 1)
    return topology
