"""Find Spark's version, interpret a master, and turn Spark's errors into one sentence.

This module does not start Spark; `kproxy.pipeline.session` does.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import threading
import warnings
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any, Final

from kproxy.errors import StartupError
from kproxy.installed import install_command


class SparkFailed(Exception):
    """Spark failed. The message is one line; Spark's log has the rest."""


def pyspark_home(extra: str = "spark") -> Path:
    """Locate pyspark without importing it. Raise StartupError that names kproxy's `extra` if it is not installed."""
    spec = util.find_spec("pyspark")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        return Path(location)
    raise StartupError(f"PySpark is not installed: run `{install_command(extra)}`.")


def kafka_connector() -> str:
    """Return the Maven coordinates of the Kafka connector for the installed pyspark, which may be spark-submit's."""
    import pyspark

    return f"org.apache.spark:spark-sql-kafka-0-10_2.13:{pyspark.__version__}"


def on_this_machine(master: str) -> bool:
    return master.startswith("local")


def in_one_process(master: str) -> bool:
    """Return whether the driver's JVM is also the executor, so that tasks find the driver's files and packages."""
    return master == "local" or master.startswith("local[")


def cloned(session: Any) -> Any:
    """Return a new session of the same Spark, with its own settings."""
    from pyspark.sql import SparkSession

    return SparkSession(session.sparkContext, session._jsparkSession.cloneSession())


@contextlib.contextmanager
def our_interrupts() -> Iterator[None]:
    """Keep this process's handler of Ctrl-C: pyspark sets its own on the main thread, which makes a job fail."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)


def quiet_pyspark() -> None:
    """Stop pyspark and py4j from logging the errors that they also raise, hundreds of lines each."""
    from pyspark.logger import PySparkLogger

    PySparkLogger.getLogger("DataFrameQueryContextLogger").setLevel(logging.CRITICAL)
    # pyspark warns that it cannot stop a killed JVM.
    warnings.filterwarnings("ignore", "Unable to cleanly shutdown Spark JVM", RuntimeWarning)
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_not_from_py4j)


def _not_from_py4j(record: logging.LogRecord) -> bool:
    return "py4j" not in Path(record.pathname).parts


@contextlib.contextmanager
def as_spark_failure(what: str) -> Iterator[None]:
    """Raise py4j's and Spark's errors as SparkFailed, with the one line of theirs that names the cause."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JError, PySparkException, OSError, EOFError) as error:
        raise SparkFailed(f"{what}: {cause_in(str(error)) or type(error).__name__}") from error


# Messages of spark-submit, Java and a cluster's master.
_REASON: Final = re.compile(
    r'^Exception in thread "main" (?:[\w.$]+: )?(.+)'
    r"|^(.+)\nError: Could not create the Java"
    r"|^Error occurred during initialization of .+\n(.+)"
    r"|Application has been killed. Reason: (.+)",
    re.MULTILINE,
)


def reason_in(log: str) -> str:
    """Return why Spark did not start, by its `log`; "" if the log has no reason that Spark's error lacks."""
    return "".join(found.groups("")) if (found := _REASON.search(log)) else ""


def cause_in(text: str) -> str:
    """Return the innermost cause in a Java stack trace, else a worker's Python error, else the first line.

    "" for an empty text. If the Python of Spark's workers does not fit the job, add how to change it.
    """
    for pattern, sentence in _WORKERS_PYTHON:
        if found := re.search(pattern, text):
            return f"{sentence.format(found[1])}: {_NAME_A_PYTHON}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    if not causes and "Traceback (most" in text and (raised := _RAISED.findall(text)):
        return str(raised[-1]).strip()
    if not causes and len(lines) > 1 and lines[0].startswith(_PY4J):
        # The first line only names the Java method that was called.
        return lines[1].removeprefix(": ")
    return (causes or lines or [""])[-1 if causes else 0]


_RAISED: Final = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Failed): (.+)$", re.MULTILINE)
_PY4J: Final = "An error occurred while calling "
_NAME_A_PYTHON: Final = (
    "install it there, or name a Python that the driver's and the executors' machines have with PYSPARK_PYTHON"
)
_WORKERS_PYTHON: Final = (
    (r"ModuleNotFoundError: No module named '(\w+)", "the Python of Spark's workers has no {}"),
    (r"Cannot run program \"([^\"]*python[^\"]*)\"", "there is no {} to run Spark's workers with"),
    (
        r"Python in worker has different version:? (.{1,20}?) than that in driver",
        "Spark's workers have another Python ({}) than the driver",
    ),
)
