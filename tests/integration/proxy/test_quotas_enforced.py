"""Quotas of a real proxy: a client that sends too much is not read, its answers say so, and no other client notices."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kproxy_codec.api_keys import SASL_AUTHENTICATE, SASL_HANDSHAKE
from tests.support.brokers.scripted_upstream import Asked, answers_everything
from tests.support.clients.raw_client import RawClient, batch, produce_frame
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import ServedBroker, beside, page, port_of, static_proxy
from tests.support.processes.worker_processes import clients_of_each, worker_pids
from tests.support.security import sasl_client as sasl
from tests.support.waiting import PATIENCE_S, eventually

QUOTAS = """
[[quotas]]
principal = "User:alice"
produce_bytes_per_s = 200_000
connections = 2
"""


@asynccontextmanager
async def limited(directory: Path, rooms: str, **limits: object) -> AsyncIterator[KproxyProcess]:
    broker = ServedBroker(1, answers_everything)
    await broker.start()
    more = f'[sasl]\nmechanisms = ["PLAIN"]\nusers = "{sasl.users_file(directory)}"\nwithout_tls = true\n'
    try:
        async with beside(
            static_proxy(directory, {1: broker.port}, limits=limits, rooms=more + sasl.ALLOW_ALL + rooms)
        ) as process:
            yield process
    finally:
        await broker.stop()


async def connect(process: KproxyProcess, name: str) -> RawClient:
    client = await RawClient().connect(port_of(process))
    client.send(sasl.handshake("PLAIN"))
    await client.answer(SASL_HANDSHAKE, 1)
    client.send(sasl.authenticate(sasl.plain(name, sasl.USERS[name])))
    assert (await client.answer(SASL_AUTHENTICATE, 2)).message.error_code == 0
    return client


@asynccontextmanager
async def two_workers(directory: Path, quota: str) -> AsyncIterator[KproxyProcess]:
    """A proxy of two workers, to which every client is User:ANONYMOUS."""
    broker = ServedBroker(1, answers_everything)
    await broker.start()
    proxy = static_proxy(directory, {1: broker.port}, more=["--workers", "2"], rooms=f"[[quotas]]\n{quota}\n")
    try:
        async with beside(proxy) as process:
            yield process
    finally:
        await broker.stop()


async def produced(client: RawClient, size: int) -> int:
    """The throttle_time_ms of an answer."""
    client.send(produce_frame(records=batch(0, producer_id=-1) + bytes(size)))
    answer = (await client.answer(patience_s=60)).fields
    throttle_ms: int = answer["throttle_time_ms"]
    return throttle_ms


async def test_client_over_its_rate_is_throttled_and_told(tmp_path: Path) -> None:
    async with limited(tmp_path, QUOTAS) as process:
        alice, bob = await connect(process, "alice"), await connect(process, "bob")
        began = time.monotonic()
        told = [await produced(alice, 100_000) for _ in range(10)]
        elapsed = time.monotonic() - began
        # A second's worth at once; then 800 kB at 200 kB/s. The last wait comes behind the last answer.
        assert elapsed >= 3.2
        assert told[0] == 0
        assert max(told) >= 100
        # Bob sends as much meanwhile, and is not slowed down by the quota.
        assert [await produced(bob, 100_000) for _ in range(10)] == [0] * 10
        status, text = await asyncio.to_thread(page, process.admin, "/metrics")
        assert status == 200
        line = next(each for each in text.splitlines() if each.startswith("kproxy_throttled_requests_total"))
        assert float(line.split()[1]) >= 5


@pytest.mark.parametrize("is_exceeded", [False, True])
async def test_request_waiting_for_memory_is_charged_once(tmp_path: Path, is_exceeded: bool) -> None:
    """It was charged again when it was begun, and throttled for twice the time."""
    held: list[Asked] = []

    def answer(asked: Asked) -> None:
        if len(asked.partitions) == 2:
            held.append(asked)
        else:
            answers_everything(asked)

    broker = ServedBroker(1, answer)
    await broker.start()
    # More partitions than may be open beside those of another request.
    large = produce_frame({"wide": range(4_096)}, records=batch(0, producer_id=-1))
    rate = len(large) // 2 if is_exceeded else len(large) + len(large) // 10
    rooms = f'[[topics]]\nname = "wide"\nowners = {[1] * 4_096}\n'
    rooms += f'[[quotas]]\nprincipal = "User:*"\nproduce_bytes_per_s = {rate}\n'
    try:
        async with beside(static_proxy(tmp_path, {1: broker.port}, rooms=rooms)) as process:
            client = await RawClient().connect(port_of(process))
            client.send(produce_frame({"wide": [0, 1]}, records=batch(0, producer_id=-1)), large)
            await eventually(lambda: held)
            # Until the large one has arrived, and waits.
            await asyncio.sleep(0.2)
            answers_everything(held[0])
            assert (await client.answer()).fields["throttle_time_ms"] == 0
            throttle_ms = (await client.answer(patience_s=60)).fields["throttle_time_ms"]
            assert 900 < throttle_ms < 1_200 if is_exceeded else throttle_ms == 0
            _, text = await asyncio.to_thread(page, process.admin, "/metrics")
            line = next(each for each in text.splitlines() if each.startswith("kproxy_throttled_requests_total"))
            assert float(line.split()[1]) == is_exceeded
    finally:
        await broker.stop()


async def test_connections_of_principal_and_address_are_limited(tmp_path: Path) -> None:
    async with limited(tmp_path, QUOTAS, max_connections_per_address=4) as process:
        first, second = await connect(process, "alice"), await connect(process, "alice")
        third = await connect(process, "alice")
        assert await third.is_closed()
        assert await produced(second, 100) == 0
        others = [await connect(process, "bob") for _ in range(2)]
        one_too_many = await RawClient().connect(port_of(process))
        assert await one_too_many.is_closed()
        # A place that is free again is taken.
        first.abort()
        others[0].abort()
        deadline = time.monotonic() + 60
        while True:
            again = await RawClient().connect(port_of(process))
            if not await again.is_closed(0.3):
                break
            assert time.monotonic() < deadline
        again.abort()
        assert await produced(others[1], 100) == 0


@pytest.mark.parametrize("rate", [5])
async def test_requests_are_limited_too(tmp_path: Path, rate: int) -> None:
    async with limited(tmp_path, f"[[quotas]]\nrequests_per_s = {rate}\n") as process:
        client = await connect(process, "bob")
        began = time.monotonic()
        for _ in range(4 * rate):
            await produced(client, 100)
        assert time.monotonic() - began >= 2.5


RATE = 200_000
REQUEST = 10_000
WINDOW_S = 2.0
MOST = 12


async def test_one_connection_to_workers_gets_whole_rate(tmp_path: Path) -> None:
    async with two_workers(tmp_path, f"produce_bytes_per_s = {RATE}") as process:
        client = await RawClient().connect(port_of(process))
        deadline = time.monotonic() + PATIENCE_S
        began_at, in_total, shares = time.monotonic(), 0, [0.0]
        # No window can have so much by chance: a worker's equal part, and its burst, are at most three quarters of it.
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
    async with two_workers(tmp_path, f"produce_bytes_per_s = {RATE}") as process:
        held = await clients_of_each(process)
        began, used, ends = time.monotonic(), 0, asyncio.Event()
        connections = sum(map(len, held.values()))

        async def produce(client: RawClient) -> None:
            nonlocal used, connections
            while not ends.is_set():
                try:
                    await produced(client, REQUEST)
                    used += REQUEST
                except (asyncio.IncompleteReadError, ConnectionError):
                    # Its worker was killed: begin at any other.
                    client = await RawClient().connect(port_of(process))
                    connections += 1

        def most(more: float) -> float:
            """Each connection may begin one request more."""
            return 1.1 * RATE * (time.monotonic() - began + 1) + connections * REQUEST + more

        async with asyncio.TaskGroup() as group:
            for client in [client for clients in held.values() for client in clients]:
                group.create_task(produce(client))
            await asyncio.sleep(3)
            assert used <= most(0), (used, most(0))
            victim = worker_pids(process)[1]
            os.kill(victim, signal.SIGKILL)
            await eventually(lambda: worker_pids(process).get(1, victim) != victim, process.stderr)
            await asyncio.sleep(2)
            ends.set()
        # The new worker does not know what the old one has counted.
        assert used <= most(RATE / 2), (used, most(RATE / 2))
        assert used > RATE


async def test_connections_are_counted_over_all_workers(tmp_path: Path) -> None:
    async with two_workers(tmp_path, f"connections = {MOST}") as process:
        # At least one at each worker: alone no worker has too many.
        held = [client for clients in (await clients_of_each(process)).values() for client in clients]
        held += [await RawClient().connect(port_of(process)) for _ in range(MOST - len(held))]

        async def is_refused() -> bool:
            client = await RawClient().connect(port_of(process))
            try:
                return await client.is_closed(0.3)
            finally:
                client.abort()

        # Within a second or two, whichever worker the next one reaches.
        refusals = 0

        async def refused_often() -> bool:
            nonlocal refusals
            refusals = refusals + 1 if await is_refused() else 0
            return refusals == 6

        await eventually(refused_often, process.stderr)
        for client in held:
            client.abort()

        async def is_taken() -> bool:
            return not await is_refused()

        await eventually(is_taken, process.stderr)
