"""Report the state of a proxy process: on its admin page, stdout and stderr, or to a supervisor.

A process that serves alone has a `ProcessHost`, with an admin page of its own. A worker has another class of host,
which reports to its supervisor (kproxy.workers).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from kproxy.address import Address
from kproxy.claims.admin import ClaimsAdmin
from kproxy.config import ProxyConfig
from kproxy.config.admin import read_page_token
from kproxy.config.tls import Loaded
from kproxy.observe.exposition import Families, render
from kproxy.observe.http_page import HttpPage, Readiness
from kproxy.observe.metrics import ProxyCollector, build_info, own_process
from kproxy.observe.overview import Overview
from kproxy.observe.page import ReplicaPages, json_of, replication_route, rows_query, table_query
from kproxy.observe.page_guard import PageGuard
from kproxy.observe.table import MAX_CLAIM_ROWS, MAX_ORDER_BYTES, ClaimsQuery, FreeOrder, table_page
from kproxy.proxy.admission import OpenConnections
from kproxy.proxy.overview import ProxyObserver
from kproxy.proxy.reload import Read, ReloadStatus, read_again
from kproxy.runtime.notify import say_ready, say_stopping, say_waiting
from kproxy.security.events import SecurityEvents
from kproxy.security.quotas import Accounts
from kproxy.security.reloading import Reloading, Reloads
from kproxy.security.tls_acceptor import load_for_acceptor

Page = TypeVar("Page", bound=HttpPage)


class OwnPages:
    """The pages of this process alone, as `observer` sees it, with `replicas`.

    `claims` raises NotOffered without an Own API, or Unanswered.

    `readiness_s` bounds the time that `readiness` takes.
    """

    readiness_s: float | None = None

    def __init__(self, observer: ProxyObserver, claims: Callable[[], ClaimsAdmin], replicas: ReplicaPages) -> None:
        self.sample = observer.sample
        self._observer = observer
        self._claims = claims
        self._replicas = replicas
        self._process = tuple(own_process())
        # In a checkout the first call runs git: do that before clients are served.
        build_info()

    def routes(self) -> list[web.RouteDef]:
        """Return the pages besides the vital ones."""
        return [
            web.get("/table", json_of(self.table)),
            web.get("/partitions", json_of(self._partitions)),
            web.get("/topics", json_of(self._topics)),
            web.get("/clients", json_of(self._clients)),
            replication_route(self._replicas),
            web.get("/own", json_of(self._own)),
            web.post("/own/free", json_of(self._free)),
        ]

    async def table(self, request: web.Request) -> bytes:
        worker = int(request.query.get("worker", 1))
        if worker != 1:
            raise ValueError(f"unknown worker {worker}; this process serves alone and is worker 1")
        query = table_query(request)
        page = table_page(self._observer.table(), topic=query.topic, after=query.after, limit=query.limit)
        return msgspec.json.encode(page)

    async def _partitions(self, request: web.Request) -> bytes:
        asked = request.query
        owner = int(asked["owner"]) if "owner" in asked else None
        search, after, limit = asked.get("search", ""), asked.get("after"), int(asked.get("limit", 100))
        found = await self._observer.partitions(search, owner, after, limit)
        return msgspec.json.encode(await self._replicas.complete_partitions(found))

    async def _topics(self, request: web.Request) -> bytes:
        return msgspec.json.encode(await self._observer.topics(rows_query(request)))

    async def _clients(self, request: web.Request) -> bytes:
        return msgspec.json.encode(await self._observer.clients(rows_query(request)))

    async def _own(self, request: web.Request) -> bytes:
        asked = request.query
        query = ClaimsQuery(asked.get("group"), asked.get("after"), int(asked.get("limit", MAX_CLAIM_ROWS)))
        return msgspec.json.encode(self._claims().page(query))

    async def _free(self, request: web.Request) -> bytes:
        if request.content_type != "application/json":
            # A foreign web page can make a browser send a form, but not JSON.
            raise web.HTTPUnsupportedMediaType(text="send application/json\n")
        body = await request.read()
        if len(body) > MAX_ORDER_BYTES:
            raise ValueError(f"the body has {len(body)} bytes; expected {MAX_ORDER_BYTES} at most: name fewer claims")
        return msgspec.json.encode(await self._claims().free(msgspec.json.decode(body, type=FreeOrder)))

    async def overview(self) -> Overview:
        return await self._replicas.complete(await self._observer.overview())

    async def summary(self) -> str:
        return "kproxy"

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        observer = self._observer
        proxy = ProxyCollector(
            tally=observer.tally,
            counters=observer.counters,
            vitals=await observer.vitals(),
            table=observer.table(),
            shipping=observer.shipping(),
        )
        # Read on the event loop, which changes the tally. Counting thousands of open files takes some 10 ms, and so do
        # the families about a hundred brokers.
        families = Families(list(proxy.of_clients()))
        return await asyncio.to_thread(render, (*self._process, families, proxy.of_brokers()), accept)

    async def readiness(self) -> Readiness:
        try:
            async with asyncio.timeout(self.readiness_s):
                return await self._observer.readiness()
        except TimeoutError:
            return Readiness(ready=False, text="no broker has answered yet")

    async def liveness(self) -> Readiness:
        return Readiness(True, "alive")


class ProcessHost:
    """The reports of one process that serves alone, and its configurations.

    `worker`: its number, if others listen on the same port.
    """

    worker: int | None = None

    def __init__(self, config: ProxyConfig) -> None:
        self.replicas = ReplicaPages(config)
        self._admin: HttpPage | None = None
        self._said = ""

    async def open(self, pages: OwnPages, site: AdminSite | None) -> None:
        """Show `pages` on the admin page, if there is a `site`. Raises StartupError."""
        if site is not None:
            self._admin, self._said = await site.start(HttpPage(pages, pages.routes(), site.guard))

    def configurations(self, hangup: asyncio.Event) -> tuple[asyncio.Event, Read]:
        """Return the event that asks for another configuration, and the function that reads it."""
        return hangup, read_again

    def status(self, counters: Counter[str], events: SecurityEvents) -> ReloadStatus:
        """Return the object that reports reloads; called once, at the start."""
        return ReloadStatus(counters, events)

    def waits(self, sentence: str) -> None:
        """Report the reason why startup waits; called when it changes, and periodically."""
        say_waiting(sentence)

    def share(self, accounts: Accounts, connections: OpenConnections) -> asyncio.Task[None] | None:
        """Share these limits with other processes on the port from now on; None if no process shares it.

        The caller ends the task.
        """
        return None

    def ready(self, kafka: str, source: str) -> None:
        """Report that clients are served at `kafka`; `source` is the ready line's part about the ownership source."""
        say_ready(f"kafka={kafka}{self._said}{source}")

    def stops(self) -> None:
        """Report that the process stops, before clients see it."""
        say_stopping()

    async def close(self) -> None:
        if self._admin is not None:
            await self._admin.stop()
        await self.replicas.close()


class AdminSite:
    """Where and how the admin page of a proxy is served: its address, protection and TLS.

    `reloads` follows the files of its TLS and its token. Raises StartupError if one cannot be used.
    """

    def __init__(
        self,
        config: ProxyConfig,
        address: Address,
        reloads: Reloads,
        counters: Counter[str],
        events: SecurityEvents,
    ) -> None:
        self._address = address
        self._counters = counters
        options = config.admin_options
        self._tls: Reloading[Loaded] | None = None
        self._fixed_token = options.token or ""
        self._token: Reloading[str] | None = None
        if options.token_file is not None:
            file = options.token_file
            self._token = reloads.add(
                Reloading(
                    "token of the admin page", [file], lambda: read_page_token(file, str(file)), counters=counters
                )
            )
        tls = options.tls
        if tls.cert is not None:
            self._tls = reloads.add(
                Reloading("TLS of the admin page", tls.files, lambda: load_for_acceptor(tls), counters=counters)
            )
        hosts = [*(options.hosts or ()), *(each.host for each in (address, config.advertise) if each is not None)]
        self.guard = PageGuard(self._present_token, hosts, token_for_all=options.token_for_all, events=events)

    @property
    def certificates(self) -> dict[tuple[str, str], float]:
        """The end of its certificate, as in Vitals; empty without TLS."""
        certificate = self._tls.current.certificate if self._tls is not None else None
        return {} if certificate is None else {("admin", ""): certificate.expires_at}

    def _present_token(self) -> str:
        return self._fixed_token if self._token is None else self._token.current

    async def start(self, page: Page) -> tuple[Page, str]:
        """Start the page; return it and its part of the ready line. Raises StartupError."""
        host, port = self._address
        tls = self._tls
        real_port = await page.start(host, port, None if tls is None else lambda: tls.current, self._counters)
        return page, f" admin={Address(host, real_port)}"
