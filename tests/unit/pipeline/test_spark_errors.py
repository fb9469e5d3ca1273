"""The errors of Spark, Java and pyspark become one sentence each."""

from __future__ import annotations

import pytest
from py4j.protocol import Py4JError
from pyspark.errors import PySparkRuntimeError

from kproxy.pipeline.spark import SparkFailed, as_spark_failure, cause_in, reason_in


@pytest.mark.parametrize(
    "error",
    [
        # Spark 4.0 raises the first where later releases raise the second.
        Py4JError("An error occurred while calling o1.load.\n: a.b.Failed: no room\n\tat a.B"),
        PySparkRuntimeError("a.b.Failed: no room\n\nJVM stacktrace"),
        OSError("a.b.Failed: no room"),
    ],
)
def test_each_class_of_error_becomes_one_line(error: Exception) -> None:
    with pytest.raises(SparkFailed, match=r"^It failed: a\.b\.Failed: no room$"), as_spark_failure("It failed"):
        raise error


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("one line", "one line"),
        ("\n first \n second", "first"),
        ("Outer\n\tat a.B\nCaused by: inner\n\tat c.D\nCaused by: innermost\n\t... 3 more", "innermost"),
        ("", ""),
        ("An error occurred while calling o622.parquet.\n: a.b.Failed: no room\n\tat a.B", "a.b.Failed: no room"),
    ],
)
def test_innermost_java_cause_is_reported(text: str, cause: str) -> None:
    assert cause_in(text) == cause


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "SparkException: \nError from python worker:\n  ModuleNotFoundError: No module named 'pyarrow'",
            "has no pyarrow",
        ),
        ('Cannot run program "python3": error=2, No such file or directory', "there is no python3 to run"),
        ("[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.9 than that in driver: 3.11", "(3.9)"),
    ],
)
def test_missing_worker_python_is_reported_with_remedy(said: str, told: str) -> None:
    sentence = cause_in(f"An error occurred while calling o622.parquet.\n: {said}\nCaused by: java.io.EOFException")

    assert told in sentence
    assert sentence.endswith("with PYSPARK_PYTHON")


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            'found a#c;1\nException in thread "main" a.b.Failed: [unresolved dependency: a#b;1: not found]\n\tat a.B',
            "[unresolved dependency: a#b;1: not found]",
        ),
        (
            "WARN\nInvalid maximum heap size: -Xmx9x\nError: Could not create the Java Virtual Machine.",
            "Invalid maximum",
        ),
        (
            "Error occurred during initialization of VM\nCould not reserve enough space",
            "Could not reserve enough space",
        ),
        ("ERROR A: Application has been killed. Reason: All masters are unresponsive! Giving up.", "All masters are"),
        ("26/11/22 ERROR SparkContext: Error initializing SparkContext.", ""),
    ],
)
def test_reason_for_failed_start_is_in_log(log: str, reason: str) -> None:
    assert reason_in(log).startswith(reason)
    assert bool(reason_in(log)) == bool(reason)
