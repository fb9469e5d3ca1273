"""Fetch: sessions, long polls over several owners, limits, and the content of a merged answer."""

from __future__ import annotations

import asyncio
import time

import pytest

from kproxy_codec.api_keys import FETCH, PRODUCE
from tests.support.brokers.scripted_upstream import Asked, ScriptedUpstream
from tests.support.clients.raw_client import fetch_frame, produce_frame
from tests.support.processes.running_proxy import both_loops, in_one_go, running_proxy

T0, T1 = ("t", 0), ("t", 1)
NO_SESSION_FOUND = 70


def empty(asked: Asked) -> None:
    """A broker without data; it does not hold the request back when it is told not to."""
    if asked.fields["max_wait_ms"] == 0:
        asked.answer()


@pytest.mark.parametrize("version", range(4, 13))
@both_loops
@in_one_go
async def test_fetch_with_one_owner_waits_at_broker(version: int) -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(fetch_frame(version=version, correlation_id=9, max_wait_ms=400, min_bytes=3))
        asked = await upstream.next()
        assert (asked.fields["max_wait_ms"], asked.fields["min_bytes"]) == (400, 3)
        asked.answer(results={T0: {"records": b"abc", "high_watermark": 5}})
        answer = await client.answer(FETCH, version)
        assert answer.correlation_id == 9
        assert (answer.codes, answer.results[0].fields["records"]) == ({T0: 0}, b"abc")


@pytest.mark.parametrize("version", range(7, 13))
@both_loops
@in_one_go
async def test_fetch_sessions_are_not_kept(version: int) -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(fetch_frame(version=version, session_id=5, session_epoch=3))
        answer = await client.answer(FETCH, version)
        assert (answer.fields["error_code"], answer.fields["session_id"]) == (NO_SESSION_FOUND, 0)
        assert answer.results == []
        # A client that asks for a new session gets its data, and session 0: there is none.
        client.send(fetch_frame(version=version, session_id=0, session_epoch=0))
        asked = await upstream.next()
        assert (asked.fields["session_id"], asked.fields["session_epoch"]) == (0, -1)
        asked.answer(session_id=77)
        assert (await client.answer(FETCH, version)).fields["session_id"] == 0
        assert len(upstream.log) == 1


@both_loops
@in_one_go
async def test_data_at_one_owner_ends_the_long_poll() -> None:
    idle, busy = ScriptedUpstream(1, empty), ScriptedUpstream(2)
    async with running_proxy(idle, busy) as proxy:
        proxy.own(1)
        proxy.own(2, partitions=[1])
        client = await proxy.client()
        began = time.monotonic()
        client.send(fetch_frame({"t": [0, 1]}, max_wait_ms=20_000))
        (await busy.next()).answer(results={T1: {"records": b"data"}})
        answer = await client.answer(FETCH, 12)
        assert time.monotonic() - began < 10
        assert [result.fields["records"] for result in answer.results] == [b"", b"data"]


@both_loops
@in_one_go
async def test_data_arriving_during_a_fetch_is_found_soon() -> None:
    idle, busy = ScriptedUpstream(1, empty), ScriptedUpstream(2, empty)
    async with running_proxy(idle, busy) as proxy:
        proxy.own(1)
        proxy.own(2, partitions=[1])
        client = await proxy.client()
        client.send(fetch_frame({"t": [0, 1]}, max_wait_ms=20_000))
        assert await client.is_silent(0.3)
        busy.script = lambda asked: asked.answer(results={T1: {"records": b"late"}})
        began = time.monotonic()
        answer = await client.answer(FETCH, 12)
        assert time.monotonic() - began < 5
        assert answer.results[1].fields["records"] == b"late"
        # Looking again is not hammering.
        assert len(idle.log) < 40


@both_loops
@in_one_go
async def test_fetch_without_data_ends_at_max_wait() -> None:
    first, second = ScriptedUpstream(1, empty), ScriptedUpstream(2, empty)
    async with running_proxy(first, second) as proxy:
        proxy.own(1)
        proxy.own(2, partitions=[1])
        client = await proxy.client()
        began = time.monotonic()
        client.send(fetch_frame({"t": [0, 1]}, max_wait_ms=300, correlation_id=3))
        answer = await client.answer(FETCH, 12)
        assert 0.2 < time.monotonic() - began < 10
        assert (answer.correlation_id, answer.codes) == (3, {T0: 0, T1: 0})


@both_loops
@in_one_go
async def test_error_ends_a_waiting_fetch() -> None:
    first, second = ScriptedUpstream(1, empty), ScriptedUpstream(2)
    async with running_proxy(first, second) as proxy:
        proxy.own(1)
        proxy.own(2, partitions=[1])
        client = await proxy.client()
        began = time.monotonic()
        client.send(fetch_frame({"t": [0, 1]}, max_wait_ms=20_000))
        (await second.next()).answer(results={T1: 1})
        assert (await client.answer(FETCH, 12)).codes == {T0: 0, T1: 1}
        assert time.monotonic() - began < 10


@both_loops
@in_one_go
async def test_pieces_of_a_fetch_share_its_max_bytes() -> None:
    upstreams = [ScriptedUpstream(node_id) for node_id in (1, 2, 3)]
    async with running_proxy(*upstreams) as proxy:
        for upstream in upstreams:
            proxy.own(upstream.node_id, partitions=[upstream.node_id])
        client = await proxy.client()
        client.send(fetch_frame({"t": [1, 2, 3]}, max_bytes=3000))
        asked = [await upstream.next() for upstream in upstreams]
        assert [each.fields["max_bytes"] for each in asked] == [1000] * 3
        for each in asked:
            each.answer(results={place: {"records": b"x"} for place in each.partitions})
        assert len((await client.answer(FETCH, 12)).results) == 3


@both_loops
@in_one_go
async def test_whole_answer_error_counts_for_each_partition() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(fetch_frame())
        (await upstream.next()).answer(error_code=29)
        answer = await client.answer(FETCH, 12)
        assert answer.codes == {T0: 29}


@both_loops
@in_one_go
async def test_waiting_fetches_do_not_delay_each_other() -> None:
    """One that waits for data must not keep a produce request on the same connection from its broker."""
    first, second = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(first, second) as proxy:
        proxy.own(1)
        proxy.own(2, partitions=[1])
        first.script = second.script = lambda asked: asked.answer()
        client = await proxy.client()
        client.send(fetch_frame({"t": [0, 1]}, max_wait_ms=400, correlation_id=1), produce_frame(correlation_id=2))
        assert (await client.answer(FETCH, 12)).correlation_id == 1
        assert (await client.answer()).correlation_id == 2
        asked = [each.header.api_key for each in first.log]
        assert FETCH in asked[asked.index(PRODUCE) :], "what was produced went only when nobody looked any more"


@both_loops
@in_one_go
async def test_leaving_client_ends_its_repeated_reads() -> None:
    first, second = ScriptedUpstream(1, empty), ScriptedUpstream(2, empty)
    async with running_proxy(first, second) as proxy:
        proxy.own(1)
        proxy.own(2, partitions=[1])
        client = await proxy.client()
        client.send(fetch_frame({"t": [0, 1]}, max_wait_ms=5000))
        await asyncio.sleep(0.1)
        client.close()
        await first.connections[0].until_closed()
        looked = len(first.log)
        await asyncio.sleep(0.2)
        assert len(first.log) == looked
