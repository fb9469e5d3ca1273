"""The judge recognizes missing, duplicated, out-of-order, altered and scattered records, and accepts clean ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.demo.flights import fingerprint
from kproxy.demo.judge import MAX_EXAMPLES, Judge, RowsVerdict

KEYS: list[bytes | None] = [b"A", b"B", None]


def key_of(n: int) -> bytes | None:
    """Rows 1, 4, 7, ... have key A, 2, 5, 8, ... key B, 3, 6, 9, ... none."""
    return KEYS[(n - 1) % 3]


def value_of(n: int) -> bytes:
    return b'{"n":%d,"year":2013}' % n


def judge(arrivals: Sequence[tuple[int, int]], rows: int) -> RowsVerdict:
    """The verdict on (partition, n) pairs, whose offsets rise in each partition."""
    court = Judge([fingerprint(key_of(n), value_of(n)) for n in range(1, rows + 1)])
    offsets: dict[int, int] = {}
    for partition, n in arrivals:
        offset = offsets[partition] = offsets.get(partition, -1) + 1
        court.see(partition, offset, key_of(n), value_of(n))
    return court.verdict(sent=rows)


def faults(verdict: RowsVerdict) -> dict[str, int]:
    return {name: fault.count for name, fault in verdict.faults.items() if fault.count}


@pytest.mark.parametrize(
    ("arrivals", "found"),
    [
        pytest.param([1, 2, 3, 4, 5, 6], {}, id="as sent"),
        pytest.param([2, 1, 3, 5, 4, 6], {}, id="keys interleaved otherwise"),
        pytest.param([1, 2, 6, 4, 5, 3], {}, id="no order among rows without a key"),
        pytest.param([1, 2, 3, 5, 6], {"missing": 1}, id="one lost"),
        pytest.param([1, 2, 3, 4, 4, 5, 6], {"duplicated": 1}, id="one twice in a row"),
        pytest.param([1, 2, 3, 4, 5, 6, 1], {"duplicated": 1}, id="one again at the end is double, not late"),
        pytest.param([1, 1, 1, 2, 3, 4, 5, 6], {"duplicated": 2}, id="one three times"),
        pytest.param([4, 2, 3, 1, 5, 6], {"out of order": 1}, id="two of a key swapped"),
        pytest.param([4, 5, 3, 1, 2, 6], {"out of order": 2}, id="two of each key swapped"),
        pytest.param([4, 2, 3, 5, 6], {"missing": 1}, id="the first of a key lost is no disorder"),
        pytest.param([], {"missing": 6}, id="nothing came"),
    ],
)
def test_faults_in_one_partition_are_counted(arrivals: list[int], found: dict[str, int]) -> None:
    verdict = judge([(0, n) for n in arrivals], rows=6)

    assert faults(verdict) == found
    assert verdict.read == len(arrivals)
    assert verdict.clean == (not found)


@pytest.mark.parametrize(
    ("late", "count"), [([10, 1, 4, 7], 3), ([1, 10, 4, 7], 2), ([7, 10, 1, 4], 2), ([1, 4, 10, 7], 1)]
)
def test_row_behind_later_one_is_out_of_order(late: list[int], count: int) -> None:
    verdict = judge([(0, n) for n in (*late, 2, 3, 5, 6, 8, 9)], rows=10)

    assert faults(verdict) == {"out of order": count}


def test_keyed_rows_stay_in_one_partition() -> None:
    verdict = judge([(0, 1), (1, 2), (0, 3), (1, 6), (0, 4), (2, 5)], rows=6)

    assert faults(verdict) == {"keys in two partitions": 1}
    assert verdict.faults["keys in two partitions"].examples == ["B in partitions 1 and 2"]


def test_key_in_many_partitions_is_one_fault() -> None:
    verdict = judge([(0, 1), (1, 4), (2, 7), (1, 10)], rows=10)

    assert verdict.faults["keys in two partitions"].count == 1


@pytest.mark.parametrize("second", [5, 4, 0])
def test_offset_that_does_not_rise_is_a_fault(second: int) -> None:
    court = Judge([fingerprint(None, value_of(n)) for n in (1, 2)])
    court.see(0, 5, None, value_of(1))
    court.see(0, second, None, value_of(2))

    assert faults(court.verdict(sent=2)) == {"offsets not rising": 1}


def test_offsets_of_different_partitions_are_independent() -> None:
    court = Judge([fingerprint(None, value_of(n)) for n in (1, 2)])
    court.see(1, 5, None, value_of(1))
    court.see(0, 5, None, value_of(2))

    assert court.verdict(sent=2).clean


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        (b"A", b'{"n":1,"year":2014}', {"altered": 1}),
        (b"A", b'{"n":1, "year":2013}', {"altered": 1}),
        (b"B", b'{"n":1,"year":2013}', {"altered": 1}),
        (None, b'{"n":1,"year":2013}', {"altered": 1}),
        (b"A", b'{"n":2,"year":2013}', {"altered": 1, "missing": 1}),
        (b"A", b'{"n":0}', {"altered": 1, "missing": 1}),
        (b"A", b'{"n":-1}', {"altered": 1, "missing": 1}),
        (b"A", b'{"n":true}', {"altered": 1, "missing": 1}),
        (b"A", b'{"n":"1"}', {"altered": 1, "missing": 1}),
        (b"A", b'{"n":1', {"altered": 1, "missing": 1}),
        (b"A", b"[" * 100_000, {"altered": 1, "missing": 1}),
        (b"A", b"[1]", {"altered": 1, "missing": 1}),
        (b"A", b"\xff\xfe", {"altered": 1, "missing": 1}),
        (b"A", b"", {"altered": 1, "missing": 1}),
        (b"A", None, {"altered": 1, "missing": 1}),
    ],
)
def test_message_differing_from_its_row_is_altered(
    key: bytes | None, value: bytes | None, found: dict[str, int]
) -> None:
    court = Judge([fingerprint(b"A", value_of(1))])
    court.see(0, 0, key, value)

    assert faults(court.verdict(sent=1)) == found


def test_examples_name_the_rows_and_are_bounded() -> None:
    verdict = judge([(0, 1), (0, 1)], rows=100)

    assert verdict.faults["missing"].count == 99
    assert verdict.faults["missing"].examples == ["n=2", "n=3", "n=4"][:MAX_EXAMPLES]
    assert verdict.faults["duplicated"].examples == ["n=1 again at offset 1 of partition 0"]


def test_rows_are_counted_by_partition_despite_faults() -> None:
    verdict = judge([(0, 1), (0, 1), (3, 2)], rows=9)

    assert verdict.rows_by_partition == {0: 2, 3: 1}


@st.composite
def clean_runs(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(partition, n) in the order of arrival: each key in order in one partition, rows without a key mixed."""
    slots = draw(st.permutations(range(1, draw(st.integers(2, 40)) + 1)))
    waiting = {key: iter(sorted(n for n in slots if key_of(n) == key)) for key in KEYS}
    return [(KEYS.index(key_of(slot)), next(waiting[key_of(slot)])) for slot in slots]


@given(run=clean_runs(), data=st.data())
def test_single_fault_in_a_clean_run_is_found(run: list[tuple[int, int]], data: st.DataObject) -> None:
    rows = len(run)
    assert judge(run, rows).clean

    at = data.draw(st.integers(0, rows - 1), "at")
    lost = run[:at] + run[at + 1 :]
    assert faults(judge(lost, rows)) == {"missing": 1}

    again = data.draw(st.integers(at + 1, rows), "again at")
    assert faults(judge([*run[:again], run[at], *run[again:]], rows)) == {"duplicated": 1}

    next_of_key = [position for position in range(at + 1, rows) if run[position][0] == run[at][0]][:1]
    for later in next_of_key:
        swapped = list(run)
        swapped[at], swapped[later] = run[later], run[at]
        assert faults(judge(swapped, rows)) == ({"out of order": 1} if key_of(run[at][1]) is not None else {})
