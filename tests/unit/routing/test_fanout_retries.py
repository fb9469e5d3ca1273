"""Scripts for the fan-out: which pieces are sent again after a failure, how often, for how long, and the answers."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from kproxy.routing import retry
from kproxy.routing.retry import CONNECTION_LOST, KAFKA, LEASED, NOT_WRITTEN, UNREADABLE, BrokerSemantics
from tests.support.models.playbook import Playbook, piped, proven
from tests.support.models.playbook_words import Producer
from tests.support.wire.messages import frame_of

PLAIN: Producer = None
IDEMPOTENT: Producer = (7, 0, None)
KINDS = ("plain", "idempotent", "transactional")
ALL, KNOWN_AGAIN, NONE = frozenset(KINDS), frozenset({"idempotent"}), frozenset[str]()
# The number of attempts if every answer comes at once: the fixed bound, within one second, within three.
THRICE, A_SECOND, SOME_SECONDS = 3, 5, 9


class Expected(NamedTuple):
    """How often batches of these kinds are tried (others once), and the client's final answer."""

    tried: int
    final: int
    kinds: frozenset[str]


REFUSED = {
    NOT_WRITTEN: Expected(THRICE, 6, ALL),
    6: Expected(THRICE, 6, ALL),
    100: Expected(THRICE, 100, ALL),
    5: Expected(A_SECOND, 5, ALL),
    19: Expected(A_SECOND, 19, ALL),
}
UNKNOWN = dict.fromkeys((7, 13, 20, CONNECTION_LOST, UNREADABLE), Expected(SOME_SECONDS, 7, KNOWN_AGAIN))
UNCLEAR = dict.fromkeys((3, 6, 56), Expected(SOME_SECONDS, 7, KNOWN_AGAIN))
HANDED_ON = {code: Expected(1, code, NONE) for code in (-1, 2, 3, 10, 17, 29, 45, 46, 47, 56, 87, 999)}
# Answers from brokers of these semantics, to requests with these acks, with this base offset.
TABLES: dict[str, tuple[BrokerSemantics, int, int, dict[int, Expected]]] = {
    "leased, all": (LEASED, -1, 5, HANDED_ON | REFUSED | UNKNOWN),
    "leased, one": (LEASED, 1, -1, HANDED_ON | REFUSED | UNKNOWN),
    "kafka, one": (KAFKA, 1, 5, HANDED_ON | REFUSED | UNKNOWN),
    "kafka, all, appended": (KAFKA, -1, 5, HANDED_ON | REFUSED | UNKNOWN | UNCLEAR),
    "kafka, all, refused": (
        KAFKA,
        -1,
        -1,
        HANDED_ON | UNKNOWN | UNCLEAR | REFUSED | {3: Expected(THRICE, 3, ALL)},
    ),
}
ROWS = [(table, event) for table, (_, _, _, rows) in TABLES.items() for event in rows]
# The errors of reads after three attempts, with any semantics.
READS = {NOT_WRITTEN: 6, 6: 6, 5: 5, CONNECTION_LOST: 6, UNREADABLE: 6}
DOUBTS_THE_OWNER = {NOT_WRITTEN, CONNECTION_LOST, UNREADABLE, 3, 5, 6, 9, 13, 56, 74, 75, 100}


def test_every_row_of_every_table_is_tested() -> None:
    """All tables of the module, and in each the rows beside the codes that are passed on."""
    found = {
        name: set(value)
        for name, value in vars(retry).items()
        if isinstance(value, dict) and value and all(isinstance(row, retry.RetryRule) for row in value.values())
    }
    assert found == {
        "PRODUCE": set(REFUSED | UNKNOWN),
        "PRODUCE_UNCLEAR": set(REFUSED | UNKNOWN | UNCLEAR),
        "PRODUCE_REFUSED": set(REFUSED | UNKNOWN | UNCLEAR),
        "READ": set(READS),
    }


def meets(play: Playbook, event: int, offset: int = -1) -> list[str]:
    """Apply the event to the only piece in flight."""
    (piece,) = play.pieces.values()
    connection = piece.connection.number
    if event == CONNECTION_LOST:
        return play.loses(connection)
    if event == NOT_WRITTEN:
        return play.loses(connection, unwritten={piece.number})
    if event == UNREADABLE:
        return play.answers_bytes(piece.number, frame_of(b"\0\0\0\7", b"no answer"))
    return play.answers(piece.number, f"t-0={event}" + (f"@{offset}" if offset >= 0 else ""))


def until_answered(play: Playbook, event: int, offset: int = -1) -> tuple[int, int]:
    """Fail every attempt of request 1 with this event; return the number of attempts and the client's code."""
    for _ in range(20):
        told = meets(play, event, offset)
        if 1 in play.answered:
            break
        if event == UNREADABLE:
            told += play.loses(max(play.core._in_flight.connections))
        if not play.pieces:
            play.wakes()
    (result,) = play.answered[1].results
    return len(play.sent), result.code


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("table", "event"), ROWS)
def test_every_table_row_is_followed(table: str, event: int, kind: str) -> None:
    semantics, acks, offset, rows = TABLES[table]
    play = Playbook(semantics=semantics)
    play.submits(
        1, "t-0", producer=PLAIN if kind == "plain" else IDEMPOTENT, is_transactional=kind == "transactional", acks=acks
    )
    expected = rows[event]
    tried = expected.tried if kind in expected.kinds else 1
    assert until_answered(play, event, offset) == (tried, expected.final)
    assert play.lanes == []


@pytest.mark.parametrize("event", [*READS, 1, 3, 29])
@pytest.mark.parametrize("semantics", [LEASED, KAFKA], ids=["leased", "kafka"])
def test_every_read_table_row_is_followed(event: int, semantics: BrokerSemantics) -> None:
    play = Playbook(semantics=semantics)
    play.lists_offsets(1, "t-0")
    assert until_answered(play, event) == ((THRICE, READS[event]) if event in READS else (1, event))


@pytest.mark.parametrize("event", sorted({event for _, event in ROWS} | DOUBTS_THE_OWNER))
def test_owner_is_looked_up_after_a_doubt(event: int) -> None:
    play = Playbook()
    play.submits(1, "t-0")
    meets(play, event)
    assert ("reread t-0" in play.aside) is (event in DOUBTS_THE_OWNER)


def test_newer_owner_is_not_looked_up() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    play.moves("t-0", 2)
    play.answers(1, "t-0=6")
    assert play.aside == ["retried NOT_LEADER_OR_FOLLOWER of b1", "wake in 1 ms"]


@pytest.mark.parametrize("code", [2, 10, 87])
def test_passed_on_entry_is_the_brokers_own(code: int) -> None:
    play = Playbook()
    play.submits(1, "t-0 t-1")
    play.answers(2, "t-1")
    assert play.answers(1, f"t-0={code}@33") == [f"answer 1: t-0={code}@33 t-1@20"]
    assert play.aside == [f"failed Produce {code} of b1"]


def test_retries_and_failures_are_counted_by_broker() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    play.answers(1, "t-0=6")
    assert play.aside == ["reread t-0", "retried NOT_LEADER_OR_FOLLOWER of b1", "wake in 21 ms"]
    play.moves("t-0", 2)
    play.wakes()
    play.loses(2)
    assert play.aside == ["reread t-0", "retried CONNECTION_LOST of b2", "wake in 21 ms"]
    play.wakes()
    play.answers(3, "t-0=87")
    assert play.aside == ["failed Produce 87 of b2"]


def test_only_refused_partitions_are_resent() -> None:
    play = Playbook({"t": [1, 1, 2]})
    play.submits(1, "t-0 t-1 t-2")
    assert play.answers(1, "t-0=6 t-1") == []
    assert play.answers(2, "t-2=19") == []
    assert play.wakes() == ["send #3 b1/c1: 1 t-0", "send #4 b2/c2: 1 t-2"]
    assert play.answers(3, "t-0") == []
    assert play.answers(4, "t-2") == ["answer 1: t-0@30 t-1@10 t-2@40"]


def test_partitions_retry_each_by_itself() -> None:
    """Failures of one partition do not use up another's attempts."""
    play = Playbook()
    play.submits(1, "t-0 t-1")
    for piece in (1, 3, 4):
        play.answers(piece, "t-0=6")
        if piece < 4:
            play.wakes()
    assert play.answers(2, "t-1=6") == []
    play.wakes()
    assert play.answers(5, "t-1=6") == []
    play.wakes()
    assert play.answers(6, "t-1") == ["answer 1: t-0=6 t-1@60"]


# Bounds


@pytest.mark.parametrize(("event", "bound_s"), [(19, retry.WAIT_S), (6, retry.WAIT_S), (20, retry.AMBIGUOUS_WAIT_S)])
def test_slow_refusal_is_passed_on_after_waiting_time(event: int, bound_s: float) -> None:
    play = Playbook()
    play.submits(1, "t-0")
    play.answers(1, f"t-0={event}")
    play.wakes()
    # One more attempt is possible, and then none.
    play.waits(bound_s - 0.2)
    assert play.answers(2, f"t-0={event}") == []
    play.wakes()
    assert play.answers(3, f"t-0={event}") == [f"answer 1: t-0={7 if event == 20 else event}"]


@pytest.mark.parametrize(("event", "tried"), [(6, retry.MAX_ATTEMPTS_IN_ALL), (19, 50), (20, 150)])
def test_endlessly_moving_partition_is_followed_boundedly(event: int, tried: int) -> None:
    """The first move is followed at once, later ones every 20 ms, which the timer makes 21."""
    play = Playbook()
    play.submits(1, "t-0")
    while 1 not in play.answered:
        play.moves("t-0", 3 - play.topology.owner(b"t", 0))
        meets(play, event)
        if 1 not in play.answered:
            play.wakes()
    # Attempts that time bounds are as many as the pace allows; each wake is a millisecond late.
    assert len(play.sent) in ({tried} if event == 6 else range(int(tried * 0.9), tried + 1))


def test_attempts_during_a_reread_do_not_count() -> None:
    """The table cannot have been corrected by them. The back-off grows, and the time limit stays."""
    play = Playbook(semantics=KAFKA)
    play.submits(1, "t-0")
    play.view.rereads.add((b"t", 0))
    assert play.answers(1, "t-0=6") == []
    pauses = []
    for piece in (2, 3, 4, 5):
        pauses.append(play.wakes_in_ms())
        assert play.wakes() == [f"send #{piece} b1/c1: 1 t-0"]
        told = play.answers(piece, "t-0=6")
    assert pauses == [21, 101, 251, 501]
    assert told == ["answer 1: t-0=6"]


def test_attempts_after_a_reread_count() -> None:
    play = Playbook(semantics=KAFKA)
    play.submits(1, "t-0")
    play.view.rereads.add((b"t", 0))
    play.answers(1, "t-0=6")
    play.wakes()
    # The deadline passes during an attempt.
    play.view.rereads.clear()
    assert play.answers(2, "t-0=6") == []
    play.wakes()
    assert play.answers(3, "t-0=6") == []
    play.wakes()
    assert play.answers(4, "t-0=6") == ["answer 1: t-0=6"]


def test_attempts_at_new_owner_count_during_reread() -> None:
    """The table has changed since the refusal."""
    play = Playbook(semantics=KAFKA)
    play.submits(1, "t-0")
    play.view.rereads.add((b"t", 0))
    play.answers(1, "t-0=6")
    play.moves("t-0", 2)
    assert play.wakes() == ["send #2 b2/c2: 1 t-0"]
    assert play.answers(2, "t-0=6") == []
    play.view.rereads.clear()
    for piece in (3, 4):
        told = play.wakes()
        assert told == [f"send #{piece} b2/c2: 1 t-0"]
        told = play.answers(piece, "t-0=6")
    assert told == ["answer 1: t-0=6"]


def test_reads_during_a_reread_do_not_count() -> None:
    play = Playbook(semantics=KAFKA)
    play.lists_offsets(1, "t-0")
    play.view.rereads.add((b"t", 0))
    for piece in (1, 2, 3):
        assert play.answers(piece, "t-0=6") == []
        play.wakes()
    assert play.moves("t-0", 2) == []
    play.view.rereads.clear()
    assert play.answers(4, "t-0=6") == []
    assert play.wakes() == ["send #5 b2/c2: 1 t-0"]
    assert play.answers(5, "t-0") == ["answer 1: t-0"]


def test_attempts_count_at_one_owner() -> None:
    """Kafka's leader learns of its election a little later than the cluster's metadata shows it."""
    play = Playbook()
    play.submits(1, "t-0")
    play.answers(1, "t-0=6")
    play.wakes()
    play.answers(2, "t-0=6")
    play.moves("t-0", 2)
    for piece in (3, 4):
        play.wakes()
        assert play.answers(piece, "t-0=6") == []
    assert play.wakes() == ["send #5 b2/c2: 1 t-0"]
    assert play.answers(5, "t-0=6") == ["answer 1: t-0=6"]


@pytest.mark.parametrize("event", [6, 19, 20, CONNECTION_LOST, NOT_WRITTEN])
def test_retry_only_past_deadline_is_answered_at_once(event: int) -> None:
    play = Playbook()
    play.submits(1, "t-0", deadline_s=0.1)
    assert meets(play, event) == []
    play.wakes()
    final = {20: 7, CONNECTION_LOST: 7, NOT_WRITTEN: 6}.get(event, event)
    # The next back-off would end 20 ms after the deadline.
    assert meets(play, event) == [f"answer 1: t-0={final}"]


def test_retry_exactly_at_deadline_is_answered_at_once() -> None:
    play = Playbook()
    play.submits(1, "t-0", deadline_s=retry.BACKOFF_S[0])
    assert play.answers(1, "t-0=19") == ["answer 1: t-0=19"]


def test_owner_move_past_deadline_resends_nothing() -> None:
    play = Playbook()
    play.submits(1, "t-0", deadline_s=0.5)
    play.moves("t-0", 2)
    play.waits(0.5)
    assert play.answers(1, "t-0=6") == ["answer 1: t-0=6"]


def test_retry_waiting_at_deadline_is_not_sent() -> None:
    play = Playbook()
    play.submits(1, "t-0", deadline_s=0.3)
    play.answers(1, "t-0=6")
    play.wakes()
    play.answers(2, "t-0=6")
    assert play.ticks(after_s=0.3) == ["answer 1: t-0=6"]
    assert play.aside == ["count deadlines 1", "failed Produce 6 of b1"]
    assert play.lanes == []
    assert play.wakes() == []


def test_batch_waiting_past_deadline_is_not_sent() -> None:
    play = proven()
    play.submits(2, "t-0", deadline_s=1)
    play.submits(3, "t-0")
    play.answers(2, "t-0=6")
    play.waits(1.05)
    play.answers(3, "t-0=6")
    assert play.wakes() == ["answer 2: t-0=6", "answer 3: t-0=6"]
    assert play.lanes == []


def test_batch_released_after_deadline_is_answered_unsent() -> None:
    """Later batches are given up with it, and earlier ones keep their answers."""
    play = Playbook()
    play.submits(1, "t-0")
    play.submits(2, "t-0")
    play.submits(3, "t-0 t-1", deadline_s=1)
    play.submits(4, "t-0")
    play.waits(1)
    assert play.answers(1, "t-0") == ["answer 1: t-0@10", "send #3 b1/c1: 2 t-0", "answer 4: t-0=6"]
    assert play.lanes == ["t-1 probing"]
    assert play.answers(2, "t-1@8") == ["answer 3: t-0=6 t-1@8"]
    assert play.ticks() == []


def test_batch_released_after_deadline_counts_once() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    play.submits(2, "t-0", deadline_s=1)
    play.waits(1)
    assert play.answers(1, "t-0") == ["answer 1: t-0@10", "answer 2: t-0=6"]
    assert play.aside.count("count deadlines 1") == 1
    assert play.ticks() == []
    assert play.aside == []


def test_timer_is_requested_once_unless_earlier() -> None:
    play = Playbook()
    play.submits(1, "t-0 t-1")
    play.answers(1, "t-0=19")
    assert play.aside[-1] == "wake in 21 ms"
    play.waits(0.005)
    play.answers(2, "t-1=19")
    assert not [each for each in play.aside if each.startswith("wake")]
    assert play.wakes() == ["send #3 b1/c1: 1 t-0"]
    assert play.aside == ["wake in 5 ms"]
    # Another owner is tried at once.
    play.moves("t-1", 3)
    assert play.aside == ["wake in 1 ms"]
    assert play.wakes() == ["send #4 b3/c3: 1 t-1"]


def test_jitter_lengthens_back_off_by_half_at_most() -> None:
    play = Playbook(jitter=0.5)
    play.submits(1, "t-0")
    play.answers(1, "t-0=6")
    assert play.wakes_in_ms() == 20 * 1.25 + 1


# Destinations of retries


@pytest.mark.parametrize(("event", "code"), [(6, 6), (20, 7), (CONNECTION_LOST, 7), (NOT_WRITTEN, 6)])
def test_hung_broker_gets_no_resend(event: int, code: int) -> None:
    play = Playbook()
    play.submits(1, "t-0")
    play.view.hung.add(1)
    assert meets(play, event) == [f"answer 1: t-0={code}"]


def test_new_owners_state_counts_for_resends() -> None:
    play = Playbook(hung=[1])
    play.submits(1, "t-0")
    play.moves("t-0", 2)
    assert play.loses(1) == []
    assert play.wakes() == ["send #2 b2/c2: 1 t-0"]


def test_batch_behind_clients_retry_is_left_to_client() -> None:
    """The hung broker's log may have the first batch: sent alone, the second would precede it."""
    play = Playbook(hung=[1])
    play.submits(1, "t-0", producer=PLAIN)
    play.moves("t-0", 2)
    assert play.submits(2, "t-0", producer=PLAIN) == []
    assert play.loses(1) == ["answer 1: t-0=7", "answer 2: t-0=6"]
    assert play.submits(3, "t-0", producer=PLAIN) == ["send #2 b2/c2: 3 t-0"]


def test_batch_waiting_at_hung_broker_fails_unwritten() -> None:
    play = Playbook()
    for n in (1, 2, 3):
        play.submits(n, "t-0")
    play.view.hung.add(1)
    assert play.loses(1) == ["answer 1: t-0=7", "answer 2: t-0=6", "answer 3: t-0=6"]
    assert list(play.sent) == [1]


def test_batches_at_hung_broker_become_uncertain() -> None:
    play = piped(2, 3, 4)
    play.view.hung.add(1)
    assert play.loses(1) == ["answer 2: t-0=7", "answer 3: t-0=7", "answer 4: t-0=7"]
    assert play.lanes == []
    play.view.hung.clear()
    # The route is new again, so one batch goes first.
    assert play.submits(5, "t-0", producer=(7, 0, 2)) == ["send #5 b1/c2: 5 t-0"]
    assert play.submits(6, "t-0", producer=(7, 0, 3)) == []
    assert play.answers(5, "t-0") == ["answer 5: t-0@50", "send #6 b1/c2: 6 t-0"]


def test_owner_without_address_is_not_replaced() -> None:
    play = Playbook({"t": [42]})
    play.ticks()
    play.waits(5)
    assert play.submits(1, "t-0") == []
    assert play.aside == ["reread t-0", "retried NOT_WRITTEN of nobody", "wake in 21 ms"]
    assert play.wakes() == []
    assert play.wakes() == ["answer 1: t-0=6"]


def test_unowned_batch_without_time_is_answered_at_once() -> None:
    play = Playbook({"t": [42]})
    assert play.submits(1, "t-0", deadline_s=0.01) == ["answer 1: t-0=6"]
    assert play.lanes == []


def test_later_batches_wait_behind_an_unowned_one() -> None:
    play = Playbook({"t": [42]})
    play.submits(1, "t-0")
    play.submits(2, "t-0")
    play.moves("t-0", 1)
    assert play.wakes() == ["send #1 b1/c1: 1 t-0"]
    assert play.answers(1, "t-0") == ["answer 1: t-0@10", "send #2 b1/c1: 2 t-0"]


# Batches that may have been appended


@pytest.mark.parametrize("event", [7, 13, 20, CONNECTION_LOST, UNREADABLE])
def test_brokers_without_deduplication_get_batches_once(event: int) -> None:
    play = Playbook(keeps_producer_state=False)
    play.submits(1, "t-0")
    told = meets(play, event)
    assert "answer 1: t-0=7" in told
    assert len(play.sent) == 1


@pytest.mark.parametrize("refusal", [6, 19, 5, NOT_WRITTEN])
def test_refusal_does_not_settle_an_unknown_outcome(refusal: int) -> None:
    play = Playbook()
    play.submits(1, "t-0")
    play.answers(1, "t-0=7")
    play.wakes()
    assert until_answered(play, refusal)[1] == 7


def test_refusal_at_deadline_does_not_settle_unknown_outcome() -> None:
    play = Playbook()
    play.submits(1, "t-0", deadline_s=1)
    play.answers(1, "t-0=7")
    play.wakes()
    assert play.answers(2, "t-0=19") == []
    assert play.ticks(after_s=1) == ["answer 1: t-0=7"]


def test_non_refusal_is_passed_on_after_unknown_outcome() -> None:
    play = Playbook()
    play.submits(1, "t-0")
    play.answers(1, "t-0=7")
    play.wakes()
    assert play.answers(2, "t-0=47") == ["answer 1: t-0=47"]


@pytest.mark.parametrize(("producer", "sent_again"), [(PLAIN, False), (IDEMPOTENT, True)])
def test_possible_append_forbids_a_resend(producer: Producer, sent_again: bool) -> None:
    """If real Kafka answers acks=all with NOT_LEADER_OR_FOLLOWER and an offset, its log has the batch."""
    play = Playbook(semantics=KAFKA)
    play.submits(1, "t-0", producer=producer)
    play.answers(1, "t-0")
    play.submits(2, "t-0", producer=producer)
    play.submits(3, "t-0", producer=producer)
    play.moves("t-0", 2)
    told = play.answers(2, "t-0=6@5") + play.answers(3, "t-0=6@6")
    if sent_again:
        assert told == []
        assert play.wakes() == ["send #4 b2/c2: 2 t-0"]
        assert play.answers(4, "t-0") == ["answer 2: t-0@40", "send #5 b2/c2: 3 t-0"]
    else:
        assert told == ["answer 2: t-0=7", "answer 3: t-0=7"]
        assert play.lanes == []


@pytest.mark.parametrize("kind", ["plain", "transactional"])
def test_batch_behind_uncertain_one_is_left_to_client(kind: str) -> None:
    """A deposed leader has the first in its log and refused the others: sent again alone, they would precede it."""
    play = Playbook(semantics=KAFKA)
    producer = PLAIN if kind == "plain" else IDEMPOTENT
    for n in (1, 2, 3, 4):
        play.submits(n, "t-0", producer=producer, is_transactional=kind == "transactional")
        if n == 1:
            play.answers(1, "t-0")
    play.moves("t-0", 2)
    assert play.answers(2, "t-0=6@9") == ["answer 2: t-0=7"]
    assert [play.answers(n, "t-0=6") for n in (3, 4)] == [["answer 3: t-0=6"], ["answer 4: t-0=6"]]
    again = PLAIN if kind == "plain" else (7, 0, 2)
    assert play.submits(5, "t-0", producer=again) == ["send #5 b2/c2: 5 t-0"]


# Out of order (kproxy.routing.refused)


@pytest.mark.parametrize("code", [56, 3])
def test_out_of_order_behind_resent_batch_is_hidden(code: int) -> None:
    """librdkafka would begin a new epoch, and resend batches of other partitions that are in doubt."""
    play = piped(2, 3)
    assert play.answers(2, f"t-0={code}") == [f"answer 2: t-0={code}"]
    assert play.answers(3, "t-0=45") == ["answer 3: t-0=6"]
    # After the first batch has come again, later batches are out of order by themselves.
    play.submits(5, "t-0", producer=(7, 0, 2))
    play.submits(6, "t-0", producer=(7, 0, 4))
    assert play.answers(4, "t-0") == ["answer 5: t-0@40"]
    assert play.answers(5, "t-0=45") == ["answer 6: t-0=45"]


@pytest.mark.parametrize("comes_again", [2, 3])
def test_batch_behind_refused_one_is_not_sent(comes_again: int) -> None:
    """Its client has not read that answer yet. A broker without the producer's state would take it for the first."""
    play = piped(2)
    play.answers(2, "t-0=56")
    assert play.submits(3, "t-0") == ["answer 3: t-0=6"]
    # If the client has given up the refused one, the next batch is refused once.
    assert play.submits(4, "t-0", producer=(7, 0, comes_again)) == ["send #3 b1/c1: 4 t-0"]
    play.answers(3, "t-0")
    assert play.submits(5, "t-0", producer=(7, 0, 4)) == ["send #4 b1/c1: 5 t-0"]


@pytest.mark.parametrize(
    "producer",
    [(7, 1, 5), (8, 0, 5), (7, 0, 2), PLAIN],
    ids=["another epoch", "another producer", "an earlier batch", "no producer"],
)
def test_only_later_batch_of_same_epoch_is_refused(producer: Producer) -> None:
    play = Playbook()
    play.submits(1, "t-0", producer=(7, 0, 0))
    play.answers(1, "t-0")
    play.submits(2, "t-0", producer=(7, 0, 4))
    play.answers(2, "t-0=56")
    play.submits(3, "t-0", producer=producer)
    assert play.answers(3, "t-0=45") == ["answer 3: t-0=45"]


def test_batch_behind_clients_retry_is_not_resent() -> None:
    """Another broker may not know the producer, and would accept the later batch first."""
    play = piped(2, 3)
    assert play.answers(2, "t-0=56") == ["answer 2: t-0=56"]
    assert play.answers(3, "t-0=5") == ["answer 3: t-0=5"]
    assert play.moves("t-0", 2) == []
    assert play.lanes == []


def test_out_of_order_behind_final_error_is_kept() -> None:
    play = piped(2, 3)
    assert play.answers(2, "t-0=87") == ["answer 2: t-0=87"]
    assert play.answers(3, "t-0=45") == ["answer 3: t-0=45"]


def test_resend_with_acks_0_does_not_count() -> None:
    """Its outcome is unknown."""
    play = piped(2)
    play.answers(2, "t-0=56")
    play.submits(3, "t-0", acks=0, producer=(7, 0, 2))
    assert play.leaves(3) == ["done 3"]
    assert play.submits(4, "t-0", producer=(7, 0, 4)) == ["answer 4: t-0=6"]


def test_resent_batch_opens_the_plain_path() -> None:
    play = piped(2)
    play.answers(2, "t-0=56")
    _, refused, _ = play.core.gate
    assert refused
    play.submits(3, "t-0", producer=(7, 0, 2))
    assert not refused
    play.submits(4, "t-0", producer=(7, 0, 4))
    play.answers(3, "t-0")
    assert play.answers(4, "t-0=45") == ["answer 4: t-0=45"]


def test_out_of_order_is_hidden_at_deadline() -> None:
    play = piped(2)
    play.submits(3, "t-0", deadline_s=1)
    play.answers(2, "t-0=19")
    play.answers(3, "t-0=45")
    assert play.wakes() == ["send #4 b1/c1: 2 t-0"]
    assert play.ticks(after_s=1) == ["answer 3: t-0=6"]
    assert play.answers(4, "t-0") == ["answer 2: t-0@40"]
