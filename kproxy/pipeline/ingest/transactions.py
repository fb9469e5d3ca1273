"""Write each row exactly once: the rows of a task in one Kafka transaction, together with their micro-batch's number.

A micro-batch that is written again, after a kill or because a cluster lost a task, must leave out what it has written.
A task has a name, made of the job's id and the task's number. The name is a transactional.id and a consumer group. A
task (`WriteInTransactions.java`) calls initTransactions, which ends the transaction of an earlier attempt and fences
that attempt. Then it reads the group's committed offset. If this is the micro-batch's number, the rows are in the
topic, and the task compares its rows with the sum in the offset's metadata. Else it writes them and commits both.

Invariants
1. A row's task depends on the row and the number of tasks alone: on its key, else on its name (`transforms.messages`).
   The number of tasks stays the same (`Job.tasks`) while a micro-batch is unfinished.
2. Before the first micro-batch of a run is written, each task that has committed it before has compared its rows. If
   one of them differs, or has committed a later micro-batch, nothing is written.
3. The job does not go on with a micro-batch that it began without transactions, or so long ago that the brokers may
   have removed committed offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any, Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses

from kproxy.errors import StartupError
from kproxy.pipeline.ingest.transforms import HEADER_TYPE, NAME
from kproxy.pipeline.spark import SparkFailed, as_spark_failure

# The classes for executors. A test builds the jar from its sources and compares.
JAR: Final = "kproxy_ingest.jar"
WRITER_CLASS: Final = "kproxy.WriteInTransactions"
# A task may take long. This is the most that brokers allow by default.
TRANSACTION_TIMEOUT_MS: Final = 15 * 60_000
# An hour less than brokers keep a group's offsets by default (`offsets.retention.minutes`).
OFFSETS_KEPT_MS: Final = 7 * 86_400_000 - 3_600_000
_COLUMNS: Final = {"topic": "string", "partition": "int", "key": "binary", "value": "binary", "headers": HEADER_TYPE}
_INTERCEPTORS: Final = "interceptor.classes"


class Unfinished(NamedTuple):
    """The micro-batch that was begun, at `begun_ms` since the epoch, and not committed."""

    batch: int
    begun_ms: int


def tasks_of(
    given: int | None, before: int | None, unfinished: Unfinished | None, *, default: int, now_ms: float
) -> int:
    """Return the number of tasks: the `given` one, else that of the last start (`before`), else `default`. Pure.

    `before` is None if the last start was without transactions. Raise StartupError if `unfinished` cannot be continued.
    """
    if unfinished is None:
        return given or before or default
    batch = f"micro-batch {unfinished.batch} is unfinished and"
    once = "start the job once without --exactly-once, which writes this micro-batch again"
    if before is None:
        raise StartupError(f"{batch} was begun without --exactly-once: start the job without it until all is written.")
    if now_ms - unfinished.begun_ms > OFFSETS_KEPT_MS:
        raise StartupError(f"{batch} was begun 7 days ago, so brokers may no longer know what it has written: {once}.")
    if given not in (None, before):
        raise StartupError(f"{batch} is divided among {before} tasks: leave --tasks {given} out until it is written.")
    return before


class Transactions:
    """The transactions of a run of a job; `producer` are Kafka's options."""

    def __init__(self, session: SparkSession, producer: Mapping[str, str], job_id: str) -> None:
        self._settings = {"transaction.timeout.ms": str(TRANSACTION_TIMEOUT_MS), **producer}
        self._name = f"kproxy-ingest-{job_id}"
        self._compared = set[str]()
        context: Any = session.sparkContext
        jvm, gateway = context._jvm, context._gateway
        with as_spark_failure("The class that writes in transactions was not taken"):
            urls = gateway.new_array(jvm.java.net.URL, 1)
            urls[0] = jvm.java.io.File(str(resources.files(__package__) / JAR)).toURI().toURL()
            parent = jvm.java.lang.Thread.currentThread().getContextClassLoader()
            self._writer = jvm.java.net.URLClassLoader(urls, parent).loadClass(WRITER_CLASS).newInstance()

    def check(self, bootstrap: str) -> None:
        """Raise StartupError if the brokers at `bootstrap` have no transactions for this job."""
        # Interceptors are on the executors.
        settings = {name: value for name, value in self._settings.items() if name != _INTERCEPTORS}
        try:
            with as_spark_failure("no"):
                self._writer.of(settings, self._name, 0, False).check()
        except SparkFailed as error:
            cause = str(error).removeprefix("no: ").rstrip(".")
            raise StartupError(
                f"--exactly-once needs transactions, which --bootstrap {bootstrap} does not offer ({cause}): write to "
                "Apache Kafka, directly or through the proxy, or leave it out and get each row at least once."
            ) from error

    def write(self, messages: DataFrame, batch: int, suffix: str) -> None:
        """Write `messages` of the micro-batch `batch`; `suffix` tells several writes of a micro-batch apart."""
        columns = [
            (F.col(name) if name in messages.columns else F.lit(None)).cast(kind) for name, kind in _COLUMNS.items()
        ]
        for writes in (True,) if suffix in self._compared else (False, True):
            # A plan for each pass: the second pass on the same plan would reset what the first has observed, before
            # Spark reports it if its listeners are late. Dead letters would be lost.
            rows: Any = messages.select(*columns, F.xxhash64("topic", "key", NAME))._jdf
            rows.foreachPartition(self._writer.of(self._settings, self._name + suffix, batch, writes))
        self._compared.add(suffix)
