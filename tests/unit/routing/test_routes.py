"""Proven routes make a plan; it is kept for the next request of the same kind, and for no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kproxy.proxy.plain_path import Plans, kind_of
from kproxy.routing.routes import Routes
from kproxy.routing.topology import Address, Topology
from kproxy_codec.api_keys import PRODUCE
from kproxy_codec.partitioned import PartitionedRequest
from kproxy_codec.produce import parse_produce
from tests.support.wire.messages import head_of, request_body, request_frame, sample_request

EVEN, ODD, OTHER = 1, 2, 3
MAX_PLANNED_PARTITIONS = 8_192
TOPICS = {"a": [0, 1, 2], "b": [0]}


def _request(topics: dict[str, list[int]], version: int = 9) -> PartitionedRequest:
    frame = request_frame(PRODUCE, version, request_body(PRODUCE, version, sample_request(PRODUCE, topics)))
    return parse_produce(frame, head_of(frame))


def _proven() -> tuple[Topology, Routes]:
    """Everything of TOPICS is proven: even partitions on one connection, odd ones on another."""
    topology = Topology()
    for broker in (1, 2):
        topology.set_broker(broker, Address("localhost", broker))
    routes = Routes(topology)
    for name, partitions in TOPICS.items():
        for index in partitions:
            topology.set_owner(name.encode(), index, index % 2 + 1, revision=1)
            routes.prove(name.encode(), index, ODD if index % 2 else EVEN, routed_at=topology.version)
    return topology, routes


def _ways(routes: Routes, request: PartitionedRequest) -> dict[tuple[bytes, int], int]:
    return {
        (request.topics[place].name, request.topics[place].partitions[ordinal]): part.connection
        for part in routes.plan(request)
        for place, ordinals in part.selection
        for ordinal in ordinals
    }


WAYS = {(b"a", 0): EVEN, (b"a", 1): ODD, (b"a", 2): EVEN, (b"b", 0): EVEN}


@pytest.mark.parametrize(
    "topics",
    [
        {"a": [0]},
        {"a": [1]},
        {"a": [2, 0]},
        {"a": [1, 0, 2]},
        {"b": [0]},
        {"b": [0], "a": [2]},
        {"b": [0], "a": [2, 1]},
        TOPICS,
    ],
    ids=str,
)
def test_each_partition_uses_its_proven_connection(topics: dict[str, list[int]]) -> None:
    _, routes = _proven()
    for each in ({"a": [0, 1]}, {"b": [0], "a": [1]}, topics, {"a": [1]}, topics):
        asked = {(name.encode(), index) for name, partitions in each.items() for index in partitions}
        assert _ways(routes, _request(each)) == {key: WAYS[key] for key in asked}


def _planned(plans: Plans[list[int]], request: PartitionedRequest) -> list[int]:
    """What is kept for a request, made where there is nothing yet."""
    kept = plans.find(kind_of(request))
    if kept is None:
        kept = []
        plans.keep(kind_of(request), request.partition_count, kept)
    return kept


@pytest.mark.parametrize("topics", [{"a": [0]}, {"a": [1, 0]}, TOPICS], ids=str)
def test_next_similar_request_is_not_planned_again(topics: dict[str, list[int]]) -> None:
    _, routes = _proven()
    plans: Plans[list[int]] = Plans(routes)
    first = _planned(plans, _request(topics))
    assert _planned(plans, _request(topics)) is first
    others = [
        _request(topics, version=7),
        _request({"b": [0], "a": [2]}),
        _request({"b": [0], "a": [1]}),
        _request({"a": [0, 1]}),
        _request({"b": [0]}),
    ]
    kept = [first, *(_planned(plans, other) for other in others)]
    assert len(set(map(id, kept))) == 6


def _moves(topology: Topology, routes: Routes) -> None:
    version = topology.version
    topology.set_owner(b"a", 1, 1, revision=2)
    routes.forget_outdated(topology.moved_since(version))


def _returns(topology: Topology, routes: Routes) -> None:
    _moves(topology, routes)
    routes.prove(b"a", 1, OTHER, routed_at=topology.version)


def _reconnects(topology: Topology, routes: Routes) -> None:
    routes.prove(b"a", 1, OTHER, routed_at=topology.version)


@pytest.mark.parametrize(
    ("change", "way"),
    [(_moves, None), (_returns, OTHER), (_reconnects, OTHER)],
    ids=["moves", "returns", "reconnects"],
)
def test_no_plan_outlives_a_change(change: Callable[[Topology, Routes], None], way: int | None) -> None:
    topology, routes = _proven()
    assert _ways(routes, _request({"a": [0, 1]}))
    before = routes.generation
    change(topology, routes)
    assert routes.generation > before
    expected = {} if way is None else {(b"a", 0): EVEN, (b"a", 1): way}
    assert _ways(routes, _request({"a": [0, 1]})) == expected


def test_plans_outlive_changes_of_other_routes() -> None:
    topology, routes = _proven()
    plans: Plans[list[int]] = Plans(routes)
    plan = _planned(plans, _request(TOPICS))
    topology.set_owner(b"b", 1, 1, revision=2)
    routes.forget_outdated([(b"b", 1)])
    routes.prove(b"b", 1, EVEN, routed_at=topology.version)
    assert _planned(plans, _request(TOPICS)) is plan
    routes.forget_outdated(None)
    assert _planned(plans, _request(TOPICS)) is not plan


def test_ended_connection_removes_its_routes_and_plans() -> None:
    _, routes = _proven()
    plans: Plans[list[int]] = Plans(routes)
    plan = _planned(plans, _request({"a": [0]}))
    routes.forget_connection(ODD)
    assert _ways(routes, _request({"a": [0, 1]})) == {}
    assert _ways(routes, _request({"a": [0, 2], "b": [0]})) == dict.fromkeys(((b"a", 0), (b"a", 2), (b"b", 0)), EVEN)
    assert _planned(plans, _request({"a": [0]})) is not plan


def test_new_route_among_proven_makes_no_plan() -> None:
    topology, routes = _proven()
    topology.set_owner(b"b", 1, 1, revision=2)
    assert routes.plan(_request({"a": [0], "b": [0, 1]})) == ()
    assert routes.plan(_request({"c": [0]})) == ()


def test_batch_sent_before_a_move_proves_nothing() -> None:
    topology, routes = _proven()
    topology.set_owner(b"a", 1, 1, revision=5)
    routes.forget_outdated([(b"a", 1)])
    routes.prove(b"a", 1, ODD, routed_at=topology.version - 1)
    assert routes.plan(_request({"a": [1]})) == ()
    routes.prove(b"a", 1, EVEN, routed_at=topology.version)
    assert _ways(routes, _request({"a": [1]})) == {(b"a", 1): EVEN}


@pytest.mark.parametrize("partitions", [1, 3])
def test_plans_are_few_and_evicted_gradually(partitions: int) -> None:
    _, routes = _proven()
    plans: Plans[int] = Plans(routes)
    kinds = MAX_PLANNED_PARTITIONS // partitions + 200
    found = 0
    for turn in range(3):
        for kind in range(kinds):
            if plans.find(kind) is None:
                plans.keep(kind, partitions, kind)
            elif turn:
                found += 1
            assert plans.find(kind) == kind, "the latest is among them"
            assert plans.planned_partitions <= MAX_PLANNED_PARTITIONS
    assert found > kinds, "most are found again, though all are asked for in turn"


def test_replaced_plan_is_gone_and_uncounted() -> None:
    _, routes = _proven()
    plans: Plans[int] = Plans(routes)
    sizes = [1 + 37 * kind % 1_000 for kind in range(200)]
    for kind, partitions in enumerate(sizes):
        plans.keep(kind, partitions, kind)
        kept = [each for each in range(kind + 1) if plans.find(each) is not None]
        assert sorted(each for each, _ in plans._kinds) == kept
        assert plans.planned_partitions == sum(sizes[each] for each in kept)
        assert kept[-1] == kind


def test_oversized_plan_is_not_kept() -> None:
    _, routes = _proven()
    plans: Plans[str] = Plans(routes)
    plans.keep("small", 1, "small")
    plans.keep("large", MAX_PLANNED_PARTITIONS + 1, "large")
    assert (plans.find("small"), plans.find("large")) == ("small", None)
    plans.keep("all", MAX_PLANNED_PARTITIONS, "all")
    assert (plans.find("small"), plans.find("all")) == (None, "all")
