"""Find a cluster's logs and their bounds, cut them into ranges of offsets, and read them.

This module needs no Spark. All functions raise LogReadFailed with one sentence, for example if a topic may not be read;
with `unread`, a partition that cannot be read is added to it instead.

A range is an interval of offsets. A batch belongs to the range that contains its base offset, and so to exactly one.
Only the first range of a partition also takes a batch that begins before it: retention may end within a batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kproxy.pipeline.audit.judge import Batch, Bounds
from kproxy.pipeline.audit.log_client import (
    EARLIEST,
    LATEST,
    PATIENCE_S,
    LogClient,
    LogReadFailed,
    Offsets,
    TopicPartition,
    Unread,
)
from kproxy.pipeline.audit.log_reader import CheckCrc, LogRange, RangeReader, records_in
from kproxy.pipeline.kafka_access import KafkaOptions
from kproxy.routing.topology import Address

# Short, because the user waits at the start of a job.
FIRST_PATIENCE_S: Final = 10.0
ENDS_PATIENCE_S: Final = 5.0
_PAUSE_S: Final = 0.25
MAX_OFFSETS_PER_PIECE: Final = 1_000_000
LEAST_OFFSETS_PER_PIECE: Final = 50_000
# There are at least this many pieces, if the logs are long enough: a task costs about a tenth of a second, in which it
# reads about ten thousand batches.
LEAST_PIECES: Final = 16


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

    A log is cut from its offset in `first`, and is left out if it has none. `first` None: from the logs' beginnings.
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


class Chunk(NamedTuple):
    """Some headers of a log, of batches of `size` bytes. `unread`: why the rest of the range cannot be read."""

    which: TopicPartition
    batches: list[Batch]
    size: int = 0
    unread: str | None = None


def tallied(chunks: Iterable[Chunk]) -> Iterator[tuple[TopicPartition, int, str | None]]:
    """Yield the number of batches in each chunk, and why its log cannot be read."""
    return ((chunk.which, len(chunk.batches), chunk.unread) for chunk in chunks)


Page = tuple[bytes, int | None]
"""Rows of a trail as lines of text, and when they came to the trail's topic."""


@dataclass(frozen=True, slots=True)
class LogTask:
    """Read pieces of logs, in any process. `leaders`: those of the partitions when the pieces were planned.

    Executors need kafka-python for it, which is sent to them, and crc32c, without which `crc_ok` is null.
    """

    bootstrap: str
    kafka: KafkaOptions
    leaders: Mapping[TopicPartition, Address]
    patience_s: float = PATIENCE_S

    def headers(self, pieces: Iterable[Sequence[LogRange]]) -> Iterator[Chunk]:
        """Yield all headers of the pieces."""
        check = crc_check()
        for client, wanted in self._ranges(pieces):
            reader, size = RangeReader(client, wanted, check), 0
            try:
                for batches in reader.headers():
                    yield Chunk(wanted.which, batches, reader.bytes_read - size)
                    size = reader.bytes_read
            except LogReadFailed as error:
                yield Chunk(wanted.which, [], unread=str(error))

    def pages(self, pieces: Iterable[Sequence[LogRange]]) -> Iterator[Page]:
        """Yield the pages of a trail. Raise LogReadFailed."""
        for client, wanted in self._ranges(pieces):
            for record in records_in(client, wanted):
                yield record.value or b"", record.timestamp

    def _ranges(self, pieces: Iterable[Sequence[LogRange]]) -> Iterator[tuple[LogClient, LogRange]]:
        with LogClient(self.bootstrap, self.kafka, patience_s=self.patience_s) as client:
            client.leaders.update(self.leaders)
            for piece in pieces:
                for wanted in piece:
                    yield client, wanted


def crc_check() -> CheckCrc | None:
    """Return the check of checksums; None where crc32c is not installed: batches are unchecked then."""
    try:
        from kproxy_codec.record_crc import crc_is_valid
    except ImportError:
        return None
    return crc_is_valid
