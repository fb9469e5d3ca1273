"""Judge one partition's log: compare the acknowledged offsets with the batches in the log.

The judge is a pure function, one sweep over sorted offsets. Its result, a `PartitionPart` and an `Amounts` for each
window of time, can be added to that of another range of offsets or of another process, so the same function judges a
whole partition in this process or ranges of it on a cluster. Nothing here needs Spark.

Intervals of offsets are half-open, [start, end). Times are milliseconds since the epoch.

Invariants
1. An offset counts once in its partition, and once in the window of each of its acknowledgements: as present, lost or
   removed, and also as overlapped if it was acknowledged for two records. Without a log it counts once (`judge_gone`).
2. Two acknowledgements are of one record only if an idempotent producer's sequence numbers show it.
3. A row of the trail counts once, however often it was shipped.
4. The work is proportional to rows and batches times their logarithm, whatever offsets a forged trail names. To word
   findings, at most `CLAIMS_EXAMINED` acknowledgements of an offset are examined, `_MOST_EXAMINED` in all, and from
   then on one per offset.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple

from kproxy.pipeline.audit.columns import CORRUPT, DUPLICATE, LOST, OVERLAP, UNREAD
from kproxy.pipeline.audit.proof import merge
from kproxy.pipeline.audit.rules import AuditRules
from kproxy.pipeline.audit.trail_rows import TrailRow

# The number of records after which a producer's sequence numbers repeat.
_SEQUENCES: Final = 1 << 31
# Batches with the same sequence number that are further apart are not duplicates.
_LAP: Final = _SEQUENCES - 1
_EVERYWHERE: Final = 1 << 62
CLAIMS_EXAMINED: Final = 1_000
_MOST_EXAMINED: Final = 1_000_000
# The latency bins for each factor of e; with 50 the error is at most 1 %.
_BINS: Final = 50
_PERCENTILES: Final = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99}


class Batch(NamedTuple):
    """The header of a batch in a log; `crc_ok` None: its checksum was not checked."""

    base_offset: int
    last_offset: int
    record_count: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    is_control: bool
    crc_ok: bool | None


class Bounds(NamedTuple):
    """Where a log begins and ends. `topic_id` is in hex, or None if brokers have none."""

    log_start_offset: int
    end_offset: int
    is_compacted: bool
    topic_id: str | None


class Repeat(NamedTuple):
    """A batch that repeats an earlier one in its log; `first_base_offset`: where the previous copy is."""

    batch: Batch
    first_base_offset: int


@dataclass(slots=True)
class Amounts:
    """Counts of acknowledgements in one window of time or in all time. All but `batches` and `bytes` count records.

    `by_owner`: records and bytes. `latencies`: the number of samples by bin, because bins can be added and percentiles
    cannot. `longest_us`: the longest latency in microseconds.
    """

    counts: Counter[str] = field(default_factory=Counter)
    by_owner: dict[int, list[int]] = field(default_factory=dict)
    producers: set[Any] = field(default_factory=set)
    latencies: Counter[int] = field(default_factory=Counter)
    longest_us: int = 0

    def add(self, other: Amounts) -> None:
        self.counts.update(other.counts)
        self.producers |= other.producers
        for owner, (records, size) in other.by_owner.items():
            own = self.by_owner.setdefault(owner, [0, 0])
            own[0] += records
            own[1] += size
        self.latencies.update(other.latencies)
        self.longest_us = max(self.longest_us, other.longest_us)

    def count(self, row: TrailRow, *, is_late: bool) -> None:
        """Count a row of the trail."""
        counts, records = self.counts, row.record_count
        counts["records"] += records
        counts["batches"] += row.batches
        counts["bytes"] += row.bytes
        if is_late:
            counts["late"] += records
        own = self.by_owner.get(row.owner)
        if own is None:
            own = self.by_owner[row.owner] = [0, 0]
        own[0] += records
        own[1] += row.bytes
        # Producers without an id are distinguished by their connections.
        self.producers.add(row.producer_id if row.producer_id >= 0 else (row.proxy, row.incarnation, row.connection))
        for us in row.latency_us or ():
            self.latencies[int(math.log(max(us, 1)) * _BINS)] += 1
            self.longest_us = max(self.longest_us, us)

    def percentiles(self) -> dict[str, float | None]:
        """Return p50_ms, p95_ms, p99_ms and max_ms: the middle of the lowest bin with that share of the samples."""
        if not self.latencies:
            return dict.fromkeys((*_PERCENTILES, "max_ms"))
        longest = self.longest_us / 1000
        total = self.latencies.total()
        found: dict[str, float | None] = {}
        for name, share in _PERCENTILES.items():
            rest = math.ceil(total * share)
            for number in sorted(self.latencies):
                rest -= self.latencies[number]
                if rest <= 0:
                    # The middle of the highest bin may be above every sample.
                    found[name] = min(math.exp((number + 0.5) / _BINS) / 1000, longest)
                    break
        return {**found, "max_ms": longest}


# The fields of a claim that findings name, compared in this order.
Who = tuple[int, int, int, str, str, int, int, int]


@dataclass(slots=True)
class Told:
    """One owner's acknowledgements in an island, according to one trail."""

    first: int
    behind: int
    records: int
    earliest: Who
    latest: Who
    sequence: int
    from_ms: int
    to_ms: int
    acks: int
    # None if there are several.
    producer: tuple[int, int] | None

    def add(self, other: Told) -> None:
        self.first = min(self.first, other.first)
        self.behind = max(self.behind, other.behind)
        self.records += other.records
        self.earliest = min(self.earliest, other.earliest)
        self.latest = max(self.latest, other.latest)
        self.sequence = min(self.sequence, other.sequence)
        self.from_ms = min(self.from_ms, other.from_ms)
        self.to_ms = max(self.to_ms, other.to_ms)
        self.acks = min(self.acks, other.acks)
        if self.producer != other.producer:
            self.producer = None


@dataclass(slots=True)
class Island:
    """Contiguous offsets that are lost or overlapped, under the same owners.

    `owned`: equal for equal owners. `replaced`: the log has other records there. `within`: the offsets of a batch with
    fewer records than offsets; the missing records are not known.
    """

    kind: str
    start: int
    end: int
    owned: int
    replaced: bool
    within: tuple[int, int] | None = None
    told: dict[tuple[int, int, str, str], Told] = field(default_factory=dict)

    def continues(self, other: Island) -> bool:
        mine = self.kind, self.owned, self.replaced, self.within
        return other.end == self.start and mine == (other.kind, other.owned, other.replaced, other.within)

    def add(self, row: TrailRow, start: int, end: int) -> None:
        """Note that `row` acknowledged these offsets."""
        who = (
            row.revision, row.owner, row.first_acked_at, row.proxy, row.incarnation, row.sequence,
            row.producer_id, row.producer_epoch,
        )  # fmt: skip
        times = row.first_acked_at, row.last_acked_at
        producer = row.producer_id, row.producer_epoch
        told = Told(start, end, end - start, who, who, row.sequence, *times, row.acks or 0, producer)
        self._tell((row.owner, row.revision, row.proxy, row.incarnation), told)

    def extend(self, later: Island) -> None:
        self.end = later.end
        for key, told in later.told.items():
            self._tell(key, told)

    def _tell(self, key: tuple[int, int, str, str], told: Told) -> None:
        if key in self.told or len(self.told) < CLAIMS_EXAMINED:
            merge(self.told, key, told)


@dataclass(slots=True)
class Ownership:
    """The acknowledgements of one broker under one revision of its ownership."""

    first_acked_at: int
    last_acked_at: int
    records: int
    bytes: int

    def add(self, other: Ownership) -> None:
        self.first_acked_at = min(self.first_acked_at, other.first_acked_at)
        self.last_acked_at = max(self.last_acked_at, other.last_acked_at)
        self.records += other.records
        self.bytes += other.bytes


@dataclass(slots=True)
class Gone:
    """Records acknowledged in a deleted topic, whose name now has another id or no topic."""

    records: int
    from_ms: int
    to_ms: int

    def add(self, other: Gone) -> None:
        self.records += other.records
        self.from_ms = min(self.from_ms, other.from_ms)
        self.to_ms = max(self.to_ms, other.to_ms)


@dataclass(slots=True)
class PartitionPart:
    """The judgement of some or all of a partition's offsets. `found`: the number of findings by kind, listed or not."""

    amounts: Amounts = field(default_factory=Amounts)
    ownerships: dict[tuple[int, int], Ownership] = field(default_factory=dict)
    islands: list[Island] = field(default_factory=list)
    corrupt: list[Batch] = field(default_factory=list)
    repeats: list[Repeat] = field(default_factory=list)
    gone: dict[str | None, Gone] = field(default_factory=dict)
    found: Counter[str] = field(default_factory=Counter)

    def add(self, later: PartitionPart, most: int) -> None:
        """Add the judgement of later offsets; adjacent islands are joined. At most `most` of a kind stay listed."""
        self.amounts.add(later.amounts)
        for ownership, theirs in later.ownerships.items():
            merge(self.ownerships, ownership, theirs)
        for topic_id, gone in later.gone.items():
            merge(self.gone, topic_id, gone)
        self.found.update(later.found)
        for island in later.islands:
            before = next((each for each in reversed(self.islands) if each.kind == island.kind), None)
            if before is not None and island.continues(before):
                before.extend(island)
                self.found[island.kind] -= 1
            else:
                self.islands.append(island)
        self.islands = _first(self.islands, most)
        self.corrupt = [*self.corrupt, *later.corrupt][:most]
        self.repeats = [*self.repeats, *later.repeats][:most]


def _first(islands: list[Island], most: int) -> list[Island]:
    """Keep the first `most` islands of each kind and the last one, which the next range may continue."""
    kept: list[Island] = []
    for kind in (LOST, OVERLAP):
        those = [each for each in islands if each.kind == kind]
        kept += those if len(those) <= most + 1 else [*those[:most], those[-1]]
    return kept


Windows = dict[int, Amounts]


class _Claim(NamedTuple):
    """An acknowledged range of offsets. `same` is equal for acknowledgements of one record; `record` identifies that
    record in the log, None without a producer id."""

    start: int
    at: int
    number: int
    end: int
    same: Any
    record: tuple[int, int, int] | None
    row: TrailRow
    window: Amounts


class _Held(NamedTuple):
    """Offsets that the log has. `within` is set if their batch lacks records: it has the batch's offsets."""

    start: int
    end: int
    record: tuple[int, int, int] | None
    within: tuple[int, int] | None = None


def repeats(batches: Iterable[Batch]) -> list[Repeat]:
    """Return the batches that are in a log more than once, by producer id, epoch and sequence number."""
    last: dict[tuple[int, int, int], int] = {}
    found = []
    for batch in sorted(batches):
        if batch.producer_id < 0 or batch.base_sequence < 0 or batch.is_control or batch.crc_ok is False:
            continue
        key = batch.producer_id, batch.producer_epoch, batch.base_sequence
        before = last.get(key)
        if before is not None and 0 < batch.base_offset - before < _LAP:
            found.append(Repeat(batch, before))
        last[key] = batch.base_offset
    return found


def judge_log(
    rows: Iterable[TrailRow],
    batches: Iterable[Batch],
    bounds: Bounds | None,
    rules: AuditRules,
    start: int = 0,
    end: int = _EVERYWHERE,
    probes: Iterable[tuple[int, Repeat]] = (),
) -> tuple[Windows, PartitionPart, dict[int, tuple[int, int]]]:
    """Judge the offsets [start, end) of a partition; without bounds it no longer exists.

    `rows` and `batches` have offsets in the range. `probes`: repeated batches, each by the offset of a copy. Also
    return, by base offset of a repeated batch, the window of the last acknowledgement of a copy, and its records.
    """
    sweep = _Sweep(bounds, rules, start, end)
    sweep.read_rows(rows)
    sweep.read_log(batches)
    sweep.run()
    return sweep.windows, sweep.part, sweep.find(probes)


def judge_gone(
    rows: Iterable[TrailRow],
    topic_id: str | None,
    rules: AuditRules,
    kind: str,
    start: int = 0,
    end: int = _EVERYWHERE,
) -> tuple[Windows, PartitionPart]:
    """Judge the offsets [start, end) of a partition whose log cannot be read: each counts once, as `kind`.

    `kind` is DELETED, GONE or UNREAD. The first row with an offset counts it.
    """
    sweep = _Sweep(None, rules, start, end)
    sweep.read_rows(rows)
    reach = 0
    for claim in sorted(sweep.claims):
        row = claim.row
        new = max(0, claim.end - max(claim.start, reach))
        reach = max(reach, claim.end)
        merge(sweep.part.gone, topic_id, Gone(new, row.first_acked_at, row.last_acked_at))
        for amounts in (sweep.part.amounts, claim.window):
            amounts.counts[kind] += new
    if kind == UNREAD:
        sweep.part.gone.clear()
    return sweep.windows, sweep.part


class _Sweep:
    def __init__(self, bounds: Bounds | None, rules: AuditRules, start: int, end: int) -> None:
        self.part = PartitionPart()
        self.windows: Windows = {}
        self.claims: list[_Claim] = []
        self._rules = rules
        self._start = start
        self._end = end
        self._log_start = 0 if bounds is None else bounds.log_start_offset
        # Compaction may leave holes up to a log's end, but it replaces no record by another.
        self._holes_until = max(self._log_start, bounds.end_offset) if bounds and bounds.is_compacted else 0
        self._held: list[_Held] = []
        self._at = 0
        self._may_examine = _MOST_EXAMINED
        # Running sums over the swept offsets.
        self._present = self._lost = self._removed = self._overlapped = self._claimed = 0

    def _window_of(self, row: TrailRow) -> Amounts:
        window = self._rules.window(row.last_acked_at)
        amounts = self.windows.get(window)
        if amounts is None:
            amounts = self.windows[window] = Amounts()
        return amounts

    def read_rows(self, rows: Iterable[TrailRow]) -> None:
        """Record the acknowledgements of the rows, each row once."""
        seen: set[tuple[str, str, int]] = set()
        claims, low, high = self.claims, self._start, self._end
        for row in rows:
            key = row.proxy, row.incarnation, row.sequence
            if key in seen:
                continue
            seen.add(key)
            producer, sequence, before = row.producer_id, row.first_sequence, 0
            window = self._window_of(row)
            if low <= min(row.spans[::2]) < high:
                self._account(row, window)
            for first, count in row.ranges:
                begin, behind = max(first, low), min(first + count, high)
                if begin < behind:
                    number = len(claims)
                    # Offset minus sequence number, which is constant for a producer until its sequence numbers wrap.
                    record = None
                    if producer >= 0:
                        record = (producer, row.producer_epoch, (first - before - sequence) % _SEQUENCES)
                    same = number if record is None else record
                    claims.append(_Claim(begin, row.first_acked_at, number, behind, same, record, row, window))
                before += count
        for amounts in self.windows.values():
            self.part.amounts.add(amounts)

    def _account(self, row: TrailRow, window: Amounts) -> None:
        promised = self._rules.promised_ms.get((row.proxy, row.incarnation))
        is_late = promised is not None and row.at - row.first_acked_at > promised
        is_late |= row.shipped_at is not None and row.shipped_at - row.at > self._rules.late_after_ms
        window.count(row, is_late=is_late)
        times = row.first_acked_at, row.last_acked_at
        merge(self.part.ownerships, (row.owner, row.revision), Ownership(*times, row.record_count, row.bytes))

    def read_log(self, batches: Iterable[Batch]) -> None:
        """Record the log's offsets; a batch with fewer records than offsets counts as if it had the first of them."""
        counts, found, held = self.part.amounts.counts, self.part.found, self._held
        reach = self._start
        for batch in sorted(batches):
            base, is_here = batch.base_offset, self._start <= batch.base_offset < self._end
            if batch.crc_ok is not True and is_here:
                counts["unchecked" if batch.crc_ok is None else "corrupt"] += 1
            if batch.crc_ok is False:
                if is_here:
                    found[CORRUPT] += 1
                    if found[CORRUPT] <= self._rules.max_findings:
                        self.part.corrupt.append(batch)
                continue
            if batch.is_control:
                continue
            is_sequenced = batch.producer_id >= 0 and batch.base_sequence >= 0
            if is_here and not is_sequenced:
                counts["unsequenced"] += 1
            record = None
            if batch.producer_id >= 0:
                record = (batch.producer_id, batch.producer_epoch, (base - batch.base_sequence) % _SEQUENCES)
            first = max(base, reach)
            behind = min(base + min(batch.record_count, batch.last_offset + 1 - base), self._end)
            if first < behind:
                held.append(_Held(first, behind, record))
                counts["unclaimed"] += behind - first
                reach = behind
            # Compaction leaves such batches too, but what it removes does not count as lost.
            first, behind = max(base + batch.record_count, reach), min(batch.last_offset + 1, self._end)
            if first < behind and not self._holes_until:
                held.append(_Held(first, behind, None, (base, batch.last_offset + 1)))
                reach = behind

    def run(self) -> None:
        """Sweep over the claims, which may overlap, and the log, in which nothing overlaps."""
        self.claims.sort()
        claims = self.claims
        first, reach = 0, -1
        for number, claim in enumerate(claims):
            if claim.start >= reach and number:
                self._judge(claims[first:number])
                first = number
            reach = max(reach, claim.end)
        if claims:
            self._judge(claims[first:])
        counts = self.part.amounts.counts
        counts["present"] += self._present
        counts["lost"] += self._lost
        counts["removed"] += self._removed
        counts["overlapped"] += self._overlapped
        counts["unclaimed"] -= self._claimed

    def _judge(self, claims: Sequence[_Claim]) -> None:
        """Judge claims whose offsets no other claim has."""
        if len(claims) == 1:
            claim = claims[0]
            before = self._sums()
            self._hold(claim.start, claim.end, claims, 1, _ownership(claim), claim.record)
            self._count(claim, before)
            return
        whole = _without_resent(claims)
        borders = sorted({claim.start for claim in whole} | {claim.end for claim in whole})
        active: dict[int, _Claim] = {}
        ending: list[tuple[int, int]] = []
        sums = {}
        waiting = owned = 0
        for at, behind in zip(borders, [*borders[1:], borders[-1]], strict=True):
            sums[at] = self._sums()
            while ending and ending[0][0] <= at:
                owned -= _ownership(active.pop(heapq.heappop(ending)[1]))
            while waiting < len(whole) and whole[waiting].start <= at:
                claim = whole[waiting]
                active[claim.number] = claim
                owned += _ownership(claim)
                heapq.heappush(ending, (claim.end, claim.number))
                waiting += 1
            if active and at < behind:
                record = next(iter(active.values())).record if len(active) == 1 else None
                self._hold(at, behind, active.values(), len(active), owned, record)
        for claim in whole:
            self._count(claim, sums[claim.start], sums[claim.end])

    def _sums(self) -> tuple[int, int, int, int]:
        return self._present, self._lost, self._removed, self._overlapped

    def _count(self, claim: _Claim, before: tuple[int, ...], after: tuple[int, ...] | None = None) -> None:
        """Count a claim's offsets in its window: a count is the running sum at its end minus the sum at its start."""
        counts = claim.window.counts
        for name, low, high in zip(
            ("present", "lost", "removed", "overlapped"), before, after or self._sums(), strict=True
        ):
            if high != low:
                counts[name] += high - low

    def _hold(self, start: int, end: int, claims: Iterable[_Claim], times: int, owned: int, record: Any) -> None:
        """Compare offsets that were acknowledged `times` times, all by the same claims, with the log."""
        if times > 1:
            self._overlapped += end - start
            self._note(Island(OVERLAP, start, end, owned, replaced=False), claims)
        held, at = self._held, start
        while at < end:
            while self._at < len(held) and held[self._at].end <= at:
                self._at += 1
            if self._at == len(held) or held[self._at].start >= end:
                self._absent(at, end, claims, owned, self._holes_until or self._log_start, replaced=False)
                return
            first, behind, there, within = held[self._at]
            if first > at:
                self._absent(at, first, claims, owned, self._holes_until or self._log_start, replaced=False)
                at = first
            behind = min(behind, end)
            if within is not None:
                self._absent(at, behind, claims, owned, self._log_start, replaced=False, within=within)
                at = behind
                continue
            self._claimed += behind - at
            # If an offset was acknowledged for two records, one of them is missing, but it is unknown which.
            if times > 1 or there == record:
                self._present += behind - at
            else:
                self._absent(at, behind, claims, owned, self._log_start, replaced=True)
            at = behind

    def _absent(
        self,
        start: int,
        end: int,
        claims: Iterable[_Claim],
        owned: int,
        reach: int,
        *,
        replaced: bool,
        within: tuple[int, int] | None = None,
    ) -> None:
        removed = max(0, min(end, reach) - start)
        self._removed += removed
        if end - start > removed:
            self._lost += end - start - removed
            self._note(Island(LOST, start + removed, end, owned, replaced, within), claims)

    def _note(self, island: Island, claims: Iterable[_Claim]) -> None:
        islands, found, kind = self.part.islands, self.part.found, island.kind
        last = next((at for at in reversed(range(len(islands))) if islands[at].kind == kind), None)
        for claim in islice(claims, min(CLAIMS_EXAMINED, max(1, self._may_examine))):
            self._may_examine -= 1
            island.add(claim.row, island.start, island.end)
        if last is not None and island.continues(islands[last]):
            islands[last].extend(island)
            return
        found[kind] += 1
        if last is not None and found[kind] > self._rules.max_findings + 1:
            # Beyond the limit only the last island is kept, which the next range may continue.
            del islands[last]
        islands.append(island)

    def find(self, probes: Iterable[tuple[int, Repeat]]) -> dict[int, tuple[int, int]]:
        """Record the repeated batches in this range, each by the probe of its own offset.

        Return, by base offset of a repeated batch, the last window in which a copy was acknowledged, and its records.
        """
        wanted = []
        for at, repeat in sorted(probes):
            batch = repeat.batch
            wanted.append((at, batch.base_offset, batch.record_count))
            if at == batch.base_offset:
                self.part.found[DUPLICATE] += 1
                self.part.amounts.counts["duplicated"] += batch.record_count
                if self.part.found[DUPLICATE] <= self._rules.max_findings:
                    self.part.repeats.append(repeat)
        places = [at for at, _, _ in wanted]
        found: dict[int, tuple[int, int]] = {}
        for claim in self.claims if wanted else ():
            window = self._rules.window(claim.row.last_acked_at)
            for k in range(bisect_left(places, claim.start), bisect_left(places, claim.end)):
                _, base, records = wanted[k]
                found[base] = max(found.get(base, (window, records)), (window, records))
        return found


def _without_resent(claims: Sequence[_Claim]) -> list[_Claim]:
    """Remove from each claim the part that an earlier claim of the same records covers: that part was sent again."""
    said: dict[Any, int] = {}
    kept = []
    for claim in claims:
        start = max(claim.start, said.get(claim.same, 0))
        said[claim.same] = max(claim.end, start)
        if start < claim.end:
            kept.append(claim if start == claim.start else claim._replace(start=start))
    return sorted(kept)


def _ownership(claim: _Claim) -> int:
    return hash((claim.row.owner, claim.row.revision))
