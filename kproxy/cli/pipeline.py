"""`kproxy pipeline`: the jobs on Spark. Each module named here is one, imported only when it runs."""

from __future__ import annotations

import click

from kproxy.cli import LazyGroup

COMMANDS = {
    "ingest": ("kproxy.cli.pipeline_ingest", "Write files, a topic or a counter to a topic, through the proxy."),
    "audit": ("kproxy.cli.pipeline_audit", "Check that what was acknowledged is in the logs."),
    "path": ("kproxy.cli.pipeline_path", "Print the file to give to spark-submit."),
}


class _Jobs(LazyGroup):
    commands_by_name = COMMANDS


@click.command("pipeline", cls=_Jobs)
def command() -> None:
    """Jobs on Spark: bring data in, and audit what was acknowledged.

    They start a Spark of their own on this machine, or on a cluster with --master; or spark-submit starts them there:

    \b
      kproxy pipeline audit --bootstrap 127.0.0.1:9092
      kproxy pipeline audit --bootstrap 127.0.0.1:9092 --master spark://spark:7077 --output /mnt/shared/audit
      spark-submit --master yarn $(kproxy pipeline path) audit --bootstrap 127.0.0.1:9092 --output hdfs:///audit

    Need Java 17 or 21, and the extra `spark`: docs/install.md.
    """
