"""Keep the timestamps of a source's records, for which Spark's Kafka sink has no column.

The timestamp travels in a header. A producer interceptor in Java, `KeepTimestamps.java`, takes it out again on the
executors. Its class is beside it in a jar; a test builds it from its source and compares.
"""

from __future__ import annotations

from importlib import resources
from typing import Any, Final

from pyspark.sql import SparkSession

from kproxy.pipeline.spark import as_spark_failure

# The header's value is the timestamp in milliseconds, in decimal.
TIMESTAMP_HEADER: Final = "_kproxy_timestamp"
INTERCEPTOR_CLASS: Final = "kproxy.KeepTimestamps"
JAR: Final = "keep_timestamps.jar"


def add_timestamp_interceptor(session: SparkSession) -> None:
    """Send INTERCEPTOR_CLASS to the executors of `session`, once. Raise SparkFailed if Spark does not take it."""
    context: Any = session.sparkContext
    with as_spark_failure("The interceptor that keeps timestamps was not taken"):
        if JAR not in str(context._jsc.sc().listJars()):
            context._jsc.addJar(str(resources.files(__package__) / JAR))
