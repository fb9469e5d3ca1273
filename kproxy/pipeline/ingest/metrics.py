"""What the job tells Prometheus: an endpoint of its own, as no proxy runs in this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from kproxy.config import parse_address
from kproxy.errors import StartupError
from kproxy.pipeline.ingest.behind import Behind
from kproxy.pipeline.ingest.sink import BatchDone
from kproxy.pipeline.ingest.transforms import REASONS


class Metrics:
    """Told of what was done; its `registry` is what is served."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._rows = Counter("kproxy_ingest_rows", "Rows written to their topic.", registry=self.registry)
        self._dead = Counter(
            "kproxy_ingest_dead_letters", "Rows that could not be written.", ["reason"], registry=self.registry
        )
        self._seconds = Histogram(
            "kproxy_ingest_micro_batch_seconds",
            "What micro-batches took to write.",
            buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
            registry=self.registry,
        )
        self._batch = Gauge(
            "kproxy_ingest_micro_batch", "Number of the last one that was written.", registry=self.registry
        )
        self._last = Gauge("kproxy_ingest_last_micro_batch_timestamp_seconds", "When that was.", registry=self.registry)
        self._behind = Gauge(
            "kproxy_ingest_behind", "What is still to be read, in files or records.", ["unit"], registry=self.registry
        )
        for reason in REASONS:
            self._dead.labels(reason)

    def done(self, batch: BatchDone) -> None:
        self._rows.inc(batch.written)
        for reason, count in batch.dead.items():
            self._dead.labels(reason).inc(count)
        self._seconds.observe(batch.seconds)
        self._batch.set(batch.batch)
        self._last.set(time.time())

    def behind(self, behind: Behind | None) -> None:
        if behind is not None:
            self._behind.labels(behind.unit).set(behind.left)


@contextlib.contextmanager
def serving(metrics: Metrics, listen: str | None) -> Iterator[int]:
    """Serve them at `listen` (`HOST:PORT`) until the block ends; the port, 0 where `listen` is None."""
    if listen is None:
        yield 0
        return
    address = parse_address(listen, "--metrics")
    try:
        server, thread = start_http_server(address.port, address.host, metrics.registry)
    except OSError as error:
        raise StartupError(
            f"--metrics {listen} cannot be listened on ({error.strerror}): give another address."
        ) from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
