"""Serve the admin page of all workers, which combines the pages of each as if there were one process.

| page | of several workers |
| --- | --- |
| `/metrics` | merged by kproxy.observe.exposition; process metrics by worker |
| `/overview` | folded by kproxy.observe.overview, with a line for each worker |
| `/topics`, `/clients` | the first rows of all workers, merged in the requested order |
| `/table` | of the first worker that answers (serving ones are asked first), or of the one that `?worker=` names |
| `/partitions`, `/own` | of the first worker that answers (serving ones are asked first): every worker knows all |
| `/replication` | of etcd, which this process reads itself: no worker knows more |
| `/readyz` | ready while one worker is; degraded, with the reason, if another is not |
| `/livez` | 503 if no worker that serves answers: all hang |

A worker that does not answer is named, and delays the page once (kproxy.workers.process).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TypeVar
from urllib.parse import urlencode

import msgspec
from aiohttp import web

from kproxy.installed import version
from kproxy.observe.exposition import Families, merge, of_known_brokers, render
from kproxy.observe.http_page import HttpPage, Readiness
from kproxy.observe.metrics import (
    ProcessesCollector,
    WorkersCollector,
    config_reloads,
    events_lost,
    expiry,
    page_connections,
    registered,
    reloads,
)
from kproxy.observe.overview import (
    CLIENT_ORDERS,
    SECURITY,
    TOPIC_ORDERS,
    ClientsPage,
    Overview,
    PartitionsPage,
    RowsQuery,
    Timeline,
    TopicsPage,
    Verdict,
    WorkerLine,
    fold,
    merge_clients,
    merge_topics,
)
from kproxy.observe.page import ReplicaPages, json_of, replication_route, rows_query
from kproxy.observe.page_guard import PageGuard
from kproxy.observe.table import TablePage
from kproxy.security.events import SecurityEvents
from kproxy.workers.process import NoAnswer, Order, Slot

READY = "ready"
_Page = TypeVar("_Page", bound=msgspec.Struct)
NO_VERDICT = Verdict("bad", "no worker answers")


@dataclass(eq=False)
class WorkerPages:
    """Serves pages of the workers in `slots`; `registration` returns the state of their common entry.

    `certificates`, `counters` and `events` are those of this process's own page; `facts` returns more for it.
    """

    slots: Sequence[Slot]
    registration: Callable[[], str]
    _: KW_ONLY
    replicas: ReplicaPages
    certificates: Callable[[], Mapping[tuple[str, str], float]]
    counters: Mapping[str, int]
    events: SecurityEvents
    facts: Callable[[], Mapping[str, str]] = dict

    def __post_init__(self) -> None:
        self._timeline = Timeline(lambda: time.time_ns() // 1_000_000)
        self._restarts = {slot.number: 0 for slot in self.slots}
        self._drains = False
        self.events.show()

    def page(self, guard: PageGuard | None = None) -> HttpPage:
        """Make the page. With `guard` None everybody is served."""
        routes = [
            web.get("/table", self._get_table),
            web.get("/partitions", self._get_partitions),
            web.get("/topics", json_of(self._topics)),
            web.get("/clients", json_of(self._clients)),
            replication_route(self.replicas),
            web.get("/own", self._pass_on),
            web.post("/own/free", self._pass_on),
        ]
        return HttpPage(self, routes, guard)

    def drain(self) -> None:
        """Report that the workers are stopping."""
        self._drains = True

    async def sample(self) -> None:
        for slot in self.slots:
            more, self._restarts[slot.number] = slot.restarts - self._restarts[slot.number], slot.restarts
            if more:
                self._timeline.add("worker", "bad", f"worker {slot.number} ended and was started again", more)
        for name, text in self.events.take_shown():
            if name in SECURITY:
                self._timeline.add(*SECURITY[name], f"{name.replace('_', ' ')}: {text}")

    async def overview(self) -> Overview:
        slots = self.slots
        asked, said = await asyncio.gather(
            asyncio.gather(*(_asked(slot, "/overview", Overview) for slot in slots)),
            asyncio.gather(*map(_readiness, slots)),
        )
        lines = [
            WorkerLine(
                slot.number,
                "good" if state.text == READY else "warn" if state.ready else "bad",
                state.text,
                each.clients or 0 if each is not None else 0,
                slot.restarts,
            )
            for slot, each, state in zip(slots, asked, said, strict=True)
        ]
        answered = [each for each in asked if each is not None]
        readiness = combine_readiness({slot.number: state for slot, state in zip(slots, said, strict=True)})
        if answered:
            folded = fold(answered, self._timeline.latest)
        else:
            now = time.time_ns() // 1_000_000
            folded = Overview(kind="proxy", name="kproxy", version=version(), at=now, started=now, verdict=NO_VERDICT)
        verdict, facts = folded.verdict, {**folded.facts, **self.facts()}
        if self._drains or not readiness.ready:
            verdict = Verdict("bad", (await self.readiness()).text)
        elif readiness.text != READY:
            verdict = Verdict("warn", f"serving, {readiness.text.removeprefix('ready, ')}")
        return await self.replicas.complete(
            msgspec.structs.replace(folded, verdict=verdict, workers=lines, facts=facts)
        )

    async def _get_partitions(self, request: web.Request) -> web.Response:
        answer = await self._pass_on(request)
        if answer.status == 200 and isinstance(answer.body, bytes):
            page = msgspec.json.decode(answer.body, type=PartitionsPage)
            answer.body = msgspec.json.encode(await self.replicas.complete_partitions(page))
        return answer

    async def _topics(self, request: web.Request) -> bytes:
        return await self._rows(request, TopicsPage, TOPIC_ORDERS, lambda page, _: page, merge_topics)

    async def _clients(self, request: web.Request) -> bytes:
        def of(page: ClientsPage, worker: int) -> ClientsPage:
            return ClientsPage([msgspec.structs.replace(line, worker=worker) for line in page.clients], page.total)

        return await self._rows(request, ClientsPage, CLIENT_ORDERS, of, merge_clients)

    async def _rows(
        self,
        request: web.Request,
        kind: type[_Page],
        orders: Iterable[str],
        of: Callable[[_Page, int], _Page],
        merge: Callable[[Sequence[_Page], RowsQuery], _Page],
    ) -> bytes:
        """Join the first rows of all workers; `of` adds the worker to a page. Raises ValueError."""
        query = rows_query(request)
        query.check(orders)
        first = {"order": query.order, "search": query.search, "limit": str(query.skip + query.limit)}
        asked = await asyncio.gather(*(_asked(slot, f"{request.path}?{urlencode(first)}", kind) for slot in self.slots))
        pages = [of(each, slot.number) for slot, each in zip(self.slots, asked, strict=True) if each is not None]
        return msgspec.json.encode(merge(pages, query))

    async def summary(self) -> str:
        return f"kproxy, {len(self.slots)} workers"

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        asked = [slot for slot in self.slots if slot.serves]
        up = dict.fromkeys((slot.number for slot in self.slots), False)
        for slot, answers in zip(asked, await asyncio.gather(*(slot.ask_counts() for slot in asked)), strict=True):
            up[slot.number] = answers
        ours = [registered(self.registration()), expiry(self.certificates())]
        ours += config_reloads(self.counters)
        ours += [reloads(self.counters), events_lost(self.counters), *page_connections(self.counters)]
        families = of_known_brokers(merge([*(slot.counts(is_up=up[slot.number]) for slot in self.slots), ours]))
        pids = {str(slot.number): slot.pid for slot in self.slots if slot.pid} | {"supervisor": os.getpid()}
        restarts = sum(slot.restarts for slot in self.slots)
        return render((ProcessesCollector(pids), WorkersCollector(up, restarts), Families(families)), accept)

    async def _get_table(self, request: web.Request) -> web.Response:
        try:
            worker = int(request.query["worker"]) if "worker" in request.query else None
        except ValueError as error:
            return _refused(400, str(error))
        if worker is not None and not 1 <= worker <= len(self.slots):
            return _refused(400, f"unknown worker {worker}; expected 1 to {len(self.slots)}")
        answer = await self._pass_on(request, worker)
        if answer.status == 200 and isinstance(answer.body, bytes):
            page = msgspec.json.decode(answer.body, type=TablePage)
            answer.body = msgspec.json.encode(msgspec.structs.replace(page, registration=self.registration()))
        return answer

    async def _pass_on(self, request: web.Request, worker: int | None = None) -> web.Response:
        """Return the answer of `worker`, or of the first worker that gives one."""
        page = str(request.rel_url.without_query_params("worker"))
        order = Order(await request.read(), request.content_type) if request.method == "POST" else None
        serving_first = sorted(self.slots, key=lambda slot: not slot.serves)
        unanswered = _refused(503, "no worker answers" if worker is None else f"worker {worker} does not answer")
        for slot in serving_first if worker is None else [self.slots[worker - 1]]:
            try:
                answer = await slot.ask(page, order)
            except NoAnswer:
                continue
            response = web.Response(
                status=answer.status, body=answer.body, headers={"Content-Type": answer.content_type}
            )
            if answer.status != 503:
                return response
            unanswered = response
        return unanswered

    async def readiness(self) -> Readiness:
        if self._drains:
            return Readiness(False, "draining: what is in flight is being answered, new connections are not taken")
        said = await asyncio.gather(*map(_readiness, self.slots))
        return combine_readiness({slot.number: each for slot, each in zip(self.slots, said, strict=True)})

    async def liveness(self) -> Readiness:
        asked = [slot for slot in self.slots if slot.serves]
        if asked and not any(await asyncio.gather(*map(_lives, asked))):
            return Readiness(False, "no worker answers")
        return Readiness(True, "alive")


def _refused(status: int, reason: str) -> web.Response:
    return web.Response(status=status, text=f"{reason}\n")


async def _asked(slot: Slot, path: str, kind: type[_Page]) -> _Page | None:
    """Return a worker's page; None if it gives none."""
    try:
        answer = await slot.ask(path)
        return msgspec.json.decode(answer.body, type=kind) if answer.status == 200 else None
    except (NoAnswer, msgspec.DecodeError):
        return None


async def _lives(slot: Slot) -> bool:
    try:
        return (await slot.ask("/livez")).status == 200
    except NoAnswer:
        return False


async def _readiness(slot: Slot) -> Readiness:
    try:
        answer = await slot.ask("/readyz")
    except NoAnswer as no_answer:
        return Readiness(False, str(no_answer))
    return Readiness(answer.status == 200, answer.body.decode().removesuffix("\n"))


def combine_readiness(said: Mapping[int, Readiness]) -> Readiness:
    """Combine the readiness of several workers, by number."""
    texts = {each.text for each in said.values()}
    if len(texts) == 1:
        return next(iter(said.values()))
    ready = any(each.ready for each in said.values())
    why = "; ".join(f"worker {number}: {each.text}" for number, each in said.items() if each.text != READY)
    return Readiness(ready, f"{READY}, degraded: {why}" if ready else why)
