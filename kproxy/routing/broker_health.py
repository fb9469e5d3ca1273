"""Decide whether a broker hangs, and when to dial one that is down again.

The breaker of a broker opens when the broker hangs. Probes decide that: small requests on the proxy's own connection
(kproxy.proxy.broker_watch). A broker that is slow for a good reason (a shrinking ISR, a long poll, a throttled client)
answers probes.

States of a breaker
  closed   pieces are sent to the broker
  open     the broker hangs: its pieces in flight are given up, no new ones are sent, and probes continue

Transitions
  closed -> open     `silent`: a probe had no answer within its patience, and the broker sent nothing else since the
                     probe began
  open   -> closed   `answered`: a probe is answered, refused or cut off, which a hung broker does not do

Invariants
1. Only silence opens a breaker. A refused dial and a reset connection count as answers; the retry table
   (kproxy.routing.retry) has rows of their own for these.
2. The patience of a probe is `timeout_s` while the breaker is closed, so a hang is detected that long after the probe
   began. The first probe of an open breaker has the same patience, each later one twice that of the one before, up to
   LONGEST_PATIENCE_S (never less than `timeout_s`). So an answer closes the breaker at once, and dials stay few.
3. A broker that is down is dialled again after FIRST_REDIAL_S, and then after twice as long each time, up to
   LONGEST_REDIAL_S. So it is reached within that time of its return, and all requests for it together cost one dial in
   that time.
"""

from __future__ import annotations

from math import inf
from typing import Final

# A broker is probed once a request has waited this long, in seconds.
SUSPICIOUS_S: Final = 0.5
# Pause between the answer to a probe and the next probe, in seconds.
PROBE_PAUSE_S: Final = 1.0
LONGEST_PATIENCE_S: Final = 8.0
FIRST_REDIAL_S: Final = 0.05
LONGEST_REDIAL_S: Final = 1.0
# Retransmits without an acknowledgement; the last may still be in transit. Their intervals double: three take at least
# 1.4 s to a nearby host.
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
        """Note that a probe begins."""
        self._asked_at = now

    def heard(self, now: float) -> None:
        """Note an answer of the broker other than to a probe."""
        self._heard_at = now

    def answered(self) -> bool:
        """Note the answer to the probe; return whether it closed the breaker."""
        was_open, self.is_open = self.is_open, False
        self.patience_s = self._timeout_s
        return was_open

    def silent(self) -> bool:
        """Note that the probe had no answer within `patience_s`; return whether that opened the breaker."""
        if self.is_open:
            self.patience_s = max(self._timeout_s, min(2 * self.patience_s, LONGEST_PATIENCE_S))
            return False
        self.is_open = self._heard_at <= self._asked_at
        return self.is_open


def is_cut_off(*, unacknowledged: int, retransmits: int, probes: int, silent_s: float, patience_s: float) -> bool:
    """Whether a connection's kernel reports that nothing gets through.

    The report is a kproxy.runtime.sockets.Delivery. A broker that merely does not read closes its TCP window, and its
    kernel acknowledges each window probe.
    """
    if silent_s < patience_s:
        return False
    return (unacknowledged > 0 and retransmits >= RETRANSMITS_IN_VAIN) or probes >= PROBES_IN_VAIN


class Redial:
    """Pace the dials of one broker that is down, after each failed dial. Times as in `Breaker`."""

    __slots__ = ("_due", "_pause_s", "failures")

    def __init__(self) -> None:
        self.failures = 0
        self._due = -inf
        self._pause_s = FIRST_REDIAL_S

    def failed(self, now: float) -> None:
        """Note a failed dial."""
        self.failures += 1
        self._due = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_REDIAL_S)

    def is_due(self, now: float) -> bool:
        """Whether it is time for the next dial."""
        return now >= self._due
