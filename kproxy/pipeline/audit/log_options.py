"""Parse the options of the Spark format "kproxy_log", and cut the logs into ranges of offsets.

Each process that Spark starts for a source parses the same text. This module needs no Spark.

A range is an interval of offsets. A batch belongs to the range that contains its base offset, and so to exactly one.
Only the first range of a partition also takes a batch that begins before it: retention may end within a batch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from kproxy.pipeline.audit.log_client import EARLIEST, LATEST, LogClient, LogReadFailed, TopicPartition
from kproxy.pipeline.kafka_access import NO_OPTIONS, KafkaOptions
from kproxy.routing.topology import Address

# The prefix of options of Kafka's clients, the same as in Spark's own Kafka source.
KAFKA: Final = "kafka."
MAX_OFFSETS_PER_PARTITION: Final = 1_000_000
LEAST_OFFSETS_PER_PARTITION: Final = 50_000
# By default there are at least this many pieces, if the logs are long enough: a task costs about a tenth of a second,
# in which it reads about ten thousand batches.
LEAST_PIECES: Final = 16
NAMED: Final = {"earliest": EARLIEST, "latest": LATEST}

Offsets = Mapping[TopicPartition, int]


class LogRange(NamedTuple):
    """The offsets of a partition from `start` to before `end`; `is_first`: its first range that is read."""

    which: TopicPartition
    start: int
    end: int
    is_first: bool


def matching(topics: Iterable[str], pattern: str) -> list[str]:
    """Return the topics whose whole name matches, except internal topics, which begin with two underscores.

    Raise LogReadFailed if none matches or the pattern is invalid.
    """
    try:
        form = re.compile(pattern)
    except re.error as error:
        raise LogReadFailed(f"{pattern!r} is not a topic pattern ({error}): write a regular expression.") from error
    found = sorted(topic for topic in topics if not topic.startswith("__") and form.fullmatch(topic))
    if not found:
        raise LogReadFailed(f"No topic matches {pattern!r}.")
    return found


def parse_offsets(text: str, option: str) -> tuple[int, Offsets]:
    """Parse `earliest`, `latest`, or `{"topic": {"0": offset}}`, where -2 means earliest and -1 latest.

    Return the default offset (EARLIEST for a start, LATEST for an end) and the given ones. Raise LogReadFailed that
    names the option.
    """
    default = EARLIEST if option.startswith("start") else LATEST
    if text.strip().lower() in NAMED:
        return NAMED[text.strip().lower()], {}
    try:
        mentioned = {
            TopicPartition(topic, int(partition)): int(offset)
            for topic, offsets in json.loads(text).items()
            for partition, offset in offsets.items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise LogReadFailed(
            f'{option} is {text[:80]!r}: write earliest, latest, or JSON as in {{"topic": {{"0": 0, "1": -1}}}}.'
        ) from error
    wrong = next((each for each, offset in mentioned.items() if offset < EARLIEST), None)
    if wrong is not None:
        raise LogReadFailed(f"{option} has {mentioned[wrong]} for {wrong}: offsets begin at 0.")
    return default, mentioned


def offsets_as_json(offsets: Offsets) -> str:
    """Write offsets in the form that `parse_offsets` reads."""
    by_topic: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        by_topic.setdefault(topic, {})[str(partition)] = offset
    return json.dumps(by_topic, separators=(",", ":"))


def expect_partitions(
    mentioned: Collection[TopicPartition], partitions: Collection[TopicPartition], option: str
) -> None:
    """Raise LogReadFailed if offsets of other partitions are given: a name is probably mistyped."""
    stranger = min(set(mentioned) - set(partitions), default=None)
    if stranger is not None:
        raise LogReadFailed(f"{option} mentions {stranger}, which is not among the topics to read.")


def cut(starts: Offsets, ends: Offsets, offsets_per_partition: int | None) -> list[list[LogRange]]:
    """Cut logs into pieces, one for each Spark task: split long logs, join short ones of several partitions.

    A piece has at most `offsets_per_partition` offsets; None chooses the size by the amount to read.
    """
    total = sum(max(0, end - starts[which]) for which, end in ends.items())
    most = offsets_per_partition
    if most is None:
        most = min(max(-(-total // LEAST_PIECES), LEAST_OFFSETS_PER_PARTITION), MAX_OFFSETS_PER_PARTITION)
    pieces: list[list[LogRange]] = []
    room = 0
    for which in sorted(ends):
        start, end = starts[which], ends[which]
        for first in range(start, end, most):
            last = min(first + most, end)
            if last - first > room:
                pieces.append([])
                room = most
            pieces[-1].append(LogRange(which, first, last, first == start))
            room -= last - first
    return pieces


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
    )
}


class LogOptions(NamedTuple):
    """The logs to read, and how to read them. Exactly one of `topics` and `pattern` is set."""

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
    kafka: KafkaOptions = NO_OPTIONS

    def client(self) -> LogClient:
        """Make a client. Raise LogReadFailed as LogClient does."""
        timeout_s, patience_s = self.timeout_ms / 1000, self.patience_ms / 1000
        return LogClient(self.bootstrap, timeout_s=timeout_s, patience_s=patience_s, kafka=self.kafka)

    def partitions(self, client: LogClient) -> list[TopicPartition]:
        """Return all partitions of the selected topics. Raise LogReadFailed if a topic does not exist."""
        found = client.partitions(None if self.pattern is not None else self.topics)
        names: Iterable[str] = self.topics if self.pattern is None else matching(found, self.pattern)
        return [TopicPartition(name, index) for name in sorted(set(names)) for index in range(found[name])]


def read_options(options: Mapping[str, str]) -> LogOptions:
    """Parse options; names in any case, as in Spark. Raise LogReadFailed for unknown, wrong or missing ones."""
    given = {name.lower(): value for name, value in options.items()}
    kafka = {name.removeprefix(KAFKA): given.pop(name) for name in list(given) if name.startswith(KAFKA)}
    unknown = sorted(given.keys() - _KNOWN.keys())
    if unknown:
        raise LogReadFailed(f"There is no option {unknown[0]}; there are {', '.join(_KNOWN.values())}.")
    topics, pattern = _names(given.get("topics", "")), given.get("topicpattern")
    if bool(topics) == (pattern is not None):
        raise LogReadFailed("Name what to read by the option topics (names separated by commas) or topicPattern.")
    check_crc = given.get("checkcrc", CHECKS[0]).lower()
    if check_crc not in CHECKS:
        raise LogReadFailed(f"Option checkCrc is {check_crc!r}: write one of {', '.join(CHECKS)}.")
    per_partition = given.get("offsetsperpartition")
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
        KafkaOptions(kafka),
    )


def written(
    bootstrap: str,
    topics: Sequence[str],
    pattern: str | None,
    more: Mapping[str, str | int | None],
    kafka: Mapping[str, str] = NO_OPTIONS,
) -> dict[str, str]:
    """Return the options that are not None in Spark's form; `kafka` has options of Kafka's clients."""
    every = {"bootstrap": bootstrap, "topics": ",".join(topics) or None, "topicPattern": pattern, **more}
    every |= {f"{KAFKA}{name}": value for name, value in kafka.items()}
    return {name: str(value) for name, value in every.items() if value is not None}


def parse_bootstrap(text: str) -> tuple[Address, ...]:
    """Parse `H:P,H:P`. Raise LogReadFailed. It does not use kproxy.config, whose dependencies executors lack."""
    addresses = []
    for part in _names(text):
        host, _, port = part.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise LogReadFailed(f"Option bootstrap has {part!r}: write HOST:PORT, several separated by commas.")
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
