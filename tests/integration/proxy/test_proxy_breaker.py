"""A broker that hangs: its requests end soon, others are not affected, and it is used again once it answers."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from kproxy.proxy import broker_watch, waiting_requests
from kproxy.routing.rendezvous import preferred
from kproxy_codec import api_keys
from kproxy_codec.api_keys import FETCH, PRODUCE
from tests.support.brokers.scripted_upstream import Asked, ScriptedUpstream, broker_process
from tests.support.clients.raw_client import RawClient, batch, control_frame, fetch_frame, produce_frame
from tests.support.processes.running_proxy import RunningProxy
from tests.support.scene import ANSWERS, DEAF, DOWN, HANGS, HOLDS, T0, T1, Scene, scene
from tests.support.waiting import eventually

NOT_LEADER = 6
TIMED_OUT = 7
PLAIN = batch(producer_id=-1)
LIMITS = {"probe_timeout_s": 0.3}
# A broker is suspected after half a second; the probe and some ticks follow. The deadlines here are far later.
SOON_S = 10.0
LONG_MS = 30_000
BOTH = {"t": [0, 1]}


async def opens(proxy: RunningProxy, times: int = 1) -> None:
    await eventually(lambda: proxy.context.tally.hangs.total() == times)


async def runs_into_hang(s: Scene, client: RawClient | None = None) -> None:
    """Let a batch of ("t", 0) open the first broker's breaker."""
    client = client or s.client
    client.send(produce_frame(records=PLAIN, correlation_id=999))
    await s.next()
    assert (await client.answer()).codes == {T0: TIMED_OUT}
    assert s.proxy.context.tally.hangs.total() == 1


async def connections_for_clients(upstream: ScriptedUpstream) -> int:
    """Return the number of clients' connections; the proxy's own is not counted once its request has arrived."""
    await eventually(lambda: all(connection.got for connection in upstream.connections))
    return len(upstream.connections)


@scene(HANGS, ANSWERS, one_go=True)
async def test_hung_broker_does_not_starve_other_partitions(s: Scene) -> None:
    began = time.monotonic()
    # With the default limits.
    assert await s.ask(produce_frame(BOTH, timeout_ms=LONG_MS)) == [{T0: TIMED_OUT, T1: 0}]
    assert 2.0 < time.monotonic() - began < SOON_S
    took = []
    for n in range(1, 20):
        began = time.monotonic()
        assert await s.ask(produce_frame(BOTH, records=batch(n), timeout_ms=LONG_MS)) == [{T0: NOT_LEADER, T1: 0}]
        took.append(time.monotonic() - began)
    # The machine itself may delay some of them.
    assert sum(each >= 2 for each in took) <= 3, took
    assert [asked.partitions for asked in s.broker.log] == [[T0]]


@scene(HANGS, ANSWERS, owners=[1], limits=LIMITS, one_go=True)
async def test_unowned_partitions_avoid_a_hung_broker(s: Scene) -> None:
    stuck, healthy = s.brokers
    await runs_into_hang(s)
    partitions = [n for n in range(1, 40) if preferred(b"t/%d" % n, (1, 2)) == 1][:3]
    for partition_index in partitions[:2]:
        assert await s.ask(produce_frame({"t": [partition_index]})) == [{("t", partition_index): 0}]
    assert len(healthy.log) == 2
    # Once the broker answers, it gets its share again.
    stuck.wake()
    stuck.script = ANSWERS
    await eventually(lambda: not s.proxy.context.brokers.is_hung(stuck.address))
    assert await s.ask(produce_frame({"t": [partitions[2]]})) == [{("t", partitions[2]): 0}]
    assert stuck.log[-1].partitions == [("t", partitions[2])]


# A read is answered without records before its broker counts as hung.
LEFT_OUT = 0
READ_OR_WRITE = pytest.mark.parametrize(
    ("request_frame", "api", "in_doubt"),
    [(produce_frame(records=batch()), (PRODUCE, 9), TIMED_OUT), (fetch_frame(), (FETCH, 12), LEFT_OUT)],
    ids=["produce", "fetch"],
)


@READ_OR_WRITE
@scene(HANGS, owners=[], limits=LIMITS, one_go=True)
async def test_request_at_hung_broker_is_answered_not_resent(
    s: Scene, request_frame: bytes, api: tuple[int, int], in_doubt: int
) -> None:
    revision = s.proxy.own(1)
    began = time.monotonic()
    s.send(request_frame)
    await s.next()
    assert (await s.answer(*api)).codes == {T0: in_doubt}
    assert time.monotonic() - began < SOON_S
    assert await s.broker.is_silent()
    await s.broker.connections[0].until_closed()
    # Another broker may own the partition by now.
    assert s.proxy.source.refreshed == [("t", 0, revision)]


@READ_OR_WRITE
@scene(HANGS, HOLDS, clients=2, limits=LIMITS, one_go=True)
async def test_hung_broker_gets_no_writes_and_loses_none(
    s: Scene, request_frame: bytes, api: tuple[int, int], in_doubt: int
) -> None:
    await runs_into_hang(s)
    dialled = await connections_for_clients(s.broker)
    for client in s.clients:
        began = time.monotonic()
        client.send(request_frame)
        assert (await client.answer(*api)).codes == {T0: NOT_LEADER}
        assert time.monotonic() - began < 4
    for broker in s.brokers:
        assert await broker.is_silent()
    assert await connections_for_clients(s.broker) == dialled


@scene(HANGS, clients=2, limits=LIMITS, one_go=True)
async def test_idle_connections_also_leave_a_hung_broker(s: Scene) -> None:
    s.send(produce_frame(records=PLAIN))
    (await s.next()).answer()
    assert await s.codes() == {T0: 0}
    await runs_into_hang(s, s.clients[1])
    assert await s.ask(produce_frame(records=PLAIN)) == [{T0: NOT_LEADER}]
    assert await s.broker.is_silent()


@scene(HANGS, limits=LIMITS, one_go=True)
async def test_first_probe_answer_closes_the_breaker(s: Scene) -> None:
    await runs_into_hang(s)
    probes, brokers = s.broker.probes, s.proxy.context.brokers
    # Each probe has its own connection: the network may have lost the bytes of the connection before.
    await eventually(lambda: len(probes) == 3)
    assert len({probe.connection for probe in probes}) == 3
    assert all(not probe.connection.is_open for probe in probes[:-1])
    s.broker.wake()
    await eventually(lambda: not brokers.is_hung(s.broker.address))
    s.send(produce_frame(records=batch(1)))
    (await s.next()).answer()
    assert await s.codes() == {T0: 0}
    # Once no request waits, the probing ends; the proxy keeps its connection.
    await eventually(lambda: not brokers.asking)
    assert probes[-1].connection.is_open


@scene(HOLDS, limits=LIMITS, one_go=True)
async def test_slow_broker_that_answers_probes_does_not_hang(s: Scene) -> None:
    """A shrinking ISR, a long poll or a throttle: the answer comes later."""
    s.send(produce_frame(timeout_ms=LONG_MS))
    asked = await s.next()
    # The broker was asked more than once, over one connection.
    await eventually(lambda: len(s.broker.probes) == 3)
    assert len({probe.connection for probe in s.broker.probes}) == 1
    asked.answer(results={T0: {"base_offset": 5}})
    assert (await s.answer()).results[0].fields["base_offset"] == 5
    assert s.proxy.context.tally.hangs.total() == 0
    await eventually(lambda: not s.proxy.context.brokers.asking)


@scene(HANGS, clients=2, owners=[1, 1], limits={"probe_timeout_s": 1.0}, one_go=True)
async def test_serving_broker_without_probe_answers_does_not_hang(s: Scene) -> None:
    """Its listen queue may be full while existing connections are served."""
    slow, quick = s.clients
    slow.send(produce_frame(timeout_ms=LONG_MS))
    asked = await s.next()
    n = 0
    while len(s.broker.probes) < 3:
        quick.send(produce_frame({"t": [1]}, records=batch(n)))
        await asyncio.sleep(0.02)
        (await s.next()).answer()
        assert (await quick.answer()).codes == {T1: 0}
        n += 1
    assert s.proxy.context.tally.hangs.total() == 0
    asked.answer()
    assert (await slow.answer()).codes == {T0: 0}


def answers_in_a_while(asked: Asked) -> None:
    asyncio.get_running_loop().call_later(0.15, asked.answer)


@scene(answers_in_a_while, one_go=True)
async def test_idle_or_prompt_broker_is_not_probed(s: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_requests, "SUSPICIOUS_S", 1.3)
    assert await s.ask(produce_frame(records=batch(0))) == [{T0: 0}]
    # Some request is always in flight, but none for long.
    for n in range(1, 41):
        s.send(produce_frame(records=batch(n)))
        await asyncio.sleep(0.05)
    for _ in range(1, 41):
        assert await s.codes() == {T0: 0}
    await asyncio.sleep(1.5)
    assert s.broker.probes == []


@scene(ANSWERS, HOLDS, one_go=True)
async def test_idle_connection_is_not_probed_beside_waiting_one(s: Scene) -> None:
    idle, slow = s.brokers
    assert await s.ask(produce_frame()) == [{T0: 0}]
    # The proxy checks the client's connections as long as this request waits.
    s.send(produce_frame({"t": [1]}, timeout_ms=LONG_MS))
    asked = await slow.next()
    await eventually(lambda: len(slow.probes) == 2)
    assert idle.probes == []
    asked.answer()
    assert await s.codes() == {T1: 0}
    await eventually(lambda: not s.proxy.context.brokers.asking)


@scene(HANGS, limits=LIMITS, one_go=True)
async def test_long_fetch_causes_no_probe_before_its_time(s: Scene) -> None:
    s.send(fetch_frame(max_wait_ms=2500))
    await s.next()
    await asyncio.sleep(1.3)
    assert s.broker.probes == []
    assert (await s.answer(FETCH, 12)).codes == {T0: LEFT_OUT}
    await opens(s.proxy)


# Long enough to tell clients that wait for the hung broker from clients that wait for a busy machine.
@scene(HANGS, ANSWERS, clients=2, limits={"probe_timeout_s": 2.0}, one_go=True)
async def test_clients_of_other_brokers_never_notice(s: Scene) -> None:
    unlucky, lucky = s.clients
    unlucky.send(produce_frame(records=PLAIN))
    slowest = 0.0
    n = 0
    while not s.proxy.context.tally.hangs.total() or n < 100:
        began = time.monotonic()
        lucky.send(produce_frame({"t": [1]}, records=batch(n)))
        assert (await lucky.answer()).codes == {T1: 0}
        slowest = max(slowest, time.monotonic() - began)
        n += 1
        await asyncio.sleep(0.005)
    assert slowest < 1.5
    assert (await unlucky.answer()).codes == {T0: TIMED_OUT}
    assert len([each for each in s.brokers[1].connections if each.is_open]) == 1


@scene(DEAF, DOWN, limits=LIMITS, one_go=True)
async def test_hung_dial_opens_breaker_and_refused_does_not(s: Scene) -> None:
    began = time.monotonic()
    assert await s.ask(produce_frame(BOTH, records=PLAIN)) == [{T0: NOT_LEADER, T1: NOT_LEADER}]
    assert time.monotonic() - began < SOON_S
    assert s.proxy.context.brokers.is_hung(s.deaf[1].address)
    assert not s.proxy.context.brokers.is_hung(s.brokers[1].address)
    assert s.proxy.context.tally.hangs.total() == 1


@pytest.mark.parametrize("ends", ["refused", "closed"])
@scene(HANGS, limits=LIMITS, one_go=True)
async def test_refused_or_cut_probe_does_not_mean_hang(s: Scene, ends: str) -> None:
    s.send(produce_frame(timeout_ms=LONG_MS))
    asked = await s.next()
    if ends == "refused":
        await s.broker.stop_listening()
        await asyncio.sleep(1.5)
    else:
        await eventually(lambda: s.broker.probes)
        # The next one is answered, over a new connection.
        s.broker.answers_probes = True
        s.broker.probes[-1].connection.abort()
        await eventually(lambda: len(s.broker.probes) == 2)
    asked.answer()
    assert await s.codes() == {T0: 0}
    assert s.proxy.context.tally.hangs.total() == 0


@scene(owners=[1], limits=LIMITS, one_go=True)
async def test_stopped_broker_process_hangs_until_continued(s: Scene) -> None:
    with broker_process() as (pid, address):
        s.proxy.topology.set_broker(1, address)
        assert await s.ask(produce_frame(records=PLAIN)) == [{T0: 0}]
        for times in (1, 2):
            os.kill(pid, signal.SIGSTOP)
            assert await s.ask(*[produce_frame(records=PLAIN)] * 2) == [{T0: TIMED_OUT}] * 2
            await opens(s.proxy, times)
            assert await s.ask(produce_frame(records=PLAIN)) == [{T0: NOT_LEADER}]
            os.kill(pid, signal.SIGCONT)
            await eventually(lambda: not s.proxy.context.brokers.is_hung(address))
            assert await s.ask(produce_frame(records=PLAIN)) == [{T0: 0}]
        # The client closes first, because the broker stops before the proxy.
        s.client.abort()
        await s.until_sessions()


# Requests of the proxy itself


@pytest.mark.parametrize("asks", ["versions", "readiness"])
@scene(HANGS, limits={**LIMITS, "connect_timeout_s": 30.0}, one_go=True)
async def test_own_question_finds_a_hang_at_once(s: Scene, asks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One unanswered request is enough: no second one must stay unanswered as long."""
    monkeypatch.setattr(broker_watch, "FRESH_S", 0.0)
    brokers, asked_when_open = s.proxy.context.brokers, []
    brokers.on_open = lambda address: asked_when_open.append([len(s.broker.log), len(s.broker.probes)])
    if asks == "versions":
        s.broker.introductions[0].connection.abort()
        await eventually(lambda: brokers.look() or asked_when_open)
    else:
        assert await brokers.problem() == "no broker answers: 1 asked"
    assert asked_when_open == [[1, 0]]
    assert await s.ask(produce_frame(records=PLAIN)) == [{T0: NOT_LEADER}]


@scene(HANGS, clients=2, limits={"probe_timeout_s": 60.0})
async def test_offer_awaits_no_probe_of_known_broker(s: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_watch, "ASK_TIMEOUT_S", 60.0)
    s.send(produce_frame(timeout_ms=LONG_MS))
    await eventually(lambda: s.broker.probes)
    s.clients[1].send(control_frame(api_keys.API_VERSIONS, 4))
    assert (await s.clients[1].answer(api_keys.API_VERSIONS, 4)).message.error_code == 0


# acks=0


@scene(HANGS, limits=LIMITS, one_go=True)
async def test_acks_0_unread_by_broker_delays_no_client(s: Scene) -> None:
    s.broker.reads_nothing = True
    # More than the kernel's buffers take.
    s.send(produce_frame(records=bytes(24 << 20), acks=0))
    await opens(s.proxy)
    assert await s.client.is_closed()
    assert s.proxy.counters["acks0.undeliverable"] == 1


# The control plane


def answers_metadata(asked: Asked) -> None:
    asked.answer_message(brokers=[], topics=[], controller_id=2, cluster_id="c")


@scene(HANGS, answers_metadata, owners=[1], clients=9, limits={**LIMITS, "control_attempt_s": 30.0}, one_go=True)
async def test_cluster_request_at_hung_broker_moves_elsewhere(s: Scene) -> None:
    for client in s.clients[1:]:
        client.send(control_frame(api_keys.METADATA, 12, topics=None))
    await s.next()
    assert await s.ask(produce_frame(records=PLAIN)) == [{T0: TIMED_OUT}]
    for client in s.clients[1:]:
        await client.answer(api_keys.METADATA, 12)


# Ending


@scene(HANGS, limits=LIMITS, one_go=True)
async def test_probing_ends_with_the_proxy(s: Scene) -> None:
    await runs_into_hang(s)
    # `both_loops` finds tasks that remain.
    await s.proxy.stop()
    for probe in s.broker.probes:
        await probe.connection.until_closed()


@scene(HANGS, limits=LIMITS, one_go=True)
async def test_departed_broker_is_no_longer_probed(s: Scene) -> None:
    await runs_into_hang(s)
    s.proxy.topology.remove_broker(1)
    await eventually(lambda: not s.proxy.context.brokers.asking)
    assert not s.proxy.context.brokers.is_hung(s.broker.address)


@scene(HANGS, limits={**LIMITS, "drain_s": 20.0}, one_go=True)
async def test_drain_does_not_wait_for_hung_broker(s: Scene) -> None:
    s.send(produce_frame(records=PLAIN, timeout_ms=LONG_MS))
    await s.next()
    began = time.monotonic()
    stopping = asyncio.ensure_future(s.proxy.listener.stop())
    assert await s.codes() == {T0: TIMED_OUT}
    s.client.close()
    await stopping
    assert time.monotonic() - began < SOON_S
