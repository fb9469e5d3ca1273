"""Hold the claims of one client connection, and decide which writes and reads they permit.

States of a claim
  claimed   the claim is in etcd; another connection may still be served
  granted   every earlier member has acted upon the claim, and a leader that supports fences knows the claim's fence

Transitions
  (none)  -> claimed   its transaction succeeded, according to the answer or, if the answer was lost, the mirror
  claimed -> granted   the claim is confirmed and bound (kproxy.claims.acquire)
  granted -> claimed   the claim is raised or reset, which needs a new grant, with a new fence
  any     -> (none)    the connection ends; the loss of one claim severs it, and so ends all of its claims
  claimed -> (none)    the partition's leader refused it

Invariants
1. A connection belongs to one group from its first Own request on that is not refused as a whole.
2. A connection that has ended holds nothing, even if requests of it are still under way.
3. `write_fences` has the fence of the latest grant of each claim that gates writes, also while a raised claim waits for
   its grant. A gated partition with neither such a fence nor `whole_fence` may not be written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from kproxy.claims.rules import Owner, latest
from kproxy_codec.own import WHOLE_GROUP, resource_partition

MAX_CLAIMS_PER_CONNECTION: Final = 10_000


@dataclass(slots=True, eq=False)
class Held:
    """One claim; `fence` is the revision of the put that made it."""

    generation: int
    fence: int
    is_granted: bool = False


class ClaimingConnection:
    """A client connection that may claim. `number` is unique in this process; `client` is its name for people.

    `sever(reason)` closes it. `gates(topic, group)` returns whether only claimants in the group may write to the topic.
    """

    def __init__(
        self, number: int, client: str, sever: Callable[[str], None], gates: Callable[[str, str], bool]
    ) -> None:
        self.number = number
        self.client = client
        self.group: str | None = None
        self.held: dict[str, Held] = {}
        self.write_fences: dict[tuple[bytes, int], int] = {}
        # The fence of a granted claim of the whole group; 0: none.
        self.whole_fence = 0
        self.has_ended = False
        self._sever = sever
        self._gates = gates

    def owner(self, member: str) -> Owner:
        """Return this connection as a claimant, whose process is `member`."""
        return Owner(member, self.number)

    def gates(self, topic: str) -> bool:
        """Whether only claimants in this connection's group may write to the topic."""
        return self.group is not None and self._gates(topic, self.group)

    def write_fence(self, topic: bytes, partition_index: int) -> int:
        """Return the fence for writes to a gated partition, or 0 if the connection may not write to it."""
        fence = self.write_fences.get((topic, partition_index), 0)
        if self.whole_fence > fence and self.gates(topic.decode(errors="replace")):
            return self.whole_fence
        return fence

    def learn(self, resource: str, generation: int, fence: int) -> Held:
        """Record a claim that is in etcd, unless a later one is known."""
        held = self.held.get(resource)
        if held is None or held.fence < fence:
            held = self.held[resource] = Held(generation, fence)
        return held

    def latest(self, resource: str) -> Held | None:
        """Return the later of a resource's own claim and the whole group's."""
        return latest(self.held.get(resource), self.held.get(WHOLE_GROUP))

    def grant(self, resources: Iterable[str]) -> None:
        """Mark claims as granted."""
        if self.has_ended:
            return
        for resource in resources:
            held, counting = self.held.get(resource), self.latest(resource)
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
        """Remove and return a claim that is given up while the connection stays open."""
        if resource == WHOLE_GROUP:
            self.whole_fence = 0
        elif (partition := resource_partition(resource)) is not None:
            self.write_fences.pop((partition[0].encode(), partition[1]), None)
        return self.held.pop(resource, None)

    def may_read(self, resource: str) -> bool:
        """Whether a granted claim of this connection covers the resource."""
        held, whole = self.held.get(resource), self.held.get(WHOLE_GROUP)
        return (held is not None and held.is_granted) or (whole is not None and whole.is_granted)

    def sever(self, reason: str) -> None:
        """Close the connection, because it has lost a claim."""
        if not self.has_ended:
            self._sever(reason)

    def end(self) -> dict[str, Held]:
        """Record that the connection has ended. Return the claims that it had."""
        self.has_ended = True
        held, self.held = self.held, {}
        self.write_fences = {}
        self.whole_fence = 0
        return held
