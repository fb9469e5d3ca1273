"""Scripts for the fan-out: deadlines, connections to brokers that end, and requests without an answer (acks=0)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kproxy.routing import in_flight
from kproxy.routing.in_flight import WINDOW_S, ConnectionState
from kproxy.routing.lanes import LaneState
from kproxy_codec.error_codes import POLICY_VIOLATION
from tests.support.models.playbook import Playbook

# Seconds from a deadline until a broker's silence ends its connection.
HUNG_AFTER_S = 5.0


def proven() -> Playbook:
    """Broker 1 has accepted a batch of t-0, request 1: what follows may be pipelined."""
    play = Playbook()
    play.submits(1, "t-0")
    play.answers(1, "t-0")
    return play


# Deadlines


def test_at_a_deadline_finished_entries_keep_results_written_ones_get_7_others_6() -> None:
    play = Playbook({"t": [1, 2, 3]}, dials=True)
    play.submits(1, "t-0 t-1 t-2")
    for connection in (1, 2):
        play.opens(connection)
    play.answers(1, "t-0")
    assert play.ticks(after_s=10) == ["withdraw #3 from c3", "answer 1: t-0@10 t-1=7 t-2=6"]
    assert play.aside == ["count deadlines 1", "failed Produce 7 of b2", "failed Produce 6 of b3"]


def test_a_deadline_that_has_not_come_changes_nothing() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    assert play.ticks(after_s=9.9) == []
    assert play.aside == []


def test_a_request_whose_deadline_is_over_before_it_is_begun_is_sent_to_nobody() -> None:
    play = Playbook()
    assert play.submits(1, "t-0 t-1", deadline_s=0) == ["answer 1: t-0=6 t-1=6"]
    assert play.aside == ["count deadlines 1", "failed Produce 6 of nobody", "failed Produce 6 of nobody"]
    assert play.lanes == []


def test_a_read_whose_deadline_is_over_gets_6_wherever_it_is() -> None:
    play = Playbook(dials=True)
    play.fetches(1, "t-0 t-1")
    play.opens(1)
    assert play.ticks(after_s=10) == ["withdraw #2 from c2", "answer 1: t-0=6 t-1=6"]


def test_a_piece_that_waits_for_its_dial_is_taken_back_and_its_lane_goes_on() -> None:
    play = Playbook(dials=True)
    play.submits(1, "t-0", deadline_s=1)
    assert play.ticks(after_s=1) == ["withdraw #1 from c1", "answer 1: t-0=6"]
    assert play.lanes == []
    assert play.submits(2, "t-0") == ["send #2 b1/c1: 2 t-0"]
    play.opens(1)
    assert play.answers(2, "t-0") == ["answer 2: t-0@20"]


def test_what_waits_behind_a_piece_that_is_taken_back_is_given_up_with_it() -> None:
    """Sent alone, the later batch would be first at a broker that knows nothing of the producer."""
    play = Playbook({"t": [1, 1]}, dials=True)
    play.submits(1, "t-0", deadline_s=1)
    assert play.submits(2, "t-0 t-1") == ["send #2 b1/c1: 2 t-1"]
    assert play.ticks(after_s=1) == ["withdraw #1 from c1", "answer 1: t-0=6"]
    play.opens(1)
    assert play.answers(2, "t-1") == ["answer 2: t-0=6 t-1@20"]


def test_what_is_not_over_is_not_taken_back() -> None:
    play = Playbook(dials=True)
    play.submits(1, "t-0", deadline_s=1)
    play.submits(2, "t-1")
    assert play.ticks(after_s=1) == ["withdraw #1 from c1", "answer 1: t-0=6"]
    assert list(play.pieces) == [2]


def test_what_is_behind_a_batch_at_its_deadline_and_is_over_itself_is_answered_once() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    play.submits(2, "t-0")
    assert play.ticks(after_s=10) == ["answer 1: t-0=7", "answer 2: t-0=6"]
    assert play.aside[0] == "count deadlines 2"


def test_after_a_7_the_lane_waits_for_the_answer_that_is_still_to_come() -> None:
    play = proven()
    play.submits(2, "t-0", deadline_s=1)
    assert play.ticks(after_s=1) == ["answer 2: t-0=7"]
    play.moves("t-0", 2)
    assert play.submits(3, "t-0", producer=(7, 0, 2)) == []
    assert play.answers(2, "t-0") == []
    assert play.wakes() == ["send #3 b2/c2: 3 t-0"]


@pytest.mark.parametrize("written", [True, False])
def test_after_a_7_the_lane_goes_on_when_the_connection_has_ended(written: bool) -> None:
    play = proven()
    play.submits(2, "t-0", deadline_s=1)
    play.ticks(after_s=1)
    play.moves("t-0", 2)
    play.submits(3, "t-0", producer=(7, 0, 2))
    assert play.loses(1, unwritten=[] if written else [2]) == []
    assert play.wakes() == ["send #3 b2/c2: 3 t-0"]


@pytest.mark.parametrize("late", ["t-0", "t-0=6", "t-0=87", "t-0=45"])
def test_a_late_answer_changes_nothing_for_the_client(late: str) -> None:
    """A second result for a partition that has one."""
    play = proven()
    play.submits(2, "t-0", deadline_s=1)
    assert play.ticks(after_s=1) == ["answer 2: t-0=7"]
    assert play.answers(2, late) == []
    assert not [each for each in play.aside if each.startswith(("note", "failed", "retried"))]
    assert play.exchanges[2].open_count == 0


def test_of_two_results_for_one_partition_the_first_counts() -> None:
    play = Playbook()
    play.submits(1, "t-0 t-1")
    exchange = play.exchanges[1]
    exchange.take((0, 0), b"first")
    exchange.take((0, 0), b"second")
    exchange.take_all([(0, [0, 1])], [b"third", b"first"])
    assert (exchange._results, exchange.open_count) == ([[b"first", b"first"]], 0)


def test_the_bytes_of_a_request_that_is_answered_at_its_deadline_are_let_go() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    play.ticks(after_s=10)
    assert play.exchanges[1].request.frame.nbytes == 0


def test_what_has_waited_long_is_taken_out_of_a_receive_buffer() -> None:
    play = Playbook()
    for n in (1, 2, 3):
        play.submits(n, f"t-{n - 1}")
        request = play.exchanges[n].request
        buffer = memoryview(bytearray(bytes(request.frame) * 3))
        request.frame = buffer[: len(request.frame)]
    frames = [play.exchanges[n].request.frame for n in (1, 2, 3)]
    play.core.take_out(1, 2)
    assert [play.exchanges[n].request.frame is frame for n, frame in zip((1, 2, 3), frames, strict=True)] == [
        True,
        False,
        True,
    ]


def test_what_is_under_way_by_partition_is_counted_only_while_somebody_asks() -> None:
    """Counting costs each request, and on proven routes nobody asks."""
    play = proven()
    play.submits(2, "t-0", deadline_s=1)
    play.ticks(after_s=1)
    play.core.take_out(0, 0)
    assert play.core._in_flight._sequences is not None
    play.answers(2, "t-0")
    play.core.take_out(0, 0)
    assert play.core._in_flight._sequences is None


# A broker that hangs


def test_a_connection_is_ended_where_nothing_has_come_for_long_after_a_deadline() -> None:
    play = proven()
    play.submits(2, "t-0", deadline_s=1)
    assert play.ticks(after_s=1) == ["answer 2: t-0=7"]
    # Its client sends it again, and that waits.
    assert play.submits(3, "t-0", producer=(7, 0, 2), deadline_s=60) == []
    assert play.ticks(after_s=HUNG_AFTER_S - 0.1) == []
    assert play.ticks(after_s=0.1) == ["close c1"]
    assert play.core._in_flight.connections[1].state is ConnectionState.CLOSED
    # Another one takes its place; but what it had may still be on its way, as long as it is not lost.
    assert play.submits(4, "t-1", deadline_s=60) == ["send #3 b2/c2: 4 t-1"]
    assert play.loses(1) == []
    assert play.wakes() == ["send #4 b1/c3: 3 t-0"]


def test_a_route_of_a_connection_that_is_being_ended_is_new() -> None:
    """Its place is taken at once; that it is lost comes as an event of its own."""
    play = Playbook({"t": [1, 1]})
    for n, partition in enumerate(("t-0", "t-1"), 1):
        play.submits(n, partition)
        play.answers(n, partition)
    play.submits(3, "t-0", deadline_s=1)
    assert play.ticks(after_s=1 + HUNG_AFTER_S) == ["answer 3: t-0=7", "close c1"]
    assert play.submits(4, "t-1") == ["send #4 b1/c2: 4 t-1"]
    assert play.submits(5, "t-1") == []
    assert play.loses(1) == []
    assert play.answers(4, "t-1") == ["answer 4: t-1@40", "send #5 b1/c2: 5 t-1"]
    assert play.proven("t-1")


def test_a_connection_is_judged_by_the_piece_that_is_to_be_answered_next() -> None:
    play = Playbook()
    play.fetches(1, "t-0", deadline_s=60)
    play.fetches(2, "t-0", deadline_s=1)
    assert play.ticks(after_s=1 + HUNG_AFTER_S) == ["answer 2: t-0=6"]


def test_a_connection_that_is_ended_twice_is_ended_once() -> None:
    play = proven()
    play.submits(2, "t-0", deadline_s=1)
    play.ticks(after_s=1 + HUNG_AFTER_S)
    assert play.ticks() == []
    assert play.loses(1) == []


# Connections that end


def test_of_a_connection_with_several_pieces_each_is_judged_by_what_is_known_of_it() -> None:
    play = Playbook({"t": [1, 1, 1]})
    play.submits(1, "t-0", producer=None)
    play.submits(2, "t-1", producer=None)
    play.submits(3, "t-2", acks=0)
    play.submits(4, "t-2", acks=0, producer=None)
    assert play.loses(1, unwritten=[2, 4], left=[3]) == ["answer 1: t-0=7", "done 3"]
    assert play.wakes() == ["send #5 b1/c2: 2 t-1", "send #6 b1/c2: 4 t-2"]


def test_what_was_pipelined_on_a_lost_connection_goes_again_one_first() -> None:
    play = proven()
    for n in (2, 3, 4):
        play.submits(n, "t-0")
    play.answers(2, "t-0")
    assert play.loses(1) == []
    assert play.wakes() == ["send #5 b1/c2: 3 t-0"]
    assert play.answers(5, "t-0") == ["answer 3: t-0@50", "send #6 b1/c2: 4 t-0"]


def test_what_is_lost_with_a_batch_whose_time_is_over_is_not_sent_again() -> None:
    """For the first it is too late, for the second there would be time."""
    play = proven()
    play.submits(2, "t-0", deadline_s=1)
    play.submits(3, "t-0")
    play.waits(0.99)
    assert play.loses(1) == ["answer 2: t-0=7", "answer 3: t-0=7"]
    assert play.lanes == []


def test_a_connection_that_ends_with_nothing_on_it_is_forgotten() -> None:
    play = proven()
    assert play.loses(1) == []
    assert play.core._in_flight.connections == {}
    assert play.submits(2, "t-0") == ["send #2 b1/c2: 2 t-0"]


def test_a_broker_has_one_connection_that_is_not_closed() -> None:
    play = Playbook({"t": [1, 1, 2]})
    sent = play.submits(1, "t-0") + play.submits(2, "t-1") + play.submits(3, "t-2")
    assert sent == ["send #1 b1/c1: 1 t-0", "send #2 b1/c1: 2 t-1", "send #3 b2/c2: 3 t-2"]
    play.loses(1)
    assert play.wakes() == ["send #4 b1/c3: 1 t-0", "send #5 b1/c3: 2 t-1"]


def _probes_twice(play: Playbook) -> None:
    play.submits(2, "t-0")
    (lane,) = play.core.lanes.table.values()
    lane.move(LaneState.PROBING, 3)


def _opens_again(play: Playbook) -> None:
    connection = play.core._in_flight.connections[1]
    connection.move(ConnectionState.CLOSED)
    connection.move(ConnectionState.OPEN)


@pytest.mark.parametrize(
    "impossible",
    [_opens_again, lambda play: play.exchanges[1].reset(), _probes_twice],
    ids=["a connection that is closed opens", "a read that does not look looks again", "a lane has two that go first"],
)
def test_what_cannot_be_is_refused(impossible: Callable[[Playbook], object]) -> None:
    play = Playbook()
    play.fetches(1, "t-0")
    with pytest.raises(ValueError, match="cannot go from"):
        impossible(play)


# acks=0


def test_acks_0_is_done_with_when_all_of_it_has_left() -> None:
    play = Playbook()
    assert play.submits(1, "t-0 t-1", acks=0) == ["send #1 b1/c1: 1 t-0", "send #2 b2/c2: 1 t-1"]
    assert play.leaves(1) == []
    assert play.leaves(2) == ["done 1"]
    assert play.lanes == []


def test_acks_0_waits_for_no_route_to_be_proven() -> None:
    play = Playbook()
    play.submits(1, "t-0", acks=0)
    assert play.submits(2, "t-0", acks=0) == ["send #2 b1/c1: 2 t-0"]
    assert play.leaves(1, 2) == ["done 1", "done 2"]


def test_acks_0_that_no_broker_takes_is_tried_again_and_is_undeliverable_then() -> None:
    play = Playbook()
    play.submits(1, "t-0", acks=0, producer=None)
    for connection in (1, 2):
        assert play.loses(connection, unwritten=[connection]) == []
        play.wakes()
    assert play.loses(3, unwritten=[3]) == ["done 1", "undeliverable t=6"]


def test_acks_0_that_is_tried_again_goes_before_what_came_behind_it() -> None:
    play = Playbook()
    play.submits(1, "t-0", acks=0)
    play.loses(1, unwritten=[1])
    assert play.submits(2, "t-0", acks=0) == []
    assert play.wakes() == ["send #2 b1/c2: 1 t-0"]
    assert play.leaves(2) == ["done 1", "send #3 b1/c2: 2 t-0"]


def test_acks_0_of_which_a_broker_may_have_seen_some_is_not_sent_again() -> None:
    play = Playbook()
    play.submits(1, "t-0", acks=0, producer=None)
    assert play.loses(1) == ["done 1", "undeliverable t=7"]
    assert play.aside == ["reread t-0"]


def test_what_comes_behind_acks_0_that_is_lost_is_sent_again_all_the_same() -> None:
    """Nobody sends the lost one again: there is nothing to stay behind."""
    play = proven()
    play.submits(2, "t-0", acks=0, producer=None)
    play.submits(3, "t-0")
    assert play.loses(1, unwritten=[3]) == ["done 2", "undeliverable t=7"]
    assert play.wakes() == ["send #4 b1/c2: 3 t-0"]


def test_acks_0_that_is_over_is_undeliverable() -> None:
    play = Playbook(dials=True)
    play.submits(1, "t-0 t-1", acks=0)
    assert play.ticks(after_s=10) == [
        "withdraw #1 from c1",
        "withdraw #2 from c2",
        "done 1",
        "undeliverable t=6",
        "undeliverable t=6",
    ]


@pytest.mark.parametrize(
    ("after_s", "doubted"),
    [(0.0, 2), (0.5 * WINDOW_S, 2), (1.2 * WINDOW_S, 2), (1.7 * WINDOW_S, 2), (2.1 * WINDOW_S, 0)],
)
def test_what_left_a_moment_before_its_connection_ended_is_in_doubt(after_s: float, doubted: int) -> None:
    play = Playbook()
    for n in (1, 2):
        play.submits(n, "t-0", acks=0)
        play.leaves(n)
    play.waits(after_s)
    play.loses(1, unconfirmed=True)
    assert play.aside == ([f"unconfirmed t {doubted}", "reread t-0"] if doubted else [])


@pytest.mark.parametrize(("pause_s", "doubted"), [(0.8 * WINDOW_S, 3), (1.2 * WINDOW_S, 1), (2 * WINDOW_S, 0)])
def test_the_last_two_windows_are_in_doubt_together(pause_s: float, doubted: int) -> None:
    play = Playbook()
    for n in (1, 2, 3):
        play.submits(n, "t-0", acks=0)
    # When a batch leaves is what counts, not when it was sent.
    for n in (1, 2, 3):
        play.leaves(n)
        play.waits(pause_s)
    play.loses(1, unconfirmed=True)
    assert play.aside == ([f"unconfirmed t {doubted}", "reread t-0"] if doubted else [])


def test_what_has_left_is_in_doubt_only_where_that_is_said() -> None:
    play = Playbook()
    play.submits(1, "t-0", acks=0)
    play.leaves(1)
    play.loses(1)
    assert play.aside == []


def test_of_a_connection_on_which_nothing_has_left_nothing_is_in_doubt() -> None:
    play = Playbook()
    play.submits(1, "t-0", acks=0, producer=None)
    assert play.loses(1, unconfirmed=True) == ["done 1", "undeliverable t=7"]
    assert play.aside == ["reread t-0"]


def test_what_leaves_with_the_end_of_its_connection_is_in_doubt_as_well() -> None:
    play = Playbook()
    play.submits(1, "t-0", acks=0)
    assert play.loses(1, left=[1], unconfirmed=True) == ["done 1"]
    assert play.aside == ["unconfirmed t 1", "reread t-0"]


def test_an_owner_that_was_told_of_since_is_not_looked_up_for_what_is_in_doubt() -> None:
    play = Playbook()
    play.submits(1, "t-0", acks=0)
    play.leaves(1)
    play.moves("t-0", 2)
    play.loses(1, unconfirmed=True)
    assert play.aside == ["unconfirmed t 1"]


def test_what_is_in_doubt_is_named_as_the_topic_is_called_now() -> None:
    play = Playbook()
    play.names("t")
    play.submits(1, "t-0", acks=0, by_id=True)
    play.leaves(1)
    play.loses(1, unconfirmed=True)
    assert play.aside == ["unconfirmed t 1", "reread t-0"]


def test_no_more_partitions_than_a_bound_are_in_doubt_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "MAX_PARTITIONS", 2)
    play = Playbook({"t": [1, 1, 1]})
    for n, partition in enumerate(("t-0", "t-1", "t-2", "t-1"), 1):
        play.submits(n, partition, acks=0)
        play.leaves(n)
    play.loses(1, unconfirmed=True)
    assert play.aside == ["unconfirmed t 1", "reread t-0", "unconfirmed t 2", "reread t-1"]


def test_of_very_many_partitions_4096_are_in_doubt_by_name() -> None:
    count = 4_097
    play = Playbook({"t": [1] * count})
    play.submits(1, " ".join(f"t-{index}" for index in range(count)), acks=0)
    play.leaves(1)
    play.loses(1, unconfirmed=True)
    assert sum(each.startswith("reread") for each in play.aside) == 4_096


# acks=0 that is sent on as acks=1


def test_confirmed_acks_0_keeps_its_order_and_its_client_hears_nothing() -> None:
    play = Playbook()
    play.submits(1, "t-0", acks=1, silent=True)
    assert play.submits(2, "t-0", acks=1, silent=True) == []
    assert play.answers(1, "t-0") == ["done 1", "send #2 b1/c1: 2 t-0"]
    assert play.aside == []
    assert play.answers(2, "t-0=6") == []
    play.moves("t-0", 2)
    assert play.wakes() == ["send #3 b2/c2: 2 t-0"]
    assert play.answers(3, "t-0") == ["done 2"]


@pytest.mark.parametrize("code", [10, 87])
def test_confirmed_acks_0_refused_for_good_is_lost_and_the_next_is_delivered(code: int) -> None:
    play = Playbook()
    play.submits(1, "t-0 t-1", acks=1, silent=True)
    play.submits(2, "t-0", acks=1, silent=True)
    assert play.answers(2, "t-1") == []
    assert play.answers(1, f"t-0={code}") == ["done 1", "send #3 b1/c1: 2 t-0", f"undeliverable t={code}"]
    assert not [each for each in play.aside if each.startswith("failed")]


def test_confirmed_acks_0_that_is_never_confirmed_is_undeliverable_at_its_deadline() -> None:
    play = Playbook()
    play.submits(1, "t-0", acks=1, silent=True)
    assert play.ticks(after_s=10) == ["done 1", "undeliverable t=7"]


def test_confirmed_acks_0_stays_behind_what_is_unanswered_when_its_partition_moves() -> None:
    play = Playbook()
    play.submits(1, "t-0", acks=1, silent=True, producer=None)
    play.moves("t-0", 2)
    assert play.submits(2, "t-0", acks=1, silent=True, producer=None) == []
    assert play.answers(1, "t-0") == ["done 1", "send #2 b2/c2: 2 t-0"]


def test_confirmed_acks_0_is_begun_although_its_deadline_is_over() -> None:
    """Its client hears of nothing: whatever can be delivered is."""
    play = Playbook()
    assert play.submits(1, "t-0", acks=1, silent=True, deadline_s=0) == ["send #1 b1/c1: 1 t-0"]


# What is refused before it is sent


def test_what_is_refused_at_submission_is_not_sent_and_the_rest_is() -> None:
    play = Playbook({"t": [1, 1]})
    assert play.submits(1, "t-0 t-1", refused={"t-1": POLICY_VIOLATION}) == ["send #1 b1/c1: 1 t-0"]
    assert play.sent[1].part == [(0, [0])]
    assert play.answers(1, "t-0") == ["answer 1: t-0@10 t-1=44"]


def test_a_request_of_which_all_is_refused_is_answered_at_once() -> None:
    play = Playbook()
    assert play.submits(1, "t-0 t-1", refused={"t-0": 44, "t-1": 29}) == ["answer 1: t-0=44 t-1=29"]
    assert play.aside == ["failed Produce 44 of nobody", "failed Produce 29 of nobody"]


def test_what_is_refused_waits_in_no_lane() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    assert play.submits(2, "t-0 t-1", refused={"t-1": 44}) == []
    assert play.lanes == ["t-0 probing"]
    assert play.answers(1, "t-0") == ["answer 1: t-0@10", "send #2 b1/c1: 2 t-0"]


def test_what_is_refused_does_not_wait_in_a_lane_that_is_there() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    assert play.submits(2, "t-0", refused={"t-0": 44}) == ["answer 2: t-0=44"]
    assert play.answers(1, "t-0") == ["answer 1: t-0@10"]


def test_acks_0_that_is_refused_ends_the_connection_behind_what_is_sent() -> None:
    play = Playbook()
    assert play.submits(1, "t-0 t-1", acks=0, refused={"t-1": 44}) == [
        "send #1 b1/c1: 1 t-0",
        "undeliverable t=44",
    ]


# The client sends no more


def test_client_that_sends_no_more_is_answered() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    assert play.submits(2, "t-0") == []
    assert play.half_closes() == []
    assert play.answers(1, "t-0") == ["answer 1: t-0@10", "send #2 b1/c1: 2 t-0"]
    assert play.answers(2, "t-0") == ["answer 2: t-0@20"]


def test_batches_that_wait_for_retries_are_answered() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    play.submits(2, "t-0")
    assert play.answers(1, "t-0=19") == []
    assert play.half_closes() == ["answer 1: t-0=19", "answer 2: t-0=6"]
    assert play.lanes == []


def test_batches_refused_after_the_end_are_not_sent_again() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    play.answers(1, "t-0")
    play.submits(2, "t-0")
    play.submits(3, "t-0")
    play.half_closes()
    assert play.answers(2, "t-0=6") == ["answer 2: t-0=6"]
    assert play.answers(3, "t-0=45") == ["answer 3: t-0=6"]
    assert play.lanes == []


def test_batches_whose_dial_takes_long_are_answered() -> None:
    play = Playbook(dials=True)
    play.submits(1, "t-0")
    play.submits(2, "t-0")
    play.submits(3, "t-0", acks=0)
    play.half_closes()
    assert play.gives_up_unwritten() == [
        "withdraw #1 from c1",
        "answer 1: t-0=6",
        "answer 2: t-0=6",
        "send #2 b1/c1: 3 t-0",
    ]


def test_silent_batches_are_sent_again_after_the_end() -> None:
    play = Playbook()
    play.submits(1, "t-0", acks=0)
    play.half_closes()
    assert play.loses(1, unwritten=[1]) == []
    assert play.wakes() == ["send #2 b1/c2: 1 t-0"]
