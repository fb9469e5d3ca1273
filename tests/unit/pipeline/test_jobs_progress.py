"""Spark's progress in words."""

from __future__ import annotations

import pytest
from pyspark import SparkStageInfo

from kproxy.pipeline.progress import in_words


def stage(tasks: int, active: int, completed: int) -> SparkStageInfo:
    return SparkStageInfo(1, 0, "parquet at <unknown>:0", tasks, active, completed, 0)


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([], ""),
        ([stage(1000, 2, 5), stage(200, 0, 0)], "parquet: 5 of 1,200 tasks"),
        ([stage(8, 2, 0)], "parquet: 0 of 8 tasks"),
        ([stage(8, 0, 0), stage(2, 0, 0)], "waiting for an executor to run the first of 10 tasks"),
    ],
)
def test_tasks_are_counted_and_full_cluster_named(stages: list[SparkStageInfo], said: str) -> None:
    assert in_words(stages) == said
