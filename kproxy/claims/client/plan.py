"""Check the arguments of `own`, and define the interface (`Driver`) through which a client library is used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from kproxy.claims.rules import FIRST_GENERATION
from kproxy_codec.own import MAX_RESOURCES, WHOLE_GROUP, OwnRequest, OwnResponse

NO_LEADER: Final = -1

ConnectionT = TypeVar("ConnectionT")


class ClaimPlan(NamedTuple):
    """The arguments of `own`. For the whole group `resources` has only WHOLE_GROUP."""

    group: str
    resources: tuple[str, ...]
    generation: int
    stand_by: bool
    reclaim: bool
    timeout_s: float
    check_every_s: float

    @property
    def yielding(self) -> int:
        """A generation with which a claim takes nothing from a claimant with `generation`."""
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
    """Check the arguments of `own`. Raises ValueError for invalid ones."""
    if isinstance(resources, str):
        raise ValueError(f"invalid resources {resources!r}; expected a list, such as [{resources!r}]")
    names = (WHOLE_GROUP,) if resources is None else tuple(map(_name_of, resources))
    if not names or len(names) > MAX_RESOURCES:
        raise ValueError(f"{len(names)} resources; expected 1 to {MAX_RESOURCES}, or None for the whole group")
    if resources is not None and "" in names:
        raise ValueError("a resource has an empty name; give None for the whole group")
    if len(set(names)) < len(names):
        raise ValueError("a resource is named twice")
    if not group:
        raise ValueError("the group has an empty name")
    if generation < 0:
        raise ValueError(f"invalid generation {generation}; expected 1 or more, or 0 to take over from any client")
    if (stand_by or reclaim) and (generation <= FIRST_GENERATION or resources is None):
        raise ValueError(
            "stand_by and reclaim need named resources and a generation of 2 or more: they first ask with the "
            "generation before it, which takes nothing from an owner of the same generation"
        )
    return ClaimPlan(group, names, generation, stand_by, reclaim, timeout_s, check_every_s)


def _name_of(resource: str | tuple[str, int]) -> str:
    return resource if isinstance(resource, str) else f"{resource[0]}/{resource[1]}"


class Driver(Protocol[ConnectionT]):
    """A client library, on its own thread and loop. Failures raise ConnectionLost."""

    def now(self) -> float: ...
    async def wait(self, seconds: float) -> None:
        """Wait for `seconds`, or until `wake` is called."""

    def wake(self) -> None: ...
    async def refresh(self, topics: Collection[str]) -> None:
        """Ask for the leaders of these topics."""

    def leader(self, topic: str, partition: int) -> int | None:
        """Return the known leader, NO_LEADER if there is none, or None if the topic is unknown."""

    def any_node(self) -> int | None: ...
    async def open(self, node: int) -> ConnectionT:
        """Return the connection to the node that the library itself uses."""

    def is_open(self, connection: ConnectionT) -> bool: ...
    def is_busy(self, connection: ConnectionT) -> bool:
        """Whether the connection has an unanswered request."""

    def watch(self, connection: ConnectionT, on_closed: Callable[[], None]) -> None:
        """Call `on_closed` at the connection's end, before requests on it are reported as failed."""

    async def ask(self, connection: ConnectionT, request: OwnRequest, timeout_s: float) -> OwnResponse:
        """Send an Own request and return the answer. Raises OwnNotOffered too."""

    async def ping(self, connection: ConnectionT, timeout_s: float) -> None: ...
    def shut(self, connection: ConnectionT) -> None: ...


class Held(NamedTuple, Generic[ConnectionT]):
    """A granted claim and its connection."""

    connection: ConnectionT
    node: int
    generation: int
    fence: int
