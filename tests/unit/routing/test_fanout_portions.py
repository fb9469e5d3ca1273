"""A request of many partitions without a broker is judged in portions."""

from __future__ import annotations

import pytest

from kproxy.routing.fanout import MOST_AT_ONCE
from tests.support.models.playbook import Playbook

PARTITIONS = 5 * MOST_AT_ONCE + 1
OF_NOBODY = " ".join(f"u{number}-0" for number in range(PARTITIONS))


def playbook() -> Playbook:
    return Playbook({"t": [1]}, offers_unowned=False)


@pytest.mark.parametrize("api", ["produce", "fetch", "list offsets"])
def test_partitions_without_broker_fail_in_portions(api: str) -> None:
    play = playbook()
    if api == "produce":
        play.submits(1, OF_NOBODY)
    elif api == "fetch":
        play.fetches(1, OF_NOBODY)
    else:
        play.lists_offsets(1, OF_NOBODY)
    while 1 not in play.answered:
        # Each answer that is judged doubts an owner.
        assert 0 < sum(each.startswith("reread") for each in play.aside) <= MOST_AT_ONCE
        play.aside.clear()
        play.wakes()
    assert len(play.answered[1].results) == PARTITIONS
    assert len({result.code for result in play.answered[1].results}) == 1


def test_later_batches_wait_behind_postponed_ones() -> None:
    play = playbook()
    play.submits(1, OF_NOBODY)
    last = f"u{PARTITIONS - 1}"
    play.submits(2, f"{last}-0")
    play.moves(f"{last}-0", 1)
    for _ in range(20):
        if play.pieces:
            break
        play.wakes()
    (number,) = play.pieces
    assert play.pieces[number].exchange.sequence == 1
    play.answers(number, f"{last}-0")
    assert [piece.exchange.sequence for piece in play.pieces.values()] == [2]


def test_client_end_leaves_no_postponed_partition() -> None:
    play = playbook()
    play.submits(1, OF_NOBODY)
    play.closes()
    assert not play.core.lanes.table
