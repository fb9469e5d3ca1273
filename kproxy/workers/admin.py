"""The admin page of all workers, as if of one process.

| page | of several workers |
| --- | --- |
| `/metrics` | merged by kproxy.observe.exposition; process metrics by worker |
| `/table` | of the first worker that serves and answers, or of the one that `?worker=` names |
| `/own` | of the first worker that serves and answers: every worker knows all claims |
| `/readyz` | ready while one worker is; degraded, with the reason, where another is not |
| `/livez` | 503 if no worker that serves answers: all hang |

A worker that does not answer is named, and delays the page once (kproxy.workers.process).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kproxy.observe.admin import Unanswered
from kproxy.observe.claims import ClaimsQuery, FreeOrder, NotOffered
from kproxy.observe.exposition import Family, family_of, merge, render
from kproxy.observe.http_page import Readiness
from kproxy.observe.metrics import ProcessesCollector, WorkersCollector, registered
from kproxy.observe.table import TablePage, TableQuery
from kproxy.workers.channel import (
    AskClaims,
    AskFree,
    AskReadiness,
    AskTable,
    ClaimsAnswer,
    ReadinessAnswer,
    Refused,
    TableAnswer,
)
from kproxy.workers.process import NoAnswer, Slot

READY = "ready"


class WorkerPages:
    """Serves pages of the workers in `slots`; `registration` returns their common state among other proxies."""

    def __init__(self, slots: Sequence[Slot], registration: Callable[[], str]) -> None:
        self._slots = slots
        self._registration = registration
        self._drains = False

    def drain(self) -> None:
        """Report that the workers were told to stop."""
        self._drains = True

    async def summary(self) -> str:
        return f"kproxy, {len(self._slots)} workers"

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        asked = [slot for slot in self._slots if slot.serves]
        up = dict.fromkeys((slot.number for slot in self._slots), False)
        for slot, answers in zip(asked, await asyncio.gather(*(slot.ask_counts() for slot in asked)), strict=True):
            up[slot.number] = answers
        ours = [family_of(registered(self._registration()))]
        families = merge([*(slot.counts(is_up=up[slot.number]) for slot in self._slots), ours])
        pids = {str(slot.number): slot.pid for slot in self._slots if slot.pid} | {"supervisor": os.getpid()}
        restarts = sum(slot.restarts for slot in self._slots)
        return render((ProcessesCollector(pids), WorkersCollector(up, restarts), _Known(families)), accept)

    async def table(self, query: TableQuery, worker: int | None) -> bytes:
        if worker is not None and not 1 <= worker <= len(self._slots):
            raise ValueError(f"there is no worker {worker}: there are 1 to {len(self._slots)}")
        for slot in self._serving_first() if worker is None else [self._slots[worker - 1]]:
            try:
                reply = await slot.ask(AskTable(query))
            except NoAnswer:
                continue
            if isinstance(reply, TableAnswer):
                page = msgspec.json.decode(reply.page, type=TablePage)
                return msgspec.json.encode(msgspec.structs.replace(page, registration=self._registration()))
            if isinstance(reply, Refused):
                raise ValueError(reply.reason)
        raise Unanswered("no worker answers" if worker is None else f"worker {worker} does not answer")

    async def claims(self, query: ClaimsQuery) -> bytes:
        return await self._ask_claims(AskClaims(query))

    async def free(self, order: FreeOrder) -> bytes:
        return await self._ask_claims(AskFree(order))

    async def _ask_claims(self, question: AskClaims | AskFree) -> bytes:
        unanswered = "no worker answers"
        for slot in self._serving_first():
            try:
                reply = await slot.ask(question)
            except NoAnswer:
                continue
            if isinstance(reply, ClaimsAnswer):
                return reply.page
            if isinstance(reply, Refused):
                if reply.why == "not offered":
                    raise NotOffered(reply.reason)
                if reply.why == "question":
                    raise ValueError(reply.reason)
                unanswered = reply.reason
        raise Unanswered(unanswered)

    def _serving_first(self) -> list[Slot]:
        return sorted(self._slots, key=lambda slot: not slot.serves)

    async def readiness(self) -> Readiness:
        if self._drains:
            return Readiness(False, "draining: what is in flight is being answered, new connections are not taken")
        said = await asyncio.gather(*map(_readiness, self._slots))
        return combine_readiness({slot.number: each for slot, each in zip(self._slots, said, strict=True)})

    async def liveness(self) -> Readiness:
        asked = [slot for slot in self._slots if slot.serves]
        if asked and not any(await asyncio.gather(*(slot.ask_counts() for slot in asked))):
            return Readiness(False, "no worker answers")
        return Readiness(True, "alive")


class _Known(Collector):
    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return [family.metric() for family in self._families]


async def _readiness(slot: Slot) -> Readiness:
    try:
        reply = await slot.ask(AskReadiness())
    except NoAnswer as no_answer:
        return Readiness(False, str(no_answer))
    return reply.readiness if isinstance(reply, ReadinessAnswer) else Readiness(False, "it cannot say")


def combine_readiness(said: Mapping[int, Readiness]) -> Readiness:
    """Combine the readiness of several workers, by number."""
    texts = {each.text for each in said.values()}
    if len(texts) == 1:
        return next(iter(said.values()))
    ready = any(each.ready for each in said.values())
    why = "; ".join(f"worker {number}: {each.text}" for number, each in said.items() if each.text != READY)
    return Readiness(ready, f"{READY}, degraded: {why}" if ready else why)
