"""Find a cluster's logs and their bounds, cut them into ranges of offsets, and read batch headers in this process.

This module needs no Spark. All functions raise LogReadFailed with one sentence, for example if a topic may not be read;
with `unread`, a partition that cannot be read is added to it instead.

A range is an interval of offsets. A batch belongs to the range that contains its base offset, and so to exactly one.
Only the first range of a partition also takes a batch that begins before it: retention may end within a batch.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Final

from kproxy.pipeline.audit.judge import Batch, Bounds
from kproxy.pipeline.audit.log_client import (
    EARLIEST,
    LATEST,
    LogClient,
    LogReadFailed,
    Offsets,
    TopicPartition,
    Unread,
)
from kproxy.pipeline.audit.log_reader import CheckCrc, LogRange, RangeReader

# Short, because the user waits at the start of a job.
FIRST_PATIENCE_S: Final = 10.0
ENDS_PATIENCE_S: Final = 5.0
_PAUSE_S: Final = 0.25
MAX_OFFSETS_PER_PIECE: Final = 1_000_000
LEAST_OFFSETS_PER_PIECE: Final = 50_000
# There are at least this many pieces, if the logs are long enough: a task costs about a tenth of a second, in which it
# reads about ten thousand batches.
LEAST_PIECES: Final = 16


class TooLarge(Exception):
    """There is more to read than the given bounds allow."""


def existing(client: LogClient, topics: Collection[str]) -> tuple[str, ...]:
    """Return the topics among `topics` that exist, sorted.

    A topic that Metadata does not list may be hidden, so brokers are asked for it by name and must deny that it exists.
    """
    # Imported here, because executors lack its dependencies.
    from kproxy.config.parsing import is_topic_name

    there = set(topics) & client.partitions(None).keys()
    hidden = [topic for topic in topics if topic not in there and is_topic_name(topic)]
    if hidden:
        there |= client.partitions_if_any(hidden).keys()
    return tuple(sorted(there))


def ends_of(client: LogClient, topics: Collection[str], unread: Unread | None = None) -> Offsets:
    """Return where the logs of all partitions of the topics end now."""
    return client.list_offsets(_partitions(client, topics, unread), LATEST, unread, FIRST_PATIENCE_S)


def _partitions(client: LogClient, topics: Collection[str], unread: Unread | None) -> list[TopicPartition]:
    found = client.partitions(topics)
    every = [TopicPartition(name, index) for name in sorted(set(topics)) for index in range(found[name])]
    return [which for which in every if not unread or which not in unread]


def offsets_at(client: LogClient, from_ms: int, ends: Offsets) -> Offsets:
    """Return the first offsets with timestamps at `from_ms` or later; the end if there is none."""
    found = client.list_offsets(ends, from_ms, patience_s=FIRST_PATIENCE_S)
    return {which: end if found[which] < 0 else min(found[which], end) for which, end in ends.items()}


def bounds_now(
    client: LogClient, topics: Collection[str], compacted: Sequence[str] | None = None, unread: Unread | None = None
) -> dict[TopicPartition, Bounds]:
    """Return the bounds of all partitions of the topics. `compacted`: the compacted topics; None to ask the brokers."""
    partitions = _partitions(client, topics, unread)
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


def plan(
    client: LogClient,
    first: Offsets | None,
    ends: Offsets,
    most: int | None = None,
    unread: Unread | None = None,
) -> list[list[LogRange]]:
    """Cut the logs up to `ends` into pieces; afterwards the client knows the leaders.

    They begin at the `first` offsets that are needed, at their ends where none is; None: at the logs' beginnings.
    """
    if not ends:
        return []
    starts = client.list_offsets(ends, EARLIEST, unread)
    if first is not None:
        starts = {which: max(begin, min(first.get(which, ends[which]), ends[which])) for which, begin in starts.items()}
    return cut(starts, {which: ends[which] for which in starts}, most)


def cut(starts: Offsets, ends: Offsets, most: int | None) -> list[list[LogRange]]:
    """Cut logs into pieces, one for each Spark task: split long logs, join short ones of several partitions.

    A piece has at most `most` offsets; None chooses the size by the amount to read.
    """
    if most is None:
        total = sum(max(0, end - starts[which]) for which, end in ends.items())
        most = min(max(-(-total // LEAST_PIECES), LEAST_OFFSETS_PER_PIECE), MAX_OFFSETS_PER_PIECE)
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


def read_headers(
    client: LogClient,
    first: Offsets | None,
    ends: Offsets,
    most_batches: int | None = None,
    most_bytes: int | None = None,
    unread: Unread | None = None,
) -> dict[TopicPartition, list[Batch]]:
    """Read all headers that `plan` names, by topic and partition. Raise TooLarge beyond the bounds."""
    read: dict[TopicPartition, list[Batch]] = defaultdict(list)
    batches = size = 0
    check = crc_check()
    for wanted in (each for piece in plan(client, first, ends, unread=unread) for each in piece):
        try:
            reader = RangeReader(client, wanted, check)
            for headers in reader.headers():
                batches += len(headers)
                if _exceeds(batches, most_batches) or _exceeds(size + reader.bytes_read, most_bytes):
                    raise TooLarge
                read[wanted.which] += headers
            size += reader.bytes_read
        except LogReadFailed as error:
            if unread is None:
                raise
            unread[wanted.which] = str(error)
    return read


def _exceeds(amount: int, most: int | None) -> bool:
    return most is not None and amount > most


def crc_check() -> CheckCrc | None:
    """Return the check of checksums; None where crc32c is not installed: batches are unchecked then."""
    try:
        from kproxy_codec.record_crc import crc_is_valid
    except ImportError:
        return None
    return crc_is_valid
