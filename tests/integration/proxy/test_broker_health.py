"""One record of each broker's health for all connections of a proxy: down and hung brokers."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kproxy.routing import retry
from kproxy_codec import api_keys as keys
from tests.support.brokers.scripted_upstream import Asked, DeafListener, ScriptedUpstream, answers_everything
from tests.support.clients.raw_client import RawClient, batch, control_frame, produce_frame
from tests.support.processes.running_proxy import both_loops, in_one_go, running_proxy
from tests.support.waiting import eventually

NOT_COORDINATOR, NOT_LEADER, TIMED_OUT = 16, 6, 7
T0, T1 = ("t", 0), ("t", 1)
PLAIN = batch(producer_id=-1)
QUICK_PROBES = {"probe_timeout_s": 0.3}
linux = pytest.mark.skipif(sys.platform != "linux", reason="what the kernel tells of a connection is Linux' own")
# A hang is known by then, even on a busy machine; nothing else here ends before 5 s.
SOON_S = 4.0


def hung(node_id: int) -> ScriptedUpstream:
    """A broker that accepts and reads, but never answers."""
    upstream = ScriptedUpstream(node_id)
    upstream.answers_probes = False
    return upstream


async def produce_code(client: RawClient, **fields: Any) -> int:
    client.send(produce_frame(records=PLAIN, **fields))
    return (await client.answer()).codes[T0]


@contextmanager
def logged_of_brokers() -> Iterator[list[Any]]:
    """The log events about brokers."""
    with capture_logs() as lines:
        found: list[Any] = []
        yield found
        found += [line for line in lines if "broker" in line]


# A broker that is down


@both_loops
@in_one_go
async def test_down_broker_is_logged_once_and_on_return() -> None:
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        await upstream.stop_listening()
        clients = [await proxy.client() for _ in range(20)]
        with logged_of_brokers() as lines:
            for _ in range(3):
                assert await asyncio.gather(*map(produce_code, clients)) == [NOT_LEADER] * 20
            await upstream.start(upstream.port)
            began = time.monotonic()
            for client in clients:
                while await produce_code(client):
                    assert time.monotonic() - began < SOON_S
        assert [line["event"] for line in lines] == ["broker unreachable", "broker reachable again"]


@both_loops
@in_one_go
async def test_returned_broker_is_used_at_once() -> None:
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        await upstream.stop_listening()
        client = await proxy.client()
        for _ in range(10):
            assert await produce_code(client) == NOT_LEADER
        await asyncio.sleep(1.1)
        await upstream.start(upstream.port)
        with logged_of_brokers() as lines:
            assert await produce_code(client) == 0
        assert [line["event"] for line in lines] == ["broker reachable again"]
        # Not by way of a second try.
        assert proxy.retries(1 << 16) == 20


def dials_under_way(port: int) -> int:
    """Return the unanswered connections of this process to a local port (SYN_SENT).

    Other processes' do not count: another proxy may still dial a former broker's port.
    """
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {row[9] for row in rows if row[2].endswith(f":{port:04X}") and row[3] == "02"}
    return len(inodes & set(_own_sockets()))


def _own_sockets() -> Iterator[str]:
    """The inodes of this process's sockets."""
    for descriptor in Path("/proc/self/fd").iterdir():
        # The listing descriptor is gone by now.
        with suppress(OSError):
            yield descriptor.readlink().name.removeprefix("socket:[").removesuffix("]")


@linux
@both_loops
@in_one_go
async def test_down_broker_is_dialled_once_at_a_time() -> None:
    limits = {"connect_timeout_s": 0.6, "probe_timeout_s": 60.0}
    with DeafListener() as listener:
        fillers = dials_under_way(listener.address.port)
        async with running_proxy(limits=limits) as proxy:
            proxy.topology.set_broker(1, listener.address)
            proxy.own(1)
            first = await proxy.client()
            assert await produce_code(first) == NOT_LEADER
            clients = [await proxy.client() for _ in range(20)]
            most = 0
            for _ in range(2):
                asking = [asyncio.ensure_future(produce_code(client)) for client in clients]
                while not all(each.done() for each in asking):
                    most = max(most, dials_under_way(listener.address.port) - fillers)
                    await asyncio.sleep(0.02)
                assert [each.result() for each in asking] == [NOT_LEADER] * 20
            # The other one is the breaker's probe.
            assert 1 <= most <= 2


@linux
@both_loops
@in_one_go
async def test_client_leaving_during_dial_costs_other_waiters_nothing() -> None:
    limits = {"connect_timeout_s": 10.0, "probe_timeout_s": 60.0}
    upstream = ScriptedUpstream(1, answers_everything)
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(running_proxy(upstream, limits=limits))
        proxy.own(1)
        await upstream.stop_listening()
        dialling, waiting = await proxy.client(), await proxy.client()
        assert await produce_code(dialling) == NOT_LEADER
        listener = DeafListener(upstream.port)
        with listener:
            fillers = dials_under_way(upstream.port)
            await asyncio.sleep(1.1)
            dialling.send(produce_frame(records=PLAIN))
            await eventually(lambda: dials_under_way(upstream.port) > fillers)
            answer = asyncio.ensure_future(produce_code(waiting))
            await asyncio.sleep(0.1)
            dialling.abort()
            await asyncio.sleep(0.1)
            await listener.open(upstream)
            assert await answer == 0
            await upstream.stop_listening()


# A broker that hangs, detected by requests other than produce and fetch


def answers_about_the_cluster(asked: Asked) -> None:
    if asked.header.api_key == keys.METADATA:
        asked.answer_message(brokers=[], topics=[], controller_id=2, cluster_id="c")
    elif asked.header.api_key == keys.FIND_COORDINATOR:
        asked.answer_message(node_id=1, host="h", port=1, error_code=0)
    else:
        answers_everything(asked)


@both_loops
@in_one_go
async def test_cluster_requests_detect_a_hang_once() -> None:
    stuck, healthy = hung(1), ScriptedUpstream(2, answers_about_the_cluster)
    async with running_proxy(stuck, healthy, limits=QUICK_PROBES) as proxy:
        proxy.own(2)
        began = time.monotonic()
        # Each connection has its own order of brokers.
        for _ in range(6):
            client = await proxy.client()
            client.send(control_frame(keys.METADATA, 12, topics=None), produce_frame(records=PLAIN))
            await client.answer(keys.METADATA, 12)
            assert (await client.answer()).codes == {T0: 0}
        assert time.monotonic() - began < SOON_S
        assert len(stuck.log) == 1
        assert proxy.context.tally.hangs.total() == 1


@both_loops
@in_one_go
async def test_hung_coordinator_delays_clients_by_one_probe() -> None:
    stuck, healthy = hung(1), ScriptedUpstream(2, answers_about_the_cluster)
    async with running_proxy(stuck, healthy, limits=QUICK_PROBES) as proxy:
        proxy.own(2)
        proxy.context.coordinators.remember(1, "x", 1)
        client = await proxy.client()
        began = time.monotonic()
        for _ in range(3):
            client.send(
                control_frame(
                    *(keys.ADD_OFFSETS_TO_TXN, 3),
                    transactional_id="x",
                    producer_id=1,
                    producer_epoch=0,
                    group_id="g",
                ),
                produce_frame(records=PLAIN),
            )
            answer = await client.answer(keys.ADD_OFFSETS_TO_TXN, 3)
            assert answer.message.error_code == NOT_COORDINATOR
            assert (await client.answer()).codes == {T0: 0}
        assert time.monotonic() - began < SOON_S
        assert [each.header.api_key for each in stuck.log].count(keys.ADD_OFFSETS_TO_TXN) == 1


@pytest.mark.parametrize("key", [keys.JOIN_GROUP, keys.SYNC_GROUP])
@both_loops
@in_one_go
async def test_long_waiting_request_does_not_count_as_hang(key: int) -> None:
    coordinator = ScriptedUpstream(1)
    async with running_proxy(coordinator, limits=QUICK_PROBES) as proxy:
        proxy.context.coordinators.remember(0, "g", 1)
        client = await proxy.client()
        fields = {"protocol_type": "consumer"} if key == keys.JOIN_GROUP else {}
        client.send(control_frame(key, 4 if key == keys.JOIN_GROUP else 3, group_id="g", **fields))
        asked = await coordinator.next()
        await eventually(lambda: len(coordinator.probes) == 3)
        asked.answer_message(error_code=27)
        answer = await client.answer(key, asked.header.api_version)
        assert answer.message.error_code == 27
        assert proxy.context.tally.hangs.total() == 0


@both_loops
@in_one_go
async def test_api_versions_request_detects_a_hang_too() -> None:
    stuck, healthy = hung(1), ScriptedUpstream(2, answers_everything)
    async with running_proxy(stuck, healthy, limits=QUICK_PROBES, follows_versions=True) as proxy:
        proxy.own(1)
        await eventually(lambda: proxy.context.tally.hangs.total() == 1)
        # No other client needs to detect it.
        client = await proxy.client()
        began = time.monotonic()
        assert await produce_code(client) == NOT_LEADER
        assert time.monotonic() - began < SOON_S
        assert [each.header.api_key for each in stuck.log] == [keys.API_VERSIONS]


# A single connection is cut off, while the broker answers on others


@linux
@pytest.mark.parametrize("loses_request", [True, False], ids=["request", "answer"])
@both_loops
@in_one_go
async def test_silently_cut_connection_is_given_up_soon(loses_request: bool) -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=PLAIN, timeout_ms=30_000))
        first = await upstream.next()
        if loses_request:
            first.answer()
            assert (await client.answer()).codes == {T0: 0}
            first.connection.lose_arrivals()
            client.send(produce_frame(records=PLAIN, timeout_ms=30_000))
        else:
            first.connection.lose_arrivals()
        began = time.monotonic()
        assert (await client.answer()).codes == {T0: TIMED_OUT}
        assert time.monotonic() - began < 10
        # The broker answers new connections.
        assert upstream.probes
        assert proxy.context.tally.hangs.total() == 0
        client.send(produce_frame(records=PLAIN))
        (await upstream.next()).answer()
        assert (await client.answer()).codes == {T0: 0}
        # An abandoned request does not arrive later, after newer ones.
        first.connection.take_arrivals()
        assert await upstream.is_silent(2.0)
        assert len(upstream.log) == 2


@linux
@both_loops
@in_one_go
async def test_cut_coordinator_connection_is_given_up_soon() -> None:
    coordinator = ScriptedUpstream(1)
    async with running_proxy(coordinator) as proxy:
        proxy.context.coordinators.remember(0, "g", 1)
        client = await proxy.client()
        client.send(control_frame(keys.HEARTBEAT, 3, group_id="g"))
        (await coordinator.next()).connection.lose_arrivals()
        began = time.monotonic()
        assert (await client.answer(keys.HEARTBEAT, 3)).message.error_code == NOT_COORDINATOR
        assert time.monotonic() - began < 10


@linux
@both_loops
@in_one_go
async def test_broker_with_closed_window_keeps_its_connection() -> None:
    """Like Kafka when a client has exceeded its quota: the window is closed, and the kernel acknowledges probes."""
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=PLAIN))
        first = await upstream.next()
        first.answer()
        assert (await client.answer()).codes == {T0: 0}
        first.connection.transport.pause_reading()
        # More than the kernel's buffers hold.
        client.send(produce_frame(records=PLAIN + bytes(24 << 20), timeout_ms=30_000))
        await asyncio.sleep(6)
        first.connection.transport.resume_reading()
        (await upstream.next()).answer()
        assert (await client.answer()).codes == {T0: 0}
        assert proxy.retries(retry.CONNECTION_LOST) == 0
