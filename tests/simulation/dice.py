"""Draw random numbers for a simulated world: a draw depends on its key, not on the number of draws before it.

So a proxy that does two things of one moment in another order still meets the same brokers and network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Final, TypeVar

Drawn = TypeVar("Drawn")

_MASK: Final = (1 << 64) - 1
_FRACTION: Final = 2.0**-53


class What:
    """The kinds of draws: the first part of every key. Plain numbers, looked up thousands of times per world."""

    JITTER = 1
    LATENCY = 2
    CUT = 3
    CUT_AT = 4
    DIAL = 5
    FATE = 6
    CODE = 7
    LATE = 8
    PAUSE = 9
    PACE = 10
    PARTITIONS = 11
    VERSION = 12
    CORRELATION = 13
    LEAVE = 14
    REFRESH = 15
    VICTIM = 16
    COUNT = 17
    PROXY = 18
    READ = 19
    THROTTLE = 20
    ETCD = 21
    CLAIM = 22
    LEASE = 23
    ORDER = 24


class Dice:
    """The draws of one world. Keys are integers, and times in seconds."""

    __slots__ = ("_seed",)

    def __init__(self, seed: int) -> None:
        self._seed = (seed,)

    def at(self, *key: float) -> float:
        """A number in [0, 1)."""
        mixed = hash(self._seed + key) & _MASK
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        return (mixed ^ mixed >> 27) * 0x94D049BB133111EB % (1 << 53) * _FRACTION

    def choice(self, choices: Sequence[Drawn], *key: float) -> Drawn:
        return choices[int(self.at(*key) * len(choices))]

    def sample(self, choices: Sequence[Drawn], count: int, *key: float) -> list[Drawn]:
        """`count` of the choices, in any order."""
        left = list(choices)
        return [left.pop(int(self.at(*key, each) * len(left))) for each in range(count)]


class TimeRandom(Random):
    """The proxy's source of random numbers, which returns the same number for all calls within one moment."""

    def __init__(self, dice: Dice, clock: Callable[[], float]) -> None:
        self._dice = dice
        self._clock = clock
        self._drawn_at = -1.0
        self._drawn = 0.0
        super().__init__(0)

    def random(self) -> float:
        now = self._clock()
        if now != self._drawn_at:
            self._drawn_at = now
            self._drawn = self._dice.at(What.PROXY, now)
        return self._drawn
