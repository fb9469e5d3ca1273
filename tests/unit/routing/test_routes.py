"""A partition's route is proven on one connection at most, and every change of it begins a generation."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kproxy.routing.routes import Routes
from kproxy.routing.topology import Address, Topology

EVEN, ODD, OTHER = 1, 2, 3
PARTITIONS = ((b"a", 0), (b"a", 1), (b"a", 2), (b"b", 0))
Ways = dict[tuple[bytes, int], int]
WAYS: Ways = {(b"a", 0): EVEN, (b"a", 1): ODD, (b"a", 2): EVEN, (b"b", 0): EVEN}


def _proven() -> tuple[Topology, Routes]:
    """Prove all PARTITIONS, the even ones on one connection, the odd ones on another."""
    topology = Topology()
    for broker in (1, 2):
        topology.set_broker(broker, Address("localhost", broker))
    routes = Routes(topology)
    for name, index in PARTITIONS:
        topology.set_owner(name, index, index % 2 + 1, revision=1)
        routes.prove(name, index, ODD if index % 2 else EVEN, routed_at=topology.version)
    return topology, routes


def _ways(routes: Routes) -> Ways:
    found = {each: routes.proven_on(*each) for each in (*PARTITIONS, (b"b", 1), (b"c", 0))}
    return {each: connection for each, connection in found.items() if connection is not None}


def _without(*partitions: tuple[bytes, int]) -> Ways:
    return {each: connection for each, connection in WAYS.items() if each not in partitions}


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
    [(_moves, {}), (_returns, {(b"a", 1): OTHER}), (_reconnects, {(b"a", 1): OTHER})],
    ids=["moves", "returns", "reconnects"],
)
def test_each_change_begins_a_generation(change: Callable[[Topology, Routes], None], way: Ways) -> None:
    topology, routes = _proven()
    before = routes.generation
    change(topology, routes)
    assert routes.generation > before
    assert _ways(routes) == _without((b"a", 1)) | way


def test_change_of_other_partitions_begins_none() -> None:
    topology, routes = _proven()
    before = routes.generation
    topology.set_owner(b"b", 1, 1, revision=2)
    routes.forget_outdated([(b"b", 1)])
    routes.prove(b"b", 1, EVEN, routed_at=topology.version)
    assert routes.generation == before
    routes.forget_outdated(None)
    assert routes.generation > before
    assert _ways(routes) == WAYS | {(b"b", 1): EVEN}
