"""Decide which writers a partition accepts, by a fence that rises with each grant to a client.

It implements the Kafka wiki's "Single Reader/Writer".

A fence is the etcd revision at which a client was granted the partition; a release is the revision at which it gave the
partition up. A connection is bound to the fence that it named, or to none.

States
  open     nobody owns the partition; the fence is that of the last release, 0 if there never was one
  owned    the client that was granted the fence owns the partition

Transitions
  open  -> owned   bind, with a fence no lower
  owned -> owned   bind, with a higher fence
  any   -> open    release, with a higher fence

A lower bind is refused; a release that is not higher is ignored. No transition happens before etcd keeps the fence,
under this broker's lease, so that the next leader knows it.

Invariants
1. The fence never goes down while this broker leads, nor from one leader to the next.
2. A connection bound below the fence writes nothing, whether the partition is owned or open: in the log, no batch of a
   lower fence follows one of a higher fence.
3. While the partition is owned, only connections bound to that fence write.
4. A connection bound above the fence writes nothing before that fence is kept here: after a topic is recreated, its
   writers have not bound their fence to the new one.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

UNBOUND: Final = 0


class KeptFence(NamedTuple):
    """The fence in etcd; `revision` is the mod_revision of its key, 0 if there is none."""

    fence: int = 0
    is_owned: bool = False
    revision: int = 0


class FenceComparison(Enum):
    """The comparison of a requested fence with the kept one."""

    HOLDS = "there is nothing to change"
    LOWER = "a higher fence is known"
    HIGHER = "etcd has to keep it first"


class WriterFence:
    """The fence of one led partition."""

    __slots__ = ("fence", "is_owned", "revision")

    def __init__(self, kept: KeptFence = KeptFence()) -> None:  # noqa: B008 - it is immutable
        self.fence, self.is_owned, self.revision = kept

    def refusal(self, bound: int) -> str | None:
        """Return why a write on a connection bound to `bound`, or UNBOUND, is refused; None if it is not."""
        if bound == self.fence or not (self.is_owned or bound):
            return None
        if not bound:
            return f"only its owner, with fence {self.fence}, may write, and this connection has no fence"
        if self.is_above(bound):
            return f"this connection is bound to fence {bound}, which is not kept here yet"
        whose = "its owner writes" if self.is_owned else "it was released"
        return f"{whose} behind fence {self.fence}, and this connection is bound to the older {bound}"

    def is_above(self, bound: int) -> bool:
        """Return whether that fence must be kept before any write under it."""
        return bound > self.fence

    def compare(self, fence: int, *, is_released: bool) -> FenceComparison:
        """Compare a bind or a release with the kept fence."""
        if is_released:
            return FenceComparison.HIGHER if fence > self.fence else FenceComparison.HOLDS
        if fence < self.fence:
            return FenceComparison.LOWER
        return FenceComparison.HOLDS if fence == self.fence and self.is_owned else FenceComparison.HIGHER

    def keep(self, kept: KeptFence) -> None:
        """Apply the fence kept under our lease."""
        if kept.fence >= self.fence:
            self.fence, self.is_owned = kept.fence, kept.is_owned
        self.revision = kept.revision
