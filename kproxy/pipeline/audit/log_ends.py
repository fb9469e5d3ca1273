"""Where logs end, once readers are shown what was acknowledged: what acks=1 acknowledged is shown a little later.

A record that one replica has acknowledged lies behind the end that readers are shown until the others have it, which
takes followers of a broker that lives some moments. So the ends are asked for again while they lie before what the
trail tells of, but not for ever: what a broker that died had alone stays away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses

from kproxy.pipeline.audit.log_client import TopicPartition
from kproxy.pipeline.audit.log_plan import parse_offsets

PATIENCE_S: Final = 5.0
_PAUSE_S: Final = 0.25
_BEHIND_LAST: Final = "element_at(spans, -2) + element_at(spans, -1)"

Ends = Mapping[TopicPartition, int]


def acknowledged_by_one(rows: DataFrame) -> dict[TopicPartition, int]:
    """Of each partition the offset behind the last that the trail's rows say was acknowledged with acks=1."""
    ranges = rows.where("kind = 'range' and acks = 1")
    behind = ranges.groupBy("topic", "partition").agg(F.max(F.expr(_BEHIND_LAST)).alias("behind"))
    return {TopicPartition(row.topic, row.partition): row.behind for row in behind.collect()}


def ends_behind(
    told: Ends,
    ask: Callable[[], str],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """What `ask` answers (ends as of `log_source.fix_ends`) when it is behind `told`, or else after PATIENCE_S.

    Of partitions that it does not tell of nothing is awaited. Raises what `ask` raises.
    """
    deadline = clock() + PATIENCE_S
    while True:
        text = ask()
        _, ends = parse_offsets(text, "endOffsets")
        if clock() >= deadline or all(ends.get(which, behind) >= behind for which, behind in told.items()):
            return text
        sleep(_PAUSE_S)
