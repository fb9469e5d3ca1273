"""acks=0: no request is answered or waited for, and a loss is counted and reported by closing.

With `confirm_acks0` brokers get acks=1, and no avoidable loss occurs; `confirms` covers both ways.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kproxy.proxy import broker_connection as upstream_module
from kproxy.proxy import fanout
from kproxy_codec.api_keys import PRODUCE
from tests.support.brokers.scripted_upstream import Asked
from tests.support.clients.raw_client import RawClient, batch, produce_frame
from tests.support.processes.running_proxy import both_loops
from tests.support.processes.served import served
from tests.support.scene import DEAF, DOWN, HOLDS, T0, Scene, scene, staged
from tests.support.waiting import eventually
from tests.support.wire.messages import response_body, response_frame, sample_response

NOT_LEADER, TIMED_OUT, TOO_LARGE = 6, 7, 10
PLAIN = batch(producer_id=-1)
both_ways = pytest.mark.parametrize("confirms", [False, True], ids=["unconfirmed", "confirmed"])


def sends(s: Scene, *numbers: int, confirms: bool = False, **options: Any) -> None:
    s.proxy.context.confirm_acks0 = confirms
    s.produces(*numbers, producer_id=-1, acks=0, **options)


async def arrive(s: Scene, *numbers: int, confirms: bool = False, at: int = 1, **answer: Any) -> None:
    """Wait for these requests, and answer them if they expect an answer."""
    for number in numbers:
        (asked,) = await s.takes(number, at=at)
        assert asked.fields["acks"] == int(confirms)
        if confirms:
            asked.answer(**answer)


def dropped(s: Scene) -> dict[str, dict[int, int]]:
    return {topic.decode(): dict(reasons) for topic, reasons in s.proxy.context.tally.drops.items()}


async def until_lost(s: Scene, count: int) -> None:
    await eventually(lambda: s.proxy.counters["acks0.undeliverable"] == count)


# In transit


@scene(HOLDS, clients=5)
async def test_acks_0_is_forwarded_and_never_answered(s: Scene) -> None:
    """On a new and a proven route, where answers are passed on as received."""
    for number, (version, confirms) in enumerate([(9, False), (3, True), (8, True), (9, True), (11, True)], 1):
        options = {"version": version, "client": number}
        sends(s, 0, confirms=confirms, timeout_ms=4321, **options)
        await arrive(s, 0, confirms=confirms)
        assert s.broker.log[-1].fields["timeout_ms"] == 4321
        sends(s, 1, 2, 3, 4, confirms=confirms, **options)
        await arrive(s, 1, 2, 3, 4, confirms=confirms)
        s.produces(8, acks=1, **options)
        await s.accepts(8)
        assert (await s.clients[number - 1].answer(api_version=version)).correlation_id == 8
        assert await s.clients[number - 1].is_silent()
    assert dropped(s) == {}


@scene(DEAF, HOLDS, limits={"connect_timeout_s": 5.0}, one_go=True)
async def test_acks_0_waits_for_dial_and_delays_nothing(s: Scene) -> None:
    sends(s, 0, 1)
    s.produces(8, partitions={"t": [1]}, acks=1)
    await s.accepts(8, at=2)
    assert (await s.answer()).correlation_id == 8
    await s.rises()
    await arrive(s, 0, 1)


@pytest.mark.parametrize("leaves", [False, True])
@scene(DOWN, one_go=True)
async def test_acks_0_after_refused_dial_is_sent_later(s: Scene, leaves: bool) -> None:
    sends(s, 0, 1)
    await s.undialled()
    if leaves:
        s.client.close()
    await s.rises()
    await arrive(s, 0, 1)
    assert leaves or await s.still()
    assert s.proxy.counters["acks0.undeliverable"] == 0


@both_ways
@scene(DEAF, limits={"connect_timeout_s": 5.0}, one_go=True)
async def test_complete_acks_0_frames_outlive_their_client(s: Scene, confirms: bool) -> None:
    """A request with an answer is dropped: its client would resend it itself."""
    sends(s, 0, confirms=confirms)
    if not confirms:
        s.produces(8, acks=1)
    sends(s, 1, confirms=confirms)
    s.send(produce_frame(records=PLAIN, acks=0)[:-3])
    s.client.close()
    await asyncio.sleep(0.1)
    await s.rises()
    await arrive(s, 0, 1, confirms=confirms)
    await s.broker.connections[0].until_closed()
    assert s.broker.asked.empty()


@scene(HOLDS)
async def test_written_acks_0_survives_unread_answers(s: Scene) -> None:
    """Closing a connection with unread bytes resets it, and a reset destroys bytes in transit."""
    s.broker.reads_nothing = True
    s.send(produce_frame(acks=1), produce_frame(records=PLAIN + bytes(3 << 19), acks=0))
    await eventually(lambda: s.broker.connections)
    await asyncio.sleep(0.05)
    s.client.close()
    await asyncio.sleep(0.05)
    connection = s.broker.connections[0]
    # The answer to the first comes while the second is still in the local kernel.
    answer = sample_response(PRODUCE, {"t": [0]}, throttle_time_ms=0)
    connection.write(bytes(response_frame(PRODUCE, 9, response_body(PRODUCE, 9, answer), correlation_id=1)))
    await asyncio.sleep(0.05)
    connection.transport.resume_reading()
    await connection.until_closed()
    assert len(s.broker.log) == 2


# Bounds


@pytest.mark.parametrize("waits", ["for a dial", "for an owner"])
@both_loops
async def test_waiting_acks_0_is_bounded_in_bytes(waits: str) -> None:
    """A client without answers can send as fast as the network allows."""
    limits = {"connect_timeout_s": 0.3, "max_in_flight_bytes": 1 << 20}
    async with staged(*([DEAF] if waits == "for a dial" else []), limits=limits) as s:
        sends(s, 0)
        assert await flood(s.client, 0.5 if waits == "for a dial" else 0.1) < 16 << 20
        s.client.abort()


async def flood(client: RawClient, seconds: float) -> int:
    """Send acks=0 for `seconds`; return how many bytes the proxy accepted."""
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


@scene(HOLDS, limits={"max_open_requests": 20})
async def test_unconfirmed_requests_are_bounded(s: Scene) -> None:
    sends(s, *range(101), confirms=True)
    await arrive(s, 0, confirms=True)
    await eventually(lambda: len(s.broker.log) >= 21)
    await asyncio.sleep(0.1)
    assert len(s.broker.log) == 21
    await arrive(s, *range(1, 101), confirms=True)
    await eventually(lambda: s.proxy.vitals.in_flight_requests == 0)
    assert s.proxy.vitals.in_flight_bytes == 0


# Losses


@scene(DOWN)
async def test_undeliverable_acks_0_of_departed_client_is_counted(s: Scene) -> None:
    sends(s, 0, 1)
    await s.client.sent()
    s.client.close()
    await until_lost(s, 2)


@scene(HOLDS)
async def test_acks_0_with_duplicate_partition_closes_connection(s: Scene) -> None:
    """No answer could carry INVALID_REQUEST."""
    sends(s, 0, partitions={"t": [0, 0]})
    assert await s.client.is_closed()
    assert s.broker.log == []


@scene(HOLDS, limits={"drain_s": 0.1}, one_go=True)
async def test_loss_during_stop_leaves_no_lookup(s: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker has stopped reading, and its unread bytes are abandoned last."""
    for module in (fanout, upstream_module):
        monkeypatch.setattr(module, "FLUSH_S", 0.2)

    async def refresh(topic: bytes, partition_index: int, seen_revision: int) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(s.proxy.source, "refresh", refresh)
    s.send(produce_frame(records=PLAIN, acks=0))
    (await s.next()).connection.transport.pause_reading()
    s.send(*(produce_frame(records=PLAIN + bytes(1 << 20), acks=0) for _ in range(12)))
    await eventually(lambda: s.proxy.vitals.in_flight_requests)
    await asyncio.sleep(0.1)


@scene(HOLDS, limits={"max_open_requests": 2}, one_go=True)
async def test_requests_queued_behind_refused_batch_count_as_lost(s: Scene) -> None:
    """Closing reports the refused one to the client; the proxy alone knows of the later ones."""
    sends(s, 0, confirms=True)
    await arrive(s, 0, confirms=True)
    sends(s, *range(1, 7), confirms=True)
    first, second = await s.takes(1, 2)
    first.answer(results={T0: TOO_LARGE})
    second.answer()
    await s.until_sessions()
    assert dropped(s) == {"t": {TOO_LARGE: 1, NOT_LEADER: 4}}


# Confirmed


@pytest.mark.parametrize("leaves", [False, True])
@scene(HOLDS, HOLDS, owners=[1])
async def test_refusal_by_old_owner_is_retried_in_order(s: Scene, leaves: bool) -> None:
    """Even if the client leaves meanwhile, in the middle of a frame."""
    sends(s, 0, confirms=True)
    await arrive(s, 0, confirms=True)
    sends(s, 1, 2, 3, 4, confirms=True)
    held = await s.takes(1, 2, 3, 4)
    if leaves:
        s.send(produce_frame(records=PLAIN, acks=0)[:-3])
        s.client.close()
        await asyncio.sleep(0.1)
    s.proxy.source.on_refresh = lambda *_: s.proxy.own(2) and None
    for asked in held:
        asked.answer(results={T0: NOT_LEADER})
    await arrive(s, 1, 2, 3, 4, confirms=True, at=2)
    if leaves:
        await s.broker.connections[0].until_closed()
    else:
        sends(s, 5, confirms=True)
        await arrive(s, 5, confirms=True, at=2)
        assert await s.still()
    assert s.broker.asked.empty()
    assert len(s.brokers[1].log) == 4 + (not leaves)
    assert dropped(s) == {}


@scene(HOLDS, owners=[1, 1])
async def test_permanent_refusal_is_counted_and_closes_connection(s: Scene) -> None:
    """Whole frames behind it were accepted: each is appended or counted."""
    sends(s, 0, confirms=True, partitions={"t": [0, 1]})
    sends(s, 1, 2, confirms=True)
    await arrive(s, 0, confirms=True, results={T0: TOO_LARGE})
    await arrive(s, 1, 2, confirms=True)
    assert await s.client.is_closed()
    await s.until_sessions()
    assert dropped(s) == {"t": {TOO_LARGE: 1}}
    assert s.proxy.counters["acks0.undeliverable"] == 1


@scene(HOLDS)
async def test_possibly_appended_batch_is_counted_and_not_resent(s: Scene) -> None:
    sends(s, 0, confirms=True)
    (asked,) = await s.takes(0)
    asked.connection.abort()
    assert await s.client.is_closed()
    assert dropped(s) == {"t": {TIMED_OUT: 1}}
    assert len(s.broker.log) == 1


@scene(HOLDS)
async def test_unanswered_write_of_departed_client_is_awaited(s: Scene) -> None:
    s.produces(8, acks=1)
    sends(s, 1, confirms=True)
    await s.accepts(8)
    (asked,) = await s.takes(1)
    s.client.close()
    await asyncio.sleep(0.1)
    assert asked.connection.is_open
    asked.answer()
    await asked.connection.until_closed()
    assert dropped(s) == {}


@scene(HOLDS, limits={"drain_s": 20.0}, one_go=True)
async def test_stop_waits_until_acks_0_is_confirmed(s: Scene) -> None:
    sends(s, 0, confirms=True)
    (asked,) = await s.takes(0)
    stopping = asyncio.create_task(s.proxy.listener.stop())
    await asyncio.sleep(0.1)
    assert not stopping.done()
    asked.answer()
    async with asyncio.timeout(10.0):
        await stopping
    assert dropped(s) == {}


@pytest.mark.parametrize("confirm", [True, False])
async def test_serve_flag_turns_confirmations_on(tmp_path: Path, confirm: bool) -> None:
    async with served(tmp_path, None, more=["--confirm-acks0" if confirm else "--no-confirm-acks0"]) as s:
        client = await s.client()
        client.send(produce_frame(records=PLAIN, acks=0))
        asked = await s.broker.next()
        assert asked.fields["acks"] == int(confirm)
        if confirm:
            asked.answer(results={T0: TOO_LARGE})
            assert await client.is_closed()
            lost = "kproxy_acks0_dropped_total", (("reason", "MESSAGE_TOO_LARGE"), ("topic", "t"))
            assert (await s.samples())[lost] == 1


@both_loops
async def test_every_lost_batch_is_counted_and_no_other() -> None:
    """In any order of answers: appended and counted batches add up to the sent ones."""
    appended: list[bytes] = []
    outcomes = [0, NOT_LEADER, 0, TOO_LARGE, 19, 0, 87]
    refused: list[bytes] = []

    def script(asked: Asked) -> None:
        records = asked.records[T0]
        # The second attempt accepts all.
        outcome = 0 if records in refused else outcomes[len(refused) % len(outcomes)]
        if outcome:
            refused.append(records)
        elif records not in refused:
            refused.append(b"")
        if outcome == 0:
            appended.append(records)
        asked.answer(results={T0: outcome})

    sent = 60
    async with staged(script, clients=sent) as s:
        for number in range(sent):
            sends(s, number, confirms=True, client=number + 1)
        await eventually(lambda: len(appended) + s.proxy.counters["acks0.undeliverable"] >= sent)
        await asyncio.sleep(0.1)
        assert len(appended) + s.proxy.counters["acks0.undeliverable"] == sent
        assert len(set(appended)) == len(appended)
        assert sum(sum(reasons.values()) for reasons in dropped(s).values()) == sent - len(appended)
        assert 0 < len(appended) < sent
