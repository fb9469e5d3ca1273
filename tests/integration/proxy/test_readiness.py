"""`/readyz` is right: ready only if clients can be served, and a stale table does not prevent it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from random import Random

from kproxy.observe.table import TableView
from kproxy.proxy.broker_health import AT_ONCE, FRESH_S, ReadinessProbe, readiness
from kproxy.proxy.dialling import Dialler
from kproxy.routing.topology import Address, Topology
from kproxy_codec.api_keys import API_VERSIONS
from tests.support.brokers.scripted_upstream import Asked, DeafListener, ScriptedUpstream
from tests.support.processes.running_proxy import both_loops, in_one_go
from tests.support.processes.served import page, static_proxy


def says_what_it_serves(asked: Asked) -> None:
    assert (asked.header.api_key, asked.header.api_version) == (API_VERSIONS, 0)
    asked.answer_message(error_code=0, api_keys=[])


def brokers(*addresses: Address, timeout_s: float = 0.5) -> ReadinessProbe:
    known = dict(enumerate(addresses))
    return ReadinessProbe(lambda: known, dialler=Dialler(), timeout_s=timeout_s, clock=time.monotonic, random=Random(1))


async def becomes(admin: str, status: int) -> str:
    """The page's text as soon as it has this status."""
    deadline = time.monotonic() + 60
    while True:
        found, text = await asyncio.to_thread(page, admin, "/readyz")
        if found == status:
            return text
        assert time.monotonic() < deadline, (found, text)
        await asyncio.sleep(0.1)


async def test_proxy_is_unready_until_a_broker_returns(tmp_path: Path) -> None:
    first = await ScriptedUpstream(1, says_what_it_serves).start()
    second = await ScriptedUpstream(2, says_what_it_serves).start()
    with static_proxy(tmp_path, {1: first.port, 2: second.port}) as process:
        assert await becomes(process.admin, 200) == "ready\n"
        await first.stop()
        for _ in range(2):
            await asyncio.sleep(FRESH_S)
            assert await becomes(process.admin, 200) == "ready\n"
        await second.stop()
        assert await becomes(process.admin, 503) == "no broker answers: 2 asked\n"
        # It lives all the same: nobody should restart it for that.
        assert await asyncio.to_thread(page, process.admin, "/livez") == (200, "alive\n")
        await first.start(first.port)
        assert await becomes(process.admin, 200) == "ready\n"
        await first.stop()


@both_loops
@in_one_go
async def test_silent_broker_does_not_make_proxy_ready() -> None:
    """As a stopped process does."""
    hung = await ScriptedUpstream(1).start()
    asked = brokers(hung.address)
    assert await asked.problem() == "no broker answers: 1 asked"
    await asked.close()
    await hung.stop()


@both_loops
@in_one_go
async def test_non_broker_does_not_make_proxy_ready() -> None:
    def script(asked: Asked) -> None:
        asked.connection.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    other = await ScriptedUpstream(1, script).start()
    asked = brokers(other.address, Address("no such host.invalid", 9092))
    assert await asked.problem() is not None
    await asked.close()
    await other.stop()


@both_loops
@in_one_go
async def test_answering_broker_is_found_among_hung_ones() -> None:
    sound = await ScriptedUpstream(1, says_what_it_serves).start()
    with DeafListener() as deaf:
        asked = brokers(*[deaf.address] * (2 * AT_ONCE), sound.address, timeout_s=0.2)
        assert await asked.problem() is None
        await asked.close()
    await sound.stop()


@both_loops
@in_one_go
async def test_concurrent_readiness_checks_share_one_request() -> None:
    sound = await ScriptedUpstream(1, says_what_it_serves).start()
    asked = brokers(sound.address)
    assert await asyncio.gather(*(asked.problem() for _ in range(50))) == [None] * 50
    assert await asked.problem() is None
    assert len(sound.log) == 1
    await asked.close()
    await sound.stop()


@both_loops
@in_one_go
async def test_leaving_waiter_does_not_affect_others() -> None:
    hung = await ScriptedUpstream(1).start()
    asked = brokers(hung.address)
    waiting = [asyncio.create_task(asked.problem()) for _ in range(2)]
    await asyncio.sleep(0.05)
    waiting[0].cancel()
    assert await waiting[1] is not None
    await asked.close()
    await hung.stop()


async def test_readiness_text_matches_each_finding() -> None:
    sound = await ScriptedUpstream(1, says_what_it_serves).start()
    fresh, stale = TableView(Topology(), 0.0, False), TableView(Topology(), 90.0, True)
    good, none = brokers(sound.address), brokers()
    for not_ready, view, asked, ready, text in (
        (None, fresh, good, True, "ready"),
        (None, stale, good, True, "ready, degraded: the table is stale, the last known owners are used"),
        (None, fresh, none, False, "no broker is known"),
        (None, stale, none, False, "no broker is known"),
        ("draining", fresh, good, False, "draining"),
    ):
        said = await readiness(not_ready, view, asked)
        assert (said.ready, said.text) == (ready, text)
    for each in (good, none):
        await each.close()
    await sound.stop()
