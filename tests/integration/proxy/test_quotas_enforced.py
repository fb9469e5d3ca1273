"""Quotas of a real proxy: a client above its quota is paused and informed, and others are not affected."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.support.brokers.scripted_upstream import Asked
from tests.support.clients.raw_client import RawClient, batch, produce_frame
from tests.support.processes.served import Served, port_of, served
from tests.support.processes.worker_processes import clients_of_each, worker_pids
from tests.support.scene import ANSWERS
from tests.support.security import sasl_client as sasl
from tests.support.waiting import PATIENCE_S, eventually

QUOTAS = """
[[quotas]]
principal = "User:alice"
produce_bytes_per_s = 200_000
connections = 2
"""
THROTTLED = "kproxy_throttled_requests_total", ()


def limited(directory: Path, rooms: str, **limits: object) -> AbstractAsyncContextManager[Served]:
    users = sasl.plain_users(directory) + sasl.ALLOW_ALL
    return served(directory, ANSWERS, limits=limits, rooms=users + rooms)


def two_workers(directory: Path, quota: str) -> AbstractAsyncContextManager[Served]:
    """A proxy of two workers, for which every client is User:ANONYMOUS."""
    return served(directory, ANSWERS, more=["--workers", "2"], rooms=f"[[quotas]]\n{quota}\n")


async def connect(s: Served, name: str) -> RawClient:
    return await sasl.logged_in(await s.client(), name)


async def produced(client: RawClient, size: int) -> int:
    """The throttle_time_ms of an answer."""
    client.send(produce_frame(records=batch(0, producer_id=-1) + bytes(size)))
    throttle_ms: int = (await client.answer(patience_s=60)).fields["throttle_time_ms"]
    return throttle_ms


async def test_client_over_its_rate_is_throttled(tmp_path: Path) -> None:
    async with limited(tmp_path, QUOTAS) as s:
        alice, bob = await connect(s, "alice"), await connect(s, "bob")
        began = time.monotonic()
        told = [await produced(alice, 100_000) for _ in range(10)]
        # One second's quota at once, then 800 kB at 200 kB/s. The last wait follows the last answer.
        assert time.monotonic() - began >= 3.2
        assert told[0] == 0
        assert max(told) >= 100
        # Bob sends as much meanwhile, and is not throttled.
        assert [await produced(bob, 100_000) for _ in range(10)] == [0] * 10
        assert (await s.samples())[THROTTLED] >= 5


@pytest.mark.parametrize("is_exceeded", [False, True])
async def test_request_waiting_for_memory_is_charged_once(tmp_path: Path, is_exceeded: bool) -> None:
    """It was charged again when it was begun, and throttled for twice the time."""
    held: list[Asked] = []

    def answer(asked: Asked) -> None:
        held.append(asked) if len(asked.partitions) == 2 else ANSWERS(asked)

    # More partitions than may be open beside another request's.
    large = produce_frame({"t": range(4_096)}, records=batch(0, producer_id=-1))
    rate = len(large) // 2 if is_exceeded else len(large) + len(large) // 10
    rooms = f'[[quotas]]\nprincipal = "User:*"\nproduce_bytes_per_s = {rate}\n'
    async with served(tmp_path, answer, rooms=rooms, owners=[1] * 4_096) as s:
        client = await s.client()
        client.send(produce_frame({"t": [0, 1]}, records=batch(0, producer_id=-1)), large)
        await eventually(lambda: held)
        # Wait until the large request has arrived and waits.
        await asyncio.sleep(0.2)
        ANSWERS(held[0])
        assert (await client.answer()).fields["throttle_time_ms"] == 0
        throttle_ms = (await client.answer(patience_s=60)).fields["throttle_time_ms"]
        assert 900 < throttle_ms < 1_200 if is_exceeded else throttle_ms == 0
        assert (await s.samples())[THROTTLED] == is_exceeded


async def is_refused(s: Served) -> bool:
    """Whether one more connection is closed."""
    client = await s.client()
    try:
        return await client.is_closed(0.3)
    finally:
        client.abort()


async def is_taken(s: Served) -> bool:
    return not await is_refused(s)


async def test_connections_of_principal_and_address_are_limited(tmp_path: Path) -> None:
    async with limited(tmp_path, QUOTAS, max_connections_per_address=4) as s:
        first, second, third = [await connect(s, "alice") for _ in range(3)]
        assert await third.is_closed()
        assert await produced(second, 100) == 0
        others = [await connect(s, "bob") for _ in range(2)]
        assert await (await s.client()).is_closed()
        elsewhere = await RawClient().connect(port_of(s.process), source="127.0.0.2")
        assert await produced(await sasl.logged_in(elsewhere, "bob"), 100) == 0
        # A free slot is used again.
        first.abort()
        others[0].abort()
        await eventually(lambda: is_taken(s))
        assert await produced(others[1], 100) == 0


RATE = 200_000
REQUEST = 10_000
WINDOW_S = 2.0
MOST = 12


async def test_one_connection_to_workers_gets_whole_rate(tmp_path: Path) -> None:
    async with two_workers(tmp_path, f"produce_bytes_per_s = {RATE}") as s:
        client = await s.client()
        deadline = time.monotonic() + PATIENCE_S
        began_at, in_total, shares = time.monotonic(), 0, [0.0]
        # No window has this much by chance: a worker's equal part plus its burst are at most three quarters of it.
        while shares[-1] < 0.85:
            assert time.monotonic() < deadline, shares
            began, used = time.monotonic(), 0
            while time.monotonic() - began < WINDOW_S:
                await produced(client, REQUEST)
                used += REQUEST
            in_total += used
            shares.append(used / (time.monotonic() - began) / RATE)
        assert in_total <= 1.1 * RATE * (time.monotonic() - began_at + 1), shares


async def test_workers_keep_the_rate_while_one_is_replaced(tmp_path: Path) -> None:
    async with two_workers(tmp_path, f"produce_bytes_per_s = {RATE}") as s:
        held = await clients_of_each(s.process)
        began, used, ends = time.monotonic(), 0, asyncio.Event()
        connections = sum(map(len, held.values()))

        async def produce(client: RawClient) -> None:
            nonlocal used, connections
            while not ends.is_set():
                try:
                    await produced(client, REQUEST)
                    used += REQUEST
                except (asyncio.IncompleteReadError, ConnectionError):
                    # Its worker was killed: connect to any other.
                    client = await s.client()
                    connections += 1

        def most(more: float) -> float:
            """The most bytes until now: each connection may begin one more request."""
            return 1.1 * RATE * (time.monotonic() - began + 1) + connections * REQUEST + more

        async with asyncio.TaskGroup() as group:
            for client in [client for clients in held.values() for client in clients]:
                group.create_task(produce(client))
            await asyncio.sleep(3)
            assert used <= most(0), (used, most(0))
            victim = worker_pids(s.process)[1]
            os.kill(victim, signal.SIGKILL)
            await eventually(lambda: worker_pids(s.process).get(1, victim) != victim, s.process.stderr)
            await asyncio.sleep(2)
            ends.set()
        # The new worker does not know the old one's counts.
        assert used <= most(RATE / 2), (used, most(RATE / 2))
        assert used > RATE


async def test_connections_are_counted_over_all_workers(tmp_path: Path) -> None:
    async with two_workers(tmp_path, f"connections = {MOST}") as s:
        # At least one connection at each worker: no worker alone has too many.
        held = [client for clients in (await clients_of_each(s.process)).values() for client in clients]
        held += [await s.client() for _ in range(MOST - len(held))]
        # Within a second or two, at any worker.
        refusals = 0

        async def refused_often() -> bool:
            nonlocal refusals
            refusals = refusals + 1 if await is_refused(s) else 0
            return refusals == 6

        await eventually(refused_often, s.process.stderr)
        for client in held:
            client.abort()
        await eventually(lambda: is_taken(s), s.process.stderr)
