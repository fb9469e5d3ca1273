"""Follow, join and leave the fleet of proxies that share an etcd.

States
  entered    this proxy knows the others or, while etcd does not answer, only itself
  joined     the others name this proxy; this is so only while it serves clients
  left       the others do not name this proxy, and so send it no clients; this proxy accepts no new clients

Without an etcd, or if it is to be alone, this proxy names itself in all states. The membership has an etcd client of
its own, as the routing table may come from elsewhere.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Self

import structlog

from kproxy.config import ProxyConfig
from kproxy.etcd import EtcdClient, connect
from kproxy.fleet.registration import NO_LISTENERS, Listeners, Registrar
from kproxy.fleet.view import FleetView, alone
from kproxy.observe.table import ProxyRow
from kproxy.routing.fleet import Fleet
from kproxy.runtime.tasks import cancel, in_time

# A reachable etcd answers at once, and a proxy serves without it too.
PATIENCE_S = 2.0
# Within this time the others learn that this proxy has gone, before its clients ask them.
LEAVE_PAUSE_S = 0.2

log = structlog.get_logger(__name__)


class Membership:
    """Keeps `fleet` current and, if it `registers`, this proxy's entry.

    `host` and `port` are the advertised address, `listeners` the addresses of the named listeners.

    Use as `async with`. Entering, `join` and `failed` raise StartupError for an error that retrying does not fix.
    """

    def __init__(
        self,
        config: ProxyConfig,
        host: str,
        port: int,
        *,
        counters: Counter[str],
        registers: bool = True,
        listeners: Listeners = NO_LISTENERS,
    ) -> None:
        self.fleet = Fleet([alone(host, port)])
        # The proxies as clients of each named listener reach them.
        self.by_listener = {name: Fleet([alone(*address)]) for name, address in listeners.items()}
        self._address = (host, port)
        self._client: EtcdClient | None = None
        self._registrar: Registrar | None = None
        if config.etcd and not config.alone:
            self._client = EtcdClient(config.etcd, config.etcd_options)
            self._view = FleetView(
                self._client,
                config.prefix,
                self.fleet,
                host,
                port,
                counters=counters,
                listeners=listeners,
                by_listener=self.by_listener,
            )
            if registers:
                self._registrar = Registrar(
                    self._client, config.prefix, host, port, ttl_s=config.lease_ttl_s, listeners=listeners
                )
        self._following: asyncio.Task[None] | None = None
        self._registering: asyncio.Task[None] | None = None
        self._synced = False

    @property
    def rows(self) -> list[ProxyRow]:
        """The proxies that clients see."""
        return [ProxyRow(*proxy, proxy.address == self._address) for proxy in self.fleet.proxies]

    @property
    def registration(self) -> str:
        """The state of this proxy's entry; empty if it does not register."""
        return self._registrar.state.value if self._registrar is not None else ""

    async def __aenter__(self) -> Self:
        if self._client is None:
            return self
        self._following = asyncio.create_task(self._follow(self._client))
        try:
            self._synced = await in_time(self._view.wait_synced(), self._following, PATIENCE_S)
        except BaseException:
            await self.__aexit__()
            raise
        if not self._synced:
            log.warning(
                "etcd not answering", consequence="no other proxy is known until it does", etcd=self._client.endpoints
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in (self._registering, self._following):
            if task is not None:
                await cancel(task)
        if self._client is not None:
            await self._client.close()

    async def join(self) -> None:
        """Begin to register this proxy. If etcd has answered before, wait up to PATIENCE_S for the entry."""
        if self._registrar is not None:
            self._registering = asyncio.create_task(self._registrar.run())
            if self._synced:
                await in_time(self._named(self._registrar), self._registering, PATIENCE_S)

    async def leave(self) -> None:
        """Remove this proxy's entry, and give the others time to learn of it."""
        if self._client is not None:
            self._view.leave()
        if self._registering is not None:
            await cancel(self._registering)
        if any(proxy.address != self._address for proxy in self.fleet.proxies):
            await asyncio.sleep(LEAVE_PAUSE_S)

    async def failed(self) -> None:
        """Wait for a permanent failure and raise its error.

        Returns if nothing runs.
        """
        tasks = [task for task in (self._following, self._registering) if task is not None]
        if tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _named(self, registrar: Registrar) -> None:
        """Wait until this proxy is registered and sees itself among the others."""
        await registrar.wait_entered()
        await self._view.wait_named()

    async def _follow(self, client: EtcdClient) -> None:
        await connect(client, lambda error: log.debug("etcd not connected", reason=str(error)))
        await self._view.run()
