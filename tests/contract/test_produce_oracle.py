"""Produce requests have the same results at the reference brokers as at Apache Kafka, byte for byte.

Each script runs on both sides at once, step by step, on a partition of its own. The table DIFFERENT has all differences
and their reasons; a row that is no longer true of a side fails.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pytest
from crc32c import crc32c

from kproxy_codec import error_codes
from kproxy_codec.api_keys import PRODUCE
from tests.support.brokers.oracle import (
    LAST_SEQUENCE,
    NODES,
    ONE,
    Outcome,
    Side,
    Step,
    ToLeader,
    batch,
    differing,
    on_both,
    produce,
)
from tests.support.wire.record_batches import build_batch, with_attributes

Sides = Mapping[str, Side]


class Difference(NamedTuple):
    """A request with different results on the two sides: the error codes by name, and the reason."""

    what: str
    records: bytes
    real: str
    ours: str
    why: str


# Invalid batches


def patched(batch: bytes, position: int, value: int, size: int) -> bytes:
    """`batch` with some bytes replaced and the CRC corrected."""
    changed = bytearray(batch)
    changed[position : position + size] = value.to_bytes(size, "big", signed=True)
    changed[17:21] = crc32c(changed[21:]).to_bytes(4, "big")
    return bytes(changed)


def with_codec(codec: int) -> bytes:
    """An uncompressed batch that claims a compression type."""
    return bytes(with_attributes(bytearray(ONE), codec))


AHEAD = bytes(build_batch(timestamp=int(time.time() * 1000) + 7_200_000))

BATCHES = [
    Step("one record", ONE),
    Step("three records", bytes(build_batch([b"a"] * 3))),
    Step("three, compressed", bytes(build_batch([b"a"] * 3, compression=1))),
    Step("acks=1", ONE, {"acks": 1}),
    Step("acks=0", ONE, {"acks": 0}),
    Step("after acks=0", ONE),
    Step("acks=2", ONE, {"acks": 2}),
    Step("acks=-2", ONE, {"acks": -2}),
    Step("version 3", ONE, {"version": 3}),
    Step("version 12", ONE, {"version": 12}),
    Step("bad CRC", ONE[:-1] + bytes([ONE[-1] ^ 1])),
    Step("cut short", ONE[:-1]),
    Step("cut in its header", ONE[:40]),
    Step("cut before its length", ONE[:5]),
    Step("no batch", b""),
    Step("two batches", ONE + ONE),
    Step("magic 0", ONE[:16] + b"\0" + ONE[17:]),
    Step("magic 1", ONE[:16] + b"\1" + ONE[17:]),
    Step("magic 3", ONE[:16] + b"\3" + ONE[17:]),
    Step("a negative length", patched(ONE, 8, -1, 4)),
    Step("shorter than a header", patched(ONE, 8, 10, 4)),
    Step("too large", bytes(build_batch([b"x" * 2_000_000]))),
    Step("too large, compressed to what is not", bytes(build_batch([b"x" * 2_000_000], compression=1))),
    Step("a base offset", patched(ONE, 0, 7, 8)),
    Step("a leader epoch", patched(ONE, 12, 9, 4)),
    Step("no record, it says", patched(ONE, 57, 0, 4)),
    Step("-1 records, it says", patched(ONE, 57, -1, 4)),
    Step("a last offset beyond its records", patched(ONE, 23, 5, 4)),
    Step("a control batch", with_codec(0x20)),
    Step("zstd before version 7", with_codec(4), {"version": 6}),
    Step("long ago", bytes(build_batch(timestamp=1))),
    Step("before 1970", bytes(build_batch(timestamp=-1))),
    Step("two hours ahead", AHEAD),
    Step("a producer without a sequence", bytes(build_batch(producer_id=5, producer_epoch=0, base_sequence=-1))),
    Step("an epoch without a producer", bytes(build_batch(producer_epoch=3, base_sequence=4))),
    Step("no such partition", ONE, {"partition": 1}),
    Step("partition -1", ONE, {"partition": -1}),
    Step("no such topic", ONE, {"topic": "no-such-topic"}),
    Step("no topic can have that name", ONE, {"topic": "a/b"}),
    Step("no such topic id", ONE, {"version": 13, "topic_id": uuid.uuid4()}),
    Step("topic id 0", ONE, {"version": 13, "topic_id": uuid.UUID(int=0)}),
    Step("acks=0 to no such partition", ONE, {"partition": 1, "acks": 0}),
    Step("at the end", ONE),
]

UNREAD = "the records inside stay unread"
STRICT = "a batch that is not what it says is not stored"
DIFFERENT = [
    Difference("more behind the batch", ONE + b"abc", "NONE", "INVALID_RECORD", STRICT),
    Difference(
        "fewer records than it says", patched(patched(ONE, 57, 2, 4), 23, 1, 4), "INVALID_RECORD", "NONE", UNREAD
    ),
    Difference("gzip that is none", with_codec(1), "UNKNOWN_SERVER_ERROR", "NONE", UNREAD),
    Difference("zstd that is none", with_codec(4), "UNKNOWN_SERVER_ERROR", "NONE", UNREAD),
    Difference("compression 5", with_codec(5), "UNKNOWN_SERVER_ERROR", "INVALID_RECORD", "it says what is wrong"),
    Difference("log append time", with_codec(0x08), "NONE", "INVALID_TIMESTAMP", "Kafka rewrites it; here no byte is"),
    Difference(
        "transactional",
        bytes(build_batch(is_transactional=True, producer_id=1, producer_epoch=0, base_sequence=0)),
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
        "INVALID_TXN_STATE",
        "there are no transactions, whoever asks",
    ),
    Difference(
        "a producer without an epoch",
        bytes(build_batch(producer_id=5, producer_epoch=-1, base_sequence=0)),
        "NONE",
        "INVALID_RECORD",
        STRICT,
    ),
    Difference(
        "producer id -2",
        bytes(build_batch(producer_id=-2, producer_epoch=0, base_sequence=0)),
        "NONE",
        "INVALID_RECORD",
        STRICT,
    ),
]


# Idempotent producers


IDEMPOTENT = [
    *(Step(f"sequence {sequence}", batch(sequence)) for sequence in range(0, 14, 2)),
    *(Step(f"sequence {sequence} again, of the last five", batch(sequence)) for sequence in (12, 4, 8, 10, 6)),
    Step("sequence 2 again, older than the last five", batch(2)),
    Step("sequence 0 again, acks=1", batch(0), {"acks": 1}),
    Step("sequence 12 again, acks=1", batch(12), {"acks": 1}),
    Step("a gap", batch(16)),
    Step("the first record of a retained batch", batch(12, count=1)),
    Step("the last record of a retained batch", batch(13, count=1)),
    Step("a retained batch and one more", batch(12, count=3)),
    Step("the next", batch(14)),
    Step("the next, acks=0", batch(16), {"acks": 0}),
    Step("the same, acks=0", batch(16), {"acks": 0}),
    Step("the same, acks=all", batch(16)),
    Step("a gap, acks=0", batch(30), {"acks": 0}),
    Step("a new epoch that does not begin at 0", batch(5, epoch=1)),
    Step("a new epoch", batch(0, epoch=1)),
    Step("a new epoch, again", batch(0, epoch=1)),
    Step("the old epoch, a retained batch", batch(16)),
    Step("the old epoch, the next", batch(18)),
    Step("an epoch left out", batch(0, epoch=5)),
    Step("the epoch before it", batch(2, epoch=1)),
    Step("a producer nobody knows, in the middle", batch(9, producer_id=78)),
    Step("its next", batch(11, producer_id=78)),
    Step("its 0", batch(0, producer_id=78)),
    Step("a producer's last epoch", batch(0, producer_id=79, epoch=32_767)),
    Step("the last sequences", batch(LAST_SEQUENCE - 1, producer_id=80)),
    Step("behind the last", batch(0, producer_id=80)),
    Step("the last, again", batch(LAST_SEQUENCE - 1, producer_id=80)),
    Step("behind the last, again", batch(0, producer_id=80)),
    Step("over the last", batch(LAST_SEQUENCE, producer_id=81)),
    Step("behind that", batch(1, producer_id=81)),
    Step("over the last, again", batch(LAST_SEQUENCE, producer_id=81)),
    Step("half of it", batch(0, producer_id=81, count=1)),
    Step("a plain batch between", ONE),
    Step("another producer under a known sequence", batch(12, producer_id=82)),
]


def run(steps: Sequence[Step], topic: str, side: Side) -> dict[str, Outcome]:
    """Run the steps one by one, each answered before the next."""
    side.create(topic)
    with ToLeader(side, topic) as leader:
        outcomes = {step.what: leader.produce(step.records, **step.options) for step in steps}
    assert len(outcomes) == len(steps), "two steps of one name"
    return outcomes


@pytest.mark.parametrize("steps", [pytest.param(BATCHES, id="batches"), pytest.param(IDEMPOTENT, id="idempotent")])
def test_each_step_gives_the_same_result(sides: Sides, topic: str, steps: list[Step]) -> None:
    real, ours = on_both(sides, lambda side: run(steps, topic, side))
    assert differing(real, ours) == {}


def test_differences_are_the_known_ones(sides: Sides, topic: str) -> None:
    steps = [Step(each.what, each.records) for each in DIFFERENT]
    real, ours = on_both(sides, lambda side: run(steps, topic, side))
    assert {each.what: (each.real, each.ours) for each in DIFFERENT} == {
        what: (real[what].error, ours[what].error) for what in real
    }
    assert all(each.real != each.ours for each in DIFFERENT)


def test_only_the_leader_takes_records(sides: Sides, topic: str) -> None:
    def script(side: Side) -> dict[str, Outcome]:
        side.create(topic)
        follower = next(node_id for node_id in NODES if node_id != side.leader(topic))
        outcomes = {}
        for what, records, options in (
            ("acks=all", ONE, {}),
            ("acks=1", ONE, {"acks": 1}),
            ("acks=0", ONE, {"acks": 0}),
            ("acks=2", ONE, {"acks": 2}),
            ("version 10", ONE, {"version": 10}),
            ("bad CRC", ONE[:-1] + bytes([ONE[-1] ^ 1]), {}),
            ("a sequence out of order", batch(8), {}),
            ("no such partition", ONE, {"partition": 1}),
        ):
            with side.client(follower) as client:
                outcomes[what] = produce(client, records, topic=topic, **options)
        return outcomes

    real, ours = on_both(sides, script)
    assert differing(real, ours) == {}


def test_partition_named_twice_is_refused_twice(sides: Sides, topic: str) -> None:
    """Kafka drops one of the two without an error; here nothing is appended and both are answered."""

    def script(side: Side) -> tuple[list[str], Outcome]:
        side.create(topic)
        twice = [{"index": 0, "records": batch(0)}, {"index": 0, "records": batch(0, producer_id=78)}]
        with side.client(side.leader(topic)) as client:
            data = [{"name": topic, "partition_data": twice}]
            [answered] = client.request(PRODUCE, 9, acks=-1, timeout_ms=10_000, topic_data=data).responses
            errors = [error_codes.name_of(each.error_code) for each in answered.partition_responses]
            return errors, produce(client, ONE, topic=topic)

    real, ours = on_both(sides, script)
    assert real == (["NONE"], Outcome("NONE", 2))
    assert ours == (["INVALID_REQUEST", "INVALID_REQUEST"], Outcome("NONE", 0))
