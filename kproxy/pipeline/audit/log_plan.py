"""Which offsets a read of logs takes, and in what pieces: decisions alone, and the forms of what they are told.

A piece of a log is a range of offsets. A batch belongs to the range that its base offset lies in, and so to exactly
one. Only the first range of a partition takes a batch that begins before it: retention may have moved on into a batch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from kproxy.pipeline.audit.log_client import EARLIEST, LATEST, TopicPartition
from kproxy.pipeline.audit.log_connection import LogReadFailed

MAX_OFFSETS_PER_PARTITION: Final = 1_000_000
LEAST_OFFSETS_PER_PARTITION: Final = 50_000
# Where nothing is said of the size of a piece, there are at least so many of them, if the logs are long enough: a task
# costs about a tenth of a second, in which it reads some ten thousand batches.
LEAST_PIECES: Final = 16
NAMED: Final = {"earliest": EARLIEST, "latest": LATEST}

Offsets = Mapping[TopicPartition, int]


class LogRange(NamedTuple):
    """The offsets from `start` to before `end` of a partition; `is_first` of those that are read of it."""

    which: TopicPartition
    start: int
    end: int
    is_first: bool


def matching(topics: Iterable[str], pattern: str) -> list[str]:
    """The topics whose whole name matches; none of those that begin with two underscores, which are somebody's own.

    Raises LogReadFailed where there is none, or for what is no pattern.
    """
    try:
        form = re.compile(pattern)
    except re.error as error:
        raise LogReadFailed(f"{pattern!r} is no pattern for topics ({error}): write a regular expression.") from error
    found = sorted(topic for topic in topics if not topic.startswith("__") and form.fullmatch(topic))
    if not found:
        raise LogReadFailed(f"No topic matches {pattern!r}.")
    return found


def parse_offsets(text: str, option: str) -> tuple[int, Offsets]:
    """`earliest`, `latest`, or `{"topic": {"0": offset}}` in which -2 and -1 mean the same.

    The offset of what is not mentioned (EARLIEST for a start, LATEST for an end) and those that are. Raises
    LogReadFailed, in which the option is named.
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
    """As `parse_offsets` reads it."""
    by_topic: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        by_topic.setdefault(topic, {})[str(partition)] = offset
    return json.dumps(by_topic, separators=(",", ":"))


def expect_partitions(
    mentioned: Collection[TopicPartition], partitions: Collection[TopicPartition], option: str
) -> None:
    """Raises LogReadFailed where offsets are given of what is not read: most likely a name is mistyped."""
    stranger = min(set(mentioned) - set(partitions), default=None)
    if stranger is not None:
        raise LogReadFailed(f"{option} mentions {stranger}, which is not among what is to be read.")


def cut(starts: Offsets, ends: Offsets, offsets_per_partition: int | None) -> list[list[LogRange]]:
    """The pieces, each for a task of Spark's: long logs in several ranges, short ones of several partitions together.

    No piece has more offsets than `offsets_per_partition`, unless None leaves that to what there is to read.
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
