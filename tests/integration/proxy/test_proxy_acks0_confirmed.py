"""acks=0 with `confirm_acks0`: brokers confirm, clients get no answer, and no avoidable loss occurs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.brokers.scripted_upstream import Asked, DeafListener, ScriptedUpstream
from tests.support.clients.raw_client import batch, produce_frame
from tests.support.processes.running_proxy import RunningProxy, both_loops, in_one_go, running_proxy
from tests.support.processes.served import ServedBroker, page, port_of, samples, static_proxy
from tests.support.waiting import eventually

T0 = ("t", 0)
NOT_LEADER, MESSAGE_TOO_LARGE, TIMED_OUT = 6, 10, 7


@asynccontextmanager
async def confirming(
    *upstreams: ScriptedUpstream, limits: Mapping[str, Any] | None = None
) -> AsyncIterator[RunningProxy]:
    async with running_proxy(*upstreams, limits=limits) as proxy:
        proxy.context.confirm_acks0 = True
        yield proxy


def silent(n: int = 0, **options: Any) -> bytes:
    return produce_frame(records=batch(n, producer_id=-1), acks=0, **options)


async def arrives(upstream: ScriptedUpstream, n: int) -> Asked:
    """Batch `n` comes, and asks for a confirmation."""
    asked = await upstream.next()
    assert asked.fields["acks"] == 1
    assert list(asked.records.values()) == [batch(n, producer_id=-1)] * len(asked.records)
    return asked


def dropped(proxy: RunningProxy) -> dict[str, dict[int, int]]:
    return {topic.decode(): dict(reasons) for topic, reasons in proxy.context.tally.drops.items()}


@pytest.mark.parametrize("version", [3, 8, 9, 11])
@both_loops
async def test_brokers_confirm_acks_0_and_client_hears_nothing(version: int) -> None:
    upstream = ScriptedUpstream(1)
    async with confirming(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(silent(version=version, timeout_ms=4321))
        asked = await arrives(upstream, 0)
        assert asked.fields["timeout_ms"] == 4321
        asked.answer()
        # And on a proven route, where answers are handed on as they come.
        client.send(silent(1, version=version))
        (await arrives(upstream, 1)).answer()
        client.send(produce_frame(acks=1, correlation_id=8, version=version))
        (await upstream.next()).answer()
        assert (await client.answer(api_version=version)).correlation_id == 8
        assert await client.is_silent()
        assert dropped(proxy) == {}


@both_loops
async def test_parts_of_a_split_request_are_confirmed_each() -> None:
    first, second = ScriptedUpstream(1), ScriptedUpstream(2)
    async with confirming(first, second) as proxy:
        proxy.own(1)
        proxy.own(2, partitions=[1])
        client = await proxy.client()
        client.send(silent(partitions={"t": [0, 1]}))
        for upstream in (first, second):
            (await arrives(upstream, 0)).answer()
        assert await client.is_silent()


@both_loops
async def test_refusal_by_old_owner_is_retried_in_order() -> None:
    old, new = ScriptedUpstream(1), ScriptedUpstream(2)
    async with confirming(old, new) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(silent(0))
        (await arrives(old, 0)).answer()
        client.send(*(silent(n) for n in range(1, 5)))
        held = [await arrives(old, n) for n in range(1, 5)]
        proxy.source.on_refresh = lambda *_: proxy.own(2) and None
        for asked in held:
            asked.answer(results={T0: NOT_LEADER})
        for n in range(1, 5):
            (await arrives(new, n)).answer()
        client.send(silent(5))
        (await arrives(new, 5)).answer()
        assert await client.is_silent()
        assert old.asked.empty()
        assert dropped(proxy) == {}


@both_loops
async def test_permanent_refusal_is_counted_and_closes_connection() -> None:
    upstream = ScriptedUpstream(1)
    async with confirming(upstream) as proxy:
        proxy.own(1, partitions=[0, 1])
        client = await proxy.client()
        client.send(silent(partitions={"t": [0, 1]}))
        (await arrives(upstream, 0)).answer(results={T0: MESSAGE_TOO_LARGE})
        assert await client.is_closed()
        assert dropped(proxy) == {"t": {MESSAGE_TOO_LARGE: 1}}
        assert proxy.counters["acks0.undeliverable"] == 1


@both_loops
async def test_frames_behind_permanent_refusal_are_delivered() -> None:
    """The connection is closed, but whole frames were taken: each of them is appended, or counted."""
    upstream = ScriptedUpstream(1)
    async with confirming(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(silent(0), silent(1), silent(2))
        (await arrives(upstream, 0)).answer(results={T0: MESSAGE_TOO_LARGE})
        for n in (1, 2):
            (await arrives(upstream, n)).answer()
        assert await client.is_closed()
        await eventually(lambda: not proxy.listener._sessions)
        assert dropped(proxy) == {"t": {MESSAGE_TOO_LARGE: 1}}


@both_loops
async def test_possibly_appended_batch_is_counted_and_not_resent() -> None:
    upstream = ScriptedUpstream(1)
    async with confirming(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(silent(0))
        (await arrives(upstream, 0)).connection.abort()
        assert await client.is_closed()
        assert dropped(proxy) == {"t": {TIMED_OUT: 1}}
        assert len(upstream.log) == 1


@both_loops
async def test_complete_frames_are_settled_after_client_leaves() -> None:
    old, new = ScriptedUpstream(1), ScriptedUpstream(2)
    async with confirming(old, new) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(silent(0), silent(1), silent(2)[:-3])
        first = await arrives(old, 0)
        client.close()
        await asyncio.sleep(0.1)
        proxy.source.on_refresh = lambda *_: proxy.own(2) and None
        first.answer(results={T0: NOT_LEADER})
        for n in (0, 1):
            (await arrives(new, n)).answer()
        await old.connections[0].until_closed()
        assert len(new.log) == 2
        assert dropped(proxy) == {}


@both_loops
async def test_unanswered_write_of_departed_client_is_awaited() -> None:
    upstream = ScriptedUpstream(1)
    async with confirming(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(acks=1), silent(1))
        (await upstream.next()).answer()
        asked = await arrives(upstream, 1)
        client.close()
        await asyncio.sleep(0.1)
        assert asked.connection.is_open
        asked.answer()
        await asked.connection.until_closed()
        assert dropped(proxy) == {}


@both_loops
async def test_unconfirmed_requests_are_bounded() -> None:
    upstream = ScriptedUpstream(1)
    async with confirming(upstream, limits={"max_open_requests": 20}) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(silent(0))
        (await arrives(upstream, 0)).answer()
        client.send(*(silent(n) for n in range(1, 101)))
        await eventually(lambda: len(upstream.log) >= 21)
        await asyncio.sleep(0.1)
        assert len(upstream.log) == 21
        for n in range(1, 101):
            (await arrives(upstream, n)).answer()
        await eventually(lambda: proxy.vitals.in_flight_requests == 0)
        assert proxy.vitals.in_flight_bytes == 0


@both_loops
@in_one_go
async def test_stopping_waits_until_they_are_confirmed() -> None:
    upstream = ScriptedUpstream(1)
    async with confirming(upstream, limits={"drain_s": 20.0}) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(silent(0))
        asked = await arrives(upstream, 0)
        stopping = asyncio.create_task(proxy.listener.stop())
        await asyncio.sleep(0.1)
        assert not stopping.done()
        asked.answer()
        async with asyncio.timeout(10.0):
            await stopping
        assert dropped(proxy) == {}


@both_loops
@in_one_go
async def test_confirmed_acks_0_waits_for_the_dial() -> None:
    upstream = ScriptedUpstream(1)
    with DeafListener() as listener:
        async with confirming(limits={"connect_timeout_s": 5.0}) as proxy:
            proxy.topology.set_broker(1, listener.address)
            proxy.own(1)
            client = await proxy.client()
            client.send(silent(0), silent(1))
            await client.sent()
            client.close()
            await asyncio.sleep(0.1)
            await listener.open(upstream)
            for n in (0, 1):
                (await arrives(upstream, n)).answer()
        await upstream.stop()


@pytest.mark.parametrize("confirm", [True, False])
async def test_the_flag_of_serve_switches_it(tmp_path: Path, confirm: bool) -> None:
    upstream = await ServedBroker(1).start()
    more = ["--confirm-acks0"] if confirm else ["--no-confirm-acks0"]
    with static_proxy(tmp_path, {1: upstream.port}, more=more) as process:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(process))
        writer.write(silent())
        asked = await upstream.next()
        assert asked.fields["acks"] == int(confirm)
        if confirm:
            asked.answer(results={T0: MESSAGE_TOO_LARGE})
            assert await reader.read() == b""
            _, text = await asyncio.to_thread(page, process.admin, "/metrics")
            lost = "kproxy_acks0_dropped_total", (("reason", "MESSAGE_TOO_LARGE"), ("topic", "t"))
            assert samples(text)[lost] == 1
        writer.close()
    await upstream.stop()


@both_loops
async def test_every_lost_batch_is_counted_and_no_other() -> None:
    """However the answers fall: what is appended and what is counted are together what was sent."""
    appended: list[bytes] = []
    outcomes = [0, NOT_LEADER, 0, MESSAGE_TOO_LARGE, 19, 0, 87]

    def script(asked: Asked) -> None:
        records = asked.records[T0]
        # A second time all are taken.
        outcome = 0 if records in refused else outcomes[len(refused) % len(outcomes)]
        if outcome:
            refused.append(records)
        elif records not in refused:
            refused.append(b"")
        if outcome == 0:
            appended.append(records)
        asked.answer(results={T0: outcome})

    refused: list[bytes] = []
    upstream = ScriptedUpstream(1, script)
    async with confirming(upstream) as proxy:
        proxy.own(1)
        sent = 60
        for n in range(sent):
            client = await proxy.client()
            client.send(silent(n))
        await eventually(lambda: len(appended) + proxy.counters["acks0.undeliverable"] >= sent)
        await asyncio.sleep(0.1)
        assert len(appended) + proxy.counters["acks0.undeliverable"] == sent
        assert len(set(appended)) == len(appended)
        assert sum(sum(reasons.values()) for reasons in dropped(proxy).values()) == sent - len(appended)
        assert 0 < len(appended) < sent
