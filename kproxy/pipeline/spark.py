"""Spark's driver: one JVM as a child of ours, and the session in it.

States: NEW --start()--> STARTING --> RUNNING --stop()--> STOPPED; any --kill()--> STOPPED.

Invariants
1. The JVM is ours alone: we launch it, know its process group, and `stop` or `kill` leaves none of it behind. If this
   process is killed, the JVM sees its standard input close and ends by itself.
2. `kill` may come from any thread at any time; whoever waits in a call to the JVM then gets an error.
3. What Spark prints goes to its log file and never to the terminal.
4. With a local master no Spark setting of the user's reaches it, neither by environment nor by another Spark's files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import util
from pathlib import Path
from typing import Any, Final

from kproxy.errors import StartupError
from kproxy.installed import install_command
from kproxy.pipeline.artifacts import Artifacts
from kproxy.pipeline.cache import user_cache_dir
from kproxy.pipeline.java import Java
from kproxy.pipeline.not_downloaded import not_downloaded
from kproxy.pipeline.spark_settings import (
    LOCAL_MASTER,
    foreign_variables,
    on_this_machine,
    spark_environment,
    spark_settings,
    worker_python,
)

# The first start may have to download the Kafka connector.
START_TIMEOUT_S: Final = 600.0
STOP_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.05


class SparkFailed(Exception):
    """Spark could not do its work; the message is one line, its log has the rest."""


def quiet_pyspark() -> None:
    """Errors are raised and told by who catches them; pyspark logs them as well, hundreds of lines of JSON each."""
    from pyspark.logger import PySparkLogger

    PySparkLogger.getLogger("DataFrameQueryContextLogger").setLevel(logging.CRITICAL)


def pyspark_home(extra: str = "spark") -> Path:
    """The installed pyspark, located without importing it. Raises StartupError, with our extra that has it."""
    spec = util.find_spec("pyspark")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(location) / "bin" / "spark-submit").is_file():
            return Path(location)
    raise _not_installed(extra)


def require_pyspark() -> None:
    """Raises StartupError where pyspark cannot be imported, be it pip's or that of spark-submit."""
    if util.find_spec("pyspark") is None:
        raise _not_installed("spark")


def _not_installed(extra: str) -> StartupError:
    return StartupError(f"PySpark is not installed: run `{install_command(extra)}`.")


class SparkDriver:
    """A JVM with Spark in it; `start` and `stop` block, so call them from a thread. Not reusable after `stop`.

    Scratch files and `spark.log` go to `work_dir`; downloads are kept in `cache_dir`. `settings` are Spark's own
    (`spark.driver.memory` and so on), in place of the defaults or besides them; one that is empty is left to Spark.
    On this machine Python workers run this interpreter, and they find this package. `short`: the job takes a minute.
    """

    def __init__(
        self,
        java: Java,
        work_dir: Path,
        *,
        app_name: str = "kproxy",
        master: str = LOCAL_MASTER,
        short: bool = True,
        cache_dir: Path | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.java = java
        self.master = master
        self._app_name = app_name
        self._short = short
        self._work_dir = work_dir
        self._settings = settings or {}
        self._cache_dir = cache_dir or user_cache_dir()
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
        """The JVM's exit status (negative: the signal) where it was gone before `stop` or `kill`; known after them."""
        return self._ended_by_itself

    def start(self, on_download: Callable[[int], None] = lambda count: None) -> None:
        """Launch the JVM and open the session. Raises SparkFailed, or StartupError where the user can do something.

        `on_download` hears how many jars were downloaded so far, if any had to be.
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
            # Left alone it is whichever python3 stands first in PATH.
            context.pythonExec = worker_python(os.environ, self.master) or context.pythonExec
            self._session = SparkSession(context)

    def _launch(self, on_download: Callable[[int], None]) -> tuple[int, str]:
        """Run Spark's own launcher until it has written where its JVM listens; that port and its secret."""
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
        """End the session and the JVM, politely first. Returns when no process of it is left; safe to repeat."""
        with contextlib.suppress(SparkFailed):
            if self._session is not None and not self._stopped:
                with as_spark_failure("Spark did not stop"):
                    self._session.stop()
                with as_spark_failure("Spark did not stop"):
                    self._gateway.shutdown()
        self._end(signal.SIGTERM)
        self._forget()

    def kill(self) -> None:
        """End the JVM at once, from any thread. Calls into it that are under way fail."""
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
            # Not yet waited for, so the group is still ours.
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
        """pyspark itself reads them too, SPARK_REMOTE among them, which turns every session into a remote one."""
        for name in foreign_variables(os.environ, self.master):
            self._hidden[name] = os.environ.pop(name)

    def _forget(self) -> None:
        """pyspark keeps its gateway for the life of the process; the next driver needs one of its own."""
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
    """py4j logs what it also raises, some of it on the root logger; a JVM we killed would fill the terminal."""
    return "py4j" not in Path(record.pathname).parts


@contextlib.contextmanager
def as_spark_failure(what: str) -> Iterator[None]:
    """py4j's and Spark's errors as SparkFailed, with the one line of what they say that tells the cause."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JError, PySparkException, OSError, EOFError) as error:
        raise SparkFailed(f"{what}: {cause_in(str(error)) or type(error).__name__}") from error


def cause_in(text: str) -> str:
    """Of an error with Java's stack trace in it the innermost cause, else what it says first; "" where it says nothing.

    Where the Python of Spark's workers is not what a job needs, the way out is told as well.
    """
    for pattern, sentence in _WORKERS_PYTHON:
        if found := re.search(pattern, text):
            return f"{sentence.format(found[1])}: {_NAME_A_PYTHON}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    if not causes and len(lines) > 1 and lines[0].startswith(_PY4J):
        # Which of Java's methods was called is of no use to anybody.
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
    """What to tell where Spark's `log` says that it gave up asking for a standalone cluster's master."""
    if "All masters are unresponsive" not in log:
        return None
    return StartupError(
        f"No Spark master answers at --master {master}: give the address that its own page shows, spark://HOST:PORT, "
        "of a cluster of the same version of Spark."
    )


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """The process's environment with `values`, for as long as pyspark looks there."""
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
