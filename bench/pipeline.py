"""`make bench SECTION=pipeline`: the throughput of jobs on Spark through the proxy, and the cost of its audit trail.

The trail's share of a produce request's CPU (`bench.pipeline_trail`), Spark's Kafka sink through the proxy and past it
(`bench.pipeline_sink`), and an audit of ten million ranges (`bench.pipeline_audit`).
"""

from __future__ import annotations

from rich.console import Console

from bench.pipeline_audit import RANGES, audit
from bench.pipeline_sink import sink
from bench.pipeline_trail import trail
from bench.processes import scratch


def pipeline(console: Console, ranges: int = RANGES) -> None:
    """Measure, and print the tables; `ranges` is the number of ranges for the audit.

    Raise StartupError if Java, Spark, etcd or one of Kafka's jars is missing.
    """
    trail(console)
    sink(console)
    with scratch() as (_, directory):
        audit(console, directory, ranges)
