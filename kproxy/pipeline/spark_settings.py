"""What Spark is told when it is started: its settings and its environment, by where it is to run.

Within one process or on one machine (`local…`) no setting of the user's own Spark reaches it. On a cluster it is the
other way round: what the cluster's people have configured is in force, and only what the job needs is added.
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
from kproxy.pipeline.java import Java
from kproxy.pipeline.truststore import trust_options

# The driver and its tasks share the machine with the cluster they write to.
LOCAL_MASTER: Final = "local[2]"
# A foreign Spark's home, configuration and options, and the switches that turn a session into a remote one.
_FOREIGN_PREFIXES: Final = ("SPARK_", "PYSPARK_", "HADOOP_", "YARN_", "_PYSPARK_", "_SPARK_")
# Of these what would have our driver join, or be, something else: true for every master.
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
# Optimising the code and collecting in parallel cost a short job on few cores more than they give.
_SHORT_JOB: Final = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
# In a checkout the two packages lie in two directories.
PACKAGE_ROOTS: Final = tuple(
    dict.fromkeys(str(Path(package.__path__[0]).resolve().parent) for package in (kproxy, kproxy_codec))
)


def on_this_machine(master: str) -> bool:
    return master.startswith("local")


def in_one_process(master: str) -> bool:
    """Whether the driver's JVM is the executor as well, so that what the driver finds its tasks find."""
    return master == "local" or master.startswith("local[")


def kafka_connector() -> str:
    """Maven's coordinates of Spark's Kafka connector, in the version of the installed pyspark."""
    return f"org.apache.spark:spark-sql-kafka-0-10_2.13:{metadata.version('pyspark')}"


def foreign_variables(environ: Iterable[str], master: str) -> list[str]:
    """Those of the environment's names that must not reach a Spark of ours with this master."""
    prefixes = _FOREIGN_PREFIXES if on_this_machine(master) else _NEVER
    return [name for name in environ if name.startswith(prefixes)]


def spark_environment(environ: Mapping[str, str], java: Java, home: Path, master: str = LOCAL_MASTER) -> dict[str, str]:
    """`environ` for Spark's scripts: the home and Java that were found, nothing foreign, this package in PYTHONPATH."""
    foreign = set(foreign_variables(environ, master))
    kept = {name: value for name, value in environ.items() if name not in foreign}
    # Its scripts need a shell and its small tools even where PATH was emptied.
    kept["PATH"] = os.pathsep.join(filter(None, [environ.get("PATH"), os.defpath]))
    # This package may have been found by way of the working directory or of sys.path, where workers do not look.
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [*PACKAGE_ROOTS, environ.get("PYTHONPATH")]))
    if on_this_machine(master):
        kept["SPARK_LOCAL_IP"] = "127.0.0.1"
    elif "SPARK_CONF_DIR" not in kept and (Path(environ.get("SPARK_HOME", "")) / "conf").is_dir():
        # The launcher is pyspark's own, of the one version that fits; the configuration is the user's.
        kept["SPARK_CONF_DIR"] = str(Path(environ["SPARK_HOME"]) / "conf")
    return {**kept, "SPARK_HOME": str(home), "JAVA_HOME": str(java.home)}


def worker_python(environ: Mapping[str, str], master: str) -> str | None:
    """What runs Python on the executors; None where Spark's configuration says it, or `python3` there is to be it."""
    return sys.executable if on_this_machine(master) else environ.get("PYSPARK_PYTHON")


def spark_settings(
    java: Java, work_dir: Path, cache_dir: Path, *, app_name: str, master: str = LOCAL_MASTER, short: bool = True
) -> dict[str, str]:
    """The settings that a job of ours begins with; what the user gives goes over them. `short`: it takes a minute."""
    trust = trust_options(java, work_dir / "truststore")
    settings = {
        "spark.master": master,
        "spark.app.name": app_name,
        "spark.jars.packages": kafka_connector(),
        "spark.jars.ivy": str(cache_dir / "ivy"),
        "spark.ui.showConsoleProgress": "false",
        # What is reported is the same wherever it runs.
        "spark.sql.session.timeZone": "UTC",
        # Not the extra ones, which are the user's to give.
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
