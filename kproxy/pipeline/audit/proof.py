"""Find the times that trails do not prove, because rows are missing or a trail has no end.

A `TrailPart` summarizes consecutive rows of one trail. Parts can be joined, so different processes may read ranges of a
trail. All functions but `merge` are pure. Times are milliseconds since the epoch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, NamedTuple, Protocol, Self, TypeVar

from kproxy.pipeline.audit.columns import GAP, TAIL

# The interval assumed for a trail whose first row, which has it, is lost: the longest that can be configured
# (audit.interval_s), plus the delay allowed to a proxy.
_INTERVAL_MS: Final = 61_000
_MARK_MS: Final = 10_000
# A trail that exists when reading starts has a row within this time, because a mark is due.
FIRST_ROW_MS: Final = _INTERVAL_MS + _MARK_MS
# Longer than the time for which a proxy that is being replaced serves its last clients.
_HANDOVER_MS: Final = 600_000
# The most gaps of a trail that are reported one by one; the rest is reported as one.
_MOST_GAPS: Final = 1_000

TrailName = tuple[str, str]
"""A trail's proxy and incarnation."""
K = TypeVar("K")
P = TypeVar("P", bound="Part")


class Part(Protocol):
    def add(self, other: Self, /) -> None:
        """Add the part that follows."""
        ...


def merge(parts: dict[K, P], key: K, part: P) -> None:
    """Add `part` to the one with its key, if there is one."""
    if key in parts:
        parts[key].add(part)
    else:
        parts[key] = part


@dataclass(slots=True)
class Gap:
    """Rows missing from `sequence` on; `before_at` and `behind_at`: when the rows before and after were closed.

    None missing: the row after it does not have the digest of row `sequence`, so one of the two was altered.
    """

    sequence: int
    missing: int
    before_at: int
    behind_at: int


@dataclass(slots=True)
class TrailPart:
    """Rows of one trail. `last_mark` and `end`: the sequence numbers of the last mark and the last end.

    `previous`: the first row's; `digest`: the last row's, None if it is not known, or if it is not in a chain.
    """

    first: int
    last: int
    first_at: int
    last_at: int
    begin_at: int | None = None
    interval_ms: int | None = None
    mark_ms: int | None = None
    last_mark: int | None = None
    end: int | None = None
    gaps: list[Gap] = field(default_factory=list)
    previous: str | None = None
    digest: str | None = None

    def _miss(self, gap: Gap) -> None:
        if len(self.gaps) < _MOST_GAPS:
            self.gaps.append(gap)
            return
        self.gaps[-1].missing += gap.missing
        self.gaps[-1].behind_at = gap.behind_at

    def continues(self, earlier: TrailPart) -> bool:
        """Return whether its first row follows the other's last one, and has the digest of that row."""
        return self.first == earlier.last + 1 and self.previous == earlier.digest

    def add(self, later: TrailPart) -> None:
        """Add the rows that follow."""
        if later.first > self.last + 1:
            self._miss(Gap(self.last + 1, later.first - self.last - 1, self.last_at, later.first_at))
        elif later.first == self.last + 1 and self.digest != later.previous:
            self._miss(Gap(self.last, 0, min(self.last_at, later.first_at), max(self.last_at, later.first_at)))
        for gap in later.gaps:
            self._miss(gap)
        self.last, self.last_at, self.digest = later.last, later.last_at, later.digest
        for name in ("begin_at", "interval_ms", "mark_ms", "last_mark", "end"):
            if getattr(later, name) is not None:
                setattr(self, name, getattr(later, name))


def joined(parts: Iterable[TrailPart]) -> TrailPart:
    """Join at least one part without gaps. Parts may be in any order, and may have the same rows."""
    first, *others = sorted(parts, key=lambda part: (part.first, part.first_at))
    whole = replace(first, gaps=[])
    for part in others:
        if part.last > whole.last:
            whole.add(part)
    return whole


@dataclass(slots=True)
class ProvenTrail:
    """A trail and its neighbours.

    `whole_until`: the time up to which it is complete; None if it ended in order. `next_begin`: when the proxy's next
    incarnation began; `previous_at`: when the previous one wrote its last row. Both are None if incarnations overlap:
    the old one still answers its clients while the new one serves, so neither bounds the time of the other. If
    incarnations of a name overlap for long, several proxies have that name (for example behind one address), and it is
    unknown which succeeds which.
    """

    rows: TrailPart
    interval_ms: int
    mark_ms: int
    whole_until: int | None
    next_begin: int | None = None
    previous_at: int | None = None

    def lives(self, heard_ms: int) -> bool:
        """Return whether the trail has no end and no successor, and its next row is not due before `heard_ms`."""
        due = self.rows.last_at + self.mark_ms + self.interval_ms
        return self.rows.end is None and due >= heard_ms and self.next_begin is None


Trails = Mapping[TrailName, ProvenTrail]


def trails(parts: Mapping[TrailName, TrailPart]) -> Trails:
    """Return the trails with the facts that follow from other trails of the same proxy."""
    found: dict[TrailName, ProvenTrail] = {}
    by_proxy: dict[str, list[tuple[int, str, ProvenTrail]]] = defaultdict(list)
    for (proxy, incarnation), rows in parts.items():
        interval_ms = _INTERVAL_MS if rows.interval_ms is None else rows.interval_ms
        mark_ms = _MARK_MS if rows.mark_ms is None else rows.mark_ms
        known = rows.last_at if rows.last_mark == rows.last else rows.last_at - interval_ms
        trail = ProvenTrail(rows, interval_ms, mark_ms, known if rows.end is None else None)
        found[proxy, incarnation] = trail
        by_proxy[proxy].append((rows.first_at if rows.begin_at is None else rows.begin_at, incarnation, trail))
    for incarnations in by_proxy.values():
        incarnations.sort(key=lambda each: each[:2])
        heard = None
        together_ms = 0
        for begin, _, trail in incarnations:
            if heard is not None:
                together_ms = max(together_ms, min(trail.rows.last_at, heard) - begin)
            heard = trail.rows.last_at if heard is None else max(heard, trail.rows.last_at)
        if together_ms > _HANDOVER_MS:
            continue
        for (_, _, one), (begin, _, other) in pairwise(incarnations):
            if begin > one.rows.last_at:
                one.next_begin = begin
            if one.rows.last_at < other.rows.first_at:
                other.previous_at = one.rows.last_at
    return found


class Unproven(NamedTuple):
    """A time for which rows are missing (GAP) or may be missing (TAIL), from row number `sequence` on."""

    kind: str
    proxy: str
    incarnation: str
    sequence: int
    missing: int
    from_ms: int
    to_ms: int
    lives: bool = False


def unproven(
    trails: Trails,
    *,
    read_at_ms: int,
    shipping_ms: int,
    from_ms: int | None = None,
    to_ms: int | None = None,
    read_from_ms: int | None = None,
) -> list[Unproven]:
    """Return the gaps and the tails within the time to judge.

    Without `to_ms` the time to judge ends when the trail was read, or, while proxies still write, at the time up to
    which all live trails are complete; otherwise the last seconds of live proxies would always be unproven.
    `shipping_ms`: the longest time from closing a row until it can be read.
    """
    heard_ms = read_at_ms - shipping_ms
    alive = [trail.whole_until for trail in trails.values() if trail.lives(heard_ms)]
    end_ms = to_ms if to_ms is not None else min((each for each in alive if each is not None), default=read_at_ms)
    found = list(_gaps(trails, read_from_ms))
    for (proxy, incarnation), trail in trails.items():
        rows = trail.rows
        if trail.whole_until is None:
            continue
        until = end_ms if trail.next_begin is None else trail.next_begin
        # A live trail is complete up to the audit's end, so no row of it is missing.
        if trail.whole_until < until:
            times = trail.whole_until, until
            found.append(Unproven(TAIL, proxy, incarnation, rows.last, 0, *times, trail.lives(heard_ms)))
    judged = []
    for each in found:
        begin = each.from_ms if from_ms is None else max(each.from_ms, from_ms)
        end = min(each.to_ms, end_ms)
        if begin < end:
            judged.append(each._replace(from_ms=begin, to_ms=end))
    return judged


def _gaps(trails: Trails, read_from_ms: int | None) -> Iterable[Unproven]:
    """Yield the missing rows.

    A row is closed at most `interval_ms` after an acknowledgement in it. So the acknowledgements in a missing row came
    after the closing of the row before it minus that interval, and before the closing of the row after it. A missing
    first row is a gap, except in trails that existed before `read_from_ms`.
    """
    earliest = min((trail.rows.first_at for trail in trails.values()), default=0)
    earliest -= max((trail.interval_ms for trail in trails.values()), default=0)
    for (proxy, incarnation), trail in trails.items():
        rows = trail.rows
        if rows.first > 0 and (read_from_ms is None or rows.first_at > read_from_ms + FIRST_ROW_MS):
            begin = earliest if trail.previous_at is None else trail.previous_at
            yield Unproven(GAP, proxy, incarnation, 0, rows.first, begin, rows.first_at)
        for gap in rows.gaps:
            begin = gap.before_at - trail.interval_ms
            yield Unproven(GAP, proxy, incarnation, gap.sequence, gap.missing, begin, gap.behind_at)


def is_unproven(begin_ms: int, length_ms: int, missing: Iterable[Unproven]) -> bool:
    """Return whether some trail proves nothing about a part of a window of time."""
    return any(each.from_ms < begin_ms + length_ms and each.to_ms >= begin_ms for each in missing)
