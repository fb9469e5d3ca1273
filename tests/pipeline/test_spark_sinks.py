"""Spark's own sinks, configured with only an address: a stream with a checkpoint, and a batch, while owners move.

The stream's job is killed with -9 and started again. Duplicates then belong to the one uncommitted micro-batch, and
nothing is missing. Before reference brokers and before Apache Kafka.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.pipeline.killing import Watched, committed, running
from tests.pipeline.owners import KINDS, Owners, owners  # noqa: F401
from tests.support.clients.kafka_io import create_topic, read_topic
from tests.support.clients.spark import QUICK

pytestmark = [pytest.mark.spark, pytest.mark.java, pytest.mark.timeout(900)]

STREAM, BATCH = "stream", "batch"
PARTITIONS = 6
FILES, ROWS_PER_FILE = 16, 1_000
ROWS = FILES * ROWS_PER_FILE
BATCH_ROWS = 200_000
APPLICATION = """
import sys

from kproxy.pipeline.session import SessionOptions, open_session

bootstrap, directory, stream, batch, rows, *settings = sys.argv[1:]
options = SessionOptions("sinks", master="local[2]", settings=dict(each.split("=", 1) for each in settings))
with open_session(options) as opened:
    lines = opened.session.readStream.format("text").option("maxFilesPerTrigger", 1).load(f"{directory}/in")
    sink = lines.selectExpr("value as key", "value").writeStream.format("kafka").option("topic", stream)
    sink = sink.option("kafka.bootstrap.servers", bootstrap).option("checkpointLocation", f"{directory}/checkpoint")
    sink.trigger(availableNow=True).start().awaitTermination()
    numbers = opened.session.range(int(rows)).selectExpr("cast(id as string) as key", "cast(id as string) as value")
    numbers.write.format("kafka").option("kafka.bootstrap.servers", bootstrap).option("topic", batch).save()
"""


def write_files(directory: Path) -> None:
    directory.mkdir()
    for file in range(FILES):
        numbers = range(file * ROWS_PER_FILE, (file + 1) * ROWS_PER_FILE)
        (directory / f"{file:03}.txt").write_text("".join(f"{number}\n" for number in numbers))


def times_each(bootstrap: str, topic: str) -> Counter[int]:
    """How often each number occurs. Missing ones are reported, not awaited, because all replicas acknowledged all."""
    return Counter(int(record.value or b"") for record in read_topic(bootstrap, topic, PARTITIONS, 1))


@pytest.mark.long
@pytest.mark.parametrize("owners", KINDS, indirect=True)
async def test_killed_stream_loses_nothing_while_owners_move(owners: Owners, tmp_path: Path) -> None:  # noqa: F811
    write_files(tmp_path / "in")
    for topic in (STREAM, BATCH):
        await asyncio.to_thread(create_topic, owners.proxy, topic, PARTITIONS)
    streamed, batched = (Watched(owners.proxy, topic, PARTITIONS) for topic in (STREAM, BATCH))
    places = [owners.proxy, str(tmp_path), STREAM, BATCH, str(BATCH_ROWS)]
    command = [sys.executable, "-P", "-c", APPLICATION, *places, *QUICK]

    async with running(command, tmp_path, "first") as first:
        await streamed.until(ROWS // 5, first)
        victim = owners.leader(STREAM)
        victim.kill()
        await streamed.until(ROWS // 2, first)
        first.kill()
    assert 0 < committed(tmp_path / "checkpoint") < FILES, first.said.read_text()

    async with running(command, tmp_path, "second") as second:
        # The broker leads again while the second job writes.
        await asyncio.to_thread(owners.restart, victim, STREAM, BATCH)
        begun = await batched.until(1, second)
        assert begun < BATCH_ROWS, "the batch was written before an owner could be killed"
        other = owners.leader(BATCH)
        other.kill()
        assert await second.ended() == 0, second.said.read_text()
        await asyncio.to_thread(owners.restart, other, STREAM, BATCH)
    streamed.close()
    batched.close()
    of_stream = await asyncio.to_thread(times_each, owners.proxy, STREAM)
    of_batch = await asyncio.to_thread(times_each, owners.proxy, BATCH)

    # Both results at once, so that a fault of one does not hide the other.
    told = {STREAM: (of_stream, ROWS), BATCH: (of_batch, BATCH_ROWS)}
    lost = {topic: rows - len(times.keys() & set(range(rows))) for topic, (times, rows) in told.items()}
    most = {topic: max(times.values()) for topic, (times, _) in told.items()}
    twice = {number // ROWS_PER_FILE for number, times in of_stream.items() if times > 1}
    assert lost == {STREAM: 0, BATCH: 0}, f"lost rows; {most} times one, micro-batches {twice} twice"
    # An owner's death costs no duplicates, the job's death at most one micro-batch of them.
    assert (len(twice) <= 1, most[STREAM] <= 2, most[BATCH]) == (True, True, 1), f"micro-batches {twice} twice; {most}"
