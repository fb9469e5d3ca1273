"""Memory stays bounded by not reading clients; no client waits for ever, and too slow clients are cut off."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from pathlib import Path

import psutil
import pytest

from kproxy.proxy.memory_budget import USUAL
from kproxy.proxy.request_reader import LARGE_READ_BYTES, MANY_REQUESTS
from kproxy_codec.api_keys import FETCH
from kproxy_codec.error_codes import INVALID_REQUEST, NOT_LEADER_OR_FOLLOWER
from kproxy_codec.partitioned import MAX_PARTITIONS
from tests.support.clients.raw_client import batch, fetch_frame, produce_frame
from tests.support.processes.served import Samples, port_of, served
from tests.support.scene import ANSWERS, HOLDS, T0, Scene, scene
from tests.support.waiting import eventually

MIB = 1 << 20


def big(n: int, size: int = MIB) -> bytes:
    return produce_frame(records=batch(n) + bytes(size), correlation_id=n)


@scene(HOLDS, clients=40, limits={"max_in_flight_bytes_total": 8 * MIB})
async def test_all_connections_together_stay_within_total(s: Scene) -> None:
    """Brokers first answer nothing, then all, and every client is served in the end."""
    for n, client in enumerate(s.clients):
        client.send(big(n))
    held: list[int] = []

    def is_full() -> bool:
        held.append(s.proxy.context.budget.held)
        return len(held) > 30 and held[-1] >= 8 * MIB and s.proxy.vitals.paused_connections > 20

    await eventually(is_full, "it holds as much as it may")
    # Half more, one frame, and 64 KiB for each connection that is being read.
    assert max(held) < 16 * MIB
    for _ in s.clients:
        (await s.next()).answer()
        assert s.proxy.context.budget.held < 16 * MIB
    assert [(await client.answer()).correlation_id for client in s.clients] == list(range(40))
    assert s.proxy.context.budget.held == 0


@scene(ANSWERS, at=1.0, one_go=True)
async def test_large_read_takes_one_turn_of_a_client(s: Scene) -> None:
    """TLS delivers several such reads in one turn of the event loop; with a stopped clock each takes no time."""
    await s.ask(produce_frame(records=batch(0)))
    (session,) = s.proxy.listener._sessions
    count = 2 * MANY_REQUESTS
    frames = b"".join(big(n, LARGE_READ_BYTES // count) for n in range(count))
    while frames:
        space = session.get_buffer(len(frames))
        part, frames = frames[: len(space)], frames[len(space) :]
        space[: len(part)] = part
        session.buffer_updated(len(part))
        assert len(part) <= LARGE_READ_BYTES
        assert not session._reading
    assert await s.ids(count) == list(range(count))
    assert session._reading


@scene(HOLDS, owners=[1] * 24, clients=24, limits={"max_in_flight_bytes_total": 200_000})
async def test_waiting_clients_resume_in_order_of_arrival(s: Scene) -> None:
    for n, client in enumerate(s.clients):
        client.send(produce_frame({"t": [n]}, records=batch(n) + bytes(40_000), correlation_id=n))
        await asyncio.sleep(0.02)
    order = []
    for _ in s.clients:
        asked = await s.next()
        order.append(asked.partitions[0][1])
        asked.answer()
    assert sorted(order) == list(range(24))
    # One or two are read at once; a client is not overtaken by one that came much later.
    assert all(abs(place - n) <= 2 for place, n in enumerate(order)), str(order)


@scene(ANSWERS, clients=20, limits={"max_in_flight_bytes_total": 6 * MIB})
async def test_partial_frames_fill_total_and_still_finish(s: Scene) -> None:
    """Every connection is within a frame when there is no more room: one at a time continues."""
    frames = [big(n, 3 * MIB) for n in range(20)]
    for client, frame in zip(s.clients, frames, strict=True):
        client.send(frame[: 2 * MIB])
    await eventually(lambda: s.proxy.vitals.paused_connections > 0)
    await asyncio.sleep(0.1)
    assert len(s.broker.log) == 0
    assert s.proxy.context.budget.held < 16 * MIB
    for client, frame in zip(s.clients, frames, strict=True):
        client.send(frame[2 * MIB :])
    assert [(await client.answer()).correlation_id for client in s.clients] == list(range(20))


@scene(ANSWERS, clients=2, limits={"max_in_flight_bytes_total": 1})
async def test_reader_beyond_total_reads_one_frame(s: Scene) -> None:
    """Its next one begins with the end of the first; the others come first."""
    greedy, modest = s.clients
    frames = [big(n, 300_000) for n in range(60)]
    greedy.send(*frames)
    modest.send(big(99, 300_000))
    answers = asyncio.create_task(modest.answer())
    before = 60
    for n in range(60):
        assert (await greedy.answer()).correlation_id == n
        if answers.done():
            before = min(before, n)
    assert (await answers).correlation_id == 99
    assert before < 40


@scene(ANSWERS, clients=0, limits={"max_in_flight_bytes_total": MIB})
async def test_request_larger_than_the_total_is_served(s: Scene) -> None:
    for _ in range(2):
        clients = [await s.proxy.client() for _ in range(3)]
        for n, client in enumerate(clients):
            client.send(big(n, 20 * MIB))
        assert [(await client.answer()).correlation_id for client in clients] == [0, 1, 2]


@scene(HOLDS, clients=8, limits={"max_in_flight_bytes_total": 4 * MIB})
async def test_client_leaving_within_a_frame_frees_memory(s: Scene) -> None:
    for n, client in enumerate(s.clients):
        client.send(big(n, 3 * MIB)[: 2 * MIB] if n % 2 else big(n, 3 * MIB))
    await eventually(lambda: s.proxy.vitals.paused_connections > 0)
    waiting = await s.proxy.client()
    waiting.send(produce_frame(records=batch(7), correlation_id=77))
    for client in s.clients:
        client.abort()
    await eventually(lambda: any(batch(7) in asked.records.values() for asked in s.broker.log))
    next(asked for asked in s.broker.log if batch(7) in asked.records.values()).answer()
    assert (await waiting.answer()).correlation_id == 77


@scene(ANSWERS, clients=12, limits={"max_in_flight_bytes_total": 8 * MIB}, one_go=True)
async def test_requests_are_served_beside_stalled_partial_frames(s: Scene) -> None:
    """A stalled client is cut off after seconds when others wait for its memory."""
    for client in s.clients:
        client.send(struct.pack(">i", 100 * MIB) + bytes(MIB))
    await eventually(lambda: s.proxy.context.budget.held >= 8 * MIB)
    honest = await s.proxy.client()
    # More bytes than the proxy reads in any case.
    honest.send(produce_frame(records=batch() + bytes(100_000), correlation_id=5))
    assert (await honest.answer(patience_s=USUAL.window_s - 2)).correlation_id == 5


# Slow requests


@scene(ANSWERS, clients=4, at=1000.0, one_go=True)
async def test_stalled_frame_closes_only_its_connection(s: Scene) -> None:
    frame = produce_frame(correlation_id=3)
    length_alone, trickling, idle, steady = s.clients
    length_alone.send(frame[:4])
    trickling.send(frame[:1])
    steady.send(produce_frame(records=batch() + bytes(MIB), correlation_id=4)[:100])
    rest = produce_frame(records=batch() + bytes(MIB), correlation_id=4)[100:]
    seconds = int(USUAL.window_s) - 1
    for second in range(seconds + 2):
        if second < seconds:
            trickling.send(frame[1 + second : 2 + second])
        steady.send(rest[second * 2000 : (second + 1) * 2000])
        for _ in range(3):
            await asyncio.sleep(0.12)
            s.now += 1 / 3
    assert await length_alone.is_closed()
    assert await trickling.is_closed()
    assert s.proxy.counters["clients.refused"] == 2
    idle.send(frame)
    assert (await idle.answer()).correlation_id == 3
    steady.send(rest[(second + 1) * 2000 :])
    assert (await steady.answer()).correlation_id == 4


@scene(HOLDS, at=1000.0, limits={"max_in_flight_bytes": 1000, "deadline_cap_ms": 1_000_000}, one_go=True)
async def test_frame_stalled_by_the_proxy_is_not_slow(s: Scene) -> None:
    """The client sends as fast as it can; the proxy waits for a broker."""
    second = produce_frame(records=batch(2) + bytes(50_000), correlation_id=2, timeout_ms=900_000)
    s.send(produce_frame(records=batch(1) + bytes(2000), timeout_ms=900_000), second[:-10])
    asked = await s.next()
    for _ in range(40):
        await asyncio.sleep(0.02)
        s.now += 2.5
    asked.answer()
    assert await s.gets(1) == [0]
    # The session is read again, and checked.
    await asyncio.sleep(0.3)
    s.send(second[-10:])
    (await s.next()).answer()
    assert await s.gets(2) == [0]


@scene(ANSWERS, one_go=True)
async def test_request_arriving_after_deadline_is_not_sent(s: Scene) -> None:
    """It would be appended, answered with REQUEST_TIMED_OUT, and resent by its client."""
    late = produce_frame(records=batch(0, producer_id=-1), timeout_ms=1000)
    s.send(late[:30])
    # The shortest deadline, plus some time.
    await asyncio.sleep(1.3)
    s.send(late[30:], produce_frame(records=batch(1, producer_id=-1), correlation_id=9))
    assert await s.codes() == {T0: NOT_LEADER_OR_FOLLOWER}
    assert await s.codes() == {T0: 0}
    assert [asked.records[T0] for asked in s.broker.log] == [batch(1, producer_id=-1)]


@scene(ANSWERS)
async def test_partitions_beyond_limit_get_an_error_code(s: Scene) -> None:
    """If the connection were closed instead, the client would repeat the request for ever."""
    for count, code in ((MAX_PARTITIONS, 0), (MAX_PARTITIONS + 1, INVALID_REQUEST)):
        partitions = {"t": range(count)}
        s.send(produce_frame(partitions, records=b""), fetch_frame(partitions, max_wait_ms=0))
        for answer in (await s.answer(), await s.answer(FETCH, 12)):
            assert answer.codes == dict.fromkeys((("t", index) for index in range(count)), code), count


# A real process

# The number of clients, and their requests.
FLOODS = {
    "half of 100 MiB": (300, struct.pack(">i", 100 * MIB) + bytes(20 * MIB)),
    "a length": (300, struct.pack(">i", 100 * MIB) + bytes(4)),
    "whole requests": (100, produce_frame(records=batch(1, producer_id=-1) + bytes(4 * MIB))),
}


@pytest.mark.parametrize(
    "kind", ["half of 100 MiB", pytest.param("a length", marks=pytest.mark.long), "whole requests"]
)
async def test_memory_stays_flat_under_excess_load(tmp_path: Path, kind: str) -> None:
    (clients, data), limit = FLOODS[kind], 64 * MIB
    async with served(tmp_path, None, limits={"max_in_flight_bytes_total": limit}) as s:
        proxy, broker = psutil.Process(s.process.pid), s.broker
        before = proxy.memory_info().rss
        flood = asyncio.create_task(asyncio.to_thread(send_from_many, port_of(s.process), clients, data, 4.0))
        peak_rss = 0
        while not flood.done():
            peak_rss = max(peak_rss, proxy.memory_info().rss)
            await asyncio.sleep(0.05)
        taken = await flood
        # Without the bound it would hold all their data.
        assert peak_rss - before < 4 * limit, f"{(peak_rss - before) >> 20} MiB; {taken >> 20} MiB taken"
        # A proxy that does not read from a client cannot see it leave; without its broker it waits for nothing.
        await broker.stop()

        # The process lives, serves its metrics, and frees its memory when they are gone.
        async def is_free() -> Samples | None:
            shown = await s.samples()
            held = shown["kproxy_in_flight_bytes", ()] or shown["kproxy_client_connections", ()]
            return None if held else shown

        shown = await eventually(is_free, "nothing is held any more")
        assert shown["kproxy_paused_connections", ()] == 0
        assert shown["kproxy_client_connections_accepted_total", ()] == clients
        await broker.start(broker.port)
        broker.script = ANSWERS
        client = await s.client()

        async def is_served() -> bool:
            # A broker that was down is redialled within a second; until then clients get a retriable error.
            client.send(produce_frame(records=batch(9), correlation_id=9))
            answer = await client.answer()
            assert answer.correlation_id == 9
            return answer.codes == {T0: 0}

        await eventually(is_served)
        assert broker.log[-1].records == {T0: batch(9)}


def send_from_many(port: int, clients: int, data: bytes, seconds: float) -> int:
    """Each client sends `data` as far as accepted for `seconds`; return the total of accepted bytes."""
    sockets = []
    for _ in range(clients):
        client = socket.create_connection(("127.0.0.1", port))
        client.setblocking(False)
        sockets.append(client)
    sent = dict.fromkeys(sockets, 0)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for client, done in sent.items():
            with contextlib.suppress(BlockingIOError, ConnectionError):
                sent[client] += client.send(data[done : done + (256 << 10)]) if done < len(data) else 0
        time.sleep(0.002)
    for client in sockets:
        client.close()
    return sum(sent.values())
