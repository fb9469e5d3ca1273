"""The busiest partition of a topic is found by a vote, in Python and in the compiled plain path."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.observe.busiest import Use
from kproxy.plain import compiled

BATCHES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 1_000)), min_size=1)


@given(batches=BATCHES)
def test_partition_with_most_bytes_wins(batches: list[tuple[int, int]]) -> None:
    use, written = Use(), Counter[int]()
    assert use.partition == -1
    for partition_index, nbytes in batches:
        use.write(partition_index, nbytes)
        written[partition_index] += nbytes
    assert use.received_bytes == written.total()
    assert 0 < use.partition_bytes <= written[use.partition]
    (partition_index, most), *_ = written.most_common(1)
    if 2 * most > written.total():
        assert use.partition == partition_index


@pytest.mark.skipif(compiled is None, reason="the plain path is not compiled here")
@given(batches=BATCHES)
def test_compiled_vote_is_as_in_python(batches: list[tuple[int, int]]) -> None:
    in_python, in_c = Use(), Use()
    for each in batches:
        in_python.write(*each)
    compiled.vote(in_c, batches)  # type: ignore[union-attr]
    assert bytes(in_c) == bytes(in_python)
