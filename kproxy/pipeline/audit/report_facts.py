"""Define the content of an audit's report: a bounded number of plain values.

Counts are of records unless stated otherwise; times are milliseconds since the epoch.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

# Exit statuses.
FAULTY: Final = 1
UNPROVEN: Final = 3
# The label in `Facts.about` of the time when the trail was read; the report covers nothing later.
TRAIL_READ: Final = "trail read"
UNSIGNED: Final = "trail rows left out, not signed with the key"


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
class Fault:
    """The texts for a count that makes a verdict fail.

    `headline` and `cell`: in the headline, and in a partition's verdict. `sentence` follows the count, with its verb
    and nouns for one and for many: `is|are not in the log`.
    """

    headline: str
    cell: str
    sentence: str


def said(sentence: str, count: int) -> str:
    """Return a sentence with its verb and nouns for one or for many."""
    return re.sub(r"(\w+)\|(\w+)", r"\1" if count == 1 else r"\2", sentence)


ASSIGNED_TWICE: Final = Fault(
    "offsets assigned twice", "overlapped", "was|were assigned an offset that another record has too"
)
SPLIT_BRAIN: Final = Fault("split brain", "overlapped", "was|were assigned an offset that another broker assigned too")


@dataclass(frozen=True, slots=True)
class Count:
    """How reports show a count. Each is declared with its field of `Sums`; `COUNTS` collects them.

    `meaning`: for the list of words. `unit`: what is counted, if not records. `rare`: its column is omitted where all
    are 0. `warning`: how a count other than 0 leaves something unproven, as the sentence of a `Fault`. `absent`: why
    records that the count explains are not in the log.
    """

    meaning: str
    unit: str = ""
    rare: bool = True
    warning: str = ""
    absent: str = ""
    fault: Fault | None = None


def _count(meaning: str, **others: Any) -> Any:
    return field(default=0, metadata={"count": Count(meaning, **others)})


@dataclass(frozen=True, slots=True)
class Sums:
    """The counts of one partition, or of several; counts without a meaning have no column in a report.

    `unproven` counts partitions for which something is unproven.
    """

    partitions: int = 0
    acked: int = _count("Records that a proxy acknowledged to a producer and noted in its trail.", rare=False)
    present: int = _count("Acknowledged records that are in the log at their offsets.", rare=False)
    lost: int = _count(
        "Acknowledged records that are not in the log, although neither retention nor compaction removed them.",
        rare=False,
        fault=Fault("loss", "lost", "is|are not in the log"),
    )
    overlapped: int = _count(
        "Acknowledged records whose offset another record has too. If two brokers assigned it: split brain.",
        rare=False,
        fault=ASSIGNED_TWICE,
    )
    duplicated: int = _count(
        "Records that are in the log more than once, by producer id and sequence number.",
        rare=False,
        fault=Fault("duplicates", "duplicates", "is|are in the log more than once"),
    )
    corrupt: int = _count(
        "Batches in the log that do not match their checksums.",
        unit="batches",
        fault=Fault(
            "corrupt batches",
            "corrupt",
            "batch|batches in the log does|do not match its|their checksum|checksums",
        ),
    )
    removed: int = _count(
        "Acknowledged records that retention or compaction has removed since.",
        absent="removed by retention or compaction",
    )
    deleted: int = _count(
        "Acknowledged records of a topic that was deleted on purpose (--deleted-topic).",
        absent="deleted with their topics",
    )
    gone: int = _count(
        "Acknowledged records of a topic whose id no longer exists, without --deleted-topic.",
        warning="record|records is|are gone with deleted topics. If the deletion was on purpose, give --deleted-topic",
        absent="gone with deleted topics",
    )
    unread: int = _count(
        "Acknowledged records of a partition whose log could not be read: it had no leader, or brokers refused.",
        warning="record|records is|are in logs that could not be read",
        absent="in logs that could not be read",
    )
    unclaimed: int = _count(
        "Records in the log that no trail has: written past the proxies, with acks=0, or during a gap."
    )
    unsequenced: int = _count(
        "Batches of producers without idempotence. Without sequence numbers duplicates cannot be found.",
        unit="batches",
    )
    unchecked: int = _count(
        "Batches whose checksums were not verified, because crc32c is not installed. They may be corrupt.",
        unit="batches",
        warning="batch|batches was|were not checked against checksums, so the log may be corrupt",
    )
    late: int = _count("Records whose rows reached the trail late. They count like all others.")
    batches: int = 0
    bytes: int = 0
    ownership_changes: int = 0
    unproven: int = 0

    def without(self, others: Sequence[Sums]) -> Sums:
        """Return these counts minus those of `others`, which they include."""
        return Sums(*(getattr(self, name) - sum(getattr(other, name) for other in others) for name in Sums.__slots__))

    @property
    def faults(self) -> list[tuple[Fault, int]]:
        """Return the faults whose counts are not 0, with the counts."""
        found = [(count.fault, getattr(self, name)) for name, count in COUNTS.items()]
        return [(fault, number) for fault, number in found if fault and number]

    @property
    def failed(self) -> bool:
        return bool(self.faults)


# The columns of counts in their order.
COUNTS: Final[dict[str, Count]] = {one.name: one.metadata["count"] for one in fields(Sums) if one.metadata}
# The counts that each partition has a column for.
SUMMED: Final = tuple(name for name in Sums.__slots__ if name not in ("partitions", "unproven"))


Which = tuple[str, int]
"""A topic and a partition."""


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
    def which(self) -> Which:
        return self.topic, self.partition

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
class Holding:
    """The acknowledgements of one owner in a partition under one ownership revision."""

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
    def faults(self) -> list[tuple[Fault, int]]:
        return [
            (SPLIT_BRAIN if fault is ASSIGNED_TWICE and self.conflicts else fault, number)
            for fault, number in self.sums.faults
        ]

    @property
    def unproven(self) -> bool:
        return self.sums.unproven > 0 or self.trail_faults > 0

    @property
    def empty(self) -> bool:
        return self.sums.acked == 0

    @property
    def clean(self) -> bool:
        return not (self.failed or self.unproven or self.empty or self.sums.deleted)

    def exit_status(self, *, allow_unproven: bool = False) -> int:
        """Return the command's exit status: 1 after a fault, 3 if something is unproven and that is not allowed."""
        if self.failed:
            return FAULTY
        return UNPROVEN if self.unproven and not allow_unproven else 0


@dataclass(frozen=True, slots=True)
class Facts:
    """The whole content of a report.

    The lists are bounded and begin with the worst; the counts include everything. `sums` counts all partitions;
    `partitions` has the partitions to show. `states` and `holdings` are of those to draw; `states` has the worst state
    of the windows in each step of the grid. `trail_holes`: the steps in which some proxy's trail is unproven.
    `hidden_holdings`: how many holdings of the drawn partitions are not in `holdings`.
    """

    verdict: Verdict
    topics: int
    partitions: tuple[Partition, ...]
    findings: tuple[Finding, ...]
    finding_counts: Mapping[str, FindingCount]
    grid: Grid | None = None
    states: Mapping[Which, Sequence[State]] = field(default_factory=dict)
    trail_holes: tuple[int, ...] = ()
    holdings: Mapping[Which, Sequence[Holding]] = field(default_factory=dict)
    hidden_holdings: int = 0
    about: Mapping[str, str] = field(default_factory=dict)

    @property
    def sums(self) -> Sums:
        return self.verdict.sums

    @property
    def hidden_findings(self) -> int:
        return sum(count.findings for count in self.finding_counts.values()) - len(self.findings)
