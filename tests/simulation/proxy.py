"""Simulate one proxy of a world: the state that its sessions share, and its claims in worlds with the Own API.

The lease behind its claims is measured on a clock that counts suspend, as the product's does. When a proxy is suspended
(`suspend`), this clock advances without notice. etcd ends the lease meanwhile, and the proxy learns of it late.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from kproxy.claims.inflight_writes import InflightWrites
from kproxy.claims.service import OwnService
from kproxy.config import Limits
from kproxy.proxy.claims import attach
from kproxy.proxy.context import OwnershipSource, ProxyContext
from kproxy.routing.fleet import Fleet, Proxy
from kproxy.routing.topology import Topology
from kproxy.runtime.tasks import cancel
from kproxy.trail.trail import LOOK_S, Trail
from tests.simulation.dice import Dice, TimeRandom
from tests.simulation.etcd import WorldEtcd, WorldEtcdClient
from tests.simulation.network import NetworkLoop
from tests.simulation.setting import WRITERS, ClaimSetting, Setting

WALL_MS: Final = 1_700_000_000_000
PREFIX: Final = "/worlds"


class SimulatedProxy:
    """`number` counts from 0. `found` receives the findings."""

    def __init__(
        self,
        number: int,
        loop: NetworkLoop,
        dice: Dice,
        setting: Setting,
        limits: Limits,
        topology: Topology,
        source: OwnershipSource,
        found: list[str],
        etcd: WorldEtcd | None,
    ) -> None:
        self.number = number
        self.pages: list[bytes] = []
        self._loop = loop
        self._found = found
        self._is_over = False
        identity = Proxy(1_000_000 + number, "proxy.test", 19092 + number)
        clock = loop.time
        self.trail = Trail(
            f"{identity.host}:{identity.port}",
            "0123456789abcdef",
            clock=clock,
            wall_ms=self._wall_ms,
            deadline_cap_ms=limits.deadline_cap_ms,
            interval_s=1.0,
            offer=lambda page, first_sequence, last_sequence: self.pages.append(page),
            on_overlap=lambda overlap: found.append(f"an offset was given out twice: {overlap}"),
        )
        counters = Counter[str]()
        self.etcd: WorldEtcdClient | None = None
        self.own: OwnService | None = None
        self._suspended_s = 0.0
        self._serving: asyncio.Task[None] | None = None
        if setting.claims is not None and etcd is not None:
            self.etcd = WorldEtcdClient(etcd, dice, number, setting.claims.etcd_way_s)
            self.own = self._claims(setting.claims, identity, limits, counters, self.etcd)
        self.context = ProxyContext(
            topology,
            source,
            Fleet([identity]),
            limits,
            clock,
            TimeRandom(dice, clock),
            counters=counters,
            semantics=setting.semantics,
            confirm_acks0=setting.confirm_acks0,
            own=self.own,
            trail=self.trail,
        )

    def _wall_ms(self) -> int:
        return WALL_MS + int(self._loop.now * 1000)

    def _claims(
        self, claims: ClaimSetting, identity: Proxy, limits: Limits, counters: Counter[str], client: WorldEtcdClient
    ) -> OwnService:
        groups = {claims.topic: WRITERS}
        return OwnService(
            client,
            PREFIX,
            identity.host,
            identity.port,
            ttl_s=claims.ttl_s,
            writer_groups=groups,
            timeout_s=limits.own_timeout_s,
            unsettled=InflightWrites(groups, self._loop.time, unsettled_s=limits.own_unsettled_s),
            counters=counters,
            clock=lambda: self._loop.now + self._suspended_s,
            wall_clock=lambda: self._wall_ms() / 1000,
        )

    def begin(self) -> None:
        self._loop.call_soon(self.trail.begin)
        self._loop.call_later(LOOK_S, self._look)
        if self.own is not None:
            self._loop.call_soon(self._begin_to_own)

    def _begin_to_own(self) -> None:
        self._serving = self._loop.create_task(self._serve())
        self._serving.add_done_callback(self._served)

    async def _serve(self) -> None:
        if self.own is not None:
            async with attach(self.own, self.context):
                await self.own.run()

    def _served(self, serving: asyncio.Task[None]) -> None:
        if not serving.cancelled():
            self._found.append(f"what keeps claims has ended: {serving.exception()!r}")

    def _look(self) -> None:
        if not self._is_over:
            self._loop.call_later(LOOK_S, self._look)
            self.trail.look()

    @property
    def may_have_lapsed(self) -> bool:
        """Whether its claims are void, or were void for a while."""
        is_sure = self.own is not None and self.own.is_live() and self.etcd is not None and len(self.etcd.leases) == 1
        return not is_sure

    def suspend(self, deaf_s: float) -> None:
        """Suspend it for longer than its lease's TTL, and let no message from etcd arrive for `deaf_s` more."""
        if self.etcd is not None and self.own is not None:
            self.make_late(deaf_s)
            self._suspended_s += 1000.0
            self.etcd.lose_lease()

    def make_late(self, seconds: float) -> None:
        """Hold all messages between it and etcd for `seconds`."""
        if self.etcd is not None:
            self.etcd.late_until = max(self.etcd.late_until, self._loop.now + seconds)

    def close(self) -> None:
        """End it, after all clients have left."""
        self._is_over = True
        self._loop.create_task(self.context.brokers.close())
        if self.own is not None:
            self._loop.create_task(self._stop_owning(self.own))

    async def _stop_owning(self, own: OwnService) -> None:
        await own.all_freed()
        if self._serving is not None:
            await cancel(self._serving)
