"""The demo chooses the broker to kill and the time, and follows the partitions in etcd."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from kproxy.demo.owner_kill import OwnerNotKilled, StreamGate, TakeOvers, owner_of_most
from kproxy.etcd import KeyValue

WAIT_S = 60.0


@pytest.mark.parametrize(
    ("owners", "victim"),
    [
        pytest.param({0: 3, 1: 2, 2: 3}, 3, id="the one with most"),
        pytest.param({0: 3, 1: 2, 2: 3, 3: 2}, 2, id="of two the one with the lower id"),
    ],
)
def test_owner_of_most_partitions_is_killed(owners: Mapping[int, int], victim: int) -> None:
    assert owner_of_most(owners) == victim


def test_missing_owner_means_no_kill() -> None:
    with pytest.raises(OwnerNotKilled):
        owner_of_most({})


async def test_mid_stream_begins_with_second_micro_batch() -> None:
    stream = StreamGate(3, asyncio.get_running_loop())
    stream.before_batch(0)
    await asyncio.sleep(0)
    assert not stream.reached.is_set()
    stream.advance_to(100)
    await asyncio.wait_for(stream.reached.wait(), WAIT_S)
    assert stream.rows == 100


async def test_last_micro_batch_alone_waits_for_the_kill() -> None:
    stream = StreamGate(3, asyncio.get_running_loop())
    stream.before_batch(0)
    stream.before_batch(1)

    last = asyncio.ensure_future(asyncio.to_thread(stream.before_batch, 2))
    # The kill is due by now, however fast the stream was.
    await asyncio.wait_for(stream.reached.wait(), WAIT_S)
    await asyncio.wait([last], timeout=0.1)
    assert not last.done()
    stream.release()
    await asyncio.wait_for(last, WAIT_S)


def leases(**brokers: int) -> dict[int, KeyValue]:
    """By `p<partition>` the broker, and its lease's revision above the last digit."""
    return {int(name[1:]): KeyValue("", b"%d" % (value % 10), value, value, 1, 1) for name, value in brokers.items()}


def test_partition_is_taken_when_its_lease_changes() -> None:
    take_overs = TakeOvers(leases(p0=1, p1=1))
    assert not take_overs.note(leases(p0=1, p1=1, p2=2), 3.0)
    assert not take_overs.note(leases(p2=13), 4.0)  # not one of those that are waited for
    assert take_overs.at == {}
    assert not take_overs.note(leases(p0=22), 4.5)
    # What comes after the first taking is another story; the same broker with a new lease has taken it anew.
    assert take_overs.note(leases(p0=33, p1=31), 5.0)
    assert take_overs.at == {0: 4.5, 1: 5.0}
    assert take_overs.owners == {0: 2, 1: 1}
