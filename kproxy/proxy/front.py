"""The interface between a proxy process and its observers.

A process that serves alone has a `Front` of its own: its admin page, stdout and stderr. A worker's front reports to its
supervisor (kproxy.workers).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeVar

import msgspec

from kproxy.claims.admin import ClaimsAdmin
from kproxy.config import Address, ProxyConfig
from kproxy.observe.admin import AdminPage, ReplicaPages
from kproxy.observe.exposition import render
from kproxy.observe.http_page import HttpPage, Readiness
from kproxy.observe.metrics import ProxyCollector, Vitals, own_process
from kproxy.observe.page_guard import PageGuard
from kproxy.observe.table import ClaimsQuery, FreeOrder, TableQuery, TableView, table_page
from kproxy.observe.tally import Tally
from kproxy.proxy.admission import OpenConnections
from kproxy.runtime.notify import say_ready, say_stopping, say_waiting
from kproxy.security.quotas import Accounts
from kproxy.trail.shipper import ShipperVitals

Page = TypeVar("Page", bound=HttpPage)


class OwnPages:
    """The admin page of this process alone. `claims` raises NotOffered if there are none, or Unanswered.

    `readiness_s` bounds the time that `readiness` takes.
    """

    readiness_s: float | None = None

    def __init__(
        self,
        *,
        table: Callable[[], TableView],
        readiness: Callable[[], Awaitable[Readiness]],
        tally: Tally,
        counters: Mapping[str, int],
        vitals: Callable[[], Vitals],
        claims: Callable[[], ClaimsAdmin],
        shipping: Callable[[], ShipperVitals | None],
    ) -> None:
        self._table = table
        self._claims = claims
        self._readiness = readiness
        self._proxy = ProxyCollector(tally=tally, counters=counters, table=table, vitals=vitals, shipping=shipping)
        self._process = tuple(own_process())

    async def table(self, query: TableQuery, worker: int | None = None) -> bytes:
        if worker not in (None, 1):
            raise ValueError(f"there is no worker {worker}: this process serves alone")
        page = table_page(self._table(), topic=query.topic, after=query.after, limit=query.limit)
        return msgspec.json.encode(page)

    async def claims(self, query: ClaimsQuery) -> bytes:
        return msgspec.json.encode(self._claims().page(query))

    async def free(self, order: FreeOrder) -> bytes:
        return msgspec.json.encode(await self._claims().free(order))

    async def summary(self) -> str:
        return "kproxy"

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        return render((*self._process, self._proxy), accept)

    async def readiness(self) -> Readiness:
        try:
            async with asyncio.timeout(self.readiness_s):
                return await self._readiness()
        except TimeoutError:
            return Readiness(ready=False, text="no broker has answered yet")

    async def liveness(self) -> Readiness:
        return Readiness(True, "alive")


class Front(Protocol):
    """The reports of one process; `worker` is its number if other processes listen on the same port."""

    worker: int | None

    async def open(self, pages: OwnPages) -> None:
        """Show `pages` from now on. Raises StartupError."""
        ...

    def waits(self, sentence: str) -> None:
        """Report what startup waits for; called again when that changes, and from time to time."""
        ...

    def share(self, accounts: Accounts, connections: OpenConnections) -> asyncio.Task[None] | None:
        """Share what these limit with other processes on the port, from now on; None: there is nothing to share.

        The caller ends the task.
        """
        ...

    def ready(self, kafka: str, source: str) -> None:
        """Report that clients are served at `kafka`; `source` is the ready line's part about the ownership source."""
        ...

    def stops(self) -> None:
        """Report that the process stops, before clients notice."""
        ...

    async def close(self) -> None:
        """Show nothing more."""
        ...


class OwnFront:
    """The front of a process that serves alone; without an admin page if the configuration names none."""

    worker: int | None = None

    def __init__(self, config: ProxyConfig) -> None:
        self._address = config.admin
        self._guard = guard_of(config)
        self._replicas = ReplicaPages(config)
        self._admin: AdminPage | None = None
        self._said = ""

    async def open(self, pages: OwnPages) -> None:
        if self._address is not None:
            self._admin, self._said = await start_admin(
                AdminPage(pages, self._replicas.page, self._guard), self._address
            )

    def waits(self, sentence: str) -> None:
        say_waiting(sentence)

    def share(self, accounts: Accounts, connections: OpenConnections) -> asyncio.Task[None] | None:
        return None

    def ready(self, kafka: str, source: str) -> None:
        say_ready(f"kafka={kafka}{self._said}{source}")

    def stops(self) -> None:
        say_stopping()

    async def close(self) -> None:
        if self._admin is not None:
            await self._admin.stop()
        await self._replicas.close()


def guard_of(config: ProxyConfig) -> PageGuard:
    """The protection of a proxy's admin page."""
    options = config.admin_options
    hosts = [*options.hosts, *(address.host for address in (config.admin, config.advertise) if address is not None)]
    return PageGuard(options.token, hosts, token_for_all=options.token_for_all)


async def start_admin(admin: Page, address: Address) -> tuple[Page, str]:
    """Start the page; return it and its part of the ready line. Raises StartupError."""
    host, port = address
    return admin, f" admin={host}:{await admin.start(host, port)}"
