"""The memory for unread answers is bounded too: brokers' answers count until the client has them."""

from __future__ import annotations

import asyncio
import gc
import struct
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from kproxy.proxy import server
from kproxy.proxy.answer_memory import AnswerBuffer, AnswerMemory, ClientMemory
from kproxy.proxy.memory_budget import USUAL, Budget
from kproxy.routing import reads
from kproxy_codec.api_keys import FETCH
from tests.support.brokers.scripted_upstream import Asked, answers_everything
from tests.support.clients.raw_client import RawClient, batch, fetch_frame, produce_frame
from tests.support.processes.running_proxy import both_loops
from tests.support.processes.served import served
from tests.support.scene import HOLDS, T0, Scene, scene, staged
from tests.support.waiting import eventually

MIB = 1 << 20
NO_EPOCHS = {"current_leader_epoch": -1, "last_fetched_epoch": -1, "log_start_offset": -1}
SHORT_TICK_S = 0.02


@pytest.fixture
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time moved by `passing` is checked more often."""
    monkeypatch.setattr(server, "DEADLINE_TICK_S", SHORT_TICK_S)


@pytest.fixture(autouse=True)
def no_read_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine all brokers may exceed the limit, and a read is answered without their records."""
    monkeypatch.setattr(reads, "LATE_AFTER_S", 600.0)


class Feeder:
    """A broker that answers each fetch with a fixed number of bytes per partition, and accepts produce requests."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._answers: dict[object, bytearray] = {}

    def __call__(self, asked: Asked) -> None:
        if asked.header.api_key != FETCH:
            answers_everything(asked)
            return
        of = (tuple(asked.partitions), asked.header.api_version)
        if of not in self._answers:
            results = {place: {"records": records_of(place, self.size), "high_watermark": 1} for place in of[0]}
            self._answers[of] = bytearray(asked.reply(results=results))
        # Built once: it is large, and requested often.
        struct.pack_into(">i", self._answers[of], 4, asked.header.correlation_id)
        asked.connection.write(bytes(self._answers[of]))


def records_of(place: tuple[str, int], size: int) -> bytes:
    return bytes([65 + place[1]]) * size


def asks(n: int = 1, partitions: tuple[int, ...] = (0,), max_bytes: int = 50 * MIB, max_wait_ms: int = 100) -> bytes:
    asked = [{"partition": each, "fetch_offset": 0, "partition_max_bytes": max_bytes} for each in partitions]
    topics = [{"topic": "t", "partitions": [{**each, **NO_EPOCHS} for each in asked]}]
    limits = {"max_wait_ms": max_wait_ms, "min_bytes": 1, "max_bytes": max_bytes}
    return fetch_frame(version=11, correlation_id=n, topics=topics, **limits)


async def fetched(client: RawClient, patience_s: float = 60.0) -> dict[int, bytes]:
    """The records of the next answer, by partition."""
    answer = await client.answer(FETCH, 11, patience_s)
    assert set(answer.codes.values()) == {0}, answer.codes
    return {result.partition_index: bytes(result.fields["records"]) for result in answer.results}


async def test_unread_answers_stay_within_limit(tmp_path: Path) -> None:
    size, limit, count = 8 * MIB, 32 * MIB, 24
    async with served(tmp_path, Feeder(size), limits={"max_in_flight_bytes_total": limit}) as s:
        proxy = psutil.Process(s.process.pid)
        reader, producer = [await s.client() for _ in range(2)]
        reader.send(asks())
        assert await fetched(reader) == {0: records_of(("t", 0), size)}
        before, peak = proxy.memory_info().rss, 0
        idle = [await s.client() for _ in range(count)]
        for client in idle:
            client.pause_reading()
            client.send(asks())
        for n in range(12):
            # Reading and writing clients continue.
            producer.send(produce_frame(records=batch(n, producer_id=-1) + bytes(2 * MIB), correlation_id=n))
            assert (await producer.answer()).correlation_id == n
            reader.send(asks(n))
            assert await fetched(reader) == {0: records_of(("t", 0), size)}
            peak = max(peak, proxy.memory_info().rss)
        shown = await s.samples()
        assert peak - before < 2 * limit, f"{(peak - before) >> 20} MiB more than before"
        # All bytes are counted.
        assert size <= shown["kproxy_in_flight_bytes", ()] <= limit + size
        for client in idle:
            client.abort()

        async def nothing_is_held() -> bool:
            return (await s.samples())["kproxy_in_flight_bytes", ()] == 0

        await eventually(nothing_is_held)


@asynccontextmanager
async def fed(*feeders: Feeder, total: int, **options: Any) -> AsyncIterator[Scene]:
    """A scene with such brokers, after which no memory is held; `total` is the limit of all connections."""
    async with staged(*feeders, limits={"max_in_flight_bytes_total": total}, **options) as s:
        yield s
        for client in s.proxy._clients:
            client.abort()
        await eventually(lambda: s.proxy.vitals.in_flight_bytes == 0, "all is given back")


async def passing(s: Scene, seconds: float) -> None:
    """Let `seconds` pass for the proxy, quickly but in small steps."""
    for _ in range(round(seconds * 2)):
        s.now += 0.5
        await asyncio.sleep(1.1 * SHORT_TICK_S)


async def idle_reader(s: Scene, n: int = 1) -> None:
    """A client that asks and does not read."""
    idle = await s.proxy.client()
    idle.pause_reading()
    idle.send(asks(n))


@both_loops
async def test_readers_get_their_answers_with_little_memory() -> None:
    async with fed(Feeder(3 * MIB), total=4 * MIB, clients=12) as s:
        for client in s.clients:
            client.send(*(asks(n) for n in range(4)))

        async def read_all(client: RawClient) -> None:
            for _ in range(4):
                assert await fetched(client) == {0: records_of(("t", 0), 3 * MIB)}

        await asyncio.gather(*map(read_all, s.clients))
        assert s.proxy.counters["clients.refused"] == 0


@both_loops
async def test_merged_answers_do_not_wait_for_each_other() -> None:
    """Each client holds one part and asks for two more; first parts fill the newcomers' room."""
    rounds = 5
    async with fed(*(Feeder(2 * MIB) for _ in range(3)), total=8 * MIB, clients=8) as s:

        async def read_all(client: RawClient) -> None:
            found = dict.fromkeys(range(3), 0)
            while min(found.values()) < rounds:
                client.send(asks(partitions=(0, 1, 2)))
                for n, records in (await fetched(client)).items():
                    assert records in (b"", records_of(("t", n), 2 * MIB))
                    found[n] += bool(records)

        await asyncio.gather(*map(read_all, s.clients))
        assert s.proxy.counters["clients.refused"] == 0


@pytest.mark.usefixtures("short_ticks")
@both_loops
async def test_reader_does_not_wait_for_non_readers() -> None:
    async with fed(Feeder(12 * MIB), total=16 * MIB, at=1000.0) as s:
        reader = s.client
        reader.send(asks())
        await fetched(reader)
        for n in range(8):
            await idle_reader(s, n)
        late = await s.proxy.client()
        late.send(asks(99))
        first = asyncio.create_task(fetched(late))
        for n in range(12):
            await passing(s, 1.5)
            reader.send(asks(n))
            assert await fetched(reader) == {0: records_of(("t", 0), 12 * MIB)}
            assert not reader.is_gone
        # A later client does not wait until all of them are gone either.
        assert await first == {0: records_of(("t", 0), 12 * MIB)}
        # Several clients were disconnected, one after another.
        assert 1 < s.proxy.counters["clients.refused"] < 8


@both_loops
async def test_answer_larger_than_the_total_is_delivered() -> None:
    async with fed(Feeder(20 * MIB), total=MIB, clients=3) as s:
        for client in s.clients:
            client.send(asks())
        for client in s.clients:
            assert await fetched(client) == {0: records_of(("t", 0), 20 * MIB)}


@pytest.mark.usefixtures("short_ticks")
@both_loops
async def test_non_reader_is_closed_only_when_others_wait() -> None:
    async with fed(Feeder(12 * MIB), total=16 * MIB, at=1000.0, clients=0) as s:
        await idle_reader(s)
        await eventually(lambda: s.proxy.vitals.in_flight_bytes > 12 * MIB)
        await passing(s, 2 * USUAL.window_s)
        # No client is refused because of these.
        assert s.proxy.counters["clients.refused"] == 0
        waiting = await s.proxy.client()
        waiting.send(asks(7))
        await passing(s, USUAL.window_s - 2)
        assert s.proxy.counters["clients.refused"] == 0
        answer = asyncio.create_task(fetched(waiting))
        await passing(s, 4)
        assert await answer == {0: records_of(("t", 0), 12 * MIB)}
        assert s.proxy.counters["clients.refused"] == 1


@both_loops
async def test_acknowledgements_pass_while_others_hold_all_memory() -> None:
    async with fed(Feeder(12 * MIB), total=16 * MIB) as s:
        for n in range(4):
            await idle_reader(s, n)
        await eventually(lambda: s.proxy.vitals.in_flight_bytes > 12 * MIB)
        for n in range(50):
            s.send(produce_frame(records=batch(n) + bytes(MIB), correlation_id=n))
            assert (await s.answer()).correlation_id == n


@both_loops
async def test_small_unread_answers_are_bounded_and_counted() -> None:
    """One by one on each connection: each is far below the size that waits for room."""
    size, count = 60_000, 800
    async with fed(Feeder(size), total=16 * MIB, clients=3) as s:
        for client in s.clients:
            client.pause_reading()
            client.send(*(asks(n, max_bytes=size) for n in range(count)))
        await eventually(lambda: s.proxy.vitals.in_flight_bytes > 0)
        await asyncio.sleep(0.5)
        # Of the 140 MiB requested.
        assert 0 < s.proxy.vitals.in_flight_bytes < 16 * MIB
        for client in s.clients:
            client.resume_reading()
        for client in s.clients:
            for n in range(count):
                assert (await client.answer(FETCH, 11)).correlation_id == n


@scene(HOLDS, clients=2, limits={"max_in_flight_bytes_total": 4 * MIB})
async def test_broker_stopping_inside_answer_holds_no_memory(s: Scene) -> None:
    first, second = s.clients
    first.send(asks(1))
    asked = await s.next()
    whole = asked.reply(results={T0: {"records": bytes(3 * MIB)}})
    asked.connection.write(whole[: 2 * MIB])
    await eventually(lambda: s.proxy.vitals.in_flight_bytes > 3 * MIB)
    second.send(asks(2))
    (await s.next()).answer(results={T0: {"records": bytes(3 * MIB)}})
    await asyncio.sleep(0.2)
    asked.connection.abort()
    assert await fetched(second) == {0: bytes(3 * MIB)}
    first.abort()
    await eventually(lambda: s.proxy.vitals.in_flight_bytes == 0)


@both_loops
async def test_leaving_client_frees_its_answer_memory_at_once() -> None:
    """Even if its brokers have yet to answer, and without Python's cycle collector, which rarely runs in a proxy."""
    async with staged(Feeder(3 * MIB), HOLDS, limits={"max_in_flight_bytes_total": 16 * MIB}) as s:
        gc.collect()
        gc.disable()
        try:
            # A read that does not wait gets all its brokers.
            s.send(asks(1, (0, 1), max_wait_ms=0))
            await eventually(lambda: s.proxy.vitals.in_flight_bytes > 3 * MIB)
            await s.brokers[1].next()
            await asyncio.sleep(0.05)
            s.client.abort()
            await eventually(lambda: s.proxy.vitals.in_flight_bytes == 0)
        finally:
            gc.enable()


class Waits:
    """A waiter for room."""

    def __init__(self) -> None:
        self.room: AnswerBuffer | None = None

    def give_room(self, room: AnswerBuffer) -> None:
        self.room = room


@both_loops
async def test_memory_freed_on_another_thread_is_reused() -> None:
    """Python's cycle collector runs on any thread that creates an object, such as a timer's or a lookup's."""
    room = AnswerMemory(Budget(4 * MIB), time.monotonic)
    first, second = (ClientMemory(room, None) for _ in range(2))
    held, waiter = [room.take(Waits(), first, 3 * MIB)], Waits()
    assert room.take(waiter, second, 3 * MIB) is None
    await asyncio.sleep(0.01)
    collector = threading.Thread(target=held.clear)
    collector.start()
    collector.join()
    await eventually(lambda: waiter.room is not None)
    assert room.held == 3 * MIB
