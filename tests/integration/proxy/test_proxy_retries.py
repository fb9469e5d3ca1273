"""Retries on real connections: dials that fail, connections that are lost, deadlines, and owners that move meanwhile.

The retry table itself, and all else that the core decides, is in the scripts tests/unit/routing/test_fanout_retries.py.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from kproxy.routing import retry
from kproxy.routing.retry import BACKOFF_S
from kproxy.routing.topology import Address
from kproxy_codec.api_keys import LIST_OFFSETS
from tests.support.brokers.scripted_upstream import SILENCE_S, DeafListener, ScriptedUpstream, answers_everything
from tests.support.clients.raw_client import RawClient, batch, list_offsets_frame, produce_frame
from tests.support.processes.running_proxy import both_loops, in_one_go, running_proxy
from tests.support.waiting import eventually

NOT_LEADER = 6
TIMED_OUT = 7
NOT_ENOUGH_REPLICAS = 19
PLAIN = batch(producer_id=-1)
IDEMPOTENT = batch()
TRANSACTIONAL = batch(is_transactional=True)
# The shortest deadline there is: one second.
SHORT_MS = 1000


async def prove(client: RawClient, upstream: ScriptedUpstream) -> None:
    """Have one batch accepted, so that what follows is pipelined."""
    client.send(produce_frame())
    (await upstream.next()).answer()
    await client.answer()


# Refused before anything was appended


@both_loops
@in_one_go
async def test_batch_refused_by_former_owner_goes_to_new() -> None:
    former, new = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(former, new) as proxy:
        used = proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=PLAIN))
        asked = await former.next()
        proxy.source.on_refresh = lambda *_: proxy.own(2)
        asked.answer(results={("t", 0): NOT_LEADER})
        again = await new.next()
        assert again.records == {("t", 0): PLAIN}
        assert proxy.source.refreshed == [("t", 0, used)]
        again.answer(results={("t", 0): {"base_offset": 4}})
        answer = await client.answer()
        assert answer.codes == {("t", 0): 0}
        assert answer.results[0].fields["base_offset"] == 4


@both_loops
@in_one_go
async def test_only_refused_partitions_are_resent() -> None:
    first, second = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(first, second) as proxy:
        proxy.own(1, partitions=[0, 1, 2])
        client = await proxy.client()
        client.send(produce_frame({"t": [0, 1, 2]}))
        asked = await first.next()
        proxy.own(2, partitions=[1])
        asked.answer(throttle_time_ms=30, results={("t", 1): NOT_LEADER, ("t", 2): {"base_offset": 9}})
        again = await second.next()
        assert again.partitions == [("t", 1)]
        again.answer(throttle_time_ms=20)
        answer = await client.answer()
        assert answer.codes == {("t", 0): 0, ("t", 1): 0, ("t", 2): 0}
        assert answer.results[2].fields["base_offset"] == 9
        assert answer.fields["throttle_time_ms"] == 30


@both_loops
@in_one_go
async def test_back_off_ends_when_table_names_another_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """With leaders that move faster than the longest back-off a batch would come to each of them too late."""
    monkeypatch.setattr(retry, "BACKOFF_S", (*BACKOFF_S[:-1], 8.0))
    monkeypatch.setattr(retry, "WAIT_S", 20.0)
    former, new = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(former, new) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=PLAIN))
        for _ in BACKOFF_S:
            (await former.next()).answer(results={("t", 0): NOT_ENOUGH_REPLICAS})
        await asyncio.sleep(SILENCE_S)
        told = time.monotonic()
        proxy.own(2)
        (await new.next()).answer()
        assert time.monotonic() - told < 4
        assert (await client.answer()).codes == {("t", 0): 0}
        # Longer than the longest pause before another try.
        assert await former.is_silent(1.6 * BACKOFF_S[-1])


@both_loops
@in_one_go
async def test_refusals_before_the_reread_ends_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka's re-reads wait for each other: more attempts fail before one has ended than are allowed after it."""
    monkeypatch.setattr(retry, "BACKOFF_S", (0.001,))
    monkeypatch.setattr(retry, "WAIT_S", 20.0)
    former, new = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(former, new) as proxy:
        used = proxy.own(1)
        read, asked = asyncio.Event(), list[int]()

        async def refresh(topic: bytes, partition_index: int, seen_revision: int) -> None:
            asked.append(seen_revision)
            await read.wait()
            proxy.own(2)

        monkeypatch.setattr(proxy.source, "refresh", refresh)
        client = await proxy.client()
        client.send(produce_frame(records=PLAIN))
        for _ in range(retry.MAX_ATTEMPTS + 1):
            (await former.next()).answer(results={("t", 0): NOT_LEADER})
        last = await former.next()
        read.set()
        await eventually(lambda: proxy.topology.owner(b"t", 0) == 2)
        last.answer(results={("t", 0): NOT_LEADER})
        (await new.next()).answer()
        assert (await client.answer()).codes == {("t", 0): 0}
        assert asked == [used]


# Perhaps appended


@pytest.mark.parametrize("speaks", [False, True], ids=["unknown", "known"])
@both_loops
@in_one_go
async def test_broker_of_unknown_versions_gets_no_resend(speaks: bool) -> None:
    """Brokers without idempotence append it twice, and it may be one of those that has just been started."""
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream, introduced=speaks) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=IDEMPOTENT))
        asked = await upstream.next()
        # Appended, it may be, and the broker ends.
        asked.connection.abort()
        if speaks:
            (await upstream.next()).answer()
        assert (await client.answer()).codes == {("t", 0): 0 if speaks else TIMED_OUT}
        assert len(upstream.log) == (2 if speaks else 1)


@both_loops
@in_one_go
async def test_lost_connection_resends_idempotent_batches_in_order() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, upstream)
        client.send(*(produce_frame(records=batch(n), correlation_id=n) for n in range(4)))
        asked = [await upstream.next() for _ in range(4)]
        asked[0].answer()
        assert (await client.answer()).correlation_id == 0
        asked[0].connection.abort()
        for n in (1, 2, 3):
            again = await upstream.next()
            assert again.records == {("t", 0): batch(n)}
            if n == 1:
                # Alone, until the new connection has shown that the broker takes it.
                assert await upstream.is_silent()
            again.answer()
        answers = [await client.answer() for _ in range(3)]
        assert [answer.correlation_id for answer in answers] == [1, 2, 3]
        assert [answer.codes[("t", 0)] for answer in answers] == [0, 0, 0]
        assert len(upstream.log) == 1 + 4 + 3


@both_loops
@in_one_go
async def test_lost_connection_answers_other_batches_with_7() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, upstream)
        client.send(*(produce_frame(records=PLAIN, correlation_id=n) for n in range(3)))
        asked = [await upstream.next() for _ in range(3)]
        asked[2].connection.abort()
        assert [(await client.answer()).codes for _ in range(3)] == [{("t", 0): TIMED_OUT}] * 3
        assert await upstream.is_silent(0.3)


# Not written


@both_loops
@in_one_go
async def test_refused_dial_is_tried_thrice_then_answered_6() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        await upstream.stop_listening()
        proxy.own(1)
        client = await proxy.client()
        began = time.monotonic()
        client.send(produce_frame(records=TRANSACTIONAL))
        assert (await client.answer()).codes == {("t", 0): NOT_LEADER}
        assert time.monotonic() - began < 5
        assert proxy.retries(65536) == 2


@both_loops
@in_one_go
async def test_broker_returning_between_two_dials_is_used() -> None:
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream) as proxy:
        await upstream.stop_listening()
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=TRANSACTIONAL))
        await eventually(lambda: proxy.retries(65536) == 1)
        await upstream.start(upstream.port)
        assert (await client.answer()).codes == {("t", 0): 0}


@pytest.mark.parametrize("host", ["x" * 70, "a..b", "no.such.host.invalid", "\udc80"], ids=range(4))
@both_loops
@in_one_go
async def test_undialable_address_counts_as_refused_dial(host: str) -> None:
    async with running_proxy() as proxy:
        proxy.topology.set_broker(1, Address(host, 1))
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame())
        assert (await client.answer()).codes == {("t", 0): NOT_LEADER}


# The deadline


@both_loops
@in_one_go
async def test_deadline_answers_written_7_and_unwritten_6() -> None:
    finished, silent = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(finished, silent) as proxy:
        proxy.own(1)
        proxy.own(2, partitions=[1])
        proxy.own(42, partitions=[2])
        client = await proxy.client()
        began = time.monotonic()
        client.send(produce_frame({"t": [0, 1, 2]}, timeout_ms=SHORT_MS))
        (await finished.next()).answer(results={("t", 0): {"base_offset": 8}})
        await silent.next()
        answer = await client.answer()
        assert 0.9 < time.monotonic() - began < 10
        assert answer.codes == {("t", 0): 0, ("t", 1): TIMED_OUT, ("t", 2): NOT_LEADER}
        assert answer.results[0].fields["base_offset"] == 8


@both_loops
@in_one_go
async def test_batch_behind_a_piece_with_6_gets_6() -> None:
    """Sent alone, the later batch would be first at a broker that knows nothing of the producer."""
    upstream = ScriptedUpstream(1)
    with DeafListener() as listener:
        async with running_proxy(limits={"connect_timeout_s": 30.0}) as proxy:
            proxy.topology.set_broker(1, listener.address)
            proxy.own(1, partitions=[0, 1])
            client = await proxy.client()
            client.send(produce_frame(timeout_ms=SHORT_MS, records=batch(0)))
            client.send(produce_frame({"t": [0, 1]}, correlation_id=2, records=batch(1)))
            assert (await client.answer()).codes == {("t", 0): NOT_LEADER}
            await listener.open(upstream)
            asked = await upstream.next()
            assert asked.partitions == [("t", 1)]
            asked.answer()
            assert (await client.answer()).codes == {("t", 0): NOT_LEADER, ("t", 1): 0}
        await upstream.stop()


@both_loops
@in_one_go
async def test_late_answer_is_dropped() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(timeout_ms=SHORT_MS, correlation_id=1))
        late = await upstream.next()
        assert (await client.answer()).codes == {("t", 0): TIMED_OUT}
        client.send(produce_frame(correlation_id=2))
        late.answer(results={("t", 0): {"base_offset": 1}})
        (await upstream.next()).answer(results={("t", 0): {"base_offset": 2}})
        answer = await client.answer()
        assert (answer.correlation_id, answer.results[0].fields["base_offset"]) == (2, 2)
        assert await client.is_silent()


# Reads


@both_loops
@in_one_go
async def test_read_refused_by_former_owner_goes_to_new() -> None:
    former, new = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(former, new) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(list_offsets_frame())
        asked = await former.next()
        proxy.own(2)
        asked.answer(results={("t", 0): NOT_LEADER})
        (await new.next()).answer(results={("t", 0): {"offset": 3}})
        answer = await client.answer(LIST_OFFSETS, 6)
        assert (answer.codes, answer.results[0].fields["offset"]) == ({("t", 0): 0}, 3)
