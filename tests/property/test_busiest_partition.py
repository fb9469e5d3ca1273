"""The busiest partition of a topic is found by a vote, in Python and in the compiled twin."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.observe import busiest
from kproxy.plain import compiled
from tests.support.twins import in_python

BATCHES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 1_000)), min_size=1)


USES = [in_python(busiest).Use, *([] if compiled is None else [compiled.Use])]


@pytest.mark.parametrize("make", USES, ids=lambda make: make.__module__)
@given(batches=BATCHES)
def test_partition_with_most_bytes_wins(make: Any, batches: list[tuple[int, int]]) -> None:
    use, written = make(), Counter[int]()
    assert use.partition == -1
    for partition_index, nbytes in batches:
        use.write(partition_index, nbytes)
        written[partition_index] += nbytes
    assert use.received_bytes == written.total()
    assert 0 < use.partition_bytes <= written[use.partition]
    (partition_index, most), *_ = written.most_common(1)
    if 2 * most > written.total():
        assert use.partition == partition_index


@given(batches=BATCHES)
def test_compiled_vote_is_as_in_python(batches: list[tuple[int, int]]) -> None:
    uses = [make() for make in USES]
    for use in uses:
        for each in batches:
            use.write(*each)
    assert len({(use.partition, use.partition_bytes, use.lead) for use in uses}) == 1
