"""Open and close the logs of the replicas on this broker, and tell followers which leader to fetch from.

States of a replica
  closed   its log is on the disk, or was never begun
  open     in `hosted`: it follows a broker or none, or leads (kproxy.broker.replica_manager)

Invariants
1. A replica's newest obeyed leadership and its failed read are kept when it is closed: once reopened, it obeys no lower
   epoch, and does not count as readable.
2. A follower follows the holder of the lease key, in the epoch of the stored state; it follows no broker while the key
   or the state is absent, the holder is not live, or the key is this broker's own.
3. Each reason why a log cannot be opened is logged once, with the remedy.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import structlog

from kproxy.broker.cluster import ClusterView, Topic
from kproxy.broker.config import LogOptions
from kproxy.broker.data_dir import DataDir
from kproxy.broker.keys import PartitionKey
from kproxy.broker.leader_epochs import NO_LEADERSHIP, Leadership
from kproxy.broker.log import Log
from kproxy.broker.partition import Partition, ReplicaSettings, Unreadable
from kproxy.broker.replication.partition_replication import NO_LEADER, Role
from kproxy.broker.segment import LogFailed

# Stop the broker first: a starting broker notices that a log is missing, and does not lead without it.
_WAY_OUT = "stop the broker, move the directory elsewhere, start it: what other replicas have is fetched from them"
_ONLY_REPLICA_WAY_OUT = (
    "stop the broker, put back what is damaged or missing, start it; or, to accept the loss, stop the broker, remove "
    "checkpoint.json in the directory, and any file that cannot be read, start it: the log then ends before what is "
    "lost, and offsets from there on are given out again"
)
_ONLY_WAY_OUT = "stop the broker, put the data directory back that was here, start it; or delete the topic"
_logger = structlog.get_logger(__name__)


@dataclass(eq=False)
class HostedReplicas:
    """Opens and closes replicas, and points them at their leaders; keys are (topic name as bytes, index).

    `on_leaders_changed` is called when a replica gets another leader or epoch, loses its leader, or is closed.
    """

    view: ClusterView
    data_dir: DataDir
    node_id: int
    settings_of: Callable[[Topic, int], ReplicaSettings]
    on_leaders_changed: Callable[[PartitionKey], None] = lambda _: None

    def __post_init__(self) -> None:
        self.hosted: dict[tuple[bytes, int], Partition] = {}
        # Of closed replicas: a leadership that is not on the disk yet, and a failed read.
        self._closed: dict[tuple[uuid.UUID, int], tuple[Leadership, Unreadable | None]] = {}
        # The reason, as logged.
        self._not_opened: dict[tuple[uuid.UUID, int], str] = {}

    def get(self, key: PartitionKey) -> Partition | None:
        return self.hosted.get((key.topic.encode(), key.partition_index))

    @property
    def not_opened(self) -> int:
        """Count the replicas whose last attempt to open failed."""
        return len(self._not_opened)

    def hosted_keys(self) -> Iterator[PartitionKey]:
        """Iterate over the open replicas; they may be closed meanwhile."""
        for topic, partition_index in list(self.hosted):
            yield PartitionKey(topic.decode(), partition_index)

    async def open(self, key: PartitionKey, topic: Topic) -> Partition | None:
        """Return the replica, opening it if needed; None if its log cannot be opened."""
        partition = self.get(key)
        if partition is not None:
            return partition
        settings, identity = self.settings_of(topic, key.partition_index), (topic.topic_id, key.partition_index)
        try:
            log, log_id = await self.data_dir.in_thread(partial(self._open_log, key, topic, settings.log_options))
        except (OSError, LogFailed) as error:
            self._log_not_opened(key, topic, str(error))
            return None
        self._not_opened.pop(identity, None)
        obeyed, unreadable = self._closed.pop(identity, (NO_LEADERSHIP, None))
        partition = Partition(*key, topic.topic_id, log, settings, log_id, obeyed=obeyed, unreadable=unreadable)
        self._log_if_replaced(key, topic, partition)
        self.hosted[topic.name.encode(), key.partition_index] = partition
        self.point_at_leader(key)
        return partition

    def _log_not_opened(self, key: PartitionKey, topic: Topic, reason: str) -> None:
        """Log each reason once, as every sweep retries."""
        identity = topic.topic_id, key.partition_index
        if self._not_opened.get(identity) != reason:
            self._not_opened[identity] = reason
            directory = self.data_dir.partition_path(topic.name, key.partition_index)
            advice = _ONLY_REPLICA_WAY_OUT if len(topic.replicas[key.partition_index]) == 1 else _WAY_OUT
            _logger.error("log not opened", **key._asdict(), directory=str(directory), reason=reason, advice=advice)

    def _open_log(self, key: PartitionKey, topic: Topic, options: LogOptions | None) -> tuple[Log, uuid.UUID]:
        """Open the log; blocks, so it runs in a thread. Raises OSError, LogFailed."""
        is_only_replica = len(topic.replicas[key.partition_index]) == 1
        log = self.data_dir.open_log(*key, topic.topic_id, options, is_only_replica=is_only_replica)
        try:
            log_id = self.data_dir.log_id_of(topic.topic_id, key.partition_index)
            if log_id is None:
                raise LogFailed(f"the log id of {log.directory} has been removed")
        except BaseException:
            log.close()
            raise
        return log, log_id

    def _log_if_replaced(self, key: PartitionKey, topic: Topic, partition: Partition) -> None:
        """Log that etcd lists another log of this broker as in sync, whose records are not here."""
        state = self.view.state(topic, key.partition_index)
        if state is not None and self.node_id in state.in_sync and partition.replica not in state.isr:
            others = sorted(set(state.in_sync) - {self.node_id})
            advice = "it is fetched from them" if others else _ONLY_WAY_OUT
            _logger.error("in-sync log lost", **key._asdict(), others_in_sync=others, advice=advice)

    def close(self, key: PartitionKey) -> None:
        """Close the replica, if it is open."""
        partition = self.hosted.pop((key.topic.encode(), key.partition_index), None)
        if partition is not None:
            partition.close()
            if partition.unreadable is not None or partition.leadership > partition.log.leadership:
                identity = partition.topic_id, partition.partition_index
                self._closed[identity] = partition.leadership, partition.unreadable
            self.on_leaders_changed(key)

    def forget(self, topic: Topic) -> None:
        """Forget a deleted topic."""
        for partition_index in range(len(topic.replicas)):
            self._closed.pop((topic.topic_id, partition_index), None)
            self._not_opened.pop((topic.topic_id, partition_index), None)

    def point_at_leader(self, key: PartitionKey) -> None:
        """Make a follower follow the leader that etcd names."""
        partition = self.get(key)
        if partition is None or partition.role is not Role.FOLLOWER:
            return
        before = (partition.leader_id, partition.leader_epoch)
        topic = self.view.topics.get(key.topic)
        ownership = self.view.ownership(*key)
        state = self.view.state(topic, key.partition_index) if topic is not None else None
        leader_id = self.view.owner(*key)
        if state is None or ownership is None or leader_id in (NO_LEADER, self.node_id):
            partition.follow_nobody()
        else:
            try:
                partition.become_follower(leader_id, Leadership(state.leader_epoch, ownership.mod_revision))
            except (OSError, LogFailed) as error:
                _logger.error("leader not followed", topic=key.topic, partition=key.partition_index, reason=str(error))
        if (partition.leader_id, partition.leader_epoch) != before:
            self.on_leaders_changed(key)
