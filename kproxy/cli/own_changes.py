"""What happened to claims, from what is known before and after."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from kproxy.observe.claims import ClaimRow
from kproxy_codec.own import WHOLE_GROUP

Kind = Literal["is owned", "claimed", "raised", "reset", "taken over", "freed"]


class Change(msgspec.Struct, frozen=True):
    """`claim` as it is now, or was, where it was freed; `before` is what somebody lost by it.

    A resource that was lost to a claim of the whole group has that for its `claim`.
    """

    change: Kind
    claim: ClaimRow
    before: ClaimRow | None = None


def change_by_put(claim: ClaimRow, before: ClaimRow | None, whole: ClaimRow | None) -> Change:
    """`claim` is new in the place of `before`; `whole` is the group's, if it is owned."""
    if before is not None and before.owner == claim.owner:
        return Change("raised" if claim.generation > before.generation else "reset", claim, before)
    lost = before or (whole if claim.resource != WHOLE_GROUP else None)
    if lost is None or lost.owner == claim.owner:
        return Change("claimed", claim)
    return Change("taken over", claim, lost)


def change_by_end(claim: ClaimRow, whole: ClaimRow | None) -> Change:
    """`claim` is gone; `whole` is the group's, if it is owned."""
    if claim.resource != WHOLE_GROUP and whole is not None and whole.owner != claim.owner and whole.fence > claim.fence:
        return Change("taken over", whole, claim)
    return Change("freed", claim)


def changes_between(before: Iterable[ClaimRow], after: Iterable[ClaimRow]) -> list[Change]:
    """What leads from one state to the other, ends first, then what was claimed in its order."""
    was, now = {claim.place: claim for claim in before}, {claim.place: claim for claim in after}
    ends = [
        change_by_end(claim, now.get((claim.group, WHOLE_GROUP))) for place, claim in was.items() if place not in now
    ]
    put = [claim for place, claim in now.items() if place not in was or was[place].fence != claim.fence]
    return ends + [
        change_by_put(claim, was.get(claim.place), was.get((claim.group, WHOLE_GROUP)))
        for claim in sorted(put, key=lambda claim: claim.fence)
    ]
