"""Where the logs are read from, by what a trail says was acknowledged: not by times in the logs, which producers write.

An audit from some time on needs the offsets that were acknowledged then, and no others. The trail names them, so that
no record is passed over, whatever its timestamp says. Of a partition of which it names none nothing is read.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses

from kproxy.pipeline.audit.log_client import TopicPartition
from kproxy.pipeline.audit.log_plan import Offsets, offsets_as_json, parse_offsets

# The lowest first offset of a row's spans.
_FIRST_OFFSET: Final = "array_min(filter(spans, (each, index) -> index % 2 = 0))"


def first_acknowledged(rows: DataFrame, since_ms: int) -> dict[TopicPartition, int]:
    """Of each partition the lowest offset that the trail's rows say was acknowledged at `since_ms` or later."""
    return first_offsets(rows.where((F.col("kind") == "range") & (F.col("last_acked_at") >= since_ms)))


def first_offsets(ranges: DataFrame) -> dict[TopicPartition, int]:
    """Of each partition the lowest offset in a trail's rows of kind `range`."""
    firsts = ranges.groupBy("topic", "partition").agg(F.min(F.expr(_FIRST_OFFSET)).alias("first"))
    return {TopicPartition(row.topic, row.partition): row.first for row in firsts.collect()}


def starts_at_or_before(first: Offsets, ends: str) -> str:
    """Where to begin, as JSON like `ends` (`log_source.fix_ends`): at the `first` offset needed, else at the end."""
    _, behind = parse_offsets(ends, "endOffsets")
    return offsets_as_json({which: min(first.get(which, end), end) for which, end in behind.items()})
