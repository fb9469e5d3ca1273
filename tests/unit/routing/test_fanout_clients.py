"""Scripts for the fan-out: the client leaves, or another client takes its claims."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kproxy.routing.actions import Actions, Counted, Undeliverable
from kproxy.routing.merge import ExchangeState
from tests.support.models.playbook import Playbook, piped
from tests.support.wire.messages import frame_of


def gated(*, fenced: bool = False, dials: bool = False) -> Playbook:
    """Topic t has a writer group, topic u has none; broker 1 has half of each, broker 2 the rest."""
    return Playbook({"t": [1, 2], "u": [1, 2]}, gated=["t"], fenced=fenced, dials=dials)


# Clients that disconnect


def test_written_batch_of_writer_group_is_held() -> None:
    play = gated()
    play.submits(1, "t-0 t-1")
    assert play.parts() == ["hold #1: t-0", "hold #2: t-1", "drop 1"]
    assert play.answers(1, "t-0") == ["let go #1"]
    assert play.aside == []
    assert play.answers(2, "t-1=6") == ["let go #2"]
    assert play.lanes == []


def test_bytes_of_held_batches_are_released() -> None:
    """Held bytes may stay for a long time, and are not sent again."""
    play = gated()
    play.submits(1, "t-0")
    assert play.parts() == ["hold #1: t-0", "drop 1"]
    assert play.exchanges[1].request.frame.nbytes == 0


def test_only_partitions_with_writer_group_are_held() -> None:
    play = gated()
    play.submits(1, "t-0 u-0")
    assert play.parts() == ["hold #1: t-0", "drop 1"]
    assert play.answers(1, "t-0 u-0") == ["let go #1"]


def test_partition_without_writer_group_goes_on() -> None:
    play = gated()
    play.submits(1, "u-0")
    play.submits(2, "u-0")
    assert play.parts() == []
    assert play.answers(1, "u-0") == ["answer 1: u-0@10", "send #2 b1/c1: 2 u-0"]


def test_lost_held_batch_is_reported_before_release() -> None:
    play = gated()
    play.submits(1, "t-0")
    play.parts()
    assert play.loses(1) == ["lost t-0", "let go #1"]


def test_unwritten_held_batch_is_released_and_not_lost() -> None:
    play = gated()
    play.submits(1, "t-0")
    play.parts()
    assert play.loses(1, unwritten=[1]) == ["let go #1"]


def test_unreadable_held_answer_is_lost_before_connection_ends() -> None:
    play = gated()
    play.submits(1, "t-0")
    play.parts()
    assert play.answers_bytes(1, frame_of(b"\0\0\0\7")) == ["lost t-0", "distrust c1", "let go #1"]


def test_batch_waiting_for_dial_is_taken_back() -> None:
    play = gated(dials=True)
    play.submits(1, "t-0 u-1")
    play.opens(2)
    assert play.parts() == ["withdraw #1 from c1", "drop 1"]
    assert play.answers(2, "u-1") == []


def test_batch_waiting_in_lane_is_not_sent() -> None:
    play = gated()
    play.submits(1, "t-0")
    play.submits(2, "t-0")
    assert play.parts() == ["hold #1: t-0", "drop 1", "drop 2"]
    assert play.answers(1, "t-0") == ["let go #1"]
    assert play.lanes == []


@pytest.mark.parametrize("end", [Playbook.parts, Playbook.severs, Playbook.closes])
def test_batch_waiting_for_retry_is_not_sent(end: Callable[[Playbook], list[str]]) -> None:
    play = gated()
    play.submits(1, "t-0")
    play.answers(1, "t-0=6")
    assert end(play) == ["drop 1"]
    assert play.wakes() == []
    assert play.lanes == []


def test_batch_refused_afterwards_is_not_resent() -> None:
    play = gated()
    play.submits(1, "t-0 u-0", acks=1, silent=True)
    assert play.parts() == ["hold #1: t-0"]
    # Nobody waits for this answer; batches without a writer group may still be delivered.
    assert play.answers(1, "t-0=6 u-0=6") == ["let go #1", "undeliverable t=6"]
    assert play.wakes() == ["send #2 b1/c1: 1 u-0"]
    assert play.answers(2, "u-0") == ["done 1"]


def test_unanswered_unsent_batch_is_undeliverable() -> None:
    play = gated()
    play.submits(1, "t-0", acks=1, silent=True)
    play.submits(2, "t-0 u-1", acks=1, silent=True)
    assert play.parts() == ["hold #1: t-0", "undeliverable t=44"]
    assert play.answers(2, "u-1") == ["done 2"]
    assert play.answers(1, "t-0") == ["done 1", "let go #1"]


def test_fenced_batch_is_reported_lost() -> None:
    """Its connections end with it; fences protect the partitions, but another process may not know them yet."""
    play = gated(fenced=True)
    play.submits(1, "t-0 u-0")
    assert play.parts() == ["lost t-0", "drop 1"]
    assert play.loses(1) == ["lost t-0"]


def test_lost_batch_of_present_client_is_reported() -> None:
    play = gated()
    play.submits(1, "t-0 u-0", producer=None)
    assert play.loses(1) == ["lost t-0", "answer 1: t-0=7 u-0=7"]


# Claims that were lost


def test_severed_client_sends_nothing() -> None:
    play = gated(dials=True)
    play.submits(1, "u-0")
    play.submits(2, "u-1")
    play.opens(1)
    assert play.severs() == ["withdraw #2 from c2", "drop 1", "drop 2"]
    assert play.answers(1, "u-0=6") == []
    assert play.lanes == []


def test_severed_client_ends_its_reads() -> None:
    play = gated()
    play.fetches(1, "u-0 u-1", until_s=1)
    play.fetches(2, "u-0 u-1", until_s=1)
    assert play.severs() == ["drop 1", "drop 2"]
    assert play.answers(1, "u-0:100") == []


def test_departed_client_may_be_severed_once_more() -> None:
    play = gated()
    play.submits(1, "t-0")
    play.submits(2, "u-0", acks=1, silent=True)
    play.submits(3, "u-0", acks=1, silent=True)
    assert play.parts() == ["hold #1: t-0", "drop 1"]
    assert play.severs() == ["done 3", "undeliverable u=44"]
    assert play.answers(1, "t-0") == ["let go #1"]
    assert play.answers(2, "u-0") == ["done 2"]


def test_overdue_batch_at_release_gives_up_nothing() -> None:
    """The last request also has a topic with a writer group, so all of it is dropped with its client."""
    play = Playbook({"t": [1], "g": [2]}, gated=["g"])
    for sequence in (1, 2, 3):
        play.submits(sequence, "t-0")
    play.submits(4, "t-0 g-0")
    assert play.parts() == ["hold #2: g-0", "drop 4"]
    assert play.answers(1, "t-0=87") == ["answer 1: t-0=87", "send #3 b1/c1: 2 t-0"]
    assert play.answers(3, "t-0") == ["answer 2: t-0@30", "send #4 b1/c1: 3 t-0"]


@pytest.mark.parametrize("again", [Playbook.parts, Playbook.severs])
def test_severed_client_stays_severed(again: Callable[[Playbook], list[str]]) -> None:
    play = gated()
    play.severs()
    with pytest.raises(ValueError, match="a client cannot go from severed"):
        again(play)


def test_unwritten_piece_of_severed_client_leaves_nothing() -> None:
    play = gated()
    play.submits(1, "t-0")
    play.unsent(1)
    assert play.severs() == ["drop 1"]
    assert play.lanes == []


# The end of the core


def test_departed_client_drops_answers_and_keeps_acks_0() -> None:
    play = Playbook(dials=True)
    play.submits(1, "t-0")
    play.submits(2, "t-1", acks=0)
    assert play.closes() == ["drop 1", "withdraw #1 from c1"]
    play.opens(2)
    assert play.leaves(2) == ["done 2"]


def test_departed_client_drops_waiting_and_keeps_written_batches() -> None:
    play = Playbook()
    play.submits(1, "t-0", acks=1, silent=True)
    play.submits(2, "t-0")
    play.submits(3, "t-0", acks=1, silent=True)
    assert play.closes() == ["drop 2"]
    assert play.answers(1, "t-0") == ["done 1", "send #2 b1/c1: 3 t-0"]


def test_dropped_request_keeps_lane_until_answered() -> None:
    play = piped(2)
    play.submits(3, "t-0", acks=1, silent=True)
    play.moves("t-0", 2)
    assert play.closes() == ["drop 2"]
    play.answers(3, "t-0=6")
    assert play.wakes_in_ms() is None
    play.answers(2, "t-0=6")
    assert play.wakes() == ["send #4 b2/c2: 3 t-0"]


def test_batch_left_at_the_end_is_undeliverable() -> None:
    play = Playbook(dials=True)
    play.submits(1, "t-0", acks=0)
    play.submits(2, "t-1", acks=1, silent=True)
    play.opens(2)
    play.closes()
    assert play.ends() == ["withdraw #1 from c1", "done 1", "done 2", "undeliverable t=6", "undeliverable t=7"]
    assert play.aside == []


def test_acknowledgement_of_departed_client_is_not_noted() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    play.closes()
    assert play.answers(1, "t-0") == []
    assert play.aside == []
    assert play.exchanges[1].state is ExchangeState.DROPPED


def test_whole_success_of_departed_client_is_dropped() -> None:
    play = piped(2)
    assert play.closes() == ["drop 2"]
    assert play.answers(2, "t-0") == []


# The order of actions


def test_end_of_client_connection_comes_last() -> None:
    actions = Actions()
    last = Undeliverable(b"t", 6)
    actions.add_last(last)
    actions.add(Counted("splits", 1))
    assert len(actions) == 2
    assert actions.take() == [Counted("splits", 1), last]
    assert actions.take() == []


# Claims of a client


def test_claimed_partitions_carry_fences_and_reads_none() -> None:
    play = gated(fenced=True)
    play.view.fences = {(b"t", 0): 7, (b"t", 1): 8}
    assert play.submits(1, "t-0 u-0 t-1") == [
        "send #1 b1/c1: 1 t-0 u-0 behind t-0=7",
        "send #2 b2/c2: 1 t-1 behind t-1=8",
    ]
    assert play.fetches(2, "t-0") == ["send #3 b1/c3: 2 t-0"]


def test_retry_carries_the_current_fence() -> None:
    play = gated(fenced=True)
    play.view.fences = {(b"t", 0): 7}
    assert play.submits(1, "t-0") == ["send #1 b1/c1: 1 t-0 behind t-0=7"]
    assert play.answers(1, "t-0=6") == []
    play.view.fences = {(b"t", 0): 9}
    assert play.wakes() == ["send #2 b1/c1: 1 t-0 behind t-0=9"]


def test_batch_released_by_probe_carries_current_fence() -> None:
    play = gated(fenced=True)
    play.view.fences = {(b"t", 0): 7}
    assert play.submits(1, "t-0") == ["send #1 b1/c1: 1 t-0 behind t-0=7"]
    assert play.submits(2, "t-0") == []
    play.view.fences = {(b"t", 0): 9}
    assert play.answers(1, "t-0") == ["answer 1: t-0@10", "send #2 b1/c1: 2 t-0 behind t-0=9"]
