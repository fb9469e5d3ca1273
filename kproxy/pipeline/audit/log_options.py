"""The options of the formats "kproxy_log" and "kproxy_bounds".

Each process that Spark starts for a source parses the same text. Nothing here needs Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from kproxy.pipeline.audit.log_client import LogClient, TopicPartition
from kproxy.pipeline.audit.log_connection import LogReadFailed
from kproxy.pipeline.audit.log_plan import matching
from kproxy.routing.topology import Address

DEFAULT_MAX_BYTES: Final = 4 << 20
DEFAULT_TIMEOUT_MS: Final = 10_000
DEFAULT_PATIENCE_MS: Final = 60_000
CHECKS: Final = ("auto", "true", "false")

_KNOWN: Final = {
    name.lower(): name
    for name in (
        "bootstrap",
        "topics",
        "topicPattern",
        "startOffsets",
        "endOffsets",
        "offsetsPerPartition",
        "maxBytes",
        "timeoutMs",
        "patienceMs",
        "checkCrc",
        "compactedTopics",
    )
}


class LogOptions(NamedTuple):
    """What to read, and how. Exactly one of `topics` and `pattern` is set."""

    bootstrap: tuple[Address, ...]
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    start_offsets: str = "earliest"
    end_offsets: str = "latest"
    offsets_per_partition: int | None = None
    max_bytes: int = DEFAULT_MAX_BYTES
    timeout_ms: int = DEFAULT_TIMEOUT_MS
    patience_ms: int = DEFAULT_PATIENCE_MS
    check_crc: str = CHECKS[0]
    compacted_topics: tuple[str, ...] | None = None

    def client(self) -> LogClient:
        return LogClient(self.bootstrap, timeout_s=self.timeout_ms / 1000, patience_s=self.patience_ms / 1000)

    def partitions(self, client: LogClient) -> list[TopicPartition]:
        """Return all partitions of the selected topics. Raise LogReadFailed if a topic does not exist."""
        found = client.partitions(None if self.pattern is not None else self.topics)
        names: Iterable[str] = self.topics if self.pattern is None else matching(found, self.pattern)
        return [TopicPartition(name, index) for name in sorted(set(names)) for index in range(found[name])]


def read_options(options: Mapping[str, str]) -> LogOptions:
    """Parse options; names in any case, as in Spark. Raise LogReadFailed for unknown, wrong or missing ones."""
    given = {name.lower(): value for name, value in options.items()}
    unknown = sorted(given.keys() - _KNOWN.keys())
    if unknown:
        raise LogReadFailed(f"There is no option {unknown[0]}; there are {', '.join(_KNOWN.values())}.")
    topics, pattern = _names(given.get("topics", "")), given.get("topicpattern")
    if bool(topics) == (pattern is not None):
        raise LogReadFailed("Say what to read: either by option topics (names, commas between) or topicPattern.")
    check_crc = given.get("checkcrc", CHECKS[0]).lower()
    if check_crc not in CHECKS:
        raise LogReadFailed(f"Option checkCrc is {check_crc!r}: write one of {', '.join(CHECKS)}.")
    per_partition = given.get("offsetsperpartition")
    compacted = given.get("compactedtopics")
    return LogOptions(
        parse_bootstrap(given.get("bootstrap", "")),
        topics,
        pattern,
        given.get("startoffsets", "earliest"),
        given.get("endoffsets", "latest"),
        None if per_partition is None else _positive(given, "offsetsPerPartition", 0),
        _positive(given, "maxBytes", DEFAULT_MAX_BYTES),
        _positive(given, "timeoutMs", DEFAULT_TIMEOUT_MS),
        _positive(given, "patienceMs", DEFAULT_PATIENCE_MS),
        check_crc,
        None if compacted is None else _names(compacted),
    )


def written(
    bootstrap: str, topics: Sequence[str], pattern: str | None, more: Mapping[str, str | int | None]
) -> dict[str, str]:
    """Return the options in Spark's form, without those that are None."""
    every = {"bootstrap": bootstrap, "topics": ",".join(topics) or None, "topicPattern": pattern, **more}
    return {name: str(value) for name, value in every.items() if value is not None}


def parse_bootstrap(text: str) -> tuple[Address, ...]:
    """Parse `H:P,H:P`. Raise LogReadFailed. Executors lack kproxy.config's dependencies, so it is done here."""
    addresses = []
    for part in _names(text):
        host, _, port = part.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise LogReadFailed(f"Option bootstrap has {part!r}: write HOST:PORT, several with commas between.")
        addresses.append(Address(host.strip("[]"), int(port)))
    if not addresses:
        raise LogReadFailed("Option bootstrap is missing: the address of a kproxy or of a Kafka cluster, HOST:PORT.")
    return tuple(addresses)


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def _positive(given: Mapping[str, str], name: str, default: int) -> int:
    text = given.get(name.lower(), str(default)).strip()
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) < 1 << 31:
        raise LogReadFailed(f"Option {name} is {text!r}: write a number from 1 to 2147483647.")
    return int(text)
