"""Bags of an audit: what crosses between Spark's tasks is the same on the other side."""

from __future__ import annotations

import gc
from collections import defaultdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kproxy.pipeline.audit.bags import Here, by_task, groups_in, pickles_of, uncollected, values_in

PAIRS = st.lists(st.tuples(st.tuples(st.text(max_size=2), st.integers(0, 3)), st.integers()), max_size=50)


@given(parts=st.lists(PAIRS, max_size=4), tasks=st.integers(1, 5))
def test_groups_of_tasks_equal_groups_here(parts: list[list[Any]], tasks: int) -> None:
    by_number = defaultdict(list)
    for part in parts:
        for number, pickled in by_task(tasks, part):
            by_number[number].append((number, pickled))
    assert set(by_number) <= set(range(tasks))
    groups = [group for pickles in by_number.values() for group in groups_in(pickles)]
    assert sorted(groups) == Here(pair for part in parts for pair in part).grouped()


def test_many_kept_values_return_in_order() -> None:
    assert list(values_in(pickles_of(range(1_001)))) == list(range(1_001))


def test_step_runs_without_garbage_collector() -> None:
    assert list(uncollected(lambda values: (gc.isenabled() for _ in values), [1])) == [False]
    assert gc.isenabled()
