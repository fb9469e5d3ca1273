"""Fetch: sessions, and long polls over several owners.

tests/unit/routing/test_fanout_reads.py has all that is asked, kept and answered.
"""

from __future__ import annotations

import asyncio
import struct
import time
from typing import Any

import pytest

from kproxy.routing.reads import LATE_AFTER_S
from kproxy_codec.api_keys import FETCH, LIST_OFFSETS
from tests.support.brokers.scripted_upstream import Asked
from tests.support.clients.raw_client import Answer, fetch_frame, list_offsets_frame
from tests.support.scene import ANSWERS, HOLDS, T0, T1, Scene, scene
from tests.support.waiting import eventually

BOTH = {"t": [0, 1]}
LONG_MS = 20_000
NO_SESSION_FOUND = 70
MIB = 1 << 20


def reads(*offsets: int, n: int = 1, max_wait_ms: int = LONG_MS, **fields: Any) -> bytes:
    """A fetch of the first partitions from these offsets."""
    entry = {"current_leader_epoch": -1, "last_fetched_epoch": -1, "log_start_offset": -1, "partition_max_bytes": MIB}
    asked = [{"partition": index, "fetch_offset": offset, **entry} for index, offset in enumerate(offsets)]
    topics = [{"topic": "t", "partitions": asked}]
    return fetch_frame(correlation_id=n, max_wait_ms=max_wait_ms, topics=topics, **fields)


async def records(s: Scene, n: int) -> list[bytes]:
    """The records in the client's next answer, which is that to request n."""
    answer: Answer = await s.answer(FETCH, 12)
    assert answer.correlation_id == n
    return [each.fields["records"] for each in answer.results]


def offset(asked: Asked) -> int:
    """The offset that a fetch of one partition asks for."""
    return int(asked.fields["topics"][0]["partitions"][0]["fetch_offset"])


@scene(HOLDS, one_go=True)
async def test_fetch_with_one_owner_waits_at_broker(s: Scene) -> None:
    for version in range(4, 19):
        s.send(fetch_frame(version=version, correlation_id=9, max_wait_ms=400, min_bytes=3))
        asked = await s.next()
        assert (asked.fields["max_wait_ms"], asked.fields["min_bytes"]) == (400, 3), version
        asked.answer(results={T0: {"records": b"abc", "high_watermark": 5}})
        answer = await s.answer(FETCH, version)
        assert answer.correlation_id == 9
        assert (answer.codes, answer.results[0].fields["records"]) == ({T0: 0}, b"abc"), version


@scene(HOLDS, one_go=True)
async def test_fetch_sessions_are_not_kept(s: Scene) -> None:
    for count, version in enumerate(range(7, 19), 1):
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


@pytest.mark.parametrize("version", range(13, 19))
@scene(HOLDS, HOLDS)
async def test_reads_by_id_reach_each_owner(s: Scene, version: int) -> None:
    s.send(fetch_frame({**BOTH, "unknown": [0]}, version=version))
    leader = (1, struct.pack(">ii", 2, 9) + b"\0")
    for place, broker in zip((T0, T1), s.brokers, strict=True):
        asked = await broker.next()
        assert asked.partitions == [place]
        # KIP-951: the current leader, and where it is.
        asked.answer(results={place: {"tags": [leader]}}, tags=[(0, b"\2\0\0\0\2\7secret\0\0\0\1\0\0")])
    answer = await s.answer(FETCH, version)
    assert answer.codes == {T0: 0, T1: 0, ("unknown", 0): 100}
    assert b"secret" not in answer.frame
    assert leader[1] not in answer.frame
    assert {index for _, index, _ in s.proxy.source.refreshed} == {0}


@scene(HOLDS, HOLDS, one_go=True)
async def test_first_data_answers_and_the_rest_stays_asked(s: Scene) -> None:
    s.send(reads(5, 7))
    first, second = [await broker.next() for broker in s.brokers]
    assert [each.fields["max_wait_ms"] for each in (first, second)] == [LONG_MS, LONG_MS]
    for n in range(1, 20):
        first.answer(results={T0: {"records": b"%d" % n}})
        assert await records(s, n) == [b"%d" % n, b""]
        s.send(reads(5 + n, 7, n=n + 1))
        first = await s.brokers[0].next()
        assert offset(first) == 5 + n
    second.answer(results={T1: {"records": b"late"}})
    assert await records(s, 20) == [b"", b"late"]
    assert len(s.brokers[1].log) == 1


@scene(HOLDS, HOLDS, one_go=True)
async def test_min_bytes_are_counted_over_brokers(s: Scene) -> None:
    s.send(reads(5, 7, min_bytes=100))
    first, second = [await broker.next() for broker in s.brokers]
    assert [each.fields["min_bytes"] for each in (first, second)] == [50, 50]
    first.answer(results={T0: {"records": b"a" * 60}})
    again = await s.brokers[0].next()
    assert (offset(again), again.fields["min_bytes"]) == (5, 100)
    assert await s.still()
    second.answer(results={T1: {"records": b"b" * 50}})
    assert await records(s, 1) == [b"a" * 60, b"b" * 50]


@scene(HOLDS, HOLDS, one_go=True)
async def test_frozen_broker_delays_a_reader_once(s: Scene) -> None:
    s.send(reads(5, 7, max_wait_ms=500))
    first = await s.brokers[0].next()
    await asyncio.sleep(0.5)
    first.answer()
    assert await records(s, 1) == [b"", b""]
    for n in range(2, 6):
        began = time.monotonic()
        s.send(reads(5, 7, n=n, max_wait_ms=500))
        (await s.brokers[0].next()).answer(results={T0: {"records": b"a"}})
        assert await records(s, n) == [b"a", b""]
        assert time.monotonic() - began < LATE_AFTER_S
    # It has one question, whose answer still counts.
    assert len(s.brokers[1].log) == 1
    s.send(reads(5, 7, n=6, max_wait_ms=500))
    await s.brokers[0].next()
    s.brokers[1].log[0].answer(results={T1: {"records": b"thawed"}})
    assert await records(s, 6) == [b"", b"thawed"]


@scene(HOLDS, ANSWERS, one_go=True)
async def test_waiting_read_holds_up_nothing_else(s: Scene) -> None:
    s.produces(1)
    await s.accepts(1)
    assert await s.gets(1) == [0]
    s.send(reads(5, 7))
    await s.next()
    assert (await s.answer(FETCH, 12)).codes == {T0: 0, T1: 0}
    s.produces(2)
    await s.accepts(2)
    assert await s.gets(2) == [0]
    s.send(list_offsets_frame({"t": [0]}, correlation_id=3))
    (await s.next()).answer()
    assert (await s.answer(LIST_OFFSETS, 6)).correlation_id == 3


@scene(HOLDS, HOLDS, one_go=True)
async def test_leaving_client_ends_what_is_asked(s: Scene) -> None:
    s.send(reads(5, 7))
    first, _ = [await broker.next() for broker in s.brokers]
    first.answer(results={T0: {"records": b"a"}})
    await records(s, 1)
    s.client.close()
    for broker in s.brokers:
        for connection in broker.connections:
            await connection.until_closed()


@scene(HOLDS, HOLDS)
async def test_large_unwanted_answer_is_not_held(s: Scene) -> None:
    s.send(reads(5, 7))
    first, second = [await broker.next() for broker in s.brokers]
    first.answer(results={T0: {"records": b"a"}})
    await records(s, 1)
    second.answer(results={T1: {"records": b"b" * (20 * MIB)}})
    await asyncio.sleep(0.2)
    assert s.proxy.vitals.in_flight_bytes < MIB
    s.send(reads(6, 7, n=2))
    assert await records(s, 2) == [b"", b"b" * (20 * MIB)]
    again = await s.brokers[0].next()
    again.answer(results={T0: {"records": b"c" * (20 * MIB)}})
    # Nobody asks for it any more: its connection ends.
    await again.connection.until_closed()
    await eventually(lambda: s.proxy.vitals.in_flight_bytes == 0)
