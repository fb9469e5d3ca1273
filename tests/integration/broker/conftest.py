"""The topic of a test, and the broker of the fixture `cluster` that leads it."""

from __future__ import annotations

import uuid

import pytest

from tests.support.brokers.reference_broker import BrokerProcess, Cluster


@pytest.fixture
def topic() -> str:
    """A topic name unique to the test."""
    return f"t-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def leader(cluster: Cluster, topic: str) -> BrokerProcess:
    """The broker that leads partition 0 of `topic`."""
    return cluster.leader(topic)
