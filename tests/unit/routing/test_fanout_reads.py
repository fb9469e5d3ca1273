"""Scripts for the reads of a client over several brokers: what is asked, kept and answered (kproxy.routing.reads)."""

from __future__ import annotations

import random

import pytest

from kproxy.routing.reads import FOUND_S, LATE_AFTER_S
from kproxy_codec.api_keys import FETCH
from kproxy_codec.fetch import FetchApi, offsets_of, parse_fetch
from tests.support.models.playbook import Playbook
from tests.support.models.playbook_words import read_request

LATE_MS = round(1000 * LATE_AFTER_S)

# Limits


def found(play: Playbook, sequence: int, asked: str, answers: dict[int, str], **limits: int) -> list[int]:
    """Run a fetch that waits for all its brokers; return the bytes of records that the client gets by partition."""
    for send in play.fetches(sequence, asked, **limits):
        piece, broker = int(send[6 : send.index(" b")]), int(send[send.index(" b") + 2])
        play.answers(piece, answers[broker])
    return play.answered[sequence].sizes


ONE_EACH = {1: "t-0:900", 2: "t-1:900", 3: "t-2:900"}


OVER_A_MIB = (1 << 20) + 1


@pytest.mark.parametrize(
    ("answers", "max_bytes", "given"),
    [
        (ONE_EACH, 1, [900, 0, 0]),
        ({1: "t-0:900", 2: "t-1:200", 3: "t-2:100"}, 1000, [900, 0, 100]),
        (ONE_EACH, 2700, [900, 900, 900]),
        ({**ONE_EACH, 1: "t-0"}, 1000, [0, 900, 0]),
        # The limit of each partition is 1 MiB (tests.support.wire.messages).
        ({1: f"t-0:{OVER_A_MIB}", 2: f"t-1:{OVER_A_MIB}", 3: "t-2"}, 1 << 30, [OVER_A_MIB, 0, 0]),
    ],
    ids=["one batch", "what fits", "all", "not first without records", "one too large for its partition"],
)
def test_answer_is_cut_at_max_bytes(answers: dict[int, str], max_bytes: int, given: list[int]) -> None:
    assert found(Playbook(), 1, "t-0 t-1 t-2", answers, max_bytes=max_bytes) == given


def test_one_brokers_answer_is_not_cut() -> None:
    """A broker applies the limits itself, in the order in which it reads."""
    play = Playbook({"t": [1, 1]})
    assert found(play, 1, "t-0 t-1", {1: "t-1:900 t-0:200"}, max_bytes=1000) == [200, 900]


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


# Waits


def test_first_data_answers_a_read_at_once() -> None:
    play = two()
    assert play.answers(1, "t-0:100") == ["answer 1: t-0 t-1"]
    assert play.answered[1].sizes == [100, 0]


def two(until_s: float = 0.5, **limits: int) -> Playbook:
    """A fetch of two brokers that wait for data."""
    play = Playbook()
    sent = play.fetches(1, "t-0@5 t-1@7", until_s=until_s, **limits)
    assert sent == ["send #1 b1/c1: 1 t-0", "send #2 b2/c2: 1 t-1"]
    return play


def test_brokers_wait_as_long_as_the_client() -> None:
    play = two(min_bytes=3, max_bytes=100)
    splitter = play.exchanges[1].splitter(2, play.sent[1].least_bytes)
    asked = parse_fetch(memoryview(b"".join(splitter.part([(0, [0])], 9))), play.exchanges[1].request.header)
    assert (asked.max_wait_ms, asked.min_bytes, asked.max_bytes) == (500, 2, 50)


def first_answered() -> Playbook:
    play = two()
    play.answers(1, "t-0:100")
    return play


def test_waiting_broker_serves_the_next_read() -> None:
    play = first_answered()
    assert play.fetches(2, "t-0@6 t-1@7", until_s=0.5) == ["send #3 b1/c1: 2 t-0"]
    assert play.answers(2, "t-1:30") == ["answer 2: t-0 t-1"]
    assert play.answered[2].sizes == [0, 30]


def test_answer_between_reads_is_kept_for_the_next() -> None:
    play = first_answered()
    assert play.answers(2, "t-1:30") == []
    assert play.fetches(2, "t-0@6 t-1@7", until_s=0.5) == ["send #3 b1/c1: 2 t-0", "answer 2: t-0 t-1"]
    assert play.answered[2].sizes == [0, 30]
    # It is given once.
    assert play.fetches(3, "t-0@6 t-1@7", until_s=0.5) == ["send #4 b2/c2: 3 t-1"]


@pytest.mark.parametrize(
    ("asked", "limits"),
    [
        ("t-0@6 t-1@8", {}),
        ("t-0@6 t-1@7", {"max_bytes": 1000}),
        ("t-0@6 t-1@7", {"min_bytes": 2}),
        ("t-0@6 t-1@7", {"isolation_level": 0}),
        ("t-0@6 t-1@7", {"max_wait_ms": 100}),
    ],
)
@pytest.mark.parametrize("arrives", ["before", "after"])
def test_answer_to_another_question_is_not_given(asked: str, limits: dict[str, int], arrives: str) -> None:
    play = first_answered()
    if arrives == "before":
        play.answers(2, "t-1:30")
    sent = play.fetches(2, asked, until_s=0.5, **limits)
    assert "answer 2: t-0 t-1" not in sent
    if arrives == "after":
        # The next question goes on another connection, and does not wait behind it.
        assert sent == ["send #3 b1/c1: 2 t-0", "send #4 b2/c3: 2 t-1"]
        assert play.answers(2, "t-1:30") == []
    else:
        assert sent == ["send #3 b1/c1: 2 t-0", "send #4 b2/c2: 2 t-1"]
    assert play.answers(4, "t-1:40") == ["answer 2: t-0 t-1"]
    assert play.answered[2].sizes == [0, 40]


def test_third_question_ends_one_that_nobody_wants() -> None:
    play = first_answered()
    play.fetches(2, "t-0@6 t-1@8", until_s=0.5)
    play.answers(3, "t-0:100")
    sent = play.fetches(3, "t-0@7 t-1@9", until_s=0.5)
    assert sent == ["send #5 b1/c1: 3 t-0", "close c2", "send #6 b2/c4: 3 t-1"]
    # Its end is news of nothing.
    assert play.loses(2) == []
    assert play.aside == []
    assert play.answers(6, "t-1:9") == ["answer 3: t-0 t-1"]


def test_busy_broker_is_asked_when_it_has_answered() -> None:
    play = Playbook({"t": [1, 2, 2, 2]})
    play.fetches(1, "t-0 t-1", until_s=0.5)
    play.answers(1, "t-0:1")
    assert play.fetches(2, "t-0@1 t-1 t-2", until_s=0.5) == ["send #3 b1/c1: 2 t-0", "send #4 b2/c3: 2 t-1 t-2"]
    play.answers(3, "t-0:1")
    play.waits(0.3)
    assert play.fetches(3, "t-0@2 t-1 t-2 t-3", until_s=0.5) == ["send #5 b1/c1: 3 t-0"]
    play.waits(0.2)
    assert play.answers(2, "t-1") == ["send #6 b2/c2: 3 t-1 t-2 t-3"]


def test_kept_answer_is_dropped_after_a_second() -> None:
    play = first_answered()
    play.answers(2, "t-1:30")
    assert not play.core.is_idle
    play.ticks(after_s=FOUND_S)
    assert play.core.is_idle
    assert play.fetches(2, "t-0@6 t-1@7", until_s=0.5) == ["send #3 b1/c1: 2 t-0", "send #4 b2/c2: 2 t-1"]


@pytest.mark.parametrize("arrives", ["before", "after"])
def test_moved_partition_is_asked_at_its_new_owner(arrives: str) -> None:
    play = first_answered()
    if arrives == "before":
        play.answers(2, "t-1:30")
    play.moves("t-1", 3)
    sent = play.fetches(2, "t-0@6 t-1@7", until_s=0.5)
    assert sent == ["send #3 b1/c1: 2 t-0", "send #4 b3/c3: 2 t-1"]
    if arrives == "after":
        assert play.answers(2, "t-1:30") == []
    assert play.answers(4, "t-1:40") == ["answer 2: t-0 t-1"]


def test_partition_that_moves_meanwhile_is_asked_at_once() -> None:
    play = two()
    assert play.moves("t-1", 3) == ["send #3 b3/c3: 1 t-1"]
    assert play.answers(2, "t-1=6") == []
    assert play.answers(3, "t-1:40") == ["answer 1: t-0 t-1"]


def test_read_without_data_ends_when_all_have_answered() -> None:
    play = two(until_s=0.5)
    play.waits(0.5)
    assert play.answers(1, "t-0") == []
    assert play.answers(2, "t-1") == ["answer 1: t-0 t-1"]


def test_earlier_wait_that_ends_is_begun_again() -> None:
    play = two(until_s=0.5)
    play.waits(0.3)
    play.answers(1, "t-0:1")
    play.fetches(2, "t-0@6 t-1@7", until_s=0.5)
    play.waits(0.2)
    assert play.answers(2, "t-1") == ["send #4 b2/c2: 2 t-1"]
    play.waits(0.3)
    # The read's time is over, and both have answered: what the second is asked stays asked.
    assert play.answers(3, "t-0") == ["answer 2: t-0 t-1"]
    assert play.fetches(3, "t-0@6 t-1@7", until_s=0.5) == ["send #5 b1/c1: 3 t-0"]
    assert play.answers(4, "t-1:8") == ["answer 3: t-0 t-1"]


def test_read_ends_at_its_time_though_others_wait() -> None:
    play = two(until_s=0.5)
    play.waits(0.4)
    play.answers(1, "t-0:1")
    play.fetches(2, "t-0@6 t-1@7", until_s=0.2)
    # Another wait: other limits.
    play.waits(0.1)
    play.answers(3, "t-0")
    assert play.wakes_in_ms() is not None


def test_min_bytes_hold_over_all_brokers() -> None:
    play = two(until_s=1, min_bytes=150)
    assert [play.sent[piece].least_bytes for piece in (1, 2)] == [75, 75]
    # The first has its share: it waits for all that is lacking.
    assert play.answers(1, "t-0:100") == ["send #3 b1/c1: 1 t-0"]
    assert play.sent[3].least_bytes == 150
    assert play.answers(2, "t-1:80") == ["answer 1: t-0 t-1"]
    assert play.answered[1].sizes == [100, 80]


def test_more_of_one_broker_replaces_what_it_had() -> None:
    play = two(until_s=1, min_bytes=150)
    play.answers(1, "t-0:100")
    assert play.answers(3, "t-0:160") == ["answer 1: t-0 t-1"]
    assert play.answered[1].sizes == [160, 0]


def test_least_bytes_are_within_max_bytes() -> None:
    """A broker that fills its share has no more to give, however much the request wants at least."""
    play = two(until_s=1, min_bytes=5000, max_bytes=1000)
    assert play.answers(1, "t-0:500") == ["answer 1: t-0 t-1"]


def test_read_that_does_not_wait_gets_all_brokers() -> None:
    for limits in ({"until_s": 0.0}, {"until_s": 0.5, "min_bytes": 0}):
        play = two(**limits)
        assert play.answers(1, "t-0:100") == []
        assert play.answers(2, "t-1") == ["answer 1: t-0 t-1"]


def test_early_answer_without_data_ends_the_read() -> None:
    """A broker that does not wait would be asked again and again."""
    play = two()
    assert play.answers(1, "t-0") == ["answer 1: t-0 t-1"]


def test_throttled_broker_ends_the_read() -> None:
    play = two()
    play.waits(0.5)
    assert play.answers(1, "t-0", throttle_ms=70) == ["answer 1: t-0 t-1 throttle 70"]


def test_error_ends_a_read() -> None:
    play = two()
    assert play.answers(1, "t-0=1") == ["answer 1: t-0=1 t-1"]


def test_refused_partition_does_not_end_the_read() -> None:
    play = Playbook()
    request = play._exchange(1, read_request(FETCH, "t-0 t-1 t-2", max_wait_ms=500), 10)
    request.wait_s = 0.5
    play._submit(request, {(0, 2): 29})
    assert 1 not in play.answered
    assert play.answers(1, "t-0:5") == ["answer 1: t-0 t-1 t-2=29"]


def test_refused_read_is_answered_at_once() -> None:
    play = Playbook()
    request = play._exchange(1, read_request(FETCH, "t-0"), 10)
    request.wait_s = 0.5
    assert play._submit(request, {(0, 0): 29}) == ["answer 1: t-0=29"]


def test_pipelined_reads_are_served_in_turn() -> None:
    play = two()
    assert play.fetches(2, "t-0@6 t-1@7", until_s=0.5) == []
    assert play.answers(1, "t-0:100") == ["answer 1: t-0 t-1", "send #3 b1/c1: 2 t-0"]
    assert play.answers(2, "t-1:100") == ["answer 2: t-0 t-1"]


def test_partition_without_answer_has_its_last_offsets() -> None:
    play = two()
    play.waits(0.5)
    play.answers(1, "t-0")
    play.answers(2, "t-1")
    play.fetches(2, "t-0@5 t-1@7", until_s=0.5)
    play.answers(3, "t-0:1")
    of_answers = [offsets_of_last(play, n) for n in (1, 2)]
    assert of_answers[0] == of_answers[1] != b"\xff" * 24
    play.fetches(3, "t-0@6 t-1@8 t-2@1", until_s=0.5)
    play.answers(5, "t-0:1")
    assert offsets_of_last(play, 3) == b"\xff" * 24


def offsets_of_last(play: Playbook, sequence: int) -> bytes:
    """The offsets in the last partition's result, as encoded."""
    frame = memoryview(bytearray(play.bytes_of[sequence]))
    version = play.exchanges[sequence].request.header.api_version
    return offsets_of(version, frame[FetchApi().parse_response(frame, version).topics[-1].starts[-1] :])


# Failures


def test_refused_partition_is_retried() -> None:
    play = two()
    play.answers(2, "t-1=6")
    assert play.wakes() == ["send #3 b2/c2: 1 t-1"]
    assert play.answers(3, "t-1:100") == ["answer 1: t-0 t-1"]


def test_partition_awaiting_its_retry_has_its_error() -> None:
    play = two()
    play.answers(2, "t-1=6")
    assert play.answers(1, "t-0:100") == ["answer 1: t-0 t-1=6"]
    assert play.lanes == []


def test_lost_connection_is_retried_for_the_present_read() -> None:
    play = first_answered()
    play.fetches(2, "t-0@6 t-1@7", until_s=0.5)
    assert play.loses(2) == []
    assert "reread t-1" in play.aside
    assert play.wakes() == ["send #4 b2/c3: 2 t-1"]


def test_repeated_refusals_end_the_read() -> None:
    play = two(until_s=5)
    for piece in (2, 3, 4):
        told = play.answers(piece, "t-1=6")
        while piece < 4 and not play.wakes():
            """The core also wakes to look for late reads."""
    assert told == ["answer 1: t-0 t-1=6"]


@pytest.mark.parametrize("until_s", [5, 0])
def test_partition_without_owner_ends_the_read(until_s: float) -> None:
    """Also while its owner is looked up for longer than brokers may be late."""
    play = Playbook({"t": [1, 42]})
    play.view.rereads = {(b"t", 1)}
    assert play.fetches(1, "t-0 t-1", until_s=until_s) == ["send #1 b1/c1: 1 t-0"]
    while 1 not in play.answered:
        play.wakes()
    assert str(play.answered[1]) == "t-0 t-1=6"


@pytest.mark.parametrize("how", ["refused", "refused as a whole", "lost"])
def test_failure_between_reads_doubts_the_owner(how: str) -> None:
    play = first_answered()
    if how == "lost":
        play.loses(2)
    else:
        play.answers(2, "t-1=6" if how == "refused" else "t-1", error_code=6 if how != "refused" else 0)
    assert "reread t-1" in play.aside


def test_leaving_client_ends_all_reads() -> None:
    play = two()
    play.fetches(2, "t-0 t-1", until_s=0.5)
    assert play.closes() == ["drop 1", "drop 2"]
    assert play.answers(1, "t-0:100") == []


# Late brokers


def late() -> Playbook:
    """A fetch from three brokers, of which the third does not answer; the answer comes without it."""
    play = Playbook()
    play.fetches(1, "t-0 t-1 t-2", until_s=0.5)
    play.waits(0.5)
    play.answers(1, "t-0")
    play.answers(2, "t-1")
    assert play.wakes_in_ms() == LATE_MS
    assert play.wakes() == ["answer 1: t-0 t-1 t-2"]
    return play


def test_late_broker_is_left_out_of_the_answer() -> None:
    play = late()
    assert play.answered[1].sizes == [0, 0, 0]
    # Nothing keeps what was read.
    assert play.exchanges[1]._results is None


def test_reads_do_not_wait_for_late_broker() -> None:
    play = late()
    assert play.fetches(2, "t-0 t-1 t-2@9", until_s=0.5) == ["send #4 b1/c1: 2 t-0", "send #5 b2/c2: 2 t-1"]
    play.waits(0.5)
    play.answers(4, "t-0")
    assert play.answers(5, "t-1") == ["answer 2: t-0 t-1 t-2"]


def test_late_answer_is_given_to_the_present_read() -> None:
    play = late()
    play.fetches(2, "t-0 t-1 t-2", until_s=0.5)
    assert play.answers(3, "t-2:100") == ["answer 2: t-0 t-1 t-2"]
    assert play.answered[2].sizes == [0, 0, 100]


def test_late_error_is_not_the_next_reads() -> None:
    play = late()
    play.answers(3, "t-2=3")
    play.fetches(2, "t-0 t-1 t-2", until_s=0.5)
    assert play.answers(4, "t-0") == ["answer 2: t-0 t-1 t-2"]


def test_late_broker_that_answers_is_asked_again() -> None:
    play = late()
    play.fetches(2, "t-0 t-1 t-2@9", until_s=0.5)
    assert play.answers(3, "t-2:100") == ["send #6 b3/c3: 2 t-2"]


def test_read_of_late_broker_alone_ends_soon() -> None:
    """Its client may have other partitions to ask for."""
    play = late()
    assert play.fetches(2, "t-2", until_s=30) == []
    play.waits(LATE_AFTER_S)
    while 2 not in play.answered:
        play.wakes()
    assert play.now < 100 + 0.5 + 3 * LATE_AFTER_S


def test_broker_is_late_some_time_after_the_wait() -> None:
    play = Playbook()
    play.fetches(1, "t-0 t-1", until_s=0.5, min_bytes=200)
    play.answers(1, "t-0:100")
    assert [play.wakes_in_ms(), play.wakes()] == [500, []]
    assert play.wakes() == ["answer 1: t-0 t-1"]


def test_arriving_answer_is_not_late() -> None:
    play = Playbook()
    play.fetches(1, "t-0 t-2", until_s=0.5)
    play.waits(0.5)
    play.answers(1, "t-0")
    assert [play.wakes(receiving=[2]), play.wakes_in_ms()] == [[], LATE_MS]
    assert play.answers(2, "t-2:100") == ["answer 1: t-0 t-2"]


def test_read_of_one_broker_is_answered_without_it() -> None:
    play = Playbook()
    play.fetches(1, "t-0", until_s=0.5)
    assert play.wakes_in_ms() == 500 + LATE_MS
    assert play.wakes() == ["answer 1: t-0"]


def test_offsets_are_listed_however_late() -> None:
    play = Playbook()
    play.lists_offsets(1, "t-0 t-1")
    play.answers(1, "t-0")
    assert play.wakes_in_ms() is None


def test_offsets_are_listed_beside_a_waiting_read() -> None:
    play = first_answered()
    assert play.lists_offsets(2, "t-1") == ["send #3 b2/c3: 2 t-1"]
    assert play.submits(3, "t-1") == ["send #4 b2/c4: 3 t-1"]


def test_listed_offsets_free_a_connection_for_reads() -> None:
    play = Playbook({"t": [1]})
    assert play.lists_offsets(1, "t-0") == ["send #1 b1/c1: 1 t-0"]
    assert play.lists_offsets(2, "t-0") == ["send #2 b1/c2: 2 t-0"]
    play.fetches(3, "t-0", until_s=0.5)
    assert "send #3 b1/c1: 3 t-0" in play.answers(1, "t-0")
