"""Scripts for the fan-out: merging and forwarding brokers' answers."""

from __future__ import annotations

import pytest

from kproxy.routing.actions import Action, Respond
from kproxy.routing.merge import Exchange
from kproxy.routing.retry import KAFKA
from kproxy_codec.api_keys import FETCH, PRODUCE
from kproxy_codec.produce import PRODUCE_API
from tests.support.models.playbook import Playbook, piped
from tests.support.models.playbook_words import answer_frame, parse
from tests.support.wire.messages import frame_of, response_body, response_frame, sample_response, tag_section


def parts_of(play: Playbook) -> list[tuple[int, int]]:
    """For each sent piece: its partitions, or -1 for the whole request, and the number of parts."""
    return [
        (-1 if send.part is None else sum(len(ordinals) for _, ordinals in send.part), send.shares)
        for send in play.sent.values()
    ]


# Parts


def test_request_is_sent_whole_or_in_parts() -> None:
    play = Playbook({"t": [1, 1, 2], "u": [2]})
    assert play.submits(1, "t-0 t-1") == ["send #1 b1/c1: 1 t-0 t-1"]
    assert play.aside == []
    assert play.lists_offsets(2, "t-0 t-2 u-0") == ["send #2 b1/c2: 2 t-0", "send #3 b2/c3: 2 t-2 u-0"]
    assert play.aside == ["count splits 1"]
    assert parts_of(play) == [(-1, 1), (1, 2), (2, 2)]


def test_retry_is_one_part_among_others() -> None:
    play = Playbook()
    play.fetches(1, "t-0")
    play.answers(1, "t-0=6")
    play.wakes()
    assert parts_of(play) == [(-1, 1), (1, 1)]


def test_part_of_a_read_states_its_share() -> None:
    play = Playbook()
    play.fetches(1, "t-0 t-1 t-2")
    part = [(0, [1])]
    among = [b"".join(play.exchanges[1].splitter(*share).part(part, 9)) for share in ((3, 1), (2, 1), (2, 7))]
    assert len(set(among)) == 3
    # It is made once for all parts.
    assert play.exchanges[1].splitter(2, 7) is play.exchanges[1].splitter(2, 7)


def test_answer_has_partitions_in_request_order() -> None:
    play = Playbook({"t": [1, 2, 1], "u": [2]})
    play.submits(1, "t-2 t-1 u-0 t-0")
    assert play.answers(2, "u-0 t-1") == []
    # Entries that a broker lists in another order are sorted.
    assert play.answers(1, "t-0 t-2") == ["answer 1: t-2@10 t-1@20 u-0@20 t-0@10"]


def test_whole_answer_is_put_into_request_order() -> None:
    play = Playbook({"t": [1, 1]})
    play.submits(1, "t-0 t-1")
    assert play.answers(1, "t-1@5 t-0@4") == ["answer 1: t-0@4 t-1@5"]
    # On proven routes a successful answer passes unchanged if its entries are in order.
    play.submits(2, "t-0 t-1")
    assert play.answers(2, "t-1@7 t-0@6") == ["answer 2: t-0@6 t-1@7"]


def test_whole_success_is_forwarded_with_new_number() -> None:
    play = Playbook()
    play.fetches(1, "t-0")
    exchange = play.exchanges[1]
    frame = answer_frame(exchange.request, "t-0:100", throttle_ms=40)
    frame[4:8] = (1234).to_bytes(4, "big")
    assert play.answers_bytes(1, frame) == ["proven 1 on c1", "answer 1: t-0 throttle 40"]
    # The answer's own bytes, with the client's correlation id.
    assert frame[4:8] == exchange.request.header.correlation_id.to_bytes(4, "big")
    assert exchange._results is None


def test_whole_success_naming_a_broker_is_rewritten() -> None:
    """KIP-951: an answer may name brokers' addresses beside its topics."""
    play = Playbook()
    play.fetches(1, "t-0")
    fields = sample_response(FETCH, {"t": [0]}, throttle_time_ms=0, error_code=0, tags=[(0, b"where a broker is")])
    frame = response_frame(FETCH, 12, response_body(FETCH, 12, fields))
    assert play.answers_bytes(1, frame) == ["answer 1: t-0"]
    assert len(play.bytes_of[1]) < len(frame)
    assert play.exchanges[1]._tags is None


def test_proxys_throttle_time_is_the_brokers_longest() -> None:
    play = Playbook()
    play.submits(1, "t-0 t-1 t-2")
    play.answers(1, "t-0", throttle_ms=20)
    play.answers(2, "t-1", throttle_ms=50)
    assert play.answers(3, "t-2", throttle_ms=30) == ["answer 1: t-0@10 t-1@20 t-2@30 throttle 50"]


def test_throttle_time_of_a_refusal_is_kept() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    play.answers(1, "t-0=6", throttle_ms=20)
    play.wakes()
    assert play.answers(2, "t-0") == ["answer 1: t-0@20 throttle 20"]


def test_acknowledgement_is_noted_before_its_answer() -> None:
    play = Playbook({"t": [1, 1, 2]})
    play.submits(1, "t-0 t-1 t-2")
    assert play.answers(1, "t-0 t-1=87") == []
    assert play.aside == ["note 1 t-0@10 of b1", "failed Produce 87 of b1"]
    assert play.answers(2, "t-2") == ["answer 1: t-0@10 t-1=87 t-2@20"]
    assert play.aside == ["note 1 t-2@20 of b2"]


@pytest.mark.parametrize("asks", ["a read", "acks=0"])
def test_unreported_or_unappended_batch_is_not_noted(asks: str) -> None:
    play = Playbook()
    if asks == "a read":
        play.fetches(1, "t-0 t-1")
    else:
        play.submits(1, "t-0 t-1", acks=1, silent=True)
    play.answers(1, "t-0")
    assert play.aside == []
    play.answers(2, "t-1")
    assert play.aside == []


# Invalid answers


UNREADABLE = {
    "nothing": "",
    "one is missing": "t-0",
    "another one": "t-0 t-7",
    "one too many": "t-0 t-1 t-7",
    "twice": "t-0 t-0",
    "twice beside the other": "t-0 t-1 t-1",
    "another topic": "t-0 u-1",
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_mismatching_answer_ends_the_connection(kind: str) -> None:
    play = Playbook({"t": [1, 1]})
    play.submits(1, "t-0 t-1", producer=None)
    assert play.answers(1, UNREADABLE[kind]) == ["answer 1: t-0=7 t-1=7", "distrust c1"]
    assert play.loses(1) == []


def test_requests_behind_unreadable_answer_are_lost() -> None:
    play = piped(2, 3)
    assert play.answers_bytes(2, frame_of(b"\0\0\0\7", b"no answer")) == ["distrust c1"]
    # Nothing is sent before the results of the other batches are known.
    assert play.wakes_in_ms() is None
    assert play.submits(4, "t-1") == ["send #4 b2/c2: 4 t-1"]
    assert play.loses(1) == []
    assert play.wakes() == ["send #5 b1/c3: 2 t-0"]
    assert play.answers(5, "t-0") == ["answer 2: t-0@50", "send #6 b1/c3: 3 t-0"]


def test_read_with_unreadable_answer_is_asked_again() -> None:
    play = Playbook()
    play.fetches(1, "t-0")
    assert play.answers(1, "u-0=1") == ["distrust c1"]
    assert "retried UNREADABLE of b1" in play.aside
    play.loses(1)
    assert play.wakes() == ["send #2 b1/c2: 1 t-0"]


# Reads


def test_batches_wait_for_no_read() -> None:
    play = Playbook()
    play.fetches(1, "t-0")
    play.answers(1, "t-0=6")
    assert play.submits(2, "t-0") == ["send #2 b1/c2: 2 t-0"]
    assert play.wakes() == ["send #3 b1/c1: 1 t-0"]
    assert play.answers(2, "t-0") == ["answer 2: t-0@20"]


@pytest.mark.parametrize("partitions", ["t-0 t-1", ""])
def test_whole_answer_error_counts_for_each_partition(partitions: str) -> None:
    """Kafka then names no partitions."""
    play = Playbook({"t": [1, 1]})
    play.fetches(1, "t-0 t-1")
    told = play.answers(1, partitions, error_code=29, throttle_ms=20)
    assert told == ["answer 1: t-0=29 t-1=29 throttle 20"]


def test_time_changes_state_only_with_open_requests() -> None:
    play = Playbook()
    idle = [play.core.is_idle]
    play.submits(1, "t-0")
    idle.append(play.core.is_idle)
    play.ticks(after_s=10)
    # The request is answered, but its broker may still hang.
    idle.append(play.core.is_idle)
    play.answers(1, "t-0")
    idle.append(play.core.is_idle)
    play.submits(2, "t-0", producer=(7, 0, 1))
    play.answers(2, "t-0=6")
    # Nothing is in flight, but one batch waits for its retry.
    idle.append(play.core.is_idle)
    assert idle == [True, False, False, True, False]


@pytest.mark.parametrize("version", [8, 9])
def test_topic_without_partitions_is_answered_at_once(version: int) -> None:
    """No broker is asked; the answer names the topic."""
    play = Playbook()
    fields = {
        "transactional_id": None,
        "acks": -1,
        "timeout_ms": 20_000,
        "topic_data": [{"name": "t", "partition_data": []}],
    }
    exchange = Exchange(PRODUCE_API, parse(PRODUCE, version, fields, 7), 1, play.now + 10)
    (answered,) = play.core.submitted(exchange, {}, play.now, 0.0)
    assert isinstance(answered, Respond)
    frame = memoryview(b"".join(answered.answer))
    (topic,) = PRODUCE_API.parse_response(frame, version).topics
    assert (topic.name, topic.partitions) == (b"t", [])


def test_unknown_fields_are_forwarded_once_in_order() -> None:
    """Whichever part of the answer has them (KIP-482)."""
    play = Playbook()
    play.submits(1, "t-0 t-1")
    done: list[Action] = []
    for piece, tags in ((1, [(50, b"a"), (60, b"b")]), (2, [(40, b"c"), (50, b"d")])):
        frame = answer_frame(play.pieces[piece].exchange.request, f"t-{piece - 1}")
        assert frame[-1] == 0
        done += play.core.answered(piece, frame_of(bytes(frame[4:-1]), tag_section(tags)), play.now, 0.0)
    (answered,) = (each for each in done if isinstance(each, Respond))
    assert b"".join(answered.answer).endswith(tag_section([(40, b"c"), (50, b"a"), (60, b"b")]))


# Unknown partitions


def test_unknown_and_leaderless_partitions_have_different_errors() -> None:
    play = Playbook({"t": [1, None]}, KAFKA, offers_unowned=False)
    play.topology.set_size(b"t", 2)
    play.topology.is_complete = True
    play.submits(1, "t-0 t-1 t-2 u-0")
    play.answers(1, "t-0")
    assert play.wakes() == []
    assert play.wakes() == ["answer 1: t-0@10 t-1=6 t-2=3 u-0=3"]
    play.lists_offsets(2, "t-1 t-2 u-0")
    assert play.wakes() == []
    assert play.wakes() == ["answer 2: t-1=6 t-2=3 u-0=3"]
    play.submits(3, "t-2", acks=0)
    assert play.wakes() == []
    assert play.wakes() == ["done 3", "undeliverable t=3"]


def test_incomplete_table_makes_no_partition_unknown() -> None:
    play = Playbook({"t": [1]}, KAFKA, offers_unowned=False)
    play.submits(1, "t-1 u-0")
    play.wakes()
    assert play.wakes() == ["answer 1: t-1=6 u-0=6"]
