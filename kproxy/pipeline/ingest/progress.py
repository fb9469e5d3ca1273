"""Report an ingest job: its progress line, summary and metrics.

The job has a metrics endpoint of its own, as no proxy runs in its process.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from typing import Final

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge, Histogram, start_http_server

from kproxy.address import Address
from kproxy.config import parse_address
from kproxy.errors import StartupError
from kproxy.pipeline.ingest.options import IngestOptions
from kproxy.pipeline.ingest.sink import BatchDone
from kproxy.pipeline.ingest.sources import Backlog
from kproxy.pipeline.ingest.transforms import REASONS
from kproxy.pipeline.progress import Report

# Without a terminal, at most one line in this time.
LINE_EVERY_S: Final = 2.0
# The least time that a rate is computed over.
_LEAST_RATE_S: Final = 0.05
_BUCKETS: Final = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    """The job's metrics; `registry` is served."""

    def __init__(self) -> None:
        self.registry = of = CollectorRegistry()
        name = "kproxy_ingest"
        self.rows = prometheus_client.Counter(f"{name}_rows", "Rows written to their topic.", registry=of)
        self.dead = prometheus_client.Counter(
            f"{name}_dead_letters", "Rows that could not be written.", ["reason"], registry=of
        )
        self.seconds = Histogram(
            f"{name}_micro_batch_seconds", "What micro-batches took to write.", buckets=_BUCKETS, registry=of
        )
        self.batch = Gauge(f"{name}_micro_batch", "Number of the last one that was written.", registry=of)
        self.last = Gauge(f"{name}_last_micro_batch_timestamp_seconds", "When that was.", registry=of)
        self.behind = Gauge(f"{name}_behind", "What is still to be read, in files or records.", ["unit"], registry=of)
        for reason in REASONS:
            self.dead.labels(reason)


class Tally:
    """Counts since the start, also for `metrics`. Spark's threads write them and ours reads them, each whole."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.written = 0
        self.batches = 0
        self.last: BatchDone | None = None
        self.dead: Counter[str] = Counter()
        # The backlog of some seconds ago.
        self.behind: Backlog | None = None

    def left(self, behind: Backlog | None) -> None:
        """Record the backlog, unless it was not counted."""
        if behind is not None:
            self.behind = behind
            self._metrics.behind.labels(behind.unit).set(behind.left)

    def done(self, batch: BatchDone) -> None:
        self.written += batch.written
        self.batches += 1
        self.dead = self.dead + Counter(batch.dead)
        self.last = batch
        self._metrics.rows.inc(batch.written)
        for reason, count in batch.dead.items():
            self._metrics.dead.labels(reason).inc(count)
        self._metrics.seconds.observe(batch.seconds)
        self._metrics.batch.set(batch.batch)
        self._metrics.last.set(time.time())

    def line(self) -> str:
        """Describe the progress in one line."""
        if self.last is None:
            return "first micro-batch"
        rate = self.last.written / max(self.last.seconds, _LEAST_RATE_S)
        parts = [f"micro-batch {self.last.batch}", _many(self.written, "row"), f"{rate:,.0f} rows/s"]
        if self.behind is not None:
            parts.append(f"{_many(self.behind.left, self.behind.unit.removesuffix('s'))} left")
        if self.dead:
            parts.append(_many(self.dead.total(), "dead letter"))
        return " · ".join(parts)

    def summary(self, options: IngestOptions) -> str:
        """Summarize the finished job in sentences."""
        done = f"Wrote {_many(self.written, 'row')} to {options.target} in {_many(self.batches, 'micro-batch')}."
        if not self.dead:
            return done
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.dead.items()))
        return f"{done}\n{_many(self.dead.total(), 'dead letter')} ({reasons}) went to {options.dead_letters}."


class Display:
    """The job's progress line; `update` refreshes it."""

    def __init__(self, report: Report, tally: Tally) -> None:
        self._tally = tally
        self._stage = report.stage("ingest", tally.line())
        self._on_terminal = not report.bars.disable
        self._told = 0
        self._next = 0.0

    def update(self) -> None:
        if self._on_terminal:
            self._stage.say(self._tally.line())
        elif self._tally.batches > self._told and time.monotonic() >= self._next:
            self._told, self._next = self._tally.batches, time.monotonic() + LINE_EVERY_S
            self._stage.tell(self._tally.line())

    def finish(self) -> None:
        self._stage.finish(f"{_many(self._tally.written, 'row')} in {_many(self._tally.batches, 'micro-batch')}")


def _many(count: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{count:,} {what if count == 1 else plural}"


@contextlib.contextmanager
def serving(metrics: Metrics, listen: str | None) -> Iterator[str]:
    """Serve the metrics at `listen` (`HOST:PORT`) while the block runs. Yield their URL, "" if `listen` is None."""
    if listen is None:
        yield ""
        return
    host, port = parse_address(listen, "--metrics")
    try:
        server, thread = start_http_server(port, host, metrics.registry)
    except OSError as error:
        raise StartupError(
            f"The job cannot listen on --metrics {listen} ({error.strerror}): give another address."
        ) from error
    try:
        yield f"http://{Address(host, server.server_port)}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
