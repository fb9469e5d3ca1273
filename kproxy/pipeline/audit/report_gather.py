"""The reduction of an audit's tables to the facts of its report, with Spark.

`Limits` bounds the rows that reach the driver, whatever the number of partitions, windows and findings: the worst are
kept, windows are joined until they fit, and everything else is counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Final

from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses

from kproxy.pipeline.audit.report_facts import (
    SUMMED,
    Cell,
    Facts,
    Finding,
    FindingCount,
    Grid,
    Holding,
    Partition,
    State,
    Sums,
    Verdict,
)
from kproxy.pipeline.audit.schemas import FINDING_KINDS, GAP, OVERLAP, TAIL
from kproxy.pipeline.audit.tables import Tables
from kproxy.pipeline.spark import as_spark_failure

# Kinds of findings that leave all topics unproven for some time.
HOLES: Final = (GAP, TAIL)
# There are few kinds of findings; foreign tables must not fill the report with more.
KINDS_AT_MOST: Final = 32
OWNERS_OF_A_PARTITION: Final = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """The size of a report. `drawn`: partitions in plots; `columns`: steps of time; `holdings`: of a partition."""

    partitions: int = 60
    drawn: int = 40
    columns: int = 96
    findings: int = 50
    holdings: int = 30


def gather(tables: Tables, about: Mapping[str, str], limits: Limits | None = None) -> Facts:
    """Return the facts of `tables`, the same for the same tables, by a dozen small jobs. Raise SparkFailed."""
    with as_spark_failure("The audit's results could not be read"):
        return _Gathering(tables, limits or Limits()).facts(about)


class _Gathering:
    def __init__(self, tables: Tables, limits: Limits) -> None:
        self._tables = tables
        self._limits = limits

    def facts(self, about: Mapping[str, str]) -> Facts:
        totals, topics = self._totals()
        counts, conflicts = self._finding_counts()
        partitions = self._partitions()
        drawn = partitions[: self._limits.drawn]
        grid = self._grid()
        holdings, hidden_holdings = self._holdings(drawn)
        holes = sum(counts[kind].findings for kind in HOLES if kind in counts)
        return Facts(
            verdict=Verdict(totals, trail_faults=holes, conflicts=conflicts),
            topics=topics,
            partitions=partitions,
            findings=self._findings(),
            finding_counts=counts,
            grid=grid,
            cells=self._cells(grid, drawn) if grid else (),
            trail_holes=self._trail_holes(grid) if grid and holes else (),
            holdings=holdings,
            hidden_holdings=hidden_holdings,
            about=dict(about),
        )

    def _totals(self) -> tuple[Sums, int]:
        row = self._tables.partitions.agg(
            *[F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in SUMMED],
            F.count(F.lit(1)).alias("partitions"),
            F.count_if("unproven").alias("unproven"),
            F.countDistinct("topic").alias("topics"),
        ).first()
        return Sums(**{name: int(row[name]) for name in Sums.__slots__}), int(row.topics)

    def _partitions(self) -> tuple[Partition, ...]:
        worst_first = [F.desc(name) for name in ("lost", "overlapped", "duplicated", "unproven", "removed", "acked")]
        rows = (
            self._tables.partitions.withColumn(
                "owners", F.slice(F.coalesce("owners", F.array().cast("array<int>")), 1, OWNERS_OF_A_PARTITION)
            )
            .orderBy(*worst_first, "topic", "partition")
            .limit(self._limits.partitions)
            .collect()
        )
        return tuple(_partition(row) for row in rows)

    def _finding_counts(self) -> tuple[dict[str, FindingCount], int]:
        """Return the counts by kind, and the number of overlaps between two brokers."""
        rows = (
            self._tables.findings.groupBy("kind")
            .agg(
                # The table may list fewer than `of_kind`.
                F.greatest(F.count(F.lit(1)), F.max("of_kind")).alias("findings"),
                F.coalesce(F.sum("records"), F.lit(0)).alias("records"),
                F.count_if(F.col("owner") != F.col("other_owner")).alias("conflicts"),
            )
            .orderBy("kind")
            .limit(KINDS_AT_MOST)
            .collect()
        )
        counts = {row.kind: FindingCount(int(row.findings), int(row.records)) for row in rows}
        return counts, sum(row.conflicts for row in rows if row.kind == OVERLAP)

    def _findings(self) -> tuple[Finding, ...]:
        kinds = F.array(*[F.lit(kind) for kind in FINDING_KINDS])
        position = F.array_position(kinds, F.col("kind"))
        order = [
            F.when(position == 0, len(FINDING_KINDS) + 1).otherwise(position),
            F.desc_nulls_last("records"),
            *[
                F.asc_nulls_last(name)
                for name in ("from_ms", "topic", "partition", "first_offset", "proxy", "sequence")
            ],
            "detail",
        ]
        rows = self._tables.findings.orderBy(*order).limit(self._limits.findings).collect()
        return tuple(Finding(**{name: row[name] for name in Finding.__slots__}) for row in rows)

    def _grid(self) -> Grid | None:
        """Return a grid of all windows and of the holes in the trails, as far as the windows stay large enough."""
        begin, end = F.unix_millis("window_start"), F.unix_millis("window_end")
        row = self._tables.windows.agg(
            F.min(begin).alias("start"), F.max(end).alias("end"), F.max(end - begin).alias("window")
        ).first()
        if row is None or row.start is None:
            return None
        window = max(1, row.window)
        windows = max(1, -(-(row.end - row.start) // window))
        holes = self._holes().agg(F.min("from_ms").alias("begin"), F.max("to_ms").alias("end")).first()
        most = max(1, windows // 4)
        before = 0 if holes.begin is None else min(max(0, -(-(row.start - holes.begin) // window)), most)
        behind = 0 if holes.end is None else min(max(0, -(-(holes.end - row.end) // window)), most)
        windows += before + behind
        together = -(-windows // self._limits.columns)
        return Grid(row.start - before * window, window * together, -(-windows // together), together)

    def _holes(self) -> DataFrame:
        return self._tables.findings.where(F.col("kind").isin(*HOLES) & F.col("from_ms").isNotNull())

    def _cells(self, grid: Grid, drawn: Sequence[Partition]) -> tuple[Cell, ...]:
        if not drawn:
            return ()
        state = F.greatest(
            F.when(F.col("acked") > 0, _rank(State.COMPLETE)).otherwise(_rank(State.NOTHING)),
            *[
                F.when(condition, _rank(state)).otherwise(_rank(State.NOTHING))
                for state, condition in (
                    (State.REMOVED, F.col("removed") + F.coalesce("deleted", F.lit(0)) > 0),
                    (State.UNPROVEN, F.col("unproven")),
                    (State.DUPLICATED, F.col("duplicated") > 0),
                    (State.OVERLAPPED, F.col("overlapped") > 0),
                    (State.LOST, F.col("lost") > 0),
                )
            ],
        )
        rows = (
            _of(self._tables.windows, drawn)
            .groupBy("topic", "partition", _column(grid, F.unix_millis("window_start")).alias("column"))
            .agg(F.max(state).alias("state"))
            .orderBy("topic", "partition", "column")
            .collect()
        )
        states = list(State)
        return tuple(Cell(row.topic, row.partition, row.column, states[row.state]) for row in rows)

    def _trail_holes(self, grid: Grid) -> tuple[int, ...]:
        """Return the steps with holes. A hole concerns all topics, also those without known acknowledgements then."""
        last = F.greatest(F.coalesce("to_ms", F.lit(grid.end_ms)), "from_ms")
        rows = (
            self._holes()
            .where((F.col("from_ms") < grid.end_ms) & (last >= grid.start_ms))
            .select(F.explode(F.sequence(_column(grid, F.col("from_ms")), _column(grid, last))).alias("column"))
            .distinct()
            .orderBy("column")
            .collect()
        )
        return tuple(row.column for row in rows)

    def _holdings(self, drawn: Sequence[Partition]) -> tuple[tuple[Holding, ...], int]:
        if not drawn:
            return (), 0
        order = ["first_acked_at", "revision", "owner"]
        by_partition = Window.partitionBy("topic", "partition")
        rows = (
            _of(self._tables.owners, drawn)
            .withColumn("place", F.row_number().over(by_partition.orderBy(*order)))
            .withColumn("all", F.count(F.lit(1)).over(by_partition))
            .where(F.col("place") <= self._limits.holdings)
            .orderBy("topic", "partition", *order)
            .collect()
        )
        columns = ("topic", "partition", "owner", "revision", "first_acked_at", "last_acked_at", "records")
        holdings = tuple(Holding(*[row[name] for name in columns]) for row in rows)
        return holdings, sum(row["all"] for row in rows if row.place == 1) - len(holdings)


def _partition(row: Row) -> Partition:
    sums = Sums(partitions=1, unproven=int(bool(row.unproven)), **{name: int(row[name] or 0) for name in SUMMED})
    return Partition(
        topic=row.topic,
        partition=row.partition,
        sums=sums,
        owners=tuple(row.owners),
        producers=int(row.producers or 0),
        log_start_offset=row.log_start_offset,
        end_offset=row.end_offset,
        p50_ms=row.p50_ms,
        p99_ms=row.p99_ms,
        max_ms=row.max_ms,
    )


def _of(table: DataFrame, partitions: Sequence[Partition]) -> DataFrame:
    """Return the rows of these few partitions by a filter, with which Parquet skips files; no join."""
    numbers = defaultdict(list)
    for one in partitions:
        numbers[one.topic].append(one.partition)
    wanted = [(F.col("topic") == topic) & F.col("partition").isin(*theirs) for topic, theirs in numbers.items()]
    return table.where(reduce(or_, wanted))


def _column(grid: Grid, ms: Column) -> Column:
    """Return the step of the grid that a time is in; times outside count in the first or last one."""
    step = F.floor((ms - F.lit(grid.start_ms)) / F.lit(grid.step_ms))
    return F.least(F.greatest(step, F.lit(0)), F.lit(grid.columns - 1)).cast("int")


def _rank(state: State) -> Column:
    return F.lit(list(State).index(state))
