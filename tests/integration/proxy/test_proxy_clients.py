"""Client connections: bad input, clients that leave, slow clients, too many clients, and the end of the proxy."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import struct
import time
from collections.abc import Callable

import pytest

from kproxy.proxy import client_session
from kproxy.proxy.client_session import ClientSession
from kproxy_codec import api_keys
from kproxy_codec.api_keys import FETCH, LIST_OFFSETS
from tests.support.brokers.scripted_upstream import PATIENCE_S, Asked, ScriptedUpstream, answers_everything
from tests.support.clients.raw_client import (
    RawClient,
    batch,
    control_frame,
    fetch_frame,
    list_offsets_frame,
    produce_frame,
    raw_frame,
)
from tests.support.processes.running_proxy import both_loops, in_one_go, running_proxy
from tests.support.waiting import eventually
from tests.support.wire.messages import request_body, request_frame, sample_request

T0 = ("t", 0)
TIMED_OUT = 7


def header(key: int, version: int) -> bytes:
    return struct.pack(">hhih", key, version, 1, 1) + b"x"


def produce_v2() -> bytes:
    """acks, timeout_ms and no topic; the version is offered, and refused when sent."""
    return raw_frame(header(api_keys.PRODUCE, 2) + struct.pack(">hii", 1, 1000, 0))


def cut(frame: bytes, length: int) -> bytes:
    return raw_frame(frame[4:length])


BAD: dict[str, Callable[[], bytes]] = {
    "negative length": lambda: struct.pack(">i", -1) + bytes(8),
    "length of 2 GiB": lambda: struct.pack(">i", 2**31 - 1),
    "length over the limit": lambda: struct.pack(">i", (100 << 20) + 1),
    "empty frame": lambda: raw_frame(b""),
    "shorter than a header": lambda: raw_frame(bytes(7)),
    "client_id longer than the frame": lambda: raw_frame(struct.pack(">hhih", 0, 7, 1, 500)),
    "client_id of length -2": lambda: raw_frame(struct.pack(">hhih", 0, 7, 1, -2)),
    "HTTP": lambda: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS hello": lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "unknown API": lambda: raw_frame(header(999, 0) + bytes(10)),
    "negative API": lambda: raw_frame(header(-1, 0)),
    "an API that is not served": lambda: raw_frame(header(api_keys.DELETE_RECORDS, 0) + bytes(20)),
    "WriteTxnMarkers": lambda: raw_frame(header(api_keys.WRITE_TXN_MARKERS, 0) + bytes(4)),
    "Envelope": lambda: raw_frame(header(api_keys.ENVELOPE, 0) + bytes(20)),
    "Produce v2": produce_v2,
    "Produce v12": lambda: raw_frame(header(api_keys.PRODUCE, 12) + bytes(20)),
    "Produce v-1": lambda: raw_frame(header(api_keys.PRODUCE, -1) + bytes(20)),
    "Fetch v13": lambda: raw_frame(header(FETCH, 13) + bytes(40)),
    "Fetch by a replica": lambda: fetch_frame(replica_id=1),
    "Metadata v99": lambda: raw_frame(header(api_keys.METADATA, 99) + bytes(20)),
    "ApiVersions cut short": lambda: cut(control_frame(api_keys.API_VERSIONS, 3), 20),
    "Produce cut short": lambda: cut(produce_frame(), 60),
    "Produce with bytes behind": lambda: raw_frame(produce_frame()[4:] + b"more"),
    "Fetch cut short": lambda: cut(fetch_frame(), 40),
    "a control request of 2 MiB": lambda: raw_frame(header(api_keys.METADATA, 9) + bytes(2 << 20)),
}
OTHER_PROTOCOLS = ("HTTP", "TLS hello")


@pytest.mark.parametrize("name", BAD)
@both_loops
async def test_bad_input_closes_that_connection_and_no_other(name: str) -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        other = await proxy.client()
        other.send(produce_frame(correlation_id=50))
        held = await upstream.next()
        client = await proxy.client()
        client.send(BAD[name]())
        if name in OTHER_PROTOCOLS:
            # It is told of that before.
            assert b"\n" in await client.rest(PATIENCE_S)
        assert await client.is_closed()
        assert proxy.counters["clients.refused"] == 1
        held.answer()
        assert (await other.answer()).correlation_id == 50
        assert len(upstream.log) == 1


@both_loops
async def test_malformed_cluster_request_closes_only_its_connection() -> None:
    """It is for a broker to find fault with; brokers close, and none of them is asked twice."""
    upstream = ScriptedUpstream(1, lambda asked: asked.connection.close())
    async with running_proxy(upstream) as proxy:
        client = await proxy.client()
        client.send(cut(control_frame(api_keys.METADATA, 9, topics=[{"name": "t"}]), 22))
        assert await client.is_closed()
        assert len(upstream.log) == 1


@both_loops
async def test_answers_before_bad_bytes_still_arrive() -> None:
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(correlation_id=4))
        assert (await client.answer()).correlation_id == 4
        client.send(produce_frame({"t": [0, 0]}, correlation_id=5), BAD["empty frame"]())
        assert (await client.answer()).correlation_id == 5
        assert await client.is_closed()


@both_loops
async def test_a_length_of_2_gib_costs_no_memory() -> None:
    async with running_proxy(ScriptedUpstream(1), limits={"max_request_bytes": 2**31 - 1}) as proxy:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        clients = [await proxy.client() for _ in range(20)]
        for client in clients:
            client.send(struct.pack(">i", 2**31 - 1) + bytes(1000))
        await asyncio.sleep(0.1)
        # ru_maxrss is in KiB on Linux, in bytes on macOS; either way far below twenty times 2 GiB.
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


# Leaving


@both_loops
async def test_departed_clients_waiting_retries_are_dropped() -> None:
    upstream = ScriptedUpstream(1, lambda asked: asked.answer(results={T0: 19}))
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(correlation_id=1), produce_frame(correlation_id=2))
        await eventually(lambda: len(upstream.log) >= 2)
        client.close()
        await upstream.connections[0].until_closed()
        sent = len(upstream.log)
        await asyncio.sleep(0.6)
        assert len(upstream.log) == sent
        assert len(upstream.connections) == 1


@both_loops
async def test_departed_client_closes_only_its_broker_connections() -> None:
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        staying, leaving = await proxy.client(), await proxy.client()
        for client in (staying, leaving):
            client.send(produce_frame())
            await client.answer()
        leaving.abort()
        await upstream.connections[1].until_closed()
        staying.send(produce_frame(correlation_id=2))
        assert (await staying.answer()).correlation_id == 2
        assert upstream.connections[0].is_open


@pytest.mark.parametrize("sent", [0, 3, 4, 30, 100])
@both_loops
async def test_client_leaving_within_a_frame_sends_nothing(sent: int) -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame()[:sent])
        await client.sent()
        client.close()
        await asyncio.sleep(0.05)
        assert upstream.log == []
        assert len(proxy.listener._sessions) == 0


# Slow ones


@both_loops
async def test_client_with_unread_fetches_costs_bounded_memory() -> None:
    answered_bytes = 0
    records = bytes(1 << 20)

    def script(asked: Asked) -> None:
        nonlocal answered_bytes
        if asked.header.api_key == FETCH:
            answered_bytes += len(records)
            asked.answer(results={T0: {"records": records}})
        else:
            asked.answer()

    upstream = ScriptedUpstream(1, script)
    async with running_proxy(upstream, limits={"max_in_flight_bytes": 8 << 20}) as proxy:
        proxy.own(1)
        slow, fast = await proxy.client(), await proxy.client()
        slow.pause_reading()
        slow.send(*(fetch_frame(correlation_id=n, max_bytes=1 << 20) for n in range(100)))
        await slow.sent()
        began = time.monotonic()
        for n in range(50):
            fast.send(produce_frame(records=batch(n), correlation_id=n))
            assert (await fast.answer()).correlation_id == n
        assert time.monotonic() - began < 60
        await asyncio.sleep(0.2)
        # What is in flight, and what the two kernels hold.
        assert answered_bytes < 30 << 20
        slow.resume_reading()
        for n in range(100):
            assert (await slow.answer(FETCH, 12)).correlation_id == n
        assert answered_bytes == 100 << 20


@both_loops
async def test_pipelined_small_requests_are_begun_boundedly() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream, limits={"max_open_requests": 20}) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(*(list_offsets_frame(correlation_id=n) for n in range(500)))
        await eventually(lambda: len(upstream.log) >= 20)
        assert await upstream_stays_at(upstream, 20)
        for _ in range(500):
            (await upstream.next()).answer()
        assert [(await client.answer(LIST_OFFSETS, 6)).correlation_id for _ in range(500)] == list(range(500))


async def upstream_stays_at(upstream: ScriptedUpstream, count: int) -> bool:
    await asyncio.sleep(0.1)
    return len(upstream.log) == count


@both_loops
async def test_broker_not_reading_slows_only_its_client() -> None:
    slow, healthy = ScriptedUpstream(1), ScriptedUpstream(2, answers_everything)
    async with running_proxy(slow, healthy, limits={"max_in_flight_bytes": 4 << 20}) as proxy:
        slow.reads_nothing = True
        proxy.own(1)
        proxy.own(2, partitions=[1])
        stuck, free = await proxy.client(), await proxy.client()
        frame = produce_frame(records=batch() + bytes(1 << 20))
        taken = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                while taken < 100 << 20:
                    stuck.send(frame)
                    await stuck.sent()
                    taken += len(frame)
        # The limit, and what sockets hold.
        assert taken < 40 << 20
        began = time.monotonic()
        for n in range(50):
            free.send(produce_frame({"t": [1]}, correlation_id=n))
            assert (await free.answer()).correlation_id == n
        assert time.monotonic() - began < 60
        stuck.abort()
        slow.connections[0].abort()


@both_loops
@in_one_go
async def test_refused_client_that_does_not_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_session, "FLUSH_S", 0.5)
    upstream = ScriptedUpstream(1, lambda asked: asked.answer(results={T0: {"records": bytes(8 << 20)}}))
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.pause_reading()
        # The second cannot be delivered to a broker that nobody knows, and that is told by closing.
        client.send(fetch_frame(max_bytes=8 << 20), produce_frame({"unknown": [0]}, acks=0))
        proxy.own(42, "unknown")
        await eventually(lambda: proxy.counters["clients.refused"] == 1)
        # It counts as a connection for as long as it is one.
        assert len(proxy.listener._sessions) == 1
        await eventually(lambda: not proxy.listener._sessions)


# Too many, and the end


@both_loops
async def test_excess_connection_is_closed_and_others_are_served() -> None:
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream, limits={"max_connections": 2}) as proxy:
        proxy.own(1)
        served = [await proxy.client() for _ in range(2)]
        for client in served:
            client.send(produce_frame())
            await client.answer()
        refused = await proxy.client()
        assert await refused.is_closed()
        served[0].close()
        await eventually(lambda: len(proxy.listener._sessions) == 1)
        late = await proxy.client()
        for client in (served[1], late):
            client.send(produce_frame())
            assert (await client.answer()).codes == {T0: 0}


@both_loops
async def test_stopping_answers_requests_in_flight_then_closes() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream, limits={"drain_s": PATIENCE_S}) as proxy:
        proxy.own(1)
        busy, idle = await proxy.client(), await proxy.client()
        busy.send(produce_frame(correlation_id=1), produce_frame({"t": [0]}, correlation_id=2, acks=1))
        asked = await upstream.next()
        stopping = asyncio.create_task(proxy.listener.stop())
        assert await idle.is_closed()
        assert proxy.listener.not_ready is not None
        with pytest.raises(OSError, match=r"refused|Connect call failed"):
            await RawClient().connect(proxy.port)
        asked.answer()
        (await upstream.next()).answer()
        assert [(await busy.answer()).correlation_id for _ in range(2)] == [1, 2]
        assert await busy.is_closed()
        busy.close()
        async with asyncio.timeout(PATIENCE_S / 2):
            await stopping


@both_loops
@in_one_go
async def test_stopping_keeps_its_time_limit() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream, limits={"drain_s": 0.3}) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame())
        await upstream.next()
        began = time.monotonic()
        await proxy.listener.stop()
        assert 0.2 < time.monotonic() - began < 20
        assert await client.is_closed()


@both_loops
async def test_stopping_sends_waiting_acks_0_and_ends() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream, limits={"drain_s": PATIENCE_S}) as proxy:
        await upstream.stop_listening()
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(acks=0))
        await eventually(lambda: proxy.retries(65536) >= 1)
        stopping = asyncio.create_task(proxy.listener.stop())
        await asyncio.sleep(0)
        await upstream.start(upstream.port)
        assert (await upstream.next()).fields["acks"] == 0
        async with asyncio.timeout(PATIENCE_S / 2):
            await stopping


@both_loops
async def test_error_in_one_session_keeps_the_clock_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        broken, sound = await proxy.client(), await proxy.client()
        for client in (broken, sound):
            client.send(produce_frame(timeout_ms=1000))
            await upstream.next()
        first, expire = next(iter(proxy.listener._sessions)), ClientSession.expire

        def fails(self: ClientSession, now: float, *, is_late: bool) -> None:
            if self is first:
                raise RuntimeError("a mistake")
            expire(self, now, is_late=is_late)

        monkeypatch.setattr(ClientSession, "expire", fails)
        codes = []
        for client in (broken, sound):
            try:
                codes.append((await client.answer()).codes[T0])
            except (asyncio.IncompleteReadError, ConnectionError):
                codes.append(-1)
        assert sorted(codes) == [-1, TIMED_OUT]


@both_loops
async def test_a_request_of_the_greatest_size_is_served() -> None:
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        frame = produce_frame(records=batch() + bytes(20 << 20))
        client.send(frame)
        assert (await client.answer()).codes == {T0: 0}
        assert len(upstream.log[0].frame) == len(frame)


@both_loops
async def test_replica_fetch_does_not_reach_a_broker() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        body = request_body(FETCH, 4, sample_request(FETCH, {"t": [0]}, replica_id=2))
        client.send(request_frame(FETCH, 4, body))
        assert await client.is_closed()
        assert upstream.log == []


@both_loops
@in_one_go
async def test_client_sending_during_stop_gets_its_answer() -> None:
    """Closing upon bytes that nobody has read resets the connection, and what is still on its way is lost."""
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream, limits={"drain_s": 10.0}) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(fetch_frame(max_wait_ms=100, max_bytes=1 << 24))
        asked = await upstream.next()
        stopping = asyncio.ensure_future(proxy.listener.stop())
        await eventually(lambda: proxy.listener.not_ready)
        client.send(produce_frame({"t": [0]}, records=batch(1)) * 100)
        records = bytes(16 << 20)
        asked.answer(results={("t", 0): {"records": records}})
        # Long enough for the proxy to have written what the kernel takes, and to have closed.
        await asyncio.sleep(0.5)
        answer = await client.answer(FETCH, 12)
        assert answer.results[0].fields["records"] == records
        client.close()
        await stopping


@both_loops
async def test_requests_of_departed_client_cost_nothing() -> None:
    """There may be 1,000 of them: the core does not take them over, and none is sent again."""
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=batch(0)))
        (await upstream.next()).answer()
        await client.answer()
        client.send(*(produce_frame(records=batch(n)) for n in range(1, 101)))
        for _ in range(100):
            await upstream.next()
        assert proxy.context.tally.plain_requests >= 99
        client.abort()
        await eventually(lambda: not proxy.listener._sessions)
        assert proxy.context.counters["plain.left"] == 0
        assert proxy.context.budget.held == 0
        assert await upstream.is_silent()
