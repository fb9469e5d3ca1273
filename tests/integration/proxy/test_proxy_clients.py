"""Client connections: bad input, clients that leave, slow, idle and excess clients, and the end of the proxy."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kproxy.plain import compiled
from kproxy.proxy import client_session
from kproxy.proxy.client_session import ClientSession
from kproxy_codec import api_keys
from kproxy_codec.api_keys import FETCH, LIST_OFFSETS
from tests.support.brokers.scripted_upstream import PATIENCE_S, Asked
from tests.support.clients.raw_client import (
    RawClient,
    batch,
    control_frame,
    fetch_frame,
    list_offsets_frame,
    produce_frame,
    raw_frame,
)
from tests.support.scene import ANSWERS, DOWN, HOLDS, T0, Scene, scene
from tests.support.waiting import eventually

TIMED_OUT = 7


def header(key: int, version: int) -> bytes:
    return struct.pack(">hhih", key, version, 1, 1) + b"x"


def produce_v2() -> bytes:
    """acks, timeout_ms and no topic; this version is offered, but refused when sent."""
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
    "Fetch v19": lambda: raw_frame(header(FETCH, 19) + bytes(40)),
    "Fetch by a replica": lambda: fetch_frame(replica_id=1),
    "Fetch v4 by a replica": lambda: fetch_frame(version=4, replica_id=2),
    "Metadata v99": lambda: raw_frame(header(api_keys.METADATA, 99) + bytes(20)),
    "ApiVersions cut short": lambda: cut(control_frame(api_keys.API_VERSIONS, 3), 20),
    "Produce cut short": lambda: cut(produce_frame(), 60),
    "Produce with bytes behind": lambda: raw_frame(produce_frame()[4:] + b"more"),
    "Fetch cut short": lambda: cut(fetch_frame(), 40),
    "a control request of 2 MiB": lambda: raw_frame(header(api_keys.METADATA, 9) + bytes(2 << 20)),
}
OTHER_PROTOCOLS = ("HTTP", "TLS hello")


@scene(HOLDS)
async def test_bad_input_closes_that_connection_and_no_other(s: Scene) -> None:
    s.produces(50)
    (held,) = await s.takes(50)
    for count, (name, made) in enumerate(BAD.items(), 1):
        client = await s.proxy.client()
        client.send(made())
        if name in OTHER_PROTOCOLS:
            # It gets a message first.
            assert b"\n" in await client.rest(PATIENCE_S), name
        assert await client.is_closed(), name
        assert s.proxy.counters["clients.refused"] == count, name
    held.answer()
    assert await s.gets(50) == [0]
    assert len(s.broker.log) == 1


@scene(lambda asked: asked.connection.close(), owners=())
async def test_malformed_cluster_request_closes_only_its_connection(s: Scene) -> None:
    """Brokers judge such a request and close; none gets it twice."""
    s.send(cut(control_frame(api_keys.METADATA, 9, topics=[{"name": "t"}]), 22))
    assert await s.client.is_closed()
    assert len(s.broker.log) == 1


@scene(ANSWERS)
async def test_answers_before_bad_bytes_still_arrive(s: Scene) -> None:
    s.send(produce_frame(correlation_id=4))
    assert (await s.answer()).correlation_id == 4
    s.send(produce_frame({"t": [0, 0]}, correlation_id=5), BAD["empty frame"]())
    assert (await s.answer()).correlation_id == 5
    assert await s.client.is_closed()


@scene(clients=20, limits={"max_request_bytes": 2**31 - 1})
async def test_length_of_2_gib_costs_no_memory(s: Scene) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for client in s.clients:
        client.send(struct.pack(">i", 2**31 - 1) + bytes(1000))
    await asyncio.sleep(0.1)
    # ru_maxrss is in KiB on Linux and in bytes on macOS; both are far below twenty times 2 GiB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


# Clients that disconnect


@scene(ANSWERS, clients=2)
async def test_departed_client_closes_only_its_broker_connections(s: Scene) -> None:
    staying, leaving = s.clients
    for client in (staying, leaving):
        client.send(produce_frame())
        await client.answer()
    leaving.abort()
    await s.broker.connections[1].until_closed()
    staying.send(produce_frame(correlation_id=2))
    assert (await staying.answer()).correlation_id == 2
    assert s.broker.connections[0].is_open


# Slow clients


def answers_mib(asked: Asked) -> None:
    asked.answer(results={T0: {"records": bytes(1 << 20)}} if asked.header.api_key == FETCH else {})


@scene(answers_mib, clients=2, limits={"max_in_flight_bytes": 8 << 20})
async def test_client_with_unread_fetches_costs_bounded_memory(s: Scene) -> None:
    slow, fast = s.clients
    slow.pause_reading()
    slow.send(*(fetch_frame(correlation_id=n, max_bytes=1 << 20) for n in range(100)))
    await slow.sent()
    await serves_on(fast)
    await asyncio.sleep(0.2)
    # The requests in flight, and those in the two kernels.
    assert fetches(s) < 30
    slow.resume_reading()
    for n in range(100):
        assert (await slow.answer(FETCH, 12)).correlation_id == n
    assert fetches(s) == 100


def fetches(s: Scene) -> int:
    return sum(asked.header.api_key == FETCH for asked in s.broker.log)


async def serves_on(client: RawClient, partition: int = 0) -> None:
    """Check that another client gets its answers meanwhile."""
    began = time.monotonic()
    for n in range(50):
        client.send(produce_frame({"t": [partition]}, records=batch(n), correlation_id=n))
        assert (await client.answer()).correlation_id == n
    assert time.monotonic() - began < 60


@scene(HOLDS, limits={"max_open_requests": 20})
async def test_pipelined_small_requests_are_begun_boundedly(s: Scene) -> None:
    s.send(*(list_offsets_frame(correlation_id=n) for n in range(500)))
    await eventually(lambda: len(s.broker.log) >= 20)
    await asyncio.sleep(0.1)
    assert len(s.broker.log) == 20
    for _ in range(500):
        (await s.next()).answer()
    assert [(await s.answer(LIST_OFFSETS, 6)).correlation_id for _ in range(500)] == list(range(500))


@scene(HOLDS, ANSWERS, clients=2, limits={"max_in_flight_bytes": 4 << 20})
async def test_broker_not_reading_slows_only_its_client(s: Scene) -> None:
    stuck, free = s.clients
    s.broker.reads_nothing = True
    frame = produce_frame(records=batch() + bytes(1 << 20))
    taken = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            while taken < 100 << 20:
                stuck.send(frame)
                await stuck.sent()
                taken += len(frame)
    # The limit, plus the sockets' buffers.
    assert taken < 40 << 20
    await serves_on(free, 1)
    stuck.abort()
    s.broker.connections[0].abort()


@scene(lambda asked: asked.answer(results={T0: {"records": bytes(8 << 20)}}), one_go=True)
async def test_refused_client_that_does_not_read_is_closed(s: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_session, "FLUSH_S", 0.5)
    s.client.pause_reading()
    # The second request cannot be delivered to an unknown broker, which the proxy reports by closing.
    s.send(fetch_frame(max_bytes=8 << 20), produce_frame({"unknown": [0]}, acks=0))
    s.proxy.own(42, "unknown")
    await eventually(lambda: s.proxy.counters["clients.refused"] == 1)
    # It counts while its connection exists.
    assert s.sessions == 1
    await s.until_sessions()


# Too many clients, and the end of the proxy


@scene(DOWN, limits={"drain_s": PATIENCE_S})
async def test_stopping_sends_waiting_acks_0_and_ends(s: Scene) -> None:
    s.send(produce_frame(acks=0))
    await s.undialled()
    stopping = asyncio.create_task(s.proxy.listener.stop())
    await asyncio.sleep(0)
    await s.rises()
    assert (await s.next()).fields["acks"] == 0
    async with asyncio.timeout(PATIENCE_S / 2):
        await stopping


@scene(HOLDS, clients=2)
async def test_error_in_one_session_affects_no_deadlines(s: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, sound = s.clients
    for client in (broken, sound):
        client.send(produce_frame(timeout_ms=1000))
        await s.next()
    first, expire = next(iter(s.proxy.listener._sessions)), ClientSession.expire

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


@scene(HOLDS, limits={"drain_s": 10.0}, one_go=True)
async def test_client_sending_during_stop_gets_its_answer(s: Scene) -> None:
    """Closing with unread bytes resets the connection, and bytes in transit are lost."""
    s.send(fetch_frame(max_wait_ms=100, max_bytes=1 << 24))
    asked = await s.next()
    stopping = asyncio.ensure_future(s.proxy.listener.stop())
    await eventually(lambda: s.proxy.listener.not_ready)
    s.send(produce_frame({"t": [0]}, records=batch(1)) * 100)
    records = bytes(16 << 20)
    asked.answer(results={T0: {"records": records}})
    # Long enough for the proxy to fill the kernel's buffer, and to close.
    await asyncio.sleep(0.5)
    answer = await s.answer(FETCH, 12)
    assert answer.results[0].fields["records"] == records
    s.client.close()
    await stopping


@scene(HOLDS)
async def test_requests_of_departed_client_cost_nothing(s: Scene) -> None:
    """There may be 1,000 of them: the core takes none from the plain path, and resends none."""
    await s.prove()
    s.send(*(produce_frame(records=batch(n)) for n in range(1, 101)))
    for _ in range(100):
        await s.next()
    assert compiled is None or s.proxy.context.tally.plain_requests >= 99
    s.client.abort()
    await s.until_sessions()
    assert s.proxy.context.counters["plain.left"] == 0
    assert s.proxy.context.budget.held == 0
    assert await s.broker.is_silent()


# Idle clients, and silently lost ones

IDLE_S = 0.4


@scene(clients=0, limits={"idle_s": IDLE_S})
async def test_idle_connection_is_closed(s: Scene) -> None:
    began = asyncio.get_running_loop().time()
    client = await s.proxy.client()
    assert await client.is_closed()
    assert asyncio.get_running_loop().time() - began >= IDLE_S
    await eventually(lambda: s.proxy.counters["clients.idle"] == 1)


@scene(clients=0)
async def test_session_without_its_connection_is_not_idle(s: Scene) -> None:
    """A session is checked from its creation on; the loop delivers its connection in a later turn."""
    session = ClientSession(s.proxy.context, lambda session: None)
    session.expire(s.proxy.context.clock())
    assert not session.closed
    await session.close()


@scene(limits={"idle_s": 0.0})
async def test_zero_disables_the_idle_timeout(s: Scene) -> None:
    assert await s.still(3 * IDLE_S)


@scene(HOLDS, clients=3, limits={"idle_s": IDLE_S})
async def test_connection_that_waits_is_not_idle(s: Scene) -> None:
    waits, arrives, idle = s.clients
    waits.send(produce_frame(records=batch(0)))
    asked = await s.next()
    # The proxy judges a slow request by its pace.
    arrives.send(produce_frame(records=batch(0))[:20])
    assert await idle.is_closed()
    assert await waits.is_silent(2 * IDLE_S)
    asked.answer()
    assert (await waits.answer()).codes == {T0: 0}
    assert not arrives.is_gone
    assert await waits.is_closed()
    assert s.proxy.counters["clients.idle"] == 2


ESTABLISHED = "01"
KEEPALIVE_TIMER = "02"


def timers(*, local: int = 0, remote: int = 0) -> list[str]:
    """The timers of the established connections with these ports."""
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, here, there, state, _, timer, *_ = line.split()
        ports = [int(address.rpartition(":")[2], 16) for address in (here, there)]
        if state == ESTABLISHED and (ports[0] == local or ports[1] == remote):
            found.append(timer.partition(":")[0])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's table of connections is Linux's")
@scene(ANSWERS, introduced=False)
async def test_silently_gone_host_is_detected(s: Scene) -> None:
    await s.ask(produce_frame({"t": [0]}))
    assert timers(local=s.proxy.port) == [KEEPALIVE_TIMER]
    assert timers(remote=s.broker.port) == [KEEPALIVE_TIMER]
