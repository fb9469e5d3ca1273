"""One fact from two places: what a key of its own says of a broker or topic, and what KafScale's snapshot lists of it.

A key of its own wins. A broker's own key hangs on the broker's lease: it says who is there, at this moment, and goes
when the broker does. The snapshot is what an operator or some broker wrote down once, also of brokers that are gone by
now: nobody takes an entry out when one dies. So the snapshot answers for what has no key of its own, and again once
that key has gone; that nobody listens at such an address is found out by dialling it.

Invariants
1. What was told last of a key is what stands of it: its own entry, or else the listed one, or else None.
2. What goes is told before what comes, so that an id may pass from one topic to another.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Layers(Generic[Key, Value]):
    """`tell` gets a key and what stands of it now."""

    def __init__(self, tell: Callable[[Key, Value | None], None]) -> None:
        self._tell = tell
        self._own: dict[Key, Value] = {}
        self._listed: Mapping[Key, Value] = {}
        self._told: dict[Key, Value] = {}

    def set_own(self, key: Key, value: Value | None) -> bool:
        """Take what the key of its own says, None where it is gone; whether that changes what stands."""
        if value is None:
            self._own.pop(key, None)
            value = self._listed.get(key)
        else:
            self._own[key] = value
        if value == self._told.get(key):
            return False
        if value is None:
            del self._told[key]
        else:
            self._told[key] = value
        self._tell(key, value)
        return True

    def set_listed(self, listed: Mapping[Key, Value]) -> bool:
        """Take what the snapshot lists now, which is all that it lists; whether that changes what stands."""
        self._listed = listed
        standing = {**listed, **self._own}
        if standing == self._told:
            return False
        self._settle(standing, {key for key in standing if standing[key] != self._told.get(key)})
        return True

    def load(self, own: dict[Key, Value], listed: Mapping[Key, Value] | None) -> None:
        """Take both anew, `listed` None where that stays as it is. All that stands is told, also what was before."""
        self._own = own
        if listed is not None:
            self._listed = listed
        standing = {**self._listed, **own}
        self._settle(standing, standing)

    def _settle(self, standing: dict[Key, Value], news: Iterable[Key]) -> None:
        gone = [key for key, value in self._told.items() if standing.get(key) != value]
        self._told = standing
        for key in gone:
            self._tell(key, None)
        for key in news:
            self._tell(key, standing[key])
