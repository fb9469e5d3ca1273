"""Count requests and bytes by names that clients or their data choose, and show only the busiest by name.

Every name has a `Use` that requests add to. The page shows what was added since its last reading under the name, or
under OTHER. So each request counts once, at its time, and rates are right whichever names are shown.

States of a name
  unknown   it has no Use of its own: it was not used lately, or too many names are tracked
  tracked   it has one, and counts as OTHER
  shown     it has a series under its name

Transitions
  unknown -> tracked   `find`
  tracked -> shown     at once while fewer than `most` are shown; else when names are ranked and it was used more than
                       TIMES as much as a shown name since the last ranking, whose place it takes
  shown   -> tracked   its place is taken; its series ends
  tracked -> unknown   it was not used between two rankings; its Use `is_over`

Invariants
1. At most `most` names are shown and MOST_TRACKED tracked. Names beyond these share one Use until the next ranking.
2. Whoever keeps a Use calls `find` again once the Use `is_over`: nothing may be added to it after that.
3. Names are ranked when the page is read, at most once every RANK_S.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Structure, c_int64
from typing import Final, NamedTuple

OTHER: Final = b"other"
MOST_TRACKED: Final = 1_000
RANK_S: Final = 30.0
TIMES: Final = 2
# A request costs about as much as this many bytes.
REQUEST_BYTES: Final = 1_024
# Longer names cost readers of the page much time, and count as OTHER.
MOST_NAME_BYTES: Final = 255

Name = tuple[bytes, ...]


class Use(Structure):
    """The use by one name. The compiled plain path has the same fields (kproxy/plain/counters.pxi).

    For a topic, `partition` is the one with more than half of the bytes since `lead` was 0, if any, by a majority vote
    weighted with bytes; -1: none was written. It has at least `partition_bytes`.
    """

    requests: int
    received_bytes: int
    sent_bytes: int
    partition: int
    partition_bytes: int
    lead: int
    is_over: int
    _fields_ = [
        (name, c_int64)
        for name in ("requests", "received_bytes", "sent_bytes", "partition", "partition_bytes", "lead", "is_over")
    ]

    def __init__(self) -> None:
        super().__init__(partition=-1)

    def write(self, partition_index: int, nbytes: int) -> None:
        """Count a partition's batches."""
        self.received_bytes += nbytes
        if partition_index == self.partition:
            self.partition_bytes += nbytes
            self.lead += nbytes
        elif nbytes <= self.lead:
            self.lead -= nbytes
        else:
            self.partition, self.partition_bytes, self.lead = partition_index, nbytes, nbytes - self.lead


class Used(NamedTuple):
    """What a Use has counted."""

    requests: int
    received_bytes: int
    partition: int
    partition_bytes: int


class _Tracked:
    """A name's Use, and how much of it the page has counted: `weight` since the last ranking."""

    def __init__(self) -> None:
        self.use = Use()
        self.seen = (0, 0, 0)
        self.weight = 0

    def take(self) -> tuple[int, int, int]:
        """Return what was added since the last call."""
        now = (self.use.requests, self.use.received_bytes, self.use.sent_bytes)
        requests, received, sent = (each - before for each, before in zip(now, self.seen, strict=True))
        self.seen = now
        self.weight += received + sent + requests * REQUEST_BYTES
        return requests, received, sent


class Busiest:
    """The use by names of as many parts as there are `labels`. `clock` is in seconds."""

    def __init__(self, labels: Sequence[str], most: int, clock: Callable[[], float]) -> None:
        self.labels = labels
        self._others: Name = (OTHER,) * len(labels)
        self._most = most
        self._clock = clock
        self._tracked: dict[Name, _Tracked] = {}
        self._rest = _Tracked()
        self._shown: dict[Name, list[int]] = {}
        self._counts_of_others = [0, 0, 0]
        self._ranked_at = clock()

    def find(self, name: Name | None) -> Use:
        """Return the Use of a name; None stands for one that is not to be shown."""
        if name is None or any(len(part) > MOST_NAME_BYTES for part in name):
            return self._rest.use
        tracked = self._tracked.get(name)
        if tracked is None:
            if len(self._tracked) >= MOST_TRACKED:
                return self._rest.use
            tracked = self._tracked[name] = _Tracked()
            if len(self._shown) < self._most:
                self._shown[name] = [0, 0, 0]
        return tracked.use

    def uses(self) -> dict[bytes, Used]:
        """Return the use of each tracked name, by its first part."""
        uses = ((name[0], each.use) for name, each in self._tracked.items())
        return {name: Used(use.requests, use.received_bytes, use.partition, use.partition_bytes) for name, use in uses}

    def vote_anew(self) -> None:
        """Let other partitions come first in their topics."""
        for tracked in self._tracked.values():
            tracked.use.lead = 0

    def partitions(self) -> list[tuple[Name, int, int]]:
        """Return `partition` and `partition_bytes` (see Use) of each shown topic that was written to."""
        uses = [(name, self._tracked[name].use) for name in sorted(self._shown)]
        return [(name, use.partition, use.partition_bytes) for name, use in uses if use.partition >= 0]

    def read(self) -> list[tuple[Name, tuple[int, ...]]]:
        """Return requests, received and sent bytes of each shown name, and of the others."""
        for name, tracked in self._tracked.items():
            _add(self._shown.get(name, self._counts_of_others), tracked.take())
        _add(self._counts_of_others, self._rest.take())
        shown = [*sorted(self._shown.items()), (self._others, self._counts_of_others)]
        counts = [(name, tuple(count)) for name, count in shown]
        if self._clock() - self._ranked_at >= RANK_S:
            self._rank()
        return counts

    def _rank(self) -> None:
        self._ranked_at = self._clock()
        by_weight = sorted(self._tracked, key=lambda name: self._tracked[name].weight)
        least = [name for name in by_weight if name in self._shown]
        for name in reversed([name for name in by_weight if name not in self._shown]):
            if len(self._shown) >= self._most:
                if not least or self._tracked[name].weight <= TIMES * self._tracked[least[0]].weight:
                    break
                del self._shown[least.pop(0)]
            self._shown[name] = [0, 0, 0]
        for name, tracked in list(self._tracked.items()):
            if not tracked.weight and name not in self._shown:
                tracked.use.is_over = 1
                del self._tracked[name]
            tracked.weight = 0
        self._rest.use.is_over = 1
        self._rest = _Tracked()


def _add(counts: list[int], more: Sequence[int]) -> None:
    for place, each in enumerate(more):
        counts[place] += each
