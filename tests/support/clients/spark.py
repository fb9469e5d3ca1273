"""Run Spark for tests: one session for all of them, and its Kafka sink, one batch after another."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import pytest

from kproxy.pipeline.java import user_cache_dir
from kproxy.pipeline.session import SessionOptions, open_session
from kproxy.pipeline.spark import kafka_connector
from tests.support.clients.java import require_java

# Spark loads 16,000 classes from pyspark's jars: to verify their code costs 2 s of CPU a start.
UNVERIFIED: Final = "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
# By default Spark's idle producers and consumers stay for minutes and look for their brokers, which are gone when a
# test is over, at addresses that another test may use by then.
SETTINGS: Final = {
    "spark.kafka.producer.cache.timeout": "2s",
    "spark.kafka.producer.cache.evictorThreadRunInterval": "1s",
    "spark.kafka.consumer.cache.timeout": "2s",
    "spark.kafka.consumer.cache.evictorThreadRunInterval": "1s",
    "spark.driver.extraJavaOptions": UNVERIFIED,
    "spark.sql.shuffle.partitions": "4",
    # Each query of a test runs once: compiling it costs more than interpreting it.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
# For a Spark of its own with little work: it spends its time on planning and compiling.
QUICK: Final = (
    f"spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC {UNVERIFIED}",
    "spark.sql.shuffle.partitions=2",
    "spark.sql.adaptive.enabled=false",
    "spark.sql.codegen.wholeStage=false",
    "spark.sql.codegen.factoryMode=NO_CODEGEN",
)


_ANY_SESSION: Final = """
from kproxy.pipeline.session import SessionOptions, open_session

with open_session(SessionOptions("jars", master="local[1]")):
    pass
"""


@contextmanager
def _nobody_else_downloads() -> Iterator[bool]:
    """Whether the jars of Spark's Kafka connector exist: Ivy must not fetch them twice at the same time."""
    cache, version = user_cache_dir(), kafka_connector().rpartition(":")[2]
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "ivy.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield any((cache / "ivy" / "jars").glob(f"*spark-sql-kafka*-{version}.jar"))


@pytest.fixture(scope="session")
def spark_jars() -> None:
    """Downloads the jars, for commands that start their own Spark: the first Spark of all does so."""
    require_java()
    with _nobody_else_downloads() as are_there:
        if not are_there:
            subprocess.run([sys.executable, "-c", _ANY_SESSION], check=True, stdin=subprocess.DEVNULL)


@pytest.fixture(autouse=True)
def _jars_before_commands(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("spark") and "spark" not in request.fixturenames:
        request.getfixturevalue("spark_jars")


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """The SparkSession that all tests share: a process can have one, and it takes half a dozen seconds to start.

    A test stops the queries that it started and restores changed settings.
    """
    require_java()
    options = SessionOptions("tests", master="local[2]", short=True, settings=SETTINGS)
    with ExitStack() as stack:
        with _nobody_else_downloads():
            opened = stack.enter_context(open_session(options))
        yield opened.session


def write_batches(
    session: Any, topic: str, partitions: int, settings: Mapping[str, str], *, rows: int, goes_on: Callable[[], bool]
) -> int:
    """Write the numbers from 0 on, as text, in batches of `rows` for each partition, while `goes_on` holds.

    The numbers rise in each partition. Returns how many were written, all of them acknowledged.
    """
    written = 0
    while goes_on():
        # One Spark partition, and so one producer, for each of the topic's: rows of one task are sent in order.
        numbers = session.range(written, written + rows * partitions, 1, partitions)
        partition = f"cast((id - {written}) div {rows} as int) as partition"
        messages = numbers.selectExpr(partition, "cast(id as string) as value")
        messages.write.format("kafka").options(**settings, topic=topic).save()
        written += rows * partitions
    return written
