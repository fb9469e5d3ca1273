"""One request to its answer in a healthy cluster, and brokers whose answers violate the protocol."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from kproxy_codec.api_keys import FETCH, METADATA
from tests.support.brokers.scripted_upstream import Asked
from tests.support.clients.raw_client import (
    batch,
    control_frame,
    fetch_frame,
    produce_frame,
    raw_frame,
)
from tests.support.scene import ANSWERS, HOLDS, T0, T1, Scene, scene
from tests.support.waiting import eventually
from tests.support.wire.messages import topic_id

INVALID_REQUIRED_ACKS, INVALID_REQUEST, TIMED_OUT = 21, 42, 7
BOTH = {"t": [0, 1]}
VERSIONS = range(3, 14)


def without_correlation_id(frame: bytes) -> bytes:
    return frame[:8] + frame[12:]


# One owner


@scene(HOLDS, owners=[1, 1])
async def test_request_with_one_owner_is_forwarded_unchanged(s: Scene) -> None:
    for version in VERSIONS:
        frame = produce_frame(BOTH, version=version, correlation_id=77, tags=[(9, b"unknown")])
        s.send(frame)
        asked = await s.next()
        assert without_correlation_id(asked.frame) == without_correlation_id(frame), version
        answer = asked.reply(results={T1: {"base_offset": 12}})
        asked.connection.write(answer)
        assert await s.client.receive() == answer[:4] + struct.pack(">i", 77) + answer[8:], version


@scene(HOLDS)
async def test_answers_keep_even_repeated_correlation_ids(s: Scene) -> None:
    await s.prove()
    ids = [5, 5, -1, 0, 5, 2**31 - 1, -(2**31)]
    s.send(*(produce_frame(correlation_id=each) for each in ids))
    asked = [await s.next() for _ in ids]
    assert len({each.header.correlation_id for each in asked}) == len(ids)
    for offset, each in enumerate(asked):
        each.answer(results={T0: {"base_offset": offset}})
    answers = [await s.answer() for _ in ids]
    assert [each.correlation_id for each in answers] == ids
    assert [each.results[0].fields["base_offset"] for each in answers] == list(range(len(ids)))


@scene(ANSWERS)
async def test_next_request_reuses_the_broker_connection(s: Scene) -> None:
    """One for batches, one for reads and one for control requests, while the client stays."""
    connections = s.broker.connections
    for used in range(1, 6):
        assert await s.ask(produce_frame()) == [{T0: 0}]
        assert (len(connections), connections[0].is_open) == (1, True), f"after {used} requests"
    for _ in range(3):
        s.send(fetch_frame())
        await s.answer(FETCH, 12)
        assert len(connections) == 2, "reads may wait"
    s.broker.script = lambda asked: asked.answer_message(brokers=[], topics=[])
    for _ in range(5):
        s.send(control_frame(METADATA, 1, topics=[]))
        await s.client.receive()
        assert len(connections) == 3
    assert all(connection.is_open for connection in connections)


# Several owners


@scene(HOLDS, HOLDS, HOLDS)
async def test_request_over_three_owners_is_split_and_merged(s: Scene) -> None:
    for owner, topic, index in ((2, "u", 0), (1, "u", 1), (2, "v", 0)):
        s.proxy.own(owner, topic, [index])
    partitions = {"v": [0], "t": [2, 0, 1], "u": [1, 0]}
    for count, version in enumerate(VERSIONS, 1):
        records = batch(count)
        s.send(produce_frame(partitions, version=version, records=records, tags=[(9, b"unknown")]))
        asked = {broker.node_id: await broker.next() for broker in s.brokers}
        assert {node: each.topics for node, each in asked.items()} == {
            1: [("t", [0]), ("u", [1])],
            2: [("v", [0]), ("t", [1]), ("u", [0])],
            3: [("t", [2])],
        }
        for each in asked.values():
            assert set(each.records.values()) == {records}
            assert (each.fields["acks"], each.fields["timeout_ms"]) == (-1, 30_000)
            assert (b"unknown" in each.frame) is (version >= 9)
        for node in (3, 1, 2):
            results = {place: {"base_offset": 10 * node} for place in asked[node].partitions}
            asked[node].answer(throttle_time_ms=100 * node, results=results)
        answer = await s.answer(api_version=version)
        found = [(result.topic, result.partition_index, result.fields["base_offset"]) for result in answer.results]
        assert found == [("v", 0, 20), ("t", 2, 30), ("t", 0, 10), ("t", 1, 20), ("u", 1, 10), ("u", 0, 20)]
        assert answer.fields["throttle_time_ms"] == 300
        assert s.proxy.counters["splits"] == count


# Requests answered without a broker: the frame, and the code of each of its partitions.
UNSENT: dict[str, tuple[dict[str, Any], dict[tuple[str, int], int]]] = {
    "no topic": ({"topic_data": []}, {}),
    "no partition": ({"topic_data": [{"name": name, "partition_data": []} for name in "tu"]}, {}),
    "a partition twice": ({"partitions": {"t": [0, 1, 0]}}, {T0: INVALID_REQUEST, T1: INVALID_REQUEST}),
    "acks that Kafka does not know": ({"acks": 2}, {T0: INVALID_REQUIRED_ACKS}),
}


@scene(ANSWERS, owners=[1, 1])
async def test_empty_or_invalid_request_is_answered(s: Scene) -> None:
    for count, (what, (given, codes)) in enumerate(UNSENT.items(), 1):
        assert await s.ask(produce_frame(**given), produce_frame(correlation_id=2)) == [codes, {T0: 0}], what
        assert len(s.broker.log) == count


# Produce 13 names topics by id (KIP-516); tests/unit/routing/test_fanout_topology.py has more

UNKNOWN_TOPIC_ID = 100
BY_ID = 13


@scene(HOLDS)
async def test_topic_id_learnt_by_client_first_is_awaited(s: Scene) -> None:
    s.proxy.topology.set_topic_id(b"t", None)
    s.proxy.source.on_refresh = lambda *_: s.proxy.topology.set_topic_id(b"t", topic_id("t").bytes)
    s.produces(0, 1, 2, version=BY_ID)
    await s.accepts(0, 1, 2)
    for number in range(3):
        answer = await s.answer(api_version=BY_ID)
        assert (answer.correlation_id, answer.codes) == (number, {T0: 0})


# Invalid answers of brokers

WRONG: dict[str, Callable[[Asked], bytes]] = {
    "wrong correlation id": lambda asked: asked.reply(asked.header.correlation_id + 1),
    "a partition not asked for": lambda asked: asked.reply(topics=[*asked.topics, ("other", [9])]),
    "a partition missing": lambda asked: asked.reply(topics=[("t", [1])]),
    "a partition twice": lambda asked: asked.reply(topics=[("t", [0, 1, 0])]),
    "another topic": lambda asked: asked.reply(topics=[("u", [0, 1])]),
    "garbage": lambda asked: raw_frame(struct.pack(">i", asked.header.correlation_id) + b"\x00" + b"\xee" * 40),
    "an empty frame": lambda asked: struct.pack(">i", 0),
    "trailing bytes": lambda asked: raw_frame(asked.reply()[4:] + b"more"),
    "an oversized length": lambda asked: struct.pack(">i", 2**31 - 1) + asked.reply()[4:],
    "a negative length": lambda asked: struct.pack(">i", -1) + asked.reply()[4:],
    "an answer too many": lambda asked: asked.reply(asked.header.correlation_id - 1) + asked.reply(),
}


@scene(HOLDS, owners=[1, 1], clients=2)
async def test_broker_breaking_protocol_loses_only_that_connection(s: Scene) -> None:
    other, plain = s.clients[1], batch(producer_id=-1)
    other.send(produce_frame(correlation_id=50))
    others = await s.next()
    for name, wrong in WRONG.items():
        s.send(produce_frame(BOTH, records=plain))
        asked = await s.next()
        asked.connection.write(wrong(asked))
        # Its outcome is unknown, and the broker would not recognise a resend.
        assert await s.codes() == {T0: TIMED_OUT, T1: TIMED_OUT}, name
        await asked.connection.until_closed()
        # The same client continues on another connection to the same broker; the other client is not affected.
        s.send(produce_frame(BOTH, correlation_id=2, records=plain))
        again = await s.next()
        assert again.connection is not asked.connection
        again.answer()
        assert await s.codes() == {T0: 0, T1: 0}, name
    others.answer()
    assert (await other.answer()).correlation_id == 50


@scene(HOLDS)
async def test_unrequested_answer_closes_its_connection(s: Scene) -> None:
    s.produces(1)
    (asked,) = await s.takes(1)
    asked.answer()
    assert await s.gets(1) == [0]
    asked.answer()
    await asked.connection.until_closed()
    await s.prove(2)


@scene(ANSWERS)
async def test_idle_connection_closed_by_broker_is_not_reused(s: Scene) -> None:
    """Kafka closes idle connections after ten minutes."""
    plain = produce_frame(records=batch(producer_id=-1))
    await s.ask(plain)
    s.broker.connections[0].close()
    await s.broker.connections[0].until_closed()
    assert await s.ask(plain) == [{T0: 0}]
    assert len(s.broker.connections) == 2


@scene(ANSWERS, ANSWERS, owners=[1])
async def test_owner_with_changed_address_is_reached(s: Scene) -> None:
    old, new = s.brokers
    await s.ask(produce_frame())
    s.proxy.topology.set_broker(1, new.address)
    assert await s.ask(produce_frame()) == [{T0: 0}]
    assert (len(old.log), len(new.log)) == (1, 1)
    await eventually(lambda: not old.connections[0].is_open)
