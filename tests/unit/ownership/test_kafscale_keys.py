"""How the lease table reads the keys of KafScale: its snapshot of the cluster, and the leases of groups.

SNAPSHOT is byte for byte what KafScale writes for two brokers and a topic of two partitions.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kproxy.etcd import KeyValue, Snapshot
from kproxy.ownership.lease_keys import (
    MAX_GROUP_ID_BYTES,
    MAX_SNAPSHOT_BROKERS,
    MAX_SNAPSHOT_VALUE_BYTES,
    parse_snapshot,
)
from kproxy.routing.topology import Address
from tests.support.brokers.kafscale import ORDERS_ID, SNAPSHOT
from tests.unit.ownership.test_etcd_lease_keys import BROKERS, LEASES, Table, broker

SNAPSHOT_KEY, GROUPS, TOPICS = "/p/metadata/snapshot", "/p/group-leases/", "/p/refbroker/topics/"
LISTED = {0: Address("127.0.0.1", 29092), 1: Address("127.0.0.1", 29093)}


def snapshot(**fields: Any) -> bytes:
    return json.dumps(json.loads(SNAPSHOT) | fields).encode()


def listing(*brokers: Any) -> bytes:
    return snapshot(Brokers=[{"NodeID": number, "Host": "h", "Port": port} for number, port in brokers])


def load(table: Table, *entries: tuple[str, bytes], revision: int = 100) -> None:
    kvs = [KeyValue(key, value, 50, 50, 1, 0) for key, value in entries]
    asyncio.run(table.table.on_snapshot(Snapshot(revision, 1, kvs)))


def test_snapshot_gives_addresses_and_topic_ids() -> None:
    for tell in (Table.by_snapshot, Table.by_event):
        table = Table()
        assert tell(table, SNAPSHOT_KEY, SNAPSHOT).brokers == LISTED
        assert table.topology.topic_ids == {b"orders": ORDERS_ID}
        assert not table.table.skipped
        table.by_event(f"{LEASES}orders/1", b"1", 102)
        assert table.topology.owner(ORDERS_ID, 1) == 1


def test_each_snapshot_replaces_the_one_before() -> None:
    table = Table()
    table.by_event(SNAPSHOT_KEY, SNAPSHOT)
    assert table.by_event(SNAPSHOT_KEY, listing((1, 7), (2, 8)), 102).brokers == {
        1: Address("h", 7),
        2: Address("h", 8),
    }
    assert table.by_event(SNAPSHOT_KEY, snapshot(Brokers=None, Topics=None), 103).brokers == {}
    assert table.topology.topic_ids == {}
    table.by_event(SNAPSHOT_KEY, SNAPSHOT, 104)
    assert table.by_deletion(SNAPSHOT_KEY, 105).brokers == {}
    assert table.topology.topic_ids == {}
    table.by_event(SNAPSHOT_KEY, SNAPSHOT, 106)
    load(table, revision=110)
    assert table.topology.brokers == {}
    assert table.topology.topic_ids == {}


@pytest.mark.parametrize("loaded", [False, True])
def test_broker_key_precedes_the_snapshot(loaded: bool) -> None:
    table = Table()
    if loaded:
        load(table, (f"{BROKERS}1", broker()), (SNAPSHOT_KEY, SNAPSHOT))
    else:
        table.by_event(f"{BROKERS}1", broker(), 101)
        table.by_event(SNAPSHOT_KEY, SNAPSHOT, 102)
    assert table.topology.brokers == LISTED | {1: Address("h", 9092)}
    table.by_event(SNAPSHOT_KEY, listing((1, 7)), 103)
    assert table.topology.brokers == {1: Address("h", 9092)}
    assert table.by_deletion(f"{BROKERS}1", 104).brokers == {1: Address("h", 7)}
    assert table.by_event(f"{BROKERS}1", broker(), 105).brokers == {1: Address("h", 9092)}
    assert table.by_deletion(SNAPSHOT_KEY, 106).brokers == {1: Address("h", 9092)}
    assert table.by_deletion(f"{BROKERS}1", 107).brokers == {}


def test_topics_own_key_precedes_the_snapshot() -> None:
    own = "01234567-89ab-4def-8123-456789abcdef"
    table = Table()
    table.by_event(SNAPSHOT_KEY, SNAPSHOT)
    table.by_event(f"{TOPICS}orders", json.dumps({"topic_id": own}).encode(), 102)
    assert table.topology.topic_ids == {b"orders": bytes.fromhex(own.replace("-", ""))}
    assert table.by_deletion(f"{TOPICS}orders", 103).topic_ids == {b"orders": ORDERS_ID}


def test_topic_id_may_move_between_topics() -> None:
    def topics(**ids: bytes) -> bytes:
        return snapshot(Topics=[{"Topic": name, "TopicID": list(topic_id)} for name, topic_id in ids.items()])

    table = Table()
    table.by_event(SNAPSHOT_KEY, topics(b=b"1" * 16, a=b"2" * 16))
    assert table.by_event(SNAPSHOT_KEY, topics(b=b"2" * 16, a=b"1" * 16), 102).topic_ids == {
        b"a": b"1" * 16,
        b"b": b"2" * 16,
    }
    assert not table.table.skipped
    table.by_event(SNAPSHOT_KEY, topics(a=b"1" * 16, b=b"1" * 16), 103)
    assert table.table.skipped == {"a topic_id that another topic has": 1}


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{",
        b"{}",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        snapshot(Brokers=[{"NodeID": "1", "Host": "h", "Port": 1}]),
        snapshot(Brokers=[{"Host": "h", "Port": 1}]),
        snapshot(Brokers=[{"NodeID": 1, "Host": None, "Port": 1}]),
        snapshot(Brokers=[{"NodeID": 1, "Host": "h", "Port": 1.5}]),
        snapshot(Brokers=7),
        snapshot(Topics=[{"Topic": "t", "TopicID": "id"}]),
        listing(*((number, 1) for number in range(MAX_SNAPSHOT_BROKERS + 1))),
        snapshot(ClusterName="n" * MAX_SNAPSHOT_VALUE_BYTES),
    ],
)
def test_invalid_snapshot_leaves_the_last_one(value: bytes) -> None:
    table = Table()
    table.by_event(SNAPSHOT_KEY, SNAPSHOT)
    table.by_event(SNAPSHOT_KEY, value, 102)
    assert (table.topology.brokers, table.table.skipped.total()) == (LISTED, 1)
    load(table, (SNAPSHOT_KEY, value), (f"{BROKERS}5", broker(node_id=5)))
    assert table.topology.brokers == LISTED | {5: Address("h", 9092)}
    assert table.topology.topic_ids == {b"orders": ORDERS_ID}
    assert table.table.skipped.total() == 2
    assert Table().by_snapshot(SNAPSHOT_KEY, value).brokers == {}


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"Brokers": [{"NodeID": -1, "Host": "h", "Port": 1}]}, "not a broker id"),
        ({"Brokers": [{"NodeID": 2**31, "Host": "h", "Port": 1}]}, "not a broker id"),
        ({"Brokers": [{"NodeID": 1, "Host": "", "Port": 1}]}, "a broker's value without a host"),
        ({"Brokers": [{"NodeID": 1, "Host": "h", "Port": 0}]}, "a broker's value without a port"),
        ({"Topics": [{"Topic": None, "TopicID": [1] * 16}]}, "not a topic name"),
        ({"Topics": [{"Topic": "a/b", "TopicID": [1] * 16}]}, "not a topic name"),
        ({"Topics": [{"Topic": "t", "TopicID": [1] * 15}]}, "not a topic id"),
        ({"Topics": [{"Topic": "t", "TopicID": [256] * 16}]}, "not a topic id"),
    ],
)
def test_invalid_entry_is_skipped_alone(entries: dict[str, Any], reason: str) -> None:
    fine = {"Brokers": [{"NodeID": 3, "Host": "h", "Port": 1}], "Topics": [{"Topic": "u", "TopicID": [7] * 16}]}
    mixed = {name: [*entries.get(name, []), *fine[name]] for name in fine}
    for tell in (Table.by_snapshot, Table.by_event):
        table = Table()
        tell(table, SNAPSHOT_KEY, snapshot(**mixed))
        assert table.topology.brokers == {3: Address("h", 1)}
        assert table.topology.topic_ids == {b"u": b"\7" * 16}
        assert table.table.skipped == {reason: 1}


def test_topic_without_an_id_is_accepted() -> None:
    found = parse_snapshot(snapshot(Topics=[{"Topic": "t"}, {"Topic": "u", "TopicID": [0] * 16}]))
    assert (found.topic_ids, found.invalid) == ({}, [])


@pytest.mark.parametrize("key", [f"{SNAPSHOT_KEY}2", f"{SNAPSHOT_KEY}/old", "/p/metadata/other"])
def test_only_the_exact_key_is_the_snapshot(key: str) -> None:
    table = Table()
    assert table.by_event(key, SNAPSHOT).brokers == {}


def test_group_leases_are_added_moved_and_removed() -> None:
    table = Table()
    groups = table.table.directory.groups
    table.by_snapshot(f"{GROUPS}g", b"0")
    # A group's name may be any text.
    table.by_event(f"{GROUPS}a/b ü/", b"1", 101)
    assert (groups.holder("g"), groups.holder("a/b ü/"), groups.holder("a")) == (0, 1, None)
    table.by_event(f"{GROUPS}g", b"1", 102)
    table.by_event(f"{GROUPS}g", b"0", 102)
    assert groups.holder("g") == 1
    table.by_deletion(f"{GROUPS}g", 101)
    assert groups.holder("g") == 1
    table.by_deletion(f"{GROUPS}g", 103)
    assert (groups.holder("g"), len(groups)) == (None, 1)
    load(table, (f"{GROUPS}h", b"7"))
    assert (groups.holder("h"), len(groups)) == (7, 1)


@pytest.mark.parametrize("value", [b"", b"x", b"-1", b"01", b"2147483648"])
def test_invalid_coordinator_removes_the_holder(value: bytes) -> None:
    for tell in (Table.by_snapshot, Table.by_event):
        table = Table()
        table.by_event(f"{GROUPS}g", b"1", 60)
        tell(table, f"{GROUPS}g", value)
        assert table.table.directory.groups.holder("g") is None
        assert table.table.skipped == {"not a broker id": 1}


@pytest.mark.parametrize("group", ["", "g" * (MAX_GROUP_ID_BYTES + 1)])
def test_invalid_group_is_skipped(group: str) -> None:
    table = Table()
    table.by_event(GROUPS + group, b"1")
    assert (len(table.table.directory.groups), table.table.skipped) == (0, {"not a group id": 1})
