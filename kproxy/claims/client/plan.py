"""What is to be owned, and what a client library must do for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from kproxy.claims.rules import FIRST_GENERATION
from kproxy_codec.own import MAX_RESOURCES, WHOLE_GROUP, OwnRequest, OwnResponse

NO_LEADER: Final = -1

ConnectionT = TypeVar("ConnectionT")


class ClaimPlan(NamedTuple):
    """What is to be owned. `resources` holds WHOLE_GROUP alone for the whole group."""

    group: str
    resources: tuple[str, ...]
    generation: int
    stand_by: bool
    reclaim: bool
    timeout_s: float
    check_every_s: float

    @property
    def yielding(self) -> int:
        """The generation that takes nothing from an owner of the same one."""
        return self.generation - 1


def plan_of(
    group: str,
    resources: Iterable[str | tuple[str, int]] | None,
    generation: int,
    *,
    stand_by: bool,
    reclaim: bool,
    timeout_s: float,
    check_every_s: float,
) -> ClaimPlan:
    """What `own` was asked for. Raises ValueError where that makes no sense."""
    if isinstance(resources, str):
        raise ValueError(f"resources is {resources!r}; give a list, such as [{resources!r}]")
    names = (WHOLE_GROUP,) if resources is None else tuple(map(_name_of, resources))
    if not names or len(names) > MAX_RESOURCES:
        raise ValueError(f"{len(names)} resources; name 1 to {MAX_RESOURCES}, or None for the whole group")
    if resources is not None and "" in names:
        raise ValueError("a resource has an empty name; give None for the whole group")
    if len(set(names)) < len(names):
        raise ValueError("a resource is named twice")
    if not group:
        raise ValueError("the group has an empty name")
    if generation < 0:
        raise ValueError(f"the generation is {generation}; it starts at 1, and 0 takes over from anybody")
    if (stand_by or reclaim) and (generation <= FIRST_GENERATION or resources is None):
        raise ValueError(
            "stand_by and reclaim ask with a generation less by one, so as to take nothing from another owner of the "
            "same: they need named resources and a generation of 2 or more"
        )
    return ClaimPlan(group, names, generation, stand_by, reclaim, timeout_s, check_every_s)


def _name_of(resource: str | tuple[str, int]) -> str:
    return resource if isinstance(resource, str) else f"{resource[0]}/{resource[1]}"


class Driver(Protocol[ConnectionT]):
    """What a client library does, on the thread and loop that it works on itself. What fails raises ConnectionLost."""

    def now(self) -> float: ...
    async def wait(self, seconds: float) -> None:
        """Until then, or until `wake`."""

    def wake(self) -> None: ...
    async def refresh(self, topics: Collection[str]) -> None:
        """Learn who leads them."""

    def leader(self, topic: str, partition: int) -> int | None:
        """The node that is known to; NO_LEADER for none, None for an unknown topic."""

    def any_node(self) -> int | None: ...
    async def open(self, node: int) -> ConnectionT:
        """The connection that the library itself uses to the node."""

    def is_open(self, connection: ConnectionT) -> bool: ...
    def is_busy(self, connection: ConnectionT) -> bool:
        """Whether an answer is awaited on it."""

    def watch(self, connection: ConnectionT, on_closed: Callable[[], None]) -> None:
        """Tell of its end before anything that fails by it is told."""

    async def ask(self, connection: ConnectionT, request: OwnRequest, timeout_s: float) -> OwnResponse:
        """Raises OwnNotOffered too."""

    async def ping(self, connection: ConnectionT, timeout_s: float) -> None: ...
    def shut(self, connection: ConnectionT) -> None: ...


class Held(NamedTuple, Generic[ConnectionT]):
    """What a granted claim stands on."""

    connection: ConnectionT
    node: int
    generation: int
    fence: int
