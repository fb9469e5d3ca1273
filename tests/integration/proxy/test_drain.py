"""SIGTERM to a real `kproxy serve`: requests in flight are answered, new ones are refused, and it ends in time."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.support.clients.raw_client import batch, fetch_frame, produce_frame
from tests.support.processes.served import Served, port_of, refused, served
from tests.support.scene import ANSWERS, T0
from tests.support.waiting import eventually

# Far below drain_s, far above the expected time.
SOON_S = 40.0


async def drains(s: Served) -> bool:
    status, text = await s.page("/readyz")
    assert await s.page("/livez") == (200, "alive\n")
    return status == 503 and text.startswith("draining")


async def test_drain_answers_requests_in_flight_and_takes_none(tmp_path: Path) -> None:
    async with served(tmp_path, None, limits={"drain_s": 20}) as s:
        client = await s.client()
        client.send(*(produce_frame(records=batch(n), correlation_id=n) for n in range(3)))
        first = await s.broker.next()
        s.process.signal(signal.SIGTERM)
        await refused(port_of(s.process))
        assert await drains(s)
        # A later request is not begun; the client will resend it elsewhere.
        client.send(produce_frame(records=batch(3), correlation_id=3))
        first.answer()
        for n in (1, 2):
            asked = await s.broker.next()
            assert asked.records == {T0: batch(n)}
            asked.answer()
        assert [(await client.answer()).correlation_id for _ in range(3)] == [0, 1, 2]
        assert await client.is_closed()
        client.close()
        assert await s.ended(SOON_S) < SOON_S
        assert len(s.broker.log) == 3


async def test_clients_are_served_during_the_drain_delay(tmp_path: Path) -> None:
    async with served(tmp_path, ANSWERS, more=("--drain-delay", "3")) as s:
        clients = [await s.client() for _ in range(2)]
        began = time.monotonic()
        s.process.signal(signal.SIGTERM)
        await eventually(lambda: drains(s), "/readyz says so")
        clients.append(await s.client())
        for number, client in enumerate(clients):
            client.send(produce_frame(records=batch(number), correlation_id=number))
            assert (await client.answer()).codes == {T0: 0}
        assert (await s.samples())["kproxy_draining", ()] == 1
        await asyncio.to_thread(s.process.wait, 3 + SOON_S)
        assert time.monotonic() - began > 3
        for client in clients:
            assert await client.is_closed()


@pytest.mark.parametrize("more", [(), ("--workers", "2")], ids=["alone", "workers"])
async def test_second_signal_ends_the_delay(tmp_path: Path, more: tuple[str, ...]) -> None:
    async with served(tmp_path, more=("--drain-delay", "600", *more)) as s:
        s.process.signal(signal.SIGTERM)
        await eventually(lambda: drains(s), "/readyz says so")
        s.process.signal(signal.SIGTERM)
        await s.ended(SOON_S)


async def test_hung_request_is_cut_at_drain_end(tmp_path: Path) -> None:
    async with served(tmp_path, None, limits={"drain_s": 1}) as s:
        client = await s.client()
        client.send(produce_frame())
        await s.broker.next()
        s.process.signal(signal.SIGTERM)
        assert 0.8 < await s.ended(15 + SOON_S) < 1 + SOON_S
        assert await client.is_closed()
        assert "unanswered" in s.process.stderr()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_idle_clients_do_not_delay_the_drain(tmp_path: Path, number: int) -> None:
    async with served(tmp_path, ANSWERS, limits={"drain_s": 60}) as s:
        fresh, used, amid = [await s.client() for _ in range(3)]
        used.send(produce_frame())
        await used.answer()
        amid.send(produce_frame()[:50])
        # A visitor of the admin page that keeps its connection, and one that sends no request.
        host, _, port = s.process.admin.rpartition(":")
        lookers = [socket.create_connection((host, int(port))) for _ in range(2)]
        lookers[0].sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert lookers[0].recv(100).startswith(b"HTTP/1.1 200")
        s.process.signal(number)
        assert await s.ended(90) < SOON_S
        for client in (fresh, used, amid):
            assert await client.is_closed()
        for looker in lookers:
            looker.close()


async def test_client_that_does_not_read_delays_drain_boundedly(tmp_path: Path) -> None:
    answer = {"results": {T0: {"records": bytes(8 << 20)}}}
    async with served(tmp_path, lambda asked: asked.answer(**answer), limits={"drain_s": 1}) as s:
        client = await s.client()
        client.pause_reading()
        client.send(*(fetch_frame(correlation_id=n, max_bytes=8 << 20) for n in range(4)))
        await client.sent()
        await asyncio.sleep(0.3)
        s.process.signal(signal.SIGTERM)
        # The drain time, plus every connection's time for its last bytes (FLUSH_S).
        assert await s.ended(90) < 1 + 5 + SOON_S
