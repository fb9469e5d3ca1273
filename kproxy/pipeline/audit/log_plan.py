"""Decide which offsets of logs to read, and in which pieces.

Also parse and write offsets. Pure. A range is an interval of offsets. A batch belongs to the range that contains its
base offset, and so to exactly one. Only the first range of a partition also takes a batch that begins before it:
retention may end within a batch.
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
    """Return the topics whose whole name matches, without internal ones, which begin with two underscores.

    Raise LogReadFailed if none matches or the pattern is invalid.
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
    """Parse `earliest`, `latest`, or `{"topic": {"0": offset}}`, in which -2 and -1 mean the same.

    Return the default offset (EARLIEST for a start, LATEST for an end) and the given ones. Raise LogReadFailed, which
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
        raise LogReadFailed(f"{option} mentions {stranger}, which is not among what is to be read.")


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
