"""What an application holds while it owns something."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

from kproxy.claims.client.claimant import Claimant
from kproxy.claims.client.errors import Severed
from kproxy_codec.own import WHOLE_GROUP


class Ownership:
    """What is owned, and whether it still is. Any thread may look at it.

    `resources` are the names that were claimed; none stand for the whole group, whose name in `fences` is "".
    """

    def __init__(self, claimant: Claimant[Any]) -> None:
        self._claimant = claimant
        self.group = claimant.plan.group
        self.resources = tuple(each for each in claimant.plan.resources if each != WHOLE_GROUP)

    @property
    def is_valid(self) -> bool:
        """Whether it is owned, as far as can be known here. Only an acknowledgement tells that a write got through."""
        return self._claimant.is_valid

    @property
    def severed(self) -> Severed | None:
        """Why it is not owned any more, once that is final."""
        return self._claimant.severed

    @property
    def fences(self) -> Mapping[str, int]:
        """The fence that each resource was granted with. It rises with every grant, those to others included.

        -1 where the proxy tells none. Once it is lost it is still the latest one.
        """
        return {resource: each.fence for resource, each in self._claimant.granted.copy().items()}

    @property
    def generations(self) -> Mapping[str, int]:
        """The generation with which each resource is owned, or was last."""
        return {resource: each.generation for resource, each in self._claimant.granted.copy().items()}

    def check(self) -> None:
        """Raises Severed where it is not owned any more."""
        if self._claimant.severed is not None:
            raise self._claimant.severed


_owning: WeakSet[Any] = WeakSet()


def enter(kafka: object) -> None:
    """Two that share a client share its connections: whoever leaves first would end what the other owns."""
    if kafka in _owning:
        raise RuntimeError("this client owns something already: name all resources in one own(), or use another client")
    _owning.add(kafka)


def leave(kafka: object) -> None:
    _owning.discard(kafka)
