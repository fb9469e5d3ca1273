"""Find the rows of a trail, its missing rows, and its unproven times.

A piece is 64 sequence numbers of one trail with a bit for each one present, so that repeated and missing rows are found
without sorting.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses

from kproxy.pipeline.audit.schemas import GAP, TAIL
from kproxy.pipeline.audit.trail import SHIPPING_MS

TRAIL: Final = ("proxy", "incarnation")
# For a trail whose first row is lost, and with it the interval: the longest that can be configured (audit.interval_s),
# plus the delay allowed to a proxy.
_INTERVAL_MS: Final = 61_000
_MARK_MS: Final = 10_000
# A trail that existed when reading starts has a row within this time, as a mark is due.
FIRST_ROW_MS: Final = _INTERVAL_MS + _MARK_MS
# Longer than a proxy that is being replaced serves its last clients.
_HANDOVER_MS: Final = 600_000
_PIECE_BITS: Final = 6
# Pieces in a block within which rows are examined one by one.
_BLOCK_BITS: Final = 16


def pieces(rows: DataFrame) -> DataFrame:
    """Return one row for each 64 sequence numbers of a trail: how many `rows`, which (`bits`), first, last, times.

    `at` rises with the sequence number, so sums are enough: no sort, little memory.
    """
    sequence, at = F.col("sequence"), F.col("at")

    def of(kind: str, value: Column) -> Column:
        return F.max(F.when(F.col("kind") == kind, value))

    return rows.groupBy(*TRAIL, F.shiftright(sequence, _PIECE_BITS).alias("piece")).agg(
        F.count("*").alias("rows"),
        F.bit_or(F.expr(f"shiftleft(1L, cast(sequence & {(1 << _PIECE_BITS) - 1} as int))")).alias("bits"),
        F.min(sequence).alias("first"),
        F.max(sequence).alias("last"),
        F.min(at).alias("first_at"),
        F.max(at).alias("last_at"),
        of("begin", at).alias("begin_at"),
        F.max("interval_ms").alias("interval_ms"),
        F.max("mark_ms").alias("mark_ms"),
        of("mark", sequence).alias("last_mark"),
        of("end", sequence).alias("end"),
    )


def each_once(rows: DataFrame, pieces: DataFrame) -> DataFrame:
    """Return `rows` without those shipped twice."""
    block = F.shiftright("sequence", _BLOCK_BITS).alias("block")
    twice = (
        pieces.where(F.col("rows") != F.bit_count("bits"))
        .select(*TRAIL, F.shiftright("piece", _BLOCK_BITS - _PIECE_BITS).alias("block"))
        .distinct()
    )
    keys = [*TRAIL, "block"]
    marked = rows.select("*", block)
    sure = marked.join(F.broadcast(twice), keys, "left_anti")
    doubtful = marked.join(F.broadcast(twice), keys, "left_semi").dropDuplicates([*TRAIL, "sequence"])
    return sure.unionByName(doubtful).drop("block")


def trails(pieces: DataFrame) -> DataFrame:
    """Return one row for each trail.

    `whole_until`: the time up to which it is complete; null if it ended in order. `next_begin`: when the proxy's next
    incarnation began; `previous_at`: when the previous one was last heard of. Both are null if incarnations overlap:
    the old one still answers its clients while the new one serves, and neither's time is bounded by the other's. If
    incarnations of a name overlap for long, several proxies have that name (for example behind one address), and none
    is known to succeed another.
    """
    whole = pieces.groupBy(*TRAIL).agg(
        F.min("first").alias("first"),
        F.max("last").alias("last"),
        F.min("first_at").alias("first_at"),
        F.max("last_at").alias("last_at"),
        F.max("begin_at").alias("begin_at"),
        F.coalesce(F.max("interval_ms"), F.lit(_INTERVAL_MS)).alias("interval_ms"),
        F.coalesce(F.max("mark_ms"), F.lit(_MARK_MS)).alias("mark_ms"),
        F.max("last_mark").alias("last_mark"),
        F.max("end").alias("end"),
    )
    by_time = Window.partitionBy("proxy").orderBy(F.coalesce("begin_at", "first_at"), "incarnation")
    next_begin = F.lead(F.coalesce("begin_at", "first_at")).over(by_time)
    previous_at = F.lag("last_at").over(by_time)
    heard_before = F.max("last_at").over(by_time.rowsBetween(Window.unboundedPreceding, -1))
    together_ms = F.least("last_at", heard_before) - F.coalesce("begin_at", "first_at")
    known = F.when(F.col("last_mark") == F.col("last"), F.col("last_at"))
    followed = whole.select(
        "*",
        F.when(F.col("end").isNull(), F.coalesce(known, F.col("last_at") - F.col("interval_ms"))).alias("whole_until"),
        F.when(next_begin > F.col("last_at"), next_begin).alias("next_begin"),
        F.when(previous_at < F.col("first_at"), previous_at).alias("previous_at"),
        F.when(heard_before.isNotNull(), together_ms).alias("together_ms"),
    )
    # Null if there is only one.
    is_shared = F.coalesce(F.max("together_ms").over(Window.partitionBy("proxy")) > _HANDOVER_MS, F.lit(False))
    neighbours = {name: F.when(~is_shared, F.col(name)) for name in ("next_begin", "previous_at")}
    return followed.withColumns(neighbours).drop("together_ms")


def audit_end(trails: DataFrame, *, read_at_ms: int, to_ms: int | None, shipping_ms: int = SHIPPING_MS) -> DataFrame:
    """Return the end of the audit, in one row.

    `end_ms`: the end of the time to judge; `heard_ms`: every live proxy promised a row by then. Without `to_ms` the end
    is when the trail was read, or, while proxies still write, the time up to which all live trails are complete;
    otherwise the last seconds of live proxies would always be unproven. `shipping_ms`: the longest time from closing a
    row until it can be read.
    """
    heard = F.lit(read_at_ms - shipping_ms).cast("long")
    until = F.min(F.when(_lives(heard), F.col("whole_until")))
    return trails.agg(
        F.lit(to_ms).cast("long").alias("to_ms"), F.coalesce(until, F.lit(read_at_ms)).alias("until")
    ).select(F.coalesce("to_ms", "until").alias("end_ms"), heard.alias("heard_ms"))


def _lives(heard_ms: Column) -> Column:
    """Return whether a trail is live: it has no end and no successor, and its next row is not due before `heard_ms`."""
    due = F.col("last_at") + F.col("mark_ms") + F.col("interval_ms")
    return F.col("end").isNull() & (due >= heard_ms) & F.col("next_begin").isNull()


def gaps(
    rows: DataFrame,
    pieces: DataFrame,
    trails: DataFrame,
    *,
    read_from_ms: int | None = None,
) -> DataFrame:
    """Return the missing rows: proxy, incarnation, `sequence` of the first, number (`missing`), from_ms, to_ms.

    A row is closed at most `interval_ms` after an acknowledgement in it. So the acknowledgements in a missing row came
    after the closing of the row before it minus that interval, and before the closing of the row after it. A missing
    first row is a gap, except of trails that existed before `read_from_ms`.
    """
    edges = pieces.select(*TRAIL, "first", "last", "first_at", "last_at")
    along = Window.partitionBy(*TRAIL).orderBy("first")
    between = edges.select(
        *TRAIL,
        (F.lag("last").over(along) + 1).alias("sequence"),
        F.col("first").alias("behind"),
        F.lag("last_at").over(along).alias("before_at"),
        F.col("first_at").alias("behind_at"),
    )
    within = _gaps_within(rows, pieces)
    earliest = trails.agg((F.min("first_at") - F.max("interval_ms")).alias("earliest"))
    is_headless = F.col("first") > 0
    if read_from_ms is not None:
        is_headless &= F.col("first_at") > read_from_ms + FIRST_ROW_MS
    headless = trails.where(is_headless).crossJoin(F.broadcast(earliest)).select(
        *TRAIL,
        F.lit(0).cast("long").alias("sequence"),
        F.col("first").alias("behind"),
        (F.coalesce("previous_at", "earliest") + F.col("interval_ms")).alias("before_at"),
        F.col("first_at").alias("behind_at"),
    )  # fmt: skip
    intervals = trails.select(*TRAIL, "interval_ms")
    return (
        between.unionByName(within)
        .unionByName(headless)
        .where("sequence < behind")
        .join(F.broadcast(intervals), list(TRAIL))
        .select(
            *TRAIL,
            "sequence",
            (F.col("behind") - F.col("sequence")).alias("missing"),
            (F.col("before_at") - F.col("interval_ms")).alias("from_ms"),
            F.col("behind_at").alias("to_ms"),
        )
    )


def _gaps_within(rows: DataFrame, pieces: DataFrame) -> DataFrame:
    holed = pieces.where(F.bit_count("bits") <= F.col("last") - F.col("first")).select(*TRAIL, "piece")
    piece = F.shiftright("sequence", _PIECE_BITS).alias("piece")
    keys = [*TRAIL, "piece"]
    among = rows.select(*TRAIL, piece, "sequence", "at").join(F.broadcast(holed), keys, "left_semi")
    along = Window.partitionBy(*keys).orderBy("sequence")
    return among.select(
        *TRAIL,
        (F.lag("sequence").over(along) + 1).alias("sequence"),
        F.col("sequence").alias("behind"),
        F.lag("at").over(along).alias("before_at"),
        F.col("at").alias("behind_at"),
    )


def tails(trails: DataFrame, end: DataFrame, *, is_all: bool = True) -> DataFrame:
    """Return the trails without an end: proxy, incarnation, `sequence` of the last row, from_ms, to_ms, `lives`.

    A live one is included if the time to judge is longer than it covers. `is_all`: whether everything was read; if not,
    only trails with a successor count as ended.
    """
    return (
        trails.where(F.col("end").isNull() & (F.lit(is_all) | F.col("next_begin").isNotNull()))
        .crossJoin(F.broadcast(end))
        .select(
            *TRAIL,
            F.col("last").alias("sequence"),
            F.col("whole_until").alias("from_ms"),
            F.coalesce("next_begin", "end_ms").alias("to_ms"),
            _lives(F.col("heard_ms")).alias("lives"),
        )
        # A trail that is complete up to the audit's end is live, and nothing of it is missing.
        .where("from_ms < to_ms")
    )


def unproven(gaps: DataFrame, tails: DataFrame, end: DataFrame, *, from_ms: int | None) -> DataFrame:
    """Return gaps and tails within the time to judge as findings, without their sentences."""
    both = gaps.select("*", F.lit(False).alias("lives"), F.lit(GAP).alias("kind")).unionByName(
        tails.select("*", F.lit(0).cast("long").alias("missing"), F.lit(TAIL).alias("kind"))
    )
    judged = both.crossJoin(F.broadcast(end)).withColumn("to_ms", F.least("to_ms", "end_ms")).drop(*end.columns)
    begin = F.col("from_ms") if from_ms is None else F.greatest("from_ms", F.lit(from_ms))
    return judged.withColumn("from_ms", begin).where("from_ms < to_ms")
