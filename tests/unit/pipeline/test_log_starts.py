"""Logs are read from the first offset that is judged: from the end if there is none, never behind the end."""

from __future__ import annotations

import json

import pytest

from kproxy.pipeline.audit.log_client import TopicPartition
from kproxy.pipeline.audit.run import starts_at_or_before

ENDS = '{"a":{"0":100,"1":50},"b":{"0":7}}'


@pytest.mark.parametrize(
    ("first", "starts"),
    [
        ({}, {"a": {"0": 100, "1": 50}, "b": {"0": 7}}),
        ({TopicPartition("a", 0): 40}, {"a": {"0": 40, "1": 50}, "b": {"0": 7}}),
        # Acknowledged behind the end, and in a partition that is there no more.
        ({TopicPartition("a", 1): 60, TopicPartition("a", 2): 0}, {"a": {"0": 100, "1": 50}, "b": {"0": 7}}),
    ],
)
def test_log_is_read_from_first_needed_offset(
    first: dict[TopicPartition, int], starts: dict[str, dict[str, int]]
) -> None:
    assert json.loads(starts_at_or_before(first, ENDS)) == starts
