"""The ingest killed with -9 while it streams, and a broker too: started again it loses nothing.

Duplicates then belong to the one uncommitted micro-batch, as their headers show.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kproxy.config import DEFAULT_PREFIX
from kproxy.demo.run import partition_owners
from kproxy.dev.cluster import DevCluster
from tests.pipeline.killing import KEYS, SLOWLY, Watched, assert_in_order, committed, number_of, running, write_files
from tests.support.clients.java import require_java
from tests.support.clients.kafka_io import Placed, create_topic, read_topic
from tests.support.clients.spark import QUICK
from tests.support.processes.dev import KPROXY, asyncios_own_loop

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

TOPIC = "killed"
PARTITIONS = 6
FILES, FILES_PER_BATCH, ROWS_PER_FILE = 9, 3, 200
ROWS = FILES * ROWS_PER_FILE
ROWS_PER_BATCH = FILES_PER_BATCH * ROWS_PER_FILE
LEASE_TTL_S = 2


@pytest.fixture(autouse=True)
def loop() -> Iterator[None]:
    with asyncios_own_loop():
        yield


def command(directory: Path, bootstrap: str) -> list[str | Path]:
    arguments = ["pipeline", "ingest", "--from", f"csv:{directory / 'in'}", "--schema", "n INT, k STRING"]
    arguments += ["--max-files-per-trigger", str(FILES_PER_BATCH), "--key", "k", "--topic", TOPIC]
    arguments += ["--bootstrap", bootstrap, "--checkpoint", str(directory / "checkpoint")]
    arguments += ["--header", "batch=_kproxy_batch", "--header", "row=_kproxy_row", "--master", "local[2]"]
    arguments += [each for option in SLOWLY.items() for each in ("--kafka-option", "=".join(option))]
    arguments += [each for setting in QUICK for each in ("--conf", setting)]
    return [*KPROXY, *arguments]


def headers(record: Placed) -> tuple[str, str]:
    """A record's row and micro-batch."""
    found = {name: value or b"" for name, value in record.headers}
    return found["row"].decode(), found["batch"].decode()


@pytest.mark.long
async def test_killed_ingest_repeats_at_most_one_micro_batch(tmp_path: Path) -> None:
    require_java()
    write_files(tmp_path / "in", FILES, ROWS_PER_FILE)
    async with DevCluster(tmp_path / "cluster", brokers=3, lease_ttl_s=LEASE_TTL_S) as cluster:
        await asyncio.to_thread(create_topic, cluster.kafka, TOPIC, PARTITIONS)
        watched = Watched(cluster.kafka, TOPIC, PARTITIONS)
        async with running(command(tmp_path, cluster.kafka), tmp_path, "first") as first:
            await watched.until(ROWS_PER_BATCH // 4, first)
            owners = await partition_owners([cluster.etcd], DEFAULT_PREFIX, TOPIC)
            victim = owners[0]
            await cluster.kill_broker(victim)
            # The second micro-batch is running: other brokers have taken over.
            await watched.until(ROWS_PER_BATCH + ROWS_PER_BATCH // 4, first)
            first.kill()
        batches = committed(tmp_path / "checkpoint")
        before = len(await asyncio.to_thread(read_topic, cluster.kafka, TOPIC, PARTITIONS, 1))
        assert 0 < batches < FILES // FILES_PER_BATCH, first.said.read_text()
        assert before > batches * ROWS_PER_BATCH, "it was killed between two micro-batches: nothing would come twice"

        async with running(command(tmp_path, cluster.kafka), tmp_path, "second") as second:
            await watched.until(before + 1, second)
            await cluster.restart_broker(victim)
            assert await second.ended() == 0, second.said.read_text()
        watched.close()
        records = await asyncio.to_thread(read_topic, cluster.kafka, TOPIC, PARTITIONS, ROWS)

    times = Counter(map(number_of, records))
    assert sorted(times) == list(range(ROWS)), "a row is lost"
    twice = {n for n, count in times.items() if count > 1}
    assert max(times.values()) == 2
    assert 0 < len(twice) <= ROWS_PER_BATCH
    assert len(records) == before + ROWS - batches * ROWS_PER_BATCH
    # All repeated rows belong to the interrupted micro-batch, by its number and by their own.
    assert {n // ROWS_PER_BATCH for n in twice} == {batches}
    rows = [headers(record) for record in records]
    repeated = {batch for (_, batch), count in Counter(rows).items() if count > 1}
    assert {batch.rpartition("/")[2] for batch in repeated} == {str(batches)}
    # The first copies of all rows are complete, and those of a key are in order.
    assert len(set(rows)) == len({row for row, _ in rows}) == ROWS
    first_copies: dict[str, Placed] = {}
    for record, (row, _) in zip(records, rows, strict=True):
        first_copies.setdefault(row, record)
    assert len({record.key for record in records}) == KEYS
    assert_in_order(first_copies.values())
