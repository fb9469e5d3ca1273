"""Find a cluster's logs and their bounds, and read batch headers in this process.

This module needs no Spark. All functions raise LogReadFailed with one sentence, for example if a topic may not be read;
with `unread`, a partition that cannot be read is added to it instead. `kafka`: options of Kafka's clients for TLS and
SASL.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from kproxy.pipeline.audit.judge import Batch, Bounds
from kproxy.pipeline.audit.log_client import EARLIEST, LATEST, LogClient, LogReadFailed, TopicPartition
from kproxy.pipeline.audit.log_options import (
    LogOptions,
    LogRange,
    Offsets,
    cut,
    expect_partitions,
    parse_bootstrap,
    parse_offsets,
    read_options,
    written,
)
from kproxy.pipeline.audit.log_reader import CheckCrc, RangeReader, Row
from kproxy.pipeline.kafka_access import NO_OPTIONS

# Short, because the user waits at the start of a job.
FIRST_PATIENCE_MS: Final = 10_000
TOPICS_TIMEOUT_S: Final = 5.0
ENDS_PATIENCE_S: Final = 5.0
_PAUSE_S: Final = 0.25


Unread = dict[TopicPartition, str]
"""The reasons by partition, for those without a leader or that brokers refuse to read. Functions add to it."""


class TooLarge(Exception):
    """There is more to read than the given bounds allow."""


def existing(bootstrap: str, topics: Collection[str], kafka: Mapping[str, str] = NO_OPTIONS) -> tuple[str, ...]:
    """Return the topics among `topics` that exist, sorted.

    A topic that Metadata does not list may be hidden, so brokers are asked for it by name and must deny that it exists.
    """
    # Imported here, because executors lack its dependencies.
    from kproxy.config.parsing import is_topic_name

    with LogClient(
        parse_bootstrap(bootstrap),
        timeout_s=TOPICS_TIMEOUT_S,
        patience_s=2 * TOPICS_TIMEOUT_S,
        kafka=kafka,
    ) as client:
        there = set(topics) & client.partitions(None).keys()
        hidden = [topic for topic in topics if topic not in there and is_topic_name(topic)]
        if hidden:
            there |= client.partitions_if_any(hidden).keys()
    return tuple(sorted(there))


def ends_of(
    bootstrap: str, topics: Sequence[str], kafka: Mapping[str, str] = NO_OPTIONS, unread: Unread | None = None
) -> Offsets:
    """Return where the logs of all partitions of the topics end now."""
    options = _quick(bootstrap, topics, kafka)
    with options.client() as client:
        return client.list_offsets(_but(options.partitions(client), unread), LATEST, unread)


def _but(partitions: Iterable[TopicPartition], unread: Unread | None) -> list[TopicPartition]:
    return [which for which in partitions if not unread or which not in unread]


def offsets_at(
    bootstrap: str, topics: Sequence[str], from_ms: int, ends: Offsets, kafka: Mapping[str, str] = NO_OPTIONS
) -> Offsets:
    """Return the first offsets with timestamps at `from_ms` or later; the end if there is none."""
    with _quick(bootstrap, topics, kafka).client() as client:
        found = client.list_offsets(ends, from_ms)
    return {which: end if found[which] < 0 else min(found[which], end) for which, end in ends.items()}


def _quick(bootstrap: str, topics: Sequence[str], kafka: Mapping[str, str]) -> LogOptions:
    return read_options(written(bootstrap, topics, None, {"patienceMs": FIRST_PATIENCE_MS}, kafka))


def bounds_now(
    bootstrap: str,
    topics: Sequence[str],
    compacted: Sequence[str] | None = None,
    kafka: Mapping[str, str] = NO_OPTIONS,
    unread: Unread | None = None,
) -> dict[TopicPartition, Bounds]:
    """Return the bounds of all partitions of the topics. `compacted`: the compacted topics; None to ask the brokers."""
    options = read_options(written(bootstrap, topics, None, {}, kafka))
    with options.client() as client:
        partitions = _but(options.partitions(client), unread)
        leaves_holes = client.compacted(topics) if compacted is None else set(compacted)
        ends = client.list_offsets(partitions, LATEST, unread)
        starts = client.list_offsets(ends, EARLIEST, unread)
        ids = client.topic_ids
    return {
        which: Bounds(starts[which], ends[which], which.topic in leaves_holes, ids.get(which.topic)) for which in starts
    }


def ends_behind(
    acknowledged: Offsets,
    ask: Callable[[], Offsets],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Offsets:
    """Call `ask` until the ends that it returns reach `acknowledged`, for at most ENDS_PATIENCE_S.

    Records acknowledged with acks=1 become readable a little later. Partitions that `ask` does not return are not
    awaited.
    """
    deadline = clock() + ENDS_PATIENCE_S
    while True:
        ends = ask()
        if clock() >= deadline or all(ends.get(which, behind) >= behind for which, behind in acknowledged.items()):
            return ends
        sleep(_PAUSE_S)


def starts_at_or_before(first: Offsets, ends: Offsets) -> Offsets:
    """Return the starts of reading: the `first` offset that is needed, else the end."""
    return {which: min(first.get(which, end), end) for which, end in ends.items()}


def plan(options: LogOptions, client: LogClient, unread: Unread | None = None) -> list[list[LogRange]]:
    """Cut the logs into pieces; afterwards the client knows the leaders."""
    latest = client.list_offsets(_but(options.partitions(client), unread), LATEST, unread)
    earliest = client.list_offsets(latest, EARLIEST, unread)
    starts = _resolve(options.start_offsets, "startOffsets", earliest, latest)
    ends = _resolve(options.end_offsets, "endOffsets", earliest, latest)
    return cut(starts, ends, options.offsets_per_partition)


def _resolve(text: str, option: str, earliest: Offsets, latest: Offsets) -> dict[TopicPartition, int]:
    """Return an offset for each partition, which is never before its log's beginning."""
    default, mentioned = parse_offsets(text, option)
    expect_partitions(mentioned, earliest, option)
    named = {EARLIEST: earliest, LATEST: latest}
    resolved = {}
    for which, begins in earliest.items():
        offset = mentioned.get(which, default)
        resolved[which] = max(begins, named[offset][which] if offset in named else offset)
    return resolved


def headers_in(options: LogOptions, client: LogClient, wanted: LogRange) -> Iterator[list[Row]]:
    """Yield the headers of the batches in a range."""
    yield from RangeReader(client, wanted, options.max_bytes, _crc_check(options.check_crc)).rows()


def read_headers(
    options: LogOptions,
    most_batches: int | None = None,
    most_bytes: int | None = None,
    unread: Unread | None = None,
) -> dict[TopicPartition, list[Batch]]:
    """Read all headers in this process, by topic and partition. Raise TooLarge beyond the bounds."""
    read: dict[TopicPartition, list[Batch]] = defaultdict(list)
    batches = size = 0
    with options.client() as client:
        for wanted in (each for piece in plan(options, client, unread) for each in piece):
            try:
                for rows in headers_in(options, client, wanted):
                    batches += len(rows)
                    size += sum(row[8] for row in rows)
                    if _exceeds(batches, most_batches) or _exceeds(size, most_bytes):
                        raise TooLarge
                    read[wanted.which] += [Batch(*row[:6], row[9], row[11]) for row in rows]
            except LogReadFailed as error:
                if unread is None:
                    raise
                unread[wanted.which] = str(error)
    return read


def _exceeds(amount: int, most: int | None) -> bool:
    return most is not None and amount > most


def _crc_check(option: str) -> CheckCrc | None:
    if option == "false":
        return None
    try:
        from kproxy_codec.record_crc import crc_is_valid
    except ImportError as error:
        if option == "auto":
            return None
        raise LogReadFailed(
            "An executor has no crc32c, so batches cannot be checked: install it there, or set option checkCrc to auto."
        ) from error
    return crc_is_valid
