"""The routing table: revisions of entries only rise, whatever order changes arrive in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.routing.split import route
from kproxy.routing.topology import (
    MAX_COUNTED_TOPICS,
    MAX_PARTITION_INDEX,
    NO_OWNER,
    OTHER_TOPICS,
    Address,
    Ownership,
    Topology,
)


def rows(topology: Topology) -> dict[tuple[bytes, int], int]:
    return {(row.topic, row.partition_index): row.owner for row in topology.ownerships()}


def test_partition_that_is_unknown_has_no_owner() -> None:
    topology = Topology()
    assert topology.owner(b"t", 0) == NO_OWNER
    assert topology.owner_revision(b"t", 0) == 0
    topology.set_owner(b"t", 1, 7, 5)
    for partition_index in (-1, 0, 2, MAX_PARTITION_INDEX + 1):
        assert topology.owner(b"t", partition_index) == NO_OWNER
        assert topology.owner_revision(b"t", partition_index) == 0
    assert list(topology.ownerships()) == [Ownership(b"t", 1, 7, 5)]


def test_change_at_or_below_revision_is_ignored() -> None:
    topology = Topology()
    assert topology.set_owner(b"t", 0, 1, 10)
    assert not topology.set_owner(b"t", 0, 2, 10)
    assert not topology.set_owner(b"t", 0, 3, 9)
    assert topology.owner(b"t", 0) == 1
    assert topology.set_owner(b"t", 0, 2, 11)
    assert (topology.owner(b"t", 0), topology.owner_revision(b"t", 0)) == (2, 11)


def test_changes_of_owners_are_counted_by_topic() -> None:
    topology = Topology()
    for revision, owner in enumerate((1, 1, 2, NO_OWNER, 2, 3), 10):
        topology.set_owner(b"t", 0, owner, revision)
    topology.set_owner(b"t", 1, 1, 20)
    # The first owner is no change, nor is the same one; one after none is.
    assert topology.owner_changes == {b"t": 3}
    topology.hint_owner(b"t", 1, 2)
    topology.set_owner(b"t", 1, 2, 21)
    assert topology.owner_changes == {b"t": 4}
    for number in range(MAX_COUNTED_TOPICS + 5):
        for revision in (1, 2):
            topology.set_owner(b"%d" % number, 0, revision, revision)
    assert len(topology.owner_changes) == MAX_COUNTED_TOPICS + 1
    assert topology.owner_changes[OTHER_TOPICS] == 6


def test_partition_index_out_of_range_is_refused() -> None:
    topology = Topology()
    for partition_index in (-1, MAX_PARTITION_INDEX + 1, 2**31 - 1, 2**40):
        assert not topology.set_owner(b"t", partition_index, 1, 5)
    assert list(topology.ownerships()) == []
    assert topology.revision == 0
    assert topology.set_owner(b"t", MAX_PARTITION_INDEX, 1, 5)


def test_load_removes_missing_and_keeps_newer_rows() -> None:
    topology = Topology()
    topology.set_owner(b"gone", 0, 1, 3)
    topology.set_owner(b"kept", 0, 1, 4)
    topology.set_owner(b"newer", 0, 1, 25)
    topology.load([Ownership(b"kept", 0, 2, 10), Ownership(b"new", 3, 3, 20)], 20)
    assert rows(topology) == {(b"kept", 0): 2, (b"new", 3): 3, (b"newer", 0): 1}
    # The removal has the load's revision, so an older event does not count.
    assert not topology.set_owner(b"gone", 0, 1, 19)
    assert topology.set_owner(b"gone", 0, 1, 21)


def test_only_a_rebuild_takes_the_revision_down() -> None:
    topology = Topology()
    topology.set_owner(b"t", 0, 1, 1000)
    topology.load([], 500)
    assert topology.revision == 1000
    topology.set_broker(1, Address("h", 1))
    topology.begin_rebuild()
    assert topology.revision == 0
    assert rows(topology) == {}
    topology.load([Ownership(b"t", 0, 2, 7)], 9)
    assert (topology.owner(b"t", 0), topology.revision) == (2, 9)


def test_broker_changes_do_not_touch_owners() -> None:
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
def test_changes_in_any_order_give_last_owner(changes: list[tuple[bytes, int, int]], data: st.DataObject) -> None:
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


@given(changes=CHANGES, data=st.data())
def test_load_and_later_changes_give_last_owner(changes: list[tuple[bytes, int, int]], data: st.DataObject) -> None:
    history = [(*change, revision) for revision, change in enumerate(changes, start=1)]
    at = data.draw(st.integers(0, len(history)))
    # Events applied before the load: any that preceded or followed it.
    before = data.draw(st.lists(st.sampled_from(history), unique=True))
    topology = Topology()
    for change in before:
        topology.set_owner(*change)
    then = {(topic, index): (owner, revision) for topic, index, owner, revision in history[:at]}
    standing = [Ownership(*partition, *entry) for partition, entry in then.items() if entry[0] != NO_OWNER]
    topology.load(standing, at)
    for change in history[at:]:
        topology.set_owner(*change)
    last = {(topic, index): owner for topic, index, owner, _ in history}
    assert rows(topology) == {partition: owner for partition, owner in last.items() if owner != NO_OWNER}


ID, OTHER_ID = bytes(range(0x80, 0x90)), bytes(range(0x90, 0xA0))


def test_unowned_partition_is_offered_to_answering_brokers() -> None:
    topology = Topology()
    for broker_id in (1, 2):
        topology.set_broker(broker_id, Address("h", broker_id))
    version = topology.version
    topology.doubt(1, doubted=True)
    topology.doubt(1, doubted=True)
    topology.doubt(9, doubted=True)
    assert (set(topology.takers), topology.version) == ({2}, version + 1)
    assert {route(topology, b"t", n) for n in range(20)} == {2}
    # Only the owner gets its partitions; unowned partitions may go to any broker if none answers.
    topology.set_owner(b"t", 0, 1, 5)
    assert route(topology, b"t", 0) == 1
    topology.doubt(2, doubted=True)
    assert {route(topology, b"t", n) for n in range(1, 20)} == {1, 2}
    topology.doubt(2, doubted=False)
    assert set(topology.takers) == {2}


def test_broker_is_not_doubted_for_earlier_errors() -> None:
    topology = Topology()
    for broker_id in (1, 2, 3):
        topology.set_broker(broker_id, Address("h", broker_id))
        topology.doubt(broker_id, doubted=broker_id != 3)
    topology.set_broker(1, Address("h", 7))
    topology.remove_broker(2)
    topology.set_broker(2, Address("h", 2))
    assert set(topology.takers) == {1, 2, 3}


def test_topic_is_found_by_late_learnt_id() -> None:
    topology = Topology()
    topology.set_owner(b"t", 0, 1, 5)
    assert (topology.owner(ID, 0), topology.name_of(ID)) == (NO_OWNER, None)
    before = topology.version
    topology.set_topic_id(b"t", ID)
    topology.set_topic_id(b"new", OTHER_ID)
    assert topology.version > before, "routes may have come into being"
    assert (topology.owner(ID, 0), topology.owner_revision(ID, 0), topology.name_of(ID)) == (1, 5, b"t")
    topology.set_owner(b"t", 3, 2, 6)
    topology.set_owner(b"new", 1, 2, 7)
    assert (topology.owner(ID, 3), topology.owner(OTHER_ID, 1)) == (2, 2)
    # One row for each partition, by its topic's name.
    assert [row.topic for row in topology.ownerships()] == [b"new", b"t", b"t"]


def test_recreated_topic_has_a_new_id_only() -> None:
    topology = Topology()
    topology.set_owner(b"t", 0, 1, 5)
    topology.set_topic_id(b"t", ID)
    topology.set_topic_id(b"t", OTHER_ID)
    assert (topology.owner(ID, 0), topology.name_of(ID)) == (NO_OWNER, None)
    assert topology.owner(OTHER_ID, 0) == 1
    topology.set_topic_id(b"t", None)
    assert (topology.owner(OTHER_ID, 0), topology.owner(b"t", 0)) == (NO_OWNER, 1)
    assert topology.topic_ids == {}


@pytest.mark.parametrize("topic_id", [b"", ID[:15], ID + b"x", OTHER_ID, b"sixteen-letters-"])
def test_invalid_or_foreign_id_is_refused(topic_id: bytes) -> None:
    topology = Topology()
    topology.set_topic_id(b"other", OTHER_ID)
    topology.set_owner(b"sixteen-letters-", 0, 1, 5)
    topology.set_topic_id(b"t", ID)
    with pytest.raises(ValueError, match=r"invalid id .* for topic b't'"):
        topology.set_topic_id(b"t", topic_id)
    assert topology.topic_ids == {b"other": OTHER_ID, b"t": ID}


def test_restored_etcd_removes_the_topic_ids() -> None:
    topology = Topology()
    topology.set_topic_id(b"t", ID)
    topology.begin_rebuild()
    assert topology.name_of(ID) is None
    topology.set_topic_id(b"t", ID)
    assert topology.name_of(ID) == b"t"


# Hints


def test_hint_routes_without_a_revision() -> None:
    topology = Topology()
    topology.set_owner(b"t", 0, 1, 5)
    topology.set_topic_id(b"t", ID)
    before = topology.version
    assert topology.hint_owner(b"t", 0, 2)
    assert not topology.hint_owner(b"t", 0, 2)
    assert topology.hint_owner(b"new", 3, 2)
    assert (topology.owner(ID, 0), topology.owner_revision(b"t", 0), topology.revision) == (2, 5, 5)
    assert topology.moved_since(before) == [(b"new", 3), (b"t", 0), (ID, 0)]
    assert topology.owner_version(b"t", 0) > before
    assert topology.owned_count == 2
    assert topology.is_hinted


def test_dropped_hints_leave_no_trace() -> None:
    topology = Topology()
    topology.set_owner(b"t", 0, 1, 5)
    topology.set_broker(1, Address("h", 1))
    topology.hint_owner(b"t", 0, 2)
    topology.hint_owner(b"t", 0, 3)
    topology.hint_owner(b"t", 1, 3)
    topology.hint_broker(1, Address("h", 7))
    topology.hint_broker(3, Address("h", 3))
    assert topology.brokers == {1: Address("h", 7), 3: Address("h", 3)}
    before = topology.version
    topology.drop_hints()
    assert topology.version > before
    assert (rows(topology), topology.owned_count) == ({(b"t", 0): 1}, 1)
    assert topology.brokers == {1: Address("h", 1)}
    assert not topology.is_hinted
    before = topology.version
    topology.drop_hints()
    assert topology.version == before


def test_change_of_source_replaces_hint() -> None:
    topology = Topology()
    topology.set_owner(b"t", 0, 1, 5)
    topology.hint_owner(b"t", 0, 2)
    assert not topology.set_owner(b"t", 0, 1, 5)
    assert topology.owner(b"t", 0) == 2
    assert topology.set_owner(b"t", 0, 3, 6)
    topology.hint_broker(1, Address("h", 7))
    topology.set_broker(1, Address("h", 8))
    topology.hint_broker(2, Address("h", 9))
    topology.remove_broker(2)
    assert not topology.is_hinted
    topology.drop_hints()
    assert (topology.owner(b"t", 0), topology.brokers) == (3, {1: Address("h", 8)})


def test_rebuild_forgets_hints() -> None:
    topology = Topology()
    topology.set_owner(b"t", 0, 1, 5)
    topology.hint_owner(b"t", 0, 2)
    topology.begin_rebuild()
    topology.drop_hints()
    assert (rows(topology), topology.owned_count) == ({}, 0)


@pytest.mark.parametrize("partition_index", [-1, MAX_PARTITION_INDEX + 1])
def test_hint_for_impossible_partition_is_ignored(partition_index: int) -> None:
    topology = Topology()
    assert not topology.hint_owner(b"t", partition_index, 1)
    assert topology.version == 0
