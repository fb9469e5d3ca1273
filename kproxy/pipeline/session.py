"""The Spark session of a pipeline job, wherever it runs.

Three ways lead to one, and a job cannot tell them apart:
1. The process has a session already (a notebook, another program): it is taken, and stays when the job is done.
2. `spark-submit` started the process: its JVM is taken, with the settings that `spark-submit` was given.
3. Else a JVM of our own is started, with the master that is asked for, and is gone when the job is done.

Executors in other processes get this package's pure-Python part along with the job (`package_archive`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from kproxy.errors import StartupError
from kproxy.pipeline.audit.executors import package_archive
from kproxy.pipeline.java import find_java
from kproxy.pipeline.spark import SparkDriver, SparkFailed, as_spark_failure, pyspark_home, quiet_pyspark
from kproxy.pipeline.spark_settings import in_one_process, kafka_connector

# All cores: unlike the demo's, the jobs have the machine's brokers beside them only by chance.
DEFAULT_MASTER: Final = "local[*]"
T = TypeVar("T")
_CONNECTOR_CLASS: Final = "org.apache.spark.sql.kafka010.KafkaSourceProvider"


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """`settings` are Spark's own and go over everything else. `memory` is the driver's, as Spark writes it (`2g`).

    `kafka`: the job reads or writes topics by Spark's Kafka connector, which is downloaded once where we start Spark.
    """

    app_name: str
    master: str | None = None
    memory: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    kafka: bool = True


@dataclass(frozen=True, slots=True)
class OpenSession:
    """`driver` and its log only where the session is ours."""

    session: Any
    driver: SparkDriver | None = None

    @property
    def log_path(self) -> Path | None:
        return None if self.driver is None else self.driver.log_path


@contextlib.contextmanager
def open_session(
    options: SessionOptions, on_download: Callable[[int], None] = lambda jars: None
) -> Iterator[OpenSession]:
    """A session for as long as the block lasts. Raises StartupError where the user can do something, or SparkFailed.

    `on_download` hears how many jars the first start has downloaded. Where the block fails with Spark, the log of a
    Spark of ours is kept, and the error says where.
    """
    taken = _active_session() or _submitted_session(options)
    if taken is None:
        with _own_session(options, on_download) as opened:
            yield opened
        return
    session, ends_with_us = taken
    quiet_pyspark()
    try:
        _apply(session, options)
        yield OpenSession(session)
    finally:
        if ends_with_us:
            with as_spark_failure("Spark did not stop"):
                session.stop()


def _active_session() -> tuple[Any, bool] | None:
    if "pyspark" not in sys.modules:
        return None
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is None:
        return None
    return SparkSession.builder.getOrCreate(), False


def _submitted_session(options: SessionOptions) -> tuple[Any, bool] | None:
    """The session of the JVM that `spark-submit` runs us beneath, and that it ends with us."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return None
    if options.master is not None or options.memory is not None:
        raise StartupError("spark-submit has started Spark: give --master and --memory to it, not to the job.")
    from pyspark.sql import SparkSession

    with as_spark_failure("Spark did not start"):
        # Named here, and not by spark-submit, it would be named after its file.
        return _beside(SparkSession.builder.appName(options.app_name).getOrCreate), True


def _beside(start: Callable[[], T], give_up: Callable[[], None] = lambda: None) -> T:
    """What `start` returns, called on another thread: on the main one pyspark would put its handler of Ctrl-C over
    ours, and a job that is interrupted would say that Spark had failed. `give_up` ends it where nobody waits any more.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        starting = pool.submit(start)
        try:
            return starting.result()
        except KeyboardInterrupt:
            give_up()
            raise


def _apply(session: Any, options: SessionOptions) -> None:
    """What can still be told to a Spark that others have started. Raises StartupError where something is missing."""
    for name, value in options.settings.items():
        if not session.conf.isModifiable(name):
            raise StartupError(
                f"{name} is settled when Spark starts: give it to spark-submit as --conf {name}={value}."
            )
        session.conf.set(name, value)
    # What is reported is the same wherever it runs.
    session.conf.set("spark.sql.session.timeZone", "UTC")
    if options.kafka and not _has_class(session, _CONNECTOR_CLASS):
        raise StartupError(
            f"Spark was started without its Kafka connector: start it with --packages {kafka_connector()}."
        )
    if not in_one_process(session.sparkContext.master):
        _ship_package(session)


def _has_class(session: Any, name: str) -> bool:
    from py4j.protocol import Py4JJavaError

    try:
        session.sparkContext._jvm.org.apache.spark.util.Utils.classForName(name, True, True)
    except Py4JJavaError:
        return False
    return True


def _ship_package(session: Any) -> None:
    """Executors fetch it when they first have something to do, whenever that is: it lives as long as Spark does."""
    from pyspark import SparkFiles

    # Spark's own directory for what executors are given, which it removes when it stops; beside its copy, not over it.
    directory = Path(SparkFiles.getRootDirectory()) / "kproxy"
    with as_spark_failure("Spark took no archive"):
        session.sparkContext.addPyFile(str(package_archive(directory)))


@contextlib.contextmanager
def _own_session(options: SessionOptions, on_download: Callable[[int], None]) -> Iterator[OpenSession]:
    master = options.master or DEFAULT_MASTER
    pyspark_home()
    java = find_java()
    work_dir = Path(tempfile.mkdtemp(prefix="kproxy-spark-"))
    settings = {} if options.memory is None else {"spark.driver.memory": options.memory}
    if not options.kafka:
        settings["spark.jars.packages"] = ""
    driver = SparkDriver(
        java,
        work_dir,
        app_name=options.app_name,
        master=master,
        short=False,
        settings={**settings, **options.settings},
    )
    keep = False
    try:
        _beside(lambda: driver.start(on_download), driver.kill)
        if not in_one_process(master):
            _ship_package(driver.session)
        yield OpenSession(driver.session, driver)
    except SparkFailed as error:
        keep = True
        # Known only once it has been stopped: what is said of a Java that is gone is py4j's guess.
        driver.stop()
        died = driver.ended_by_itself
        what = str(error) if died is None else f"Spark's Java ended by itself ({died})"
        raise SparkFailed(f"{what.rstrip('.')}; Spark's log is {driver.log_path}") from error
    finally:
        driver.stop()
        _clear(work_dir, keep_log=keep)


def _clear(work_dir: Path, *, keep_log: bool) -> None:
    if not keep_log:
        shutil.rmtree(work_dir, ignore_errors=True)
        return
    for child in work_dir.iterdir():
        if child.is_dir():
            shutil.rmtree(child, ignore_errors=True)
