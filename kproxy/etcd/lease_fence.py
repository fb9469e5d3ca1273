"""How long what stands on a lease is certain to be its holder's, as the holder itself can tell.

Invariants
1. The deadline is the send time of the last keepalive that was answered, plus the TTL in its answer, minus a margin:
   etcd counts from a later moment, so nobody else can have our keys before the deadline. Silence of etcd ends our own
   rights; nothing has to tell us.
2. A broken fence never lives again: what was held behind it has to be taken anew.
"""

from __future__ import annotations

from kproxy.etcd.clock import Clock

# What is kept back of each TTL for clocks that run at different speeds.
MARGIN_FRACTION = 0.1


class LeaseFence:
    """How long one lease is certain to live; `claim_revision` is when the broker's key was put on it."""

    __slots__ = ("_broken", "_clock", "_deadline", "claim_revision", "lapses", "lease_id")

    def __init__(self, lease_id: int, clock: Clock) -> None:
        self.lease_id = lease_id
        self.claim_revision = 0
        # How often it lived on, renewed only after it might have ended.
        self.lapses = 0
        self._clock = clock
        self._deadline = float("-inf")
        self._broken = False

    def is_live(self) -> bool:
        return self._clock() < self._deadline

    @property
    def remaining_s(self) -> float:
        """For how long yet it is certain to live; 0 where it is not."""
        return max(self._deadline - self._clock(), 0.0)

    def renew(self, sent_at: float, ttl_s: int) -> None:
        """A keepalive sent at `sent_at` (seconds, this fence's clock) was answered with `ttl_s`."""
        if not self._broken:
            self.lapses += float("-inf") < self._deadline <= self._clock()
            self._deadline = max(self._deadline, sent_at + ttl_s * (1 - MARGIN_FRACTION))

    def break_for_good(self) -> None:
        self._broken = True
        self._deadline = float("-inf")
