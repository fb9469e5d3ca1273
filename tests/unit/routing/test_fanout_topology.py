"""Scripts for the fan-out: the effects of topology changes, and requests that enter from the plain path."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kproxy.routing.merge import ExchangeState
from tests.support.models.playbook import Playbook, piped, proven

UNKNOWN_TOPIC_ID = 100


# During a request


def test_only_the_moved_partition_of_piece_waits() -> None:
    play = Playbook({"t": [1, 1]})
    play.submits(1, "t-0 t-1")
    play.answers(1, "t-0 t-1")
    play.submits(2, "t-0 t-1")
    assert play.moves("t-0", 2) == []
    assert play.lanes == ["t-0 blocked"]
    assert play.submits(3, "t-0 t-1") == ["send #3 b1/c1: 3 t-1"]
    assert play.answers(2, "t-0 t-1") == ["answer 2: t-0@20 t-1@20"]
    assert play.wakes() == ["send #4 b2/c2: 3 t-0"]


def test_older_revision_blocks_requests_in_flight() -> None:
    play = proven()
    play.moves("t-1", 1, revision=20)
    play.submits(2, "t-0")
    # A read of t-1 alone was faster than the watch, which brings the change only now.
    play.moves("t-0", 1, revision=5)
    assert play.lanes == ["t-0 blocked"]
    assert play.submits(3, "t-0") == []
    assert play.answers(2, "t-0") == ["answer 2: t-0@20"]
    assert play.wakes() == ["send #3 b1/c1: 3 t-0"]


def test_each_of_several_requests_is_checked_for_moves() -> None:
    play = Playbook({"t": [1], "u": [1]})
    play.submits(1, "t-0 u-0")
    play.answers(1, "t-0 u-0")
    for n, topic in enumerate("utu", 2):
        play.submits(n, f"{topic}-0")
    play.moves("t-0", 2)
    assert play.lanes == ["t-0 blocked"]
    assert play.submits(5, "t-0") == []
    assert play.answers(3, "t-0") == ["answer 3: t-0@30"]
    assert play.wakes() == ["send #5 b2/c2: 5 t-0"]


def test_move_of_unrequested_partition_changes_nothing() -> None:
    play = piped(2)
    assert play.moves("t-1", 1) == []
    assert play.moves("u-0", 1) == []
    assert play.lanes == []
    assert play.proven("t-0")


def test_reads_do_not_wait_for_former_owners_answers() -> None:
    play = Playbook()
    play.fetches(1, "t-0")
    assert play.moves("t-0", 2) == ["send #2 b2/c2: 1 t-0"]
    assert play.lanes == []


def test_removed_broker_gets_nothing_and_is_awaited() -> None:
    play = piped(2)
    assert play.removes(1) == []
    assert play.lanes == ["t-0 blocked"]
    assert play.submits(3, "t-0") == []
    # The shell closes its connection.
    assert play.loses(1) == []
    assert play.aside == ["reread t-0", "retried CONNECTION_LOST of b1", "wake in 21 ms"]
    play.moves("t-0", 2)
    assert play.wakes() == ["send #3 b2/c2: 2 t-0"]
    assert play.answers(3, "t-0") == ["answer 2: t-0@30", "send #4 b2/c2: 3 t-0"]


def test_route_to_removed_broker_is_forgotten() -> None:
    """Otherwise requests of the plain path would go there, but those of the core would not."""
    play = proven("t-0 t-1")
    play.removes(1)
    assert not play.proven("t-0")
    assert play.proven("t-1")


def test_removed_broker_proves_no_route() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    play.removes(1)
    assert play.answers(1, "t-0") == ["answer 1: t-0@10"]
    assert not play.proven("t-0")


def test_removed_broker_without_successor_lets_requests_expire() -> None:
    play = proven()
    play.submits(2, "t-0", producer=None)
    play.removes(1)
    assert play.loses(1, unwritten=[2]) == []
    assert play.wakes() == []
    assert play.wakes() == ["answer 2: t-0=6"]


def test_owner_changing_its_address_keeps_the_order() -> None:
    play = piped(2, 3)
    assert play.readdresses(1) == []
    assert play.proven("t-0")
    assert play.loses(1) == []
    assert play.submits(4, "t-0") == []
    assert play.wakes() == ["send #4 b1/c2: 2 t-0"]
    assert play.answers(4, "t-0") == ["answer 2: t-0@40", "send #5 b1/c2: 3 t-0", "send #6 b1/c2: 4 t-0"]


def test_change_is_applied_before_the_next_send() -> None:
    play = piped(2)
    play.topology.set_owner(b"t", 0, 2, play.topology.revision + 1)
    assert play.submits(3, "t-0") == []
    assert play.lanes == ["t-0 blocked"]


def test_topology_change_concerns_plain_path_before_it_applies() -> None:
    play = proven()
    concerned = []
    for partition in (1, 0):
        play.topology.set_owner(b"t", partition, 3, play.topology.revision + 1)
        concerned.append(play.core.is_concerned)
    assert concerned == [False, True]


# During a back-off


def test_first_back_off_ends_at_a_new_owner() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    play.answers(1, "t-0=6")
    assert play.wakes_in_ms() == 21
    play.waits(0.01)
    play.moves("t-0", 2)
    assert play.wakes_in_ms() == 1
    assert play.wakes() == ["send #2 b2/c2: 1 t-0"]


def test_later_back_off_ends_at_new_owners_pace() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    for piece in (1, 2, 3):
        play.answers(piece, "t-0=19")
        if piece < 3:
            play.wakes()
    assert play.wakes_in_ms() == 251
    play.moves("t-0", 2)
    assert play.wakes_in_ms() == 21
    assert play.wakes() == ["send #4 b2/c2: 1 t-0"]


def test_repeated_owner_ends_a_back_off_too() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    play.answers(1, "t-0=6")
    play.moves("t-0", 2, 1)
    assert play.wakes_in_ms() == 1


def test_unrelated_news_does_not_end_a_back_off() -> None:
    play = Playbook(offers_unowned=False)
    play.submits(1, "t-0")
    for piece in (1, 2):
        play.answers(piece, "t-0=19")
        if piece == 1:
            play.wakes()
    for partition, owner in (("t-1", 1), ("u-0", 1), ("t-0", None)):
        play.moves(partition, owner)
        assert play.wakes_in_ms() == 101
    play.moves("t-0", 2)
    assert play.wakes_in_ms() == 21


def test_move_during_awaited_answer_ends_no_back_off() -> None:
    play = piped(2, 3)
    play.answers(2, "t-0=6")
    play.moves("t-0", 2)
    assert play.wakes_in_ms() is None
    play.answers(3, "t-0=6")
    assert play.wakes() == ["send #4 b2/c2: 2 t-0"]


# Topic ids


def test_unknown_topic_id_gets_an_error_alone() -> None:
    play = Playbook({"u": [1]})
    play.names("u")
    assert play.submits(1, "t-0 t-4 u-0", by_id=True) == ["send #1 b1/c1: 1 u-0"]
    assert [each for each in play.aside if "reread" in each] == ["reread t?-0", "reread t?-4"]
    assert play.answers(1, "u-0") == []
    play.wakes()
    assert play.wakes() == ["answer 1: t?-0=100 t?-4=100 u-0@10"]


def test_batch_awaiting_an_id_keeps_its_place() -> None:
    play = Playbook()
    assert play.submits(1, "t-0", by_id=True) == []
    assert play.names("t") == []
    assert [play.submits(n, "t-0", by_id=n == 2) for n in (2, 3)] == [[], []]
    assert play.lanes == ["t-0 blocked"]
    assert play.wakes() == ["send #1 b1/c1: 1 t-0"]
    assert play.answers(1, "t-0") == ["answer 1: t-0@10", "send #2 b1/c1: 2 t-0", "send #3 b1/c1: 3 t-0"]


def test_partition_keeps_order_under_either_name() -> None:
    """franz-go names topics by id if it knows all ids of a request, and otherwise by name."""
    play = Playbook()
    play.names("t")
    play.submits(1, "t-0", by_id=True)
    assert play.submits(2, "t-0") == []
    assert play.answers(1, "t-0") == ["answer 1: t-0@10", "send #2 b1/c1: 2 t-0"]
    assert play.submits(3, "t-0", by_id=True) == ["send #3 b1/c1: 3 t-0"]
    play.moves("t-0", 2)
    assert play.lanes == ["t-0 blocked"]
    assert play.answers(2, "t-0=6") == []
    assert play.answers(3, "t-0=6") == []
    assert play.wakes() == ["send #4 b2/c2: 2 t-0"]


def test_topic_named_by_id_and_name_keeps_order() -> None:
    """Batches of one partition wait under two names; when these prove to be one topic, they are sent in order."""
    play = Playbook()
    assert play.submits(1, "t-0", by_id=True) == []
    assert play.submits(2, "t-0") == ["send #1 b1/c1: 2 t-0"]
    assert play.lanes == ["t?-0 blocked", "t-0 probing"]
    play.names("t")
    assert play.lanes == ["t-0 blocked"]
    assert play.submits(3, "t-0") == []
    # The second batch was appended before the first, so the client must send the waiting one again, in order.
    assert play.answers(1, "t-0") == ["answer 1: t-0=100", "answer 2: t-0@10", "answer 3: t-0=6"]


def test_merged_lanes_wait_for_the_longer_time() -> None:
    play = Playbook()
    play.submits(1, "t-0", by_id=True)
    play.submits(2, "t-0")
    play.answers(1, "t-0=19")
    play.wakes()
    # One waits 100 ms because its topic has no name; the other is refused again, and waits as long from now on.
    assert play.answers(2, "t-0=19") == []
    play.names("t")
    assert play.lanes == ["t-0 blocked"]
    assert play.wakes() == ["send #3 b1/c1: 1 t-0"]
    assert play.answers(3, "t-0") == ["answer 1: t-0@30", "send #4 b1/c1: 2 t-0"]


def test_merged_lanes_give_up_batches_of_either() -> None:
    """The batch sent by name reached its deadline: later batches sent by id must not come first."""
    play = Playbook()
    play.submits(1, "t-0", deadline_s=0.005)
    play.submits(2, "t-0", by_id=True)
    assert play.ticks(after_s=0.005) == ["answer 1: t-0=7"]
    assert play.names("t") == ["answer 2: t-0=100"]
    assert play.lanes == ["t-0 blocked"]
    # The broker never received the first batch, so the client sends both again.
    assert play.loses(1, unwritten=[1]) == []
    assert play.lanes == []


def test_batch_behind_taken_back_one_goes_at_deadline() -> None:
    """Its own back-off ended long ago, so it is sent as soon as it may be."""
    play = Playbook(dials=True)
    play.submits(1, "t-0", by_id=True)
    play.submits(2, "t-0", deadline_s=0.5)
    play.names("t")
    assert play.wakes() == []
    assert play.ticks(after_s=0.5) == ["withdraw #1 from c1", "answer 2: t-0=6"]
    assert play.wakes_in_ms() == 1
    assert play.wakes() == ["send #2 b1/c1: 1 t-0"]


def test_id_of_recreated_topic_leads_to_it() -> None:
    play = Playbook()
    play.names("t")
    play.submits(1, "t-0", by_id=True)
    assert play.answers(1, "t-0") == ["answer 1: t-0@10"]
    play.topology.set_topic_id(b"t", bytes([255]) * 16)
    assert play.submits(2, "t-0", by_id=True) == []
    play.wakes()
    assert play.wakes() == [f"answer 2: t?-0={UNKNOWN_TOPIC_ID}"]


def test_name_is_looked_up_for_refused_id() -> None:
    play = Playbook()
    told = play.submits(1, "t-0", by_id=True, refused={"t?-0": UNKNOWN_TOPIC_ID})
    assert told == [f"answer 1: t?-0={UNKNOWN_TOPIC_ID}"]
    assert "reread t?-0" in play.aside


def test_refused_id_holds_back_batches_under_its_name() -> None:
    play = Playbook()
    play.submits(1, "t-0", by_id=True, refused={"t?-0": UNKNOWN_TOPIC_ID})
    play.names("t")
    assert play.submits(2, "t-0", by_id=True) == ["answer 2: t-0=6"]
    assert play.submits(3, "t-0", by_id=True, producer=(7, 0, 1)) == ["send #1 b1/c1: 3 t-0"]


def test_remembered_ids_are_bounded() -> None:
    play = Playbook()
    play.view.max_nameless = 1
    play.submits(1, "t-0", by_id=True)
    play.submits(2, "u-0", by_id=True)
    play.moves("u-0", 1)
    play.names("u")
    play.names("t")
    assert play.wakes() == ["send #1 b1/c1: 2 u?-0"]
    assert play.wakes() == ["send #2 b1/c1: 1 t-0"]
    assert play.answers(1, "u-0") == ["answer 2: u?-0@10"]


def test_request_under_forgotten_id_gets_its_name() -> None:
    """The id was one too many to be remembered, but the request was sent under it."""
    play = Playbook()
    play.view.max_nameless = 1
    play.submits(1, "t-0", by_id=True)
    play.submits(2, "u-0", by_id=True)
    play.moves("u-0", 1)
    play.names("u")
    play.names("t")
    assert play.wakes() == ["send #1 b1/c1: 2 u?-0"]
    play.topology.set_topic_id(b"u", None)
    assert play.submits(3, "u-0", by_id=True) == []
    play.names("u")
    assert play.lanes == ["t-0 blocked", "u-0 probing"]
    assert play.answers(1, "u-0") == ["answer 2: u-0@10", "send #2 b1/c1: 3 u-0"]


def test_resolved_id_makes_room_for_another() -> None:
    play = Playbook()
    play.view.max_nameless = 1
    for n, topic in enumerate("tu", 1):
        play.submits(n, f"{topic}-0", by_id=True)
        play.names(topic)
    assert play.lanes == ["t-0 blocked", "u-0 blocked"]


# Batches from the plain path


def with_a_lane(play: Playbook) -> None:
    play.submits(3, "t-2")


def with_a_batch_that_may_come_again(play: Playbook) -> None:
    play.submits(3, "t-0")
    play.answers(3, "t-0=56")
    assert play.lanes == []


def with_partitions_that_count(play: Playbook) -> None:
    play.fetches(3, "t-0 t-1")
    assert play.core.open_partitions == 2
    assert play.lanes == []


@pytest.mark.parametrize("change", [with_a_lane, with_a_batch_that_may_come_again, with_partitions_that_count])
def test_each_core_concern_blocks_the_compiled_path(
    change: Callable[[Playbook], None],
) -> None:
    play = proven("t-0 t-1")
    lanes, refused, exchanges = play.core.gate
    assert not lanes
    assert not refused
    assert not exchanges.partitions
    change(play)
    assert lanes or refused or exchanges.partitions


def test_entered_request_takes_its_place_in_order() -> None:
    play = proven("t-0 t-1")
    play.passes(2, "t-0")
    assert play.submits(3, "t-2") == ["send #3 b3/c3: 3 t-2"]
    assert [exchange.sequence for exchange in play.core._exchanges] == [3]
    assert play.adopts() == [4]
    assert [exchange.sequence for exchange in play.core._exchanges] == [2, 3]
    assert play.answers(4, "t-0") == ["answer 2: t-0@40"]


def test_entered_pieces_are_numbered_in_order() -> None:
    play = proven("t-0 t-1")
    assert play.passes(2, "t-0 t-1") == ["plain c1: 2 t-0", "plain c2: 2 t-1"]
    assert play.passes(3, "t-1") == ["plain c2: 3 t-1"]
    assert play.adopts() == [3, 4, 5]
    assert [play.pieces[n].connection.number for n in (3, 4, 5)] == [1, 2, 2]


def partly() -> Playbook:
    """Request 2 has entered with the result of t-0; t-1 is piece 3."""
    play = proven("t-0 t-1")
    play.passes(2, "t-0 t-1")
    play.passes_back(2, 1, "t-0@77")
    assert play.adopts() == [3]
    assert play.exchanges[2].open_count == 1
    return play


def test_existing_results_are_kept() -> None:
    assert partly().answers(3, "t-1") == ["answer 2: t-0@77 t-1@30"]


@pytest.mark.parametrize("is_lost", [False, True])
def test_entered_request_is_resent(is_lost: bool) -> None:
    play = partly()
    assert (play.loses(2) if is_lost else play.answers(3, "t-1=6")) == []
    assert play.wakes() == [f"send #4 b2/c{3 if is_lost else 2}: 2 t-1"]
    assert play.answers(4, "t-1") == ["answer 2: t-0@77 t-1@40"]


def test_entered_request_is_awaited_on_a_move() -> None:
    play = partly()
    play.moves("t-1", 3)
    assert play.submits(3, "t-1") == []
    assert play.answers(3, "t-1") == ["answer 2: t-0@77 t-1@30"]
    assert play.wakes() == ["send #4 b3/c3: 3 t-1"]


def test_entered_request_is_answered_at_its_deadline() -> None:
    play = partly()
    assert play.ticks(after_s=10) == ["answer 2: t-0@77 t-1=7"]
    assert play.lanes == ["t-1 blocked"]
    assert play.submits(3, "t-1", producer=(7, 0, 2)) == []
    assert play.answers(3, "t-1") == []
    assert play.wakes() == ["send #4 b2/c2: 3 t-1"]


def test_plain_request_behind_expired_batch_is_given_up() -> None:
    """The first waited for its route to be proven, the second did not."""
    play = Playbook()
    play.submits(1, "t-0")
    play.submits(2, "t-0", deadline_s=1)
    assert play.answers(1, "t-0") == ["answer 1: t-0@10", "send #2 b1/c1: 2 t-0"]
    assert play.passes(3, "t-0") == ["plain c1: 3 t-0"]
    assert play.ticks(after_s=1) == ["answer 2: t-0=7"]
    assert play.loses(1) == ["answer 3: t-0=7"]
    assert play.lanes == []


def test_idle_tick_leaves_the_plain_path_alone() -> None:
    play = proven()
    play.fetches(2, "t-0")
    play.passes(3, "t-0")
    assert play.ticks(after_s=1) == []
    assert list(play.pieces) == [2]


def test_entered_request_is_dropped_with_its_client() -> None:
    play = partly()
    assert play.closes() == ["drop 2"]
    assert play.exchanges[2].state is ExchangeState.DROPPED
    assert play.answers(3, "t-1") == []


def test_relevant_change_makes_plain_requests_enter_first() -> None:
    play = proven()
    play.passes(2, "t-0")
    assert play.moves("t-0", 2) == []
    assert play.submits(3, "t-0") == []
    assert play.answers(2, "t-0=6") == []
    assert play.wakes() == ["send #3 b2/c2: 2 t-0"]
    assert play.answers(3, "t-0") == ["answer 2: t-0@30", "send #4 b2/c2: 3 t-0"]


def test_state_of_the_plain_path_is_reported() -> None:
    play = Playbook()
    lanes, _, _ = play.core.gate
    play.submits(1, "t-0")
    quiet = [not lanes]
    play.answers(1, "t-0")
    quiet.append(not lanes)
    play.submits(2, "t-0")
    play.answers(2, "t-0=6")
    quiet.append(not lanes)
    assert quiet == [False, True, False]
