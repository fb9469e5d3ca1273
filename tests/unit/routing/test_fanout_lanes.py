"""Scripts for the fan-out: the order of one partition's batches, and the routes on which they may be pipelined."""

from __future__ import annotations

import pytest

from tests.support.models.playbook import Playbook, piped, proven

NOT_LEADER, NOT_ENOUGH_REPLICAS, OUT_OF_ORDER = 6, 19, 45


# Routes


def test_new_route_sends_one_batch_before_the_rest() -> None:
    play = Playbook()
    assert play.submits(1, "t-0") == ["send #1 b1/c1: 1 t-0"]
    assert [play.submits(n, "t-0") for n in (2, 3)] == [[], []]
    assert play.lanes == ["t-0 probing"]
    assert play.answers(1, "t-0") == ["answer 1: t-0@10", "send #2 b1/c1: 2 t-0", "send #3 b1/c1: 3 t-0"]
    assert play.lanes == []


def test_proven_route_pipelines_batches() -> None:
    play = piped(2, 3, 4)
    assert play.lanes == []
    assert [play.answers(n, "t-0") for n in (2, 3, 4)] == [[f"answer {n}: t-0@{n}0"] for n in (2, 3, 4)]


def test_other_partition_does_not_wait_for_proven_route() -> None:
    play = Playbook({"t": [1, 1]})
    play.submits(1, "t-0")
    assert play.submits(2, "t-0 t-1") == ["send #2 b1/c1: 2 t-1"]
    assert play.answers(1, "t-0") == ["answer 1: t-0@10", "send #3 b1/c1: 2 t-0"]
    assert play.answers(2, "t-1") == []
    assert play.answers(3, "t-0") == ["answer 2: t-0@30 t-1@20"]


@pytest.mark.parametrize("owners", [(2, 1), (None, 1), (1,)], ids=["left", "lost", "again"])
def test_route_is_new_after_ownership_returns(owners: tuple[int | None, ...]) -> None:
    play = proven()
    assert play.proven("t-0")
    play.moves("t-0", *owners)
    assert not play.proven("t-0")
    assert play.submits(2, "t-0") == ["send #2 b1/c1: 2 t-0"]
    assert play.submits(3, "t-0") == []


def test_route_is_new_again_on_another_connection() -> None:
    play = proven()
    assert play.loses(1) == []
    assert play.core._in_flight.connections == {}
    assert not play.proven("t-0")
    assert play.submits(2, "t-0") == ["send #2 b1/c2: 2 t-0"]
    assert play.submits(3, "t-0") == []


def test_only_first_batchs_success_proves_a_route() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    assert play.answers(1, "t-0=87") == ["answer 1: t-0=87"]
    assert not play.proven("t-0")
    play.submits(2, "t-0")
    assert play.submits(3, "t-0") == []
    play.answers(2, "t-0=6")
    assert not play.proven("t-0")
    play.wakes()
    assert not play.proven("t-0")
    play.answers(3, "t-0")
    assert play.proven("t-0")


def test_read_proves_no_route() -> None:
    """A broker that is not the owner may serve the read, which says nothing about the producer's state there."""
    play = Playbook()
    play.fetches(1, "t-0 t-1")
    play.answers(1, "t-0")
    play.answers(2, "t-1")
    assert not play.proven("t-0")


def test_success_on_a_proven_route_keeps_plans() -> None:
    play = Playbook()
    for first in (1, 3):
        play.submits(first, "t-0 t-1")
        before = play.core.routes.generation
        play.answers(first, "t-0")
        play.answers(first + 1, "t-1")
    assert play.core.routes.generation == before


def test_repeated_read_proves_no_route() -> None:
    play = Playbook()
    play.lists_offsets(1, "t-0")
    play.answers(1, "t-0=6")
    assert play.wakes() == ["send #2 b1/c1: 1 t-0"]
    play.answers(2, "t-0")
    assert play.submits(2, "t-0") == ["send #3 b1/c2: 2 t-0"]
    assert play.submits(3, "t-0") == [], "one batch goes first"


def test_success_under_earlier_ownership_proves_no_route() -> None:
    """The broker may have lost the partition since, and with it the producer's state."""
    play = Playbook()
    play.submits(1, "t-0")
    play.moves("t-0", 2, 1)
    assert play.submits(2, "t-0") == []
    assert play.submits(3, "t-0") == []
    # The next batch is the first on the new route, so it is sent alone.
    assert play.answers(1, "t-0") == ["answer 1: t-0@10", "send #2 b1/c1: 2 t-0"]
    assert not play.proven("t-0")
    assert play.answers(2, "t-0") == ["answer 2: t-0@20", "send #3 b1/c1: 3 t-0"]
    assert play.proven("t-0")


def test_routes_to_two_brokers_are_proven_singly() -> None:
    play = proven()
    before = play.core.routes.generation
    play.moves("t-0", 2)
    assert play.core.routes.generation > before
    play.submits(2, "t-0")
    play.answers(2, "t-0")
    assert play.core.routes.proven_on(b"t", 0) == 2


@pytest.mark.parametrize("change", ["moves", "removes", "loses"])
def test_forgotten_route_begins_a_generation(change: str) -> None:
    play = proven()
    before = play.core.routes.generation
    assert play.proven("t-0")
    if change == "moves":
        play.moves("t-0", 2)
    elif change == "removes":
        play.removes(3)
    else:
        play.loses(1)
    assert play.core.routes.generation > before


# Refusals on a proven route, and the batches that were pipelined behind them


@pytest.mark.parametrize("behind", [NOT_LEADER, NOT_ENOUGH_REPLICAS, OUT_OF_ORDER])
def test_batches_behind_refused_batch_are_resent_behind_it(behind: int) -> None:
    play = piped(2, 3, 4)
    play.moves("t-0", 2)
    assert play.answers(2, "t-0=6") == []
    # No retry before the refusals of the others are known.
    assert play.lanes == ["t-0 blocked"]
    assert play.wakes_in_ms() is None
    assert play.answers(3, f"t-0={behind}") == []
    assert play.answers(4, f"t-0={behind}") == []
    assert play.wakes() == ["send #5 b2/c2: 2 t-0"]
    # The retry is alone in flight until it has succeeded; later batches wait.
    assert play.submits(5, "t-0") == []
    assert play.answers(5, "t-0") == [
        "answer 2: t-0@50",
        "send #6 b2/c2: 3 t-0",
        "send #7 b2/c2: 4 t-0",
        "send #8 b2/c2: 5 t-0",
    ]


def test_first_batch_refused_again_is_resent_first() -> None:
    play = piped(2, 3)
    assert [play.answers(n, "t-0=6") for n in (2, 3)] == [[], []]
    assert play.wakes() == ["send #4 b1/c1: 2 t-0"]
    assert play.answers(4, "t-0=6") == []
    assert play.wakes_in_ms() == 101
    assert play.wakes() == ["send #5 b1/c1: 2 t-0"]
    assert play.answers(5, "t-0") == ["answer 2: t-0@50", "send #6 b1/c1: 3 t-0"]


def test_refusals_of_pipelined_batches_are_no_attempts() -> None:
    play = piped(2, 3)
    for piece in (2, 3):
        play.answers(piece, "t-0=6")
    play.wakes()
    assert play.answers(4, "t-0") == ["answer 2: t-0@40", "send #5 b1/c1: 3 t-0"]
    assert play.answers(5, "t-0=6") == []
    assert play.wakes() == ["send #6 b1/c1: 3 t-0"]
    assert play.answers(6, "t-0=6") == []
    assert play.wakes() == ["send #7 b1/c1: 3 t-0"]
    assert play.answers(7, "t-0=6") == ["answer 3: t-0=6"]


def test_appended_later_batch_passes_on_first_ones_code() -> None:
    play = piped(2, 3, 4, 5)
    assert play.answers(2, "t-0=6") == []
    assert play.answers(3, "t-0=45") == []
    assert play.answers(4, "t-0") == ["answer 2: t-0=6", "answer 3: t-0=6", "answer 4: t-0@40"]
    assert play.lanes == ["t-0 blocked"]
    # This batch did not prove the route that became new by the earlier refusal.
    assert not play.proven("t-0")
    assert play.answers(5, "t-0") == ["answer 5: t-0@50"]


def test_failed_later_batch_lets_first_be_resent() -> None:
    play = piped(2, 3, 4)
    assert play.answers(2, "t-0=6") == []
    assert play.answers(3, "t-0=87") == ["answer 3: t-0=87"]
    assert play.answers(4, "t-0=45") == []
    assert play.wakes() == ["send #5 b1/c1: 2 t-0"]


def test_batch_refused_for_itself_gets_its_own_code() -> None:
    play = piped(2, 3, 4)
    for piece, code in ((2, 6), (3, 19)):
        assert play.answers(piece, f"t-0={code}") == []
    assert play.answers(4, "t-0") == ["answer 2: t-0=6", "answer 3: t-0=19", "answer 4: t-0@40"]


def test_pipelined_refusals_do_not_lengthen_back_off() -> None:
    play = piped(2, 3)
    play.answers(2, "t-0=6")
    assert play.wakes_in_ms() is None
    play.waits(0.5)
    play.answers(3, "t-0=6")
    # The first batch's back-off ended long ago.
    assert play.wakes_in_ms() == 1
    assert play.wakes() == ["send #4 b1/c1: 2 t-0"]


# Giving up


def test_abandoned_first_batch_ends_those_behind_it() -> None:
    play = piped(2, 3, 4)
    for piece in (2, 3, 4):
        play.answers(piece, "t-0=6")
    assert play.wakes() == ["send #5 b1/c1: 2 t-0"]
    play.answers(5, "t-0=6")
    assert play.wakes() == ["send #6 b1/c1: 2 t-0"]
    assert play.answers(6, "t-0=6") == ["answer 2: t-0=6", "answer 3: t-0=6", "answer 4: t-0=6"]
    # Nothing stays blocked: the client sends the batches again.
    assert play.submits(5, "t-0", producer=(7, 0, 2)) == ["send #7 b1/c1: 5 t-0"]


@pytest.mark.parametrize(("code", "waiting"), [(56, "given up"), (3, "given up"), (2, "given up"), (87, "sent")])
def test_batch_behind_clients_resend_is_not_sent_first(code: int, waiting: str) -> None:
    """On a new route, a broker that does not know the producer would accept the later batch as its first."""
    play = Playbook()
    play.submits(1, "t-0")
    play.submits(2, "t-0")
    assert play.answers(1, f"t-0={code}") == [
        f"answer 1: t-0={code}",
        "answer 2: t-0=6" if waiting == "given up" else "send #2 b1/c1: 2 t-0",
    ]


def test_batch_in_flight_behind_abandoned_is_not_resent() -> None:
    play = piped(2, 3, 4)
    play.answers(2, "t-0=6")
    assert play.ticks(after_s=10) == ["answer 2: t-0=6", "answer 3: t-0=7", "answer 4: t-0=7"]


def test_retry_behind_expired_batch_is_given_up() -> None:
    """Appended alone, the later batch would be the first at a broker that does not know the producer."""
    play = proven()
    play.submits(2, "t-0", deadline_s=1)
    play.submits(3, "t-0")
    assert [play.answers(n, "t-0=19") for n in (2, 3)] == [[], []]
    assert play.ticks(after_s=1) == ["answer 2: t-0=19", "answer 3: t-0=19"]
    assert play.lanes == []


def test_only_batches_sent_unaware_are_given_up() -> None:
    """Requests 3 to 5 were sent before the answer to 2; request 6 follows the answer, and is in order again."""
    play = proven()
    play.submits(2, "t-0", deadline_s=1)
    for n in (3, 4, 5):
        play.submits(n, "t-0")
    play.answers(2, "t-0=19")
    assert play.ticks(after_s=1) == ["answer 2: t-0=19"]
    assert play.submits(6, "t-0", producer=(7, 0, 2)) == []
    # A retry of each would come after another batch.
    assert [play.answers(n, "t-0=45") for n in (3, 4)] == [["answer 3: t-0=6"], ["answer 4: t-0=6"]]
    assert play.answers(5, "t-0=45") == ["answer 5: t-0=6"]
    assert play.wakes() == ["send #6 b1/c1: 6 t-0"]


def test_batch_before_abandoned_one_is_still_resent() -> None:
    play = piped(2)
    play.submits(3, "t-0", deadline_s=1)
    play.submits(4, "t-0", deadline_s=2)
    assert play.ticks(after_s=1) == ["answer 3: t-0=7"]
    assert play.ticks(after_s=1) == ["answer 4: t-0=7"]
    assert play.answers(2, "t-0=6") == []
    assert [play.answers(n, "t-0=45") for n in (3, 4)] == [[], []]
    assert play.wakes() == ["send #5 b1/c1: 2 t-0"]


def test_batch_sent_unaware_is_not_begun() -> None:
    """It waits for the abandoned batch to prove a route."""
    play = Playbook()
    play.submits(1, "t-0", deadline_s=1)
    play.submits(2, "t-0")
    assert play.ticks(after_s=1) == ["answer 1: t-0=7", "answer 2: t-0=6"]
    assert play.lanes == ["t-0 probing"]
    # The log has the batch, and its client sends it again; a batch that the broker recognizes is not a new one.
    assert play.submits(3, "t-0", producer=(7, 0, 1)) == []
    assert play.answers(1, "t-0") == ["send #2 b1/c1: 3 t-0"]


# A change of owners


def test_later_batch_waits_for_answer_of_former_owner() -> None:
    play = piped(2, 3)
    play.moves("t-0", 2)
    assert [play.submits(n, "t-0") for n in (4, 5)] == [[], []]
    assert play.answers(2, "t-0") == ["answer 2: t-0@20"]
    assert play.answers(3, "t-0") == ["answer 3: t-0@30"]
    assert play.wakes() == ["send #4 b2/c2: 4 t-0"]
    assert play.answers(4, "t-0") == ["answer 4: t-0@40", "send #5 b2/c2: 5 t-0"]


def test_refusal_of_former_owner_precedes_waiting_batches() -> None:
    play = piped(2, 3)
    play.moves("t-0", 2)
    play.submits(4, "t-0")
    play.answers(2, "t-0")
    assert play.answers(3, "t-0=6") == []
    assert play.wakes() == ["send #4 b2/c2: 3 t-0"]
    assert play.answers(4, "t-0") == ["answer 3: t-0@40", "send #5 b2/c2: 4 t-0"]


@pytest.mark.parametrize(("code", "waiting"), [(56, ["answer 3: t-0=6"]), (87, [])])
def test_batch_behind_former_owners_failure_is_given_up(code: int, waiting: list[str]) -> None:
    """With 56 the client sends request 2 again, so 3 must not be first at the new owner; with 87 it does not."""
    play = piped(2)
    play.moves("t-0", 2)
    assert play.submits(3, "t-0") == []
    assert play.answers(2, f"t-0={code}") == [f"answer 2: t-0={code}", *waiting]
    assert play.lanes == [] if waiting else play.wakes() == ["send #3 b2/c2: 3 t-0"]


def test_batch_waits_for_one_under_earlier_ownership() -> None:
    """The broker refuses the first as not its owner, becomes the owner again, and would accept the second."""
    play = piped(2)
    play.moves("t-0", 2, 1)
    assert play.lanes == ["t-0 blocked"]
    assert play.submits(3, "t-0") == []
    assert play.answers(2, "t-0=6") == []
    assert play.wakes() == ["send #3 b1/c1: 2 t-0"]
    assert play.answers(3, "t-0") == ["answer 2: t-0@30", "send #4 b1/c1: 3 t-0"]


def test_ownership_move_during_first_batch_blocks_nothing() -> None:
    play = piped(2, 3, 4)
    for piece in (2, 3, 4):
        play.answers(piece, "t-0=6")
    assert play.wakes() == ["send #5 b1/c1: 2 t-0"]
    play.moves("t-0", 2)
    play.submits(5, "t-0")
    # The former owner's success does not prove the new owner's route.
    assert play.answers(5, "t-0") == ["answer 2: t-0@50", "send #6 b2/c2: 3 t-0"]
    assert play.answers(6, "t-0") == ["answer 3: t-0@60", "send #7 b2/c2: 4 t-0", "send #8 b2/c2: 5 t-0"]


def test_lane_waits_for_overdue_unanswered_batches() -> None:
    """Two batches of an earlier route, one refused: its back-off ends while the other is still at the former owner."""
    play = piped(2, 3)
    play.moves("t-0", 2)
    play.answers(2, "t-0=6")
    play.waits(5)
    assert play.submits(4, "t-0") == []
    assert play.ticks() == []
    assert play.wakes_in_ms() is None
    play.answers(3, "t-0=6")
    assert play.wakes() == ["send #4 b2/c2: 2 t-0"]


def test_split_request_waits_only_for_blocked_partition() -> None:
    play = piped(2)
    play.moves("t-0", 2)
    assert play.submits(3, "t-0 t-1") == ["send #3 b2/c2: 3 t-1"]
    assert play.answers(3, "t-1") == []
    assert play.answers(2, "t-0") == ["answer 2: t-0@20"]
    assert play.wakes() == ["send #4 b2/c2: 3 t-0"]
    assert play.answers(4, "t-0") == ["answer 3: t-0@40 t-1@30"]


def test_unowned_partition_goes_to_live_broker_in_order() -> None:
    """The broker may refuse one batch, become the owner at that request, and then accept the next batch."""
    play = Playbook({"t": [None]})
    (first,) = play.submits(1, "t-0")
    assert play.submits(2, "t-0") == []
    broker = play.sent[1].broker
    assert play.answers(1, "t-0=6") == []
    play.moves("t-0", broker)
    assert play.wakes() == [f"send #2 b{broker}/c1: 1 t-0"]
    assert play.answers(2, "t-0") == ["answer 1: t-0@20", f"send #3 b{broker}/c1: 2 t-0"]
    assert first == f"send #1 b{broker}/c1: 1 t-0"


def test_unowned_partition_skips_broker_that_refused() -> None:
    play = Playbook({"t": [None]})
    brokers = []
    play.submits(1, "t-0")
    for piece in (1, 2, 3):
        brokers.append(play.sent[piece].broker)
        if piece < 3:
            play.answers(piece, "t-0=6")
            play.wakes()
    assert len(set(brokers)) == 3


def test_unowned_partition_returns_to_retriable_broker() -> None:
    play = Playbook({"t": [None]})
    play.submits(1, "t-0")
    play.answers(1, "t-0=19")
    play.wakes()
    assert play.sent[2].broker == play.sent[1].broker


def test_unowned_partition_stays_with_accepting_broker() -> None:
    play = Playbook({"t": [None]})
    play.submits(1, "t-0")
    first = play.sent[1].broker
    play.answers(1, "t-0=6")
    play.wakes()
    second = play.sent[2].broker
    assert second != first
    play.answers(2, "t-0")
    play.submits(2, "t-0")
    play.submits(3, "t-0")
    assert [each.broker for each in play.sent.values()] == [first, second, second, second]
    assert play.lanes == []
    play.removes(second)
    play.submits(4, "t-0")
    assert 5 not in play.sent
    play.answers(3, "t-0")
    play.answers(4, "t-0")
    play.wakes()
    assert play.sent[5].broker != second


def test_broker_denying_ownership_gets_one_batch_first() -> None:
    """This holds whether or not the client must resend the refused batch."""
    play = piped(2)
    assert play.proven("t-0")
    for piece in (2, 3, 4):
        told = play.answers(piece, "t-0=6")
        if piece < 4:
            assert play.wakes() == [f"send #{piece + 1} b1/c1: 2 t-0"]
    assert told == ["answer 2: t-0=6"]
    assert not play.proven("t-0")
    assert play.submits(3, "t-0", producer=(7, 0, 2)) == ["send #5 b1/c1: 3 t-0"]
    assert play.submits(4, "t-0") == []


def test_refused_read_leaves_proven_route_until_move() -> None:
    play = proven()
    play.passes(2, "t-0")
    play.lists_offsets(3, "t-0")
    (read,) = play.pieces
    play.answers(read, "t-0=6")
    assert play.proven("t-0")
    play.moves("t-0", 2)
    assert [each for each in play.submits(4, "t-0") if each.startswith("send")] == []


def test_late_refusal_by_another_broker_keeps_route_proven() -> None:
    play = piped(2)
    play.moves("t-0", 2)
    assert play.submits(3, "t-0") == []
    play.answers(2, "t-0")
    assert play.wakes() == ["send #3 b2/c2: 3 t-0"]
    play.answers(3, "t-0")
    assert play.proven("t-0")


def test_unowned_batches_are_in_flight_at_one_broker() -> None:
    play = Playbook({"t": [None]})
    for n in (1, 2, 3, 4):
        play.submits(n, "t-0")
        if n == 1:
            play.answers(1, "t-0")
    play.answers(2, "t-0=6")
    play.answers(3, "t-0=45")
    play.answers(4, "t-0=6")
    play.wakes()
    # The third batch goes to the first broker, on an unproven route; the fourth waits, whichever broker refused it.
    assert play.answers(5, "t-0=87")[0] == "answer 2: t-0=87"
    assert play.sent[6].exchange.sequence == 3
    assert play.lanes == ["t-0 probing"]
    assert len(play.answers(6, "t-0")) == 2
    assert play.sent[7].broker == play.sent[6].broker


# Events that concern several partitions


def test_event_changes_all_lanes_before_sending() -> None:
    """One answer releases one partition of request 2 and gives up the other: only the released one is sent."""
    play = Playbook({"t": [1, 1]})
    play.submits(1, "t-0 t-1")
    play.submits(2, "t-0 t-1")
    assert play.answers(1, "t-0 t-1=56") == ["answer 1: t-0@10 t-1=56", "send #2 b1/c1: 2 t-0"]
    assert play.answers(2, "t-0") == ["answer 2: t-0@20 t-1=6"]


def test_batches_released_together_share_a_piece_per_broker() -> None:
    play = Playbook({"t": [1, 1, 2]})
    play.submits(1, "t-0 t-1")
    play.submits(2, "t-2")
    play.submits(3, "t-0 t-1 t-2")
    assert play.answers(1, "t-0 t-1") == ["answer 1: t-0@10 t-1@10", "send #3 b1/c1: 3 t-0 t-1"]


def test_batches_released_together_keep_request_order() -> None:
    play = Playbook({"t": [1, 1]})
    play.submits(1, "t-0 t-1")
    for n in (2, 3):
        assert play.submits(n, "t-0 t-1") == []
    assert play.answers(1, "t-0 t-1")[1:] == ["send #2 b1/c1: 2 t-0 t-1", "send #3 b1/c1: 3 t-0 t-1"]


def test_new_batch_does_not_overtake_resent_ones() -> None:
    play = piped(2, 3)
    assert play.loses(1) == []
    assert play.submits(4, "t-0") == []
    assert play.wakes() == ["send #4 b1/c2: 2 t-0"]
    assert play.answers(4, "t-0") == ["answer 2: t-0@40", "send #5 b1/c2: 3 t-0", "send #6 b1/c2: 4 t-0"]
