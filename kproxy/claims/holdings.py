"""What one client connection has claimed.

States of a claim, here
  claimed   it stands in etcd; it is not known yet that nobody else is served
  granted   every member has acted upon it, and the partition's leader where it knows fences

Transitions
  (none)  -> claimed   its transaction succeeded, or the mirror tells that one did whose answer was lost
  claimed -> granted   confirmed
  granted -> claimed   it is raised, or reset: a new grant, with a new fence
  any     -> (none)    the connection has ended: it is severed when one of its claims is lost, and all go with it
  claimed -> (none)    the partition's leader refused it

Invariants
1. A connection belongs to one group from its first valid Own request on.
2. A connection that ended has nothing, whatever is still under way for it.
3. `write_fences` has the granted claims that gate writes, and nothing else: what is not in it may not be written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from kproxy.claims.rules import Owner
from kproxy_codec.own import WHOLE_GROUP, resource_partition

MAX_CLAIMS_PER_CONNECTION: Final = 10_000


class Held:
    """One claim; `fence` is the revision of the put that made it."""

    __slots__ = ("fence", "generation", "is_granted")

    def __init__(self, generation: int, fence: int) -> None:
        self.generation = generation
        self.fence = fence
        self.is_granted = False


class Holdings:
    """The claims of the connection `connection`; `client` is its name for people.

    `sever` closes it, for a reason. `gates` tells whether writes to a topic are gated by a group.
    """

    def __init__(
        self, connection: int, client: str, sever: Callable[[str], None], gates: Callable[[str, str], bool]
    ) -> None:
        self.connection = connection
        self.client = client
        self.group: str | None = None
        self.held: dict[str, Held] = {}
        self.write_fences: dict[tuple[bytes, int], int] = {}
        # Of a granted claim of a whole group; 0 for none.
        self.whole_fence = 0
        self.has_ended = False
        self._sever = sever
        self._gates = gates

    def owner(self, member: str) -> Owner:
        return Owner(member, self.connection)

    def gates(self, topic: str) -> bool:
        """Whether writes to this topic are gated by this connection's group."""
        return self.group is not None and self._gates(topic, self.group)

    def write_fence(self, topic: bytes, partition_index: int) -> int:
        """The fence that writes to a gated partition stand behind; 0 where it may not be written."""
        fence = self.write_fences.get((topic, partition_index), 0)
        if self.whole_fence > fence and self.gates(topic.decode(errors="replace")):
            return self.whole_fence
        return fence

    def learn(self, resource: str, generation: int, fence: int) -> Held:
        """A claim stands in etcd."""
        held = self.held.get(resource)
        if held is None or held.fence < fence:
            held = self.held[resource] = Held(generation, fence)
        return held

    def counting(self, resource: str) -> Held | None:
        """The claim by which a resource is had: of its own and that of the whole group the later one (rules.latest)."""
        held, whole = self.held.get(resource), self.held.get(WHOLE_GROUP)
        if held is None or whole is None:
            return held or whole
        return held if held.fence > whole.fence else whole

    def grant(self, resources: Iterable[str]) -> None:
        """Claims are confirmed."""
        if self.has_ended:
            return
        for resource in resources:
            held, counting = self.held.get(resource), self.counting(resource)
            if counting is None:
                continue
            if held is not None:
                held.is_granted = True
            partition = resource_partition(resource)
            if resource == WHOLE_GROUP:
                self.whole_fence = counting.fence
            elif partition is not None and self.gates(partition[0]):
                self.write_fences[partition[0].encode(), partition[1]] = counting.fence

    def forget(self, resource: str) -> Held | None:
        """A claim is given up, while the connection goes on; what it was."""
        if resource == WHOLE_GROUP:
            self.whole_fence = 0
        elif (partition := resource_partition(resource)) is not None:
            self.write_fences.pop((partition[0].encode(), partition[1]), None)
        return self.held.pop(resource, None)

    def may_read(self, resource: str) -> bool:
        """Whether a claim of this connection lets it read a resource of its group."""
        held, whole = self.held.get(resource), self.held.get(WHOLE_GROUP)
        return (held is not None and held.is_granted) or (whole is not None and whole.is_granted)

    def sever(self, reason: str) -> None:
        """One of the claims is lost: the connection ends."""
        if not self.has_ended:
            self._sever(reason)

    def end(self) -> dict[str, Held]:
        """The connection has ended; what it had claimed."""
        self.has_ended = True
        held, self.held = self.held, {}
        self.write_fences = {}
        self.whole_fence = 0
        return held
