"""What a reference broker is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kproxy.broker.log_options import DEFAULT_SEGMENT_BYTES, NO_RETENTION_LIMIT, FlushPolicy, LogOptions
from kproxy.config.etcd import EtcdOptions


@dataclass(frozen=True)
class BrokerConfig:
    """`kproxy broker`'s options. Sizes are bytes; addresses are (host, port), port 0 means any free one.

    `advertise` is what clients are told, the address listened on where it is None (port 0: the port listened on).
    `replication_listen` is where other brokers' followers fetch, under the host that is advertised; None: the host of
    `listen`, any free port. `admin`: where the admin page is served; None: nowhere. `isr_lag_s`: how long a follower
    may go without having caught up and be in sync (Kafka's replica.lag.time.max.ms). `follower_grace_s`: how long it
    may stay away when its connection has broken, where enough are in sync without it. `leader_rebalance_s`: how long it
    leads in the place of the first replica, which is back.
    `num_partitions` and `default_replication_factor` are for topics created without a number; of the latter there are
    fewer where fewer brokers live. `min_insync_replicas` is 2 where there are three replicas or more, else 1, if None.
    `segment_bytes`, `retention_bytes` and `retention_ms` are for topics that do not say their own; -1 keeps everything.
    The rest are Kafka's limits at Kafka's defaults.
    """

    node_id: int
    data_dir: Path
    etcd: tuple[str, ...]
    listen: tuple[str, int] = ("127.0.0.1", 0)
    advertise: tuple[str, int] | None = None
    replication_listen: tuple[str, int] | None = None
    admin: tuple[str, int] | None = None
    prefix: str = "/kafscale"
    lease_ttl_s: int = 10
    isr_lag_s: float = 10.0
    follower_grace_s: float = 0.5
    leader_rebalance_s: float = 60.0
    num_partitions: int = 1
    default_replication_factor: int = 1
    min_insync_replicas: int | None = None
    auto_create_topics: bool = True
    message_max_bytes: int = 1_048_588
    fetch_max_bytes: int = 57_671_680
    max_frame_bytes: int = 100 << 20
    max_connections: int = 10_000
    segment_bytes: int = DEFAULT_SEGMENT_BYTES
    flush: FlushPolicy = "interval"
    flush_interval_s: float = 1.0
    retention_bytes: int = NO_RETENTION_LIMIT
    retention_ms: int = NO_RETENTION_LIMIT
    retention_check_interval_s: float = 10.0
    etcd_timeout_s: float = 5.0
    etcd_options: EtcdOptions = field(default_factory=EtcdOptions)

    @property
    def log_options(self) -> LogOptions:
        """What holds for a topic that says nothing else."""
        return LogOptions(self.segment_bytes, self.flush, self.retention_bytes, self.retention_ms)
