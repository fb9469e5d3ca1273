"""Every acknowledged batch is noted, whatever its request looks like and whichever path it takes, and nothing else is.

Before scripted brokers: every version of Produce, one owner and several, answers that are plain and answers that have
to be parsed, batches whose length takes one, two, three and four bytes to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from kproxy.trail.rows import Range
from kproxy_codec.api_keys import PRODUCE
from tests.support.brokers.scripted_upstream import Asked, ScriptedUpstream
from tests.support.clients.raw_client import RawClient, batch, fetch_frame, produce_frame
from tests.support.processes.running_proxy import both_loops, in_one_go, running_proxy
from tests.support.waiting import eventually
from tests.support.wire.record_batches import build_batch

# Of a batch: its producer_id, producer_epoch and base_sequence.
HEADER = slice(43, 57)
NOT_LEADER = 6
TIMED_OUT = 7
MESSAGE_TOO_LARGE = 10


class Offsets:
    """The script of a broker that keeps nothing but its partitions' next offsets."""

    def __init__(self, first: int = 100, **fields: Any) -> None:
        self.next: dict[tuple[str, int], int] = {}
        self._first = first
        self._fields = fields

    def __call__(self, asked: Asked) -> None:
        if asked.header.api_key != PRODUCE:
            asked.answer()
            return
        results = {}
        for topic, partitions in asked.topics:
            for index in partitions:
                base_offset = self.next.setdefault((topic, index), self._first)
                self.next[topic, index] += 1
                results[topic, index] = {"base_offset": base_offset}
        asked.answer(results=results, **self._fields)


def offsets_of(ranges: Sequence[Range]) -> dict[tuple[str, int], list[int]]:
    """Every offset that the trail has, as often as it has it."""
    found: dict[tuple[str, int], list[int]] = {}
    for row in ranges:
        for first, count in zip(row.spans[0::2], row.spans[1::2], strict=True):
            found.setdefault((row.topic, row.partition), []).extend(range(first, first + count))
    return {partition: sorted(offsets) for partition, offsets in found.items()}


async def ask(client: RawClient, *frames: bytes) -> None:
    """One after another, each answered before the next is sent."""
    for frame in frames:
        client.send(frame)
        await client.answer()


@pytest.mark.parametrize("version", range(3, 14))
@both_loops
async def test_requests_of_every_version_are_noted(version: int) -> None:
    """Three of each: the first goes a new route, the others a proven one."""
    scripts = Offsets(), Offsets(first=7)
    async with running_proxy(*(ScriptedUpstream(number, script) for number, script in enumerate(scripts, 1))) as proxy:
        proxy.trail.begin()
        revisions = {0: proxy.own(1, partitions=[0]), 1: proxy.own(2, partitions=[1])}
        client = await proxy.client()
        for n in range(3):
            await ask(client, produce_frame({"t": [0]}, version=version, records=batch(n), client_id="writer"))
        for n in range(3, 6):
            await ask(client, produce_frame({"t": [0, 1]}, version=version, records=batch(n), client_id="writer"))
        ranges = proxy.ranges()
        assert offsets_of(ranges) == {("t", 0): [*range(100, 106)], ("t", 1): [7, 8, 9]}
        assert {(row.partition, row.owner, row.revision) for row in ranges} == {
            (0, 1, revisions[0]),
            (1, 2, revisions[1]),
        }
        assert {(row.producer_id, row.producer_epoch, row.first_sequence, row.acks) for row in ranges} == {
            (7, 0, 0, -1),
            (7, 0, 3, -1),
        }
        assert {row.bytes for row in ranges} == {6 * len(batch(0)), 3 * len(batch(0))}
        assert all(row.peer.startswith("127.0.0.1:") and row.topic_id is not None for row in ranges)


SIZES = [
    1,
    40,
    60,
    61,
    62,
    63,
    64,
    65,
    66,
    200,
    16_290,
    *range(16_308, 16_322),
    40_000,
    2_097_060,
    *range(2_097_076, 2_097_092),
]


@pytest.mark.parametrize("version", [7, 9])
async def test_a_batch_of_any_length_is_noted(version: int) -> None:
    """The length of the records takes one, two, three or four bytes, and the header lies behind it."""
    async with running_proxy(ScriptedUpstream(1, Offsets())) as proxy:
        proxy.trail.begin()
        proxy.own(1)
        client = await proxy.client()
        sizes = 0
        for n, size in enumerate([5, *SIZES]):
            records = bytes(build_batch([bytes(size)], producer_id=7, producer_epoch=3, base_sequence=n))
            sizes += len(records)
            await ask(client, produce_frame(version=version, records=records))
        (row,) = proxy.ranges()
        assert row.spans == [100, len(SIZES) + 1]
        assert (row.producer_id, row.producer_epoch, row.first_sequence) == (7, 3, 0)
        assert row.bytes == sizes


@both_loops
async def test_batches_of_two_producers_are_noted_separately() -> None:
    async with running_proxy(ScriptedUpstream(1, Offsets())) as proxy:
        proxy.trail.begin()
        proxy.own(1, partitions=[0, 1])
        client = await proxy.client()
        for n in range(5):
            frame = produce_frame({"t": [0, 1]}, records=batch(n))
            other = bytes(build_batch([b"x"], producer_id=8, producer_epoch=1, base_sequence=n))[HEADER]
            second = frame.rindex(batch(n)[HEADER])
            # In turns the other producer's is the second batch, and the first.
            at = second if n % 2 else frame.index(batch(n)[HEADER])
            await ask(client, frame[:at] + other + frame[at + len(other) :])
        told = [(row.partition, row.producer_id, row.first_sequence, row.batches) for row in proxy.ranges()]
        expected = [(partition, 8 if n % 2 == partition else 7, n, 1) for partition in (0, 1) for n in range(5)]
        assert sorted(told) == sorted(expected)


@both_loops
async def test_parsed_answer_is_noted_too() -> None:
    async with running_proxy(ScriptedUpstream(1, Offsets(throttle_time_ms=3))) as proxy:
        proxy.trail.begin()
        proxy.own(1, partitions=[0, 1])
        client = await proxy.client()
        await ask(client, *(produce_frame({"t": [0, 1]}, records=batch(n)) for n in range(3)))
        assert offsets_of(proxy.ranges()) == {("t", 0): [100, 101, 102], ("t", 1): [100, 101, 102]}


@both_loops
async def test_only_the_partitions_that_were_acknowledged_are_noted() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.trail.begin()
        proxy.own(1, partitions=[0, 1])
        client = await proxy.client()
        for base_offset in (5, 6):
            client.send(produce_frame({"t": [0, 1]}))
            asked = await upstream.next()
            asked.answer(results={("t", 0): MESSAGE_TOO_LARGE, ("t", 1): {"base_offset": base_offset}})
            await client.answer()
        assert offsets_of(proxy.ranges()) == {("t", 1): [5, 6]}


@both_loops
async def test_batch_of_new_owner_is_noted_with_it() -> None:
    old, new = ScriptedUpstream(1), ScriptedUpstream(2, Offsets(first=30))
    async with running_proxy(old, new) as proxy:
        proxy.trail.begin()
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame())
        (await old.next()).answer(results={("t", 0): {"base_offset": 29}})
        await client.answer()
        client.send(produce_frame())
        asked = await old.next()
        moved_at = proxy.own(2)
        asked.answer(results={("t", 0): NOT_LEADER})
        await client.answer()
        assert [(row.owner, row.spans) for row in proxy.ranges()] == [(1, [29, 1]), (2, [30, 1])]
        assert max(row.revision for row in proxy.ranges()) in (0, moved_at)


@both_loops
@in_one_go
async def test_unreported_acknowledgement_is_not_noted() -> None:
    """acks=0, also where the broker confirms it; and an answer that comes when the client has been told of its end."""
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream, limits={"deadline_cap_ms": 1_200}) as proxy:
        proxy.trail.begin()
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(acks=0))
        await upstream.next()
        proxy.context.confirm_acks0 = True
        client.send(produce_frame(acks=0))
        (await upstream.next()).answer(results={("t", 0): {"base_offset": 1}})
        await eventually(lambda: proxy.vitals.in_flight_requests == 0)
        client.send(produce_frame(timeout_ms=1_000, records=batch(0, producer_id=-1)))
        late = await upstream.next()
        answer = await client.answer()
        assert [each.fields["error_code"] for each in answer.results] == [TIMED_OUT]
        late.answer(results={("t", 0): {"base_offset": 2}})
        await asyncio.sleep(0.05)
        assert proxy.ranges() == []


LYING = {
    "no records": b"",
    "less than a header": bytes(60),
    "zeros": bytes(200),
    "an old message": batch(0)[:16] + b"\x01" + batch(0)[17:],
}


@pytest.mark.parametrize("name", LYING)
@both_loops
async def test_acknowledged_invalid_batch_costs_client_nothing(name: str) -> None:
    async with running_proxy(ScriptedUpstream(1, Offsets())) as proxy:
        proxy.trail.begin()
        proxy.own(1)
        client = await proxy.client()
        await ask(
            client, *(produce_frame(records=records) for records in (batch(0), LYING[name], LYING[name], batch(3)))
        )
        proxy.trail.look()
        await ask(client, produce_frame(records=batch(4)))
        assert 104 in offsets_of(proxy.ranges())[("t", 0)]


@both_loops
async def test_reads_are_not_noted() -> None:
    async with running_proxy(ScriptedUpstream(1, Offsets())) as proxy:
        proxy.trail.begin()
        proxy.own(1)
        client = await proxy.client()
        await ask(client, fetch_frame(), produce_frame(), fetch_frame())
        assert offsets_of(proxy.ranges()) == {("t", 0): [100]}


@both_loops
async def test_offset_assigned_twice_is_reported_with_both(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_proxy(*(ScriptedUpstream(number, Offsets()) for number in (1, 2))) as proxy:
        client = await proxy.client()
        for owner in (1, 2):
            proxy.own(owner)
            await ask(client, produce_frame(records=batch(owner)))
        proxy.trail.look()
        told = [line for line in capsys.readouterr().out.splitlines() if "offsets assigned twice" in line]
        assert len(told) == 1
        assert all(word in told[0] for word in ("earlier_owner", "topic", "first_offset"))


async def test_a_proxy_without_a_trail_serves_as_ever() -> None:
    async with running_proxy(ScriptedUpstream(1, Offsets())) as proxy:
        proxy.context.trail = None
        proxy.own(1, partitions=[0, 1])
        client = await proxy.client()
        await ask(client, *(produce_frame({"t": [0, 1]}, records=batch(n)) for n in range(3)))
