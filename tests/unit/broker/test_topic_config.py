"""The configuration of a topic, its effects on its partitions, and the placement of its replicas."""

from __future__ import annotations

import uuid
from collections import Counter
from pathlib import Path

import pytest

from kproxy.broker.cluster import ClusterView
from kproxy.broker.config import (
    BrokerConfig,
    InvalidConfig,
    LogOptions,
    check_configs,
    topic_config_values,
    topic_settings,
)
from kproxy.broker.keys import Keys, TopicValue, encode_value
from kproxy.broker.topics import NewTopic, TopicAdmin, TopicOutcome, check_assignments, plan_topic, spread_replicas
from kproxy.etcd import EtcdClient
from kproxy_codec import error_codes
from tests.support.brokers.replica_group import broker_value

CONFIG = BrokerConfig(1, Path("unused"), ("unused",), segment_bytes=5000, retention_bytes=7000, retention_ms=9000)


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("min.insync.replicas", "1", "1"),
        ("min.insync.replicas", " +2 ", "2"),
        ("min.insync.replicas", "0" * 40 + "2", "2"),
        ("min.insync.replicas", "2147483647", "2147483647"),
        ("retention.ms", "-1", "-1"),
        ("retention.ms", "0", "0"),
        ("retention.bytes", "-5", "-5"),
        ("retention.bytes", "9223372036854775807", "9223372036854775807"),
        ("segment.bytes", "1048576", "1048576"),
        ("cleanup.policy", "delete", "delete"),
        ("compression.type", "producer", "producer"),
        ("message.timestamp.type", "CreateTime", "CreateTime"),
        ("unclean.leader.election.enable", "false", "false"),
    ],
)
def test_configuration_is_stored_in_a_normal_form(name: str, value: str, kept: str) -> None:
    assert check_configs({name: value}) == {name: kept}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min.insync.replicas", "0"),
        ("min.insync.replicas", "2147483648"),
        ("min.insync.replicas", ""),
        ("min.insync.replicas", "1_0"),
        ("min.insync.replicas", "two"),
        ("min.insync.replicas", None),
        ("retention.ms", "-2"),
        ("retention.ms", "1e3"),
        ("retention.bytes", "9223372036854775808"),
        ("retention.bytes", "1" * 5000),
        ("segment.bytes", "1048575"),
        ("segment.bytes", "2147483648"),
        ("cleanup.policy", "compact"),
        ("unclean.leader.election.enable", "true"),
        ("segment.ms", "1000"),
        ("no.such.thing", "1"),
    ],
)
def test_invalid_configuration_is_named_with_valid_ones(name: str, value: str | None) -> None:
    with pytest.raises(InvalidConfig, match=name):
        check_configs({"retention.ms": "5", name: value})


@pytest.mark.parametrize(
    ("configs", "replication_factor", "settings"),
    [
        ({}, 1, (1, LogOptions(5000, "interval", 7000, 9000))),
        ({}, 2, (1, LogOptions(5000, "interval", 7000, 9000))),
        ({}, 3, (2, LogOptions(5000, "interval", 7000, 9000))),
        ({}, 5, (2, LogOptions(5000, "interval", 7000, 9000))),
        ({"min.insync.replicas": "1"}, 3, (1, LogOptions(5000, "interval", 7000, 9000))),
        ({"min.insync.replicas": "9"}, 3, (3, LogOptions(5000, "interval", 7000, 9000))),
        ({"retention.ms": "-1", "retention.bytes": "-5"}, 1, (1, LogOptions(5000, "interval", -1, -1))),
        ({"segment.bytes": "2000000", "retention.ms": "0"}, 1, (1, LogOptions(2_000_000, "interval", 7000, 0))),
    ],
)
def test_topic_settings_precede_broker_settings(
    configs: dict[str, str], replication_factor: int, settings: tuple[int, LogOptions]
) -> None:
    assert topic_settings(configs, replication_factor, CONFIG) == settings


def test_topic_config_shows_configured_or_effective_values() -> None:
    told = dict(topic_config_values({"min.insync.replicas": "9"}, 3, CONFIG))
    assert told["min.insync.replicas"] == "9", "as it was configured, whatever is made of it"
    assert dict(topic_config_values({}, 3, CONFIG))["min.insync.replicas"] == "2"
    assert (told["retention.ms"], told["retention.bytes"], told["segment.bytes"]) == ("9000", "7000", "5000")


# Placement of replicas


@pytest.mark.parametrize("replication_factor", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_replicas_are_distinct_and_even_over_the_brokers(count: int, replication_factor: int) -> None:
    brokers = [10 * number for number in range(1, count + 1)]
    factor = min(replication_factor, count)
    partitions = 3 * count * max(count - 1, 1)
    assigned = spread_replicas(brokers, partitions, factor, first=count - 1)
    assert len(assigned) == partitions
    assert all(len(replicas) == len(set(replicas)) == factor for replicas in assigned)
    assert set(Counter(replicas[0] for replicas in assigned).values()) == {partitions // count}
    assert set(Counter(node_id for replicas in assigned for node_id in replicas).values()) == {
        partitions * factor // count
    }


def test_partitions_of_dead_broker_go_to_all_others() -> None:
    assigned = spread_replicas([1, 2, 3, 4], 24, 2, first=0)
    assert Counter(replicas[1] for replicas in assigned if replicas[0] == 1) == {2: 2, 3: 2, 4: 2}


@pytest.mark.parametrize(
    ("assignments", "what"),
    [
        ([[]], "partition 0 is assigned no broker"),
        ([[1], [2, 2]], "partition 1 name a broker twice"),
        ([[1, 9]], "broker 9, which is not live"),
        ([[-1]], "broker -1, which is not live"),
        ([[1, 2], [1]], "partition 1 are 1, those of partition 0 are 2"),
    ],
)
def test_invalid_assignment_says_where_and_why(assignments: list[list[int]], what: str) -> None:
    assert what in str(check_assignments(assignments, {1, 2, 3}))
    assert check_assignments([[1, 2], [2, 3]], {1, 2, 3}) is None


# Planned topics


def view_of(live: int) -> ClusterView:
    view = ClusterView(Keys("/p"))
    for node_id in range(1, live + 1):
        value = encode_value(broker_value(node_id))
        view.apply_put(view.keys.broker(node_id), value, lease_id=7, revision=node_id)
    return view


@pytest.mark.parametrize(
    ("live", "default", "asked", "outcome"),
    [
        (3, 3, -1, 3),
        (3, 1, -1, 1),
        (2, 3, -1, 2),
        (1, 3, -1, 1),
        (3, 1, 3, 3),
        (3, 3, 1, 1),
        (2, 3, 3, error_codes.INVALID_REPLICATION_FACTOR),
        (0, 3, -1, error_codes.BROKER_NOT_AVAILABLE),
    ],
)
def test_replication_factor_defaults_to_live_brokers(live: int, default: int, asked: int, outcome: int) -> None:
    config = BrokerConfig(1, Path("unused"), ("unused",), default_replication_factor=default)
    planned = plan_topic(NewTopic("t", 4, asked), view_of(live), config)
    if isinstance(planned, TopicOutcome):
        assert planned.error_code == outcome
        assert planned.error_message
    else:
        assert [len(replicas) for replicas in planned.replicas] == [outcome] * 4


def test_topic_with_unreadable_configuration_counts_as_absent() -> None:
    view = view_of(0)
    for name, configs in (("bad", {"retention.ms": "soon"}), ("good", {"retention.ms": "5"})):
        value = TopicValue(uuid.uuid4(), [[1]], configs)
        view.apply_put(view.keys.topic(name), encode_value(value), lease_id=0, revision=1)
    assert {name: topic.configs for name, topic in view.topics.items()} == {"good": {"retention.ms": "5"}}


async def test_topic_with_excess_replicas_is_refused_before_etcd() -> None:
    value = TopicValue(uuid.uuid4(), [list(range(1_000_000_000, 1_000_000_011))] * 10_000, {})
    admin = TopicAdmin(EtcdClient(("http://127.0.0.1:1",)), view_of(0), CONFIG)
    outcome = await admin.create("t", value)
    assert outcome.error_code == error_codes.INVALID_PARTITIONS
    assert "10000 partitions of 11 replicas" in str(outcome.error_message)
