"""Run three brokers behind a proxy, and kill -9 and restart them: reference brokers, or Apache Kafka's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from tests.integration.broker.test_groups import OPTIONS, find
from tests.support.brokers.real_kafka import RealBroker, RealKafka
from tests.support.brokers.reference_broker import BrokerProcess, RawClient, start_brokers
from tests.support.processes.dev import serving
from tests.support.processes.served import kafka_proxy
from tests.support.waiting import wait_for

LEASE_TTL_S = 2
KINDS = ("reference", "kafka")


@dataclass(frozen=True)
class Owners:
    """Brokers with ids from 1 on, and the address of the proxy. `kafka` is their cluster if they are Apache Kafka's."""

    brokers: Sequence[BrokerProcess | RealBroker]
    proxy: str
    kafka: RealKafka | None = None

    def client(self) -> RawClient:
        """A client of a broker that runs."""
        return next(self.clients())

    def clients(self) -> Iterator[RawClient]:
        """A client of each broker that runs."""
        return (RawClient("127.0.0.1", each.port) for each in self.brokers if each.running)

    def coordinator(self, group: str) -> BrokerProcess | RealBroker:
        with self.client() as client:
            node_id = wait_for(lambda: max(find(client, group).node_id, 0), what="the group has a coordinator")
        return self.brokers[node_id - 1]

    def leader(self, topic: str) -> BrokerProcess | RealBroker:
        """The leader of partition 0."""
        with self.client() as client:
            node_id = wait_for(lambda: max(client.leaders(topic)[0], 0), what="the partition has a leader")
        return self.brokers[node_id - 1]

    def restart(self, broker: BrokerProcess | RealBroker, *topics: str) -> None:
        """Start a killed broker. Before the next one is killed, Apache Kafka's must have all of the topics again."""
        broker.start()
        if self.kafka is not None:
            self.kafka.wait_until_in_sync(topics)


@pytest.fixture
def owners(request: pytest.FixtureRequest, etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path) -> Iterator[Owners]:
    """Brokers of the kind that the test's parameter names. The leases of reference brokers end soon."""
    if request.param == "kafka":
        kafka = request.getfixturevalue("real_kafka")
        with kafka_proxy(tmp_path, kafka.bootstrap) as proxy:
            try:
                yield Owners(kafka.brokers, proxy.kafka, kafka)
            finally:
                # Other tests use them, too.
                for broker in kafka.brokers:
                    if not broker.running:
                        broker.start()
        return
    arguments = ["serve", "--listen", "127.0.0.1:0", "--etcd", etcd.endpoint, "--prefix", etcd_prefix]
    options = {**OPTIONS, "lease_ttl_s": LEASE_TTL_S}
    with (
        start_brokers((1, 2, 3), tmp_path, etcd.endpoint, etcd_prefix, **options) as brokers,
        serving(arguments, tmp_path / "serve.stderr") as proxy,
    ):
        yield Owners(brokers, proxy.kafka)
