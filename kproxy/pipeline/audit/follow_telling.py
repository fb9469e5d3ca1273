"""What a following audit tells of what it finds: each finding once, the worst first, and of too many the number.

Invariants
1. What was told already is taken out first, and only then is counted how much there is to tell: however much was told,
   what is new is told.
2. The sums in the state are of all findings, told one by one or not.
3. Of a kind so many findings are listed as `LISTED` says. Where there are more, the number of the others is told
   whenever it rises.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from kproxy.pipeline.audit.follow_state import FollowState
from kproxy.pipeline.audit.schemas import UNPROVEN_KINDS, WRONG_KINDS

# Of each kind so many findings of a micro-batch are told one by one.
TOLD_ONE_BY_ONE: Final = 100
LISTED: Final = 2_000
# What whoever audits has said himself is no news.
TOLD_KINDS: Final = (*WRONG_KINDS, *UNPROVEN_KINDS)

Row = Mapping[str, Any]


class Said(NamedTuple):
    """A sentence, and whether it is of a failure or only of what is unproven."""

    sentence: str
    fails: bool


def untold(state: FollowState, findings: Sequence[Row]) -> list[Row]:
    """Those that were not told before, each once, the worst first."""
    told = set(state.told)
    new = {key: row for row in findings if (key := _told_as(row)) not in told}
    return sorted(new.values(), key=lambda row: -(row["records"] or 0))


def tell(state: FollowState, findings: Sequence[Row], kinds: Collection[str]) -> tuple[list[Row], list[Said]]:
    """What is new among an audit's findings of these kinds, and what to say of it; it counts as told then."""
    new = [row for row in untold(state, findings) if row["kind"] in kinds]
    said = []
    for kind in kinds:
        rows = [row for row in new if row["kind"] == kind]
        beyond = _beyond(kind, findings)
        count = len(rows) + max(0, beyond - state.beyond.get(kind, 0))
        state.beyond = {**state.beyond, kind: beyond}
        fails = kind not in UNPROVEN_KINDS
        state.failures += count * fails
        state.unproven += count * (not fails)
        said += [Said(f"{_where(row)}{row['detail']}", fails) for row in rows[:TOLD_ONE_BY_ONE]]
        more = count - len(rows[:TOLD_ONE_BY_ONE])
        if more:
            said.append(Said(f"{kind}: {more:,} more, too many to tell one by one: see the table findings.", fails))
    state.remember(_told_as(row) for row in new)
    return new, said


def _beyond(kind: str, findings: Sequence[Row]) -> int:
    """How many there are besides those that are listed."""
    of_kind = [row["of_kind"] or 0 for row in findings if row["kind"] == kind]
    return max(0, max(of_kind, default=0) - len(of_kind))


def _told_as(row: Row) -> str:
    names = ("kind", "topic", "partition", "first_offset", "last_offset", "proxy", "incarnation", "sequence")
    return " ".join(str(row[name]) for name in names)


def _where(row: Row) -> str:
    if row["topic"] is None:
        return ""
    offsets = "" if row["first_offset"] is None else f" offsets {row['first_offset']} to {row['last_offset']}"
    return f"{row['kind']}: {row['topic']}/{row['partition']}{offsets}: "
