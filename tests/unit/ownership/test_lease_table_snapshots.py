"""Which snapshots of the leases contradict what was loaded before, so that etcd must have been restored."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from kproxy.etcd import EtcdClient, KeyValue, Snapshot, WatchEvent
from kproxy.ownership.leases import LeaseTable
from kproxy.routing.topology import Topology

Entry = tuple[str, bytes, int]

OWNED = ("t/0", b"1", 5)
# An entry that names no owner, and a key that names no partition.
INVALID, MISNAMED = ("t/1", b"nobody", 4), ("t/x", b"1", 4)


class Loaded:
    """A table that was loaded at revision 6, where OWNED and INVALID were."""

    def __init__(self) -> None:
        self.topology = Topology()
        # The client is never connected.
        self.table = LeaseTable(EtcdClient(["http://127.0.0.1:1"]), "/kproxy", self.topology)

    async def load(self, revision: int, *entries: Entry) -> None:
        await self.table.on_snapshot(Snapshot(revision, 1, [self.lease(*entry) for entry in entries]))

    @staticmethod
    def lease(key: str, value: bytes, revision: int) -> KeyValue:
        return KeyValue(f"/kproxy/partition-leases/{key}", value, revision, revision, 1, 0)


@pytest.mark.parametrize(
    ("entries", "revision", "restores"),
    [
        ([OWNED, INVALID], 6, 0),
        ([OWNED, INVALID, MISNAMED], 8, 0),
        ([("t/0", b"2", 7)], 8, 0),
        ([("t/0", b"1", 4)], 8, 1),
        # The table has a newer entry than this snapshot, from a re-read.
        ([("t/0", b"1", 4)], 4, 0),
    ],
    ids=["same", "invalid again", "newer", "older", "before the re-read"],
)
async def test_older_owner_shows_a_restored_etcd(entries: list[Entry], revision: int, restores: int) -> None:
    loaded = Loaded()
    await loaded.load(6, OWNED, INVALID)
    await loaded.load(revision, *entries)
    assert loaded.table.restores == restores


async def test_invalid_entry_is_logged_once_and_counted() -> None:
    loaded = Loaded()
    with capture_logs() as logs:
        await loaded.load(6, OWNED, INVALID)
        loaded.table.on_events([WatchEvent(False, loaded.lease(*INVALID))], 7)
        loaded.table.on_events([WatchEvent(False, loaded.lease(*MISNAMED))], 8)
    ignored = [log["key"].rpartition("leases/")[2] for log in logs if log["event"] == "etcd key ignored"]
    assert ignored == ["t/1", "t/x"]
    assert loaded.table.skipped.total() == 3
    assert loaded.topology.owner(b"t", 0) == 1
