"""Spark's settings and environment at its start, by its master.

On one machine (`local…`) no setting of the user's own Spark reaches it. On a cluster the cluster's configuration
applies, and only what the job needs is added.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

import kproxy
import kproxy_codec
from kproxy.pipeline.java import Java, trust_options

# The driver and its tasks share the machine with the cluster they write to.
LOCAL_MASTER: Final = "local[2]"
# A foreign Spark's home, configuration and options, and the switches that turn a session into a remote one.
_FOREIGN_PREFIXES: Final = ("SPARK_", "PYSPARK_", "HADOOP_", "YARN_", "_PYSPARK_", "_SPARK_")
# Removed for every master: these make our driver join, or become, another Spark.
_NEVER: Final = (
    "SPARK_HOME",
    "SPARK_REMOTE",
    "SPARK_CONNECT_",
    "SPARK_LOCAL_REMOTE",
    "PYSPARK_GATEWAY_",
    "PYSPARK_SUBMIT_ARGS",
    "_PYSPARK_",
    "_SPARK_",
)
# Optimising compilers and parallel garbage collection cost a short job on few cores more than they save.
_SHORT_JOB: Final = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
# In a checkout the two packages are in two directories.
PACKAGE_ROOTS: Final = tuple(
    dict.fromkeys(str(Path(package.__path__[0]).resolve().parent) for package in (kproxy, kproxy_codec))
)


def on_this_machine(master: str) -> bool:
    return master.startswith("local")


def in_one_process(master: str) -> bool:
    """Whether the driver's JVM is also the executor, so that tasks find the driver's files and packages."""
    return master == "local" or master.startswith("local[")


def kafka_connector() -> str:
    """Return the Maven coordinates of Spark's Kafka connector for the installed pyspark."""
    return f"org.apache.spark:spark-sql-kafka-0-10_2.13:{metadata.version('pyspark')}"


def foreign_variables(environ: Iterable[str], master: str) -> list[str]:
    """Return the names in `environ` that must not reach a Spark of ours with this master."""
    prefixes = _FOREIGN_PREFIXES if on_this_machine(master) else _NEVER
    return [name for name in environ if name.startswith(prefixes)]


def spark_environment(environ: Mapping[str, str], java: Java, home: Path, master: str = LOCAL_MASTER) -> dict[str, str]:
    """Return `environ` for Spark's scripts: our home and Java, no foreign variable, this package in PYTHONPATH."""
    foreign = set(foreign_variables(environ, master))
    kept = {name: value for name, value in environ.items() if name not in foreign}
    # Spark's scripts need a shell and its tools even if PATH is empty.
    kept["PATH"] = os.pathsep.join(filter(None, [environ.get("PATH"), os.defpath]))
    # This package may come from the working directory or sys.path, which workers do not search.
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [*PACKAGE_ROOTS, environ.get("PYTHONPATH")]))
    if on_this_machine(master):
        kept["SPARK_LOCAL_IP"] = "127.0.0.1"
    elif "SPARK_CONF_DIR" not in kept and (Path(environ.get("SPARK_HOME", "")) / "conf").is_dir():
        # The launcher is the installed pyspark's, as its version must fit; the configuration is the user's.
        kept["SPARK_CONF_DIR"] = str(Path(environ["SPARK_HOME"]) / "conf")
    return {**kept, "SPARK_HOME": str(home), "JAVA_HOME": str(java.home)}


def worker_python(environ: Mapping[str, str], master: str) -> str | None:
    """Return the Python of the executors; None to leave it to Spark's configuration, by default `python3`."""
    return sys.executable if on_this_machine(master) else environ.get("PYSPARK_PYTHON")


def spark_settings(
    java: Java, work_dir: Path, cache_dir: Path, *, app_name: str, master: str = LOCAL_MASTER, short: bool = True
) -> dict[str, str]:
    """Return a job's default settings, which the user's override. `short`: the job takes about a minute."""
    trust = trust_options(java, work_dir / "truststore")
    settings = {
        "spark.master": master,
        "spark.app.name": app_name,
        "spark.jars.packages": kafka_connector(),
        "spark.jars.ivy": str(cache_dir / "ivy"),
        "spark.ui.showConsoleProgress": "false",
        # Reports do not depend on the machine's time zone.
        "spark.sql.session.timeZone": "UTC",
        # `spark.driver.extraJavaOptions` is left to the user.
        "spark.driver.defaultJavaOptions": shlex.join([*_SHORT_JOB, *trust] if short else trust),
    }
    if not on_this_machine(master):
        return settings
    return settings | {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.local.dir": str(work_dir / "spark-local"),
        "spark.sql.warehouse.dir": str(work_dir / "spark-warehouse"),
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "12",
    }
