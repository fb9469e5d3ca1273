"""The ranges and pieces of a read of logs, and the check of their batches."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.pipeline.audit.log_client import LogClient, LogReadFailed, Patience, TopicPartition, parse_bootstrap
from kproxy.pipeline.audit.log_reader import LogRange, RangeReader
from kproxy.pipeline.audit.logs import LEAST_PIECES, crc_check, cut, plan
from kproxy.routing.topology import Address
from kproxy_codec.fetch import PartitionFetched
from tests.support.wire.record_batches import build_batch

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
LOGS = st.dictionaries(
    st.builds(TopicPartition, st.sampled_from(["a", "b"]), st.integers(0, 5)),
    st.tuples(st.integers(0, 100), st.integers(0, 100)),
    max_size=8,
)


@given(LOGS, st.integers(1, 40))
def test_ranges_cover_every_offset_within_size_limit(logs: dict[TopicPartition, tuple[int, int]], most: int) -> None:
    starts = {which: start for which, (start, _) in logs.items()}
    ends = {which: end for which, (_, end) in logs.items()}
    pieces = cut(starts, ends, most)
    assert all(0 < sum(each.end - each.start for each in piece) <= most for piece in pieces)
    ranges = [each for piece in pieces for each in piece]
    offsets = [(each.which, offset) for each in ranges for offset in range(each.start, each.end)]
    assert sorted(offsets) == sorted((which, n) for which in logs for n in range(starts[which], ends[which]))
    assert {(each.which, each.start) for each in ranges if each.is_first} == {
        (which, starts[which]) for which in logs if starts[which] < ends[which]
    }


@pytest.mark.parametrize(
    ("offsets", "pieces", "largest"),
    [(0, 0, 0), (9_000, 1, 9_000), (64_000, 2, 50_000), (3_200_000, LEAST_PIECES, 200_000), (10**8, 100, 10**6)],
)
def test_task_count_follows_the_log_length(offsets: int, pieces: int, largest: int) -> None:
    found = cut({T0: 0}, {T0: offsets}, None)
    assert len(found) == pieces
    assert max((each.end - each.start for piece in found for each in piece), default=0) == largest


def test_short_logs_share_a_task() -> None:
    many = [TopicPartition("t", index) for index in range(100)]
    assert [len(piece) for piece in cut(dict.fromkeys(many, 0), dict.fromkeys(many, 10), 400)] == [40, 40, 20]


@pytest.mark.parametrize(
    ("first", "starts"),
    [
        (None, {T0: 10, T1: 0}),
        ({}, {}),
        ({T0: 40}, {T0: 40}),
        # Acknowledged before the log's beginning, behind its end, and in a partition that is there no more.
        ({T0: 5, T1: 60, TopicPartition("t", 2): 0}, {T0: 10}),
    ],
)
def test_log_is_read_from_first_needed_offset(
    first: dict[TopicPartition, int] | None, starts: dict[TopicPartition, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LogClient, "list_offsets", lambda *_: {T0: 10, T1: 0})
    pieces = plan(LogClient("h:1"), first, {T0: 100, T1: 50})
    assert {each.which: each.start for piece in pieces for each in piece} == starts


def test_addresses_are_parsed() -> None:
    assert parse_bootstrap("a:1, [::1]:2") == (Address("a", 1), Address("::1", 2))
    for text, said in [("", "is missing"), ("localhost", "address 'localhost'"), ("h:0", "address 'h:0'")]:
        with pytest.raises(LogReadFailed, match=said):
            parse_bootstrap(text)


class OneCorruptBatch(LogClient):
    """A cluster of one topic, in which the last byte of the only record is another than it was."""

    def fetch(self, which: TopicPartition, offset: int, max_bytes: int, patience: Patience) -> PartitionFetched:
        batch = build_batch([b"value"])
        batch[-2] ^= 1
        return PartitionFetched(0, 0, 1, 0, None, batch if offset == 0 else b"")


@pytest.mark.parametrize("has_crc32c", [True, False])
def test_missing_crc32c_leaves_batches_unchecked(has_crc32c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_crc32c:
        monkeypatch.setitem(sys.modules, "crc32c", None)
        monkeypatch.delitem(sys.modules, "kproxy_codec.record_crc", raising=False)
    reader = RangeReader(OneCorruptBatch("h:1"), LogRange(T0, 0, 1, is_first=True), crc_check())
    assert [each.crc_ok for headers in reader.headers() for each in headers] == [False if has_crc32c else None]
