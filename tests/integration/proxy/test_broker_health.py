"""One record of each broker's health for all connections of a proxy: down and hung brokers."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kproxy.proxy import broker_watch
from kproxy.routing import retry
from kproxy_codec import api_keys as keys
from tests.support.brokers.scripted_upstream import Asked, DeafListener
from tests.support.clients.raw_client import RawClient, batch, control_frame, produce_frame
from tests.support.scene import ANSWERS, DEAF, HANGS, HOLDS, NOT_WRITTEN, T0, Scene, scene
from tests.support.waiting import eventually

NOT_COORDINATOR, NOT_LEADER, TIMED_OUT = 16, 6, 7
PLAIN = batch(producer_id=-1)
QUICK_PROBES = {"probe_timeout_s": 0.3}
linux = pytest.mark.skipif(sys.platform != "linux", reason="what the kernel tells of a connection is Linux' own")
# A hang is known by then, even on a busy machine; nothing else here ends before 5 s.
SOON_S = 4.0


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


@scene(ANSWERS, clients=20, one_go=True)
async def test_down_broker_is_logged_once_and_on_return(s: Scene) -> None:
    await s.broker.stop_listening()
    with logged_of_brokers() as lines:
        for _ in range(3):
            assert await asyncio.gather(*map(produce_code, s.clients)) == [NOT_LEADER] * 20
        await s.rises()
        began = time.monotonic()
        for client in s.clients:
            while await produce_code(client):
                assert time.monotonic() - began < SOON_S
    assert [line["event"] for line in lines] == ["broker became unreachable", "broker became reachable"]


@scene(ANSWERS, one_go=True)
async def test_returned_broker_is_used_at_once(s: Scene) -> None:
    await s.broker.stop_listening()
    for _ in range(10):
        assert await produce_code(s.client) == NOT_LEADER
    before = s.proxy.retries(NOT_WRITTEN)
    await asyncio.sleep(1.1)
    await s.rises()
    with logged_of_brokers() as lines:
        assert await produce_code(s.client) == 0
    assert [line["event"] for line in lines] == ["broker became reachable"]
    # The request was not retried.
    assert s.proxy.retries(NOT_WRITTEN) == before


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
@scene(DEAF, clients=20, limits={"connect_timeout_s": 0.6, "probe_timeout_s": 60.0}, one_go=True)
async def test_down_broker_is_dialled_once_at_a_time(s: Scene) -> None:
    port, most = s.deaf[1].address.port, 0
    fillers = dials_under_way(port)
    assert await produce_code(s.client) == NOT_LEADER
    for _ in range(2):
        asking = [asyncio.ensure_future(produce_code(client)) for client in s.clients]
        while not all(each.done() for each in asking):
            most = max(most, dials_under_way(port) - fillers)
            await asyncio.sleep(0.02)
        assert [each.result() for each in asking] == [NOT_LEADER] * 20
    # The second one is the breaker's probe.
    assert 1 <= most <= 2


@linux
@scene(ANSWERS, clients=2, limits={"connect_timeout_s": 10.0, "probe_timeout_s": 60.0}, one_go=True)
async def test_client_leaving_during_dial_costs_other_waiters_nothing(s: Scene) -> None:
    dialling, waiting = s.clients
    await s.broker.stop_listening()
    assert await produce_code(dialling) == NOT_LEADER
    with DeafListener(s.broker.port) as listener:
        fillers = dials_under_way(s.broker.port)
        await asyncio.sleep(1.1)
        dialling.send(produce_frame(records=PLAIN))
        await eventually(lambda: dials_under_way(s.broker.port) > fillers)
        answer = asyncio.ensure_future(produce_code(waiting))
        await asyncio.sleep(0.1)
        dialling.abort()
        await asyncio.sleep(0.1)
        await listener.open(s.broker)
        assert await answer == 0
        await s.broker.stop_listening()


# A broker that hangs, detected by requests other than produce and fetch


def answers_about_the_cluster(asked: Asked) -> None:
    if asked.header.api_key == keys.METADATA:
        asked.answer_message(brokers=[], topics=[], controller_id=2, cluster_id="c")
    elif asked.header.api_key == keys.FIND_COORDINATOR:
        asked.answer_message(node_id=1, host="h", port=1, error_code=0)
    else:
        ANSWERS(asked)


@scene(HANGS, answers_about_the_cluster, clients=6, owners=[2], limits=QUICK_PROBES, one_go=True)
async def test_cluster_requests_detect_a_hang_once(s: Scene) -> None:
    began = time.monotonic()
    # Each connection asks the brokers in its own order.
    for client in s.clients:
        client.send(control_frame(keys.METADATA, 12, topics=None), produce_frame(records=PLAIN))
        await client.answer(keys.METADATA, 12)
        assert (await client.answer()).codes == {T0: 0}
    assert time.monotonic() - began < SOON_S
    assert len(s.broker.log) == 1
    assert s.proxy.context.tally.hangs.total() == 1


@scene(HANGS, answers_about_the_cluster, owners=[2], limits=QUICK_PROBES, one_go=True)
async def test_hung_coordinator_delays_clients_by_one_probe(s: Scene) -> None:
    s.proxy.context.coordinators.remember(1, "x", 1)
    add = {"transactional_id": "x", "producer_id": 1, "producer_epoch": 0, "group_id": "g"}
    began = time.monotonic()
    for _ in range(3):
        s.send(control_frame(keys.ADD_OFFSETS_TO_TXN, 3, **add), produce_frame(records=PLAIN))
        assert (await s.answer(keys.ADD_OFFSETS_TO_TXN, 3)).message.error_code == NOT_COORDINATOR
        assert await s.codes() == {T0: 0}
    assert time.monotonic() - began < SOON_S
    assert [each.header.api_key for each in s.broker.log].count(keys.ADD_OFFSETS_TO_TXN) == 1


@pytest.mark.parametrize("key", [keys.JOIN_GROUP, keys.SYNC_GROUP])
@scene(HOLDS, limits=QUICK_PROBES, one_go=True)
async def test_long_waiting_request_does_not_count_as_hang(s: Scene, key: int) -> None:
    s.proxy.context.coordinators.remember(0, "g", 1)
    fields = {"protocol_type": "consumer"} if key == keys.JOIN_GROUP else {}
    s.send(control_frame(key, 4 if key == keys.JOIN_GROUP else 3, group_id="g", **fields))
    asked = await s.next()
    await eventually(lambda: len(s.broker.probes) == 3)
    asked.answer_message(error_code=27)
    assert (await s.answer(key, asked.header.api_version)).message.error_code == 27
    assert s.proxy.context.tally.hangs.total() == 0


# A single connection is cut off, while the broker answers on others


@linux
@pytest.mark.parametrize("loses_request", [True, False], ids=["request", "answer"])
@scene(HOLDS, one_go=True)
async def test_silently_cut_connection_is_given_up_soon(s: Scene, loses_request: bool) -> None:
    s.send(produce_frame(records=PLAIN, timeout_ms=30_000))
    first = await s.next()
    if loses_request:
        first.answer()
        assert await s.codes() == {T0: 0}
        first.connection.lose_arrivals()
        s.send(produce_frame(records=PLAIN, timeout_ms=30_000))
    else:
        first.connection.lose_arrivals()
    began = time.monotonic()
    assert await s.codes() == {T0: TIMED_OUT}
    assert time.monotonic() - began < 10
    # The broker answers on new connections.
    assert s.broker.probes
    assert s.proxy.context.tally.hangs.total() == 0
    s.send(produce_frame(records=PLAIN))
    (await s.next()).answer()
    assert await s.codes() == {T0: 0}
    # The abandoned request does not arrive later, behind newer ones.
    first.connection.take_arrivals()
    assert await s.broker.is_silent(2.0)
    assert len(s.broker.log) == 2


@linux
@scene(ANSWERS, limits=QUICK_PROBES, one_go=True)
async def test_cut_own_connection_does_not_mean_hang(s: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_watch, "FRESH_S", 0.0)
    s.broker.introductions[0].connection.lose_arrivals()
    s.broker.introduces_itself = True
    assert await s.proxy.context.brokers.problem() is None
    assert s.proxy.context.tally.hangs.total() == 0


@linux
@scene(HOLDS, one_go=True)
async def test_cut_coordinator_connection_is_given_up_soon(s: Scene) -> None:
    s.proxy.context.coordinators.remember(0, "g", 1)
    s.send(control_frame(keys.HEARTBEAT, 3, group_id="g"))
    (await s.next()).connection.lose_arrivals()
    began = time.monotonic()
    assert (await s.answer(keys.HEARTBEAT, 3)).message.error_code == NOT_COORDINATOR
    assert time.monotonic() - began < 10


@linux
@scene(HOLDS, one_go=True)
async def test_broker_with_closed_window_keeps_its_connection(s: Scene) -> None:
    """As at Kafka when a client has used up its quota: the window is closed, and the kernel acknowledges probes."""
    s.send(produce_frame(records=PLAIN))
    first = await s.next()
    first.answer()
    assert await s.codes() == {T0: 0}
    first.connection.transport.pause_reading()
    # More than the kernel's buffers take.
    s.send(produce_frame(records=PLAIN + bytes(24 << 20), timeout_ms=30_000))
    await asyncio.sleep(6)
    first.connection.transport.resume_reading()
    (await s.next()).answer()
    assert await s.codes() == {T0: 0}
    assert s.proxy.retries(retry.CONNECTION_LOST) == 0
