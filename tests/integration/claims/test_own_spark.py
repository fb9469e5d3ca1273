"""Spark's writer of examples/spark_foreach_batch.py: each row once, despite reruns and late writers."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import kafka
import pytest

from kproxy.claims.client import OwnRefused, own_sync
from tests.support.claims.owned_topics import PARTITIONS, WRITERS, OwnedTopics

EXAMPLE = Path(__file__).parents[3] / "examples" / "spark_foreach_batch.py"
ROWS_PER_BATCH = 40
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("spark_foreach_batch", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def sink(example: ModuleType, owned_topics: OwnedTopics) -> Any:
    return example.Sink(owned_topics.bootstrap, owned_topics.topic(), PARTITIONS, WRITERS)


def rows_of(site: OwnedTopics, sink: Any, partition: int = 0) -> list[tuple[int, int, Any]]:
    """The rows of a partition, without those about claims."""
    records = [json.loads(value) for value in site.log(sink.topic, partition)]
    return [(each["batch"], each["row"], each["value"]) for each in records if "batch" in each]


def rows(*values: int) -> list[dict[str, int]]:
    return [{"partition": 0, "value": value} for value in values]


def test_rerun_batch_is_written_once(example: ModuleType, owned_topics: OwnedTopics, sink: Any) -> None:
    for batch, values in [(0, (3, 1, 2)), (0, (1, 2, 3)), (1, (4, 5)), (0, (2, 3, 1)), (1, (5, 4)), (2, (6,))]:
        example.write_rows(sink, batch, rows(*values))
    expected = [(0, 0, 1), (0, 1, 2), (0, 2, 3), (1, 0, 4), (1, 1, 5), (2, 0, 6)]
    assert rows_of(owned_topics, sink) == expected


def test_interrupted_attempt_is_finished_by_next(example: ModuleType, owned_topics: OwnedTopics, sink: Any) -> None:
    example.write_rows(sink, 0, rows(*range(7)))
    example.write_rows(sink, 0, rows(*range(2 * example.LOOK_BACK)))
    # So many claimed it without writing that one look back does not reach the last row.
    with producing(sink) as producer, own_sync(producer, WRITERS, [(sink.topic, 0)], 1):
        for _ in range(example.LOOK_BACK):
            example.send(sink, producer, 0, {"claimed_for": 1})
    example.write_rows(sink, 0, rows(*range(2 * example.LOOK_BACK + 1)))
    assert rows_of(owned_topics, sink) == [(0, row, row) for row in range(2 * example.LOOK_BACK + 1)]


@contextmanager
def producing(sink: Any) -> Iterator[Any]:
    producer = kafka.KafkaProducer(bootstrap_servers=sink.bootstrap)
    try:
        yield producer
    finally:
        producer.close()


def test_late_earlier_batch_is_refused_during_later_one(
    example: ModuleType, owned_topics: OwnedTopics, sink: Any
) -> None:
    with producing(sink) as producer, own_sync(producer, WRITERS, [(sink.topic, 0)], generation=6) as ownership:
        with pytest.raises(OwnRefused, match="is owned with a generation above 5"):
            example.write_rows(sink, 4, rows(1))
        assert ownership.is_valid
    assert owned_topics.log(sink.topic) == []


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_restarted_query_writes_no_row_twice(
    example: ModuleType, owned_topics: OwnedTopics, sink: Any, tmp_path: Path, spark: Any
) -> None:
    from pyspark import cloudpickle

    # A script is shipped to the executors whole, and so is this module.
    cloudpickle.register_pickle_by_value(example)
    checkpoint = tmp_path / "checkpoint"
    run_until(example, spark, sink, checkpoint, batches=1)
    # As if killed after its write and before Spark noted the commit.
    last = max(numbered(checkpoint / "commits"))
    remove(checkpoint / "commits", last)
    # A stopped job may have planned the next batch; a killed one had not.
    for batch in numbered(checkpoint / "offsets"):
        if batch > last:
            remove(checkpoint / "offsets", batch)
    run_until(example, spark, sink, checkpoint, batches=last + 1)
    written = [rows_of(owned_topics, sink, partition) for partition in range(PARTITIONS)]
    values = sorted(value for partition in written for _, _, value in partition)
    assert len(values) >= ROWS_PER_BATCH
    assert values == list(range(len(values)))
    for partition in written:
        places = [(batch, row) for batch, row, _ in partition]
        assert places == sorted(places)


def numbered(log: Path) -> list[int]:
    """Return the batches that have an entry in one of Spark's checkpoint logs."""
    return [int(each.name) for each in log.iterdir() if each.name.isdigit()]


def remove(log: Path, batch: int) -> None:
    for name in (f"{batch}", f".{batch}.crc"):
        (log / name).unlink()


def run_until(example: ModuleType, session: Any, sink: Any, checkpoint: Path, batches: int) -> None:
    """Run until `batches` batches have been committed since the checkpoint was created."""
    query = example.start(session, sink, str(checkpoint), ROWS_PER_BATCH)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not (checkpoint / "commits" / str(batches - 1)).exists():
            assert query.exception() is None, query.exception()
            assert time.monotonic() < deadline, "no batch is committed"
            time.sleep(0.1)
    finally:
        query.stop()
