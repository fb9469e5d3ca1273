"""Partitions that replicate to each other without a network: a request and its answer in one call."""

from __future__ import annotations

import errno
import random
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from structlog.testing import capture_logs

from kproxy.broker.leader_epochs import Leadership
from kproxy.broker.partition import Partition
from kproxy.broker.replication.partition_replication import FollowerContact, Isr, Role, WrongRole
from kproxy.broker.writer_fence import KeptFence
from kproxy_codec import error_codes
from kproxy_codec.fetch import PartitionFetched
from tests.support.brokers.replica_group import ISR_LAG_S, Fence, Group, append, fetch_as_replica, on_disk
from tests.unit.broker.replicas import fetch


def test_high_watermark_waits_for_every_replica_in_sync(group: Group) -> None:
    leader = group.elect(1)
    assert append(leader) == (0, 0, None, 0)
    fetch(group, 2, 2, 3)
    assert (leader.log_end_offset, leader.high_watermark) == (1, 0), "3 has been sent it, and has not said that it has"
    group.fetch(3)
    assert leader.high_watermark == 1
    assert [each.high_watermark for each in group.replicas.values()] == [1, 0, 1], "2 learns it with its next answer"
    assert group.contents(1) == group.contents(2) == group.contents(3)


def test_new_leader_keeps_records_above_its_high_watermark(group: Group) -> None:
    """The StreamBus rule would truncate acknowledged records here (KIP-101)."""
    leader = group.elect(1)
    append(leader, b"acknowledged")
    fetch(group, 2, 3, 3, 2)
    assert leader.high_watermark == 1
    assert group.replicas[3].high_watermark == 0
    group.restart(1)
    leader = group.elect(3)
    assert (leader.high_watermark, leader.log_end_offset) == (0, 1)
    assert leader.latest_offset() is None
    assert leader.read(0, 100) == (error_codes.NONE, b""), "not yet, but not out of range either"
    group.depose(1)
    fetch(group, 1, 2)
    assert leader.latest_offset() == 1
    assert b"acknowledged" in leader.read(0, 1000).records


def test_dead_follower_leaves_isr_and_blocks_writes(group: Group) -> None:
    leader = group.elect(1)
    group.live.remove(2)
    assert group.look_at_isr() == {1, 3}
    assert append(leader).error_code == error_codes.NONE
    group.live.remove(3)
    assert group.look_at_isr() == {1}
    refused = append(leader)
    assert refused.error_code == error_codes.NOT_ENOUGH_REPLICAS
    assert refused.error_message == "t-0: in sync are [1], min.insync.replicas is 2"
    assert append(leader, acks=1).error_code == error_codes.NONE
    assert leader.high_watermark == 0, "it does not move while too few are in sync"


def test_disconnected_follower_leaves_isr_where_enough_stay(group: Group) -> None:
    leader = group.elect(1)
    append(leader)
    fetch(group, 2, 2)
    assert leader.high_watermark == 0, "3 is in sync, and has not fetched"
    group.gone.add(3)
    assert group.look_at_isr() == {1, 2}
    assert leader.high_watermark == 1
    group.gone.add(2)
    assert group.look_at_isr() == {1, 2}, "min.insync.replicas is 2: nothing is won without it"
    group.gone.clear()
    fetch(group, 3, 3)
    assert group.look_at_isr() == {1, 2, 3}


def test_broker_with_another_disk_is_another_replica(group: Group) -> None:
    """The earlier disk's log says nothing about this one, and neither do its late requests (KIP-903)."""
    leader = group.elect(1)
    append(leader)
    fetch(group, 2, 3, 2)
    late = group.replicas[3].next_fetch()
    assert late is not None
    group.live.remove(3)
    assert group.look_at_isr() == {1, 2}
    group.live.add(3)
    group.replace_disk(3)
    group.fetch(3)
    assert group.look_at_isr() == {1, 2}, "its log is empty"
    fetch_as_replica(leader, 3, late, 1 << 20)
    group.look_at_isr()
    assert group.replicas[3].replica not in group.isr.members
    append(leader)
    fetch(group, 2, 2)
    assert leader.high_watermark == 1, "the dead one may be in the ISR, and does not get there"
    fetch(group, 3, 3, 3)
    group.look_at_isr()
    assert group.isr.members == {on_disk(1), on_disk(2), on_disk(3, disk=1)}
    assert leader.high_watermark == 2


def test_member_lacking_committed_records_leaves_isr_at_once(group: Group) -> None:
    leader = group.elect(1)
    append(leader)
    fetch(group, 2, 3, 2, 3)
    group.replicas[3].log.reset_to(0)
    group.fetch(3)
    assert group.look_at_isr() == {1, 2}


@pytest.mark.parametrize("goes_on", [False, True], ids=["idle", "written to"])
def test_replaced_disk_joins_isr_with_all_committed_records(group: Group, goes_on: bool) -> None:
    """The new leader's high watermark lags, so it does not know yet how much that is (KIP-101)."""
    leader = group.elect(1)
    append(leader)
    fetch(group, 2, 3, 2, 3)
    append(leader)
    fetch(group, 2, 3, 3)
    group.fences[1].live = False
    group.replicas[1].close()
    del group.replicas[1]
    group.live.remove(1)
    leader = group.elect(2)
    assert leader.high_watermark < leader.log_end_offset == 2
    replica = group.replace_disk(3)
    asked = replica.next_fetch()
    assert asked is not None
    first = leader.log.read(0, 1)
    replica.take_fetched(asked, PartitionFetched(0, error_codes.NONE, leader.high_watermark, 0, None, first))
    assert replica.log_end_offset == leader.high_watermark == 1
    if goes_on:
        append(leader)
    group.fetch(3)
    assert group.look_at_isr() == {2}, "it said that it has all below the high watermark, not all that was committed"
    group.fetch(3)
    assert group.look_at_isr() == {2, 3}


def test_follower_without_log_id_is_rejected(group: Group) -> None:
    leader = group.elect(1)
    asked = group.replicas[2].next_fetch()
    assert asked is not None
    refused = fetch_as_replica(leader, 2, asked._replace(replica_directory_id=b""), 1 << 20)
    assert refused.error_code == error_codes.REPLICA_NOT_AVAILABLE


def test_isr_counts_expansion_at_proposal_and_shrink_afterwards(group: Group) -> None:
    leader = group.elect(1)
    group.live.remove(3)
    group.look_at_isr()
    group.live.add(3)
    group.fetch(3)
    replication = leader.replication
    wanted = replication.wanted_isr(group.live)
    assert wanted == frozenset(map(on_disk, (1, 2, 3)))
    replication.isr_proposed(wanted)
    append(leader)
    fetch(group, 2, 2)
    assert leader.high_watermark == 0, "3 may be in the ISR by now, and may be elected"
    replication.isr_settled(Isr(frozenset({on_disk(1), on_disk(2)}), 5))
    assert leader.high_watermark == 1
    append(leader)
    fetch(group, 2, 2)
    replication.isr_proposed(frozenset({on_disk(1)}))
    append(leader)
    assert leader.high_watermark == 2, "2 may still be elected"


def test_isr_without_due_change_is_correct(group: Group) -> None:
    seed = time.time_ns() % (1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    leader = group.elect(1)
    replication, contact = leader.replication, FollowerContact(group.clock)
    append(leader)

    def fetch() -> None:
        follower = chance.choice((2, 3))
        replication.follower_waits_no_more(follower, contact)
        if not group.fetch(follower).records and group.replicas[follower].log_end_offset == leader.log_end_offset:
            contact.heard()
            replication.follower_waits(follower, contact)

    def come_or_go() -> None:
        chance.choice((group.live, group.gone)).symmetric_difference_update({chance.choice((2, 3))})
        group.look_at_isr()

    def grow() -> None:
        for follower in (2, 3):
            replication.follower_waits_no_more(follower, contact)
        append(leader, acks=1)

    def resign() -> None:
        leader.resign()
        group.look_at_isr()
        replication.resume()

    def propose() -> None:
        wanted = frozenset({on_disk(1), *chance.sample([on_disk(2), on_disk(3), on_disk(3, 1)], 2)})
        replication.isr_proposed(wanted)
        group.isr = Isr(chance.choice((wanted, group.isr.members)), group.isr.revision + 1)
        replication.isr_settled(group.isr)

    def pass_time() -> None:
        group.clock.now += chance.choice((0.1, 1.0, ISR_LAG_S / 2))

    steps = [fetch] * 4 + [grow, pass_time, pass_time, come_or_go, resign, propose, contact.heard]
    steps += [lambda: None if chance.random() < 0.9 else group.replace_disk(3) and None]
    not_due = 0
    for _ in range(2000):
        chance.choice(steps)()
        if chance.random() < 0.5:
            group.look_at_isr()
        if not replication.is_isr_due:
            not_due, due_at = not_due + 1, replication._isr_due_at
            assert replication.wanted_isr(group.live, group.gone) is None
            replication._isr_due_at = due_at
    assert not_due > 50


def test_dead_fence_serves_neither_clients_nor_followers(group: Group) -> None:
    leader = group.elect(1)
    append(leader)
    group.fences[1].live = False
    assert not leader.serves_reads()
    assert group.fetch(2).error_code == error_codes.NOT_LEADER_OR_FOLLOWER
    assert leader.replication.follower_progress()[2][0] == -1


def test_late_answer_changes_nothing(group: Group) -> None:
    leader = group.elect(1)
    append(leader)
    follower = group.replicas[2]
    asked = follower.next_fetch()
    assert asked is not None
    late = fetch_as_replica(leader, 2, asked, 1 << 20)
    group.fetch(2)
    assert follower.take_fetched(asked, late)
    assert follower.log_end_offset == 1
    group.restart(1)
    group.elect(3)
    assert follower.take_fetched(asked, late)
    assert follower.log_end_offset == 1


def test_follower_of_another_epoch_gets_an_error(group: Group) -> None:
    leader = group.elect(1)
    asked = group.replicas[2].next_fetch()
    assert asked is not None
    for epoch, error_code in ((-1, error_codes.REPLICA_NOT_AVAILABLE), (1, error_codes.UNKNOWN_LEADER_EPOCH)):
        told = fetch_as_replica(leader, 2, asked._replace(current_leader_epoch=epoch), 100)
        assert told.error_code == error_code
    assert fetch_as_replica(leader, 9, asked, 100).error_code == error_codes.REPLICA_NOT_AVAILABLE


def test_leader_lacking_committed_records_is_not_followed(group: Group) -> None:
    leader = group.elect(1)
    append(leader)
    fetch(group, 2, 3, 2, 3, 2)
    group.restart(1)
    emptied = group.replicas[3]
    emptied.log.reset_to(0)
    group.restart(3)
    leader = group.elect(3)
    append(leader, b"instead", acks=1)
    follower = group.replicas[2]
    group.fetch(2)
    assert "acknowledged records are missing there" in follower.failure
    assert follower.log_end_offset == 1
    assert follower.next_fetch() is None


def test_older_leader_is_not_followed_again(group: Group) -> None:
    group.elect(1)
    group.elect(2)
    follower = group.replicas[3]
    follower.become_follower(1, Leadership(0, 10))
    assert follower.next_fetch() is None
    follower.log.checkpoint(0, follower.leadership)
    reopened = group.restart(3)
    reopened.become_follower(1, Leadership(0, 10))
    assert reopened.next_fetch() is None, "the token is remembered with the log"
    reopened.become_follower(1, Leadership(9, 3))
    assert reopened.next_fetch() is not None, "a restored etcd counts from lower revisions, but its epochs go on"


def test_resend_to_next_leader_is_recognised_and_waits(group: Group) -> None:
    leader = group.elect(1)
    producer = {"producer_id": 4, "producer_epoch": 0, "base_sequence": 0}
    append(leader, b"once", **producer)
    fetch(group, 2, 3)
    group.restart(1)
    leader = group.elect(2)
    assert append(leader, b"once", **producer) == (0, 0, None, 0)
    assert not leader.is_committed(0)
    group.depose(1)
    fetch(group, 1, 3)
    assert leader.is_committed(0)
    assert leader.log_end_offset == 1


async def test_leader_with_dead_fence_acknowledges_nothing(group: Group) -> None:
    leader = group.elect(1)
    append(leader)
    fetch(group, 2, 3, 2, 3)
    append(leader)
    group.live.clear()
    group.look_at_isr()
    assert await leader.wait_for_isr(1, 5) == error_codes.NOT_ENOUGH_REPLICAS_AFTER_APPEND
    group.fences[1].live = False
    assert await leader.wait_for_isr(0, 5) == error_codes.REQUEST_TIMED_OUT


def test_unwritten_epoch_does_not_prevent_following(group: Group) -> None:
    """Its epoch stands only in the checkpoint; an earlier leader wrote records that this replica lacks."""
    append(group.elect(1), b"never seen elsewhere", acks=1)
    group.restart(1)
    idle = group.elect(2)
    idle.log.checkpoint(idle.high_watermark, idle.leadership)
    group.restart(2)
    leader = group.elect(1)
    fetch(group, 2, 2, 2)
    assert group.contents(2) == group.contents(1) != b""
    assert group.replicas[2].log_end_offset == leader.log_end_offset == 1


def test_uncommitted_records_are_not_found_by_timestamp(group: Group) -> None:
    leader = group.elect(1)
    append(leader, timestamp=1000)
    assert (leader.max_timestamp(), leader.find_timestamp(0)) == ((-1, -1), None)
    fetch(group, 2, 3, 2, 3)
    assert (leader.max_timestamp(), leader.find_timestamp(0)) == ((1000, 0), (1000, 0))


def test_refused_replication_is_logged_once_until_success(group: Group) -> None:
    """A follower asks again ten times a second, for perhaps a thousand partitions."""
    leader, follower = group.elect(1), group.replicas[2]
    group.fetch(2)
    with capture_logs() as logs:
        for told in (1, 2):
            for _ in range(3):
                asked = follower.next_fetch()
                assert asked is not None
                assert not follower.take_fetched(asked, PartitionFetched(0, 0, 0, 0, None, bytes(100)))
            assert [each["event"] for each in logs] == ["leader's records refused"] * told
            append(leader)
            group.fetch(2)


def test_failed_append_is_logged_once_until_success(group: Group) -> None:
    leader = group.elect(1)
    with file_size_limited(10_000), capture_logs() as logs:
        for told in (1, 2):
            for _ in range(3):
                assert append(leader, bytes(100_000), acks=1).error_code == error_codes.KAFKA_STORAGE_ERROR
            assert [each["event"] for each in logs] == ["append failed"] * told
            assert append(leader, acks=1).error_code == error_codes.NONE


@contextmanager
def file_size_limited(size_in_bytes: int) -> Iterator[None]:
    """Let the system refuse writes beyond a file size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_in_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _lead(replica: Partition) -> None:
    replica.become_leader(Leadership(9, 99), (1, 2, 3), replica.replication.isr, Fence(), KeptFence())


@pytest.mark.parametrize("role", [Role.LEADER, Role.RESIGNED, Role.CLOSED])
@pytest.mark.parametrize(
    "become",
    [
        _lead,
        lambda replica: replica.become_follower(2, Leadership(9, 99)),
        lambda replica: replica.replication.become_leader(9, 1, (1, 2, 3), replica.replication.isr),
        lambda replica: replica.replication.become_follower(2, 9),
    ],
    ids=["lead", "follow", "the manager leads", "the manager follows"],
)
def test_only_a_follower_may_take_another_role(group: Group, role: Role, become: Callable[[Partition], None]) -> None:
    """A leader that became a follower would keep its state in memory, and answer with another's id."""
    replica = group.elect(1)
    append(replica, b"record")
    if role is Role.RESIGNED:
        replica.resign()
    elif role is Role.CLOSED:
        replica.close()
    before = (replica.role, replica.leader_id, replica.leadership, replica.log.leader_epochs.entries())
    with pytest.raises(WrongRole):
        become(replica)
    assert (replica.role, replica.leader_id, replica.leadership, replica.log.leader_epochs.entries()) == before
    assert replica.replication.leader_epoch == group.leadership.leader_epoch


def test_follower_learns_of_leaders_read_error(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower that did not get the missing records has not caught up."""
    leader = group.elect(1)
    group.fetch(2)
    append(leader)
    asked = group.replicas[2].next_fetch()
    assert asked is not None
    before = leader.replication.follower_progress()[2]

    def refuse(*_: object, **__: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(leader.log, "read", refuse)
    group.clock.now += 1.0
    told = fetch_as_replica(leader, 2, asked, 1 << 20)
    assert (told.error_code, told.records) == (error_codes.KAFKA_STORAGE_ERROR, b"")
    assert leader.replication.follower_progress()[2] == (before[0], before[1] + 1.0)
    monkeypatch.undo()
    assert fetch_as_replica(leader, 2, asked, 1 << 20).records == group.contents(1)
