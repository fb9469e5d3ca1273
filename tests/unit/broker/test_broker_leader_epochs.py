"""The offsets that each leader epoch wrote, and the conclusions for another replica's log (KIP-101, KIP-279)."""

from __future__ import annotations

import pytest

from kproxy.broker.leader_epochs import NO_LEADER_EPOCH, LeaderEpochs
from kproxy_codec.fetch import EpochEnd

LOG_END = 50


def epochs(*entries: tuple[int, int]) -> LeaderEpochs:
    made = LeaderEpochs()
    for leader_epoch, start_offset in entries:
        made.assign(leader_epoch, start_offset)
    return made


def test_epoch_reaches_to_start_of_next() -> None:
    known = epochs((2, 0), (2, 5), (4, 10), (7, 30))
    assert known.entries() == [(2, 0), (4, 10), (7, 30)]
    assert known.latest == 7
    assert [known.epoch_at(offset) for offset in (0, 9, 10, 29, 30, 99)] == [2, 2, 4, 4, 7, 7]


def test_empty_log_has_no_epochs() -> None:
    known = LeaderEpochs()
    assert (known.latest, known.epoch_at(0)) == (NO_LEADER_EPOCH, NO_LEADER_EPOCH)
    assert known.end_offset_for(3, LOG_END) == EpochEnd(-1, -1)


def test_offsets_below_first_entry_have_no_epoch() -> None:
    assert epochs((4, 10)).epoch_at(9) == NO_LEADER_EPOCH


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        pytest.param(7, (7, LOG_END), id="the last epoch ends with the log"),
        pytest.param(9, (7, LOG_END), id="later than any known"),
        pytest.param(4, (4, 30), id="ends where the next begins"),
        pytest.param(5, (4, 30), id="one that was never here: the largest below it"),
        pytest.param(2, (2, 10), id="the first"),
        pytest.param(1, (-1, -1), id="before all known"),
        pytest.param(-1, (-1, -1), id="none"),
    ],
)
def test_end_of_an_epoch_is_found(asked: int, answer: tuple[int, int]) -> None:
    assert epochs((2, 0), (4, 10), (7, 30)).end_offset_for(asked, LOG_END) == answer


def test_epoch_without_records_is_replaced() -> None:
    """Its leader lost the election before it wrote, so a later batch has another epoch, perhaps a lower one."""
    assert epochs((2, 0), (5, 10), (6, 10)).entries() == [(2, 0), (6, 10)]
    assert epochs((2, 0), (5, 10), (4, 10)).entries() == [(2, 0), (4, 10)]
    assert epochs((2, 0), (5, 10), (2, 10)).entries() == [(2, 0)]


def test_epoch_behind_written_one_is_an_error() -> None:
    known = epochs((2, 0), (5, 10))
    with pytest.raises(ValueError, match="leader epoch 4 at offset 20 is lower than 5"):
        known.assign(4, 20)
    assert known.entries() == [(2, 0), (5, 10)]


@pytest.mark.parametrize(
    ("offset", "left"), [(31, [2, 4, 7]), (30, [2, 4]), (11, [2, 4]), (10, [2]), (1, [2]), (0, [])]
)
def test_truncated_end_forgets_epochs_begun_there(offset: int, left: list[int]) -> None:
    known = epochs((2, 0), (4, 10), (7, 30))
    known.truncate_from_end(offset)
    assert [entry[0] for entry in known.entries()] == left


@pytest.mark.parametrize(
    ("offset", "left"),
    [
        (0, [(2, 0), (4, 10), (7, 30)]),
        (5, [(2, 5), (4, 10), (7, 30)]),
        (10, [(4, 10), (7, 30)]),
        (29, [(4, 29), (7, 30)]),
        (45, [(7, 45)]),
    ],
)
def test_truncated_start_begins_with_its_offsets_epoch(offset: int, left: list[tuple[int, int]]) -> None:
    known = epochs((2, 0), (4, 10), (7, 30))
    known.truncate_from_start(offset)
    assert known.entries() == left


def test_start_below_known_offsets_changes_nothing() -> None:
    known = epochs((4, 10))
    known.truncate_from_start(5)
    assert known.entries() == [(4, 10)]
