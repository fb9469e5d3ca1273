"""Spark's Kafka source with a group id, behind a proxy, while the group's coordinator and a leader are killed with -9.

A stream goes on, and a batch is read while the broker is dead: before reference brokers and before Apache Kafka.
Spark keeps its offsets in its checkpoint and commits none. With `useDeprecatedOffsetFetching` its driver is a member of
the group, which looks for the topic's partitions and offsets; otherwise an admin client does that, and the id is only a
name.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kproxy_codec import api_keys
from tests.integration.broker.test_groups import PARTITIONS, name, write  # noqa: F401
from tests.pipeline.owners import KINDS, Owners, owners  # noqa: F401
from tests.support.clients.kafka_io import create_topic

pytestmark = [pytest.mark.spark, pytest.mark.java, pytest.mark.timeout(900)]

ROWS = 300
BY_CONSUMER = "spark.sql.streaming.kafka.useDeprecatedOffsetFetching"


@pytest.mark.long
@pytest.mark.parametrize("is_member", [True, False], ids=["member", "name"])
@pytest.mark.parametrize("option", ["kafka.group.id", "groupIdPrefix"])
@pytest.mark.parametrize("owners", KINDS, indirect=True)
def test_source_reads_each_record_once(
    owners: Owners,  # noqa: F811
    name: str,  # noqa: F811
    spark: Any,
    tmp_path: Path,
    option: str,
    is_member: bool,
) -> None:
    # Spark keeps consumers by group and topic, whatever their brokers.
    site, topic, group = owners, name, name
    source = {"kafka.bootstrap.servers": site.proxy, option: group, "subscribe": topic, "startingOffsets": "earliest"}
    # A member that is stopped while its coordinator is dead cannot leave: the next one waits until its session is over.
    source["kafka.session.timeout.ms"] = "6000"
    create_topic(site.proxy, topic, PARTITIONS)
    written = write(site.proxy, topic, 0, ROWS)

    def read_batch(options: dict[str, str]) -> list[bytes]:
        rows = spark.read.format("kafka").options(**options).load().selectExpr("cast(value as string)")
        return sorted(each[0].encode() for each in rows.collect())

    def start() -> Any:
        rows = spark.readStream.format("kafka").options(**source).load()
        sink = rows.selectExpr("cast(value as string) as value").writeStream.format("text")
        return sink.option("checkpointLocation", str(tmp_path / "checkpoint")).start(str(tmp_path / "out"))

    def write_more() -> None:
        nonlocal written
        written |= write(site.proxy, topic, len(written), ROWS)

    try:
        spark.conf.set(BY_CONSUMER, str(is_member).lower())
        assert read_batch(source) == sorted(written)
        query = start()
        query.processAllAvailable()
        assert any(each.startswith(group) for each in stable_groups(site)) == is_member
        for role in (lambda: site.coordinator(group), lambda: site.leader(topic)):
            victim = role()
            write_more()
            victim.kill()
            query.stop()
            query = start()
            # A batch in the stream's group would take partitions from it.
            assert read_batch({each: source[each] for each in source if each != option}) == sorted(written)
            write_more()
            query.processAllAvailable()
            site.restart(victim, topic)
        query.stop()
    finally:
        for query in spark.streams.active:
            query.stop()
        spark.conf.unset(BY_CONSUMER)
    times = Counter(each[0].encode() for each in spark.read.text(str(tmp_path / "out")).collect())
    assert times == dict.fromkeys(written, 1)


def stable_groups(site: Owners) -> list[str]:
    """The groups with members, of all brokers."""
    found: list[str] = []
    for each in site.clients():
        with each as client:
            groups = client.request(api_keys.LIST_GROUPS, 4, states_filter=["Stable"]).groups
        found += [each.group_id for each in groups]
    return found
