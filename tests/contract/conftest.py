"""Fixtures shared by the tests against an oracle."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from tests.support.brokers.oracle import NODES, RealSide, ReferenceSide, Side
from tests.support.brokers.real_kafka import RealKafka
from tests.support.brokers.reference_broker import start_brokers

LEASE_TTL_S = 4


@pytest.fixture(scope="package")
def sides(
    real_kafka: RealKafka, etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Side]]:
    """Apache Kafka ("real") and three reference brokers ("ours"); a test that takes a broker down brings it back."""
    directory, prefix = tmp_path_factory.mktemp("oracle"), f"/oracle-{uuid.uuid4().hex[:10]}"
    # Configured like Kafka's topics.
    defaults = {"num_partitions": 3, "default_replication_factor": 3}
    with start_brokers(NODES, directory, etcd.endpoint, prefix, lease_ttl_s=LEASE_TTL_S, **defaults) as brokers:
        yield {"real": RealSide(real_kafka), "ours": ReferenceSide(brokers)}


@pytest.fixture
def topic() -> str:
    return f"oracle-{uuid.uuid4().hex[:10]}"
