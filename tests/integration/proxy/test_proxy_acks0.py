"""acks=0: no request is answered, nothing waits for it, and a loss is counted and reported by closing."""

from __future__ import annotations

import asyncio
import time

import pytest

from kproxy.proxy import broker_connection as upstream_module
from kproxy.proxy import fanout
from kproxy_codec.api_keys import PRODUCE
from tests.support.brokers.scripted_upstream import DeafListener, ScriptedUpstream
from tests.support.clients.raw_client import RawClient, batch, produce_frame
from tests.support.processes.running_proxy import both_loops, in_one_go, running_proxy
from tests.support.waiting import eventually
from tests.support.wire.messages import response_body, response_frame, sample_response

T0 = ("t", 0)
NOT_LEADER = 6
TOO_LARGE = 10
PLAIN = batch(producer_id=-1)


def unanswered(n: int = 0, **options: object) -> bytes:
    return produce_frame(records=batch(n, producer_id=-1), acks=0, **options)  # type: ignore[arg-type]


async def arrives(upstream: ScriptedUpstream, n: int) -> None:
    asked = await upstream.next()
    assert asked.fields["acks"] == 0
    assert list(asked.records.values()) == [batch(n, producer_id=-1)]


@both_loops
async def test_acks_0_is_forwarded_and_never_answered() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(*(unanswered(n) for n in range(5)))
        for n in range(5):
            await arrives(upstream, n)
        assert await client.is_silent()


@both_loops
async def test_a_request_behind_acks_0_is_answered() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(unanswered(), produce_frame(acks=1, correlation_id=8), unanswered(1))
        await arrives(upstream, 0)
        (await upstream.next()).answer()
        await arrives(upstream, 1)
        assert (await client.answer()).correlation_id == 8
        assert await client.is_silent()


@both_loops
async def test_acks_0_over_two_owners_reaches_both() -> None:
    first, second = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(first, second) as proxy:
        proxy.own(1)
        proxy.own(2, partitions=[1])
        client = await proxy.client()
        client.send(unanswered(partitions={"t": [0, 1]}))
        assert (await first.next()).partitions == [T0]
        assert (await second.next()).partitions == [("t", 1)]
        assert await client.is_silent()


@both_loops
@in_one_go
async def test_acks_0_waits_for_dial_and_delays_nothing() -> None:
    slow, healthy = ScriptedUpstream(1), ScriptedUpstream(2)
    with DeafListener() as listener:
        async with running_proxy(healthy, limits={"connect_timeout_s": 5.0}) as proxy:
            proxy.topology.set_broker(1, listener.address)
            proxy.own(1)
            proxy.own(2, partitions=[1])
            client = await proxy.client()
            client.send(unanswered(0), unanswered(1), produce_frame({"t": [1]}, acks=1, correlation_id=8))
            (await healthy.next()).answer()
            assert (await client.answer()).correlation_id == 8
            await listener.open(slow)
            await arrives(slow, 0)
            await arrives(slow, 1)
        await slow.stop()


@both_loops
async def test_undeliverable_acks_0_is_counted_and_closes_connection() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        await upstream.stop_listening()
        proxy.own(1)
        client = await proxy.client()
        began = time.monotonic()
        client.send(unanswered())
        assert await client.is_closed()
        # Well before the deadline that it has.
        assert time.monotonic() - began < 5
        assert proxy.counters["acks0.undeliverable"] == 1


@both_loops
async def test_each_lost_acks_0_batch_is_counted() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        await upstream.stop_listening()
        proxy.own(1, partitions=[0, 1])
        client = await proxy.client()
        client.send(unanswered(0), unanswered(1), unanswered(2, partitions={"t": [0, 1]}))
        assert await client.is_closed()
        await eventually(lambda: proxy.counters["acks0.undeliverable"] == 4)


@both_loops
@in_one_go
async def test_acks_0_after_refused_dial_is_sent_later() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        await upstream.stop_listening()
        proxy.own(1)
        client = await proxy.client()
        client.send(unanswered(0), unanswered(1))
        await eventually(lambda: proxy.retries(65536) >= 1)
        await upstream.start(upstream.port)
        await arrives(upstream, 0)
        await arrives(upstream, 1)
        assert await client.is_silent()
        assert proxy.counters["acks0.undeliverable"] == 0


@both_loops
@in_one_go
async def test_complete_acks_0_frames_outlive_their_client() -> None:
    upstream = ScriptedUpstream(1)
    with DeafListener() as listener:
        async with running_proxy(limits={"connect_timeout_s": 5.0}) as proxy:
            proxy.topology.set_broker(1, listener.address)
            proxy.own(1)
            client = await proxy.client()
            client.send(unanswered(0), produce_frame(acks=1), unanswered(1), unanswered(2)[:-3])
            client.close()
            await asyncio.sleep(0.1)
            await listener.open(upstream)
            # The one that wanted an answer is dropped: its client would send it again itself.
            await arrives(upstream, 0)
            await arrives(upstream, 1)
            await upstream.connections[0].until_closed()
            assert upstream.asked.empty()
        await upstream.stop()


@both_loops
async def test_retrying_acks_0_outlives_its_client() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        await upstream.stop_listening()
        proxy.own(1)
        client = await proxy.client()
        client.send(unanswered(0), unanswered(1))
        await eventually(lambda: proxy.retries(65536) >= 1)
        client.close()
        await upstream.start(upstream.port)
        await arrives(upstream, 0)
        await arrives(upstream, 1)


@both_loops
async def test_undeliverable_acks_0_of_departed_client_is_counted() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        await upstream.stop_listening()
        proxy.own(1)
        client = await proxy.client()
        client.send(unanswered(0), unanswered(1))
        await client.sent()
        client.close()
        await eventually(lambda: proxy.counters["acks0.undeliverable"] == 2)


@both_loops
async def test_written_acks_0_survives_unread_answers() -> None:
    """Closing a connection with unread bytes resets it, and a reset destroys what is still on its way."""
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        upstream.reads_nothing = True
        proxy.own(1)
        client = await proxy.client()
        big = batch(1, producer_id=-1) + bytes(3 << 19)
        client.send(produce_frame(acks=1), produce_frame(records=big, acks=0))
        await eventually(lambda: upstream.connections)
        await asyncio.sleep(0.05)
        client.close()
        await asyncio.sleep(0.05)
        connection = upstream.connections[0]
        # The answer to the first comes while the second is still in this side's kernel.
        answer = sample_response(PRODUCE, {"t": [0]}, throttle_time_ms=0)
        connection.write(bytes(response_frame(PRODUCE, 9, response_body(PRODUCE, 9, answer), correlation_id=1)))
        await asyncio.sleep(0.05)
        connection.transport.resume_reading()
        await connection.until_closed()
        assert len(upstream.log) == 2


@both_loops
async def test_acks_0_with_duplicate_partition_closes_connection() -> None:
    """There is no answer that could say INVALID_REQUEST."""
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(unanswered(partitions={"t": [0, 0]}))
        assert await client.is_closed()
        assert upstream.log == []


@both_loops
@in_one_go
async def test_acks_0_that_waits_is_bounded_in_bytes() -> None:
    """A client that needs no answers can send as fast as the network is."""
    upstream = ScriptedUpstream(1)
    with DeafListener() as listener:
        limits = {"connect_timeout_s": 0.3, "max_in_flight_bytes": 1 << 20}
        async with running_proxy(upstream, limits=limits) as proxy:
            proxy.topology.set_broker(1, listener.address)
            proxy.own(1)
            client = await proxy.client()
            taken = await flood(client)
            assert taken < 16 << 20
            client.abort()


@both_loops
@in_one_go
async def test_retrying_acks_0_is_bounded_in_bytes() -> None:
    """After the first try everything waits in the lane, not in front of the dial."""
    async with running_proxy(limits={"max_in_flight_bytes": 1 << 20}) as proxy:
        # No broker at all: what is not owned waits for one.
        client = await proxy.client()
        client.send(unanswered())
        taken = await flood(client, 0.1)
        assert taken < 16 << 20


async def flood(client: RawClient, seconds: float = 0.5) -> int:
    """Send acks=0 for so long; how many bytes were taken off the client."""
    frame = produce_frame(records=PLAIN + bytes(1 << 16), acks=0)
    taken = 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                client.send(frame)
                await client.sent()
                taken += len(frame)
    except (TimeoutError, ConnectionError):
        return taken


@pytest.mark.parametrize("written", [0, 1, 100, -1])
@both_loops
async def test_partial_acks_0_frame_is_not_sent(written: int) -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(unanswered(0), unanswered(1)[:written])
        client.close()
        await arrives(upstream, 0)
        await upstream.connections[0].until_closed()
        assert upstream.asked.empty()


@both_loops
@in_one_go
async def test_loss_during_stop_leaves_no_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker has stopped reading, and what it has not taken is given up last of all."""
    monkeypatch.setattr(fanout, "FLUSH_S", 0.2)
    monkeypatch.setattr(upstream_module, "FLUSH_S", 0.2)
    broker = ScriptedUpstream(1)
    async with running_proxy(broker, limits={"drain_s": 0.1}) as proxy:

        async def refresh(topic: bytes, partition_index: int, seen_revision: int) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(proxy.source, "refresh", refresh)
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=batch(producer_id=-1), acks=0))
        (await broker.next()).connection.transport.pause_reading()
        client.send(*(produce_frame(records=batch(producer_id=-1) + bytes(1 << 20), acks=0) for _ in range(12)))
        await eventually(lambda: proxy.vitals.in_flight_requests)
        await asyncio.sleep(0.1)


@both_loops
@in_one_go
async def test_requests_queued_behind_refused_batch_count_as_lost() -> None:
    """Its client is told of the refused one by closing; that it had sent the others already, nobody else knows."""
    broker = ScriptedUpstream(1)
    async with running_proxy(broker, limits={"max_open_requests": 2}) as proxy:
        proxy.context.confirm_acks0 = True
        proxy.own(1)
        client = await proxy.client()
        client.send(unanswered())
        (await broker.next()).answer()
        client.send(*(unanswered(n) for n in range(1, 7)))
        first, second = [await broker.next() for _ in range(2)]
        first.answer(results={T0: TOO_LARGE})
        second.answer()
        await eventually(lambda: not proxy.listener._sessions)
        assert proxy.context.tally.drops[b"t"] == {TOO_LARGE: 1, NOT_LEADER: 4}
