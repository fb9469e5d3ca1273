"""Spark's own sinks, configured with only an address: a stream with a checkpoint, and a batch, while owners move.

The stream's job is killed with -9 and started again. Duplicates then belong to the one uncommitted micro-batch, and
nothing is missing.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kproxy.config import DEFAULT_PREFIX
from kproxy.demo.run import partition_owners
from kproxy.dev.cluster import DevCluster
from tests.pipeline.killing import Watched, committed, running
from tests.support.clients.java import require_java
from tests.support.clients.kafka_io import create_topic, read_topic
from tests.support.clients.spark import QUICK
from tests.support.processes.dev import asyncios_own_loop

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

STREAM, BATCH = "stream", "batch"
PARTITIONS = 6
FILES, ROWS_PER_FILE = 16, 1_000
ROWS = FILES * ROWS_PER_FILE
BATCH_ROWS = 200_000
LEASE_TTL_S = 2
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


@pytest.fixture(autouse=True)
def loop() -> Iterator[None]:
    with asyncios_own_loop():
        yield


def write_files(directory: Path) -> None:
    directory.mkdir()
    for file in range(FILES):
        numbers = range(file * ROWS_PER_FILE, (file + 1) * ROWS_PER_FILE)
        (directory / f"{file:03}.txt").write_text("".join(f"{number}\n" for number in numbers))


def times_each(bootstrap: str, topic: str) -> Counter[int]:
    """How often each number occurs. Missing ones are reported, not awaited, because all replicas acknowledged all."""
    return Counter(int(record.value or b"") for record in read_topic(bootstrap, topic, PARTITIONS, 1))


@pytest.mark.long
async def test_killed_stream_loses_nothing_while_owners_move(tmp_path: Path) -> None:
    require_java()
    write_files(tmp_path / "in")
    async with DevCluster(tmp_path / "cluster", brokers=3, lease_ttl_s=LEASE_TTL_S) as cluster:
        for topic in (STREAM, BATCH):
            await asyncio.to_thread(create_topic, cluster.kafka, topic, PARTITIONS)
        streamed, batched = (Watched(cluster.kafka, topic, PARTITIONS) for topic in (STREAM, BATCH))
        places = [cluster.kafka, str(tmp_path), STREAM, BATCH, str(BATCH_ROWS)]
        command = [sys.executable, "-P", "-c", APPLICATION, *places, *QUICK]

        async with running(command, tmp_path, "first") as first:
            await streamed.until(ROWS // 5, first)
            victim = (await partition_owners([cluster.etcd], DEFAULT_PREFIX, STREAM))[0]
            await cluster.kill_broker(victim)
            await streamed.until(ROWS // 2, first)
            first.kill()
        assert 0 < committed(tmp_path / "checkpoint") < FILES, first.said.read_text()

        async with running(command, tmp_path, "second") as second:
            # The broker leads again while the second job writes.
            await cluster.restart_broker(victim)
            begun = await batched.until(1, second)
            assert begun < BATCH_ROWS, "the batch was written before an owner could be killed"
            other = (await partition_owners([cluster.etcd], DEFAULT_PREFIX, BATCH))[0]
            await cluster.kill_broker(other)
            assert await second.ended() == 0, second.said.read_text()
            await cluster.restart_broker(other)
        streamed.close()
        batched.close()
        of_stream = await asyncio.to_thread(times_each, cluster.kafka, STREAM)
        of_batch = await asyncio.to_thread(times_each, cluster.kafka, BATCH)

    # Both results at once, so that a fault of one does not hide the other.
    told = {STREAM: (of_stream, ROWS), BATCH: (of_batch, BATCH_ROWS)}
    lost = {topic: rows - len(times.keys() & set(range(rows))) for topic, (times, rows) in told.items()}
    most = {topic: max(times.values()) for topic, (times, _) in told.items()}
    twice = {number // ROWS_PER_FILE for number, times in of_stream.items() if times > 1}
    assert lost == {STREAM: 0, BATCH: 0}, f"lost rows; {most} times one, micro-batches {twice} twice"
    # An owner's death costs no duplicates, the job's death at most one micro-batch of them.
    assert (len(twice) <= 1, most[STREAM] <= 2, most[BATCH]) == (True, True, 1), f"micro-batches {twice} twice; {most}"
