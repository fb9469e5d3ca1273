"""Open the Spark session of a pipeline job, locally, on a cluster or in a notebook.

There are three ways, and a job need not distinguish them:
1. The process has a session already (a notebook, another program): use it, and leave it open at the end.
2. `spark-submit` started the process: use its JVM, with the settings of `spark-submit`.
3. Else let pyspark launch a JVM with the given master, and end it with the job. This module chooses its Java, its
   settings, its environment, and the file for its output.

Executors in other processes get an archive of this package and its dependencies (`package_archive`), for
`spark.submit.pyFiles` or `--py-files`. PACKAGES are pure Python, but for compiled parts that are left out, and run from
a zip. The archive lacks compiled libraries: pyarrow, which Spark itself needs for data sources in Python, and crc32c,
without which the CRCs of batches are not checked.

Invariants of a JVM that this module launches
1. It leaves no process behind after the job. If this process is killed, the JVM sees its standard input close and ends
   by itself.
2. Its output goes to its log file and never to the terminal.
3. With a local master no setting of the user's own Spark reaches it, neither by environment nor by another Spark's
   files. On a cluster the cluster's configuration applies, and only what the job needs is added.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import util
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any, Final

from kproxy import installed
from kproxy.errors import StartupError
from kproxy.pipeline.java import Java, find_java, java_home, trust_options, user_cache_dir
from kproxy.pipeline.spark import (
    SparkFailed,
    as_spark_failure,
    in_one_process,
    kafka_connector,
    on_this_machine,
    our_interrupts,
    pyspark_home,
    quiet_pyspark,
    reason_in,
)

# All cores, because a job seldom shares the machine with the brokers.
DEFAULT_MASTER: Final = "local[*]"
STOP_TIMEOUT_S: Final = 10.0
# The JVM's sockets close a little before it has ended.
_DEATH_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """The options of a session.

    `settings` are Spark's and override everything else; an empty setting leaves the choice to Spark. `memory` is the
    driver's, in Spark's form (`2g`). `kafka`: a Spark of ours gets Spark's Kafka connector, which is downloaded once.
    `short`: the job takes a minute. `log_path` is for the log of a Spark of ours; by default it is a new
    file, which is removed unless Spark fails.
    """

    app_name: str
    master: str | None = None
    memory: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    kafka: bool = True
    short: bool = False
    log_path: Path | None = None


@dataclass(frozen=True, slots=True)
class OpenSession:
    """An open session, with its Java and its JVM if `open_session` started them."""

    session: Any
    java: Java | None = None
    process: subprocess.Popen[bytes] | None = None

    def kill(self) -> None:
        """Kill the JVM if `open_session` started it. Any thread may call this; waiting calls into the JVM then fail."""
        if self.process is not None:
            self.process.kill()


@contextlib.contextmanager
def open_session(options: SessionOptions) -> Iterator[OpenSession]:
    """Open a session while the block runs.

    Raise StartupError if Spark does not start as requested, and SparkFailed for later failures. If a Spark that this
    module launched fails, the log is kept and the error names it.
    """
    pyspark_home()
    quiet_pyspark()
    if _active_context() is not None:
        yield OpenSession(_taken(options))
    elif is_submitted():
        if options.master is not None or options.memory is not None:
            raise StartupError("spark-submit has started Spark: give --master and --memory to it, not to the job.")
        try:
            yield OpenSession(_taken(options))
        finally:
            if (context := _active_context()) is not None:
                with as_spark_failure("Spark did not stop"):
                    context.stop()
    else:
        with _own_session(options) as opened:
            yield opened


def is_submitted() -> bool:
    """Return whether `spark-submit` has started this process."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _active_context() -> Any:
    """Return the SparkContext of this process, None if there is none."""
    from pyspark import SparkContext

    return SparkContext._active_spark_context


def _taken(options: SessionOptions) -> Any:
    """Return the session of a Spark that was started elsewhere. Raise StartupError if it refuses a setting."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    if _active_context() is None:
        # spark-submit would name the application after its file.
        builder = builder.appName(options.app_name)
    with as_spark_failure("Spark did not start"), our_interrupts():
        session = builder.getOrCreate()
    for name, value in options.settings.items():
        if not session.conf.isModifiable(name):
            raise StartupError(
                f"{name} cannot change after Spark has started: give spark-submit --conf {name}={value}."
            )
        session.conf.set(name, value)
    # Reports do not depend on the machine's time zone.
    session.conf.set("spark.sql.session.timeZone", "UTC")
    if not in_one_process(session.sparkContext.master):
        ship_package(session)
    return session


def ship_package(session: Any) -> None:
    """Add the archive to the session. Executors fetch it with their first task, so it stays until Spark stops."""
    from pyspark import SparkFiles

    # Spark removes its directory of files for executors when it stops. A subdirectory does not overwrite Spark's copy.
    directory = Path(SparkFiles.getRootDirectory()) / "kproxy"
    with as_spark_failure("Spark took no archive"):
        session.sparkContext.addPyFile(str(package_archive(directory)))


@contextlib.contextmanager
def _own_session(options: SessionOptions) -> Iterator[OpenSession]:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    java, master = find_java(), options.master or DEFAULT_MASTER
    with tempfile.TemporaryDirectory(prefix="kproxy-spark-", ignore_cleanup_errors=True) as directory:
        log_path = options.log_path or Path(f"{directory}.log")
        has_started, keep_log = False, options.log_path is not None
        try:
            changes = environment_changes(os.environ, master, java_home(java, Path(directory)))
            settings = spark_settings(options, java, Path(directory))
            with _environment(changes), _jvm(settings, log_path) as gateway:
                with as_spark_failure("Spark did not start"), our_interrupts():
                    context = SparkContext(gateway=gateway)
                    context.setLogLevel("WARN")
                    # spark-submit counts the connector's jars as Python files: each task would read their directories.
                    context._python_includes = [name for name in context._python_includes if name[-4:] != ".jar"]
                    session = SparkSession(context)
                if not in_one_process(master):
                    ship_package(session)
                has_started = True
                yield OpenSession(session, java, gateway.proc)
        except SparkFailed as error:
            keep_log, said = True, str(error).rstrip(".")
            if has_started:
                raise SparkFailed(f"{said}; Spark's log is {log_path}.") from error
            if reason := reason_in(log_path.read_text(errors="replace")):
                said = f"Spark did not start: {reason.rstrip('.')}"
            raise StartupError(f"{said}; Spark's log is {log_path}.") from error
        finally:
            if not keep_log:
                log_path.unlink(missing_ok=True)


@contextlib.contextmanager
def _jvm(settings: Mapping[str, str], log_path: Path) -> Iterator[Any]:
    """Let pyspark launch a JVM, with its output in `log_path`, and end it with the block. Raise SparkFailed."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    with as_spark_failure("Spark did not start"), log_path.open("wb") as log:
        # The JVM has a process group of its own, so that one signal reaches it and its Python workers.
        streams = {"stdout": log, "stderr": log, "start_new_session": True}
        gateway = launch_gateway(SparkConf().setAll(list(settings.items())), streams)
    process: subprocess.Popen[bytes] = gateway.proc
    try:
        yield gateway
    except SparkFailed as error:
        # Wait for the exit, because py4j only guesses why the JVM ended.
        with contextlib.suppress(subprocess.TimeoutExpired):
            raise SparkFailed(f"Spark's Java ended by itself ({process.wait(_DEATH_S)})") from error
        raise
    finally:
        context = _active_context()
        if context is not None and process.poll() is None:
            with contextlib.suppress(SparkFailed), as_spark_failure("Spark did not stop"):
                context.stop()
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                # The JVM is not reaped yet, so its group id cannot be another process's.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_TIMEOUT_S)
        # pyspark keeps its gateway until this process ends, but the next session needs a new one.
        SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
        SparkSession._instantiatedSession = SparkSession._activeSession = None
        if process.stdin is not None:
            process.stdin.close()
        gateway.shutdown()


# In a short job on few cores, optimising compilers and parallel garbage collection cost more than they save.
_SHORT_JOB: Final = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")


def spark_settings(options: SessionOptions, java: Java, work_dir: Path) -> dict[str, str]:
    """Return the settings of a Spark that this module launches: the user's, and defaults for the rest."""
    java_options = [*(_SHORT_JOB if options.short else ()), *trust_options(java, work_dir / "truststore")]
    master = options.master or DEFAULT_MASTER
    settings = {
        "spark.app.name": options.app_name,
        "spark.master": master,
        "spark.jars.packages": kafka_connector() if options.kafka else "",
        "spark.jars.ivy": str(user_cache_dir() / "ivy"),
        "spark.ui.showConsoleProgress": "false",
        # Reports do not depend on the machine's time zone.
        "spark.sql.session.timeZone": "UTC",
        # `spark.driver.extraJavaOptions` stays free for the user.
        "spark.driver.defaultJavaOptions": shlex.join(java_options),
    }
    if on_this_machine(master):
        settings |= {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "1g",
            "spark.python.daemon.module": "kproxy.pipeline.spark_workers",
            "spark.local.dir": str(work_dir / "spark-local"),
            "spark.sql.warehouse.dir": str(work_dir / "spark-warehouse"),
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "12",
        }
    if options.memory is not None:
        settings["spark.driver.memory"] = options.memory
    return {name: value for name, value in {**settings, **options.settings}.items() if value}


# Removed for every master: with these the driver would join, or become, another Spark.
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
# Removed on this machine: another Spark's configuration.
_FOREIGN: Final = (*_NEVER, "SPARK_", "PYSPARK_", "HADOOP_", "YARN_")


def environment_changes(environ: Mapping[str, str], master: str, java: Path | None) -> dict[str, str | None]:
    """Return the environment variables to set for a launched Spark, None to remove one. `java` is its JAVA_HOME."""
    here = on_this_machine(master)
    changes: dict[str, str | None] = {name: None for name in environ if name.startswith(_FOREIGN if here else _NEVER)}
    changes |= {"SPARK_HOME": str(pyspark_home()), "JAVA_HOME": None if java is None else str(java)}
    # Spark's scripts and Hadoop need a shell and its tools, even if PATH lacks them.
    changes["PATH"] = os.pathsep.join(filter(None, [environ.get("PATH"), os.defpath]))
    if here:
        # By default Spark would run its workers with the first python3 in PATH.
        changes |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    elif "SPARK_CONF_DIR" not in environ and (conf := Path(environ.get("SPARK_HOME", ""), "conf")).is_dir():
        # The launcher is that of the installed pyspark, whose version must fit; the configuration is the user's.
        changes["SPARK_CONF_DIR"] = str(conf)
    return changes


@contextlib.contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Change the process's environment while the block runs, because pyspark too reads it, at any time."""
    before = {name: os.environ.get(name) for name in changes}
    try:
        _change(changes)
        yield
    finally:
        _change(before)


def _change(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# The packages that executors get.
PACKAGES: Final = ("asn1crypto", "kafka", "kproxy", "kproxy_codec", "scramp")
# Extensions cannot be imported from a zip, and the compiled plain path's sources are of no use without them.
_LEFT_OUT: Final = (".pyc", ".so", ".c", ".h", ".pyx", ".pxi")


def package_archive(directory: Path) -> Path:
    """Pack the installed packages into an archive in `directory`.

    Raise StartupError if one cannot be packed. The archive is replaced whole, because another job may be sending the
    previous one to its executors.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"kproxy-{installed.version()}.zip"
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        # Not strict, because a file may be older than the earliest date in a zip.
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
            for root in map(_location, PACKAGES):
                for file in root.rglob("*"):
                    if file.is_file() and file.suffix not in _LEFT_OUT:
                        archive.write(file, file.relative_to(root.parent))
            # scramp reads its own version from its metadata.
            metadata = Distribution.from_name("scramp").read_text("METADATA")
            archive.writestr("scramp.dist-info/METADATA", metadata or "")
        return unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _location(name: str) -> Path:
    spec = util.find_spec(name)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        if Path(location).is_dir():
            return Path(location)
    raise StartupError(f"The package {name} is not installed as files, so it cannot be sent to Spark's executors.")
