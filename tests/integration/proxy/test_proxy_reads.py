"""Fetch: sessions, and long polls over several owners.

tests/unit/routing/test_fanout_answers.py has the splits, merges and repetitions of reads.
"""

from __future__ import annotations

import asyncio
import time

from kproxy_codec.api_keys import FETCH
from tests.support.brokers.scripted_upstream import Asked
from tests.support.clients.raw_client import fetch_frame
from tests.support.scene import HOLDS, T0, T1, Scene, scene

BOTH = {"t": [0, 1]}
NO_SESSION_FOUND = 70


def empty(asked: Asked) -> None:
    """A broker without data, which answers at once if asked not to wait."""
    if asked.fields["max_wait_ms"] == 0:
        asked.answer()


@scene(HOLDS, one_go=True)
async def test_fetch_with_one_owner_waits_at_broker(s: Scene) -> None:
    for version in range(4, 13):
        s.send(fetch_frame(version=version, correlation_id=9, max_wait_ms=400, min_bytes=3))
        asked = await s.next()
        assert (asked.fields["max_wait_ms"], asked.fields["min_bytes"]) == (400, 3), version
        asked.answer(results={T0: {"records": b"abc", "high_watermark": 5}})
        answer = await s.answer(FETCH, version)
        assert answer.correlation_id == 9
        assert (answer.codes, answer.results[0].fields["records"]) == ({T0: 0}, b"abc"), version


@scene(HOLDS, one_go=True)
async def test_fetch_sessions_are_not_kept(s: Scene) -> None:
    for count, version in enumerate(range(7, 13), 1):
        s.send(fetch_frame(version=version, session_id=5, session_epoch=3))
        answer = await s.answer(FETCH, version)
        assert (answer.fields["error_code"], answer.fields["session_id"]) == (NO_SESSION_FOUND, 0), version
        assert answer.results == []
        # A client that requests a new session gets its data and session 0: there are no sessions.
        s.send(fetch_frame(version=version, session_id=0, session_epoch=0))
        asked = await s.next()
        assert (asked.fields["session_id"], asked.fields["session_epoch"]) == (0, -1), version
        asked.answer(session_id=77)
        assert (await s.answer(FETCH, version)).fields["session_id"] == 0, version
        assert len(s.broker.log) == count


@scene(empty, HOLDS, one_go=True)
async def test_data_at_one_owner_ends_the_long_poll(s: Scene) -> None:
    began = time.monotonic()
    s.send(fetch_frame(BOTH, max_wait_ms=20_000))
    (await s.brokers[1].next()).answer(results={T1: {"records": b"data"}})
    answer = await s.answer(FETCH, 12)
    assert time.monotonic() - began < 10
    assert [each.fields["records"] for each in answer.results] == [b"", b"data"]


@scene(empty, empty, one_go=True)
async def test_data_arriving_during_a_fetch_is_found_soon(s: Scene) -> None:
    s.send(fetch_frame(BOTH, max_wait_ms=20_000))
    assert await s.still(0.3)
    s.brokers[1].script = lambda asked: asked.answer(results={T1: {"records": b"late"}})
    began = time.monotonic()
    answer = await s.answer(FETCH, 12)
    assert time.monotonic() - began < 5
    assert answer.results[1].fields["records"] == b"late"
    # Repeated reads do not flood the broker.
    assert len(s.broker.log) < 40


@scene(empty, empty, one_go=True)
async def test_fetch_without_data_ends_at_max_wait(s: Scene) -> None:
    began = time.monotonic()
    s.send(fetch_frame(BOTH, max_wait_ms=300, correlation_id=3))
    answer = await s.answer(FETCH, 12)
    assert 0.2 < time.monotonic() - began < 10
    assert (answer.correlation_id, answer.codes) == (3, {T0: 0, T1: 0})


@scene(empty, empty, one_go=True)
async def test_leaving_client_ends_its_repeated_reads(s: Scene) -> None:
    s.send(fetch_frame(BOTH, max_wait_ms=5000))
    await asyncio.sleep(0.1)
    s.client.close()
    await s.broker.connections[0].until_closed()
    looked = len(s.broker.log)
    await asyncio.sleep(0.2)
    assert len(s.broker.log) == looked
