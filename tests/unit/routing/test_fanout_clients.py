"""Scripts for the fan-out: the client leaves, or another client takes what it had claimed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kproxy.routing.actions import Actions, Counted, Undeliverable
from kproxy.routing.merge import ExchangeState
from tests.support.models.playbook import Playbook
from tests.support.wire.messages import frame_of


def gated(*, fenced: bool = False, dials: bool = False) -> Playbook:
    """Topic t has a writer group, topic u has none; broker 1 has half of each, broker 2 the rest."""
    return Playbook({"t": [1, 2], "u": [1, 2]}, gated=["t"], fenced=fenced, dials=dials)


# It is gone


def test_where_no_topic_has_a_writer_group_it_may_go_without_a_word() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    assert play.parts() == []
    assert play.parts() == []
    assert play.answers(1, "t-0") == ["answer 1: t-0@10"]


def test_what_is_written_for_a_topic_with_a_writer_group_is_held_until_it_is_answered() -> None:
    play = gated()
    play.submits(1, "t-0 t-1")
    assert play.parts() == ["hold #1: t-0", "hold #2: t-1", "drop 1"]
    assert play.answers(1, "t-0") == ["let go #1"]
    assert play.aside == []
    assert play.answers(2, "t-1=6") == ["let go #2"]
    assert play.lanes == []


def test_the_bytes_of_what_is_written_and_held_are_let_go() -> None:
    """What is held may be so for long, and it is not sent again."""
    play = gated()
    play.submits(1, "t-0")
    assert play.parts() == ["hold #1: t-0", "drop 1"]
    assert play.exchanges[1].request.frame.nbytes == 0


def test_of_a_piece_only_partitions_of_topics_with_a_writer_group_are_held() -> None:
    play = gated()
    play.submits(1, "t-0 u-0")
    assert play.parts() == ["hold #1: t-0", "drop 1"]
    assert play.answers(1, "t-0 u-0") == ["let go #1"]


def test_what_has_no_writer_group_goes_on() -> None:
    play = gated()
    play.submits(1, "u-0")
    play.submits(2, "u-0")
    assert play.parts() == []
    assert play.answers(1, "u-0") == ["answer 1: u-0@10", "send #2 b1/c1: 2 u-0"]


def test_what_is_lost_while_it_is_held_is_said_to_be_lost_before_it_is_let_go() -> None:
    play = gated()
    play.submits(1, "t-0")
    play.parts()
    assert play.loses(1) == ["lost t-0", "let go #1"]


def test_what_is_held_and_was_not_written_is_let_go_and_not_lost() -> None:
    play = gated()
    play.submits(1, "t-0")
    play.parts()
    assert play.loses(1, unwritten=[1]) == ["let go #1"]


def test_what_cannot_be_read_while_it_is_held_is_lost_before_its_connection_is_ended() -> None:
    play = gated()
    play.submits(1, "t-0")
    play.parts()
    assert play.answers_bytes(1, frame_of(b"\0\0\0\7")) == ["lost t-0", "distrust c1", "let go #1"]


def test_what_waits_for_its_dial_is_taken_back() -> None:
    play = gated(dials=True)
    play.submits(1, "t-0 u-1")
    play.opens(2)
    assert play.parts() == ["withdraw #1 from c1", "drop 1"]
    assert play.answers(2, "u-1") == []


def test_what_waits_in_a_lane_is_not_sent_any_more() -> None:
    play = gated()
    play.submits(1, "t-0")
    play.submits(2, "t-0")
    assert play.parts() == ["hold #1: t-0", "drop 1", "drop 2"]
    assert play.answers(1, "t-0") == ["let go #1"]
    assert play.lanes == []


def test_what_waits_for_its_retry_is_not_sent_any_more() -> None:
    play = gated()
    play.submits(1, "t-0")
    play.answers(1, "t-0=6")
    assert play.parts() == ["drop 1"]
    assert play.wakes() == []
    assert play.lanes == []


def test_what_is_refused_afterwards_is_not_sent_again() -> None:
    play = gated()
    play.submits(1, "t-0 u-0", acks=1, silent=True)
    assert play.parts() == ["hold #1: t-0"]
    # Nobody waits for an answer, and what has no writer group may still be delivered.
    assert play.answers(1, "t-0=6 u-0=6") == ["let go #1", "undeliverable t=6"]
    assert play.wakes() == ["send #2 b1/c1: 1 u-0"]
    assert play.answers(2, "u-0") == ["done 1"]


def test_what_has_no_answer_and_was_not_sent_is_undeliverable() -> None:
    play = gated()
    play.submits(1, "t-0", acks=1, silent=True)
    play.submits(2, "t-0 u-1", acks=1, silent=True)
    assert play.parts() == ["hold #1: t-0", "undeliverable t=44"]
    assert play.answers(2, "u-1") == ["done 2"]
    assert play.answers(1, "t-0") == ["done 1", "let go #1"]


def test_before_brokers_with_fences_it_is_said_to_be_lost() -> None:
    """Its connections end with it, and it is the fences that count; another process may not know of them yet."""
    play = gated(fenced=True)
    play.submits(1, "t-0 u-0")
    assert play.parts() == ["lost t-0", "drop 1"]
    assert play.loses(1) == ["lost t-0"]


def test_what_is_lost_of_a_client_that_is_there_is_said_to_be_lost_as_well() -> None:
    play = gated()
    play.submits(1, "t-0 u-0", producer=None)
    assert play.loses(1) == ["lost t-0", "answer 1: t-0=7 u-0=7"]


# What it had claimed is another's


def test_once_it_is_severed_nothing_at_all_is_sent() -> None:
    play = gated(dials=True)
    play.submits(1, "u-0")
    play.submits(2, "u-1")
    play.opens(1)
    assert play.severs() == ["withdraw #2 from c2", "drop 1", "drop 2"]
    assert play.answers(1, "u-0=6") == []
    assert play.lanes == []


def test_once_it_is_severed_reads_are_over_too() -> None:
    play = gated()
    play.fetches(1, "u-0")
    assert play.severs() == ["drop 1"]
    assert play.answers(1, "u-0=6") == []


def test_once_it_is_severed_a_read_that_looks_again_is_over_as_well() -> None:
    play = gated()
    play.fetches(1, "u-0 u-1", until_s=1)
    play.answers(1, "u-0")
    assert play.answers(2, "u-1") == []
    assert play.severs() == ["drop 1"]
    assert play.wakes() == []


def test_a_client_that_was_gone_may_be_severed_yet_and_what_is_held_is_held_once() -> None:
    play = gated()
    play.submits(1, "t-0")
    play.submits(2, "u-0", acks=1, silent=True)
    play.submits(3, "u-0", acks=1, silent=True)
    assert play.parts() == ["hold #1: t-0", "drop 1"]
    assert play.severs() == ["done 3", "undeliverable u=44"]
    assert play.answers(1, "t-0") == ["let go #1"]
    assert play.answers(2, "u-0") == ["done 2"]


def test_what_is_over_when_it_is_released_gives_up_nothing_that_waits_before_it() -> None:
    """The last request asks for a topic with a writer group as well, so all of it is dropped with its client."""
    play = Playbook({"t": [1], "g": [2]}, gated=["g"])
    for sequence in (1, 2, 3):
        play.submits(sequence, "t-0")
    play.submits(4, "t-0 g-0")
    assert play.parts() == ["hold #2: g-0", "drop 4"]
    assert play.answers(1, "t-0=87") == ["answer 1: t-0=87", "send #3 b1/c1: 2 t-0"]
    assert play.answers(3, "t-0") == ["answer 2: t-0@30", "send #4 b1/c1: 3 t-0"]


@pytest.mark.parametrize("again", [Playbook.parts, Playbook.severs])
def test_a_client_that_is_severed_is_so_for_good(again: Callable[[Playbook], list[str]]) -> None:
    play = gated()
    play.severs()
    with pytest.raises(ValueError, match="a client cannot go from severed"):
        again(play)


def test_a_piece_that_was_not_written_before_its_client_is_severed_leaves_nothing_behind() -> None:
    play = gated()
    play.submits(1, "t-0")
    play.unsent(1)
    assert play.severs() == ["drop 1"]
    assert play.lanes == []


# The end


def test_what_it_would_hear_of_is_dropped_and_what_it_would_not_still_goes() -> None:
    play = Playbook(dials=True)
    play.submits(1, "t-0")
    play.submits(2, "t-1", acks=0)
    assert play.closes() == ["drop 1", "withdraw #1 from c1"]
    play.opens(2)
    assert play.leaves(2) == ["done 2"]


def test_what_waits_in_a_lane_is_dropped_and_what_has_no_answer_stays_in_its_turn() -> None:
    play = Playbook()
    play.submits(1, "t-0", acks=1, silent=True)
    play.submits(2, "t-0")
    play.submits(3, "t-0", acks=1, silent=True)
    assert play.closes() == ["drop 2"]
    assert play.answers(1, "t-0") == ["done 1", "send #2 b1/c1: 3 t-0"]


def test_what_waits_for_its_retry_is_forgotten() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    play.answers(1, "t-0=6")
    assert play.closes() == ["drop 1"]
    assert play.lanes == []


def test_a_dropped_request_keeps_its_lane_until_it_is_answered() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    play.answers(1, "t-0")
    play.submits(2, "t-0")
    play.submits(3, "t-0", acks=1, silent=True)
    play.moves("t-0", 2)
    assert play.closes() == ["drop 2"]
    play.answers(3, "t-0=6")
    assert play.wakes_in_ms() is None
    play.answers(2, "t-0=6")
    assert play.wakes() == ["send #4 b2/c2: 3 t-0"]


def test_what_is_left_at_the_very_end_is_undeliverable() -> None:
    play = Playbook(dials=True)
    play.submits(1, "t-0", acks=0)
    play.submits(2, "t-1", acks=1, silent=True)
    play.opens(2)
    play.closes()
    assert play.ends() == ["withdraw #1 from c1", "done 1", "done 2", "undeliverable t=6", "undeliverable t=7"]
    assert play.aside == []


def test_acknowledgements_are_noted_for_nobody_who_is_gone() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    play.closes()
    assert play.answers(1, "t-0") == []
    assert play.aside == []
    assert play.exchanges[1].state is ExchangeState.DROPPED


def test_a_whole_success_is_handed_to_nobody_who_is_gone() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    play.answers(1, "t-0")
    play.submits(2, "t-0")
    assert play.closes() == ["drop 2"]
    assert play.answers(2, "t-0") == []


# The order of actions


def test_what_ends_the_clients_connection_comes_last() -> None:
    actions = Actions()
    last = Undeliverable(b"t", 6)
    actions.add_last(last)
    actions.add(Counted("splits", 1))
    assert len(actions) == 2
    assert actions.take() == [Counted("splits", 1), last]
    assert actions.take() == []


# Its claims


def test_what_is_sent_of_claimed_partitions_goes_with_their_fences_and_a_read_without() -> None:
    play = gated(fenced=True)
    play.view.fences = {(b"t", 0): 7, (b"t", 1): 8}
    assert play.submits(1, "t-0 u-0 t-1") == [
        "send #1 b1/c1: 1 t-0 u-0 behind t-0=7",
        "send #2 b2/c2: 1 t-1 behind t-1=8",
    ]
    assert play.fetches(2, "t-0") == ["send #3 b1/c1: 2 t-0"]


def test_a_retry_goes_with_the_fence_in_force_when_it_is_sent() -> None:
    play = gated(fenced=True)
    play.view.fences = {(b"t", 0): 7}
    assert play.submits(1, "t-0") == ["send #1 b1/c1: 1 t-0 behind t-0=7"]
    assert play.answers(1, "t-0=6") == []
    play.view.fences = {(b"t", 0): 9}
    assert play.wakes() == ["send #2 b1/c1: 1 t-0 behind t-0=9"]


def test_what_waits_for_a_probe_goes_with_the_fence_in_force_when_it_is_released() -> None:
    play = gated(fenced=True)
    play.view.fences = {(b"t", 0): 7}
    assert play.submits(1, "t-0") == ["send #1 b1/c1: 1 t-0 behind t-0=7"]
    assert play.submits(2, "t-0") == []
    play.view.fences = {(b"t", 0): 9}
    assert play.answers(1, "t-0") == ["answer 1: t-0@10", "send #2 b1/c1: 2 t-0 behind t-0=9"]
