"""`make bench SECTION=pipeline`: the throughput of jobs on Spark through the proxy, and the cost of its audit trail.

The trail's share of a produce request's CPU (`bench.pipeline_trail`), Spark's Kafka sink through the proxy and past it
(`bench.pipeline_sink`), and an audit of ten million ranges (`bench.pipeline_audit`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from bench.pipeline_audit import RANGES, audit
from bench.pipeline_sink import sink
from bench.pipeline_trail import trail
from kproxy.errors import StartupError


def pipeline(console: Console, ranges: int = RANGES) -> None:
    """Measure, and print the tables; `ranges` is the number of ranges for the audit.

    SystemExit if Java, Spark, etcd or one of Kafka's jars is missing.
    """
    try:
        trail(console)
        sink_alone(console)
        with tempfile.TemporaryDirectory(prefix="kproxy-bench-") as directory:
            audit(console, Path(directory), ranges)
    except StartupError as error:
        raise SystemExit(str(error)) from error


def trail_alone(console: Console) -> None:
    """Measure the audit trail (`make bench SECTION=trail`). SystemExit if there is no etcd."""
    try:
        trail(console)
    except StartupError as error:
        raise SystemExit(str(error)) from error


def sink_alone(console: Console) -> None:
    """Measure Spark's Kafka sink (`make bench SECTION=sink`). SystemExit as above."""
    try:
        with tempfile.TemporaryDirectory(prefix="kproxy-bench-") as directory:
            sink(console, Path(directory))
    except StartupError as error:
        raise SystemExit(str(error)) from error
