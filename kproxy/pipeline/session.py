"""Open the Spark session of a pipeline job, wherever it runs.

There are three ways, and a job cannot tell them apart:
1. The process has a session already (a notebook, another program): use it, and leave it open at the end.
2. `spark-submit` started the process: use its JVM, with the settings that `spark-submit` was given.
3. Else start a JVM of our own with the given master, and end it with the job.

Executors in other processes get an archive of this package and of what it needs there (`package_archive`), for
`spark.submit.pyFiles` or `--py-files`. `kproxy`, `kproxy_codec` and kafka-python are pure Python and run from a zip.
Compiled libraries are not in it: pyarrow, which Spark itself needs for data sources in Python, and crc32c, without
which the CRCs of batches are not checked.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any, Final, TypeVar

from kproxy import installed
from kproxy.errors import StartupError
from kproxy.pipeline.java import find_java
from kproxy.pipeline.spark import (
    SparkDriver,
    SparkFailed,
    as_spark_failure,
    in_one_process,
    kafka_connector,
    pyspark_home,
    quiet_pyspark,
)

# All cores: unlike the demo, a job seldom shares the machine with the brokers.
DEFAULT_MASTER: Final = "local[*]"
T = TypeVar("T")
_CONNECTOR_CLASS: Final = "org.apache.spark.sql.kafka010.KafkaSourceProvider"


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """The options of a session.

    `settings` are Spark's and override everything else. `memory` is the driver's, in Spark's form (`2g`). `kafka`: the
    job uses Spark's Kafka connector, which is downloaded once if we start Spark.
    """

    app_name: str
    master: str | None = None
    memory: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    kafka: bool = True


@dataclass(frozen=True, slots=True)
class OpenSession:
    """An open session; `driver` and its log only if we started it."""

    session: Any
    driver: SparkDriver | None = None

    @property
    def log_path(self) -> Path | None:
        return None if self.driver is None else self.driver.log_path


@contextlib.contextmanager
def open_session(
    options: SessionOptions, on_download: Callable[[int], None] = lambda jars: None
) -> Iterator[OpenSession]:
    """Open a session while the block runs.

    Raise StartupError if the user can fix it, else SparkFailed. Call `on_download` with the number of jars that the
    first start has downloaded. If the block fails with Spark and we started Spark, keep its log and name it in the
    error.
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


def is_submitted() -> bool:
    """Return whether `spark-submit` has started this process."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _submitted_session(options: SessionOptions) -> tuple[Any, bool] | None:
    """Return the session of the JVM that `spark-submit` started us from; it ends with us."""
    if not is_submitted():
        return None
    if options.master is not None or options.memory is not None:
        raise StartupError("spark-submit has started Spark: give --master and --memory to it, not to the job.")
    from pyspark.sql import SparkSession

    with as_spark_failure("Spark did not start"):
        # spark-submit would name the application after its file.
        return _beside(SparkSession.builder.appName(options.app_name).getOrCreate), True


def _beside(start: Callable[[], T], give_up: Callable[[], None] = lambda: None) -> T:
    """Call `start` on another thread and return its result.

    Call `give_up` to end it if we are interrupted. On the main thread pyspark would replace our handler of Ctrl-C, and
    an interrupted job would report that Spark failed.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        starting = pool.submit(start)
        try:
            return starting.result()
        except KeyboardInterrupt:
            give_up()
            raise


def _apply(session: Any, options: SessionOptions) -> None:
    """Apply the options to a Spark that somebody else started. Raise StartupError if something is missing."""
    for name, value in options.settings.items():
        if not session.conf.isModifiable(name):
            raise StartupError(
                f"{name} is settled when Spark starts: give it to spark-submit as --conf {name}={value}."
            )
        session.conf.set(name, value)
    # Reports do not depend on the machine's time zone.
    session.conf.set("spark.sql.session.timeZone", "UTC")
    if options.kafka and not _has_connector(session):
        raise StartupError(
            f"Spark was started without its Kafka connector: start it with --packages {kafka_connector()}."
        )
    if not in_one_process(session.sparkContext.master):
        _ship_package(session)


def _has_connector(session: Any) -> bool:
    from py4j.protocol import Py4JJavaError

    try:
        session.sparkContext._jvm.org.apache.spark.util.Utils.classForName(_CONNECTOR_CLASS, True, True)
    except Py4JJavaError:
        return False
    return True


def _ship_package(session: Any) -> None:
    """Add the archive to the session. Executors fetch it with their first task, so it lives as long as Spark does."""
    from pyspark import SparkFiles

    # Spark removes its directory of files for executors when it stops. Beside Spark's copy, not over it.
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
        # Known only after `stop`. py4j only guesses why a Java is gone.
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


PACKAGES: Final = ("asn1crypto", "kafka", "kproxy", "kproxy_codec", "scramp")
_LEFT_OUT: Final = ("__pycache__",)
# The compiled plain path and what it is built from: an extension cannot be imported from a zip.
_COMPILED: Final = (".so", ".c", ".h", ".pyx", ".pxi")
# The earliest date that a zip can have: the archive depends only on its content.
_DATE: Final = (1980, 1, 1, 0, 0, 0)


def package_archive(directory: Path) -> Path:
    """Pack the installed packages into an archive in `directory`.

    Raise StartupError if one cannot be packed. It is replaced whole: another job may be sending the previous one to its
    executors.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"kproxy-{installed.version()}.zip"
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        _pack(unfinished)
        return unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _pack(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in PACKAGES:
            root = _location(name)
            for file in _files(root):
                entry = zipfile.ZipInfo(f"{name}/{file.relative_to(root).as_posix()}", _DATE)
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, file.read_bytes())


def _location(name: str) -> Path:
    spec = util.find_spec(name)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        if Path(location).is_dir():
            return Path(location)
    raise StartupError(f"The package {name} is not installed as files, so it cannot be sent to Spark's executors.")


def _files(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.suffix not in _COMPILED and not any(part in _LEFT_OUT for part in path.parts):
            yield path
