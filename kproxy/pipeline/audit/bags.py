"""The collections that the steps of an audit work on: lists in this process, or what Spark keeps on its executors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

Step = Callable[[Iterable[Any]], Iterable[Any]]


class Bag(Protocol):
    """Values in parts of any number and order. What a step or a group yields may be computed again for each reading."""

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

    def __iter__(self) -> Iterator[Any]: ...


class Here(list[Any]):
    """The bag of this process: one part in memory."""

    def over(self, step: Step) -> Here:
        return Here(step(self))

    def grouped(self) -> Here:
        groups = defaultdict(list)
        for key, value in self:
            groups[key].append(value)
        return Here(sorted(groups.items()))

    def kept(self, name: str) -> Here:
        return self

    def plus(self, others: Iterable[Any]) -> Here:
        return Here([*self, *others])
