"""What a trail can prove: its rows, each once; what is missing of it; and the times for which it proves nothing.

A piece is 64 sequence numbers of one trail with a bit for each that is there, so that what is there twice or not at all
is found without sorting rows.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses

from kproxy.pipeline.audit.schemas import GAP, TAIL
from kproxy.pipeline.audit.trail import SHIPPING_MS

TRAIL: Final = ("proxy", "incarnation")
# A trail whose begin is lost does not say how long it keeps what it has to tell: the longest that can be configured
# (audit.interval_s), with what a proxy may be late.
_INTERVAL_MS: Final = 61_000
_MARK_MS: Final = 10_000
# A trail of which rows are read from some time on has a row so soon after it, or was not there yet: a mark is due.
FIRST_ROW_MS: Final = _INTERVAL_MS + _MARK_MS
# Longer than a proxy that is replaced while it serves takes to let go of its last clients.
_HANDOVER_MS: Final = 600_000
_PIECE_BITS: Final = 6
# Rows are looked at one by one in blocks of so many pieces.
_BLOCK_BITS: Final = 16


def pieces(rows: DataFrame) -> DataFrame:
    """One row for each 64 sequence numbers of a trail: how many `rows`, which (`bits`), the first, the last, when.

    Only numbers are added up, for `at` rises with the sequence: that takes no sort and little memory.
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
    """`rows` without those that were shipped twice."""
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
    """One row a trail. `whole_until`: up to when its last row says everything; null where it ended in order.

    `next_begin`: when the proxy's next incarnation began; `previous_at`: when the one before was last heard of. Where
    incarnations overlap both are null: the old one still answers its clients while the new one serves, and neither's
    time ends or begins with the other's. Where any of a name have done so for long, that is the name of several proxies
    (behind one address, say), and none of them is known to be another one's next.
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
    # Null where there is but one.
    is_shared = F.coalesce(F.max("together_ms").over(Window.partitionBy("proxy")) > _HANDOVER_MS, F.lit(False))
    neighbours = {name: F.when(~is_shared, F.col(name)) for name in ("next_begin", "previous_at")}
    return followed.withColumns(neighbours).drop("together_ms")


def audit_end(trails: DataFrame, *, read_at_ms: int, to_ms: int | None, shipping_ms: int = SHIPPING_MS) -> DataFrame:
    """One row. `end_ms`: up to when the audit judges; `heard_ms`: whoever lives has promised a row by then.

    Unless `to_ms` says so, that is when the trail was read; but where proxies still write their trails it is up to when
    all of them are known whole. Else the last seconds of everything that lives were unproven every time. `shipping_ms`
    is what a row may take from being closed to being read.
    """
    heard = F.lit(read_at_ms - shipping_ms).cast("long")
    until = F.min(F.when(_lives(heard), F.col("whole_until")))
    return trails.agg(
        F.lit(to_ms).cast("long").alias("to_ms"), F.coalesce(until, F.lit(read_at_ms)).alias("until")
    ).select(F.coalesce("to_ms", "until").alias("end_ms"), heard.alias("heard_ms"))


def _lives(heard_ms: Column) -> Column:
    """Whether a trail goes on: it has no end, nothing came after it, and its next row is not due before `heard_ms`."""
    due = F.col("last_at") + F.col("mark_ms") + F.col("interval_ms")
    return F.col("end").isNull() & (due >= heard_ms) & F.col("next_begin").isNull()


def gaps(
    rows: DataFrame,
    pieces: DataFrame,
    trails: DataFrame,
    *,
    has_begin: bool = True,
    read_from_ms: int | None = None,
) -> DataFrame:
    """Rows that are missing: proxy, incarnation, `sequence` of the first, how many (`missing`), from_ms, to_ms.

    An acknowledgement is in a row that is closed at most `interval_ms` later, so those that a missing row has came
    after the row before it was closed less that, and before the one behind it was. `has_begin`: whether trails should
    have their first rows, but for those that were there already before `read_from_ms`.
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
    is_headless = F.lit(has_begin) & (F.col("first") > 0)
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
    """Trails without an end: proxy, incarnation, `sequence` of the last row, from_ms, to_ms, whether it `lives`.

    One that lives is among them where more is to be judged than it tells of yet. `is_all`: whether all has been read
    that there is. Else only those are over that another incarnation came after.
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
        # One that is known whole up to the audit's end lives, and nothing of it is missing.
        .where("from_ms < to_ms")
    )


def unproven(gaps: DataFrame, tails: DataFrame, end: DataFrame, *, from_ms: int | None) -> DataFrame:
    """Both as findings without their words, as far as they are within the times that are judged."""
    both = gaps.select("*", F.lit(False).alias("lives"), F.lit(GAP).alias("kind")).unionByName(
        tails.select("*", F.lit(0).cast("long").alias("missing"), F.lit(TAIL).alias("kind"))
    )
    judged = both.crossJoin(F.broadcast(end)).withColumn("to_ms", F.least("to_ms", "end_ms")).drop(*end.columns)
    begin = F.col("from_ms") if from_ms is None else F.greatest("from_ms", F.lit(from_ms))
    return judged.withColumn("from_ms", begin).where("from_ms < to_ms")
