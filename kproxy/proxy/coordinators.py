"""Which broker coordinates a transactional id or a group, as far as brokers or leases say.

Clients are told that the proxy is every coordinator. Who really is one is read from the brokers' answers to
FindCoordinator: clients ask it before anything else, and again when a broker says NOT_COORDINATOR, so that what is
remembered is put right by the very request with which a client tries to.

KafScale's brokers each answer that they are the coordinator themselves; which one is it stands in etcd, as a lease. A
group without a lease is coordinated by the broker that is asked first, which takes the lease; every proxy asks the same
one first.

Invariant: at most MAX_REMEMBERED coordinators, of keys of at most MAX_KEY_LENGTH characters, are remembered.
"""

from __future__ import annotations

from typing import Final, Protocol

from kproxy.routing.rendezvous import preferred
from kproxy.routing.topology import Topology
from kproxy_codec.coordination import GROUP, Found
from kproxy_codec.error_codes import NONE

MAX_REMEMBERED: Final = 10_000
MAX_KEY_LENGTH: Final = 1_000


class Coordinators:
    """The brokers that were last said to coordinate a key; those not used for longest are forgotten first."""

    are_leased = False

    def __init__(self) -> None:
        self._brokers: dict[tuple[int, str], int] = {}

    def get(self, key_type: int, key: str) -> int | None:
        broker = self._brokers.pop((key_type, key), None)
        if broker is not None:
            self._brokers[key_type, key] = broker
        return broker

    def remember(self, key_type: int, key: str, broker: int) -> None:
        if len(key) > MAX_KEY_LENGTH:
            return
        self._brokers.pop((key_type, key), None)
        self._brokers[key_type, key] = broker
        if len(self._brokers) > MAX_REMEMBERED:
            del self._brokers[next(iter(self._brokers))]

    def refused(self, key_type: int, key: str, broker_id: int) -> None:
        """Clients ask anew upon that, and what they are told is remembered."""

    def forget(self, key_type: int, key: str) -> None:
        self._brokers.pop((key_type, key), None)

    def take(self, key_type: int, found: Found) -> None:
        """Learn from a broker's answer to FindCoordinator."""
        if found.error_code == NONE:
            self.remember(key_type, found.key, found.node_id)
        else:
            self.forget(key_type, found.key)


class Holders(Protocol):
    """The leases of groups."""

    def holder(self, group: str) -> int | None:
        """The broker that holds the group's lease."""
        ...


class LeasedCoordinators:
    """The brokers that hold the leases of groups; what brokers say themselves is not listened to.

    A group whose holder is gone waits for the end of its lease, as a partition does. One that nobody has is not offered
    again to who has refused it, as a broker does that stops, unless all have: at most MAX_REMEMBERED such groups.
    """

    are_leased = True

    def __init__(self, leases: Holders, topology: Topology) -> None:
        self._leases = leases
        self._topology = topology
        self._refused_by: dict[str, frozenset[int]] = {}

    def get(self, key_type: int, key: str) -> int | None:
        if key_type != GROUP:
            return None
        holder = self._leases.holder(key)
        if holder is not None:
            self._refused_by.pop(key, None)
            return holder
        refused_by = self._refused_by.get(key, frozenset())
        takers = [broker_id for broker_id in self._topology.takers if broker_id not in refused_by]
        if not takers:
            self._refused_by.pop(key, None)
        return preferred(key.encode(errors="surrogateescape"), takers or self._topology.takers)

    def refused(self, key_type: int, key: str, broker_id: int) -> None:
        """A broker says that it does not coordinate a group."""
        if key_type != GROUP or self._leases.holder(key) is not None or len(key) > MAX_KEY_LENGTH:
            return
        self._refused_by[key] = self._refused_by.pop(key, frozenset()) | {broker_id}
        if len(self._refused_by) > MAX_REMEMBERED:
            del self._refused_by[next(iter(self._refused_by))]

    def forget(self, key_type: int, key: str) -> None:
        """It is not for the proxy to say."""

    def take(self, key_type: int, found: Found) -> None:
        """Nothing is learned from brokers."""
