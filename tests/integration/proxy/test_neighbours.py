"""Known faults of comparable projects, and the test that would catch each of them.

They are KafScale's Go proxy and broker, unless named otherwise. Every entry names tests as module:function; this module
checks that they exist.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from kproxy.routing.rendezvous import preferred
from tests.support.clients.raw_client import produce_frame
from tests.support.scene import ANSWERS, HOLDS, T0, Scene, scene
from tests.support.waiting import eventually

TESTS = Path(__file__).parents[2]

CAUGHT_BY: dict[str, list[str]] = {
    "watch opened without a revision": ["test_etcd_mirror:test_change_between_load_and_watch_is_seen"],
    "no require-leader": ["test_etcd_mirror:test_watch_that_goes_quiet_is_replaced"],
    "retries shared between the groups of one attempt: one partition stalled": [
        "test_fanout_retries:test_partitions_retry_each_by_itself"
    ],
    "a valid route deleted by an invalidation": [
        "test_lease_table:test_refusal_is_answered_by_current_etcd_state",
        "test_fanout_retries:test_newer_owner_is_not_looked_up",
        "test_neighbours:test_refusals_do_not_cost_the_route",
    ],
    "acks=0 lost after an invalidation": ["test_neighbours:test_refusals_do_not_cost_the_route"],
    "one hung broker starved the others' partitions": [
        "test_proxy_breaker:test_hung_broker_does_not_starve_other_partitions",
        "test_proxy_clients:test_broker_not_reading_slows_only_its_client",
    ],
    "all unowned partitions piled on one broker": [
        "test_neighbours:test_unowned_partitions_are_spread_over_brokers",
    ],
    "correlation ids not checked": [
        "test_proxy_forwarding:test_broker_breaking_protocol_loses_only_that_connection",
        "test_proxy_forwarding:test_unrequested_answer_closes_its_connection",
    ],
    "a frame header of 2 GiB allocated unread": [
        "test_proxy_clients:test_length_of_2_gib_costs_no_memory",
        "test_framing:test_announced_bytes_are_allocated_only_on_arrival",
    ],
    "no InitProducerId": [
        "test_broker_apis:test_producer_ids_are_given_out_once",
        "test_kafscale_layout:test_two_proxies_never_issue_the_same_producer_id",
    ],
    "SIGTERM ignored while a client is connected": [
        "test_dev:test_ctrl_c_stops_dev_despite_connected_client",
        "test_broker_ownership:test_sigterm_stops_broker_despite_waiting_fetch",
    ],
    "released a successor's lease key": ["test_broker_ownership:test_releasing_leaves_a_successors_key_alone"],
    "ownership A, B, A reused offsets": ["test_broker_leases_alone:test_partition_lost_and_retaken_reads_its_log_anew"],
    "a broker stopped past its TTL acknowledged": ["test_zombie:test_leader_stopped_past_its_lease_keeps_nothing"],
    "two processes under one id both owned": ["test_broker_ownership:test_second_process_under_one_id_gives_up"],
    "synthesised errors carried offset 0 and a bogus leader": [
        "test_fanout_retries:test_every_table_row_is_followed",
        "test_fanout_retries:test_passed_on_entry_is_the_brokers_own",
        "test_proxy_control:test_no_answer_with_data_names_a_broker",
    ],
    "a re-encoded request carried its length twice": [
        "test_codec_messages:test_parts_together_are_the_whole_request",
        "test_proxy_forwarding:test_request_over_three_owners_is_split_and_merged",
    ],
    "a partition out of range span a core for ever": [
        "test_topology:test_partition_index_out_of_range_is_refused",
        "test_neighbours:test_missing_partition_is_tried_boundedly",
    ],
    "Shotover: a killed broker closes the whole client connection": [
        "test_proxy_resets:test_broker_may_break_off_anywhere_in_its_answer",
        "test_fanout_retries:test_refusal_does_not_settle_an_unknown_outcome",
    ],
    "Shotover: no frame limit": [
        "test_framing:test_illegal_length_costs_nothing",
        "test_proxy_clients:test_bad_input_closes_that_connection_and_no_other",
    ],
    "Kroxylicious, kafka-proxy: health says OK with the broker dead": [
        "test_readiness:test_proxy_is_unready_until_a_broker_returns"
    ],
    "Kroxylicious, kafka-proxy: no proxy latency metric": [
        "test_metrics:test_produce_is_timed_from_first_byte_to_answer",
        "test_metrics:test_event_loop_delay_is_measured",
    ],
}


@pytest.mark.parametrize("bug", CAUGHT_BY)
def test_neighbours_bug_has_its_test(bug: str) -> None:
    assert CAUGHT_BY[bug]
    for name in CAUGHT_BY[bug]:
        module, _, function = name.partition(":")
        [file] = TESTS.rglob(f"{module}.py")
        found = import_module(".".join(file.relative_to(TESTS.parent).with_suffix("").parts))
        test: Callable[..., object] = getattr(found, function)
        assert callable(test)


@scene(HOLDS, ANSWERS, owners=[1])
async def test_refusals_do_not_cost_the_route(s: Scene) -> None:
    """A refusal triggers a lookup of the owner; it deletes nothing, and the table is used again."""
    s.send(produce_frame())
    (await s.next()).answer(results={T0: 6})
    s.broker.script = ANSWERS
    assert await s.codes() == {T0: 0}
    assert await s.ask(*[produce_frame()] * 20) == [{T0: 0}] * 20
    assert s.proxy.retries(6) == 1
    s.send(*[produce_frame(acks=0)] * 40)
    await eventually(lambda: len(s.broker.log) == 2 + 20 + 40)
    assert all(asked.fields["acks"] == 0 for asked in s.broker.log[22:])
    assert s.brokers[1].log == []
    assert s.proxy.counters["acks0.undeliverable"] == 0


def test_unowned_partitions_are_spread_over_brokers() -> None:
    chosen = [preferred(b"t/%d" % partition, (1, 2, 3)) for partition in range(300)]
    assert all(60 < chosen.count(broker) < 140 for broker in (1, 2, 3))


@scene(lambda asked: asked.answer(results=dict.fromkeys(asked.partitions, 3)), owners=())
async def test_missing_partition_is_tried_boundedly(s: Scene) -> None:
    for count, partition in enumerate((-1, -(2**31), 999_999, 1_000_000, 2**31 - 1), 1):
        assert await s.ask(produce_frame({"t": [partition]})) == [{("t", partition): 3}]
        assert len(s.broker.log) == count
