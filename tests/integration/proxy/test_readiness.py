"""`/readyz` is right: ready only if clients can be served, even with a stale table."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from kproxy.observe.table import TableView
from kproxy.proxy.broker_health import AT_ONCE, FRESH_S, ReadinessProbe, readiness
from kproxy.proxy.dialling import Dialler
from kproxy.routing.topology import Address, Topology
from kproxy_codec.api_keys import API_VERSIONS
from tests.support.brokers.scripted_upstream import Asked, DeafListener, Script, ScriptedUpstream
from tests.support.processes.running_proxy import both_loops, in_one_go
from tests.support.processes.served import beside, page, static_proxy
from tests.support.waiting import eventually


def says_what_it_serves(asked: Asked) -> None:
    assert (asked.header.api_key, asked.header.api_version) == (API_VERSIONS, 0)
    asked.answer_message(error_code=0, api_keys=[])


@asynccontextmanager
async def probe(
    *scripts: Script | None, more: Sequence[Address] = (), timeout_s: float = 0.5
) -> AsyncIterator[tuple[ReadinessProbe, list[ScriptedUpstream]]]:
    """A probe of one broker per script, with further arguments."""
    brokers = [await ScriptedUpstream(number, script).start() for number, script in enumerate(scripts, 1)]
    known = dict(enumerate([*more, *(broker.address for broker in brokers)]))
    clock, random = time.monotonic, Random(1)
    asked = ReadinessProbe(lambda: known, dialler=Dialler(), timeout_s=timeout_s, clock=clock, random=random)
    try:
        yield asked, brokers
    finally:
        await asked.close()
        for broker in brokers:
            await broker.stop()


async def test_proxy_is_unready_until_a_broker_returns(tmp_path: Path) -> None:
    first = await ScriptedUpstream(1, says_what_it_serves).start()
    second = await ScriptedUpstream(2, says_what_it_serves).start()
    async with beside(static_proxy(tmp_path, {1: first.port, 2: second.port})) as process:

        async def becomes(status: int, text: str) -> None:
            async def is_so() -> bool:
                return await asyncio.to_thread(page, process.admin, "/readyz") == (status, text)

            await eventually(is_so)

        await becomes(200, "ready\n")
        await first.stop()
        for _ in range(2):
            await asyncio.sleep(FRESH_S)
            await becomes(200, "ready\n")
        await second.stop()
        await becomes(503, "no broker answers: 2 asked\n")
        # It lives: nothing should restart it for that.
        assert await asyncio.to_thread(page, process.admin, "/livez") == (200, "alive\n")
        await first.start(first.port)
        await becomes(200, "ready\n")
        await first.stop()


def speaks_http(asked: Asked) -> None:
    asked.connection.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")


# A stopped process, and a server that is not a broker.
@pytest.mark.parametrize("script", [None, speaks_http])
@both_loops
@in_one_go
async def test_silent_or_foreign_server_does_not_make_ready(script: Script | None) -> None:
    more = [Address("no such host.invalid", 9092)] if script else []
    async with probe(script, more=more) as (asked, _):
        problem = await asked.problem()
        assert problem is not None if script else problem == "no broker answers: 1 asked"


@both_loops
@in_one_go
async def test_answering_broker_is_found_among_hung_ones() -> None:
    with DeafListener() as deaf:
        async with probe(says_what_it_serves, more=[deaf.address] * (2 * AT_ONCE), timeout_s=0.2) as (asked, _):
            assert await asked.problem() is None


@both_loops
@in_one_go
async def test_concurrent_readiness_checks_share_one_request() -> None:
    async with probe(says_what_it_serves) as (asked, (sound,)):
        assert await asyncio.gather(*(asked.problem() for _ in range(50))) == [None] * 50
        assert await asked.problem() is None
        assert len(sound.log) == 1


@both_loops
@in_one_go
async def test_leaving_waiter_does_not_affect_others() -> None:
    async with probe(None) as (asked, _):
        waiting = [asyncio.create_task(asked.problem()) for _ in range(2)]
        await asyncio.sleep(0.05)
        waiting[0].cancel()
        assert await waiting[1] is not None


async def test_readiness_text_matches_each_finding() -> None:
    fresh, stale = TableView(Topology(), 0.0, False), TableView(Topology(), 90.0, True)
    degraded = "ready, degraded: the table is stale, the last known owners are used"
    async with probe(says_what_it_serves) as (good, _), probe() as (none, _):
        for not_ready, view, asked, ready, text in (
            (None, fresh, good, True, "ready"),
            (None, stale, good, True, degraded),
            (None, fresh, none, False, "no broker is known"),
            (None, stale, none, False, "no broker is known"),
            ("draining", fresh, good, False, "draining"),
        ):
            said = await readiness(not_ready, view, asked)
            assert (said.ready, said.text) == (ready, text)
