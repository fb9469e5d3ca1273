"""This proxy among the proxies that share an etcd.

It decides which proxies are named to clients, and whether this one is.

States
  entered    it knows the others; or etcd does not answer, and it is alone until etcd does
  joined     the others name it: from when it serves clients, not before
  left       the others do not name it: it takes no more clients, and they send it none

Without an etcd, or if it is configured to be alone, it names only itself in all states. It uses an etcd client of its
own: the routing table may come from elsewhere.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from types import TracebackType
from typing import Self

import structlog

from kproxy.config import ProxyConfig
from kproxy.etcd import EtcdClient
from kproxy.fleet.registration import Registrar
from kproxy.fleet.view import FleetView, alone
from kproxy.observe.table import ProxyRow
from kproxy.proxy.sources import connect
from kproxy.routing.fleet import Fleet
from kproxy.runtime.tasks import cancel, in_time

# How long to wait for etcd: one that is up answers at once, and a proxy without it serves as well. Seconds.
PATIENCE_S = 2.0
# In this time, in seconds, the others learn that this one has gone, before its clients ask them where to go.
LEAVE_PAUSE_S = 0.2

log = structlog.get_logger(__name__)


class Membership:
    """Keeps the `fleet` and this proxy's entry in it current.

    The entry is kept only if it `registers`; `host` and `port` are what it advertises.

    Use as `async with`. Raises StartupError, there and from `failed`, for etcd errors that waiting does not resolve.
    """

    def __init__(
        self, config: ProxyConfig, host: str, port: int, *, counters: Counter[str], registers: bool = True
    ) -> None:
        self.fleet = Fleet([alone(host, port)])
        self._address = (host, port)
        self._client: EtcdClient | None = None
        self._registrar: Registrar | None = None
        if config.etcd and not config.alone:
            self._client = EtcdClient(config.etcd, config.etcd_options)
            self._view = FleetView(self._client, config.prefix, self.fleet, host, port, counters=counters)
            if registers:
                self._registrar = Registrar(self._client, config.prefix, host, port, ttl_s=config.lease_ttl_s)
        self._following: asyncio.Task[None] | None = None
        self._registering: asyncio.Task[None] | None = None
        self._synced = False

    @property
    def rows(self) -> list[ProxyRow]:
        """The proxies that clients are told of."""
        return [ProxyRow(*proxy, proxy.address == self._address) for proxy in self.fleet.proxies]

    @property
    def registration(self) -> str:
        """The state of this proxy's registration; empty if it does not register."""
        return self._registrar.state.value if self._registrar is not None else ""

    async def __aenter__(self) -> Self:
        if self._client is None:
            return self
        self._following = asyncio.create_task(self._follow(self._client))
        try:
            self._synced = await in_time(self._view.wait_synced(), self._following, PATIENCE_S)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        if not self._synced:
            log.warning("etcd does not answer: until it does no other proxy is known", etcd=self._client.endpoints)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in (self._registering, self._following):
            if task is not None:
                await cancel(task)
        if self._client is not None:
            await self._client.close()

    async def join(self) -> None:
        """Register this proxy; if etcd does not answer, as soon as it does."""
        if self._registrar is not None:
            self._registering = asyncio.create_task(self._registrar.run())
            if self._synced:
                await in_time(self._named(self._registrar), self._registering, PATIENCE_S)

    async def leave(self) -> None:
        """Remove this proxy's entry and give the others time to learn of it."""
        if self._client is not None:
            self._view.leave()
        if self._registering is not None:
            await cancel(self._registering)
        if any(proxy.address != self._address for proxy in self.fleet.proxies):
            await asyncio.sleep(LEAVE_PAUSE_S)

    async def failed(self) -> None:
        """Wait until something here fails for good, and raise its error. Returns if nothing runs."""
        tasks = [task for task in (self._following, self._registering) if task is not None]
        if tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _named(self, registrar: Registrar) -> None:
        """Wait until this proxy is registered and sees what the others see."""
        await registrar.wait_entered()
        await self._view.wait_named()

    async def _follow(self, client: EtcdClient) -> None:
        await connect(client, lambda error: log.debug("etcd_not_connected", reason=str(error)))
        await self._view.run()
