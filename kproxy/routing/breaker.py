"""Whether one broker hangs: asked by probes, answered by the state of its breaker.

A probe is a small request on a connection of its own, so that what is slow by nature (a shrinking ISR, a long poll, a
throttled client) is not taken for a hang: such a broker answers the probe.

States
  closed   pieces are sent to the broker
  open     it hangs: its pieces under way are given up, no new ones are sent, and the probing goes on

Transitions
  closed -> open     `silent`: a probe had no answer within its patience, and nothing else was heard of the broker since
                     the probe began
  open   -> closed   `answered`: a probe has its answer, or was refused or cut off, which is not what a hung broker does

Invariants
1. Only silence opens a breaker. A refused dial and a reset connection are answers of a kind: other rows of the retry
   table (kproxy.routing.retry) are about these.
2. The patience of a probe is `timeout_s` while the breaker is closed, so that a hang is known that long after the probe
   began. While it is open each probe is waited for twice as long as the one before, up to LONGEST_PATIENCE_S: there is
   always one under way, whose answer closes the breaker at once, and a broker that hangs is not swamped with dials.
"""

from __future__ import annotations

from math import inf
from typing import Final

# A request that has waited for so long makes one wonder, in seconds.
SUSPICIOUS_S: Final = 0.5
# Between the answer to a probe and the next probe, in seconds.
PROBE_PAUSE_S: Final = 1.0
LONGEST_PATIENCE_S: Final = 8.0


class Breaker:
    """The breaker of one broker address. Times are in seconds of one clock."""

    __slots__ = ("_asked_at", "_heard_at", "_timeout_s", "is_open", "patience_s")

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.patience_s = timeout_s
        self.is_open = False
        self._asked_at = -inf
        self._heard_at = -inf

    def asked(self, now: float) -> None:
        """A probe begins."""
        self._asked_at = now

    def heard(self, now: float) -> None:
        """The broker has answered something that is no probe."""
        self._heard_at = now

    def answered(self) -> bool:
        """The probe has its answer; whether that closed the breaker."""
        was_open, self.is_open = self.is_open, False
        self.patience_s = self._timeout_s
        return was_open

    def silent(self) -> bool:
        """The probe has had no answer within `patience_s`; whether that opened the breaker."""
        if self.is_open:
            self.patience_s = max(self._timeout_s, min(2 * self.patience_s, LONGEST_PATIENCE_S))
            return False
        self.is_open = self._heard_at <= self._asked_at
        return self.is_open
