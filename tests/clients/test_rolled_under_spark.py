"""Spark writes too during a rolling restart of a real Apache Kafka cluster: test_rolled_cluster with a third client.

Apart from it: what starts Spark is in a lane of its own.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from tests.clients.test_rolled_cluster import (
    PARTITIONS,
    READ_TIMEOUT_S,
    RECORDS_PER_S,
    Writers,
    proxies,  # noqa: F401
    roll_under,
)
from tests.support.brokers.real_kafka import RealKafka
from tests.support.clients.kafka_io import read_topic
from tests.support.processes.dev import KproxyProcess

pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(900)]


def test_rolled_cluster_keeps_records_complete_and_in_order(
    real_kafka: RealKafka,
    proxies: list[KproxyProcess],  # noqa: F811
    spark: Any,
) -> None:
    writers = Writers(real_kafka, ",".join(proxy.kafka for proxy in proxies), spark)
    roll_under(writers, real_kafka, proxies)
    count = writers.spark_count()
    read = read_topic(real_kafka.bootstrap, writers.topics["spark"], PARTITIONS, count, READ_TIMEOUT_S)
    by_partition = [[int(each.value or b"-1") for each in read if each.partition == at] for at in range(PARTITIONS)]
    assert sorted(chain(*by_partition)) == list(range(count))
    assert by_partition == [sorted(numbers) for numbers in by_partition]
    assert count > RECORDS_PER_S
