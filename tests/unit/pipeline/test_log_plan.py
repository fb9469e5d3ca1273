"""The ranges and pieces of a read of logs, and the options for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.pipeline.audit.log_client import EARLIEST, LATEST, LogReadFailed, TopicPartition
from kproxy.pipeline.audit.log_options import (
    LEAST_PIECES,
    cut,
    expect_partitions,
    matching,
    offsets_as_json,
    parse_offsets,
    read_options,
)
from kproxy.routing.topology import Address

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


def test_offsets_are_read_as_they_are_written() -> None:
    offsets = {T0: 5, T1: 2**40, TopicPartition("u", 0): 0}
    assert parse_offsets(offsets_as_json(offsets), "endOffsets") == (LATEST, offsets)
    assert parse_offsets('{"t": {"0": -2, "1": "-1"}}', "startOffsets") == (EARLIEST, {T0: EARLIEST, T1: LATEST})
    assert parse_offsets(" Latest ", "startOffsets") == (LATEST, {})


@pytest.mark.parametrize(
    "text", ["", "now", "5", "[]", '{"t": 5}', '{"t": {"a": 5}}', '{"t": {"0": null}}', '{"t":{"0":-3}}']
)
def test_invalid_offsets_are_refused_naming_the_option(text: str) -> None:
    with pytest.raises(LogReadFailed, match="endOffsets"):
        parse_offsets(text, "endOffsets")


def test_offsets_of_unread_partitions_are_refused() -> None:
    with pytest.raises(LogReadFailed, match="endOffsets mentions topic t, partition 1,"):
        expect_partitions([T0, T1], [T0], "endOffsets")


def test_pattern_matches_whole_names_without_internal_topics() -> None:
    topics = ["orders", "orders-2", "__kproxy_audit", "__consumer_offsets", "reorders"]
    assert matching(topics, "orders.*") == ["orders", "orders-2"]
    assert matching(topics, ".*") == ["orders", "orders-2", "reorders"]
    for pattern, said in [("missing", "No topic matches 'missing'"), ("(", "is not a topic pattern")]:
        with pytest.raises(LogReadFailed, match=said):
            matching(topics, pattern)


def test_options_have_their_names_in_any_case() -> None:
    options = read_options({"BOOTSTRAP": "a:1, [::1]:2", "Topics": "t, u", "maxbytes": "1000"})
    assert options.bootstrap == (Address("a", 1), Address("::1", 2))
    assert (options.start_offsets, options.end_offsets, options.offsets_per_partition) == ("earliest", "latest", None)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"bootstrap": ""}, "bootstrap is missing"),
        ({"bootstrap": "localhost"}, "has 'localhost'"),
        ({"bootstrap": "h:0"}, "has 'h:0'"),
        ({"topics": ""}, "by the option topics"),
        ({"topicPattern": "t"}, "by the option topics"),
        ({"maxBytes": "0"}, "maxBytes is '0'"),
        ({"timeoutMs": "soon"}, "timeoutMs is 'soon'"),
        ({"offsetsPerPartition": "-1"}, "offsetsPerPartition is '-1'"),
        ({"checkCrc": "maybe"}, "auto, true, false"),
        ({"topic": "t"}, "no option topic; there are bootstrap, topics,"),
    ],
)
def test_invalid_log_options_are_refused(changed: dict[str, str], said: str) -> None:
    with pytest.raises(LogReadFailed, match=said):
        read_options({"bootstrap": "h:1", "topics": "t", **changed})
