"""The routing table's promises that keep a million partitions cheap: pages, moves, loads in portions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.observe.table import TableView, merge_pages, table_page
from kproxy.routing.routes import Routes
from kproxy.routing.topology import MAX_MOVES_KEPT, NO_OWNER, PORTION_ROWS, Address, Ownership, Topology
from kproxy_codec.partitioned import TopicSpan

NAMES = [b"a", b"a-b", b"b", b"c"]
IDS = {name: bytes([0x80 + place]) * 16 for place, name in enumerate(NAMES)}
PLACES = st.tuples(st.sampled_from(NAMES), st.integers(0, 4))
OWNERS = st.integers(NO_OWNER, 3)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("owner"), PLACES, OWNERS, st.integers(1, 40)),
        st.tuples(st.just("id"), st.sampled_from(NAMES), st.booleans()),
        st.tuples(st.just("broker"), st.integers(1, 3), st.integers(1, 2)),
    ),
    max_size=30,
)


def apply(topology: Topology, changes: Sequence[tuple[object, ...]]) -> None:
    for kind, *change in changes:
        match kind, change:
            case "owner", [(name, index), owner, revision]:
                topology.set_owner(name, index, owner, revision)
            case "id", [name, has_one]:
                topology.set_topic_id(name, IDS[name] if has_one else None)
            case "broker", [broker_id, port]:
                topology.set_broker(broker_id, Address("h", port))


def entries(topology: Topology) -> dict[tuple[bytes, int], tuple[int, int]]:
    """Every entry, under each name of its topic."""
    names = [*NAMES, *IDS.values()]
    places = [(name, index) for name in names for index in range(5)]
    return {place: (topology.owner(*place), topology.owner_revision(*place)) for place in places}


@given(before=CHANGES, after=CHANGES)
def test_moves_name_all_changes_or_admit_gaps(
    before: Sequence[tuple[object, ...]], after: Sequence[tuple[object, ...]]
) -> None:
    topology = Topology()
    apply(topology, before)
    version, was = topology.version, entries(topology)
    others = dict(topology.brokers), dict(topology.topic_ids)
    apply(topology, after)
    moved = topology.moved_since(version)
    is_entries_alone = others == (topology.brokers, topology.topic_ids)
    if moved is None:
        assert any(kind != "owner" for kind, *_ in after)
    else:
        assert is_entries_alone
        changed = {place for place, entry in entries(topology).items() if entry != was[place]}
        assert set(moved) == changed
    if topology.version == version:
        assert moved == []
        assert entries(topology) == was


def test_moves_too_long_ago_are_not_remembered() -> None:
    topology = Topology()
    for revision in range(1, MAX_MOVES_KEPT + 2):
        topology.set_owner(b"t", revision % 7, 1, revision)
    assert topology.moved_since(topology.version - MAX_MOVES_KEPT - 1) is None
    moved = topology.moved_since(topology.version - MAX_MOVES_KEPT)
    assert moved is not None
    assert len(moved) == MAX_MOVES_KEPT
    assert topology.moved_since(-1) is None, "a reader that has never looked knows nothing"


@given(rows=st.dictionaries(PLACES, st.integers(0, 3), min_size=1), after=PLACES, limit=st.integers(1, 5))
def test_pages_continue_where_the_previous_ended(
    rows: dict[tuple[bytes, int], int], after: tuple[bytes, int], limit: int
) -> None:
    topology = Topology()
    for revision, ((name, index), owner) in enumerate(rows.items(), start=1):
        topology.set_owner(name, index, owner, revision)
        # Reading in between must not hide later changes.
        assert sum(1 for _ in topology.ownerships()) == revision
    topology.set_topic_id(b"a", IDS[b"a"])
    wanted = sorted(rows)
    assert [(row.topic, row.partition_index) for row in topology.ownerships()] == wanted
    behind = wanted[bisect_right(wanted, after) :]
    assert [(row.topic, row.partition_index) for row in topology.ownerships(after)] == behind
    for topic in (None, *NAMES):
        view = TableView(topology, 0.0, stale=False)
        name = topic.decode() if topic is not None else None
        pages = [table_page(view, topic=name, limit=limit)]
        while pages[-1].next is not None:
            pages.append(table_page(view, topic=name, after=pages[-1].next, limit=limit))
        found = [(each.name.encode(), row.partition) for each in merge_pages(pages).topics for row in each.partitions]
        assert found == [place for place in wanted if topic in (None, place[0])]


def test_abandoned_load_removes_nothing() -> None:
    topology = Topology()
    topology.set_owner(b"old", 0, 1, 3)
    load = topology.begin_load(10)
    assert load.set_owner(b"new", 1, 2, 9)
    assert (topology.owner(b"old", 0), topology.owner(b"new", 1)) == (1, 2)


def test_large_load_ends_in_portions_keeping_changes() -> None:
    topology = Topology()
    count = 3 * PORTION_ROWS
    topology.load([Ownership(b"t", index, 1, 5) for index in range(count)], 5)
    load = topology.begin_load(8)
    load.set_owner(b"t", 7, 2, 6)
    ending = load.end()
    next(ending)
    assert 0 < topology.owned_count < count
    # A re-read that began after the load's revision brings a partition that the load has not reached.
    topology.set_owner(b"t", count - 1, 3, 9)
    for _ in ending:
        pass
    assert list(topology.ownerships()) == [Ownership(b"t", 7, 2, 6), Ownership(b"t", count - 1, 3, 9)]
    assert (load.count, topology.owned_count, topology.revision) == (1, 2, 9)


@pytest.mark.parametrize("moved", [None, [(b"t", 1), (b"other", 0), (b"t", 2)]])
def test_route_is_new_only_after_a_move(
    moved: Sequence[tuple[bytes, int]] | None,
) -> None:
    topology = Topology()
    routes = Routes(topology)
    for index in range(3):
        topology.set_owner(b"t", index, 1, index + 1)
        routes.prove(b"t", index, 7, 9)
    topology.set_owner(b"t", 1, 1, 10)
    routes.forget_outdated(moved)
    topic = TopicSpan(b"t", 0, 0)
    topic.partitions = [0, 1, 2]
    assert routes.new_among(topic, range(3), 7) == [1]
