"""Logs are read from the first offset that is judged: from the end if there is none, and never after the end."""

from __future__ import annotations

import pytest

from kproxy.pipeline.audit.log_client import TopicPartition
from kproxy.pipeline.audit.logs import starts_at_or_before

ENDS = {TopicPartition("a", 0): 100, TopicPartition("a", 1): 50, TopicPartition("b", 0): 7}


@pytest.mark.parametrize(
    ("first", "starts"),
    [
        ({}, ENDS),
        ({TopicPartition("a", 0): 40}, ENDS | {TopicPartition("a", 0): 40}),
        # Acknowledged past the end of the log, and in a partition that no longer exists.
        ({TopicPartition("a", 1): 60, TopicPartition("a", 2): 0}, ENDS),
    ],
)
def test_log_is_read_from_first_needed_offset(
    first: dict[TopicPartition, int], starts: dict[TopicPartition, int]
) -> None:
    assert starts_at_or_before(first, ENDS) == starts
