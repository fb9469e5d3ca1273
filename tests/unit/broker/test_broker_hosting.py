"""Opening replicas' logs: a log that cannot be opened is reported, and tried again."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kproxy.broker.cluster import ClusterView
from kproxy.broker.data_dir import DataDir
from kproxy.broker.hosted_replicas import HostedReplicas
from kproxy.broker.keys import Keys, PartitionKey, TopicValue, encode_value
from kproxy.broker.partition import ReplicaSettings

KEYS = Keys("/test")
KEY = PartitionKey("t", 0)


@pytest.fixture
def view() -> ClusterView:
    view = ClusterView(KEYS)
    view.apply_put(KEYS.topic("t"), encode_value(TopicValue(uuid.uuid4(), [[1]], {})), lease_id=0, revision=1)
    return view


@pytest.fixture
def host(tmp_path: Path, view: ClusterView) -> Iterator[HostedReplicas]:
    data_dir = DataDir.open(tmp_path, 1)
    yield HostedReplicas(view, data_dir, 1, lambda *_: ReplicaSettings(1, time.monotonic))
    data_dir.close()


async def test_unopenable_log_is_reported_once_with_remedy(
    tmp_path: Path, view: ClusterView, host: HostedReplicas
) -> None:
    """The open is tried again every few seconds, for perhaps a thousand partitions."""
    topic, checkpoint = view.topics["t"], tmp_path / "t-0" / "checkpoint.json"
    with capture_logs() as logs:
        for told in (1, 2):
            assert await host.open(KEY, topic) is not None
            host.close(KEY)
            checkpoint.write_text("{")
            for _ in range(3):
                assert await host.open(KEY, topic) is None
            assert [each["event"] for each in logs] == ["log not opened"] * told
            checkpoint.unlink()
    assert (logs[0]["directory"], "is damaged" in logs[0]["reason"]) == (str(tmp_path / "t-0"), True)
    assert "remove checkpoint.json" in logs[0]["advice"], "there is no other replica"
