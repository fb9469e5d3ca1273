"""The brokers that may take a partition, and their order."""

from __future__ import annotations

import uuid

import pytest

from kproxy.broker.cluster import ClusterView, Topic
from kproxy.broker.election import NOT_A_CANDIDATE, candidate_place, is_in_sync, was_led
from kproxy.broker.keys import Keys, StateValue, TopicValue, encode_value
from kproxy.etcd import KeyValue, Snapshot
from tests.support.brokers.replica_group import broker_value, on_disk

KEYS = Keys("/candidates")
TOPIC_ID = uuid.uuid4()


def view_of(
    live: list[int], replicas: list[int], isr: list[int] | None, *, leader_epoch: int = 3
) -> tuple[ClusterView, Topic]:
    """One partition with these replicas; without a state if `isr` is None."""
    kvs = [KeyValue(KEYS.broker(each), encode_value(broker_value(each)), 1, 1, 1, 7) for each in live]
    kvs.append(KeyValue(KEYS.topic("t"), encode_value(TopicValue(TOPIC_ID, [replicas], {})), 2, 2, 1, 0))
    if isr is not None:
        state = encode_value(StateValue(leader_epoch, [on_disk(each) for each in isr], TOPIC_ID))
        kvs.append(KeyValue(KEYS.state("t", 0), state, 3, 3, 1, 0))
    view = ClusterView(KEYS)
    view.on_snapshot(Snapshot(3, 1, kvs))
    return view, view.topics["t"]


@pytest.mark.parametrize(
    ("live", "replicas", "isr", "places", "with_dead"),
    [
        ([1, 2, 3], [2, 3, 1], [1, 2, 3], {1: 2, 2: 0, 3: 1, 4: -1}, {1: 2, 2: 0, 3: 1}),
        ([1, 3], [2, 3, 1], [1, 2, 3], {1: 1, 3: 0}, {1: 2, 3: 1}),
        ([1, 2, 3], [2, 3, 1], [1], {1: 0, 2: -1, 3: -1}, {1: 0, 2: -1, 3: -1}),
        ([2, 3], [2, 3, 1], [1], {2: -1, 3: -1}, {2: -1, 3: -1}),
        # A broker that is not among the topic's replicas keeps no replica.
        ([1, 2, 4], [2, 3, 1], [1, 2, 4], {1: 1, 2: 0, 4: -1}, {1: 1, 2: 0, 4: -1}),
    ],
)
def test_candidate_has_a_place_by_replica_order(
    live: list[int], replicas: list[int], isr: list[int], places: dict[int, int], with_dead: dict[int, int]
) -> None:
    view, topic = view_of(live, replicas, isr)
    assert {each: candidate_place(view, topic, 0, each, count_dead=False) for each in places} == places
    assert {each: candidate_place(view, topic, 0, each, count_dead=True) for each in with_dead} == with_dead


def test_lost_state_prevents_leading() -> None:
    view, topic = view_of([1, 2, 4], [1, 2], None)
    assert {candidate_place(view, topic, 0, each, count_dead=False) for each in (1, 2, 4)} == {NOT_A_CANDIDATE}
    assert not is_in_sync(view, topic, 0, on_disk(1))


def test_unled_partition_belongs_to_its_first_replica() -> None:
    view, topic = view_of([2, 4], [1, 2], [1, 2], leader_epoch=-1)
    assert [candidate_place(view, topic, 0, each, count_dead=False) for each in (2, 4)] == [0, NOT_A_CANDIDATE]
    assert [is_in_sync(view, topic, 0, each) for each in (on_disk(2), on_disk(2, 1))] == [True, False]
    assert not was_led(view, topic, 0)
