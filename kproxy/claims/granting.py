"""From a claim that stands in etcd to one that counts: nobody else may be served by then.

What a claim waits for
  confirmed   every member that was there before has acted upon it: whoever lost something by it is severed, and nothing
              of theirs is under way. A member that is dead has lost its own lease, and is not waited for.
  bound       the leader of the partition knows the fence (kproxy.proxy.binding), where it knows of fences at all

Invariants
1. A claim is granted when it is confirmed and bound, and while its connection and this process's lease live.
2. Whoever asks again goes on waiting: what is not granted in time stands in etcd all the same.
3. A claim that its partition's leader refuses for good is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import structlog

from kproxy.claims.aftermath import Aftermath
from kproxy.claims.changes import Changes
from kproxy.claims.claiming import Claiming, Outcome
from kproxy.claims.holdings import Holdings
from kproxy.claims.member import OwnMember
from kproxy.claims.releasing import Gates
from kproxy.claims.settlement import Settlement
from kproxy.claims.table import OwnTable
from kproxy.etcd import EtcdError
from kproxy_codec.error_codes import COORDINATOR_NOT_AVAILABLE, NONE, REQUEST_TIMED_OUT
from kproxy_codec.own import FenceBinding

log = structlog.get_logger(__name__)


Bind = Callable[[list[FenceBinding], float], Coroutine[Any, Any, dict[tuple[str, int], int]]]
"""Binds partitions at their leaders until a deadline (seconds, the event loop's clock): an error code for each."""


class Granting:
    """For the process that `member` is; `has_fences` tells whether its brokers know fences."""

    def __init__(
        self,
        table: OwnTable,
        member: OwnMember,
        settlement: Settlement,
        gates: Gates,
        claiming: Claiming,
        changes: Changes,
        aftermath: Aftermath,
        *,
        has_fences: Callable[[], bool],
    ) -> None:
        self._table = table
        self._member = member
        self._settlement = settlement
        self._gates = gates
        self._claiming = claiming
        self._changes = changes
        self._aftermath = aftermath
        self._has_fences = has_fences

    async def see_granted(
        self, holdings: Holdings, outcomes: Mapping[str, Outcome], bind: Bind, deadline: float
    ) -> dict[str, int]:
        """Wait until what was taken is confirmed and bound; an error code for each that was taken."""
        group = holdings.group or ""
        taken = {resource: each.held for resource, each in outcomes.items() if each.held is not None}
        waiting = {resource: held for resource, held in taken.items() if not held.is_granted}
        codes = dict.fromkeys(taken, NONE)
        for resource, held in waiting.items():
            if not await self._confirmed_by(deadline, held.fence, group, resource):
                codes[resource] = REQUEST_TIMED_OUT
        confirmed = [resource for resource in waiting if codes[resource] == NONE]
        bindings = {resource: self._bindings(group, resource, waiting[resource].fence) for resource in confirmed}
        wanted = [binding for each in bindings.values() for binding in each]
        bound = await bind(wanted, deadline) if wanted else {}
        for resource in confirmed:
            codes[resource] = max((bound.get(each[:2], NONE) for each in bindings[resource]), default=NONE)
            if codes[resource] != NONE or all(each[:2] in bound for each in bindings[resource]):
                continue
            codes[resource] = await self._see_settled(deadline, waiting[resource].fence, group, resource)
        if holdings.has_ended or not self._member.is_live():
            return dict.fromkeys(taken, COORDINATOR_NOT_AVAILABLE)
        holdings.grant(resource for resource in confirmed if codes[resource] == NONE)
        for resource in confirmed:
            if codes[resource] not in (NONE, REQUEST_TIMED_OUT):
                self._give_up(holdings, resource)
        return codes

    def _bindings(self, group: str, resource: str, fence: int) -> list[FenceBinding]:
        """The partitions whose leaders are to know of a claim."""
        return [FenceBinding(*partition, fence) for partition in self._gates.partitions(group, resource)]

    async def _see_settled(self, deadline: float, fence: int, group: str, resource: str) -> int:
        """An error code for what no broker fences; it may have been taken for fenced when it was confirmed."""
        try:
            await self._aftermath.mark(self._member.name)
        except EtcdError as error:
            log.warning("own_not_granted", group=group, resource=resource, reason=str(error))
            return REQUEST_TIMED_OUT
        is_settled = await self._confirmed_by(deadline, fence, group, resource, is_fenced=False)
        return NONE if is_settled else REQUEST_TIMED_OUT

    def _give_up(self, holdings: Holdings, resource: str) -> None:
        """Invariant 3."""
        held = holdings.forget(resource)
        if held is not None and holdings.group is not None:
            self._claiming.delete(holdings.group, resource, held.fence)

    async def _confirmed_by(
        self, deadline: float, fence: int, group: str, resource: str, *, is_fenced: bool = True
    ) -> bool:
        while not self._is_confirmed(fence, group, resource, is_fenced=is_fenced and self._has_fences()):
            if not await self._changes.wait(deadline):
                return False
        return True

    def _is_confirmed(self, fence: int, group: str, resource: str, *, is_fenced: bool) -> bool:
        """Whether all who were there before have acted upon the claim, and nothing earlier is under way.

        Where brokers know fences (`is_fenced`) what is under way is refused at its end.
        """
        if self._table.revision < fence:
            return False
        others = [
            member
            for name, member in self._table.members.items()
            if name != self._member.name and member.create_revision <= fence
        ]
        if any(member.seen < fence for member in others):
            return False
        if is_fenced:
            return True
        listed = [self._settlement.unsettled(), *(member.unsettled for member in others)]
        return not any(self._settlement.keeps_back(group, resource, each) for each in listed)
