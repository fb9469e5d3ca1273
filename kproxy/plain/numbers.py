"""Counters of Python objects that the compiled plain path changes in place.

Such an object keeps them in `numbers`, an array whose place and size never change, and has a `Number` for each. The
compiled code reads and writes the array itself (kproxy/plain/counters.pxi), as a call costs more than the rest.
"""

from __future__ import annotations

from array import array
from typing import Protocol


class _Owner(Protocol):
    numbers: array[int]


class Number:
    """An attribute that is the number at one place of its owner's `numbers`."""

    def __init__(self, at: int) -> None:
        self._at = at

    def __get__(self, owner: _Owner, kind: type) -> int:
        return owner.numbers[self._at]

    def __set__(self, owner: _Owner, value: int) -> None:
        owner.numbers[self._at] = value


def zeros(count: int) -> array[int]:
    """So many numbers, all 0."""
    return array("q", bytes(8 * count))
