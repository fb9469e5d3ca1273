"""The demo chooses the broker to kill and the time, and follows the partitions in etcd."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Mapping

import pytest

from kproxy.broker.cluster import NO_OWNER, ClusterView
from kproxy.broker.keys import Keys, TopicValue, encode_value
from kproxy.demo.owner_kill import OwnerNotKilled, StreamGate, TakeOvers, owner_of_most
from kproxy.etcd import KeyValue, WatchEvent

TOPIC = "flights"
KEYS = Keys("/k")
WAIT_S = 60.0


@pytest.mark.parametrize(
    ("owners", "victim"),
    [
        pytest.param({0: 3, 1: 2, 2: 3}, 3, id="the one with most"),
        pytest.param({0: 3, 1: 2, 2: 3, 3: 2}, 2, id="of two the one with the lower id"),
        pytest.param({0: NO_OWNER, 1: NO_OWNER, 2: 1}, 1, id="nobody is no owner"),
    ],
)
def test_the_owner_of_most_partitions_is_killed(owners: Mapping[int, int], victim: int) -> None:
    assert owner_of_most(owners) == victim


@pytest.mark.parametrize("owners", [{}, {0: NO_OWNER}])
def test_missing_owner_means_no_kill(owners: Mapping[int, int]) -> None:
    with pytest.raises(OwnerNotKilled):
        owner_of_most(owners)


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


def view_of(leases: Mapping[int, int]) -> tuple[ClusterView, Callable[..., None]]:
    """A view of partitions on the given leases, whose last digit is their broker; and a function that changes it."""
    view, revisions = ClusterView(KEYS), itertools.count(10)
    topic = TopicValue(uuid.uuid4(), [[1, 2, 3] for _ in leases], {})
    view.apply_put(KEYS.topic(TOPIC), encode_value(topic), lease_id=0, revision=next(revisions))

    def change(partition: int, lease_id: int | None) -> None:
        key, revision = KEYS.lease(TOPIC, partition), next(revisions)
        value = b"" if lease_id is None else b"%d" % (lease_id % 10)
        event = WatchEvent(lease_id is None, KeyValue(key, value, revision, revision, 1, lease_id or 0))
        view.on_events([event], revision)

    for partition, lease_id in leases.items():
        change(partition, lease_id)
    return view, change


def test_partition_is_taken_when_its_lease_changes() -> None:
    view, change = view_of({0: 1, 1: 1, 2: 2})
    now = 0.0
    take_overs = TakeOvers(view, TOPIC, [0, 1], lambda: now)
    assert not take_overs.are_complete()

    now = 4.0
    change(0, None)
    change(1, None)
    change(2, 3)  # not one of the awaited partitions
    assert take_overs.at == {}
    now = 4.5
    change(0, 2)
    now = 5.0
    change(1, 3)
    now = 6.0
    change(0, 3)  # changes after the first takeover do not matter
    assert take_overs.are_complete()
    assert take_overs.at == {0: 4.5, 1: 5.0}
    assert take_overs.owners == {0: 2, 1: 3}
    assert take_overs.last_at == 5.0


def test_new_lease_of_same_broker_counts_as_taking() -> None:
    view, change = view_of({0: 1})
    take_overs = TakeOvers(view, TOPIC, [0], lambda: 7.0)
    change(0, 11)
    assert take_overs.at == {0: 7.0}
    assert take_overs.owners == {0: 1}
