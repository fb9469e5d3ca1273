"""Scripts for the fan-out: deadlines, connections to brokers that end, and requests without an answer (acks=0)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kproxy.routing import in_flight
from kproxy.routing.in_flight import WINDOW_S, ConnectionState
from kproxy.routing.lanes import LaneState
from kproxy.routing.merge import READ_GRACE_S, ExchangeState
from kproxy_codec.error_codes import POLICY_VIOLATION
from tests.support.models.playbook import Playbook, piped, proven

# The time in seconds from a deadline until a silent broker's connection is closed.
HUNG_AFTER_S = 5.0


# Deadlines


def test_deadline_answers_results_then_7_then_6() -> None:
    play = Playbook({"t": [1, 2, 3]}, dials=True)
    play.submits(1, "t-0 t-1 t-2")
    for connection in (1, 2):
        play.opens(connection)
    play.answers(1, "t-0")
    assert play.ticks(after_s=10) == ["withdraw #3 from c3", "answer 1: t-0@10 t-1=7 t-2=6"]
    assert play.aside == ["count deadlines 1", "failed Produce 7 of b2", "failed Produce 6 of b3"]


def test_request_begun_after_deadline_is_not_sent() -> None:
    play = Playbook()
    assert play.submits(1, "t-0 t-1", deadline_s=0) == ["answer 1: t-0=6 t-1=6"]
    assert play.aside == ["count deadlines 1", "failed Produce 6 of nobody", "failed Produce 6 of nobody"]
    assert play.lanes == []


def test_read_past_deadline_gets_6_everywhere() -> None:
    play = Playbook(dials=True)
    play.fetches(1, "t-0 t-1")
    play.opens(1)
    assert play.ticks(after_s=READ_GRACE_S) == ["withdraw #2 from c2", "answer 1: t-0=6 t-1=6"]


def test_piece_waiting_for_dial_is_taken_back() -> None:
    play = Playbook(dials=True)
    play.submits(1, "t-0", deadline_s=1)
    assert play.ticks(after_s=1) == ["withdraw #1 from c1", "answer 1: t-0=6"]
    assert play.lanes == []
    assert play.submits(2, "t-0", producer=(7, 0, 1)) == ["send #2 b1/c1: 2 t-0"]
    play.opens(1)
    assert play.answers(2, "t-0") == ["answer 2: t-0@20"]


def test_batch_behind_a_piece_taken_back_is_failed() -> None:
    """Sent alone, the later batch would be the first at a broker that does not know the producer."""
    play = Playbook({"t": [1, 1]}, dials=True)
    play.submits(1, "t-0", deadline_s=1)
    assert play.submits(2, "t-0 t-1") == ["send #2 b1/c1: 2 t-1"]
    assert play.ticks(after_s=1) == ["withdraw #1 from c1", "answer 1: t-0=6"]
    play.opens(1)
    assert play.answers(2, "t-1") == ["answer 2: t-0=6 t-1@20"]


def test_unexpired_piece_is_not_taken_back() -> None:
    play = Playbook(dials=True)
    play.submits(1, "t-0", deadline_s=1)
    play.submits(2, "t-1")
    assert play.ticks(after_s=1) == ["withdraw #1 from c1", "answer 1: t-0=6"]
    assert list(play.pieces) == [2]


def test_expired_batch_behind_expired_one_is_answered_once() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    play.submits(2, "t-0")
    assert play.ticks(after_s=10) == ["answer 1: t-0=7", "answer 2: t-0=6"]
    assert play.aside[0] == "count deadlines 2"


@pytest.mark.parametrize("end", ["answered", "lost", "unwritten"])
def test_lane_after_7_waits_for_outstanding_answer(end: str) -> None:
    play = proven()
    play.submits(2, "t-0", deadline_s=1)
    assert play.ticks(after_s=1) == ["answer 2: t-0=7"]
    play.moves("t-0", 2)
    assert play.submits(3, "t-0", producer=(7, 0, 2)) == []
    if end == "answered":
        assert play.answers(2, "t-0") == []
    else:
        assert play.loses(1, unwritten=[2] if end == "unwritten" else []) == []
    assert play.wakes() == ["send #3 b2/c2: 3 t-0"]


@pytest.mark.parametrize("late", ["t-0", "t-0=6", "t-0=87", "t-0=45"])
def test_late_answer_changes_nothing_for_the_client(late: str) -> None:
    """The answer has a second result for a partition that has one."""
    play = proven()
    play.submits(2, "t-0", deadline_s=1)
    assert play.ticks(after_s=1) == ["answer 2: t-0=7"]
    assert play.answers(2, late) == []
    assert not [each for each in play.aside if each.startswith(("note", "failed", "retried"))]
    assert play.exchanges[2].open_count == 0


def test_first_of_two_results_for_partition_counts() -> None:
    play = Playbook()
    play.submits(1, "t-0 t-1")
    exchange = play.exchanges[1]
    exchange.take((0, 0), b"first")
    exchange.take((0, 0), b"second")
    exchange.take_all([(0, [0, 1])], [b"third", b"first"])
    assert (exchange._results, exchange.open_count) == ([[b"first", b"first"]], 0)


def test_long_waiting_request_leaves_the_receive_buffer() -> None:
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


def test_partitions_in_flight_are_counted_only_on_demand() -> None:
    """Counting would cost each request time, and on proven routes nothing needs the count."""
    play = proven()
    play.submits(2, "t-0", deadline_s=1)
    play.ticks(after_s=1)
    play.core.take_out(0, 0)
    assert play.core._in_flight._sequences is not None
    play.answers(2, "t-0")
    play.core.take_out(0, 0)
    assert play.core._in_flight._sequences is None


# Hung brokers


def test_silent_connection_ends_after_a_deadline() -> None:
    play = proven()
    play.submits(2, "t-0", deadline_s=1)
    assert play.ticks(after_s=1) == ["answer 2: t-0=7"]
    # The client sends the batch again, and it waits.
    assert play.submits(3, "t-0", producer=(7, 0, 2), deadline_s=60) == []
    assert play.ticks(after_s=HUNG_AFTER_S - 0.1) == []
    assert play.ticks(after_s=0.1) == ["close c1"]
    assert play.core._in_flight.connections[1].state is ConnectionState.CLOSED
    # Another connection replaces it, but its requests may still arrive until it is lost.
    assert play.submits(4, "t-1", deadline_s=60) == ["send #3 b2/c2: 4 t-1"]
    assert play.loses(1) == []
    assert play.wakes() == ["send #4 b1/c3: 3 t-0"]


def test_route_of_an_ending_connection_is_new() -> None:
    """Another connection replaces it at once; its loss is an event of its own."""
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


def test_connection_is_judged_by_its_next_answer() -> None:
    play = proven()
    play.submits(2, "t-0", deadline_s=60)
    play.submits(3, "t-0", deadline_s=1)
    assert play.ticks(after_s=1 + HUNG_AFTER_S) == ["answer 3: t-0=7"]


def test_kept_read_may_wait_for_long() -> None:
    play = Playbook()
    play.fetches(1, "t-0 t-1", until_s=300)
    play.answers(1, "t-0:1")
    assert play.ticks(after_s=299) == []
    assert play.ticks(after_s=1 + HUNG_AFTER_S) == []
    assert play.ticks(after_s=READ_GRACE_S) == ["close c2"]


def test_connection_ended_twice_ends_once() -> None:
    play = proven()
    play.submits(2, "t-0", deadline_s=1)
    play.ticks(after_s=1 + HUNG_AFTER_S)
    assert play.ticks() == []
    assert play.loses(1) == []


# Connections that end


def test_pieces_of_lost_connection_are_judged_singly() -> None:
    play = Playbook({"t": [1, 1, 1]})
    play.submits(1, "t-0", producer=None)
    play.submits(2, "t-1", producer=None)
    play.submits(3, "t-2", acks=0)
    play.submits(4, "t-2", acks=0, producer=None)
    assert play.loses(1, unwritten=[2, 4], left=[3]) == ["answer 1: t-0=7", "done 3"]
    assert play.wakes() == ["send #5 b1/c2: 2 t-1", "send #6 b1/c2: 4 t-2"]


def test_batch_lost_behind_expired_one_is_not_resent() -> None:
    """The first is too late; the second would still have time."""
    play = proven()
    play.submits(2, "t-0", deadline_s=1)
    play.submits(3, "t-0")
    play.waits(0.99)
    assert play.loses(1) == ["answer 2: t-0=7", "answer 3: t-0=7"]
    assert play.lanes == []


def test_broker_has_one_open_connection() -> None:
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
    [_opens_again, lambda play: play.exchanges[1].move(ExchangeState.OPEN), _probes_twice],
    ids=["a connection that is closed opens", "an open request opens again", "a lane has two that go first"],
)
def test_impossible_event_is_refused(impossible: Callable[[Playbook], object]) -> None:
    play = Playbook()
    play.fetches(1, "t-0")
    with pytest.raises(ValueError, match="cannot go from"):
        impossible(play)


# acks=0


def test_acks_0_ends_when_all_has_left() -> None:
    play = Playbook()
    assert play.submits(1, "t-0 t-1", acks=0) == ["send #1 b1/c1: 1 t-0", "send #2 b2/c2: 1 t-1"]
    assert play.leaves(1) == []
    assert play.leaves(2) == ["done 1"]
    assert play.lanes == []


def test_acks_0_does_not_wait_for_proven_route() -> None:
    play = Playbook()
    play.submits(1, "t-0", acks=0)
    assert play.submits(2, "t-0", acks=0) == ["send #2 b1/c1: 2 t-0"]
    assert play.leaves(1, 2) == ["done 1", "done 2"]


def test_unaccepted_acks_0_is_retried_and_then_undeliverable() -> None:
    play = Playbook()
    play.submits(1, "t-0", acks=0, producer=None)
    for connection in (1, 2):
        assert play.loses(connection, unwritten=[connection]) == []
        play.wakes()
    assert play.loses(3, unwritten=[3]) == ["done 1", "undeliverable t=6"]


def test_retried_acks_0_precedes_later_batches() -> None:
    play = Playbook()
    play.submits(1, "t-0", acks=0)
    play.loses(1, unwritten=[1])
    assert play.submits(2, "t-0", acks=0) == []
    assert play.wakes() == ["send #2 b1/c2: 1 t-0"]
    assert play.leaves(2) == ["done 1", "send #3 b1/c2: 2 t-0"]


def test_batch_behind_lost_acks_0_is_resent() -> None:
    """The lost batch is not sent again, so no later batch must wait for it."""
    play = proven()
    play.submits(2, "t-0", acks=0, producer=None)
    play.submits(3, "t-0")
    assert play.loses(1, unwritten=[3]) == ["done 2", "undeliverable t=7"]
    assert play.wakes() == ["send #4 b1/c2: 3 t-0"]


def test_expired_acks_0_is_undeliverable() -> None:
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
def test_acks_0_sent_before_connection_end_is_uncertain(after_s: float, doubted: int) -> None:
    play = Playbook()
    for n in (1, 2):
        play.submits(n, "t-0", acks=0)
        play.leaves(n)
    play.waits(after_s)
    play.loses(1, unconfirmed=True)
    assert play.aside == ([f"unconfirmed t {doubted}", "reread t-0"] if doubted else [])


@pytest.mark.parametrize(("pause_s", "doubted"), [(0.8 * WINDOW_S, 3), (1.2 * WINDOW_S, 1), (2 * WINDOW_S, 0)])
def test_last_two_windows_are_uncertain_together(pause_s: float, doubted: int) -> None:
    play = Playbook()
    for n in (1, 2, 3):
        play.submits(n, "t-0", acks=0)
    # The time when a batch leaves counts, not the time when it is sent.
    for n in (1, 2, 3):
        play.leaves(n)
        play.waits(pause_s)
    play.loses(1, unconfirmed=True)
    assert play.aside == ([f"unconfirmed t {doubted}", "reread t-0"] if doubted else [])


@pytest.mark.parametrize(
    ("sent", "moves", "ends", "told", "doubts"),
    [
        ("before", False, {}, [], []),
        ("before", True, {"unconfirmed": True}, [], ["unconfirmed t 1"]),
        ("with it", False, {"unconfirmed": True}, ["done 1"], ["unconfirmed t 1", "reread t-0"]),
        ("not", False, {"unconfirmed": True}, ["done 1", "undeliverable t=7"], ["reread t-0"]),
        ("not", False, {}, ["done 1", "undeliverable t=7"], ["reread t-0"]),
    ],
)
def test_sent_acks_0_is_uncertain_if_reported(
    sent: str, moves: bool, ends: dict[str, bool], told: list[str], doubts: list[str]
) -> None:
    """A newer owner is not looked up."""
    play = Playbook()
    play.submits(1, "t-0", acks=0, producer=None)
    if sent == "before":
        play.leaves(1)
    if moves:
        play.moves("t-0", 2)
    assert play.loses(1, left=[1] if sent == "with it" else [], **ends) == told
    assert play.aside == doubts


def test_uncertain_batch_uses_current_topic_name() -> None:
    play = Playbook()
    play.names("t")
    play.submits(1, "t-0", acks=0, by_id=True)
    play.leaves(1)
    play.loses(1, unconfirmed=True)
    assert play.aside == ["unconfirmed t 1", "reread t-0"]


def test_uncertain_partitions_by_name_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "MAX_PARTITIONS", 2)
    play = Playbook({"t": [1, 1, 1]})
    for n, partition in enumerate(("t-0", "t-1", "t-2", "t-1"), 1):
        play.submits(n, partition, acks=0)
        play.leaves(n)
    play.loses(1, unconfirmed=True)
    assert play.aside == ["unconfirmed t 1", "reread t-0", "unconfirmed t 2", "reread t-1"]


def test_uncertain_partitions_by_name_end_at_4096() -> None:
    count = 4_097
    play = Playbook({"t": [1] * count})
    play.submits(1, " ".join(f"t-{index}" for index in range(count)), acks=0)
    play.leaves(1)
    play.loses(1, unconfirmed=True)
    assert sum(each.startswith("reread") for each in play.aside) == 4_096


# acks=0 forwarded as acks=1


def test_confirmed_acks_0_keeps_order_without_answers() -> None:
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
def test_permanently_refused_confirmed_acks_0_is_lost(code: int) -> None:
    play = Playbook()
    play.submits(1, "t-0 t-1", acks=1, silent=True)
    play.submits(2, "t-0", acks=1, silent=True)
    assert play.answers(2, "t-1") == []
    assert play.answers(1, f"t-0={code}") == ["done 1", "send #3 b1/c1: 2 t-0", f"undeliverable t={code}"]
    assert not [each for each in play.aside if each.startswith("failed")]


def test_unconfirmed_acks_0_is_undeliverable_at_deadline() -> None:
    play = Playbook()
    play.submits(1, "t-0", acks=1, silent=True)
    assert play.ticks(after_s=10) == ["done 1", "undeliverable t=7"]


def test_confirmed_acks_0_waits_for_moved_partitions_answers() -> None:
    play = Playbook()
    play.submits(1, "t-0", acks=1, silent=True, producer=None)
    play.moves("t-0", 2)
    assert play.submits(2, "t-0", acks=1, silent=True, producer=None) == []
    assert play.answers(1, "t-0") == ["done 1", "send #2 b2/c2: 2 t-0"]


def test_confirmed_acks_0_is_begun_past_its_deadline() -> None:
    """Its client expects no answer, so every batch that can be delivered is."""
    play = Playbook()
    assert play.submits(1, "t-0", acks=1, silent=True, deadline_s=0) == ["send #1 b1/c1: 1 t-0"]


# Batches refused before they are sent


def test_partition_refused_at_submission_is_not_sent() -> None:
    play = Playbook({"t": [1, 1]})
    assert play.submits(1, "t-0 t-1", refused={"t-1": POLICY_VIOLATION}) == ["send #1 b1/c1: 1 t-0"]
    assert play.sent[1].part == [(0, [0])]
    assert play.answers(1, "t-0") == ["answer 1: t-0@10 t-1=44"]


def test_wholly_refused_request_is_answered_at_once() -> None:
    play = Playbook()
    assert play.submits(1, "t-0 t-1", refused={"t-0": 44, "t-1": 29}) == ["answer 1: t-0=44 t-1=29"]
    assert play.aside == ["failed Produce 44 of nobody", "failed Produce 29 of nobody"]


def test_refused_partition_waits_in_no_lane() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    assert play.submits(2, "t-0 t-1", refused={"t-1": 44}) == []
    assert play.lanes == ["t-0 probing"]
    assert play.answers(1, "t-0") == ["answer 1: t-0@10", "send #2 b1/c1: 2 t-0"]


def test_refused_partition_does_not_wait_in_existing_lane() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    assert play.submits(2, "t-0", refused={"t-0": 44}) == ["answer 2: t-0=44"]
    assert play.answers(1, "t-0") == ["answer 1: t-0@10"]


def test_refused_acks_0_ends_connection_after_sending() -> None:
    play = Playbook()
    assert play.submits(1, "t-0 t-1", acks=0, refused={"t-1": 44}) == [
        "send #1 b1/c1: 1 t-0",
        "undeliverable t=44",
    ]


# Clients that stop sending


def test_client_that_stops_sending_is_answered() -> None:
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


def test_batches_refused_after_end_are_not_sent_again() -> None:
    play = piped(2, 3)
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


def test_acks_0_batches_are_resent_after_end() -> None:
    play = Playbook()
    play.submits(1, "t-0", acks=0)
    play.half_closes()
    assert play.loses(1, unwritten=[1]) == []
    assert play.wakes() == ["send #2 b1/c2: 1 t-0"]


def test_refused_confirmed_acks_0_is_resent_after_end() -> None:
    play = Playbook()
    play.submits(1, "t-0", acks=1, silent=True)
    play.half_closes()
    assert play.answers(1, "t-0=6") == []
    assert play.wakes() == ["send #2 b1/c1: 1 t-0"]


def test_refused_reads_are_repeated_after_end() -> None:
    play = Playbook()
    play.lists_offsets(1, "t-0")
    play.half_closes()
    assert play.answers(1, "t-0=6") == []
    assert play.wakes() == ["send #2 b1/c1: 1 t-0"]
