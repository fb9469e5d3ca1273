"""What a report says, as plain values of bounded number: made from an audit's tables, shown on terminals and in HTML.

Counts are of records unless they say otherwise; times are milliseconds since the epoch.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

# Among what a report is about: when the trail was read, which is up to when it can tell of anything.
TRAIL_READ: Final = "trail read"


class State(enum.Enum):
    """What a partition's window comes to. In order: where windows are taken together, the last is shown."""

    NOTHING = "nothing"
    COMPLETE = "complete"
    REMOVED = "removed"
    UNPROVEN = "unproven"
    DUPLICATED = "duplicated"
    OVERLAPPED = "overlapped"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Sums:
    """What was counted of one partition, or of several. `unproven` counts partitions of which not all is known.

    `deleted` and `gone` went with topics that are there no more; of the former somebody says that it was meant.

    `corrupt`, `unchecked` and `unsequenced` are batches: their checksums are wrong, or nobody looked at them; or they
    have no sequence numbers, so that what is there twice is not known of them.
    """

    partitions: int = 0
    acked: int = 0
    present: int = 0
    lost: int = 0
    removed: int = 0
    duplicated: int = 0
    overlapped: int = 0
    unclaimed: int = 0
    deleted: int = 0
    gone: int = 0
    corrupt: int = 0
    unchecked: int = 0
    unsequenced: int = 0
    late: int = 0
    batches: int = 0
    bytes: int = 0
    ownership_changes: int = 0
    unproven: int = 0

    def without(self, others: Sequence[Sums]) -> Sums:
        """These, less `others`, which are among them."""
        return Sums(*(getattr(self, name) - sum(getattr(other, name) for other in others) for name in Sums.__slots__))

    @property
    def failed(self) -> bool:
        return bool(self.lost or self.duplicated or self.overlapped or self.corrupt)


@dataclass(frozen=True, slots=True)
class Partition:
    topic: str
    partition: int
    sums: Sums
    owners: tuple[int, ...]
    producers: int
    log_start_offset: int | None
    end_offset: int | None
    p50_ms: float | None
    p99_ms: float | None
    max_ms: float | None

    @property
    def name(self) -> str:
        return f"{self.topic}/{self.partition}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the audit's findings. What does not concern it is None, the `topic` of a gap for instance."""

    kind: str
    detail: str
    topic: str | None = None
    partition: int | None = None
    first_offset: int | None = None
    last_offset: int | None = None
    records: int | None = None
    owner: int | None = None
    revision: int | None = None
    other_owner: int | None = None
    other_revision: int | None = None
    proxy: str | None = None
    incarnation: str | None = None
    producer_id: int | None = None
    producer_epoch: int | None = None
    sequence: int | None = None
    from_ms: int | None = None
    to_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Grid:
    """The time that was audited, in `columns` steps, each of `windows` windows."""

    start_ms: int
    step_ms: int
    columns: int
    windows: int

    @property
    def end_ms(self) -> int:
        return self.start_ms + self.step_ms * self.columns


@dataclass(frozen=True, slots=True)
class Cell:
    """A partition in one step of the grid: the worst that any of its windows comes to."""

    topic: str
    partition: int
    column: int
    state: State


@dataclass(frozen=True, slots=True)
class Holding:
    """What one owner acknowledged of a partition under one ownership revision."""

    topic: str
    partition: int
    owner: int
    revision: int
    first_ms: int
    last_ms: int
    records: int


@dataclass(frozen=True, slots=True)
class Flow:
    """What one owner acknowledged in one step of the grid; `owner` None are all that are not named."""

    column: int
    owner: int | None
    records: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Latency:
    """Acknowledgement latencies in one step of the grid: for each percentile the slowest partition's window."""

    column: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class FindingCount:
    findings: int
    records: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What it all comes to.

    `trail_faults`: gaps and tails of trails. `conflicts`: findings of two
    brokers that gave out the same offsets, which is a split brain; one that does so alone is overlapped, too.
    """

    sums: Sums
    trail_faults: int = 0
    conflicts: int = 0

    @property
    def failed(self) -> bool:
        return self.sums.failed

    @property
    def unproven(self) -> bool:
        return self.sums.unproven > 0 or self.trail_faults > 0

    @property
    def empty(self) -> bool:
        return self.sums.acked == 0

    @property
    def clean(self) -> bool:
        return not (self.failed or self.unproven or self.empty or self.sums.deleted)

    def exit_status(self, *, strict: bool = False) -> int:
        """What the command ends with: 1 where something is wrong, and with `strict` where something is unproven."""
        return 1 if self.failed or (strict and self.unproven) else 0


@dataclass(frozen=True, slots=True)
class Facts:
    """All that a report says. The lists are cut to what a person can look at, worst first; the counts are of all.

    `sums`, by way of the verdict, counts all partitions, `partitions` those that are shown. `trail_holes` are the steps
    of the grid in which some proxy's trail is unproven. `hidden_holdings`: how many are not in `holdings` of the
    partitions that are drawn.
    """

    verdict: Verdict
    topics: int
    partitions: tuple[Partition, ...]
    findings: tuple[Finding, ...]
    finding_counts: Mapping[str, FindingCount]
    grid: Grid | None = None
    cells: tuple[Cell, ...] = ()
    trail_holes: tuple[int, ...] = ()
    holdings: tuple[Holding, ...] = ()
    hidden_holdings: int = 0
    flows: tuple[Flow, ...] = ()
    latencies: tuple[Latency, ...] = ()
    about: Mapping[str, str] = field(default_factory=dict)

    @property
    def sums(self) -> Sums:
        return self.verdict.sums

    @property
    def rest(self) -> Sums:
        """The partitions that are not shown one by one, together."""
        return self.sums.without([partition.sums for partition in self.partitions])

    @property
    def hidden_findings(self) -> int:
        return sum(count.findings for count in self.finding_counts.values()) - len(self.findings)
