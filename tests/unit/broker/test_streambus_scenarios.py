"""The scenarios of the StreamBus text ("Week 7: Leader/Follower Coordination"), each on the real classes.

Where the text truncates a log to its replica's own high watermark, kproxy's rule keeps batches that may have been
acknowledged. Both rules are run, and the tables have the differences. Logs are written as the values of their records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kproxy.broker.cluster import ClusterView
from kproxy.broker.keys import Keys, encode_value
from kproxy.broker.log import Log
from kproxy.broker.partition import (
    ACKS_ALL,
    Inconsistent,
    Partition,
    Reconciliation,
    divergence_point,
    reset_to_offset,
    validate_consistency,
)
from kproxy.broker.replication.isr_keeper import IsrKeeper
from kproxy.broker.replication.partition_replication import MAX_WAITER_AGE_S, WAITER_SWEEP_INTERVAL_S, Role
from kproxy.etcd import put_op
from kproxy_codec import error_codes
from kproxy_codec.fetch import EpochEnd
from kproxy_codec.record_batch import HEADER_BYTES, iterate_batches
from tests.support.brokers.replica_group import ISR_LAG_S, REPLICAS, Group, append, broker_value, on_disk
from tests.support.models.broken_rules import TruncateToHighWatermark
from tests.support.models.simulated_etcd import EtcdStore, SimulatedEtcdClient
from tests.support.models.simulated_loop import SimulatedLoop
from tests.unit.broker.replicas import fetch

OLD_LEADER, A, B = REPLICAS
OURS, STREAMBUS = Reconciliation(), TruncateToHighWatermark()


def log_of(group: Group, node_id: int) -> list[str]:
    """The values of a replica's records."""
    # One record in each batch: length, attributes, two deltas, no key, the value's length; the value; no headers.
    data = group.contents(node_id)
    return [data[batch.position + HEADER_BYTES + 6 : batch.end - 1].decode() for batch in iterate_batches(data)]


def positions(group: Group, node_id: int) -> tuple[int, int]:
    """(log end offset, high watermark), as in the text's tables."""
    replica = group.replicas[node_id]
    return replica.log_end_offset, replica.high_watermark


def five_messages(group: Group) -> Partition:
    """The text's table before the failover: msg0 to msg4, of which A has four and B three."""
    leader = group.elect(OLD_LEADER)
    for number in range(3):
        append(leader, f"msg{number}".encode(), acks=1)
    fetch(group, A, B, A, B, A)
    append(leader, b"msg3", acks=1)
    group.fetch(A)
    append(leader, b"msg4", acks=1)
    return leader


# The failover tables


def test_replicas_agree_after_failover_to_b(group: Group) -> None:
    five_messages(group)
    assert log_of(group, OLD_LEADER) == ["msg0", "msg1", "msg2", "msg3", "msg4"]
    assert log_of(group, A) == ["msg0", "msg1", "msg2", "msg3"]
    assert log_of(group, B) == ["msg0", "msg1", "msg2"]
    assert [positions(group, node_id) for node_id in REPLICAS] == [(5, 3), (4, 3), (3, 3)]
    # As in the text: B truncates nothing, A truncates to 3 and fetches from there, and both logs are equal.
    group.elect(B)
    assert positions(group, B) == (3, 3)
    first = group.fetch(A)
    assert first.diverging_epoch == EpochEnd(0, 3)
    assert positions(group, A) == (3, 3)
    asked = group.replicas[A].next_fetch()
    assert asked is not None
    assert asked.fetch_offset == 3
    assert log_of(group, A) == log_of(group, B) == ["msg0", "msg1", "msg2"]
    group.depose(OLD_LEADER)
    group.fetch(OLD_LEADER)
    assert log_of(group, OLD_LEADER) == ["msg0", "msg1", "msg2"]


@pytest.mark.parametrize(
    ("rule", "kept", "position"),
    [(OURS, ["msg0", "msg1", "msg2", "msg3"], (4, 3)), (STREAMBUS, ["msg0", "msg1", "msg2"], (3, 3))],
    ids=["ours", "streambus"],
)
def test_replicas_agree_after_failover_to_a(
    tmp_path: Path, rule: Reconciliation, kept: list[str], position: tuple[int, int]
) -> None:
    """A new leader is ahead of its high watermark: its further records may have been acknowledged, so they are kept."""
    group = Group(tmp_path, reconciliation=rule)
    five_messages(group)
    group.elect(A)
    assert positions(group, A) == position
    assert log_of(group, A) == kept
    group.depose(OLD_LEADER)
    fetch(group, OLD_LEADER, B, OLD_LEADER, B, OLD_LEADER, B)
    assert log_of(group, OLD_LEADER) == log_of(group, A) == log_of(group, B) == kept
    assert {positions(group, node_id) for node_id in REPLICAS} == {(len(kept), len(kept))}
    group.close()


@pytest.mark.parametrize(("rule", "survives"), [(OURS, True), (STREAMBUS, False)], ids=["ours", "streambus"])
def test_acknowledged_message_survives_leader_with_lagging_watermark(
    tmp_path: Path, rule: Reconciliation, survives: bool
) -> None:
    """The flaw of the text (KIP-101): a follower's high watermark is one fetch old."""
    group = Group(tmp_path, reconciliation=rule)
    leader = group.elect(OLD_LEADER)
    assert append(leader, b"acknowledged").error_code == error_codes.NONE
    fetch(group, A, B, A, B)
    assert leader.is_committed(0)
    assert positions(group, A) == (1, 0)
    group.elect(A)
    assert (log_of(group, A) == ["acknowledged"]) is survives
    group.close()


# "Failure Scenarios"


def test_acks_1_loses_message_unreplicated_at_leader_failure(group: Group) -> None:
    leader = group.elect(OLD_LEADER)
    assert append(leader, b"alone", acks=1).error_code == error_codes.NONE
    group.elect(B)
    group.depose(OLD_LEADER)
    group.fetch(OLD_LEADER)
    assert [log_of(group, node_id) for node_id in REPLICAS] == [[], [], []]


async def test_acks_all_producer_resends_after_leader_failure(
    group: Group,
) -> None:
    producer = {"producer_id": 9, "producer_epoch": 0, "base_sequence": 0}
    leader = group.elect(OLD_LEADER)
    result = append(leader, b"precious", **producer)
    assert await leader.wait_for_isr(result.last_offset, 0.01) == error_codes.REQUEST_TIMED_OUT
    leader = group.elect(B)
    result = append(leader, b"precious", **producer)
    group.depose(OLD_LEADER)
    fetch(group, OLD_LEADER, A, OLD_LEADER, A, OLD_LEADER, A)
    assert await leader.wait_for_isr(result.last_offset, 0.01) == error_codes.NONE
    assert [log_of(group, node_id) for node_id in REPLICAS] == [["precious"]] * 3, "not lost, and not there twice"


@pytest.mark.parametrize("new_leader", [A, B])
def test_replicated_message_survives_leader_failure(group: Group, new_leader: int) -> None:
    leader = group.elect(OLD_LEADER)
    append(leader, b"replicated")
    fetch(group, A, B, A, B, A)
    assert leader.high_watermark == 1
    group.elect(new_leader)
    group.depose(OLD_LEADER)
    for node_id in REPLICAS:
        if node_id != new_leader:
            fetched = group.fetch(node_id)
            assert fetched.diverging_epoch is None
    assert [log_of(group, node_id) for node_id in REPLICAS] == [["replicated"]] * 3


async def test_lagging_follower_rejoins_isr_when_caught_up(group: Group) -> None:
    leader = group.elect(OLD_LEADER)
    result = append(leader, b"slow for one")
    fetch(group, A, A)
    assert await leader.wait_for_isr(result.last_offset, 0.01) == error_codes.REQUEST_TIMED_OUT
    group.clock.now += ISR_LAG_S + 1
    group.fetch(A)
    assert group.look_at_isr() == {OLD_LEADER, A}
    assert leader.high_watermark == 1
    result = append(leader, b"only for two")
    fetch(group, A, A)
    assert await leader.wait_for_isr(result.last_offset, 0.01) == error_codes.NONE
    group.fetch(B)
    assert group.look_at_isr() == {OLD_LEADER, A}, "it has been sent what it lacks, and has not said that it has it"
    group.fetch(B)
    assert group.look_at_isr() == set(REPLICAS)
    assert log_of(group, B) == ["slow for one", "only for two"]


# Roles


def test_replica_follows_before_and_after_leading(group: Group) -> None:
    """A replaced leader opens its log again before it follows."""
    assert [replica.role for replica in group.replicas.values()] == [Role.FOLLOWER] * 3
    leader = group.elect(OLD_LEADER)
    append(leader, b"one")
    assert [replica.role for replica in group.replicas.values()] == [Role.LEADER, Role.FOLLOWER, Role.FOLLOWER]
    group.elect(A)
    follower = group.depose(OLD_LEADER)
    assert leader.role is Role.CLOSED
    assert (follower.role, follower.leader_id, follower.leader_epoch) == (Role.FOLLOWER, A, 1)
    assert append(follower, b"two").error_code == error_codes.NOT_LEADER_OR_FOLLOWER
    group.elect(OLD_LEADER)
    assert append(group.replicas[OLD_LEADER], b"two").base_offset == 1


@pytest.mark.parametrize(
    ("acks", "waits_for_all", "taken_with_one_in_sync"), [(0, False, True), (1, False, True), (ACKS_ALL, True, False)]
)
def test_acknowledgement_level_decides_the_wait(
    group: Group, acks: int, waits_for_all: bool, taken_with_one_in_sync: bool
) -> None:
    leader = group.elect(OLD_LEADER)
    result = append(leader, b"v", acks=acks)
    assert (result.error_code, result.base_offset) == (error_codes.NONE, 0)
    assert (acks == ACKS_ALL and not leader.is_committed(result.last_offset)) is waits_for_all
    group.live.clear()
    assert group.look_at_isr() == {OLD_LEADER}
    taken = append(leader, b"w", acks=acks).error_code == error_codes.NONE
    assert taken is taken_with_one_in_sync


# "Log Reconciliation": validation and the two helpers


@pytest.mark.parametrize(("high_watermark", "consistent"), [(0, True), (2, True), (3, True), (4, False), (-1, False)])
def test_inconsistent_high_watermark_is_refused(group: Group, high_watermark: int, consistent: bool) -> None:
    leader = group.elect(OLD_LEADER)
    for _ in range(3):
        append(leader, b"v", acks=1)
    if consistent:
        validate_consistency(leader.log, high_watermark)
    else:
        with pytest.raises(Inconsistent):
            validate_consistency(leader.log, high_watermark)


@pytest.mark.parametrize(
    ("leader_end", "parts_at"),
    [
        (EpochEnd(0, 2), 2),  # the leader's epoch 0 ended earlier
        (EpochEnd(0, 9), 3),  # the leader's epoch 0 went on; this replica's epoch 1 begins at 3
        (EpochEnd(1, 4), 4),
        (EpochEnd(1, 9), 5),  # this replica lags
        (EpochEnd(-1, 0), 0),  # the logs have nothing in common
    ],
)
def test_divergence_point_is_found(tmp_path: Path, leader_end: EpochEnd, parts_at: int) -> None:
    """Here epoch 0 wrote 0 to 2 and epoch 1 wrote 3 and 4."""
    group = Group(tmp_path)
    first = group.elect(OLD_LEADER)
    for _ in range(3):
        append(first, b"v", acks=1)
    group.restart(OLD_LEADER)
    second = group.elect(OLD_LEADER)
    for _ in range(2):
        append(second, b"w", acks=1)
    assert divergence_point(second.log, leader_end) == parts_at
    group.close()


@pytest.mark.parametrize(("offset", "end_offset"), [(4, 4), (3, 3), (5, 5), (2, None)])
def test_reset_to_offset_keeps_records_below_high_watermark(group: Group, offset: int, end_offset: int | None) -> None:
    log: Log = five_messages(group).log
    if end_offset is None:
        with pytest.raises(Inconsistent):
            reset_to_offset(log, 3, offset)
        assert log.log_end_offset == 5
    else:
        reset_to_offset(log, 3, offset)
        assert log.log_end_offset == end_offset


# WaitForISR


class Waiting:
    """A leader with msg0 on all replicas and msg1 only on its own; its waiters are checked on simulated time."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.loop = SimulatedLoop(group.clock)
        self.leader = group.elect(OLD_LEADER)
        append(self.leader, b"msg0")
        fetch(group, A, B, A, B)
        append(self.leader, b"msg1")
        append(self.leader, b"msg2")
        self.replication = self.leader.replication
        store = EtcdStore(group.clock)
        view = ClusterView(Keys("/p"))
        for node_id in REPLICAS:
            put = put_op(view.keys.broker(node_id), encode_value(broker_value(node_id)))
            store.apply("Put", put.message.request_put)
        view.on_snapshot(store.snapshot(view.prefixes))
        keeper = IsrKeeper(
            SimulatedEtcdClient(store),
            view,
            lambda: [self.leader],
            isr_lag_s=group.isr_lag_s,
            on_deposed=lambda partition: None,
        )
        self.loop.create_task(keeper.run())
        self.loop.run_ready()

    def wait(self, offset: int, timeout_s: float) -> asyncio.Task[int]:
        waiter: asyncio.Task[int] = self.loop.create_task(self.leader.wait_for_isr(offset, timeout_s))
        self.loop.run_ready()
        return waiter

    def replicate(self) -> None:
        """Let both followers fetch all records and report them."""
        for node_id in (A, B, A, B):
            self.group.fetch(node_id)
        self.loop.run_ready()

    def advance(self, seconds: float) -> None:
        end = self.group.clock.now + seconds
        while self.loop.next_timer is not None and self.loop.next_timer <= end:
            self.group.clock.now = max(self.group.clock.now, self.loop.next_timer)
            self.loop.run_ready()
        self.group.clock.now = end
        self.loop.run_ready()


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Waiting]:
    # No replica leaves the ISR during the test.
    group = Group(tmp_path, isr_lag_s=1000.0)
    waiting = Waiting(group)
    yield waiting
    waiting.loop.finish()
    group.close()


def test_replicated_offset_is_answered_at_once(waiting: Waiting) -> None:
    waiter = waiting.wait(0, 10)
    assert waiter.result() == error_codes.NONE
    assert waiting.replication.waiting == 0


def test_waiter_is_answered_when_high_watermark_passes_it(waiting: Waiting) -> None:
    waiter = waiting.wait(1, 10)
    assert not waiter.done()
    waiting.replicate()
    assert waiter.result() == error_codes.NONE


@pytest.mark.parametrize("timeout_s", [0.001, 1.5, 30.0])
def test_unreplicated_offset_times_out(waiting: Waiting, timeout_s: float) -> None:
    waiter = waiting.wait(1, timeout_s)
    waiting.advance(timeout_s * 0.99)
    assert not waiter.done()
    waiting.advance(timeout_s * 0.02)
    assert waiter.result() == error_codes.REQUEST_TIMED_OUT


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
def test_waiter_needs_a_timeout(waiting: Waiting, timeout_s: float) -> None:
    assert waiting.wait(1, timeout_s).result() == error_codes.REQUEST_TIMED_OUT
    assert waiting.replication.waiting == 0


def test_cancelled_waiter_is_removed_without_harm(waiting: Waiting) -> None:
    given_up, other = waiting.wait(1, 30), waiting.wait(1, 30)
    given_up.cancel()
    waiting.loop.run_ready()
    assert given_up.cancelled()
    assert not other.done()
    waiting.replicate()
    assert other.result() == error_codes.NONE


def test_several_waiters_are_answered_at_their_offsets(waiting: Waiting) -> None:
    at_two, at_one, also_at_one = waiting.wait(2, 30), waiting.wait(1, 30), waiting.wait(1, 1)
    waiting.advance(2)
    assert also_at_one.result() == error_codes.REQUEST_TIMED_OUT
    for node_id in (A, B):
        # Both replicas report msg1, but not yet msg2.
        waiting.replication.replica_fetched(on_disk(node_id), 2)
    waiting.loop.run_ready()
    assert at_one.result() == error_codes.NONE
    assert not at_two.done()
    waiting.replicate()
    assert at_two.result() == error_codes.NONE


def test_abandoned_waiters_are_removed_every_five_seconds(waiting: Waiting) -> None:
    assert WAITER_SWEEP_INTERVAL_S == 5.0
    waiters = [waiting.wait(1, 30) for _ in range(100)]
    for waiter in waiters:
        waiter.cancel()
    waiting.loop.run_ready()
    assert waiting.replication.waiting == 100
    waiting.advance(WAITER_SWEEP_INTERVAL_S + 0.5)
    assert waiting.replication.waiting == 0


def test_no_waiter_is_older_than_sixty_seconds(waiting: Waiting) -> None:
    assert MAX_WAITER_AGE_S == 60.0
    waiter = waiting.wait(1, 3600)
    waiting.advance(59.5)
    assert not waiter.done()
    waiting.advance(1)
    assert waiter.result() == error_codes.REQUEST_TIMED_OUT
    waiting.advance(WAITER_SWEEP_INTERVAL_S)
    assert waiting.replication.waiting == 0


def _leave_isr(waiting: Waiting) -> None:
    waiting.group.live.clear()
    waiting.group.look_at_isr()


ENDS: dict[str, tuple[Callable[[Waiting], None], int]] = {
    "leadership is lost": (lambda waiting: waiting.leader.close(), error_codes.REQUEST_TIMED_OUT),
    "too few are left in sync": (_leave_isr, error_codes.NOT_ENOUGH_REPLICAS_AFTER_APPEND),
}


@pytest.mark.parametrize("how", ENDS)
def test_waiters_are_answered_on_each_end(waiting: Waiting, how: str) -> None:
    happen, error_code = ENDS[how]
    waiters = [waiting.wait(offset, 30) for offset in (1, 2)]
    happen(waiting)
    waiting.loop.run_ready()
    assert [waiter.result() for waiter in waiters] == [error_code] * 2
