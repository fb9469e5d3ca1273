"""Limit the rate of questions to brokers."""

from __future__ import annotations

from collections.abc import Callable


class Pace:
    """Allows `burst` questions at once, and `rate` a second on average."""

    def __init__(self, clock: Callable[[], float], burst: float, rate: float) -> None:
        self._clock = clock
        self._burst = burst
        self._rate = rate
        self._left = burst
        self._counted_at = clock()

    def spend(self) -> None:
        now = self._clock()
        self._left = max(0.0, min(self._burst, self._left + (now - self._counted_at) * self._rate) - 1)
        self._counted_at = now

    def due_in_s(self) -> float:
        """Seconds until the next question is allowed."""
        left = self._left + (self._clock() - self._counted_at) * self._rate
        return max(0.0, (1 - left) / self._rate)
