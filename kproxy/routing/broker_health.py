"""Whether one broker hangs, and when one that is down is dialled again.

A breaker says that it hangs. It is asked by probes, small requests on a connection of their own, so that what is slow
by nature (a shrinking ISR, a long poll, a throttled client) is not taken for a hang: such a broker answers the probe.

States of a breaker
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
3. A broker that is down is dialled again after FIRST_REDIAL_S, and then after twice as long each time, up to
   LONGEST_REDIAL_S: whoever needs it is through that long after its return at the latest, and a dial is all that all
   requests for it together cost in that time.
"""

from __future__ import annotations

from math import inf
from typing import Final

# A request that has waited for so long makes one wonder, in seconds.
SUSPICIOUS_S: Final = 0.5
# Between the answer to a probe and the next probe, in seconds.
PROBE_PAUSE_S: Final = 1.0
LONGEST_PATIENCE_S: Final = 8.0
FIRST_REDIAL_S: Final = 0.05
LONGEST_REDIAL_S: Final = 1.0
# Without an acknowledgement, the last of them perhaps still under way. Retransmits come at intervals that double: three
# take 1.4 s at the least, where the other host is near.
RETRANSMITS_IN_VAIN: Final = 3
PROBES_IN_VAIN: Final = 3


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


def is_cut_off(*, unacknowledged: int, retransmits: int, probes: int, silent_s: float, patience_s: float) -> bool:
    """Whether nothing gets through on a connection, by what its kernel says of it (kproxy.runtime.sockets.Delivery).

    A broker that merely does not read closes its window, and its kernel acknowledges each probe of that.
    """
    if silent_s < patience_s:
        return False
    return (unacknowledged > 0 and retransmits >= RETRANSMITS_IN_VAIN) or probes >= PROBES_IN_VAIN


class Redial:
    """The pace of the dials of one broker that is down; to be told of each that fails. Times as in `Breaker`."""

    __slots__ = ("_due", "_pause_s", "failures")

    def __init__(self) -> None:
        self.failures = 0
        self._due = -inf
        self._pause_s = FIRST_REDIAL_S

    def failed(self, now: float) -> None:
        """A dial has failed."""
        self.failures += 1
        self._due = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_REDIAL_S)

    def is_due(self, now: float) -> bool:
        """Whether the next dial may go out."""
        return now >= self._due
