"""Produce requests have Apache Kafka's results when brokers hang, die, stop and come back.

As in `test_produce_oracle`, both sides take the same steps, and differences are listed with their reasons.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

import pytest

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
    fetch,
    latest,
    on_both,
    produce,
)

Sides = Mapping[str, Side]
# By then both sides know that a dead broker is dead.
SHRUNK_MS = 14_000
RANDOM_STEPS = 120
# On both sides a follower that does not fetch stays in sync for longer.
IN_SYNC_S = 2.5


def at_random(seed: int, count: int) -> list[Step]:
    """Mostly valid batches of three producers: the next, a resend in full or in part, a gap, an epoch up or down."""
    chance, steps = random.Random(seed), []
    known: dict[int, tuple[int, int, list[tuple[int, int, int]]]] = {}
    for number in range(count):
        producer_id = chance.choice((90, 91, 92))
        epoch, following, sent = known.setdefault(producer_id, (0, chance.choice((0, LAST_SEQUENCE - 6)), []))
        asked = (epoch, following, chance.randint(1, 3))
        kind = chance.random()
        if sent and kind < 0.3:
            asked = chance.choice(sent[-8:])
        elif sent and kind < 0.35:
            *which, size = chance.choice(sent[-8:])
            asked = (*which, max(1, size + chance.choice((-1, 1))))
        elif kind < 0.4:
            asked = (epoch, (following + chance.randint(-4, 4)) & LAST_SEQUENCE, 1)
        elif kind < 0.45:
            asked = (epoch + chance.randint(1, 2), chance.choice((0, 0, 1, following)), 2)
        elif kind < 0.5:
            asked = (max(epoch - 1, 0), following, 1)
        if asked[:2] == (epoch, following) or (asked[0] > epoch and asked[1] == 0):
            known[producer_id] = (asked[0], (asked[1] + asked[2]) & LAST_SEQUENCE, [*sent, asked])
        records = batch(asked[1], epoch=asked[0], count=asked[2], producer_id=producer_id)
        steps.append(Step(f"{number}: producer {producer_id}, epoch, sequence and count {asked}", records))
    return steps


def test_unreplicated_records_are_neither_acknowledged_nor_read(sides: Sides, topic: str) -> None:
    for attempt in range(5):
        if _is_neither_acknowledged_nor_read(sides, f"{topic}-{attempt}"):
            return
    raise AssertionError("it always took longer than a follower is in sync that does not fetch")


def _is_neither_acknowledged_nor_read(sides: Sides, topic: str) -> bool:
    """False if the followers may have left the ISR because the machine stalled."""
    stopped_s: list[float] = []

    def script(side: Side) -> dict[str, Any]:
        side.create(topic)
        leader = side.leader(topic)
        followers = [node_id for node_id in NODES if node_id != leader]
        told: dict[str, Any] = {}
        with side.client(leader) as client:
            told["before"] = produce(client, batch(0), topic=topic)
            stopped_at = time.monotonic()
            for node_id in followers:
                side.pause(node_id)
            try:
                told["acks=1"] = produce(client, batch(2), topic=topic, acks=1)
                told["acks=all"] = produce(client, batch(4), topic=topic, timeout_ms=300)
                told["acks=all, again"] = produce(client, batch(4), topic=topic, timeout_ms=300)
                told["acks=1, again"] = produce(client, batch(4), topic=topic, acks=1)
                told["acks=1, a gap"] = produce(client, batch(8), topic=topic, acks=1)
                told["latest"] = latest(client, topic)
                told |= {f"read from {offset}": fetch(client, topic, offset) for offset in (0, 2, 3, 6)}
                told["read from 7"] = fetch(client, topic, 7).error
            finally:
                stopped_s.append(time.monotonic() - stopped_at)
                for node_id in followers:
                    side.resume(node_id)
            told["acks=all, once more"] = produce(client, batch(4), topic=topic)
            told["latest at last"] = latest(client, topic)
            told["read at last"] = fetch(client, topic, 0)
        return told

    real, ours = on_both(sides, script)
    if max(stopped_s) > IN_SYNC_S:
        return False
    # Kafka reports the offset of an appended batch even if it may be lost; here an error has no offset.
    untold = Outcome("REQUEST_TIMED_OUT", 4), Outcome("REQUEST_TIMED_OUT", -1)
    assert differing(real, ours) == {"acks=all": untold, "acks=all, again": untold}
    assert real["latest"].offset == 2, "there was nothing to wait for"
    return True


def too_few(side: Side, topic: str, end: int) -> dict[str, Any]:
    """Requests with fewer in-sync replicas than required; acknowledged records end at `end`."""
    with ToLeader(side, topic) as leader:
        return {
            "acks=all": leader.produce(batch(0, producer_id=88)),
            "acks=1": leader.produce(batch(0, producer_id=88), acks=1),
            "acks=1, again": leader.produce(batch(0, producer_id=88), acks=1),
            "acks=all, again": leader.produce(batch(0, producer_id=88)),
            "acks=0": leader.produce(batch(2, producer_id=88), acks=0),
            "acks=all, a gap": leader.produce(batch(8, producer_id=88)),
            "acks=1, a gap": leader.produce(batch(8, producer_id=88), acks=1),
            "acks=all, bad CRC": leader.produce(ONE[:-1] + bytes([ONE[-1] ^ 1])),
            "latest": leader.latest(),
            "read": leader.fetch(end),
        }


def after_the_leader_died(side: Side, topic: str) -> dict[str, Any]:
    """Sequences 0 to 12 were acknowledged before the leader died."""
    with ToLeader(side, topic) as leader:
        told: dict[str, Any] = {f"sequence {each}": leader.produce(batch(each)) for each in (*range(0, 14, 2), 16, 14)}
        return told | {
            "sequence 14 again": leader.produce(batch(14)),
            "another epoch": leader.produce(batch(0, epoch=2)),
            "the epoch before": leader.produce(batch(16)),
            "latest": leader.latest(),
            "read": leader.fetch(0),
        }


@pytest.mark.long
def test_replicas_survive_leader_deaths_and_come_back(sides: Sides, topic: str) -> None:
    """kill -9 of the leader, then SIGTERM for one of the other two, then all return."""
    two, three, others = f"{topic}-2", f"{topic}-3", f"{topic}-random"
    steps = at_random(seed=6, count=2 * RANDOM_STEPS)

    def script(side: Side) -> dict[str, Any]:
        told: dict[str, Any] = {}

        def tell(stage: str, found: Mapping[str, Any]) -> None:
            told.update((f"{stage}: {what}", each) for what, each in found.items())

        side.create(two, min_insync_replicas="2")
        side.create(three, leader=NODES[1], min_insync_replicas="3")
        with ToLeader(side, two) as leader:
            tell("two, all", {f"sequence {each}": leader.produce(batch(each)) for each in range(0, 14, 2)})
        with ToLeader(side, three) as leader:
            tell("three, all", {"acks=all": leader.produce(batch(0))})

        side.create(others)
        with ToLeader(side, others) as leader:
            tell("random", {step.what: leader.produce(step.records) for step in steps[:RANDOM_STEPS]})

        with side.client(NODES[1]) as client:
            side.kill(NODES[0])
            tell("three, dying", {"acks=all": produce(client, batch(2), topic=three, timeout_ms=SHRUNK_MS)})
        for name in (two, three, others):
            side.wait_in_sync(name, 2)
        with ToLeader(side, others) as leader:
            tell("random, another leader", {step.what: leader.produce(step.records) for step in steps[RANDOM_STEPS:]})
        tell("two, another leader", after_the_leader_died(side, two))
        partition = side.described(two, NODES[1])
        tell("two, another leader", {"isr": sorted(partition.isr_nodes), "offline": partition.offline_replicas})
        tell("three, two in sync", too_few(side, three, 2))

        leading = side.leader(two)
        last = next(node_id for node_id in NODES if node_id not in (NODES[0], leading))
        side.stop(last)
        for name in (two, three):
            side.wait_in_sync(name, 1)
        tell("two, one in sync", too_few(side, two, 18))

        side.start(NODES[0], last)
        for name in (two, three):
            side.wait_in_sync(name, len(NODES))
            with ToLeader(side, name) as leader:
                appended = leader.produce(batch(0, producer_id=90))
                tell(f"{name[-1]}, back", {"acks=all": appended, "latest": leader.latest(), "read": leader.fetch(0)})
        return told

    real, ours = on_both(sides, script)
    # Kafka reads the records only if enough replicas are in sync; clients retry after either error.
    unread = Outcome("NOT_ENOUGH_REPLICAS"), Outcome("CORRUPT_MESSAGE")
    # If replicas leave the ISR after the append, Kafka waits until the timeout: its high watermark stays.
    shrunk = Outcome("REQUEST_TIMED_OUT", 2), Outcome("NOT_ENOUGH_REPLICAS_AFTER_APPEND")
    assert differing(real, ours) == {
        "three, dying: acks=all": shrunk,
        "three, two in sync: acks=all, bad CRC": unread,
        "two, one in sync: acks=all, bad CRC": unread,
    }
    assert real["two, another leader: offline"] == [NODES[0]]
    assert {found.error for what, found in real.items() if what.startswith("random")} == {
        "NONE",
        "OUT_OF_ORDER_SEQUENCE_NUMBER",
        "INVALID_PRODUCER_EPOCH",
    }
    assert real["two, another leader: sequence 12"] == Outcome("NONE", 12), (
        "the resend got another than its first offset"
    )
    assert real["two, one in sync: acks=all"].error == "NOT_ENOUGH_REPLICAS"
    assert real["two, one in sync: acks=1"].error == "NONE"
