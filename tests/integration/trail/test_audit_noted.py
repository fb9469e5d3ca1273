"""Exactly the acknowledged batches are noted, whatever their request and its path.

Before scripted brokers: every version of Produce, one owner and several, plain answers and answers that must be parsed,
batches whose length takes one to four bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from kproxy.trail.rows import Range
from kproxy_codec.api_keys import FETCH, PRODUCE
from tests.support.brokers.scripted_upstream import Asked
from tests.support.clients.raw_client import batch, fetch_frame, produce_frame
from tests.support.processes.running_proxy import both_loops
from tests.support.scene import HOLDS, T0, T1, Scene, scene, staged
from tests.support.waiting import eventually
from tests.support.wire.record_batches import build_batch

# A batch's producer_id, producer_epoch and base_sequence.
HEADER = slice(43, 57)
NOT_LEADER = 6
TIMED_OUT = 7
MESSAGE_TOO_LARGE = 10


class Offsets:
    """A broker that keeps only its partitions' next offsets."""

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
    """All offsets in the trail, with repetitions."""
    found: dict[tuple[str, int], list[int]] = {}
    for row in ranges:
        for first, count in zip(row.spans[0::2], row.spans[1::2], strict=True):
            found.setdefault((row.topic, row.partition), []).extend(range(first, first + count))
    return {partition: sorted(offsets) for partition, offsets in found.items()}


async def ask(s: Scene, *frames: bytes) -> None:
    """Send the requests one by one, each after the previous answer."""
    for frame in frames:
        await s.ask(frame)


BOTH = {"t": [0, 1]}


@pytest.mark.parametrize("version", range(3, 14))
@both_loops
async def test_requests_of_every_version_are_noted(version: int) -> None:
    """Three of each: the first on a new route, the others on a proven one."""
    async with staged(Offsets(), Offsets(first=7)) as s:
        s.proxy.trail.begin()
        for n in range(6):
            partitions = {"t": [0]} if n < 3 else BOTH
            s.send(produce_frame(partitions, version=version, records=batch(n), client_id="writer"))
            await s.answer(api_version=version)
        ranges = s.proxy.ranges()
        assert offsets_of(ranges) == {T0: [*range(100, 106)], T1: [7, 8, 9]}
        # The proxy learned the owners one by one.
        assert {(row.partition, row.owner, row.revision) for row in ranges} == {(0, 1, 1), (1, 2, 2)}
        assert {(row.producer_id, row.producer_epoch, row.first_sequence, row.acks) for row in ranges} == {
            (7, 0, 0, -1),
            (7, 0, 3, -1),
        }
        assert {row.bytes for row in ranges} == {6 * len(batch(0)), 3 * len(batch(0))}
        assert all(row.peer.startswith("127.0.0.1:") and row.topic_id is not None for row in ranges)


SIZES = [1, 40, *range(60, 67), 200, 16_290, *range(16_308, 16_322), 40_000, 2_097_060, *range(2_097_076, 2_097_092)]


@pytest.mark.parametrize("version", [7, 9])
@both_loops
async def test_batch_of_any_length_is_noted(version: int) -> None:
    """The length of the records takes one to four bytes, and precedes the header."""
    async with staged(Offsets()) as s:
        s.proxy.trail.begin()
        sizes = 0
        for n, size in enumerate([5, *SIZES]):
            records = bytes(build_batch([bytes(size)], producer_id=7, producer_epoch=3, base_sequence=n))
            sizes += len(records)
            s.send(produce_frame(version=version, records=records))
            await s.answer(api_version=version)
        (row,) = s.proxy.ranges()
        assert row.spans == [100, len(SIZES) + 1]
        assert (row.producer_id, row.producer_epoch, row.first_sequence) == (7, 3, 0)
        assert row.bytes == sizes


@both_loops
async def test_batches_of_two_producers_are_noted_separately() -> None:
    async with staged(Offsets(), owners=[1, 1]) as s:
        s.proxy.trail.begin()
        for n in range(5):
            frame = produce_frame(BOTH, records=batch(n))
            other = bytes(build_batch([b"x"], producer_id=8, producer_epoch=1, base_sequence=n))[HEADER]
            second = frame.rindex(batch(n)[HEADER])
            # Alternately the second and the first batch is the other producer's.
            at = second if n % 2 else frame.index(batch(n)[HEADER])
            await s.ask(frame[:at] + other + frame[at + len(other) :])
        told = [(row.partition, row.producer_id, row.first_sequence, row.batches) for row in s.proxy.ranges()]
        expected = [(partition, 8 if n % 2 == partition else 7, n, 1) for partition in (0, 1) for n in range(5)]
        assert sorted(told) == sorted(expected)


@both_loops
async def test_parsed_answer_is_recorded_too() -> None:
    async with staged(Offsets(throttle_time_ms=3), owners=[1, 1]) as s:
        s.proxy.trail.begin()
        await ask(s, *(produce_frame(BOTH, records=batch(n)) for n in range(3)))
        assert offsets_of(s.proxy.ranges()) == {T0: [100, 101, 102], T1: [100, 101, 102]}


@scene(HOLDS, owners=[1, 1])
async def test_only_acknowledged_partitions_are_recorded(s: Scene) -> None:
    s.proxy.trail.begin()
    for base_offset in (5, 6):
        s.send(produce_frame(BOTH))
        (await s.next()).answer(results={T0: MESSAGE_TOO_LARGE, T1: {"base_offset": base_offset}})
        await s.answer()
    assert offsets_of(s.proxy.ranges()) == {T1: [5, 6]}


@scene(HOLDS, HOLDS, owners=[1])
async def test_batch_of_new_owner_is_recorded_with_it(s: Scene) -> None:
    s.proxy.trail.begin()
    s.brokers[1].script = Offsets(first=30)
    s.send(produce_frame())
    (await s.next()).answer(results={T0: {"base_offset": 29}})
    await s.answer()
    s.send(produce_frame())
    asked = await s.next()
    moved_at = s.proxy.own(2)
    asked.answer(results={T0: NOT_LEADER})
    await s.answer()
    assert [(row.owner, row.spans) for row in s.proxy.ranges()] == [(1, [29, 1]), (2, [30, 1])]
    assert max(row.revision for row in s.proxy.ranges()) in (0, moved_at)


@scene(HOLDS, limits={"deadline_cap_ms": 1_200}, one_go=True)
async def test_unreported_acknowledgement_is_not_noted(s: Scene) -> None:
    """acks=0, even if the broker confirms it; and an answer that arrives after the client's end."""
    s.proxy.trail.begin()
    s.send(produce_frame(acks=0))
    await s.next()
    s.proxy.context.confirm_acks0 = True
    s.send(produce_frame(acks=0))
    (await s.next()).answer(results={T0: {"base_offset": 1}})
    await eventually(lambda: s.proxy.vitals.in_flight_requests == 0)
    s.send(produce_frame(timeout_ms=1_000, records=batch(0, producer_id=-1)))
    late = await s.next()
    assert await s.codes() == {T0: TIMED_OUT}
    late.answer(results={T0: {"base_offset": 2}})
    await asyncio.sleep(0.05)
    assert s.proxy.ranges() == []


LYING = {
    "no records": b"",
    "less than a header": bytes(60),
    "zeros": bytes(200),
    "an old message": batch(0)[:16] + b"\x01" + batch(0)[17:],
}


@both_loops
async def test_acknowledged_invalid_batch_costs_client_nothing() -> None:
    async with staged(Offsets()) as s:
        s.proxy.trail.begin()
        for lying in LYING.values():
            await ask(s, *(produce_frame(records=each) for each in (batch(0), lying, lying, batch(3))))
            s.proxy.trail.look()
            await s.ask(produce_frame(records=batch(4)))
        assert {104, 109, 114, 119} <= {*offsets_of(s.proxy.ranges())[T0]}


@both_loops
async def test_reads_are_not_noted() -> None:
    async with staged(Offsets()) as s:
        s.proxy.trail.begin()
        read = (fetch_frame(), FETCH, 12)
        for frame, key, version in (read, (produce_frame(), PRODUCE, 9), read):
            s.send(frame)
            await s.answer(key, version)
        assert offsets_of(s.proxy.ranges()) == {T0: [100]}


@both_loops
async def test_offset_assigned_twice_is_reported_with_both(capsys: pytest.CaptureFixture[str]) -> None:
    async with staged(Offsets(), Offsets(), owners=()) as s:
        for owner in (1, 2):
            s.proxy.own(owner)
            await s.ask(produce_frame(records=batch(owner)))
        s.proxy.trail.look()
        told = [line for line in capsys.readouterr().out.splitlines() if "offsets assigned twice" in line]
        assert len(told) == 1
        assert all(word in told[0] for word in ("earlier_owner", "topic", "first_offset"))


@both_loops
async def test_proxy_without_a_trail_serves_all_requests() -> None:
    async with staged(Offsets(), owners=[1, 1], clients=0) as s:
        s.proxy.context.trail = None
        s.clients.append(await s.proxy.client())
        await ask(s, *(produce_frame(BOTH, records=batch(n)) for n in range(3)))
