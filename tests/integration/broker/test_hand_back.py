"""A broker that returns leads its preferred partitions again, unnoticed by writers."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from tests.support.brokers.reference_broker import BrokerProcess, start_brokers
from tests.support.clients.idempotent_writers import IdempotentWriter
from tests.support.clients.kafka_io import read_partition
from tests.support.waiting import wait_for

pytest_plugins = ["tests.support.etcd.embedded"]

TOPIC = "handed-back"
PARTITIONS = 3


async def test_returned_broker_leads_its_preferred_partitions_again(
    etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path
) -> None:
    options = {"default_replication_factor": 3, "num_partitions": PARTITIONS, "lease_ttl_s": 2, "leader_rebalance_s": 1}
    with start_brokers((1, 2, 3), tmp_path, etcd.endpoint, etcd_prefix, **options) as brokers:
        with brokers[0].client() as client:
            at_first = client.leaders(TOPIC)
        assert set(at_first.values()) == {1, 2, 3}
        bootstrap = ",".join(broker.address for broker in brokers[1:])
        async with IdempotentWriter(bootstrap, TOPIC, PARTITIONS) as writer:
            await asyncio.to_thread(lose_and_regain, brokers, at_first, writer)
        assert writer.failed == []
        for partition in range(PARTITIONS):
            acked = writer.acked[partition]
            assert read_partition(bootstrap, TOPIC, partition, len(acked)) == [
                b"%d" % each for each in range(len(acked))
            ]
        handed_over = [line for broker in brokers[1:] for line in broker.log().splitlines() if "stands first" in line]
        assert handed_over, "nothing was handed over: it was lost, or never moved"


def lose_and_regain(brokers: list[BrokerProcess], at_first: dict[int, int], writer: IdempotentWriter) -> None:
    with brokers[1].client() as client:
        writer.wait_for_more(50)
        brokers[0].kill()
        wait_for(lambda: not {1, -1} & set(client.leaders(TOPIC).values()), what="others lead")
        writer.wait_for_more(50)
        brokers[0].start()
        wait_for(lambda: client.leaders(TOPIC) == at_first, 120, "all lead again what they led at first")
        writer.wait_for_more(50)
