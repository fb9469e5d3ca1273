"""`kproxy demo`: write real data through the proxy, and check it.

Spark's unchanged Kafka sink writes the data, which is then read back, judged and audited.

States: CHECKING (nothing started; StartupError leaves nothing behind) -> STARTING (cluster, Spark and data in parallel)
-> WRITING -> READING -> AUDITING -> DONE. From each of them a failure or a signal leads to STOPPING and out.

Invariants
1. When `run_demo` returns or raises, no process that it started is left: Spark's JVM ends first, as it is the cluster's
   client, then the cluster.
2. `run_demo` deletes only the directory that it made for the run, and keeps that on request and after a failure. The
   audit's report is in another place and stays.
3. The job knows one address, the proxy's. Only the number of rows by owner comes from etcd, after everything was
   judged, and with `kill_owner` the report of the kill.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from rich.console import Console

from kproxy.config import DEFAULT_PREFIX
from kproxy.config.audit import DEFAULT_TOPIC
from kproxy.demo import flights
from kproxy.demo.judge import Judge
from kproxy.demo.owner_kill import OwnerNotKilled, StreamGate, kill_owner, leases_in, owners_in
from kproxy.demo.report import DemoOutcome, KilledOwner, show
from kproxy.demo.secured import PLAIN, Secured, secure
from kproxy.dev.cluster import DEFAULT_LEASE_TTL_S, ChildEnded, DevCluster
from kproxy.errors import StartupError
from kproxy.etcd import EtcdClient, EtcdError
from kproxy.pipeline.audit.log_client import LogReadFailed
from kproxy.pipeline.audit.report_facts import Facts
from kproxy.pipeline.audit.report_gather import gather
from kproxy.pipeline.audit.report_html import write_report
from kproxy.pipeline.audit.run import AuditJob, audit_here
from kproxy.pipeline.audit.trail_place import TOPIC, TrailPlace
from kproxy.pipeline.java import find_java
from kproxy.pipeline.preflight import check_reachable, check_report
from kproxy.pipeline.progress import Report
from kproxy.pipeline.session import OpenSession, SessionOptions, open_session
from kproxy.pipeline.spark import SparkFailed, pyspark_home
from kproxy.runtime.tasks import cancel, unless_failed
from kproxy.trail.trail import LATE_S, LOOK_S

if TYPE_CHECKING:
    from kproxy.demo.stream import Written


PARTITIONS: Final = 12
# The driver and its tasks share the machine with the cluster they write to.
LOCAL_MASTER: Final = "local[2]"
# Few, because Spark plans each micro-batch of the demo for about a second; several, as order must hold across them.
MICRO_BATCHES: Final = 5
BROKERS: Final = 3
# With `kill_owner` the TTL is short, because no broker takes over before the killed broker's lease ends. It is long
# enough for renewals on a machine that Spark keeps busy.
KILL_LEASE_TTL_S: Final = 4
# With fewer rows the stream could end before the loss of a broker has any effect.
LEAST_ROWS_TO_KILL: Final = 1_000
INTERRUPTED: Final = 128 + signal.SIGINT
TERMINATED: Final = 128 + signal.SIGTERM

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of the demo; `rows` None means all.

    With `bootstrap` the demo uses a running cluster, and reads the owners from `etcd` (URLs). `kill_owner`: kill -9 the
    owner of most partitions in mid-stream, and restart it. `report`: the file for the audit's report, None for none; it
    needs `audit`. `tls`, `sasl`: clients of the demo's own proxy must use TLS or SASL.
    """

    rows: int | None = None
    bootstrap: str | None = None
    etcd: Sequence[str] = ()
    prefix: str = DEFAULT_PREFIX
    data_dir: Path | None = None
    keep: bool = False
    kill_owner: bool = False
    tls: bool = False
    sasl: bool = False
    audit: bool = True
    report: Path | None = None


class Target(NamedTuple):
    """The address for the job, the etcd with the owners (empty: owners not known), and the cluster if we started it."""

    bootstrap: str
    etcd: Sequence[str]
    prefix: str
    cluster: DevCluster | None
    secured: Secured = PLAIN


def run_demo(
    options: DemoOptions,
    *,
    report: Report | None = None,
    output: Console | None = None,
) -> int:
    """Run the demo.

    Return the exit status: 0 clean, 1 faults or failure, 130 and 143 when interrupted. Raise StartupError if it cannot
    start. The tables go to `output`, by default stdout.
    """
    archive = _check(options)
    check_report(options.report)
    report = report or Report()
    work_dir = _make_work_dir(options.data_dir)
    keep = options.keep
    try:
        with report:
            outcome = _run_until_signal(_Run(options, archive, work_dir, report))
        if isinstance(outcome, int):
            report.say("Stopped before the end; nothing is left running.")
            return outcome
        show(outcome, output)
        keep = keep or outcome.exit_status != 0
        if options.report is not None and outcome.audit is not None:
            report.say(f"The audit's report is {options.report.resolve()}")
        return outcome.exit_status
    except (SparkFailed, LogReadFailed, EtcdError, ChildEnded, OwnerNotKilled) as error:
        keep = True
        report.say(f"The demo failed: {error}")
        return 1
    except StartupError as error:
        # The error may refer to a log in that directory.
        keep = keep or str(work_dir) in str(error)
        raise
    finally:
        if keep:
            report.say(f"Its data and logs are in {work_dir}")
        else:
            shutil.rmtree(work_dir, ignore_errors=True)


def _check(options: DemoOptions) -> Path:
    """Check the options and that there is a Java before anything starts; locate the data. Raise StartupError."""
    if sys.platform == "win32":
        raise StartupError("kproxy demo runs on Linux and macOS: on Windows run it in WSL.")
    if options.rows is not None and not 1 <= options.rows <= flights.TOTAL_ROWS:
        raise StartupError(f"Invalid --rows {options.rows}; expected 1 to {flights.TOTAL_ROWS}.")
    if options.etcd and options.bootstrap is None:
        raise StartupError("--etcd only goes with --bootstrap: without it the demo starts its own etcd.")
    if options.kill_owner and options.bootstrap is not None:
        raise StartupError(
            "--kill-owner does not go with --bootstrap: the demo kills only brokers that it started itself; "
            "leave one of the two out."
        )
    if options.kill_owner and options.rows is not None and options.rows < LEAST_ROWS_TO_KILL:
        raise StartupError(
            f"--rows {options.rows} is too few for --kill-owner, which kills while rows are being written: "
            f"give at least {LEAST_ROWS_TO_KILL:,}."
        )
    if (options.tls or options.sasl) and options.bootstrap is not None:
        raise StartupError(
            "--tls and --sasl do not go with --bootstrap: they configure the proxy that the demo starts; "
            "leave them out."
        )
    pyspark_home(extra="demo")
    archive = flights.locate_archive()
    find_java()
    if options.bootstrap is not None:
        check_reachable(options.bootstrap, "--bootstrap", "start it (`kproxy dev`), or leave it out")
    return archive


def _make_work_dir(parent: Path | None) -> Path:
    try:
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="kproxy-demo-", dir=parent))
    except OSError as error:
        where = parent or tempfile.gettempdir()
        raise StartupError(
            f"No directory can be created in {where} ({error.strerror}): give another --data-dir."
        ) from error


def _run_until_signal(run: _Run) -> DemoOutcome | int:
    """Return the outcome, or the exit status of the signal that ended the run. The run is cleaned up either way."""
    terminated = False

    async def main() -> DemoOutcome:
        nonlocal terminated
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - we are in one

        def on_sigterm() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_sigterm)
        return await run.run()

    try:
        return asyncio.run(main())
    except KeyboardInterrupt:
        return INTERRUPTED
    except asyncio.CancelledError:
        if not terminated:
            raise
        return TERMINATED


class _Run:
    """One run, from STARTING to DONE. Spark's and other blocking calls run on its thread pool."""

    def __init__(self, options: DemoOptions, archive: Path, work_dir: Path, report: Report) -> None:
        self._options = options
        self._archive = archive
        self._work_dir = work_dir
        # Set by `_start_spark`; the stack holds it open.
        self._spark = OpenSession(None)
        self._session = ExitStack()
        self._report = report
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="demo")
        self._rows = options.rows or flights.TOTAL_ROWS
        self._topic = f"flights-{uuid.uuid4().hex[:8]}"

    async def run(self) -> DemoOutcome:
        began = time.monotonic()
        # Spark's JVM and the data need no cluster, so all three start in parallel.
        spark = self._call(self._start_spark)
        data = self._call(self._write_files)
        try:
            async with self._target() as target:
                try:
                    # If a process of the cluster ended, Spark would retry for minutes and then report another error.
                    cluster = None if target.cluster is None else target.cluster.wait()
                    outcome = await _while(cluster, self._job(target, data, spark, began))
                except SparkFailed as error:
                    # The session knows more about the failure.
                    await self._call(partial(self._session.__exit__, type(error), error, error.__traceback__))
                    raise
                except BaseException:
                    self._spark.kill()
                    raise
                await self._call(self._session.close)
                return outcome
        finally:
            self._stopping.set()
            # This ends the calls into Spark that threads still wait for, and does nothing if Spark was stopped already.
            self._spark.kill()
            await asyncio.gather(spark, data, return_exceptions=True)
            self._pool.shutdown(wait=True)
            self._session.close()

    def _call(self, blocking: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, blocking)

    @asynccontextmanager
    async def _target(self) -> AsyncIterator[Target]:
        if self._options.bootstrap is not None:
            yield Target(self._options.bootstrap, self._options.etcd, self._options.prefix, None)
            return
        stage = self._report.stage("cluster", f"starting etcd, {BROKERS} brokers and the proxy")
        kill_owner = self._options.kill_owner
        secured = secure(self._work_dir / "security", tls=self._options.tls, sasl=self._options.sasl)
        async with DevCluster(
            self._work_dir / "cluster",
            brokers=BROKERS,
            listen="127.0.0.1:0",
            lease_ttl_s=KILL_LEASE_TTL_S if kill_owner else DEFAULT_LEASE_TTL_S,
            proxy_config=secured.config,
            on_step=lambda step: stage.say(f"{' '.join(step.split())} is up"),
        ) as cluster:
            brokers = f"{BROKERS} brokers" + (f" with leases of {cluster.lease_ttl_s} s" if kill_owner else "")
            by = "" if secured.config is None else f" ({secured.protocol})"
            stage.finish(f"etcd, {brokers}, the proxy at {cluster.kafka}{by}")
            yield Target(cluster.kafka, [cluster.etcd], DEFAULT_PREFIX, cluster, secured)

    def _start_spark(self) -> None:
        stage = self._report.stage("Spark", "starting")
        options = SessionOptions("kproxy demo", master=LOCAL_MASTER, short=True, log_path=self._work_dir / "spark.log")
        self._spark = self._session.enter_context(open_session(options))
        java = self._spark.java
        on = "" if java is None else f" on Java {java.major} ({java.found_in})"
        stage.finish(f"version {self._spark.session.version}{on}")

    def _write_files(self) -> flights.Flights:
        stage = self._report.stage("data", "unpacking", total=self._rows)
        data = flights.write_files(
            self._archive,
            self._work_dir / "flights",
            rows=self._rows,
            files=MICRO_BATCHES,
            on_rows=stage.advance_to,
            stopping=self._stopping.is_set,
        )
        stage.finish(f"{data.rows:,} flights")
        return data

    async def _job(
        self, target: Target, written_files: asyncio.Future[flights.Flights], spark: asyncio.Future[None], began: float
    ) -> DemoOutcome:
        data = await written_files
        await spark
        written, killed = await self._write(target, data)
        # The trail dates an acknowledgement by the time of the periodic check that notes it.
        written_ms = time.time_ns() // 1_000_000 + round(1000 * (LOOK_S + LATE_S))

        # Imported here, as pyspark is missing without the demo's extra.
        from kproxy.demo import stream

        judge = Judge(data.fingerprints)
        reading = self._report.stage("judging", "reading back", total=data.rows)
        reading_s = await self._call(
            lambda: stream.read_back(
                self._spark.session,
                judge,
                bootstrap=target.bootstrap,
                topic=self._topic,
                on_rows=reading.advance_to,
                kafka=target.secured.kafka,
            )
        )
        reading.finish(f"{judge.read:,} rows")
        owners = None
        if target.etcd:
            owners = await partition_owners(target.etcd, target.prefix, self._topic)
        audit = None
        if self._options.audit:
            audit_call = partial(audit_demo, self._report, target, self._topic, written_ms, self._options.report)
            audit = await self._call(audit_call)
        return DemoOutcome(
            judge.verdict(sent=written.sent),
            owners,
            written.seconds,
            reading_s,
            time.monotonic() - began,
            written.micro_batches,
            killed,
            audit,
        )

    async def _write(self, target: Target, data: flights.Flights) -> tuple[Written, KilledOwner | None]:
        from kproxy.demo import stream

        stage = self._report.stage("writing", "planning", total=data.rows)
        gate = StreamGate(len(data.file_rows), asyncio.get_running_loop())
        to_kill = target.cluster if self._options.kill_owner else None
        if to_kill is None:
            gate.release()

        def on_rows(rows: int) -> None:
            stage.advance_to(rows)
            gate.advance_to(rows)

        async def until_written() -> Written:
            written = await self._call(
                lambda: stream.write(
                    self._spark.session,
                    data.directory,
                    bootstrap=target.bootstrap,
                    topic=self._topic,
                    partitions=PARTITIONS,
                    checkpoint=self._work_dir / "checkpoint",
                    on_rows=on_rows,
                    before_batch=gate.before_batch,
                    kafka=target.secured.kafka,
                )
            )
            stage.finish(f"{written.sent:,} rows")
            return written

        if to_kill is None:
            return await until_written(), None
        killing = asyncio.ensure_future(kill_owner(to_kill, target.prefix, self._topic, gate, self._report))
        try:
            return await unless_failed(until_written(), [killing]), await killing
        finally:
            await cancel(killing)


async def _while(running: Coroutine[object, object, object] | None, work: Coroutine[object, object, T]) -> T:
    """Return the result of `work`; if `running` fails first, cancel `work` and raise that error."""
    if running is None:
        return await work
    task = asyncio.ensure_future(running)
    try:
        return await unless_failed(work, [task])
    finally:
        await cancel(task)


async def partition_owners(endpoints: Sequence[str], prefix: str, topic: str) -> Mapping[int, int]:
    """Return the broker id by partition index, from the lease keys in etcd. Raise EtcdError."""
    client = EtcdClient(endpoints)
    await client.connect()
    try:
        return owners_in(await leases_in(client, prefix, topic))
    finally:
        await client.close()


# An idle proxy writes a mark at least every 10 s; a row is shipped within moments.
TRAIL_TIMEOUT_S: Final = 20.0
TRAIL_POLL_S: Final = 2.0


def audit_when_proven(job: AuditJob, timeout_s: float = TRAIL_TIMEOUT_S) -> Facts | None:
    """Repeat the audit until it has acknowledgements and no unproven time, or `timeout_s` is over; return its facts.

    None if there is no trail. Blocks. Raise LogReadFailed.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        facts = None
        # A proxy that ships nothing leaves no topic.
        with suppress(StartupError):
            audited = audit_here(job)
            facts = gather(audited.results, audited.about)
        is_complete = facts is not None and not (facts.verdict.unproven or facts.verdict.empty)
        if is_complete or time.monotonic() > deadline:
            return facts
        time.sleep(TRAIL_POLL_S)


def audit_demo(report: Report, target: Target, topic: str, written_ms: int, html: Path | None) -> Facts | None:
    """Audit the demo's topic up to `written_ms`, by when the trail had the last acknowledgement.

    Return None if the proxy's trail does not have the topic's records. Blocks. Raise LogReadFailed.
    """
    stage = report.stage("audit", "waiting for the last of the trail")
    facts = audit_when_proven(
        AuditJob(
            bootstrap=target.bootstrap,
            trail=TrailPlace(TOPIC, DEFAULT_TOPIC),
            topics=(topic,),
            to_ms=written_ms,
            window_ms=1_000,
            kafka=target.secured.kafka,
        )
    )
    if facts is None or facts.verdict.empty:
        stage.finish(f"the proxy ships no trail to the topic {DEFAULT_TOPIC}: no audit")
        return None
    stage.finish(f"{facts.sums.acked:,} acknowledged records")
    if html is not None:
        write_report(facts, html)
    return facts
