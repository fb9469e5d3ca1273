"""A broker that hangs: its requests end soon, others are not affected, and it is used again once it answers."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from kproxy.proxy import broker_health
from kproxy.routing.rendezvous import preferred
from kproxy.routing.topology import Address
from kproxy_codec import api_keys
from kproxy_codec.api_keys import FETCH
from tests.support.brokers.scripted_upstream import (
    Asked,
    DeafListener,
    ScriptedUpstream,
    answers_everything,
    broker_process,
)
from tests.support.clients.raw_client import RawClient, batch, control_frame, fetch_frame, produce_frame
from tests.support.processes.running_proxy import RunningProxy, both_loops, in_one_go, running_proxy
from tests.support.waiting import eventually

NOT_LEADER = 6
TIMED_OUT = 7
T0, T1 = ("t", 0), ("t", 1)
PLAIN = batch(producer_id=-1)
PROBE_TIMEOUT_S = 0.3
LIMITS = {"probe_timeout_s": PROBE_TIMEOUT_S}
# Half a second until suspicion, the probe, and the ticks between; the deadlines here are much later.
SOON_S = 10.0
LONG_MS = 30_000


def hung(node_id: int) -> ScriptedUpstream:
    """A broker that accepts and reads, but never answers."""
    upstream = ScriptedUpstream(node_id)
    upstream.answers_probes = False
    return upstream


async def opens(proxy: RunningProxy, times: int = 1) -> None:
    await eventually(lambda: proxy.context.tally.hangs.total() == times)


async def open_breaker(proxy: RunningProxy, upstream: ScriptedUpstream, client: RawClient) -> None:
    """Send a batch of ("t", 0) to the hung broker."""
    client.send(produce_frame(records=PLAIN, correlation_id=999))
    await upstream.next()
    assert (await client.answer()).codes == {T0: TIMED_OUT}
    assert proxy.context.tally.hangs.total() == 1


async def connections_for_clients(upstream: ScriptedUpstream) -> int:
    """Their number; a probe's connection stops counting once the probe has arrived."""
    await eventually(lambda: all(connection.got for connection in upstream.connections))
    return len(upstream.connections)


@both_loops
@in_one_go
async def test_hung_broker_does_not_starve_other_partitions() -> None:
    stuck, healthy = hung(1), ScriptedUpstream(2, answers_everything)
    async with running_proxy(stuck, healthy) as proxy:
        proxy.own(1)
        proxy.own(2, partitions=[1])
        client = await proxy.client()
        began = time.monotonic()
        client.send(produce_frame({"t": [0, 1]}, timeout_ms=LONG_MS))
        answer = await client.answer()
        # With the default limits.
        assert 2.0 < time.monotonic() - began < SOON_S
        assert answer.codes == {T0: TIMED_OUT, T1: 0}
        took = []
        for n in range(1, 20):
            began = time.monotonic()
            client.send(produce_frame({"t": [0, 1]}, records=batch(n), timeout_ms=LONG_MS))
            assert (await client.answer()).codes == {T0: NOT_LEADER, T1: 0}
            took.append(time.monotonic() - began)
        # The machine itself may delay some.
        assert sum(each >= 2 for each in took) <= 3, took
        assert [asked.partitions for asked in stuck.log] == [[T0]]


@both_loops
@in_one_go
async def test_unowned_partitions_avoid_a_hung_broker() -> None:
    stuck, healthy = hung(1), ScriptedUpstream(2, answers_everything)
    async with running_proxy(stuck, healthy, limits=LIMITS) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await open_breaker(proxy, stuck, client)
        partitions = [n for n in range(1, 40) if preferred(b"t/%d" % n, (1, 2)) == 1][:3]
        for partition_index in partitions[:2]:
            client.send(produce_frame({"t": [partition_index]}))
            assert (await client.answer()).codes == {("t", partition_index): 0}
        assert len(healthy.log) == 2
        # Once it answers, it is offered its share.
        stuck.wake()
        stuck.script = answers_everything
        await eventually(lambda: not proxy.context.health.is_open(stuck.address))
        client.send(produce_frame({"t": [partitions[2]]}))
        assert (await client.answer()).codes == {("t", partitions[2]): 0}
        assert stuck.log[-1].partitions == [("t", partitions[2])]


@pytest.mark.parametrize(
    ("request_frame", "api", "expected"),
    [
        (produce_frame(records=batch()), (api_keys.PRODUCE, 9), TIMED_OUT),
        (fetch_frame(), (FETCH, 12), NOT_LEADER),
    ],
    ids=["produce", "fetch"],
)
@both_loops
@in_one_go
async def test_request_at_hung_broker_is_answered_not_resent(
    request_frame: bytes, api: tuple[int, int], expected: int
) -> None:
    upstream = hung(1)
    async with running_proxy(upstream, limits=LIMITS) as proxy:
        revision = proxy.own(1)
        client = await proxy.client()
        began = time.monotonic()
        client.send(request_frame)
        await upstream.next()
        assert (await client.answer(*api)).codes == {T0: expected}
        assert time.monotonic() - began < SOON_S
        assert await upstream.is_silent()
        await upstream.connections[0].until_closed()
        # Its owner may have changed by now.
        assert proxy.source.refreshed == [("t", 0, revision)]


@pytest.mark.parametrize(
    ("request_frame", "api"),
    [
        (produce_frame(records=batch()), (api_keys.PRODUCE, 9)),
        (fetch_frame(), (FETCH, 12)),
    ],
    ids=["produce", "fetch"],
)
@both_loops
@in_one_go
async def test_hung_broker_gets_no_writes_and_loses_none(request_frame: bytes, api: tuple[int, int]) -> None:
    upstream, other = hung(1), ScriptedUpstream(2)
    async with running_proxy(upstream, other, limits=LIMITS) as proxy:
        proxy.own(1)
        first, second = await proxy.client(), await proxy.client()
        await open_breaker(proxy, upstream, first)
        dialled = await connections_for_clients(upstream)
        for client in (first, second):
            began = time.monotonic()
            client.send(request_frame)
            assert (await client.answer(*api)).codes == {T0: NOT_LEADER}
            assert time.monotonic() - began < 4
        assert await upstream.is_silent()
        assert await other.is_silent()
        assert await connections_for_clients(upstream) == dialled


@both_loops
@in_one_go
async def test_idle_connections_also_leave_a_hung_broker() -> None:
    upstream = hung(1)
    async with running_proxy(upstream, limits=LIMITS) as proxy:
        proxy.own(1)
        idle, busy = await proxy.client(), await proxy.client()
        idle.send(produce_frame(records=PLAIN))
        (await upstream.next()).answer()
        assert (await idle.answer()).codes == {T0: 0}
        await open_breaker(proxy, upstream, busy)
        idle.send(produce_frame(records=PLAIN))
        assert (await idle.answer()).codes == {T0: NOT_LEADER}
        assert await upstream.is_silent()


@both_loops
@in_one_go
async def test_first_probe_answer_closes_the_breaker() -> None:
    upstream = hung(1)
    async with running_proxy(upstream, limits=LIMITS) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await open_breaker(proxy, upstream, client)
        # Each on its own connection: the network may have lost the previous one's data.
        await eventually(lambda: len(upstream.probes) == 3)
        assert len({probe.connection for probe in upstream.probes}) == 3
        assert all(not probe.connection.is_open for probe in upstream.probes[:-1])
        upstream.wake()
        await eventually(lambda: not proxy.context.health.is_open(upstream.address))
        client.send(produce_frame(records=batch(1)))
        (await upstream.next()).answer()
        assert (await client.answer()).codes == {T0: 0}
        # When no doubt is left, probing ends, and so does its connection.
        await eventually(lambda: not proxy.context.health.watching)
        await upstream.probes[-1].connection.until_closed()


@both_loops
@in_one_go
async def test_slow_broker_that_answers_probes_does_not_hang() -> None:
    """A shrinking ISR, a long poll or a throttle: the answer may take any time."""
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream, limits=LIMITS) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(timeout_ms=LONG_MS))
        asked = await upstream.next()
        # Probed more than once, on one connection.
        await eventually(lambda: len(upstream.probes) == 3)
        assert len({probe.connection for probe in upstream.probes}) == 1
        asked.answer(results={T0: {"base_offset": 5}})
        answer = await client.answer()
        assert answer.results[0].fields["base_offset"] == 5
        assert proxy.context.tally.hangs.total() == 0
        await eventually(lambda: not proxy.context.health.watching)


@both_loops
@in_one_go
async def test_serving_broker_without_probe_answers_does_not_hang() -> None:
    """Its backlog may be full while its existing connections are served."""
    upstream = hung(1)
    async with running_proxy(upstream, limits={"probe_timeout_s": 1.0}) as proxy:
        proxy.own(1, partitions=[0, 1])
        slow, quick = await proxy.client(), await proxy.client()
        slow.send(produce_frame(timeout_ms=LONG_MS))
        asked = await upstream.next()
        n = 0
        while len(upstream.probes) < 3:
            quick.send(produce_frame({"t": [1]}, records=batch(n)))
            await asyncio.sleep(0.02)
            (await upstream.next()).answer()
            assert (await quick.answer()).codes == {T1: 0}
            n += 1
        assert proxy.context.tally.hangs.total() == 0
        asked.answer()
        assert (await slow.answer()).codes == {T0: 0}


@both_loops
@in_one_go
async def test_idle_or_prompt_broker_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_health, "SUSPICIOUS_S", 1.3)

    def answers_in_a_while(asked: Asked) -> None:
        asyncio.get_running_loop().call_later(0.15, asked.answer)

    upstream = ScriptedUpstream(1, answers_in_a_while)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=batch(0)))
        assert (await client.answer()).codes == {T0: 0}
        # Requests are always in flight, though none for long.
        for n in range(1, 41):
            client.send(produce_frame(records=batch(n)))
            await asyncio.sleep(0.05)
        for _ in range(1, 41):
            assert (await client.answer()).codes == {T0: 0}
        await asyncio.sleep(1.5)
        assert upstream.probes == []


@both_loops
@in_one_go
async def test_idle_connection_is_not_probed_beside_waiting_one() -> None:
    idle, slow = ScriptedUpstream(1, answers_everything), ScriptedUpstream(2)
    async with running_proxy(idle, slow) as proxy:
        proxy.own(1)
        proxy.own(2, partitions=[1])
        client = await proxy.client()
        client.send(produce_frame())
        assert (await client.answer()).codes == {T0: 0}
        # While this one waits, the client's connections are checked.
        client.send(produce_frame({"t": [1]}, timeout_ms=LONG_MS))
        asked = await slow.next()
        await eventually(lambda: len(slow.probes) == 2)
        assert idle.probes == []
        asked.answer()
        assert (await client.answer()).codes == {T1: 0}
        await eventually(lambda: not proxy.context.health.watching)


@both_loops
@in_one_go
async def test_long_fetch_causes_no_probe_before_its_time() -> None:
    upstream = hung(1)
    async with running_proxy(upstream, limits=LIMITS) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(fetch_frame(max_wait_ms=2500))
        await upstream.next()
        await asyncio.sleep(1.3)
        assert upstream.probes == []
        assert (await client.answer(FETCH, 12)).codes == {T0: NOT_LEADER}
        await opens(proxy)


@both_loops
@in_one_go
async def test_clients_of_other_brokers_never_notice() -> None:
    stuck, healthy = hung(1), ScriptedUpstream(2, answers_everything)
    # Long enough to distinguish a wait for that broker from a wait for a busy machine.
    async with running_proxy(stuck, healthy, limits={"probe_timeout_s": 2.0}) as proxy:
        proxy.own(1)
        proxy.own(2, partitions=[1])
        unlucky, lucky = await proxy.client(), await proxy.client()
        unlucky.send(produce_frame(records=PLAIN))
        slowest = 0.0
        n = 0
        while not proxy.context.tally.hangs.total() or n < 100:
            began = time.monotonic()
            lucky.send(produce_frame({"t": [1]}, records=batch(n)))
            assert (await lucky.answer()).codes == {T1: 0}
            slowest = max(slowest, time.monotonic() - began)
            n += 1
            await asyncio.sleep(0.005)
        assert slowest < 1.5
        assert (await unlucky.answer()).codes == {T0: TIMED_OUT}
        assert len([each for each in healthy.connections if each.is_open]) == 1


@both_loops
@in_one_go
async def test_hung_dial_opens_breaker_and_refused_does_not() -> None:
    refusing = ScriptedUpstream(2)
    with DeafListener() as listener:
        async with running_proxy(refusing, limits=LIMITS) as proxy:
            await refusing.stop_listening()
            proxy.topology.set_broker(1, listener.address)
            proxy.own(1)
            proxy.own(2, partitions=[1])
            client = await proxy.client()
            began = time.monotonic()
            client.send(produce_frame({"t": [0, 1]}, records=PLAIN))
            assert (await client.answer()).codes == {T0: NOT_LEADER, T1: NOT_LEADER}
            assert time.monotonic() - began < SOON_S
            assert proxy.context.health.is_open(listener.address)
            assert not proxy.context.health.is_open(refusing.address)
            assert proxy.context.tally.hangs.total() == 1


@pytest.mark.parametrize("ends", ["refused", "closed"])
@both_loops
@in_one_go
async def test_refused_or_cut_probe_does_not_mean_hang(ends: str) -> None:
    upstream = hung(1)
    async with running_proxy(upstream, limits=LIMITS) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(timeout_ms=LONG_MS))
        asked = await upstream.next()
        if ends == "refused":
            await upstream.stop_listening()
            await asyncio.sleep(1.5)
        else:
            await eventually(lambda: upstream.probes)
            upstream.probes[-1].connection.abort()
            # The next probe is answered, on a new connection.
            upstream.answers_probes = True
            await eventually(lambda: len(upstream.probes) == 2)
        asked.answer()
        assert (await client.answer()).codes == {T0: 0}
        assert proxy.context.tally.hangs.total() == 0


@both_loops
@in_one_go
async def test_stopped_broker_process_hangs_until_continued() -> None:
    with broker_process() as (pid, address):
        await _stop_and_continue(pid, address)


async def _stop_and_continue(pid: int, address: Address) -> None:
    async with running_proxy(limits=LIMITS) as proxy:
        proxy.topology.set_broker(1, address)
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=PLAIN))
        assert (await client.answer()).codes == {T0: 0}
        for times in (1, 2):
            os.kill(pid, signal.SIGSTOP)
            client.send(produce_frame(records=PLAIN), produce_frame(records=PLAIN))
            assert (await client.answer()).codes == {T0: TIMED_OUT}
            assert (await client.answer()).codes == {T0: TIMED_OUT}
            await opens(proxy, times)
            client.send(produce_frame(records=PLAIN))
            assert (await client.answer()).codes == {T0: NOT_LEADER}
            os.kill(pid, signal.SIGCONT)
            await eventually(lambda: not proxy.context.health.is_open(address))
            client.send(produce_frame(records=PLAIN))
            assert (await client.answer()).codes == {T0: 0}


# Order


@both_loops
@in_one_go
async def test_partition_moved_off_hung_broker_is_retried() -> None:
    stuck, new = hung(1), ScriptedUpstream(2, answers_everything)
    async with running_proxy(stuck, new, limits=LIMITS) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=batch(0)))
        await stuck.next()
        proxy.own(2)
        # Waits for the previous one, which is in flight elsewhere.
        client.send(produce_frame(records=batch(1)))
        assert [(await client.answer()).codes[T0] for _ in range(2)] == [0, 0]
        assert len(new.log) == 2


# acks=0


@both_loops
@in_one_go
async def test_acks_0_for_hung_broker_closes_connection() -> None:
    upstream = hung(1)
    async with running_proxy(upstream, limits=LIMITS) as proxy:
        proxy.own(1, partitions=[0, 1])
        client, victim = await proxy.client(), await proxy.client()
        await open_breaker(proxy, upstream, victim)
        client.send(produce_frame({"t": [0, 1]}, acks=0))
        assert await client.is_closed()
        assert proxy.counters["acks0.undeliverable"] == 2
        assert await upstream.is_silent()


@both_loops
@in_one_go
async def test_acks_0_unread_by_broker_delays_no_client() -> None:
    upstream = hung(1)
    upstream.reads_nothing = True
    async with running_proxy(upstream, limits=LIMITS) as proxy:
        proxy.own(1)
        client = await proxy.client()
        # More than the kernel's buffers hold.
        client.send(produce_frame(records=bytes(24 << 20), acks=0))
        await opens(proxy)
        assert await client.is_closed()
        assert proxy.counters["acks0.undeliverable"] == 1


# The control plane


@both_loops
@in_one_go
async def test_cluster_requests_avoid_a_hung_broker() -> None:
    asked_of: list[int] = []

    def answers_metadata(asked: Asked) -> None:
        asked_of.append(asked.connection.upstream.node_id)
        asked.answer_message(brokers=[], topics=[], controller_id=2, cluster_id="c")

    stuck, healthy = hung(1), ScriptedUpstream(2, answers_metadata)
    async with running_proxy(stuck, healthy, limits=LIMITS) as proxy:
        proxy.own(1)
        await open_breaker(proxy, stuck, await proxy.client())
        # Each connection has its own order of brokers.
        for _ in range(8):
            client = await proxy.client()
            began = time.monotonic()
            client.send(control_frame(api_keys.METADATA, 12, topics=None))
            await client.answer(api_keys.METADATA, 12)
            assert time.monotonic() - began < 4
        assert asked_of == [2] * 8
        assert await stuck.is_silent()


@both_loops
@in_one_go
async def test_cluster_request_at_hung_broker_moves_elsewhere() -> None:
    stuck = hung(1)
    healthy = ScriptedUpstream(2, lambda asked: asked.answer_message(brokers=[], topics=[], cluster_id="c"))
    async with running_proxy(stuck, healthy, limits={**LIMITS, "control_attempt_s": 30.0}) as proxy:
        proxy.own(1)
        clients = [await proxy.client() for _ in range(8)]
        for client in clients:
            client.send(control_frame(api_keys.METADATA, 12, topics=None))
        await stuck.next()
        client = await proxy.client()
        client.send(produce_frame(records=PLAIN))
        for each in clients:
            await each.answer(api_keys.METADATA, 12)
        assert (await client.answer()).codes == {T0: TIMED_OUT}


# Ending


@both_loops
@in_one_go
async def test_probing_ends_with_the_proxy() -> None:
    upstream = hung(1)
    async with running_proxy(upstream, limits=LIMITS) as proxy:
        proxy.own(1)
        await open_breaker(proxy, upstream, await proxy.client())
    # `both_loops` finds tasks that are left.
    for probe in upstream.probes:
        await probe.connection.until_closed()


@both_loops
@in_one_go
async def test_departed_broker_is_no_longer_probed() -> None:
    upstream = hung(1)
    async with running_proxy(upstream, limits=LIMITS) as proxy:
        proxy.own(1)
        await open_breaker(proxy, upstream, await proxy.client())
        proxy.topology.remove_broker(1)
        await eventually(lambda: not proxy.context.health.watching)
        assert not proxy.context.health.is_open(upstream.address)


@both_loops
@in_one_go
async def test_drain_does_not_wait_for_hung_broker() -> None:
    upstream = hung(1)
    options: dict[str, Any] = {"limits": {**LIMITS, "drain_s": 20.0}}
    async with running_proxy(upstream, **options) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=PLAIN, timeout_ms=LONG_MS))
        await upstream.next()
        began = time.monotonic()
        stopping = asyncio.ensure_future(proxy.listener.stop())
        assert (await client.answer()).codes == {T0: TIMED_OUT}
        client.close()
        await stopping
        assert time.monotonic() - began < SOON_S
