"""A plan for a request is kept for the next one like it, and for no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from codec.api_keys import PRODUCE
from codec.partitioned import PartitionedRequest
from codec.produce import parse_produce
from codec.produce_response import PRODUCE_API
from kproxy.routing.routes import MAX_PLANNED_PARTITIONS, Routes
from kproxy.routing.topology import Address, Topology
from tests.support.messages import head_of, request_body, request_frame, sample_request

TOPICS = {"a": [0, 1, 2], "b": [0]}


def _request(topics: dict[str, list[int]], version: int = 9) -> PartitionedRequest:
    frame = request_frame(PRODUCE, version, request_body(PRODUCE, version, sample_request(PRODUCE, topics)))
    return parse_produce(frame, head_of(frame))


def _proven() -> tuple[Topology, Routes[str, None]]:
    """Everything of TOPICS is proven: even partitions on one connection, odd ones on another."""
    topology = Topology()
    for broker in (1, 2):
        topology.set_broker(broker, Address("localhost", broker))
    routes: Routes[str, None] = Routes(topology)
    for name, partitions in TOPICS.items():
        for index in partitions:
            topology.set_owner(name.encode(), index, index % 2 + 1, revision=1)
            routes.prove(name.encode(), index, "odd" if index % 2 else "even", routed_at=1)
    return topology, routes


def _ways(routes: Routes[str, None], request: PartitionedRequest) -> dict[tuple[bytes, int], str]:
    return {
        (request.topics[place].name, request.topics[place].partitions[ordinal]): part.connection
        for part in routes.plan(PRODUCE_API, request)
        for place, ordinals in part.selection
        for ordinal in ordinals
    }


WAYS = {(b"a", 0): "even", (b"a", 1): "odd", (b"a", 2): "even", (b"b", 0): "even"}


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
def test_each_partition_goes_over_the_connection_that_is_proven_for_it(topics: dict[str, list[int]]) -> None:
    _, routes = _proven()
    for each in ({"a": [0, 1]}, {"b": [0], "a": [1]}, topics, {"a": [1]}, topics):
        asked = {(name.encode(), index) for name, partitions in each.items() for index in partitions}
        assert _ways(routes, _request(each)) == {key: WAYS[key] for key in asked}


def test_the_next_request_like_it_is_not_planned_anew() -> None:
    _, routes = _proven()
    first = routes.plan(PRODUCE_API, _request(TOPICS))
    assert len(first) == 2
    assert routes.plan(PRODUCE_API, _request(TOPICS)) is first


def test_another_version_is_answered_otherwise() -> None:
    _, routes = _proven()
    (old,) = routes.plan(PRODUCE_API, _request({"b": [0]}, version=7))
    (new,) = routes.plan(PRODUCE_API, _request({"b": [0]}, version=9))
    assert old.plain is not None
    assert old.plain is not new.plain


def _moves(topology: Topology, routes: Routes[str, None]) -> None:
    version = topology.version
    topology.set_owner(b"a", 1, 1, revision=2)
    routes.forget_outdated(topology.moved_since(version))


def _returns(topology: Topology, routes: Routes[str, None]) -> None:
    _moves(topology, routes)
    routes.prove(b"a", 1, "other", routed_at=2)


def _reconnects(topology: Topology, routes: Routes[str, None]) -> None:
    routes.prove(b"a", 1, "other", routed_at=1)


@pytest.mark.parametrize(
    ("change", "way"),
    [(_moves, None), (_returns, "other"), (_reconnects, "other")],
    ids=["moves", "returns", "reconnects"],
)
def test_no_plan_outlives_a_change(change: Callable[[Topology, Routes[str, None]], None], way: str | None) -> None:
    topology, routes = _proven()
    assert _ways(routes, _request({"a": [0, 1]}))
    change(topology, routes)
    expected = {} if way is None else {(b"a", 0): "even", (b"a", 1): way}
    assert _ways(routes, _request({"a": [0, 1]})) == expected


def test_plans_outlive_what_happens_to_others_and_not_what_may_be_anything() -> None:
    topology, routes = _proven()
    plan = routes.plan(PRODUCE_API, _request(TOPICS))
    topology.set_owner(b"b", 1, 1, revision=2)
    routes.forget_outdated([(b"b", 1)])
    assert routes.plan(PRODUCE_API, _request(TOPICS)) is plan
    routes.forget_outdated(None)
    assert routes.plan(PRODUCE_API, _request(TOPICS)) is not plan


def test_a_new_route_among_proven_ones_makes_no_plan() -> None:
    topology, routes = _proven()
    topology.set_owner(b"b", 1, 1, revision=2)
    assert routes.plan(PRODUCE_API, _request({"a": [0], "b": [0, 1]})) == ()
    assert routes.plan(PRODUCE_API, _request({"c": [0]})) == ()


def test_few_plans_are_kept() -> None:
    topology, routes = _proven()
    indexes = range(2 * MAX_PLANNED_PARTITIONS)
    for index in indexes:
        topology.set_owner(b"many", index, 1, revision=1)
        routes.prove(b"many", index, "one", routed_at=1)
    for index in indexes:
        request = _request({"many": [index]})
        assert routes.plan(PRODUCE_API, request) is routes.plan(PRODUCE_API, request), "the latest is among them"
        assert len(routes._plans) <= MAX_PLANNED_PARTITIONS
    # One that is too large is not kept, and takes no other one's place.
    request = _request({"many": list(indexes)})
    assert routes.plan(PRODUCE_API, request) is not routes.plan(PRODUCE_API, request)
    assert len(routes._plans) == MAX_PLANNED_PARTITIONS
    assert _ways(routes, _request({"many": [indexes[-1]]})) == {(b"many", indexes[-1]): "one"}
