"""Scripts for the fan-out: the limits of a read over several brokers (KIP-74), and brokers that answer it late."""

from __future__ import annotations

import random

import pytest

from kproxy.routing.in_flight import LATE_AFTER_S
from tests.support.models.playbook import Playbook

LATE_MS = round(1000 * LATE_AFTER_S)

# Limits


def found(play: Playbook, sequence: int, asked: str, answers: dict[int, str], **limits: int) -> list[int]:
    """Run a fetch with the brokers' results; return the bytes of records that the client gets by partition."""
    for send in play.fetches(sequence, asked, until_s=0.01, **limits):
        piece, broker = int(send[6 : send.index(" b")]), int(send[send.index(" b") + 2])
        play.answers(piece, answers[broker])
    return play.answered[sequence].sizes


ONE_EACH = {1: "t-0:900", 2: "t-1:900", 3: "t-2:900"}


def test_only_first_batch_exceeds_max_bytes() -> None:
    assert found(Playbook(), 1, "t-0 t-1 t-2", ONE_EACH, max_bytes=1) == [900, 0, 0]


def test_later_results_fill_the_remaining_bytes() -> None:
    answers = {1: "t-0:900", 2: "t-1:200", 3: "t-2:100"}
    assert found(Playbook(), 1, "t-0 t-1 t-2", answers, max_bytes=1000) == [900, 0, 100]


def test_results_within_max_bytes_all_stay() -> None:
    assert found(Playbook(), 1, "t-0 t-1 t-2", ONE_EACH, max_bytes=2700) == [900, 900, 900]


def test_partition_without_records_is_not_the_first() -> None:
    answers = {**ONE_EACH, 1: "t-0"}
    assert found(Playbook(), 1, "t-0 t-1 t-2", answers, max_bytes=1000) == [0, 900, 0]


def test_one_brokers_answer_is_not_cut() -> None:
    """A broker applies the limits itself, in the order in which it reads."""
    play = Playbook({"t": [1, 1]})
    assert found(play, 1, "t-0 t-1", {1: "t-1:900 t-0:200"}, max_bytes=1000) == [200, 900]


def test_partition_limit_holds_but_for_the_first() -> None:
    play = Playbook()
    play.fetches(1, "t-0 t-1", until_s=1)
    # The limit of each partition is 1 MiB (tests.support.wire.messages).
    play.answers(1, f"t-0:{(1 << 20) + 1}")
    play.answers(2, f"t-1:{(1 << 20) + 1}")
    assert play.answered[1].sizes == [(1 << 20) + 1, 0]


def test_left_out_partition_is_first_next_time() -> None:
    play = Playbook()
    got = [found(play, n, "t-0 t-1 t-2", ONE_EACH, max_bytes=1000) for n in (1, 2, 3, 4)]
    assert got == [[900, 0, 0], [0, 900, 0], [0, 0, 900], [900, 0, 0]]


def test_left_out_partition_stays_first_until_asked() -> None:
    play = Playbook()
    found(play, 1, "t-0 t-1 t-2", ONE_EACH, max_bytes=1000)
    found(play, 2, "t-0 t-2", ONE_EACH, max_bytes=5000)
    assert found(play, 3, "t-0 t-1 t-2", ONE_EACH, max_bytes=1000) == [0, 900, 0]


def test_random_reads_starve_no_partition(record_property: pytest.RecordProperty) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    record_property("seed", seed)
    chance = random.Random(seed)
    play = Playbook({"t": [1, 2, 3, 1, 2, 3]})
    since = dict.fromkeys(range(6), 0)
    for n in range(1, 200):
        order = chance.sample(range(6), 6)
        sizes = {index: chance.choice((100, 600, 1500)) for index in order}
        answers = {
            broker: " ".join(f"t-{index}:{sizes[index]}" for index in order if index % 3 == broker - 1)
            for broker in (1, 2, 3)
        }
        got = found(play, n, " ".join(f"t-{index}" for index in order), answers, max_bytes=1000)
        taken = {index: size for index, size in zip(order, got, strict=True) if size}
        assert sum(taken.values()) <= 1000 or len(taken) == 1
        for index in order:
            assert taken.get(index, sizes[index]) == sizes[index]
            since[index] = 0 if index in taken else since[index] + 1
        assert max(since.values()) < 6 * 6, f"a partition waits since {since}"


def test_least_bytes_are_at_most_max_bytes() -> None:
    """A broker that fills its share can send no more, whatever minimum the request asks for."""
    assert found(Playbook(), 1, "t-0 t-1", {1: "t-0:500", 2: "t-1"}, min_bytes=5000, max_bytes=1000) == [500, 0]
    play = Playbook()
    play.fetches(1, "t-0 t-1", until_s=1, min_bytes=5000, max_bytes=1)
    play.answers(1, "t-0")
    assert play.answers(2, "t-1") == [], "a read without any records was answered before its time"


# Late brokers


def late() -> Playbook:
    """A fetch from three brokers, of which the third does not answer; the answer comes without it."""
    play = Playbook()
    play.fetches(1, "t-0 t-1 t-2", until_s=0.5)
    play.answers(1, "t-0:100")
    play.answers(2, "t-1:100")
    assert play.wakes_in_ms() == LATE_MS
    assert play.wakes() == ["answer 1: t-0 t-1 t-2"]
    assert play.answered[1].sizes == [100, 100, 0]
    return play


def test_late_broker_is_left_out_of_the_answer() -> None:
    play = late()
    # The answer is not kept: the memory of the other brokers' answers is free.
    assert play.exchanges[1]._results is None
    assert len(play.exchanges[1].request.frame) == 0


def test_late_broker_gets_no_further_read() -> None:
    play = late()
    assert play.fetches(2, "t-0 t-1 t-2", until_s=0.5) == ["send #4 b1/c1: 2 t-0", "send #5 b2/c2: 2 t-1"]
    play.answers(4, "t-0:100")
    assert play.answers(5, "t-1") == ["answer 2: t-0 t-1 t-2"]


def test_late_answer_is_discarded_and_read_again() -> None:
    play = late()
    assert play.answers(3, "t-2:100") == []
    assert play.fetches(2, "t-2", until_s=0.5) == ["send #4 b3/c3: 2 t-2"]
    assert play.answers(4, "t-2:100") == ["answer 2: t-2"]


def test_slow_broker_gets_twice_its_last_time() -> None:
    play = late()
    play.waits(0.4)
    play.answers(3, "t-2:100")
    play.fetches(2, "t-0 t-2", until_s=0.1)
    play.answers(4, "t-0:100")
    sent_at = play.now
    assert play.wakes() == []
    play.waits(sent_at + 1.1 - play.now)
    assert play.wakes_in_ms() == 100
    assert play.answers(5, "t-2:100") == ["answer 2: t-0 t-2"]


def test_patience_with_a_broker_falls_again() -> None:
    play = late()
    play.waits(0.4)
    play.answers(3, "t-2")
    for n in range(2, 8):
        play.fetches(n, "t-0 t-2", until_s=0.1)
        play.answers(2 * n, "t-0:100")
        play.answers(2 * n + 1, "t-2:100")
    play.fetches(9, "t-0 t-2", until_s=0.1)
    play.answers(16, "t-0:100")
    began = play.now
    while 9 not in play.answered:
        play.wakes()
    assert play.now - began < 2 * LATE_AFTER_S


def test_read_without_records_goes_on_without_late_broker() -> None:
    play = Playbook()
    play.fetches(1, "t-0 t-2", until_s=1)
    play.answers(1, "t-0")
    assert play.wakes() == []
    assert play.wakes() == ["send #3 b1/c1: 1 t-0"]
    # The late broker's answer to the earlier round does not belong to this one.
    assert play.answers(2, "t-2:100") == []
    assert play.answers(3, "t-0") == []
    assert play.wakes() == ["send #4 b1/c1: 1 t-0", "send #5 b3/c2: 1 t-2"]
    play.answers(4, "t-0")
    assert play.answers(5, "t-2:100") == ["answer 1: t-0 t-2"]


def test_read_of_one_broker_waits_there() -> None:
    play = Playbook()
    play.fetches(1, "t-0", until_s=0.5)
    assert play.wakes_in_ms() is None


def test_read_of_one_late_broker_finds_nothing() -> None:
    play = late()
    assert play.fetches(2, "t-2", until_s=0.001) == ["answer 2: t-2"]


def test_arriving_answer_is_not_late() -> None:
    play = Playbook()
    play.fetches(1, "t-0 t-2", until_s=0.5)
    play.answers(1, "t-0:100")
    assert [play.wakes(receiving=[2]), play.wakes_in_ms()] == [[], LATE_MS]
    assert play.answers(2, "t-2:100") == ["answer 1: t-0 t-2"]


def test_partition_of_late_broker_follows_its_owner() -> None:
    play = Playbook()
    play.fetches(1, "t-0 t-2", until_s=1)
    play.answers(1, "t-0")
    play.wakes()
    play.moves("t-2", 2)
    assert play.wakes() == ["send #3 b1/c1: 1 t-0", "send #4 b2/c3: 1 t-2"]
    # The end of the late broker's connection affects no open request.
    assert play.loses(2) == []
    play.answers(3, "t-0")
    assert play.answers(4, "t-2:100") == ["answer 1: t-0 t-2"]


@pytest.mark.parametrize("how", ["refused", "refused as a whole", "lost"])
def test_late_refusal_doubts_the_owner(how: str) -> None:
    play = late()
    if how == "lost":
        play.loses(3)
    else:
        play.answers(3, "t-2=6" if how == "refused" else "t-2", error_code=6 if how != "refused" else 0)
    assert "reread t-2" in play.aside


def test_refused_partition_is_retried_and_not_left_out() -> None:
    play = Playbook()
    play.fetches(1, "t-0 t-1", until_s=0.05)
    play.answers(1, "t-0:100")
    play.answers(2, "t-1=6")
    assert play.wakes() == ["send #3 b2/c2: 1 t-1"]
    assert play.answers(3, "t-1:100") == ["answer 1: t-0 t-1"]


def test_offsets_are_listed_however_late() -> None:
    play = Playbook()
    play.lists_offsets(1, "t-0 t-1")
    play.answers(1, "t-0")
    assert play.wakes_in_ms() is None
