"""The routing table: entries go only upward, whatever order news arrives in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kproxy.routing.topology import MAX_PARTITION_INDEX, NO_OWNER, Address, Ownership, Topology


def rows(topology: Topology) -> dict[tuple[bytes, int], int]:
    return {(row.topic, row.partition_index): row.owner for row in topology.ownerships()}


def test_an_unknown_partition_has_no_owner() -> None:
    topology = Topology()
    assert topology.owner(b"t", 0) == NO_OWNER
    assert topology.owner_revision(b"t", 0) == 0
    topology.set_owner(b"t", 1, 7, 5)
    for partition_index in (-1, 0, 2, MAX_PARTITION_INDEX + 1):
        assert topology.owner(b"t", partition_index) == NO_OWNER
        assert topology.owner_revision(b"t", partition_index) == 0
    assert list(topology.ownerships()) == [Ownership(b"t", 1, 7, 5)]


def test_a_change_at_or_below_the_known_revision_is_ignored() -> None:
    topology = Topology()
    assert topology.set_owner(b"t", 0, 1, 10)
    assert not topology.set_owner(b"t", 0, 2, 10)
    assert not topology.set_owner(b"t", 0, 3, 9)
    assert topology.owner(b"t", 0) == 1
    assert topology.set_owner(b"t", 0, 2, 11)
    assert (topology.owner(b"t", 0), topology.owner_revision(b"t", 0)) == (2, 11)


def test_a_late_event_does_not_bring_a_removed_owner_back() -> None:
    topology = Topology()
    topology.set_owner(b"t", 0, 1, 10)
    assert topology.set_owner(b"t", 0, NO_OWNER, 12)
    assert not topology.set_owner(b"t", 0, 1, 11)
    assert topology.owner(b"t", 0) == NO_OWNER
    assert list(topology.ownerships()) == []
    assert topology.set_owner(b"t", 0, 2, 13)


def test_a_partition_index_out_of_range_is_refused_and_costs_nothing() -> None:
    topology = Topology()
    for partition_index in (-1, MAX_PARTITION_INDEX + 1, 2**31 - 1, 2**40):
        assert not topology.set_owner(b"t", partition_index, 1, 5)
    assert list(topology.ownerships()) == []
    assert topology.revision == 0
    assert topology.set_owner(b"t", MAX_PARTITION_INDEX, 1, 5)


def test_only_a_rebuild_takes_the_revision_down() -> None:
    topology = Topology()
    topology.set_owner(b"t", 0, 1, 1000)
    topology.set_owner(b"t", 1, 1, 500)
    assert topology.revision == 1000
    topology.set_broker(1, Address("h", 1))
    topology.begin_rebuild()
    assert topology.revision == 0
    assert rows(topology) == {}
    assert topology.set_owner(b"t", 0, 2, 7)
    assert (topology.owner(b"t", 0), topology.revision) == (2, 7)


def test_a_broker_comes_moves_and_goes_without_touching_owners() -> None:
    topology = Topology()
    topology.set_owner(b"t", 0, 1, 5)
    topology.set_broker(1, Address("a", 1))
    topology.set_broker(1, Address("b", 2))
    assert topology.address(1) == Address("b", 2)
    topology.remove_broker(1)
    topology.remove_broker(1)
    assert topology.address(1) is None
    assert topology.owner(b"t", 0) == 1


CHANGES = st.lists(
    st.tuples(st.sampled_from([b"a", b"b"]), st.integers(0, 5), st.integers(-1, 3)), min_size=1, max_size=60
)


@given(changes=CHANGES, data=st.data())
def test_any_order_and_repetition_of_changes_ends_in_the_last_owner(
    changes: list[tuple[bytes, int, int]], data: st.DataObject
) -> None:
    history = [(*change, revision) for revision, change in enumerate(changes, start=1)]
    last = {(topic, index): owner for topic, index, owner, _ in history}
    heard = data.draw(st.permutations(history + data.draw(st.lists(st.sampled_from(history)))))
    topology = Topology()
    highest = 0
    seen: dict[tuple[bytes, int], int] = {}
    for topic, index, owner, revision in heard:
        topology.set_owner(topic, index, owner, revision)
        assert topology.revision >= highest
        assert topology.owner_revision(topic, index) >= seen.get((topic, index), 0)
        highest, seen[topic, index] = topology.revision, topology.owner_revision(topic, index)
    assert rows(topology) == {partition: owner for partition, owner in last.items() if owner != NO_OWNER}
    assert topology.revision == len(history)
