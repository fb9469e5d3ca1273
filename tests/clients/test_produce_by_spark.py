"""Spark's Kafka sink and source through `kproxy serve` to a real Apache Kafka cluster.

Apart from the other clients: what starts Spark is in a lane of its own.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.test_produce_versions import PARTITIONS, speaking, topic  # noqa: F401
from tests.support.brokers.real_kafka import RealKafka
from tests.support.clients.kafka_io import read_topic
from tests.support.processes.dev import KproxyProcess

pytestmark = [pytest.mark.java, pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(900)]

SPARK_ROWS = 10_000


def test_spark_produces_with_its_client_version(
    proxy: KproxyProcess,
    real_kafka: RealKafka,
    topic: str,  # noqa: F811
    spark: Any,
) -> None:
    """Its Kafka sink and source, with no option but the address."""
    address = {"kafka.bootstrap.servers": proxy.kafka}
    key, value = "concat('key-', id % 50) as key", "cast(id as string) as value"
    sent = spark.range(SPARK_ROWS).selectExpr(key, value)
    with speaking(proxy, 11):
        sent.write.format("kafka").options(**address, topic=topic).save()

    stored = read_topic(real_kafka.bootstrap, topic, PARTITIONS, SPARK_ROWS)
    expected = sorted((b"key-%d" % (number % 50), b"%d" % number) for number in range(SPARK_ROWS))
    assert sorted((each.key or b"", each.value or b"") for each in stored) == expected
    rows = spark.read.format("kafka").options(**address, subscribe=topic, startingOffsets="earliest").load()
    columns = rows.selectExpr("partition", "offset", "cast(key as string)", "cast(value as string)").collect()
    found = [(each[0], each[1], each[2].encode(), each[3].encode()) for each in columns]
    assert sorted(found) == sorted(each[:4] for each in stored)
