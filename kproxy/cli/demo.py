"""`kproxy demo`: write real data through the proxy with Spark, read it back and check it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kproxy.cli import start_logging
from kproxy.cli.options import file_flag, flag
from kproxy.config import DEFAULT_PREFIX, split_list


@click.command(
    "demo",
    epilog="Exit status 0 when every row came back once and in order and the audit found no fault, 1 when not, 2 "
    "when the demo could not start.",
)
@flag("--rows", "N", "How many of the 336,776 flights. [all]", type=int)
@click.option(
    "--kill-owner",
    is_flag=True,
    help="Kill the broker that owns most partitions (kill -9) mid-stream, and restart it after the takeover.",
)
@click.option(
    "--tls", is_flag=True, help="Encrypt: Spark connects to the proxy by TLS, with certificates made for the run."
)
@click.option(
    "--sasl", is_flag=True, help="Authenticate: Spark logs in to the proxy by SCRAM, and an ACL allows its user."
)
@flag("--bootstrap", "H:P", "Use the running proxy at this address instead of starting one.")
@flag("--etcd", "URL[,URL...]", "With --bootstrap: the etcd with the partition leases, to report owners.")
@flag("--prefix", None, "With --etcd: the prefix of its keys.", default=DEFAULT_PREFIX)
@flag("--data-dir", "DIR", "The working directory. [a temporary directory]", type=click.Path(path_type=Path))
@file_flag("--report", "The file for the audit's report.", default=Path("kproxy-audit.html"))
@click.option("--no-audit", is_flag=True, help="Skip the audit of acknowledged records.")
@click.option("--keep", is_flag=True, help="Keep the run's data and logs. A failed run always keeps them.")
@click.pass_context
def command(context: click.Context, /, etcd: str | None, no_audit: bool, **given: Any) -> int:
    """Write real data with Spark through the proxy, read it back, judge it, audit it.

    Starts the processes of `kproxy dev`, on free ports. A Spark Structured Streaming job writes the flights that left
    New York in 2013 to Spark's own Kafka sink, which knows only the proxy's address; Spark's Kafka source reads them
    back. In the end the records that the proxy acknowledged, by its own audit trail, are looked up in the brokers'
    logs. Needs Java 17 or 21, and the extra `demo`: docs/install.md.

    \b
      kproxy demo
      kproxy demo --kill-owner
      kproxy demo --tls --sasl
      kproxy demo --rows 20000 --bootstrap 127.0.0.1:9092
    """
    start_logging(context, default="warning")
    from kproxy.demo.run import DemoOptions, run_demo

    endpoints = () if etcd is None else split_list(etcd, "--etcd")
    return run_demo(DemoOptions(etcd=endpoints, audit=not no_audit, **given))
