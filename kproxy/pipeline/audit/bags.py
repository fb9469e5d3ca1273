"""Define bags, the collections that an audit's steps process: lists in this process, or data on Spark's executors.

Executors import this module, so it needs only the standard library.
"""

from __future__ import annotations

import gc
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final, Protocol

Step = Callable[[Iterable[Any]], Iterable[Any]]
# Many, as they are divided among all tasks. A kept value may itself be thousands of batches.
_VALUES_PER_PICKLE: Final = 20_000
_KEPT_PER_PICKLE: Final = 100


class Bag(Protocol):
    """Values in any number of parts, in any order. Each reading may compute the values of steps and groups again."""

    def over(self, step: Step) -> Bag:
        """Return what `step` yields for the values of each part."""
        ...

    def grouped(self) -> Bag:
        """Return each key of (key, value) once, with an iterable of its values. Keys are of texts and numbers."""
        ...

    def kept(self, name: str) -> Bag:
        """Return the same values, which are computed only once."""
        ...

    def plus(self, others: Iterable[Any]) -> Bag:
        """Return these values and those of a bag of the same engine, or of any collection."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """Return all values to this process; the caller knows that they are few."""
        ...


class Here(list[Any]):
    """A bag in this process: one part in memory."""

    def over(self, step: Step) -> Here:
        return Here(step(self))

    def grouped(self) -> Here:
        return Here(sorted(_grouped(self).items()))

    def kept(self, name: str) -> Here:
        return self

    def plus(self, others: Iterable[Any]) -> Here:
        return Here([*self, *others])


@contextmanager
def without_collector() -> Iterator[None]:
    """Switch off the garbage collector, which finds no cycles among a million rows and takes a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def uncollected(step: Step, values: Iterable[Any]) -> Iterator[Any]:
    """Yield what a step yields, without the garbage collector."""
    with without_collector():
        yield from step(values)


def pickles_of(values: Iterable[Any]) -> Iterator[bytes]:
    """Yield pickles of many values each."""
    for some in _slices(values, _KEPT_PER_PICKLE):
        yield pickle.dumps(some, pickle.HIGHEST_PROTOCOL)


def values_in(pickles: Iterable[bytes]) -> Iterator[Any]:
    """Yield the values of pickles."""
    for each in pickles:
        yield from pickle.loads(each)  # noqa: S301 -- an earlier task of the same audit wrote it


def by_task(tasks: int, pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[int, bytes]]:
    """Yield pickles of keys and their values, each with the number of the task that groups these keys.

    Spark gives all its workers the same PYTHONHASHSEED, so a key has the same hash everywhere.
    """
    for some in _slices(pairs, _VALUES_PER_PICKLE):
        groups: dict[int, list[tuple[Any, list[Any]]]] = defaultdict(list)
        for key, values in _grouped(some).items():
            groups[hash(key) % tasks].append((key, values))
        for task, each in groups.items():
            yield task, pickle.dumps(each, pickle.HIGHEST_PROTOCOL)


def groups_in(pickles: Iterable[tuple[int, bytes]]) -> Iterable[tuple[Any, list[Any]]]:
    """Return each key in the pickles of `by_task`, with all its values."""
    groups: dict[Any, list[Any]] = defaultdict(list)
    for key, values in values_in(each for _, each in pickles):
        groups[key] += values
    return groups.items()


def _slices(values: Iterable[Any], size: int) -> Iterator[list[Any]]:
    left = iter(values)
    while some := list(islice(left, size)):
        yield some


def _grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    groups = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return groups
