"""How the lease table reads keys and values, invalid ones included."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.etcd import EtcdClient, KeyValue, Snapshot, WatchEvent
from kproxy.ownership.lease_keys import MAX_BROKER_VALUE_BYTES
from kproxy.ownership.leases import LeaseTable
from kproxy.routing.topology import NO_OWNER, Address, Topology

LEASES, BROKERS = "/p/partition-leases/", "/p/brokers/"


class Table:
    """A lease table that gets the calls of a mirror."""

    def __init__(self) -> None:
        self.topology = Topology()
        self.table = LeaseTable(EtcdClient(["127.0.0.1"]), "/p", self.topology)

    def by_snapshot(self, key: str, value: bytes) -> Topology:
        asyncio.run(self.table.on_snapshot(Snapshot(100, 1, [KeyValue(key, value, 50, 50, 1, 0)])))
        return self.topology

    def by_event(self, key: str, value: bytes, revision: int = 101) -> Topology:
        self.table.on_events([WatchEvent(False, KeyValue(key, value, revision, revision, 1, 0))], revision)
        return self.topology

    def by_deletion(self, key: str, revision: int) -> Topology:
        self.table.on_events([WatchEvent(True, KeyValue(key, b"", 0, revision, 0, 0))], revision)
        return self.topology


@pytest.mark.parametrize(
    ("key", "value", "topic", "partition_index", "owner"),
    [
        ("orders/0", b"3", b"orders", 0, 3),
        ("orders/999999", b"0", b"orders", 999_999, 0),
        ("a.b_c-D/12", b"2147483647", b"a.b_c-D", 12, 2**31 - 1),
        ("t" * 249 + "/1", b"7", b"t" * 249, 1, 7),
        ("0/0", b"1", b"0", 0, 1),
        ("...//1"[:3] + "/1", b"1", b"...", 1, 1),
    ],
)
def test_lease_key_names_partition_and_value_names_owner(
    key: str, value: bytes, topic: bytes, partition_index: int, owner: int
) -> None:
    for topology in (Table().by_snapshot(LEASES + key, value), Table().by_event(LEASES + key, value)):
        assert topology.owner(topic, partition_index) == owner


@pytest.mark.parametrize(
    "key",
    [
        "",
        "orders",
        "orders/",
        "/0",
        "a/b/0",
        "orders//0",
        "orders/1000000",
        "orders/99999999999999999999",
        "orders/-1",
        "orders/+1",
        "orders/01",
        "orders/1.0",
        "orders/ 1",
        "orders/1\n",
        "orders/١",
        "orders\n/1",
        "./1",
        "../1",
        "orders!/1",
        "\udcff/1",
        "t" * 250 + "/1",
    ],
)
def test_invalid_lease_key_is_skipped_and_counted(key: str) -> None:
    for kind in (Table.by_snapshot, Table.by_event):
        table = Table()
        assert list(kind(table, LEASES + key, b"1").ownerships()) == []
        assert table.table.skipped.total() == 1


@pytest.mark.parametrize("value", [b"", b"x", b"-1", b"+1", b"1 ", b"01", b"2147483648", b"9" * 5000, b"\xff", b"1.0"])
def test_invalid_owner_removes_the_owner(value: bytes) -> None:
    table = Table()
    assert list(table.by_snapshot(f"{LEASES}t/0", value).ownerships()) == []
    table.by_event(f"{LEASES}t/0", b"4", 101)
    assert table.topology.owner(b"t", 0) == 4
    # The old owner no longer holds an overwritten key, just as after a load.
    assert table.by_event(f"{LEASES}t/0", value, 102).owner(b"t", 0) == NO_OWNER
    assert table.table.skipped == {"not a broker id": 2}


def broker(**fields: object) -> bytes:
    return json.dumps({"node_id": 1, "host": "h", "port": 9092} | fields).encode()


def test_broker_key_gives_address_until_deleted() -> None:
    table = Table()
    assert table.by_snapshot(f"{BROKERS}1", broker(rack="unknown fields are fine")).address(1) == Address("h", 9092)
    assert table.by_event(f"{BROKERS}1", broker(port=9093)).address(1) == Address("h", 9093)
    assert table.by_deletion(f"{BROKERS}1", 102).address(1) is None


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"[" * 4000,
        b"1" * 4000,
        broker(node_id=2),
        broker(node_id="1"),
        broker(node_id=None),
        broker(host=""),
        broker(host="h" * 256),
        broker(host=None),
        broker(port=0),
        broker(port=65536),
        broker(port=True),
        broker(port="9092"),
        broker(port=9092.0),
        broker(note="n" * MAX_BROKER_VALUE_BYTES),
    ],
)
def test_invalid_broker_has_no_address(value: bytes) -> None:
    table = Table()
    assert table.by_snapshot(f"{BROKERS}1", value).address(1) is None
    assert table.by_event(f"{BROKERS}1", broker(), 101).address(1) is not None
    assert table.by_event(f"{BROKERS}1", value, 102).address(1) is None
    assert table.table.skipped.total() == 2


@pytest.mark.parametrize("key", ["", "x", "-1", "1/2", "2147483648"])
def test_invalid_broker_key_is_skipped(key: str) -> None:
    table = Table()
    assert table.by_event(BROKERS + key, broker()).brokers == {}
    assert table.table.skipped == {"not a broker id": 1}


def test_ownership_outlives_its_brokers_address() -> None:
    table = Table()
    table.by_event(f"{BROKERS}1", broker(), 101)
    table.by_event(f"{LEASES}t/0", b"1", 102)
    table.by_deletion(f"{BROKERS}1", 103)
    assert table.topology.owner(b"t", 0) == 1
    assert table.by_deletion(f"{LEASES}t/0", 104).owner(b"t", 0) == NO_OWNER


def test_snapshot_removes_missing_entries() -> None:
    table = Table()
    table.by_event(f"{BROKERS}1", broker(), 60)
    table.by_event(f"{LEASES}t/0", b"1", 61)
    asyncio.run(table.table.on_snapshot(Snapshot(100, 1, [])))
    assert table.topology.brokers == {}
    assert list(table.topology.ownerships()) == []


def test_restored_etcd_empties_the_table_first() -> None:
    table = Table()
    table.by_snapshot(f"{LEASES}t/0", b"1")
    table.table.on_restored()
    asyncio.run(table.table.on_snapshot(Snapshot(7, 2, [KeyValue(f"{LEASES}t/0", b"2", 5, 5, 1, 0)])))
    assert (table.topology.owner(b"t", 0), table.topology.revision, table.table.restores) == (2, 7, 1)


@pytest.mark.parametrize("prefix", ["/p", "/p/"])
def test_slash_after_the_prefix_makes_no_difference(prefix: str) -> None:
    topology = Topology()
    table = LeaseTable(EtcdClient(["127.0.0.1"]), prefix, topology)
    asyncio.run(table.on_snapshot(Snapshot(9, 1, [KeyValue(f"{LEASES}t/0", b"2", 5, 5, 1, 0)])))
    assert topology.owner(b"t", 0) == 2


def test_newer_entry_outlives_a_snapshot() -> None:
    table = Table()
    table.by_event(f"{LEASES}t/0", b"2", 150)
    table.by_event(f"{LEASES}t/1", b"2", 151)
    assert table.by_snapshot(f"{LEASES}t/0", b"1").owner(b"t", 0) == 2
    assert table.topology.owner(b"t", 1) == 2
    assert table.topology.revision == 151


CHANGES = st.lists(
    st.tuples(st.sampled_from(["a/0", "a/1", "b/0"]), st.sampled_from([b"1", b"2", b"x", None])),
    min_size=1,
    max_size=40,
)


@given(changes=CHANGES, data=st.data())
def test_load_and_later_changes_give_last_owners(changes: list[tuple[str, bytes | None]], data: st.DataObject) -> None:
    history = list(enumerate(changes, start=1))
    at = data.draw(st.integers(0, len(history)), label="loaded at")
    told_before = data.draw(st.integers(0, at), label="told by events before")
    table = Table()

    def tell(revision: int, key: str, value: bytes | None) -> None:
        if value is None:
            table.by_deletion(LEASES + key, revision)
        else:
            table.by_event(LEASES + key, value, revision)

    for revision, change in history[:told_before]:
        tell(revision, *change)
    standing = {key: (revision, value) for revision, (key, value) in history[:at]}
    kvs = [KeyValue(LEASES + key, value, 1, revision, 1, 0) for key, (revision, value) in standing.items() if value]
    asyncio.run(table.table.on_snapshot(Snapshot(at, 1, kvs)))
    for revision, change in history[at:]:
        tell(revision, *change)
    last = dict(changes)
    wanted = {key: int(value) for key, value in last.items() if value not in (None, b"x")}
    found = {f"{row.topic.decode()}/{row.partition_index}": row.owner for row in table.topology.ownerships()}
    assert found == wanted
    assert table.topology.revision <= len(history)
