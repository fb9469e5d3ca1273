"""What a broker makes of what etcd tells: which partitions it leads, and in which epoch."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any, cast

from kproxy.broker.cluster import ClusterView
from kproxy.broker.data_dir import DataDir
from kproxy.broker.keys import Keys, TopicValue, encode_value
from kproxy.broker.leases import PartitionLeaseManager
from kproxy.broker.partition import ReplicaSettings
from kproxy.ownership.etcd import KeyValue, Snapshot, WatchEvent

KEYS = Keys("/p")


def manager_of(view: ClusterView, directory: Path) -> PartitionLeaseManager:
    data_dir = DataDir.open(directory, 1)
    return PartitionLeaseManager(
        cast(Any, None),
        view,
        data_dir,
        1,
        settings_of=lambda *_: ReplicaSettings(1, lambda: 0.0),
        on_identity_lost=lambda _: None,
    )


async def test_a_topic_that_came_and_went_while_the_watch_was_broken_is_no_error(tmp_path: Path) -> None:
    """A watch that is taken up again tells of both at once: the mirror, and the broker with it, ended at that."""
    view = ClusterView(KEYS)
    manager = manager_of(view, tmp_path)
    view.on_snapshot(Snapshot(1, 1, []))
    value = encode_value(TopicValue(uuid.uuid4(), [[1]]))
    put = WatchEvent(False, KeyValue(KEYS.topic("t"), value, 2, 2, 1, 0))
    gone = WatchEvent(True, KeyValue(KEYS.topic("t"), b"", 0, 3, 0, 0))
    view.on_events([put, gone], 3)
    assert not view.topics
    await manager.close()
