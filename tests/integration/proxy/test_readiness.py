"""`/readyz` is right: ready only if clients can be served, even with a stale table."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kproxy.observe.table import TableView
from kproxy.proxy.broker_watch import FRESH_S
from kproxy.routing.topology import Address, Topology
from tests.support.brokers.scripted_upstream import Asked, DeafListener, Script, ScriptedUpstream, introduction
from tests.support.processes.running_proxy import both_loops, in_one_go
from tests.support.processes.running_proxy import running_among_strangers as running_proxy
from tests.support.processes.served import beside, page, static_proxy
from tests.support.waiting import eventually

LIMITS = {"probe_timeout_s": 0.3}


def says_what_it_serves(asked: Asked) -> None:
    asked.connection.write(introduction(asked.header))


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
        # The process lives, so nothing should restart it.
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
    async with running_proxy(ScriptedUpstream(1, script), limits=LIMITS) as proxy:
        if script:
            proxy.topology.set_broker(2, Address("no such host.invalid", 9092))
        assert await proxy.context.brokers.problem() == f"no broker answers: {2 if script else 1} asked"


@both_loops
@in_one_go
async def test_answering_broker_is_found_among_hung_ones() -> None:
    with DeafListener() as deaf:
        async with running_proxy(ScriptedUpstream(40, says_what_it_serves), limits=LIMITS) as proxy:
            for number in range(32):
                proxy.topology.set_broker(number, deaf.address)
            assert await proxy.context.brokers.problem() is None


@both_loops
@in_one_go
async def test_concurrent_readiness_checks_share_one_request() -> None:
    broker = ScriptedUpstream(1, says_what_it_serves)
    async with running_proxy(broker) as proxy:
        brokers = proxy.context.brokers
        assert await asyncio.gather(*(brokers.problem() for _ in range(50))) == [None] * 50
        assert await brokers.problem() is None
        assert len(broker.log) == 1


@both_loops
@in_one_go
async def test_leaving_waiter_does_not_affect_others() -> None:
    async with running_proxy(ScriptedUpstream(1), limits=LIMITS) as proxy:
        waiting = [asyncio.create_task(proxy.context.brokers.problem()) for _ in range(2)]
        await asyncio.sleep(0.05)
        waiting[0].cancel()
        assert await waiting[1] is not None


async def test_readiness_text_matches_each_finding() -> None:
    fresh, stale = TableView(Topology(), 0.0, False), TableView(Topology(), 90.0, True)
    degraded = "ready, degraded: the table is stale, the last known owners are used"
    async with running_proxy(ScriptedUpstream(1, says_what_it_serves)) as good, running_proxy() as none:
        for proxy, view, ready, text in (
            (good, fresh, True, "ready"),
            (good, stale, True, degraded),
            (none, fresh, False, "no broker is known"),
            (none, stale, False, "no broker is known"),
        ):
            said = await proxy.listener.readiness(view)
            assert (said.ready, said.text) == (ready, text)
        good.listener.leave()
        assert not (await good.listener.readiness(fresh)).ready
