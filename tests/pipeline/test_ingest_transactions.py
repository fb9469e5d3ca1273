"""The ingest in transactions, through the proxy to real Kafka: a micro-batch that is written again is there once.

Readers of committed records see each row once, in the order of its key, whenever the job was killed. The same job
without transactions has duplicates, so the tests would notice.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource  # type: ignore[attr-defined]
from pyspark.errors import PySparkException
from pyspark.java_gateway import ensure_callback_server_started

from kproxy.errors import StartupError
from kproxy.pipeline.ingest.job import start, why
from kproxy.pipeline.ingest.options import IngestOptions
from kproxy.pipeline.ingest.sink import BatchDone
from kproxy.pipeline.ingest.transactions import OFFSETS_KEPT_MS, Unfinished, tasks_of
from tests.pipeline.audit_sites import AuditedProxies, audit
from tests.pipeline.killing import KEYS, SLOWLY, Watched, assert_in_order, committed, number_of, running, write_files
from tests.support.brokers.real_kafka import RealKafka, start_real_kafka
from tests.support.clients.kafka_io import Placed, read_topic
from tests.support.clients.spark import QUICK
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import kafka_proxy
from tests.support.rules import examples

pytestmark = [pytest.mark.spark, pytest.mark.java, pytest.mark.timeout(900)]

PARTITIONS, TASKS = 3, 2
KILLS = int(os.environ.get("KPROXY_TEST_KILLS", "6"))
APPLICATION = """
import json, os, signal, sys

from kproxy.pipeline.ingest.job import start
from kproxy.pipeline.ingest.options import IngestOptions
from kproxy.pipeline.session import SessionOptions, open_session

given, last, *settings = sys.argv[1:]

def done(batch):
    if batch.batch == int(last):
        opened.kill()
        os.kill(os.getpid(), signal.SIGKILL)

options = SessionOptions("once", master="local[2]", settings=dict(each.split("=", 1) for each in settings))
with open_session(options) as opened:
    start(opened.session, IngestOptions(**json.loads(given)), on_batch=done).awaitTermination()
"""


class SlowListener:
    """Delays the reports of a session, as a busy driver does."""

    def onSuccess(self, name: str, execution: Any, nanoseconds: int) -> None:  # noqa: N802 - Spark's name
        time.sleep(0.7)

    def onFailure(self, name: str, execution: Any, error: Any) -> None:  # noqa: N802 - Spark's name
        pass

    class Java:
        implements: ClassVar = ["org.apache.spark.sql.util.QueryExecutionListener"]


@contextmanager
def slow_listener(spark: Any) -> Iterator[None]:
    ensure_callback_server_started(spark.sparkContext._gateway)
    listener, listeners = SlowListener(), spark._jsparkSession.listenerManager()
    listeners.register(listener)
    try:
        yield
    finally:
        listeners.unregister(listener)


class Died(Exception):
    """The job ends after a micro-batch's last transaction, and before Spark commits the micro-batch."""


@pytest.fixture(scope="module")
def real_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealKafka]:
    """A cluster that ends with this module, of three brokers only in `make test-all`: idle ones take CPU from Spark.

    tests/integration/kafka/test_transactions.py has transactions of several brokers.
    """
    with start_real_kafka(tmp_path_factory.mktemp("kafka"), examples(3)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def proxy(real_kafka: RealKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KproxyProcess]:
    with kafka_proxy(tmp_path_factory.mktemp("proxy"), real_kafka.bootstrap) as process:
        yield process


@pytest.fixture
def options(real_kafka: RealKafka, proxy: KproxyProcess, tmp_path: Path) -> IngestOptions:
    """A job with files of its own, to topics of its own."""
    topic = real_kafka.create_topic(f"once-{uuid.uuid4().hex[:10]}", PARTITIONS)
    return IngestOptions(
        f"csv:{tmp_path / 'in'}",
        str(tmp_path / "checkpoint"),
        topic=topic,
        bootstrap=proxy.kafka,
        schema="n INT, k STRING",
        key=("k",),
        max_files_per_trigger=1,
        tasks=TASKS,
        dead_letters=f"topic:{real_kafka.create_topic(f'dead-{topic}', PARTITIONS)}",
        exactly_once=True,
    )


def write_rows(options: IngestOptions, files: int, rows: int) -> int:
    """Write files with so many rows, and a corrupt one, each; return the number of rows."""
    write_files(Path(options.where), files, rows, corrupt="not a number")
    return files * rows


def ingest(spark: Any, options: IngestOptions, on_batch: Callable[[BatchDone], None] = lambda done: None) -> None:
    query = start(spark, options, on_batch=on_batch)
    try:
        assert query.awaitTermination(240)
    finally:
        query.stop()


def die_at(batch: int) -> Callable[[BatchDone], None]:
    def done(done: BatchDone) -> None:
        if done.batch == batch:
            raise Died

    return done


def read(kafka: RealKafka, topic: str | None, at_least: int = 0) -> list[Placed]:
    """The committed records."""
    assert topic is not None
    kafka.wait_until_stable(topic, PARTITIONS)
    return read_topic(kafka.bootstrap, topic, PARTITIONS, at_least)


def times_of(records: Sequence[Placed]) -> Counter[int]:
    """How often each row is there."""
    return Counter(map(number_of, records))


def judge(kafka: RealKafka, options: IngestOptions, rows: int, files: int) -> None:
    """Each row is there once, and those of a key in order; so is each dead letter."""
    records = read(kafka, options.topic)
    assert times_of(records) == dict.fromkeys(range(rows), 1)
    assert_in_order(records)
    letters = [json.loads(record.value or b"")["record"] for record in read(kafka, options.letters_topic)]
    assert sorted(letters) == sorted(f"not a number,{file}" for file in range(files))


@pytest.mark.parametrize(
    ("key", "deaths"),
    [
        pytest.param(("k",), (1,), id="key"),
        pytest.param((), (0, 1), id="no key", marks=pytest.mark.long),
    ],
)
def test_micro_batch_written_again_is_there_once(
    spark: Any, real_kafka: RealKafka, options: IngestOptions, key: tuple[str, ...], deaths: Sequence[int]
) -> None:
    options = replace(options, key=key)
    files = 1 + len(deaths)
    rows = write_rows(options, files, 40)
    with slow_listener(spark):
        for batch in deaths:
            with pytest.raises(PySparkException, match="Died"):
                ingest(spark, options, die_at(batch))
        # The machine has other cores now.
        ingest(spark, replace(options, tasks=None))
    assert times_of(read(real_kafka, options.topic, rows)) == dict.fromkeys(range(rows), 1)
    assert len(read(real_kafka, options.letters_topic, files)) == files


@pytest.mark.long
def test_micro_batch_without_transactions_is_there_twice(
    spark: Any, real_kafka: RealKafka, options: IngestOptions
) -> None:
    options = replace(options, exactly_once=False)
    rows = write_rows(options, 2, 40)
    with pytest.raises(PySparkException, match="Died"):
        ingest(spark, options, die_at(1))
    with pytest.raises(StartupError, match="micro-batch 1 is unfinished and was begun without --exactly-once"):
        ingest(spark, replace(options, exactly_once=True))
    ingest(spark, options)
    assert times_of(read(real_kafka, options.topic)) == {n: 1 + n // 40 for n in range(rows)}
    # Nothing is unfinished: from here on rows are written once.
    ingest(spark, replace(options, exactly_once=True))


@pytest.mark.long
def test_task_that_committed_alone_is_left_out(spark: Any, real_kafka: RealKafka, options: IngestOptions) -> None:
    """The last of four tasks on two cores has a row that its topic does not take; an earlier one has committed."""
    hashed = spark.range(KEYS).selectExpr("id", f"pmod(hash(cast('key-' || id as binary)), {2 * TASKS}) AS task")
    refused = hashed.where(f"task = {2 * TASKS - 1}").first()["id"]
    narrow, wide = f"narrow-{options.topic}", str(options.topic)
    # Enough for the marker of an aborted transaction.
    real_kafka.create_topic(narrow, PARTITIONS, max_message_bytes="100")
    topics = f"if(n = {refused}, '{narrow}', '{wide}') AS t"
    options = replace(options, topic=None, topic_column="t", select=("*", topics), tasks=2 * TASKS)
    rows = write_rows(options, 1, 40)
    with pytest.raises(PySparkException) as failed:
        ingest(spark, options)
    assert "refuses a message because of its size" in why(failed.value, options)
    alone = times_of(read(real_kafka, wide))
    assert 0 < len(alone) < rows
    assert set(alone.values()) == {1}
    # Other keys divide rows otherwise, the last three all to one task: nothing is written then.
    for key in ("n", "'a'", "'b'", "'c'"):
        with pytest.raises(PySparkException) as failed:
            ingest(spark, replace(options, key=("other",), select=(*options.select, f"{key} AS other")))
        assert "its rows or keys have changed since" in why(failed.value, options)
        assert times_of(read(real_kafka, wide)) == alone
    with pytest.raises(StartupError, match="is divided among 4 tasks: leave --tasks 3 out"):
        ingest(spark, replace(options, tasks=3))
    larger = ConfigEntry("max.message.bytes", "100000", incremental_operation=AlterConfigOpType.SET)
    of_topic = ConfigResource(ConfigResource.Type.TOPIC, narrow, incremental_configs=[larger])
    real_kafka.admin().incremental_alter_configs([of_topic])[of_topic].result(60)
    ingest(spark, options)
    assert times_of([*read(real_kafka, wide), *read(real_kafka, narrow, 1)]) == dict.fromkeys(range(rows), 1)


@pytest.mark.long
def test_older_checkpoint_ends_the_job(spark: Any, real_kafka: RealKafka, options: IngestOptions) -> None:
    rows = write_rows(options, 3, 40)
    ingest(spark, options)
    for path in Path(options.checkpoint).iterdir():
        if "kproxy-ingest.json" not in path.name:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(PySparkException) as failed:
        ingest(spark, options)
    assert "has micro-batch 2, which is later" in why(failed.value, options)
    assert times_of(read(real_kafka, options.topic)) == dict.fromkeys(range(rows), 1)


def test_reference_brokers_are_refused_at_once(
    spark: Any, dev_cluster: KproxyProcess, options: IngestOptions, tmp_path: Path
) -> None:
    write_rows(options, 1, 1)
    with pytest.raises(StartupError, match=r"--exactly-once needs transactions, which .* keep no transactions"):
        start(spark, replace(options, bootstrap=dev_cluster.kafka, partitions=1))
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize(
    ("given", "before", "unfinished", "expected"),
    [
        (None, None, None, 8),
        (None, 4, None, 4),
        (2, 4, None, 2),
        (None, 4, Unfinished(7, 0), 4),
        (4, 4, Unfinished(7, 0), 4),
        (2, 4, Unfinished(7, 0), "is divided among 4 tasks"),
        (4, None, Unfinished(7, 0), "was begun without --exactly-once"),
        (4, 4, Unfinished(7, -OFFSETS_KEPT_MS), "was begun 7 days ago"),
    ],
)
def test_unfinished_micro_batch_keeps_its_tasks(
    given: int | None, before: int | None, unfinished: Unfinished | None, expected: int | str
) -> None:
    if isinstance(expected, int):
        assert tasks_of(given, before, unfinished, default=8, now_ms=1) == expected
        return
    with pytest.raises(StartupError, match=f"micro-batch 7 is unfinished and {expected}"):
        tasks_of(given, before, unfinished, default=8, now_ms=1)


def command(options: IngestOptions, last: int = -1) -> list[str]:
    """A job that kills itself after the micro-batch `last`, and before Spark commits it."""
    given = {name: getattr(options, name) for name in options.__slots__}
    return [sys.executable, "-P", "-c", APPLICATION, json.dumps(given), str(last), *QUICK]


@pytest.mark.long
@pytest.mark.parametrize("exactly_once", [True, False])
async def test_killed_between_both_commits(
    real_kafka: RealKafka, options: IngestOptions, tmp_path: Path, exactly_once: bool
) -> None:
    options = replace(options, exactly_once=exactly_once)
    rows = write_rows(options, 3, 60)
    for last in (0, 1):
        async with running(command(options, last), tmp_path, f"killed-{last}") as job:
            assert await job.ended() < 0, job.said.read_text()
        assert committed(tmp_path / "checkpoint") == last, job.said.read_text()
    async with running(command(options), tmp_path, "last") as job:
        assert await job.ended() == 0, job.said.read_text()
    if exactly_once:
        judge(real_kafka, options, rows, 3)
    else:
        assert times_of(read(real_kafka, options.topic)) == {n: 2 if n < 120 else 1 for n in range(rows)}


@pytest.mark.long
@pytest.mark.timeout(150 * KILLS)
@pytest.mark.parametrize("exactly_once", [True, False])
async def test_killed_at_any_moment_and_audited(
    real_kafka: RealKafka, options: IngestOptions, tmp_path: Path, exactly_once: bool
) -> None:
    moments, files = random.Random(7), KILLS + 2
    rows = write_rows(options, files, 400)
    with ExitStack() as stack:
        proxies = AuditedProxies(tmp_path, ("--ownership", "kafka", "--bootstrap", real_kafka.bootstrap), stack)
        proxy = proxies.start(interval_s=0.5)
        options = replace(options, bootstrap=proxy.kafka, kafka_options=SLOWLY, exactly_once=exactly_once)
        watched = Watched(real_kafka.bootstrap, str(options.topic), PARTITIONS)
        halfway = 0
        for kill in range(KILLS):
            before = watched.count()
            async with running(command(options), tmp_path, f"killed-{kill}") as job:
                # Records of transactions that will be aborted count, too.
                await watched.until(before + 1, job)
                await asyncio.sleep(moments.uniform(0, 1.5))
                job.kill()
            halfway += len(read_topic(real_kafka.bootstrap, str(options.topic), PARTITIONS, 0)) < watched.count()
        assert halfway > 0 or not exactly_once, "each was killed between two micro-batches"
        async with running(command(options), tmp_path, "last") as job:
            assert await job.ended() == 0, job.said.read_text()
        watched.close()
        if exactly_once:
            judge(real_kafka, options, rows, files)
        else:
            times = times_of(read(real_kafka, options.topic))
            assert (sorted(times), max(times.values()) > 1) == ([*range(rows)], True)
        assert proxy.stop() == 0
    audited = audit(real_kafka.bootstrap, proxies.trail, [str(options.topic), str(options.letters_topic)])
    assert (audited.findings, audited.exit_status) == ([], 0)
