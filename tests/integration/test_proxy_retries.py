"""The retry table on the wire: what is sent again, how often, to whom, and what the client gets in the end."""

from __future__ import annotations

import asyncio
import time

import pytest

from kproxy.routing import retry
from kproxy.routing.retry import BACKOFF_S, MAX_ATTEMPTS_IN_ALL
from kproxy.routing.topology import Address
from kproxy_codec.api_keys import LIST_OFFSETS
from tests.support.raw_client import RawClient, batch, list_offsets_frame, produce_frame
from tests.support.running_proxy import both_loops, eventually, running_proxy
from tests.support.scripted_upstream import SILENCE_S, Asked, DeafListener, Script, ScriptedUpstream, answers_everything

NOT_LEADER = 6
TIMED_OUT = 7
PLAIN = batch(producer_id=-1)
IDEMPOTENT = batch()
TRANSACTIONAL = batch(is_transactional=True)
# The shortest deadline there is: one second.
SHORT_MS = 1000


def refuses(code: int) -> Script:
    def script(asked: Asked) -> None:
        asked.answer(results=dict.fromkeys(asked.partitions, code))

    return script


async def prove(client: RawClient, upstream: ScriptedUpstream) -> None:
    """Have one batch accepted, so that what follows is pipelined."""
    client.send(produce_frame())
    (await upstream.next()).answer()
    await client.answer()


# Refused before anything was appended


@both_loops
async def test_a_batch_refused_by_its_former_owner_is_sent_to_the_new_one() -> None:
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
async def test_a_table_that_knew_better_by_then_is_not_asked_again() -> None:
    """Invalidation after a refusal names the revision the request was routed with, not a newer one."""
    former, new = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(former, new) as proxy:
        used = proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame())
        asked = await former.next()
        newer = proxy.own(2)
        asked.answer(results={("t", 0): NOT_LEADER})
        (await new.next()).answer()
        assert (await client.answer()).codes == {("t", 0): 0}
        assert [revision for _, _, revision in proxy.source.refreshed if revision >= newer] == []
        assert {revision for _, _, revision in proxy.source.refreshed} <= {used}


@both_loops
async def test_only_what_was_refused_is_sent_again() -> None:
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


@pytest.mark.parametrize("records", [PLAIN, IDEMPOTENT, TRANSACTIONAL], ids=["plain", "idempotent", "transactional"])
@both_loops
async def test_not_leader_is_tried_three_times_and_then_handed_on(records: bytes) -> None:
    upstream = ScriptedUpstream(1, refuses(NOT_LEADER))
    async with running_proxy(upstream) as proxy:
        revision = proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=records))
        answer = await client.answer()
        assert answer.codes == {("t", 0): NOT_LEADER}
        assert answer.results[0].fields["base_offset"] == -1
        assert len(upstream.log) == 3
        assert set(proxy.source.refreshed) == {("t", 0, revision)}


async def refuse_until_the_longest_back_off(upstream: ScriptedUpstream, code: int = 19) -> None:
    for _ in BACKOFF_S:
        (await upstream.next()).answer(results={("t", 0): code})


@both_loops
async def test_a_back_off_ends_when_the_table_names_another_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """With leaders that move faster than the longest back-off a batch would come to each of them too late."""
    monkeypatch.setattr(retry, "BACKOFF_S", (*BACKOFF_S[:-1], 8.0))
    monkeypatch.setattr(retry, "WAIT_S", 20.0)
    former, new = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(former, new) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=PLAIN))
        await refuse_until_the_longest_back_off(former)
        await asyncio.sleep(SILENCE_S)
        told = time.monotonic()
        proxy.own(2)
        (await new.next()).answer()
        assert time.monotonic() - told < 4
        assert (await client.answer()).codes == {("t", 0): 0}
        assert await former.is_silent()


@both_loops
async def test_a_back_off_does_not_end_for_what_the_table_says_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "WAIT_S", 20.0)
    former, new = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(former, new) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=PLAIN))
        await refuse_until_the_longest_back_off(former)
        for _ in range(3):
            proxy.own(1, partitions=[1])
            assert await former.is_silent()
        # Nor for an owner that has left without a successor: its attempts would be over before there is one.
        proxy.topology.offers_unowned = False
        proxy.disown()
        assert await former.is_silent(BACKOFF_S[-1] / 2)
        proxy.own(2)
        (await new.next()).answer()
        assert (await client.answer()).codes == {("t", 0): 0}


@both_loops
async def test_the_owner_is_looked_up_when_a_batch_is_sent_again_not_when_it_was_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry, "WAIT_S", 20.0)
    former, passing, new = (ScriptedUpstream(node_id) for node_id in (1, 2, 3))
    async with running_proxy(former, passing, new) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=PLAIN))
        await refuse_until_the_longest_back_off(former)
        proxy.own(2)
        proxy.own(3)
        (await new.next()).answer()
        assert (await client.answer()).codes == {("t", 0): 0}
        assert passing.log == []


@both_loops
async def test_attempts_count_at_one_owner() -> None:
    """Kafka's leader learns of its election a little later than the cluster's metadata tells."""
    former, new = ScriptedUpstream(1, refuses(NOT_LEADER)), ScriptedUpstream(2)
    async with running_proxy(former, new) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=PLAIN))
        await eventually(lambda: len(former.log) == 2)
        proxy.own(2)
        for _ in range(2):
            (await new.next()).answer(results={("t", 0): NOT_LEADER})
        (await new.next()).answer()
        assert (await client.answer()).codes == {("t", 0): 0}


@both_loops
async def test_a_partition_that_moves_on_and_on_is_not_followed_for_ever() -> None:
    brokers = [ScriptedUpstream(node_id, refuses(NOT_LEADER)) for node_id in (1, 2)]
    async with running_proxy(*brokers) as proxy:
        proxy.own(1)
        proxy.source.on_refresh = lambda *_: proxy.own(3 - proxy.topology.owner(b"t", 0))
        client = await proxy.client()
        began = time.monotonic()
        client.send(produce_frame(records=PLAIN))
        assert (await client.answer()).codes == {("t", 0): NOT_LEADER}
        assert sum(len(broker.log) for broker in brokers) == MAX_ATTEMPTS_IN_ALL
        # The first move is followed at once, the others at a pace.
        assert time.monotonic() - began > 0.9 * (MAX_ATTEMPTS_IN_ALL - 2) * BACKOFF_S[0]


@pytest.mark.parametrize("code", [5, 19])
@both_loops
async def test_what_a_broker_may_soon_accept_is_retried_until_it_does(code: int) -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=PLAIN))
        for _ in range(3):
            (await upstream.next()).answer(results={("t", 0): code})
        (await upstream.next()).answer()
        assert (await client.answer()).codes == {("t", 0): 0}


@pytest.mark.parametrize("code", [5, 19])
@both_loops
async def test_what_a_broker_never_accepts_holds_up_the_rest_for_a_second_at_most(code: int) -> None:
    """Its clients have a policy of their own; what else they sent has been appended and waits to be told so."""
    upstream = ScriptedUpstream(1, lambda asked: asked.answer(results=dict.fromkeys(asked.partitions, verdicts(asked))))

    def verdicts(asked: Asked) -> int:
        return code if ("bad", 0) in asked.partitions else 0

    async with running_proxy(upstream) as proxy:
        proxy.own(1, "bad")
        proxy.own(1, "good")
        client = await proxy.client()
        began = time.monotonic()
        client.send(produce_frame({"bad": [0]}, records=PLAIN), produce_frame({"good": [0]}, records=PLAIN))
        assert (await client.answer()).codes == {("bad", 0): code}
        assert (await client.answer()).codes == {("good", 0): 0}
        # They have 27 s until their deadline. The attempts are as many as the back-off allows in a second.
        assert time.monotonic() - began < 10
        assert 3 <= sum(asked.partitions == [("bad", 0)] for asked in upstream.log) <= 1 + len(BACKOFF_S)


@both_loops
async def test_an_unknown_outcome_is_tried_again_for_some_seconds_and_left_to_the_client_then() -> None:
    upstream = ScriptedUpstream(1, refuses(20))
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        began = time.monotonic()
        client.send(produce_frame(records=IDEMPOTENT))
        assert (await client.answer(patience_s=25)).codes == {("t", 0): TIMED_OUT}
        assert 2 < time.monotonic() - began < 15
        assert 5 <= len(upstream.log) <= 10


@pytest.mark.parametrize("code", [2, 3, 10, 17, 29, 45, 46, 47, 56, 87, -1, 999])
@both_loops
async def test_every_other_code_is_handed_on_as_it_came(code: int) -> None:
    upstream = ScriptedUpstream(1, refuses(code))
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame())
        assert (await client.answer()).codes == {("t", 0): code}
        assert len(upstream.log) == 1


@both_loops
async def test_partitions_retry_each_by_itself() -> None:
    """One partition in trouble must not use up the attempts of another."""
    trouble, healthy = ScriptedUpstream(1, refuses(NOT_LEADER)), ScriptedUpstream(2)
    async with running_proxy(trouble, healthy) as proxy:
        proxy.own(1)
        proxy.own(2, partitions=[1])
        client = await proxy.client()
        client.send(produce_frame({"t": [0, 1]}))
        held = await healthy.next()
        await eventually(lambda: len(trouble.log) == 3)
        held.answer(results={("t", 1): NOT_LEADER})
        (await healthy.next()).answer(results={("t", 1): NOT_LEADER})
        (await healthy.next()).answer()
        assert (await client.answer()).codes == {("t", 0): NOT_LEADER, ("t", 1): 0}


# Perhaps appended


@pytest.mark.parametrize("code", [7, 13, 20])
@both_loops
async def test_an_unknown_outcome_is_retried_where_the_broker_would_know_the_batch(code: int) -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=IDEMPOTENT))
        for _ in range(4):
            (await upstream.next()).answer(results={("t", 0): code})
        again = await upstream.next()
        assert again.records == {("t", 0): IDEMPOTENT}
        again.answer()
        assert (await client.answer()).codes == {("t", 0): 0}


@pytest.mark.parametrize(
    "records", [PLAIN, TRANSACTIONAL, b"", b"no batch"], ids=["plain", "transactional", "none", "odd"]
)
@pytest.mark.parametrize("code", [7, 13, 20])
@both_loops
async def test_an_unknown_outcome_is_left_to_the_client_where_it_would_not(code: int, records: bytes) -> None:
    upstream = ScriptedUpstream(1, refuses(code))
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=records))
        answer = await client.answer()
        assert answer.codes == {("t", 0): TIMED_OUT}
        assert answer.results[0].fields["base_offset"] == -1
        assert len(upstream.log) == 1


@pytest.mark.parametrize("speaks", [False, True], ids=["unknown", "known"])
@both_loops
async def test_a_broker_that_has_not_said_what_it_serves_is_not_taken_to_know_a_batch_again(speaks: bool) -> None:
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
async def test_after_a_lost_connection_idempotent_batches_are_sent_again_in_order() -> None:
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


@pytest.mark.parametrize("records", [PLAIN, TRANSACTIONAL], ids=["plain", "transactional"])
@both_loops
async def test_after_a_lost_connection_others_get_seven(records: bytes) -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        await prove(client, upstream)
        client.send(*(produce_frame(records=records, correlation_id=n) for n in range(3)))
        asked = [await upstream.next() for _ in range(3)]
        asked[2].connection.abort()
        assert [(await client.answer()).codes for _ in range(3)] == [{("t", 0): TIMED_OUT}] * 3
        assert await upstream.is_silent()


@both_loops
async def test_an_owner_that_died_with_a_batch_is_never_answered_with_six() -> None:
    """The batch may be in its log: NOT_LEADER_OR_FOLLOWER would say that it is not."""
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=IDEMPOTENT))
        asked = await upstream.next()
        await upstream.stop_listening()
        asked.connection.abort()
        assert (await client.answer()).codes == {("t", 0): TIMED_OUT}


@both_loops
async def test_a_refusal_after_an_unknown_outcome_does_not_make_it_known() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=IDEMPOTENT))
        (await upstream.next()).answer(results={("t", 0): TIMED_OUT})
        upstream.script = refuses(NOT_LEADER)
        assert (await client.answer()).codes == {("t", 0): TIMED_OUT}


@both_loops
async def test_a_refusal_at_the_deadline_after_an_unknown_outcome_does_not_make_it_known() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=IDEMPOTENT, timeout_ms=SHORT_MS))
        (await upstream.next()).answer(results={("t", 0): TIMED_OUT})
        upstream.script = refuses(19)
        assert (await client.answer()).codes == {("t", 0): TIMED_OUT}


# Not written


@pytest.mark.parametrize("records", [PLAIN, IDEMPOTENT, TRANSACTIONAL], ids=["plain", "idempotent", "transactional"])
@both_loops
async def test_a_refused_dial_is_tried_three_times_within_a_second_and_answered_with_six(records: bytes) -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        await upstream.stop_listening()
        proxy.own(1)
        client = await proxy.client()
        began = time.monotonic()
        client.send(produce_frame(records=records))
        assert (await client.answer()).codes == {("t", 0): NOT_LEADER}
        assert time.monotonic() - began < 5
        assert proxy.retries(65536) == 2


@both_loops
async def test_a_broker_that_comes_back_between_two_dials_is_used() -> None:
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream) as proxy:
        await upstream.stop_listening()
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=TRANSACTIONAL))
        await eventually(lambda: proxy.retries(65536) == 1)
        await upstream.start(upstream.port)
        assert (await client.answer()).codes == {("t", 0): 0}


@both_loops
async def test_an_owner_without_an_address_is_not_replaced_by_another_broker() -> None:
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream) as proxy:
        proxy.own(42)
        client = await proxy.client()
        client.send(produce_frame())
        assert (await client.answer()).codes == {("t", 0): NOT_LEADER}
        assert upstream.log == []
        assert set(proxy.source.refreshed) == {("t", 0, 1)}


@pytest.mark.parametrize("host", ["x" * 70, "a..b", "no.such.host.invalid", "\udc80"], ids=range(4))
@both_loops
async def test_an_address_that_cannot_be_dialled_counts_as_a_refused_dial(host: str) -> None:
    async with running_proxy() as proxy:
        proxy.topology.set_broker(1, Address(host, 1))
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame())
        assert (await client.answer()).codes == {("t", 0): NOT_LEADER}


# The deadline


@both_loops
async def test_at_the_deadline_written_pieces_get_seven_unwritten_six_and_finished_keep_their_results() -> None:
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
async def test_a_piece_that_waits_for_its_dial_at_the_deadline_gets_six_and_is_never_written() -> None:
    upstream = ScriptedUpstream(1)
    with DeafListener() as listener:
        async with running_proxy(limits={"connect_timeout_s": 30.0}) as proxy:
            proxy.topology.set_broker(1, listener.address)
            proxy.own(1)
            client = await proxy.client()
            client.send(produce_frame(timeout_ms=SHORT_MS))
            assert (await client.answer()).codes == {("t", 0): NOT_LEADER}
            await listener.open(upstream)
            await eventually(lambda: upstream.connections)
            assert await upstream.is_silent()
        await upstream.stop()


@both_loops
async def test_what_waits_for_the_dial_behind_a_piece_that_got_six_is_given_up_with_it() -> None:
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
async def test_a_late_answer_is_dropped_and_does_not_confuse_the_next_request() -> None:
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


@both_loops
async def test_the_deadline_counts_from_the_first_byte_of_the_request() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        frame = produce_frame(timeout_ms=2 * SHORT_MS)
        client.send(frame[:30])
        await asyncio.sleep(1.2)
        rest_sent_at = time.monotonic()
        client.send(frame[30:])
        assert (await client.answer()).codes == {("t", 0): TIMED_OUT}
        assert time.monotonic() - rest_sent_at < 1.6


# Reads


@pytest.mark.parametrize("code", [NOT_LEADER, 5])
@both_loops
async def test_a_read_refused_by_its_former_owner_is_asked_of_the_new_one(code: int) -> None:
    former, new = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(former, new) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(list_offsets_frame())
        asked = await former.next()
        proxy.own(2)
        asked.answer(results={("t", 0): code})
        (await new.next()).answer(results={("t", 0): {"offset": 3}})
        answer = await client.answer(LIST_OFFSETS, 6)
        assert (answer.codes, answer.results[0].fields["offset"]) == ({("t", 0): 0}, 3)


@both_loops
async def test_a_read_that_was_lost_is_asked_again_and_in_the_end_answered_with_six() -> None:
    upstream = ScriptedUpstream(1, lambda asked: asked.connection.abort())
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(list_offsets_frame())
        assert (await client.answer(LIST_OFFSETS, 6)).codes == {("t", 0): NOT_LEADER}
        assert len(upstream.log) == 3
