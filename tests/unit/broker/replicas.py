"""Make one replica of a partition with a real log, led where the test wants it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from kproxy.broker.config import LogOptions
from kproxy.broker.leader_epochs import Leadership
from kproxy.broker.log import Log
from kproxy.broker.partition import Partition, ReplicaSettings
from kproxy.broker.replication.partition_replication import Isr
from kproxy.broker.writer_fence import KeptFence
from tests.support.brokers.replica_group import ISR_LAG_S, TOPIC_ID, Fence, Group, on_disk


def replica(
    directory: Path,
    node_id: int = 1,
    index: int = 0,
    *,
    topic: str = "t",
    topic_id: uuid.UUID = TOPIC_ID,
    clock: Callable[[], float] = time.monotonic,
    min_isr: int = 1,
    **options: Any,
) -> Partition:
    """Open a replica, which follows nobody yet; `options` are its log's."""
    settings = ReplicaSettings(node_id, clock, ISR_LAG_S, min_isr)
    log = Log.open(directory, options=LogOptions(**options))
    return Partition(topic, index, topic_id, log, settings, on_disk(node_id).log_id)


def lead(partition: Partition, *in_sync: int, epoch: int = 0, token: int = 1, fence: Any = None) -> Partition:
    """Let it lead; in sync are these brokers, in this order of preference, or it alone."""
    replicas = in_sync or (partition.replica.node_id,)
    isr = Isr(frozenset(map(on_disk, replicas)), token)
    partition.become_leader(Leadership(epoch, token), replicas, isr, fence or Fence(), KeptFence())
    return partition


@contextmanager
def reopened(log: Log) -> Iterator[Log]:
    """Close the log, and open it again for as long as the block runs."""
    log.close()
    with closing(Log.open(log.directory, options=log.options)) as again:
        yield again


def fetch(group: Group, *node_ids: int) -> None:
    """Let these followers fetch, one after the other."""
    for node_id in node_ids:
        group.fetch(node_id)
