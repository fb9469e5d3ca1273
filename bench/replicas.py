"""Measure replication by the log files of a topic's replicas, without asking the brokers.

A follower's file holds the same bytes as its leader's. So a follower has caught up with the leader's log of a given
time when its file is as long as the leader's was then.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

POLL_S = 0.001
QUIET_S = 0.2
SETTLE_TIMEOUT_S = 60.0


class Replicas(NamedTuple):
    """The directories of one partition's replicas."""

    leader: Path
    followers: tuple[Path, ...]


class Settled(NamedTuple):
    """The times (time.monotonic) of the last growth of any leader's log, and of any follower's."""

    leaders: float
    followers: float


def log_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.log"))


def wait_settled(partitions: list[Replicas]) -> Settled:
    """Wait until the leaders' logs are at rest and every follower has all of them. Raise SystemExit if they do not."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    leaders_at = followers_at = time.monotonic()
    before: tuple[int, int] | None = None
    while True:
        lengths = [(log_bytes(each.leader), [log_bytes(path) for path in each.followers]) for each in partitions]
        now = time.monotonic()
        sums = sum(leader for leader, _ in lengths), sum(sum(followers) for _, followers in lengths)
        if before is not None:
            leaders_at = now if sums[0] != before[0] else leaders_at
            followers_at = now if sums[1] != before[1] else followers_at
        before = sums
        equal = all(length == leader for leader, followers in lengths for length in followers)
        if equal and now - max(leaders_at, followers_at) >= QUIET_S:
            return Settled(leaders_at, followers_at)
        if now > deadline:
            raise SystemExit(f"followers did not catch up within {SETTLE_TIMEOUT_S:.0f} s: {lengths}")
        time.sleep(POLL_S * 5)


class Lags:
    """For each growth of one leader's log, the time until each follower's is as long. Reads no file and no clock."""

    def __init__(self, leader_bytes: int, followers: int) -> None:
        self._leader_bytes = leader_bytes
        # For each follower: (length that its leader had, since when), oldest first.
        self._open_growths: list[deque[tuple[int, float]]] = [deque() for _ in range(followers)]

    def leader_has(self, length: int, now: float) -> None:
        """Note the leader's length at `now`, in seconds."""
        if length != self._leader_bytes:
            self._leader_bytes = length
            for growths in self._open_growths:
                growths.append((length, now))

    def is_behind(self, follower: int) -> bool:
        """Return whether the follower, by its index, lacks bytes that the leader has."""
        return bool(self._open_growths[follower])

    def follower_has(self, follower: int, length: int, now: float) -> Iterator[float]:
        """Yield the lags, in seconds, that end with this length of the follower's log."""
        growths = self._open_growths[follower]
        while growths and growths[0][0] <= length:
            yield now - growths.popleft()[1]


class LagWatch:
    """Measures the lags of these partitions' followers while it is entered.

    `lags` are seconds, accurate to about twice the poll interval: a thread polls the lengths of the files. Each topic's
    logs must be one segment each, as they are below 1 GiB.
    """

    def __init__(self, partitions: list[Replicas]) -> None:
        self.lags: list[float] = []
        self.polls = 0
        self.seconds = 0.0
        self._pairs = [(_only_segment(each.leader), list(map(_only_segment, each.followers))) for each in partitions]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> LagWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        started = time.monotonic()
        watched = [
            (leader, followers, Lags(leader.stat().st_size, len(followers))) for leader, followers in self._pairs
        ]
        while not self._ended.is_set():
            for leader, followers, lags in watched:
                lags.leader_has(leader.stat().st_size, time.monotonic())
                for index, follower in enumerate(followers):
                    if lags.is_behind(index):
                        self.lags.extend(lags.follower_has(index, follower.stat().st_size, time.monotonic()))
            self.polls += 1
            time.sleep(POLL_S)
        self.seconds = time.monotonic() - started


def _only_segment(directory: Path) -> Path:
    segments = list(directory.glob("*.log"))
    if len(segments) != 1:
        raise SystemExit(f"{directory} holds {len(segments)} segments, not one")
    return segments[0]
