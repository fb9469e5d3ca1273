"""How Spark works on an audit, by how much there is to audit.

Much of it takes a shuffle in so many partitions that a task can put its own together in memory, and what is read
several times lies in Parquet files. Of little of it Spark would spend its time on compiling, on planning anew, on tasks
without work and on files: it is interpreted, in one partition, and what is read several times stays in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from pyspark.sql import DataFrame

from kproxy.pipeline.spark_settings import in_one_process

# Rows of the trail and batches of the log. Up to here compiling costs more time than it saves.
FEW: Final = 50_000
_SHUFFLE_PARTITIONS: Final = "spark.sql.shuffle.partitions"
_FOR_FEW: Final = {
    _SHUFFLE_PARTITIONS: "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
# Some 60 MB, with two endpoints each.
_ROWS_PER_TASK: Final = 300_000
_MAX_PARTITIONS: Final = 10_000


@contextmanager
def fitted(session: Any, rows: int) -> Iterator[None]:
    """The session's settings as an audit of so many rows wants them, for as long as the block lasts."""
    wanted = _FOR_FEW if rows <= FEW else _for_many(session, rows)
    before = {name: session.conf.get(name) for name in wanted}
    try:
        for name, value in wanted.items():
            session.conf.set(name, value)
        yield
    finally:
        for name, value in before.items():
            session.conf.set(name, value)


def _for_many(session: Any, rows: int) -> Mapping[str, str]:
    """Spark puts small partitions together by itself, but never divides large ones.

    What the session has is the least.
    """
    needed = min(rows // _ROWS_PER_TASK, _MAX_PARTITIONS)
    return {_SHUFFLE_PARTITIONS: str(max(int(session.conf.get(_SHUFFLE_PARTITIONS)), needed))}


def stays_in_memory(session: Any, rows: int) -> bool:
    """Whether `keep` is for so many rows. Not where an executor may be lost, and what it has in memory with it."""
    return rows <= FEW and in_one_process(session.sparkContext.master)


def keep(_: str, frame: DataFrame) -> DataFrame:
    """A `Land`: in memory, until nobody refers to it any more.

    In one partition it needs no shuffle, whatever it is grouped or joined by.
    """
    return frame.coalesce(1).localCheckpoint()
