"""Define the configuration of a broker, of its logs and of topics, and check what a topic sets.

A topic may set

    min.insync.replicas   from 1; how many replicas need a record before acks=all is acknowledged
    retention.bytes       size of a partition beyond which old segments are removed; negative: no limit
    retention.ms          from -1; age beyond which old segments are removed; -1: no limit
    segment.bytes         from 1 MiB; size at which a segment is full

The ranges are Apache Kafka 4.3's. A `min.insync.replicas` above the replication factor means all replicas, as in Kafka.
A few more names are accepted with their fixed value, because tools always send them. All others are refused, even if
Kafka has them: an accepted configuration without effect would mislead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from kproxy.config.etcd import EtcdOptions
from kproxy.config.tls import ListenerTls, ReplicationTls

FlushPolicy = Literal["always", "interval", "never"]
"""When appended records are flushed to the disk (fsync).

  always    before an append is acknowledged or counts for the high watermark: acknowledged records survive a power cut
  interval  by log_maintenance, every second or as configured: a power cut may lose the last records, kill -9 none
  never     when the operating system decides, and when the broker stops in good order

A thread waits for the disk, never the event loop.
"""

FLUSH_POLICIES: tuple[FlushPolicy, ...] = get_args(FlushPolicy)
DEFAULT_SEGMENT_BYTES = 1 << 30
# As in Kafka's retention.bytes and retention.ms.
NO_RETENTION_LIMIT = -1


@dataclass(frozen=True)
class LogOptions:
    """Sizes are in bytes. Retention keeps at least `retention_bytes` and `retention_ms`; -1 keeps everything."""

    segment_bytes: int = DEFAULT_SEGMENT_BYTES
    flush: FlushPolicy = "interval"
    retention_bytes: int = NO_RETENTION_LIMIT
    retention_ms: int = NO_RETENTION_LIMIT


@dataclass(frozen=True)
class BrokerConfig:
    """`kproxy broker`'s options.

    Sizes are bytes; addresses are (host, port), port 0 means any free one.

    - `advertise`: the address that clients see; None: the address listened on (port 0: the port listened on).
    - `replication_listen`: where followers fetch, under the advertised host; None: the host of `listen`, any free port.
    - `tls`: TLS for clients, without the principals of their certificates; None: plain text.
    - `replication_tls`: TLS between brokers; None: they replicate in plain text.
    - `admin`: where the admin page is served; None: nowhere.
    - `isr_lag_s`: how long a follower may lag and stay in sync (Kafka's replica.lag.time.max.ms).
    - `follower_grace_s`: how long an in-sync follower may be disconnected if enough other replicas are in sync.
    - `leader_rebalance_s`: how long this broker leads a partition before it may go back to its preferred replica.
    - `num_partitions`, `default_replication_factor`: for topics created without a number; the latter is limited by the
      number of live brokers.
    - `min_insync_replicas`: None means 2 with three replicas or more, else 1.
    - `offsets_topic_partitions`, `offsets_rewrite_bytes`: partitions of `__consumer_offsets`, and by how many bytes one
      grows before its live records are written again and the older segments removed.
    - `group_initial_rebalance_delay_s`, `group_min_session_timeout_s`: Kafka's, in seconds.
    - `segment_bytes`, `retention_bytes`, `retention_ms`: for topics without their own; -1 keeps everything.

    The rest are Kafka's limits with Kafka's defaults.
    """

    node_id: int
    data_dir: Path
    etcd: tuple[str, ...]
    listen: tuple[str, int] = ("127.0.0.1", 0)
    advertise: tuple[str, int] | None = None
    replication_listen: tuple[str, int] | None = None
    tls: ListenerTls | None = None
    replication_tls: ReplicationTls | None = None
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
    offsets_topic_partitions: int = 50
    offsets_rewrite_bytes: int = 32 << 20
    group_initial_rebalance_delay_s: float = 3.0
    group_min_session_timeout_s: float = 6.0
    etcd_timeout_s: float = 5.0
    etcd_options: EtcdOptions = field(default_factory=EtcdOptions)


MIN_INSYNC_REPLICAS = "min.insync.replicas"
RETENTION_BYTES = "retention.bytes"
RETENTION_MS = "retention.ms"
SEGMENT_BYTES = "segment.bytes"

_INT_MAX, _LONG_MAX = (1 << 31) - 1, (1 << 63) - 1
# Name -> the smallest and the largest value.
_NUMBERS = {
    MIN_INSYNC_REPLICAS: (1, _INT_MAX),
    RETENTION_BYTES: (-_LONG_MAX - 1, _LONG_MAX),
    RETENTION_MS: (-1, _LONG_MAX),
    SEGMENT_BYTES: (1 << 20, _INT_MAX),
}
# The syntax of Java's parsers; valid values have no more digits.
_NUMBER = re.compile(r"[+-]?0*[0-9]{1,19}", re.ASCII)
FIXED_CONFIGS: Mapping[str, str] = {
    "cleanup.policy": "delete",
    "compression.type": "producer",
    "message.timestamp.type": "CreateTime",
    "unclean.leader.election.enable": "false",
}
"""Configurations that apply to every topic, and may only be set to this value."""

# With this many replicas one may fail, and acks=all still means two copies.
_REPLICAS_FOR_TWO_IN_SYNC = 3


class InvalidConfig(ValueError):
    """A configuration is refused; the message gives the reason."""


def check_configs(asked: Mapping[str, str | None]) -> dict[str, str]:
    """Return the configurations in their stored form. Raises InvalidConfig for the first invalid one."""
    return {name: _check(name, value) for name, value in asked.items()}


def _check(name: str, value: str | None) -> str:
    if value is None:
        raise InvalidConfig(f"{name} has no value; omit it for the default")
    if name in _NUMBERS:
        return str(_number(name, value))
    if name not in FIXED_CONFIGS:
        known = ", ".join(sorted(_NUMBERS))
        raise InvalidConfig(f"{name} cannot be set on a topic; expected one of {known}")
    if value.strip() != FIXED_CONFIGS[name]:
        raise InvalidConfig(f"invalid value {value} of {name}; expected {FIXED_CONFIGS[name]}")
    return value.strip()


def _number(name: str, value: str) -> int:
    least, most = _NUMBERS[name]
    text = value.strip()
    number = int(text) if _NUMBER.fullmatch(text) else None
    if number is None or not least <= number <= most:
        raise InvalidConfig(f"invalid value {value} of {name}; expected a whole number from {least} to {most}")
    return number


def default_min_insync_replicas(replication_factor: int, config: BrokerConfig) -> int:
    """Return `min.insync.replicas` of a topic that does not set it."""
    if config.min_insync_replicas is not None:
        return config.min_insync_replicas
    return 2 if replication_factor >= _REPLICAS_FOR_TWO_IN_SYNC else 1


def topic_config_values(
    configs: Mapping[str, str], replication_factor: int, config: BrokerConfig
) -> list[tuple[str, str]]:
    """List a topic's configurations, effective and sorted by name."""
    values = {
        **FIXED_CONFIGS,
        "max.message.bytes": str(config.message_max_bytes),
        MIN_INSYNC_REPLICAS: str(default_min_insync_replicas(replication_factor, config)),
        RETENTION_BYTES: str(config.retention_bytes),
        RETENTION_MS: str(config.retention_ms),
        SEGMENT_BYTES: str(config.segment_bytes),
    }
    return sorted((values | dict(configs)).items())


def topic_settings(configs: Mapping[str, str], replication_factor: int, config: BrokerConfig) -> tuple[int, LogOptions]:
    """Compute min.insync.replicas and the logs' options of a topic, from its checked configurations."""
    values = dict(topic_config_values(configs, replication_factor, config))
    return min(int(values[MIN_INSYNC_REPLICAS]), replication_factor), LogOptions(
        int(values[SEGMENT_BYTES]),
        config.flush,
        max(int(values[RETENTION_BYTES]), NO_RETENTION_LIMIT),
        int(values[RETENTION_MS]),
    )
