"""SIGTERM to a real `kproxy serve`: requests in flight are answered, new ones are not accepted, and it ends in time."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.support.brokers.scripted_upstream import answers_everything
from tests.support.clients.raw_client import RawClient, batch, fetch_frame, produce_frame
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import ServedBroker, page, port_of, refused, samples, static_proxy
from tests.support.waiting import eventually

T0 = ("t", 0)
# Far below drain_s, far above what it takes.
SOON_S = 40.0


async def ended(process: KproxyProcess, within_s: float) -> float:
    """Seconds until it has ended, with status 0."""
    began = time.monotonic()
    assert await asyncio.to_thread(process.wait, within_s) == 0, process.stderr()[-2000:]
    return time.monotonic() - began


def not_ready(process: KproxyProcess) -> bool:
    status, text = page(process.admin, "/readyz")
    return status == 503 and text.startswith("draining")


async def test_drain_answers_requests_in_flight_and_takes_none(tmp_path: Path) -> None:
    upstream = await ServedBroker(1).start()
    with static_proxy(tmp_path, {1: upstream.port}, limits={"drain_s": 20}) as process:
        client = await RawClient().connect(port_of(process))
        client.send(*(produce_frame(records=batch(n), correlation_id=n) for n in range(3)))
        first = await upstream.next()
        process.signal(signal.SIGTERM)
        await refused(port_of(process))
        assert await asyncio.to_thread(page, process.admin, "/livez") == (200, "alive\n")
        status, text = await asyncio.to_thread(page, process.admin, "/readyz")
        assert status == 503
        assert text.startswith("draining")
        # What comes now is not begun; the client will send it again elsewhere.
        client.send(produce_frame(records=batch(3), correlation_id=3))
        first.answer()
        for n in (1, 2):
            asked = await upstream.next()
            assert asked.records == {T0: batch(n)}
            asked.answer()
        assert [(await client.answer()).correlation_id for _ in range(3)] == [0, 1, 2]
        assert await client.is_closed()
        client.close()
        assert await ended(process, SOON_S) < SOON_S
        assert len(upstream.log) == 3
    await upstream.stop()


async def test_drain_delay_serves_on_while_readyz_fails(tmp_path: Path) -> None:
    upstream = await ServedBroker(1, answers_everything).start()
    with static_proxy(tmp_path, {1: upstream.port}, more=("--drain-delay", "3")) as process:
        idle, busy = [await RawClient().connect(port_of(process)) for _ in range(2)]
        began = time.monotonic()
        process.signal(signal.SIGTERM)
        await eventually(lambda: not_ready(process), what="/readyz says so")
        late = await RawClient().connect(port_of(process))
        for number, client in enumerate((busy, late, idle)):
            client.send(produce_frame(records=batch(number), correlation_id=number))
            assert (await client.answer()).codes == {T0: 0}
        assert samples(page(process.admin, "/metrics")[1])["kproxy_draining", ()] == 1
        await asyncio.to_thread(process.wait, 3 + SOON_S)
        assert time.monotonic() - began > 3
        for client in (idle, busy, late):
            assert await client.is_closed()
            client.close()
    await upstream.stop()


@pytest.mark.parametrize("more", [(), ("--workers", "2")], ids=["alone", "workers"])
async def test_a_second_signal_ends_the_delay(tmp_path: Path, more: tuple[str, ...]) -> None:
    with static_proxy(tmp_path, {1: 1}, more=("--drain-delay", "600", *more)) as process:
        process.signal(signal.SIGTERM)
        await eventually(lambda: not_ready(process), what="/readyz says so")
        assert (await asyncio.to_thread(page, process.admin, "/livez"))[0] == 200
        process.signal(signal.SIGTERM)
        await ended(process, SOON_S)


async def test_hung_request_is_cut_at_drain_end(tmp_path: Path) -> None:
    upstream = await ServedBroker(1).start()
    with static_proxy(tmp_path, {1: upstream.port}, limits={"drain_s": 1}) as process:
        client = await RawClient().connect(port_of(process))
        client.send(produce_frame())
        await upstream.next()
        process.signal(signal.SIGTERM)
        assert 0.8 < await ended(process, 15 + SOON_S) < 1 + SOON_S
        assert await client.is_closed()
        assert "unanswered" in process.stderr()
    await upstream.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_idle_clients_do_not_delay_the_drain(tmp_path: Path, number: int) -> None:
    upstream = await ServedBroker(1, answers_everything).start()
    with static_proxy(tmp_path, {1: upstream.port}, limits={"drain_s": 60}) as process:
        fresh, used, amid = [await RawClient().connect(port_of(process)) for _ in range(3)]
        used.send(produce_frame())
        await used.answer()
        amid.send(produce_frame()[:50])
        # Somebody who looks at the admin page and keeps the connection, and one who never asks.
        host, _, port = process.admin.rpartition(":")
        lookers = [socket.create_connection((host, int(port))) for _ in range(2)]
        lookers[0].sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert lookers[0].recv(100).startswith(b"HTTP/1.1 200")
        process.signal(number)
        assert await ended(process, 90) < SOON_S
        for client in (fresh, used, amid):
            assert await client.is_closed()
        for looker in lookers:
            looker.close()
    await upstream.stop()


async def test_client_that_does_not_read_delays_drain_boundedly(tmp_path: Path) -> None:
    upstream = await ServedBroker(1, lambda asked: asked.answer(results={T0: {"records": bytes(8 << 20)}})).start()
    with static_proxy(tmp_path, {1: upstream.port}, limits={"drain_s": 1}) as process:
        client = await RawClient().connect(port_of(process))
        client.pause_reading()
        client.send(*(fetch_frame(correlation_id=n, max_bytes=8 << 20) for n in range(4)))
        await client.sent()
        await asyncio.sleep(0.3)
        process.signal(signal.SIGTERM)
        # Its time, and what is granted to every connection for its last bytes (FLUSH_S).
        assert await ended(process, 90) < 1 + 5 + SOON_S
        client.abort()
    await upstream.stop()
