"""One request to its answer in a healthy cluster, and brokers whose answers violate the protocol."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from kproxy_codec.api_keys import FETCH, LIST_OFFSETS, METADATA
from tests.support.brokers.scripted_upstream import Asked, ScriptedUpstream, answers_everything
from tests.support.clients.raw_client import batch, control_frame, fetch_frame, list_offsets_frame, produce_frame
from tests.support.processes.running_proxy import RunningProxy, both_loops, running_proxy
from tests.support.waiting import eventually

SPLIT = {"t": [0, 1, 2], "u": [0, 1], "v": [0]}
CORRELATION_ID = slice(8, 12)
NOT_LEADER = 6
TIMED_OUT = 7


def without_correlation_id(frame: bytes) -> bytes:
    return frame[: CORRELATION_ID.start] + frame[CORRELATION_ID.stop :]


def three() -> list[ScriptedUpstream]:
    return [ScriptedUpstream(node_id) for node_id in (1, 2, 3)]


def own_split(proxy: RunningProxy) -> None:
    """SPLIT over three owners: 1 has t/0 and u/1, 2 has t/1, u/0 and v/0, 3 has t/2."""
    for owner, topic, index in ((1, "t", 0), (2, "t", 1), (3, "t", 2), (2, "u", 0), (1, "u", 1), (2, "v", 0)):
        proxy.own(owner, topic, [index])


# One owner


@pytest.mark.parametrize("version", range(3, 14))
@both_loops
async def test_request_with_one_owner_is_forwarded_unchanged(version: int) -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1, partitions=[0, 3])
        client = await proxy.client()
        frame = produce_frame({"t": [0, 3]}, version=version, correlation_id=77, tags=[(9, b"unknown")])
        client.send(frame)
        asked = await upstream.next()
        assert without_correlation_id(asked.frame) == without_correlation_id(frame)
        answer = asked.reply(results={("t", 3): {"base_offset": 12}})
        asked.connection.write(answer)
        came = await client.receive()
        assert came[:4] == answer[:4]
        assert came[4:8] == struct.pack(">i", 77)
        assert came[8:] == answer[8:]


@both_loops
async def test_answers_keep_even_repeated_correlation_ids() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame())
        (await upstream.next()).answer()
        await client.answer()
        ids = [5, 5, -1, 0, 5, 2**31 - 1, -(2**31)]
        client.send(*(produce_frame(correlation_id=each) for each in ids))
        asked = [await upstream.next() for _ in ids]
        assert len({each.header.correlation_id for each in asked}) == len(ids)
        for offset, each in enumerate(asked):
            each.answer(results={("t", 0): {"base_offset": offset}})
        answers = [await client.answer() for _ in ids]
        assert [each.correlation_id for each in answers] == ids
        assert [each.results[0].fields["base_offset"] for each in answers] == list(range(len(ids)))


@both_loops
async def test_two_clients_do_not_share_a_broker_connection() -> None:
    """So that the broker's own order per connection is the client's."""
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        for _ in range(2):
            client = await proxy.client()
            client.send(produce_frame())
            assert (await client.answer()).codes == {("t", 0): 0}
        assert len(upstream.connections) == 2


@both_loops
async def test_next_request_reuses_the_broker_connection() -> None:
    """One for records and one for what is asked about the cluster, for as long as the client stays."""
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        for used in range(1, 6):
            client.send(produce_frame())
            assert (await client.answer()).codes == {("t", 0): 0}
            assert (len(upstream.connections), upstream.connections[0].is_open) == (1, True), f"after {used} requests"
        client.send(fetch_frame())
        await client.answer(FETCH, 12)
        assert len(upstream.connections) == 1, "reads and writes share it"
        upstream.script = lambda asked: asked.answer_message(brokers=[], topics=[])
        for _ in range(5):
            client.send(control_frame(METADATA, 1, topics=[]))
            await client.receive()
            assert len(upstream.connections) == 2
        assert all(connection.is_open for connection in upstream.connections)


@both_loops
async def test_client_sending_byte_by_byte_is_served() -> None:
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        for byte in produce_frame(correlation_id=3):
            client.send(bytes([byte]))
            await client.sent()
        assert (await client.answer()).correlation_id == 3


# Several owners


@pytest.mark.parametrize("version", range(3, 14))
@both_loops
async def test_request_over_three_owners_is_split_and_merged(version: int) -> None:
    upstreams = three()
    async with running_proxy(*upstreams) as proxy:
        own_split(proxy)
        client = await proxy.client()
        records = batch(5)
        frame = produce_frame(
            {"v": [0], "t": [2, 0, 1], "u": [1, 0]}, version=version, records=records, tags=[(9, b"unknown")]
        )
        client.send(frame)
        asked = {upstream.node_id: await upstream.next() for upstream in upstreams}
        assert {node: each.topics for node, each in asked.items()} == {
            1: [("t", [0]), ("u", [1])],
            2: [("v", [0]), ("t", [1]), ("u", [0])],
            3: [("t", [2])],
        }
        for each in asked.values():
            assert set(each.records.values()) == {records}
            assert each.fields["acks"] == -1
            assert each.fields["timeout_ms"] == 30_000
            assert (b"unknown" in each.frame) is (version >= 9)
        for node in (3, 1, 2):
            asked[node].answer(
                throttle_time_ms=100 * node,
                results={place: {"base_offset": 10 * node} for place in asked[node].partitions},
            )
        answer = await client.answer(api_version=version)
        found = [(result.topic, result.partition_index, result.fields["base_offset"]) for result in answer.results]
        assert found == [("v", 0, 20), ("t", 2, 30), ("t", 0, 10), ("t", 1, 20), ("u", 1, 10), ("u", 0, 20)]
        assert answer.fields["throttle_time_ms"] == 300
        assert proxy.counters["splits"] == 1


@both_loops
async def test_record_errors_and_unknown_tags_survive_the_merge() -> None:
    first, second = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(first, second) as proxy:
        proxy.own(1)
        proxy.own(2, partitions=[1])
        client = await proxy.client()
        client.send(produce_frame({"t": [0, 1]}))
        refused = {
            "error_code": 87,
            "record_errors": [{"batch_index": 3, "batch_index_error_message": "too old"}],
            "error_message": "the batch's own",
            "log_append_time_ms": 99,
            "log_start_offset": 4,
            "tags": [(77, b"of the entry")],
        }
        (await first.next()).answer(results={("t", 0): refused}, tags=[(70, b"of the first"), (71, b"both")])
        (await second.next()).answer(tags=[(71, b"both"), (72, b"of the second")])
        answer = await client.answer()
        assert answer.codes == {("t", 0): 87, ("t", 1): 0}
        entry = answer.results[0].fields
        assert entry["record_errors"] == refused["record_errors"]
        assert entry["error_message"] == "the batch's own"
        assert (entry["log_append_time_ms"], entry["log_start_offset"]) == (99, 4)
        for kept in (b"of the entry", b"of the first", b"both", b"of the second"):
            assert answer.frame.count(kept) == 1


@both_loops
async def test_topic_listed_twice_is_answered_as_listed() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1, partitions=[0, 1])
        client = await proxy.client()
        client.send(produce_frame(topic_data=[{"name": "t", "partition_data": [{"index": each}]} for each in (0, 1)]))
        (await upstream.next()).answer(topics=[("t", [1, 0])])
        answer = await client.answer()
        assert [(result.topic, result.partition_index) for result in answer.results] == [("t", 0), ("t", 1)]


@both_loops
async def test_slow_owner_does_not_delay_requests_to_others() -> None:
    slow, fast = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(slow, fast) as proxy:
        proxy.own(1)
        proxy.own(2, partitions=[1])
        client = await proxy.client()
        client.send(produce_frame({"t": [0, 1]}, correlation_id=1))
        client.send(*(produce_frame({"t": [1]}, correlation_id=each) for each in (2, 3)))
        held = await slow.next()
        for _ in range(3):
            (await fast.next()).answer()
        # Answers leave in the order of requests all the same.
        assert await client.is_silent()
        held.answer()
        assert [(await client.answer()).correlation_id for _ in range(3)] == [1, 2, 3]


@both_loops
async def test_list_offsets_is_merged_without_leader_epochs() -> None:
    first, second = ScriptedUpstream(1), ScriptedUpstream(2)
    async with running_proxy(first, second) as proxy:
        proxy.own(1)
        proxy.own(2, partitions=[1])
        client = await proxy.client()
        client.send(list_offsets_frame({"t": [1, 0]}))
        (await first.next()).answer(results={("t", 0): {"offset": 5, "leader_epoch": 3}})
        (await second.next()).answer(results={("t", 1): {"offset": 6, "leader_epoch": 4}})
        answer = await client.answer(LIST_OFFSETS, 6)
        found = [(each.partition_index, each.fields["offset"], each.fields["leader_epoch"]) for each in answer.results]
        assert found == [(1, 6, -1), (0, 5, -1)]


@pytest.mark.parametrize("topics", [[], [("t", [])], [("t", []), ("u", [])]])
@both_loops
async def test_a_request_that_asks_for_nothing_is_answered(topics: list[tuple[str, list[int]]]) -> None:
    async with running_proxy(ScriptedUpstream(1)) as proxy:
        client = await proxy.client()
        client.send(produce_frame(topic_data=[{"name": name, "partition_data": []} for name, _ in topics]))
        assert (await client.answer()).codes == {}


@both_loops
async def test_the_same_partition_twice_is_an_invalid_request() -> None:
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream) as proxy:
        proxy.own(1, partitions=[0, 1])
        client = await proxy.client()
        client.send(produce_frame({"t": [0, 1, 0]}), produce_frame(correlation_id=2))
        assert (await client.answer()).codes == {("t", 0): 42, ("t", 1): 42}
        assert (await client.answer()).codes == {("t", 0): 0}
        assert len(upstream.log) == 1


@both_loops
async def test_acks_that_kafka_does_not_know_are_refused() -> None:
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(acks=2), produce_frame(correlation_id=2))
        assert (await client.answer()).codes == {("t", 0): 21}
        assert (await client.answer()).codes == {("t", 0): 0}
        assert len(upstream.log) == 1


# Brokers that answer out of protocol


def wrong_correlation_id(asked: Asked) -> bytes:
    return asked.reply(asked.header.correlation_id + 1)


def a_partition_not_asked_for(asked: Asked) -> bytes:
    return asked.reply(topics=[*asked.topics, ("other", [9])])


def a_partition_missing(asked: Asked) -> bytes:
    return asked.reply(topics=[("t", asked.topics[0][1][1:])])


def a_partition_twice(asked: Asked) -> bytes:
    return asked.reply(topics=[("t", [*asked.topics[0][1], asked.topics[0][1][0]])])


def another_topic(asked: Asked) -> bytes:
    return asked.reply(topics=[("u", asked.topics[0][1])])


def garbage(asked: Asked) -> bytes:
    message = struct.pack(">i", asked.header.correlation_id) + b"\x00" + b"\xee" * 40
    return struct.pack(">i", len(message)) + message


def an_empty_frame(asked: Asked) -> bytes:
    return struct.pack(">i", 0)


def trailing_bytes(asked: Asked) -> bytes:
    message = asked.reply()[4:] + b"more"
    return struct.pack(">i", len(message)) + message


def an_oversized_length(asked: Asked) -> bytes:
    return struct.pack(">i", 2**31 - 1) + asked.reply()[4:]


def a_negative_length(asked: Asked) -> bytes:
    return struct.pack(">i", -1) + asked.reply()[4:]


def an_answer_too_many(asked: Asked) -> bytes:
    return asked.reply(asked.header.correlation_id - 1) + asked.reply()


WRONG = [
    wrong_correlation_id,
    a_partition_not_asked_for,
    a_partition_missing,
    a_partition_twice,
    another_topic,
    garbage,
    an_empty_frame,
    trailing_bytes,
    an_oversized_length,
    a_negative_length,
    an_answer_too_many,
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
@both_loops
async def test_broker_breaking_protocol_loses_only_that_connection(wrong: Callable[[Asked], bytes]) -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1, partitions=[0, 1])
        other = await proxy.client()
        other.send(produce_frame(correlation_id=50))
        others = await upstream.next()
        client = await proxy.client()
        plain = batch(producer_id=-1)
        client.send(produce_frame({"t": [0, 1]}, records=plain))
        asked = await upstream.next()
        asked.connection.write(wrong(asked))
        # What became of it is not known, and the broker would not know a second one again.
        assert (await client.answer()).codes == {("t", 0): TIMED_OUT, ("t", 1): TIMED_OUT}
        await asked.connection.until_closed()
        # The same client goes on, on another connection to the same broker; the other one never notices.
        client.send(produce_frame({"t": [0, 1]}, correlation_id=2, records=plain))
        again = await upstream.next()
        assert again.connection is not asked.connection
        again.answer()
        assert (await client.answer()).codes == {("t", 0): 0, ("t", 1): 0}
        others.answer()
        assert (await other.answer()).correlation_id == 50


@both_loops
async def test_unrequested_answer_closes_its_connection() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame())
        asked = await upstream.next()
        asked.answer()
        assert (await client.answer()).codes == {("t", 0): 0}
        asked.answer()
        await asked.connection.until_closed()
        client.send(produce_frame(correlation_id=2))
        (await upstream.next()).answer()
        assert (await client.answer()).correlation_id == 2


@both_loops
async def test_idle_connection_closed_by_broker_is_not_reused() -> None:
    """Kafka closes idle connections after ten minutes."""
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=batch(producer_id=-1)))
        await client.answer()
        upstream.connections[0].close()
        await upstream.connections[0].until_closed()
        client.send(produce_frame(records=batch(producer_id=-1)))
        assert (await client.answer()).codes == {("t", 0): 0}
        assert len(upstream.connections) == 2


@pytest.mark.parametrize("cut", [1, 3, 4, 7, 8, 20, -1])
@both_loops
async def test_partial_answer_is_discarded(cut: int) -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(records=batch(producer_id=-1)))
        asked = await upstream.next()
        asked.connection.write(asked.reply()[:cut])
        assert await client.is_silent()
        asked.connection.close()
        assert (await client.answer()).codes == {("t", 0): TIMED_OUT}


@both_loops
async def test_owner_with_changed_address_is_reached() -> None:
    old, new = ScriptedUpstream(1, answers_everything), ScriptedUpstream(1, answers_everything)
    async with running_proxy(old, new) as proxy:
        proxy.topology.set_broker(1, old.address)
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame())
        await client.answer()
        proxy.topology.set_broker(1, new.address)
        client.send(produce_frame(correlation_id=2))
        assert (await client.answer()).correlation_id == 2
        assert (len(old.log), len(new.log)) == (1, 1)
        await eventually(lambda: not old.connections[0].is_open)
