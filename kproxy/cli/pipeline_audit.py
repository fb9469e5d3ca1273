"""`kproxy pipeline audit`: compare the proxies' audit trails with the brokers' logs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kproxy.cli import start_logging, tell_unexpected
from kproxy.cli.options import Asked, bootstrap_option, file_flag, flag
from kproxy.cli.pipeline import check_master, kafka_flags, kafka_options, session_options, spark_flags
from kproxy.config.parsing import parse_duration_ms, parse_time_ms
from kproxy.errors import StartupError


@click.command(
    "audit",
    epilog="Exit status 0 when all is proven, 1 when records are lost, duplicated, corrupt or overlapped, 2 when there"
    " is no verdict, 3 when something is unproven (with --allow-unproven 0).",
)
@bootstrap_option("The cluster with the logs: a kproxy, or brokers.")
@flag(
    "--trail",
    "PLACE",
    "The place of the proxies' trails: topic, topic:NAME, json:DIR or parquet:DIR.",
    default="topic",
)
@flag("--trail-bootstrap", "H:P[,H:P...]", "The cluster with the trail's topic. [--bootstrap]")
@file_flag(
    "--trail-key trail_keys",
    "Read only rows that are signed with the key in this file (audit.key_file). [all rows]",
    multiple=True,
)
@flag("--topics", "NAME[,NAME...]", "Only these topics. [all topics in the trail]")
@flag(
    "--deleted-topic deleted_topics",
    "NAME",
    "A topic that was deleted on purpose: its acknowledged records are not lost.",
    multiple=True,
)
@flag("--from from_time", "TIME", "The start time: 2026-11-21T20:00 (UTC), or 2h for 2 h ago.")
@flag("--to to_time", "TIME", "The end time. [as far as the trails are complete]")
@flag("--window", "DURATION", "The length of a time window.", default="10s")
@flag("--compacted", "NAME[,NAME...]", "Compacted topics. [as the brokers report]")
@flag("--output", "DIR", "The directory for the results, as Parquet.")
@file_flag("--report", "Write an HTML report to this file.")
@click.option("--json", is_flag=True, help="Print the result as JSON, without a table.")
@file_flag("--metrics", "Write metrics to this file, for a textfile collector of Prometheus.")
@click.option("--allow-unproven", is_flag=True, help="End with 0 if nothing is wrong and something is unproven.")
@flag(
    "--engine",
    None,
    "Where to judge: in this process, on Spark, or here as long as it fits (300,000 batches).",
    type=click.Choice(("auto", "local", "spark")),
    default="auto",
)
@click.option("--follow", is_flag=True, help="Audit new rows continuously, until interrupted.")
@file_flag("--state", "With --follow: the file that lets a later start continue.")
@flag("--every", "DURATION", "With --follow: the interval between rounds.", default="5s")
@flag(
    "--horizon",
    "DURATION",
    "With --follow: the longest time between two assignments of one offset that are found.",
    default="10m",
)
@kafka_flags("An option of Kafka's clients, for both clusters.")
@spark_flags
@click.pass_context
def command(
    context: click.Context,
    /,
    bootstrap: Asked,
    trail: str,
    trail_keys: Sequence[Path],
    topics: str | None,
    from_time: str | None,
    to_time: str | None,
    window: str,
    compacted: str | None,
    output: str | None,
    follow: bool,
    state: Path | None,
    every: str,
    horizon: str,
    kafka_option: Sequence[str],
    command_config: Path | None,
    **given: Any,
) -> int:
    """Check that every acknowledged record is in its topic, at one offset, and once if its producer is idempotent.

    Proxies with an audit sink record their acknowledgements in a trail (kproxy serve --audit-sink topic; dev does so by
    itself). The audit compares these trails with the batch headers of the logs: in this process, or on Spark if there
    is much to read. With --follow it keeps running, and reports faults within seconds.

    \b
      kproxy pipeline audit --bootstrap 127.0.0.1:9092 --report audit.html
      kproxy pipeline audit --bootstrap 127.0.0.1:9092 --trail json:/var/log/kproxy --from 2h
      kproxy pipeline audit --bootstrap 127.0.0.1:9092 --follow --state audit.state
      spark-submit --master yarn $(kproxy pipeline path) audit --bootstrap 127.0.0.1:9092 --output hdfs:///audits/today
    """
    start_logging(context, default="warning")
    from kproxy.pipeline.audit.log_client import LogReadFailed
    from kproxy.pipeline.audit.run import NO_VERDICT, AuditJob, run_audit_job
    from kproxy.pipeline.audit.trail_place import parse_trail
    from kproxy.pipeline.spark import SparkFailed

    spark_flags_given = {name: given.pop(name) for name in ("master", "memory", "conf")}
    bootstrap.addresses()
    now_ms = time.time_ns() // 1_000_000
    from_ms = None if from_time is None else parse_time_ms(from_time, "--from", now_ms)
    if from_ms is not None and from_ms > now_ms:
        raise StartupError(f"--from {from_time} is in the future (times are in UTC): give an earlier time.")
    place = parse_trail(trail, trail_keys)
    job = AuditJob(
        bootstrap=bootstrap.text,
        trail=place,
        topics=_names(topics),
        from_ms=from_ms,
        to_ms=None if to_time is None else parse_time_ms(to_time, "--to", now_ms),
        window_ms=parse_duration_ms(window, "--window"),
        compacted=None if compacted is None else _names(compacted),
        output=output,
        kafka=kafka_options(kafka_option, command_config),
        **given,
    )
    spark = session_options("kproxy audit", **spark_flags_given, kafka=False)
    check_master(spark)
    if follow and spark.master is not None:
        raise StartupError("--follow reads files of this machine in this process: omit --master.")
    if state is not None and not follow:
        raise StartupError("--state applies only with --follow: an audit without --follow reads everything.")
    try:
        if not follow:
            return run_audit_job(job, spark)
        from kproxy.pipeline.audit.follow import FollowOptions, run_follow_job

        every_ms, horizon_ms = parse_duration_ms(every, "--every"), parse_duration_ms(horizon, "--horizon")
        return run_follow_job(job, FollowOptions(state, every_ms, horizon_ms))
    except (SparkFailed, LogReadFailed) as error:
        click.echo(f"kproxy: {str(error).rstrip('.')}.", err=True)
        return NO_VERDICT
    except StartupError:
        raise
    except Exception as error:  # noqa: BLE001 - status 1 would mean that records are lost
        tell_unexpected(error)
        return NO_VERDICT


def _names(names: str | None) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in (names or "").split(","))))
