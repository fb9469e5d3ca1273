"""The content of an audit's report, as a bounded number of plain values.

Counts are of records unless stated otherwise; times are milliseconds since the epoch.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

# The label in `Facts.about` of the time when the trail was read; the report covers nothing later.
TRAIL_READ: Final = "trail read"


class State(enum.Enum):
    """The state of a partition in a window. Of windows shown together, the last state in this order is shown."""

    NOTHING = "nothing"
    COMPLETE = "complete"
    REMOVED = "removed"
    UNPROVEN = "unproven"
    DUPLICATED = "duplicated"
    OVERLAPPED = "overlapped"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Sums:
    """The counts of one partition, or of several.

    `unproven` counts partitions with anything unproven. `deleted` and `gone` are records of deleted topics; the former
    were declared deleted by the user.

    `corrupt`, `unchecked` and `unsequenced` count batches: with a wrong checksum, with one that was not checked, and
    without sequence numbers, so that duplicates among them cannot be found.
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
        """Return these counts minus those of `others`, which they include."""
        return Sums(*(getattr(self, name) - sum(getattr(other, name) for other in others) for name in Sums.__slots__))

    @property
    def failed(self) -> bool:
        return bool(self.lost or self.duplicated or self.overlapped or self.corrupt)


# The counts that each partition has a column for.
SUMMED: Final = tuple(name for name in Sums.__slots__ if name not in ("partitions", "unproven"))


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
    """One row of the audit's findings. Fields that do not apply are None, for example the `topic` of a gap."""

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
    """The audited time, in `columns` steps of `windows` windows each."""

    start_ms: int
    step_ms: int
    columns: int
    windows: int

    @property
    def end_ms(self) -> int:
        return self.start_ms + self.step_ms * self.columns


@dataclass(frozen=True, slots=True)
class Cell:
    """A partition in one step of the grid, with the worst state of its windows."""

    topic: str
    partition: int
    column: int
    state: State


@dataclass(frozen=True, slots=True)
class Holding:
    """The acknowledgements of one owner in a partition under one ownership revision."""

    topic: str
    partition: int
    owner: int
    revision: int
    first_ms: int
    last_ms: int
    records: int


@dataclass(frozen=True, slots=True)
class FindingCount:
    findings: int
    records: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """The audit's result.

    `trail_faults`: gaps and tails of trails. `conflicts`: findings of two brokers that assigned the same offsets, which
    is a split brain. Offsets that one broker assigned twice also count as overlapped.
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
        """Return the command's exit status: 1 after a fault, and with `strict` also if something is unproven."""
        return 1 if self.failed or (strict and self.unproven) else 0


@dataclass(frozen=True, slots=True)
class Facts:
    """The whole content of a report.

    The lists are bounded, worst first; the counts are of all. `sums` counts all partitions; `partitions` has those
    shown. `trail_holes`: the steps of the grid in which some proxy's trail is unproven. `hidden_holdings`: how many
    holdings of the drawn partitions are not in `holdings`.
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
    about: Mapping[str, str] = field(default_factory=dict)

    @property
    def sums(self) -> Sums:
        return self.verdict.sums

    @property
    def rest(self) -> Sums:
        """The sum of the partitions that are not shown."""
        return self.sums.without([partition.sums for partition in self.partitions])

    @property
    def hidden_findings(self) -> int:
        return sum(count.findings for count in self.finding_counts.values()) - len(self.findings)
