"""Spark for tests: a session, and its Kafka sink, one batch after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kproxy.pipeline.spark import SparkDriver
from tests.support.java import require_java


@contextmanager
def spark_session(directory: Path) -> Iterator[Any]:
    """A Spark session, until the block ends."""
    driver = SparkDriver(require_java(), directory)
    try:
        driver.start()
        yield driver.session
    finally:
        driver.stop()


def write_batches(
    session: Any, topic: str, partitions: int, settings: Mapping[str, str], *, rows: int, goes_on: Callable[[], bool]
) -> int:
    """Write the numbers from 0 on, as text, in batches of `rows` for each partition while it `goes_on`.

    In each partition the numbers rise. Returns how many were written, all of them acknowledged.
    """
    written = 0
    while goes_on():
        # One Spark partition, and so one producer, for each of the topic's: rows of one task go out in their order.
        numbers = session.range(written, written + rows * partitions, 1, partitions)
        partition = f"cast((id - {written}) div {rows} as int) as partition"
        messages = numbers.selectExpr(partition, "cast(id as string) as value")
        messages.write.format("kafka").options(**settings, topic=topic).save()
        written += rows * partitions
    return written
