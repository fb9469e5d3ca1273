"""How fast a frame must arrive: a client that sends a length and then a byte now and then must not hold memory for it.

Judged are whole windows of time in which the session read all along: where it did not, for back-pressure of any kind,
a new window begins. An idle connection, in the midst of no frame, is never judged.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Pace(NamedTuple):
    """At least `bytes_per_s` on the average of every window of `window_s`."""

    bytes_per_s: int
    window_s: float


USUAL: Final = Pace(1 << 10, 10.0)
PRESSED: Final = Pace(256 << 10, 2.0)
"""While others wait for the memory that this frame holds (kproxy.proxy.budget)."""


class Arrival:
    """One connection's frames as they are seen at every tick."""

    __slots__ = ("_began", "_bytes", "_pauses", "_since")

    def __init__(self) -> None:
        self._began = -1.0
        self._pauses = 0
        self._since = 0.0
        self._bytes = 0

    def is_too_slow(self, now: float, *, began: float, arrived: int, pauses: int, pressed: bool) -> bool:
        """Whether the frame that began to arrive at `began`, with `arrived` bytes by now, comes too slowly.

        `pauses` grows when the connection is not read; `began` and `now` are seconds of one clock.
        """
        if pauses != self._pauses:
            self._began, self._since, self._bytes, self._pauses = began, now, arrived, pauses
        elif began != self._began:
            self._began, self._since, self._bytes = began, began, 0
        pace = PRESSED if pressed else USUAL
        elapsed = now - self._since
        if elapsed < pace.window_s:
            return False
        if arrived - self._bytes < pace.bytes_per_s * elapsed:
            return True
        self._since, self._bytes = now, arrived
        return False
