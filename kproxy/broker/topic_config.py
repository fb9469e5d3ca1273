"""A topic's configuration: the names that may be set, to what, and what that means for each of its partitions.

    min.insync.replicas   from 1 on; how many replicas have to have what is acknowledged with acks=all
    retention.bytes       a partition's size beyond which old segments go; negative: none goes for its size
    retention.ms          from -1 on; the age beyond which old segments go; -1: none goes for its age
    segment.bytes         from 1 MiB on; the size at which a segment is full

Ranges are those of Apache Kafka 4.3, and so is what is made of a `min.insync.replicas` above the replication factor:
all replicas. A few names more are taken where they say what is so anyway, because tools send them always. Everything
else is refused, known to Kafka or not: a configuration that was taken and then does nothing is worse than none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from kproxy.broker.config import BrokerConfig

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


def values_of(configs: Mapping[str, str], replication_factor: int, config: BrokerConfig) -> list[tuple[str, str]]:
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


def settings_of(configs: Mapping[str, str], replication_factor: int, config: BrokerConfig) -> TopicSettings:
    """What a topic with these configurations, checked once, and so many replicas goes by on this broker."""
    min_insync_replicas = int(configs.get(MIN_INSYNC_REPLICAS, default_min_insync_replicas(replication_factor, config)))
    return TopicSettings(
        min(min_insync_replicas, replication_factor),
        int(configs.get(RETENTION_MS, config.retention_ms)),
        max(int(configs.get(RETENTION_BYTES, config.retention_bytes)), -1),
        int(configs.get(SEGMENT_BYTES, config.segment_bytes)),
    )
