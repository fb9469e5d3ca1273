"""A claim is granted once leaders fence its partitions or, where none does, once earlier writes have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from kproxy.claims.acquire import ChangeSignal, ClaimGranter, ClaimOutcome
from kproxy.claims.connection import ClaimingConnection
from kproxy.claims.inflight_writes import InflightWrites
from kproxy.claims.keys import OwnKeys
from kproxy.claims.release import WriterGroups
from kproxy.claims.table import OwnTable
from kproxy.etcd import Snapshot
from kproxy_codec.error_codes import FENCED_LEADER_EPOCH, NONE, REQUEST_TIMED_OUT
from kproxy_codec.own import FenceBinding

GROUP, TOPIC, RESOURCE = "writers", "t", "t/0"
PARTITION = (TOPIC, 0)
FENCE = 5
# An unsuccessful wait takes this long, in seconds.
PATIENCE_S = 0.05


class Site:
    """A process alone on its etcd, whose claim of RESOURCE is in etcd; it stands for its member and its brokers too."""

    name = "proxy"

    def __init__(self, *, fences: bool) -> None:
        self._fences = fences
        self.marked: list[str] = []
        self.given_up: list[tuple[str, str, int]] = []
        self.unsettled = InflightWrites({TOPIC: GROUP}, lambda: 0.0, unsettled_s=60)
        self.changes = ChangeSignal()
        self.connection = ClaimingConnection(1, "client", lambda reason: None, lambda topic, group: True)
        self.connection.group = GROUP
        table = OwnTable(OwnKeys("/kproxy"))
        table.on_snapshot(Snapshot(FENCE, 1, []))
        me = cast("Any", self)
        self._granter = ClaimGranter(
            table, me, self.unsettled, WriterGroups({TOPIC: GROUP}, me), me, self.changes, me, me
        )

    async def grant(self, bound: Mapping[tuple[str, int], int]) -> int:
        """The claim's error code, if the leaders answer like this to the request to bind it."""

        async def bind(wanted: Sequence[FenceBinding], deadline: float) -> Mapping[tuple[str, int], int]:
            assert wanted == [FenceBinding(*PARTITION, FENCE)]
            return bound

        held = self.connection.learn(RESOURCE, 1, FENCE)
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        outcomes = {RESOURCE: ClaimOutcome(NONE, held)}
        (code,) = (await self._granter.grant_all(self.connection, outcomes, cast("Any", bind), deadline)).values()
        assert held.is_granted is (code == NONE)
        return code

    def is_live(self) -> bool:
        return True

    def have_fences(self) -> bool:
        return self._fences

    async def put(self, member: str) -> None:
        self.marked.append(member)

    def add(self, *claim: Any) -> None:
        self.given_up.append(claim)


@pytest.mark.parametrize(
    ("fences", "bound", "code"),
    [
        (True, {PARTITION: NONE}, NONE),
        (True, {}, REQUEST_TIMED_OUT),
        (False, {}, REQUEST_TIMED_OUT),
        (True, {PARTITION: FENCED_LEADER_EPOCH}, FENCED_LEADER_EPOCH),
    ],
    ids=["fenced", "not by this leader", "by none", "refused"],
)
async def test_unfenced_claim_waits_for_earlier_writes(
    fences: bool, bound: Mapping[tuple[str, int], int], code: int
) -> None:
    site = Site(fences=fences)
    site.unsettled.note_written_lost(*PARTITION)
    assert await site.grant(bound) == code
    assert site.given_up == ([(GROUP, RESOURCE, FENCE)] if code == FENCED_LEADER_EPOCH else [])


@pytest.mark.parametrize("fences", [True, False])
async def test_claim_is_granted_when_writes_have_ended(fences: bool) -> None:
    site = Site(fences=fences)
    hold = site.unsettled.begin(*PARTITION)

    def answered() -> None:
        site.unsettled.done(hold)
        site.changes.notify()

    asyncio.get_running_loop().call_soon(answered)
    assert await site.grant({}) == NONE
    assert site.marked == [site.name]
