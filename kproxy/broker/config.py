"""The configuration of logs, of a broker and of topics.

A topic may set

    min.insync.replicas   from 1; how many replicas need a record before acks=all is acknowledged
    retention.bytes       size of a partition beyond which old segments are removed; negative: no limit
    retention.ms          from -1; age beyond which old segments are removed; -1: no limit
    segment.bytes         from 1 MiB; size at which a segment is full

The ranges are Apache Kafka 4.3's. A `min.insync.replicas` above the replication factor means all replicas, as there. A
few more names are accepted with the value that holds anyway, because tools always send them. Everything else is
refused, known to Kafka or not: a configuration that is accepted and has no effect is worse than none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from kproxy.config.etcd import EtcdOptions

FlushPolicy = Literal["always", "interval", "never"]
"""When what was appended is brought to the disk (fsync).

always    before an append is answered, or counts for the high watermark: what is acknowledged survives a power cut
interval  by the log keeper, every second or as configured: a power cut may take what came since, kill -9 nothing
never     when the operating system sees fit, and when the broker stops in good order

Whichever it is, a thread waits for the disk, never the event loop.
"""

FLUSH_POLICIES: tuple[FlushPolicy, ...] = get_args(FlushPolicy)
DEFAULT_SEGMENT_BYTES = 1 << 30
# As in Kafka's retention.bytes and retention.ms.
NO_RETENTION_LIMIT = -1


@dataclass(frozen=True)
class LogOptions:
    """Sizes are bytes. `retention_bytes` and `retention_ms` say what is kept at least; -1 keeps everything."""

    segment_bytes: int = DEFAULT_SEGMENT_BYTES
    flush: FlushPolicy = "interval"
    retention_bytes: int = NO_RETENTION_LIMIT
    retention_ms: int = NO_RETENTION_LIMIT


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


MIN_INSYNC_REPLICAS = "min.insync.replicas"
RETENTION_BYTES = "retention.bytes"
RETENTION_MS = "retention.ms"
SEGMENT_BYTES = "segment.bytes"

_INT_MAX, _LONG_MAX = (1 << 31) - 1, (1 << 63) - 1
# Name -> the least and the largest value.
_NUMBERS = {
    MIN_INSYNC_REPLICAS: (1, _INT_MAX),
    RETENTION_BYTES: (-_LONG_MAX - 1, _LONG_MAX),
    RETENTION_MS: (-1, _LONG_MAX),
    SEGMENT_BYTES: (1 << 20, _INT_MAX),
}
# As Java's parsers take them; none in range has more digits.
_NUMBER = re.compile(r"[+-]?0*[0-9]{1,19}", re.ASCII)
FIXED_CONFIGS: Mapping[str, str] = {
    "cleanup.policy": "delete",
    "compression.type": "producer",
    "message.timestamp.type": "CreateTime",
    "unclean.leader.election.enable": "false",
}
"""What is so for every topic, and may be said."""

# From so many replicas on, one may fail and acks=all still means two copies.
_REPLICAS_FOR_TWO_IN_SYNC = 3


class InvalidConfig(ValueError):
    """Why a configuration is refused, in a sentence."""


class TopicSettings(NamedTuple):
    """What a topic's partitions go by. Sizes in bytes, times in milliseconds; -1 means no limit."""

    min_insync_replicas: int
    retention_ms: int
    retention_bytes: int
    segment_bytes: int


def check_configs(asked: Mapping[str, str | None]) -> dict[str, str]:
    """The configurations as they are to be kept. Raises InvalidConfig for the first that cannot be."""
    return {name: _check(name, value) for name, value in asked.items()}


def _check(name: str, value: str | None) -> str:
    if value is None:
        raise InvalidConfig(f"{name} has no value: leave it out for the default")
    if name in _NUMBERS:
        return str(_number(name, value))
    if name not in FIXED_CONFIGS:
        known = ", ".join(sorted(_NUMBERS))
        raise InvalidConfig(f"{name} cannot be set on a topic of this broker; {known} can")
    if value.strip() != FIXED_CONFIGS[name]:
        raise InvalidConfig(f"{name}={value}: this broker offers {name}={FIXED_CONFIGS[name]} alone")
    return value.strip()


def _number(name: str, value: str) -> int:
    least, most = _NUMBERS[name]
    text = value.strip()
    number = int(text) if _NUMBER.fullmatch(text) else None
    if number is None or not least <= number <= most:
        raise InvalidConfig(f"{name}={value}: a whole number from {least} to {most} is wanted")
    return number


def default_min_insync_replicas(replication_factor: int, config: BrokerConfig) -> int:
    """What `min.insync.replicas` is where the topic does not say."""
    if config.min_insync_replicas is not None:
        return config.min_insync_replicas
    return 2 if replication_factor >= _REPLICAS_FOR_TWO_IN_SYNC else 1


def topic_config_values(
    configs: Mapping[str, str], replication_factor: int, config: BrokerConfig
) -> list[tuple[str, str]]:
    """All that can be asked about a topic with these configurations and so many replicas, by name."""
    values = {
        **FIXED_CONFIGS,
        "max.message.bytes": str(config.message_max_bytes),
        MIN_INSYNC_REPLICAS: str(default_min_insync_replicas(replication_factor, config)),
        RETENTION_BYTES: str(config.retention_bytes),
        RETENTION_MS: str(config.retention_ms),
        SEGMENT_BYTES: str(config.segment_bytes),
    }
    return sorted((values | dict(configs)).items())


def topic_settings(configs: Mapping[str, str], replication_factor: int, config: BrokerConfig) -> TopicSettings:
    """What a topic with these configurations, checked once, and so many replicas goes by on this broker."""
    min_insync_replicas = int(configs.get(MIN_INSYNC_REPLICAS, default_min_insync_replicas(replication_factor, config)))
    return TopicSettings(
        min(min_insync_replicas, replication_factor),
        int(configs.get(RETENTION_MS, config.retention_ms)),
        max(int(configs.get(RETENTION_BYTES, config.retention_bytes)), -1),
        int(configs.get(SEGMENT_BYTES, config.segment_bytes)),
    )
