"""The proxies that clients see are spread, stable, and the same on every proxy."""

from __future__ import annotations

from collections import Counter

import pytest

from kproxy.routing.fleet import FIRST_NODE_ID, Fleet, Proxy
from kproxy.routing.rendezvous import preferred_by_index

PARTITIONS = range(10_000)


def fleet_of(*node_ids: int) -> Fleet:
    return Fleet(Proxy(node_id, "proxy.test", node_id - FIRST_NODE_ID + 1) for node_id in node_ids)


IDS = tuple(range(FIRST_NODE_ID, FIRST_NODE_ID + 4))

# Exact values that proxies of every release and Python must agree on: (topic, ids, indexes, their leaders).
AGREED = [
    (b"orders", IDS[:3], (0, 1, 2, 3, 4, 5, 6, 7), (0, 0, 2, 2, 0, 1, 2, 1)),
    (b"orders", IDS[:3], (1023, 1024, 1025, 999_999), (1, 0, 2, 0)),
    (b"t", IDS, (0, 1, 2, 3, 4, 5, 6, 7), (2, 2, 1, 1, 2, 2, 1, 1)),
]


@pytest.mark.parametrize(("topic", "node_ids", "indexes", "leaders"), AGREED)
def test_every_proxy_names_the_same_leaders(
    topic: bytes, node_ids: tuple[int, ...], indexes: tuple[int, ...], leaders: tuple[int, ...]
) -> None:
    expected = [FIRST_NODE_ID + each for each in leaders]
    assert preferred_by_index(topic, indexes, node_ids) == expected
    assert preferred_by_index(topic, indexes, reversed(node_ids)) == expected
    assert [each.node_id for each in fleet_of(*reversed(node_ids)).leaders(topic, indexes)] == expected


def test_every_proxy_names_the_same_coordinators() -> None:
    fleet = fleet_of(*IDS[:3])
    keys = [(key_type, key) for key_type in (0, 1) for key in ("g", "group-1", "group-2", "ünï")]
    assert [fleet.coordinator(*key).node_id - FIRST_NODE_ID for key in keys] == [2, 2, 0, 2, 2, 2, 1, 2]


def test_partition_leader_is_independent_of_other_partitions() -> None:
    fleet = fleet_of(*IDS)
    together = fleet.leaders(b"orders", PARTITIONS)
    assert [fleet.leaders(b"orders", [index])[0] for index in PARTITIONS[::97]] == together[::97]
    assert fleet.leaders(b"orders", PARTITIONS[::-1]) == together[::-1]


def test_partitions_spread_evenly() -> None:
    counts = Counter(each.node_id for each in fleet_of(*IDS).leaders(b"orders", PARTITIONS))
    assert sorted(counts) == list(IDS)
    # Binomial, 2,500 expected: the standard deviation is 43.
    assert all(abs(count - len(PARTITIONS) / 4) < 250 for count in counts.values()), counts


def test_small_topics_spread_too() -> None:
    fleet = fleet_of(*IDS)
    counts = Counter(fleet.leaders(b"topic-%d" % number, [0])[0].node_id for number in range(4_000))
    assert all(abs(count - 1_000) < 200 for count in counts.values()), counts
    groups = Counter(fleet.coordinator(0, f"group-{number}").node_id for number in range(4_000))
    assert all(abs(count - 1_000) < 200 for count in groups.values()), groups


@pytest.mark.parametrize("gone", IDS)
def test_leaving_proxy_moves_only_its_share(gone: int) -> None:
    fleet = fleet_of(*IDS)
    before = fleet.leaders(b"orders", PARTITIONS)
    coordinator_before = [fleet.coordinator(0, f"group-{number}") for number in range(500)]
    assert fleet.replace(proxy for proxy in fleet.proxies if proxy.node_id != gone)
    for was, now in zip(before, fleet.leaders(b"orders", PARTITIONS), strict=True):
        assert now == was if was.node_id != gone else now.node_id != gone
    for number, was in enumerate(coordinator_before):
        now = fleet.coordinator(0, f"group-{number}")
        assert now == was if was.node_id != gone else now.node_id != gone
    fleet.replace(fleet_of(*IDS).proxies)
    assert fleet.leaders(b"orders", PARTITIONS) == before


def test_single_proxy_leads_everything() -> None:
    fleet = fleet_of(FIRST_NODE_ID)
    (alone,) = fleet.proxies
    assert fleet.controller == fleet.coordinator(0, "g") == alone
    assert fleet.leaders(b"t", [0, 5]) == [alone, alone]


def test_controller_stays_while_it_is_there() -> None:
    fleet = fleet_of(*IDS[1:])
    assert fleet.controller.node_id == IDS[1]
    fleet.replace(fleet_of(IDS[1], IDS[3]).proxies)
    assert fleet.controller.node_id == IDS[1]


def test_index_of_any_size_costs_no_memory() -> None:
    assert len(fleet_of(*IDS).leaders(b"t", [2**31 - 1, 0, 2**62])) == 3


BAD = [
    [],
    [Proxy(1, "a", 1), Proxy(1, "b", 1)],
    [Proxy(1, "a", 1), Proxy(2, "a", 1)],
]


@pytest.mark.parametrize("proxies", BAD, ids=["nobody", "one id twice", "one address twice"])
def test_fleet_is_never_empty_or_ambiguous(proxies: list[Proxy]) -> None:
    fleet = fleet_of(*IDS)
    with pytest.raises(ValueError, match=r"proxy|proxies"):
        fleet.replace(proxies)
    assert [each.node_id for each in fleet.proxies] == list(IDS)
    with pytest.raises(ValueError, match="candidates"):
        preferred_by_index(b"t", [0], [])
