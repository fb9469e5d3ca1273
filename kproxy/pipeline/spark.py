"""Spark's driver: one JVM as a child of ours, the session in it, and its settings.

On one machine (`local…`) no setting of the user's own Spark reaches it. On a cluster the cluster's configuration
applies, and only what the job needs is added.

States: NEW --start()--> STARTING --> RUNNING --stop()--> STOPPED; any --kill()--> STOPPED.

Invariants
1. The JVM is ours alone: we launch it, know its process group, and `stop` or `kill` leaves none of it behind. If this
   process is killed, the JVM sees its standard input close and ends by itself.
2. `kill` may come from any thread at any time; a call into the JVM that is waiting then fails.
3. Spark's output goes to its log file and never to the terminal.
4. With a local master no Spark setting of the user's reaches it, neither by environment nor by another Spark's files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import kproxy
import kproxy_codec
from kproxy.errors import StartupError
from kproxy.installed import install_command
from kproxy.pipeline.java import Java, trust_options, user_cache_dir

# The driver and its tasks share the machine with the cluster they write to.
LOCAL_MASTER: Final = "local[2]"
# Another Spark's home, configuration and options, and the switches that turn a session into a remote one.
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
# The first start may have to download the Kafka connector.
START_TIMEOUT_S: Final = 600.0
STOP_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.05


class SparkFailed(Exception):
    """Spark failed. The message is one line; Spark's log has the rest."""


def quiet_pyspark() -> None:
    """Stop pyspark from logging the errors that it also raises, hundreds of lines of JSON each."""
    from pyspark.logger import PySparkLogger

    PySparkLogger.getLogger("DataFrameQueryContextLogger").setLevel(logging.CRITICAL)


def pyspark_home(extra: str = "spark") -> Path:
    """Locate pyspark without importing it. Raise StartupError, which names our `extra`, if it is not installed."""
    spec = util.find_spec("pyspark")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(location) / "bin" / "spark-submit").is_file():
            return Path(location)
    raise _not_installed(extra)


def require_pyspark() -> None:
    """Raise StartupError if pyspark cannot be imported, whether from pip or from spark-submit."""
    if util.find_spec("pyspark") is None:
        raise _not_installed("spark")


def _not_installed(extra: str) -> StartupError:
    return StartupError(f"PySpark is not installed: run `{install_command(extra)}`.")


class SparkDriver:
    """A JVM with Spark in it.

    `start` and `stop` block, so call them from a thread. Not reusable after `stop`. Scratch files and `spark.log` go to
    `work_dir`; downloads are kept in the user's cache. `settings` are Spark's own (`spark.driver.memory` and so on), in
    place of the defaults or besides them; one that is empty is left to Spark. On this machine Python workers run this
    interpreter, and they find this package. `short`: the job takes a minute.
    """

    def __init__(
        self,
        java: Java,
        work_dir: Path,
        *,
        app_name: str = "kproxy",
        master: str = LOCAL_MASTER,
        short: bool = True,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.java = java
        self.master = master
        self._app_name = app_name
        self._short = short
        self._work_dir = work_dir
        self._settings = settings or {}
        self._cache_dir = user_cache_dir()
        self.log_path = work_dir / "spark.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._hidden: dict[str, str] = {}
        self._ended_by_itself: int | None = None
        self._stopped = False
        self._gateway: Any = None
        self._session: Any = None
        self._artifacts = Artifacts()

    @property
    def session(self) -> Any:
        """The SparkSession. Raises SparkFailed before `start` and after `stop`."""
        if self._session is None:
            raise SparkFailed("Spark is not running")
        return self._session

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def ended_by_itself(self) -> int | None:
        """The JVM's exit status (negative: the signal) if it ended before `stop` or `kill`; known after them."""
        return self._ended_by_itself

    def start(self, on_download: Callable[[int], None] = lambda count: None) -> None:
        """Launch the JVM and open the session.

        Raise SparkFailed, or StartupError if the user can fix it. Call `on_download` with the number of jars downloaded
        so far.
        """
        self._work_dir.mkdir(parents=True, exist_ok=True)
        self._hide_foreign_variables()
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        quiet_pyspark()
        logging.getLogger().addFilter(_not_from_py4j)
        port, secret = self._launch(on_download)
        from pyspark import SparkContext
        from pyspark.java_gateway import launch_gateway
        from pyspark.sql import SparkSession

        with self._told_of_no_master(), as_spark_failure("Spark did not start"):
            with _environment(PYSPARK_GATEWAY_PORT=str(port), PYSPARK_GATEWAY_SECRET=secret):
                self._gateway = launch_gateway()
            context = SparkContext(gateway=self._gateway)
            context.setLogLevel("WARN")
            # The default is the first python3 in PATH.
            context.pythonExec = worker_python(os.environ, self.master) or context.pythonExec
            self._session = SparkSession(context)

    def _launch(self, on_download: Callable[[int], None]) -> tuple[int, str]:
        """Run Spark's launcher until it reports the port that its JVM listens on; return port and secret."""
        home = pyspark_home()
        with tempfile.TemporaryDirectory(dir=self._work_dir) as handshake_dir:
            handshake = Path(handshake_dir) / "gateway"
            environment = spark_environment({**os.environ, **self._hidden}, self.java, home, self.master)
            if on_this_machine(self.master):
                environment["SPARK_CONF_DIR"] = handshake_dir
            environment["_PYSPARK_DRIVER_CONN_INFO_PATH"] = str(handshake)
            command = [str(home / "bin" / "spark-submit")]
            for name, value in self._all_settings().items():
                command += ["--conf", f"{name}={value}"]
            with self._lock, self.log_path.open("ab") as log:
                if self._stopped:
                    raise SparkFailed("Spark was stopped")
                # Its own session, so that Ctrl-C in a terminal reaches us alone and we end it in order.
                self._process = subprocess.Popen(  # noqa: S603 - pyspark's own script
                    [*command, "pyspark-shell"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
            self._await_handshake(handshake, on_download)
            content = handshake.read_bytes()
        port, length = struct.unpack_from(">ii", content)
        return port, content[8 : 8 + length].decode()

    def _all_settings(self) -> dict[str, str]:
        defaults = spark_settings(
            self.java, self._work_dir, self._cache_dir, app_name=self._app_name, master=self.master, short=self._short
        )
        return {name: value for name, value in {**defaults, **self._settings}.items() if value}

    def _await_handshake(self, handshake: Path, on_download: Callable[[int], None]) -> None:
        assert self._process is not None  # noqa: S101 - set by the caller, under the lock
        deadline = time.monotonic() + START_TIMEOUT_S
        while not handshake.is_file():
            if self._process.poll() is not None:
                raise self._why_not()
            if time.monotonic() > deadline:
                self.kill()
                raise SparkFailed(f"Spark did not start within {START_TIMEOUT_S:.0f} s")
            downloads = self.log_path.read_text(errors="replace").count("[SUCCESSFUL ]")
            if downloads:
                on_download(downloads)
            time.sleep(_POLL_S)

    @contextlib.contextmanager
    def _told_of_no_master(self) -> Iterator[None]:
        try:
            yield
        except SparkFailed as error:
            told = no_master(self.log_path.read_text(errors="replace"), self.master)
            if told is not None:
                raise told from error
            raise

    def _why_not(self) -> Exception:
        if self._stopped:
            return SparkFailed("Spark was stopped")
        log = self.log_path.read_text(errors="replace")
        if (told := not_downloaded(log)) is not None:
            return told
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        return SparkFailed(f"Spark did not start: {lines[-1] if lines else 'it said nothing'}")

    def stop(self) -> None:
        """End the session and the JVM, SIGTERM first. Return when no process of it is left; safe to repeat."""
        with contextlib.suppress(SparkFailed):
            if self._session is not None and not self._stopped:
                with as_spark_failure("Spark did not stop"):
                    self._session.stop()
                with as_spark_failure("Spark did not stop"):
                    self._gateway.shutdown()
        self._end(signal.SIGTERM)
        self._forget()

    def kill(self) -> None:
        """Kill the JVM, from any thread. Running calls into it fail."""
        self._end(signal.SIGKILL)

    def _end(self, first: signal.Signals) -> None:
        with self._lock:
            already_stopped, self._stopped = self._stopped, True
            process = self._process
        if process is None:
            return
        if process.poll() is not None:
            if self._ended_by_itself is None and not already_stopped:
                self._ended_by_itself = process.returncode
            self._artifacts.remove()
            return
        for number in (first, signal.SIGKILL):
            # The process is not reaped yet, so the group id is still ours.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
                break
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        self._artifacts.remove()

    def _hide_foreign_variables(self) -> None:
        """Remove them from our environment: pyspark reads SPARK_REMOTE, which makes every session a remote one."""
        for name in foreign_variables(os.environ, self.master):
            self._hidden[name] = os.environ.pop(name)

    def _forget(self) -> None:
        """Reset pyspark's globals: it keeps its gateway until the process ends, but the next driver needs a new one."""
        logging.getLogger().removeFilter(_not_from_py4j)
        os.environ.update(self._hidden)
        self._hidden.clear()
        if self._gateway is None:
            return
        from pyspark import SparkContext
        from pyspark.sql import SparkSession

        if SparkContext._gateway is self._gateway:
            SparkContext._gateway = None
            SparkContext._jvm = None
            SparkContext._active_spark_context = None
            SparkSession._instantiatedSession = None
            SparkSession._activeSession = None
        self._gateway.shutdown_callback_server(raise_exception=False)
        self._gateway = None
        self._session = None


def _not_from_py4j(record: logging.LogRecord) -> bool:
    """Drop py4j's log records: it also raises these errors, and a killed JVM causes very many."""
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


def cause_in(text: str) -> str:
    """Return the innermost cause in a Java stack trace, else the first line.

    "" for an empty text. If the Python of Spark's workers does not fit the job, add how to change it.
    """
    for pattern, sentence in _WORKERS_PYTHON:
        if found := re.search(pattern, text):
            return f"{sentence.format(found[1])}: {_NAME_A_PYTHON}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    if not causes and len(lines) > 1 and lines[0].startswith(_PY4J):
        # The first line only names the Java method that was called.
        return lines[1].removeprefix(": ")
    return (causes or lines or [""])[-1 if causes else 0]


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


def no_master(log: str, master: str) -> StartupError | None:
    """Return the error to raise if Spark's `log` says that no master of a standalone cluster answered."""
    if "All masters are unresponsive" not in log:
        return None
    return StartupError(
        f"No Spark master answers at --master {master}: give the address that its own page shows, spark://HOST:PORT, "
        "of a cluster of the same version of Spark."
    )


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set environment variables of this process while the block runs."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Artifacts:
    """Remove the empty directories `artifacts/spark-…` that Spark 4.0 leaves in the working directory.

    Each JVM makes one for files that a session may get later; no setting moves it. Create this before a JVM starts in
    this directory, and call `remove` once it has ended.
    """

    def __init__(self) -> None:
        self._directory = Path("artifacts").absolute()
        self._before = self._found()

    def _found(self) -> set[Path]:
        try:
            return set(self._directory.glob("spark-*"))
        except OSError:
            return set()

    def remove(self) -> None:
        """Remove the new directories that are empty."""
        new = self._found() - self._before
        for directory in new:
            with contextlib.suppress(OSError):
                directory.rmdir()
        if new:
            with contextlib.suppress(OSError):
                self._directory.rmdir()


_WHAT: Final = "Spark could not download its Kafka connector"
_MISSING: Final = re.compile(r"\[(?:unresolved dependency|download failed): ([^\s#]+)#([^\s;]+);([^\s:!\]]+)")
_ASKED: Final = re.compile(r"^\s+(https?://\S+)$", re.MULTILINE)
_NO_ACCESS: Final = re.compile(r"Server access error at url (\S+) \((.+)\)")
_NO_HOST: Final = re.compile(r"Host (\S+) not found\. url=(\S+)")
_ERROR: Final = re.compile(r"SERVER ERROR: (.+) url=(\S+)")
_NOT_WHOLE: Final = re.compile(r"\[FAILED +\] .*?: (.+) for (https?://\S+)\. ")
_PROXY: Final = "Your proxy requires authentication."


def not_downloaded(log: str) -> StartupError | None:
    """Return the error to raise if Spark's `log` says that its jars could not be downloaded.

    Ivy, which downloads them, gives no error codes, so its text is searched. It asks one repository after another, and
    prints what it asked for, whom it could not reach, and who answered with an error. Any other repository has answered
    and does not have the jar.
    """
    missing = _MISSING.search(log)
    if missing is None:
        return None
    named = ":".join(missing.groups())
    if failed := _ERROR.search(log):
        return StartupError(f"{_WHAT}: {failed[2]} answered with an error ({failed[1]}). Run it again later.")
    if cut := _NOT_WHOLE.search(log):
        return StartupError(f"{_WHAT}: {cut[2]} did not come whole ({cut[1]}). Run it again.")
    if _PROXY in log:
        return StartupError(f"{_WHAT}: the network's proxy wants to know who asks. Ask who runs it, or use a mirror.")
    reasons = dict(_NO_ACCESS.findall(log))
    reasons |= {url: f"host {host} not found" for host, url in _NO_HOST.findall(log)}
    unreached = {_repository(url): reason for url, reason in reversed(reasons.items())}
    answered = [each for each in dict.fromkeys(map(_repository, _ASKED.findall(log))) if each not in unreached]
    if unreached and not answered:
        url, reason = next(iter(reasons.items()))
        return StartupError(f"{_WHAT} from {url} ({reason}): check the network and run it again.")
    asked = " and ".join(answered) or "the repository"
    besides = "".join(f", and {each} could not be asked ({reason})" for each, reason in unreached.items())
    return StartupError(
        f"{_WHAT}: {asked} answered and {'do' if len(answered) > 1 else 'does'} not give {named}{besides}. Use a "
        "release of PySpark that is there, or ask who runs the mirror or the network's proxy."
    )


def _repository(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


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
