"""The broker's view of the cluster never moves back, whichever watch reports first, and survives unreadable values."""

from __future__ import annotations

import asyncio
import json
import uuid

import pytest
from structlog.testing import capture_logs

from kproxy.broker.cluster import NO_OWNER, Change, ClusterView, Kind
from kproxy.broker.keys import Keys, ReplicaKey
from kproxy.etcd import KeyValue, Snapshot, WatchEvent

TOPIC_ID = uuid.UUID(int=5)
LOG_ID = uuid.UUID(int=6)
KEYS = Keys("/p/")
LEASE = KEYS.lease("t", 0)


def kv(key: str, value: object, revision: int, lease_id: int = 0) -> KeyValue:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return KeyValue(key, data, revision, revision, 1, lease_id)


def put(key: str, value: object, revision: int, lease_id: int = 0) -> WatchEvent:
    return WatchEvent(False, kv(key, value, revision, lease_id))


def delete(key: str, revision: int) -> WatchEvent:
    return WatchEvent(True, KeyValue(key, b"", 0, revision, 0, 0))


def broker(node_id: int, revision: int = 1, lease_id: int = 7) -> KeyValue:
    value = {"node_id": node_id, "host": "h", "port": 9, "replication_port": 9, "log_id": str(LOG_ID)}
    return kv(KEYS.broker(node_id), value, revision, lease_id)


def topic(revision: int = 1, topic_id: uuid.UUID = TOPIC_ID) -> KeyValue:
    return kv(KEYS.topic("t"), {"topic_id": str(topic_id), "replicas": [[1], [2]], "configs": {}}, revision)


def state(topic_id: uuid.UUID = TOPIC_ID, **changes: object) -> KeyValue:
    value = {"leader_epoch": 3, "isr": [[1, str(LOG_ID)]], "topic_id": str(topic_id), "version": 2}
    return kv(KEYS.state("t", 0), value | changes, 4)


class Observed:
    """A view and the changes that it reported."""

    def __init__(self, *kvs: KeyValue, revision: int = 10) -> None:
        self.view = ClusterView(KEYS)
        self.changes: list[Change] = []
        self.view.subscribe(self.changes.append)
        self.view.on_snapshot(Snapshot(revision, 1, list(kvs)))
        self.changes.clear()

    def tell(self, *events: WatchEvent) -> None:
        self.view.on_events(list(events), events[-1].kv.mod_revision)


def test_snapshot_is_read_and_reported_once() -> None:
    view = ClusterView(KEYS)
    changes: list[Change] = []
    view.subscribe(changes.append)
    view.on_snapshot(Snapshot(10, 1, [broker(1), topic(), state(), kv(LEASE, b"1", 5, 7)]))
    assert changes == [Change(Kind.SNAPSHOT)]
    assert view.owner("t", 0) == 1
    assert view.owner("t", 1) == NO_OWNER
    found = view.topics["t"]
    assert view.state(found, 0) == (3, [ReplicaKey(1, LOG_ID)], TOPIC_ID, 4)
    assert view.topic_by_id(TOPIC_ID.bytes) == found


def test_dead_owner_owns_nothing() -> None:
    observed = Observed(topic(), kv(LEASE, b"1", 5, 7))
    assert observed.view.owner("t", 0) == NO_OWNER
    assert observed.view.ownership("t", 0) is not None


def test_owner_of_a_deleted_namesake_owns_nothing() -> None:
    observed = Observed(broker(1), topic(), kv(LEASE, b"1", 5, 7))
    observed.tell(delete(KEYS.topic("t"), 11))
    observed.tell(WatchEvent(False, topic(12, uuid.UUID(int=6))))
    assert observed.view.owner("t", 0) == NO_OWNER
    observed.tell(delete(LEASE, 13), put(LEASE, b"1", 14, 7))
    assert observed.view.owner("t", 0) == 1


def test_older_deletion_does_not_undo_our_put() -> None:
    observed = Observed(broker(1), topic(), kv(LEASE, b"1", 5, 3))
    assert observed.view.apply_put(LEASE, b"1", lease_id=7, revision=12)
    observed.tell(delete(LEASE, 11))
    assert observed.view.owner("t", 0) == 1
    observed.tell(put(LEASE, b"1", 12, 7))
    assert [change.kind for change in observed.changes] == [Kind.OWNER], "the put was told twice"


def test_late_echo_does_not_undo_newer_deletion() -> None:
    observed = Observed(broker(1), topic())
    observed.tell(put(LEASE, b"1", 12, 7), delete(LEASE, 13))
    assert not observed.view.apply_put(LEASE, b"1", lease_id=7, revision=12)
    assert observed.view.ownership("t", 0) is None


def test_state_of_earlier_topic_counts_as_absent() -> None:
    view = Observed(topic(), state(uuid.UUID(int=9))).view
    assert view.state(view.topics["t"], 0) is None


def test_deletion_of_topic_reports_its_last_state() -> None:
    observed = Observed(topic())
    observed.tell(delete(KEYS.topic("t"), 11))
    assert [change.deleted.topic_id for change in observed.changes if change.deleted] == [TOPIC_ID]
    assert observed.view.topic_by_id(TOPIC_ID.bytes) is None


def test_topic_missing_from_snapshot_is_not_deleted() -> None:
    """An etcd restored empty must not make brokers remove their logs."""
    observed = Observed(topic())
    observed.view.on_restored()
    observed.view.on_snapshot(Snapshot(2, 9, []))
    assert observed.changes == [Change(Kind.RESTORED), Change(Kind.SNAPSHOT)]


def test_unreadable_entry_is_skipped() -> None:
    observed = Observed(
        kv(LEASE, b"one", 2),
        kv(KEYS.leases + "t/01", b"1", 2),
        kv(KEYS.leases + "t/-1", b"1", 2),
        kv(KEYS.leases + "t/99999999999", b"1", 2),
        kv(KEYS.leases + "0", b"1", 2),
        kv(KEYS.topic("bad"), b"{", 2),
        kv(KEYS.topic("empty"), {"topic_id": str(TOPIC_ID), "replicas": [], "configs": {}}, 2),
        kv(KEYS.topic("no configs"), {"topic_id": str(TOPIC_ID), "replicas": [[1]]}, 2),
        kv(KEYS.broker(3), {"node_id": 3, "host": "h", "port": 9, "replication_port": 9}, 2),
        kv(KEYS.broker(1) + "x", b"", 2),
        broker(2),
    )
    assert list(observed.view.brokers) == [2]
    assert observed.view.topics == {}
    assert observed.view.ownership("t", 0) is None


@pytest.mark.parametrize("changes", [{"version": 1}, {"version": 3}, {"topic_id": None}, {"isr": [1]}])
def test_unreadable_state_counts_as_absent(changes: dict[str, object]) -> None:
    with capture_logs() as logs:
        view = Observed(topic(), state(**changes), kv(LEASE, b"1", 5, 7), broker(1)).view
    assert view.state(view.topics["t"], 0) is None
    assert (view.owner("t", 0), [each["key"] for each in logs]) == (1, [KEYS.state("t", 0)])


def test_owner_replaced_by_unreadable_value_is_none() -> None:
    observed = Observed(broker(1), topic(), kv(LEASE, b"1", 5, 7))
    observed.tell(put(LEASE, b"?", 11))
    assert observed.view.owner("t", 0) == NO_OWNER


async def test_waiting_ends_with_change_or_timeout() -> None:
    observed = Observed(broker(1), broker(2), topic(), kv(LEASE, b"1", 5, 7))
    waiting = asyncio.create_task(observed.view.wait_until(lambda: observed.view.is_fully_owned("t"), 5))
    await asyncio.sleep(0)
    observed.tell(put(KEYS.lease("t", 1), b"2", 11, 8))
    assert await waiting
    assert not await observed.view.wait_until(lambda: False, 0.01)
