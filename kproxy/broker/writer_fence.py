"""Whose writes a partition takes: the fence that its writers stand behind (the wiki's "Single Reader/Writer").

A fence is the revision in etcd at which somebody was granted the partition; a release is the revision at which that was
given up. A connection is bound to the fence that it said it stands behind, or to none.

States
  open     nobody owns the partition; the fence is that of the last release, 0 where there never was one
  owned    the partition is owned by whoever was granted it at the fence

Transitions
  open  -> owned   bind, with a fence no lower
  owned -> owned   bind, with a higher fence
  any   -> open    release, with a higher fence
A lower bind is refused, a lower release is ignored. Neither counts before etcd keeps it, under the lease by which this
broker leads: so whoever leads next knows it.

Invariants
1. The fence never goes down while this broker leads, nor from one leader to the next.
2. What is bound below the fence writes nothing, owned or open: not a batch of a lower fence stands in the log behind
   one of a higher.
3. While the partition is owned, nothing is written but by what is bound to that very fence.
4. What is bound above the fence writes nothing before that is kept here: where a topic was deleted and created anew
   under its writers, none of them has said to the new one what fence it stands behind.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

UNBOUND: Final = 0


class KeptFence(NamedTuple):
    """What etcd keeps; `revision` is the mod_revision of its key, 0 where there is none."""

    fence: int = 0
    is_owned: bool = False
    revision: int = 0


class FenceComparison(Enum):
    """How what is asked for compares with what is kept."""

    HOLDS = "there is nothing to change"
    LOWER = "a higher fence is known"
    HIGHER = "etcd has to keep it first"


class WriterFence:
    """One led partition's."""

    __slots__ = ("fence", "is_owned", "revision")

    def __init__(self, kept: KeptFence = KeptFence()) -> None:  # noqa: B008 - it is immutable
        self.fence, self.is_owned, self.revision = kept

    def refusal(self, bound: int) -> str | None:
        """Why a write on a connection bound to that fence, or UNBOUND, is refused; None where it is not."""
        if bound == self.fence or not (self.is_owned or bound):
            return None
        if not bound:
            return f"its owner alone writes, behind fence {self.fence}, and this connection is bound to none"
        if self.is_above(bound):
            return f"this connection is bound to fence {bound}, which is not kept here yet"
        whose = "its owner writes" if self.is_owned else "it was released"
        return f"{whose} behind fence {self.fence}, and this connection is bound to the older {bound}"

    def is_above(self, bound: int) -> bool:
        """Whether that fence has to be kept before anything is written behind it."""
        return bound > self.fence

    def compare(self, fence: int, *, is_released: bool) -> FenceComparison:
        """What a bind or a release of that fence comes to."""
        if is_released:
            return FenceComparison.HIGHER if fence > self.fence else FenceComparison.HOLDS
        if fence < self.fence:
            return FenceComparison.LOWER
        return FenceComparison.HOLDS if fence == self.fence and self.is_owned else FenceComparison.HIGHER

    def keep(self, kept: KeptFence) -> None:
        """etcd has told what it keeps, under our lease."""
        if kept.fence >= self.fence:
            self.fence, self.is_owned = kept.fence, kept.is_owned
        self.revision = kept.revision
