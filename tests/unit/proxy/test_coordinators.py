"""The coordinator of a group, by its lease."""

from __future__ import annotations

from kproxy.ownership.directory import GroupLease, GroupLeases
from kproxy.proxy.coordinators import LeasedCoordinators
from kproxy.routing.topology import Address, Topology
from kproxy_codec.coordination import GROUP, TRANSACTION


def test_group_coordinator_is_lease_holder_or_live_broker() -> None:
    topology, leases = Topology(), GroupLeases()
    coordinators = LeasedCoordinators(leases, topology)
    assert coordinators.get(GROUP, "g") is None
    for broker_id in (1, 2, 3):
        topology.set_broker(broker_id, Address("h", broker_id))
    chosen = {group: coordinators.get(GROUP, group) for group in map(str, range(30))}
    assert set(chosen.values()) == {1, 2, 3}
    other = LeasedCoordinators(GroupLeases(), topology)
    assert chosen == {group: other.get(GROUP, group) for group in chosen}
    # A broker that does not answer gets no unowned group; groups of other brokers stay with them.
    topology.doubt(2, doubted=True)
    for group, before in chosen.items():
        now = coordinators.get(GROUP, group)
        assert now == before or (before == 2 and now in (1, 3))
    # A broker keeps the groups that it owns until its lease ends.
    leases.put("g", GroupLease(2, 7))
    assert coordinators.get(GROUP, "g") == 2
    leases.put("g", GroupLease(9, 8))
    assert coordinators.get(GROUP, "g") == 9
    coordinators.forget(GROUP, "g")
    assert coordinators.get(GROUP, "g") == 9
    leases.remove("g", 9)
    assert coordinators.get(GROUP, "g") in (1, 3)
    assert coordinators.get(TRANSACTION, "g") is None
