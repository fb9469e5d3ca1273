"""`kproxy dev`: run etcd, reference brokers and the proxy on this machine."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kproxy.cli import run_async, start_logging
from kproxy.cli.config_flags import config_flags
from kproxy.cli.options import flag
from kproxy.config import DEFAULT_ADMIN, DEFAULT_LISTEN, Limits
from kproxy.runtime.process import end_with_parent, raise_open_file_limit
from kproxy.runtime.signals import stop_signals

if TYPE_CHECKING:
    from kproxy.dev.cluster import DevCluster


@click.command(
    "dev",
    epilog="Prints one line on stdout when everything is ready: `ready kafka=H:P admin=H:P etcd=URL`. "
    "Ctrl-C stops everything.",
)
@flag("--listen", "H:P", "Where clients connect.", default=DEFAULT_LISTEN)
@flag("--brokers", "N", "The number of reference brokers.", type=int, default=3)
@flag(
    "--replication-factor",
    "N",
    "Replicas of each partition of a new topic. [3, or one for each broker if fewer]",
    type=int,
)
@flag(
    "--data-dir",
    "DIR",
    "The data directory for topics and records. [in your home directory; printed at the start]",
    type=click.Path(path_type=Path),
)
@flag("--admin", "H:P", "The listen address of the admin page.", default=DEFAULT_ADMIN)
@flag(
    "--lease-ttl", "SECONDS", "How long a dead broker keeps its partitions.", type=click.IntRange(1, 3600), default=10
)
@config_flags("own")
@click.option("--no-restart", is_flag=True, help="Do not restart brokers or etcd when they end; end with the proxy.")
@click.option("--no-audit", is_flag=True, help="Write no audit trail to the topic __kproxy_audit.")
@click.pass_context
def command(
    context: click.Context,
    listen: str,
    brokers: int,
    replication_factor: int | None,
    data_dir: Path | None,
    admin: str,
    lease_ttl: int,
    writer_group: list[str] | None,
    no_restart: bool,
    no_audit: bool,
) -> int:
    """Run everything on this machine: etcd, reference brokers and the proxy.

    Topics are created when first written to. They and their records are kept for the next start. Kill any process by
    its pid: the others continue, and `kproxy dev` reports and restarts the dead process.

    \b
      kproxy dev
      kproxy dev --listen 127.0.0.1:0 --admin 127.0.0.1:0 --brokers 5 --data-dir /tmp/kproxy
      kproxy dev --writer-group orders=writers
    """
    # The cluster's processes log to files of their own.
    start_logging(context, default="warning")
    max_connections = _max_connections(raise_open_file_limit())
    from kproxy.dev.cluster import DEFAULT_REPLICATION_FACTOR, DevCluster, default_data_dir

    end_with_parent()
    directory = data_dir or default_data_dir()
    cluster = DevCluster(
        directory,
        brokers=brokers,
        replication_factor=replication_factor,
        listen=listen,
        admin=admin,
        lease_ttl_s=lease_ttl,
        writer_groups=writer_group or (),
        audit=not no_audit,
        max_connections=max_connections,
        on_step=lambda part: _say(f"  {part}"),
    )
    _say(f"kproxy dev: data in {directory}")
    if replication_factor is None and cluster.replication_factor < DEFAULT_REPLICATION_FACTOR:
        _say(
            f"  replicas  {cluster.replication_factor} of each new partition, not {DEFAULT_REPLICATION_FACTOR}: "
            f"there {'is 1 broker' if brokers == 1 else f'are {brokers} brokers'}."
        )
    # asyncio's own loop is fast enough here.
    return run_async(lambda: _run(cluster, restart=not no_restart), uvloop_wanted=False)


def _max_connections(open_files: int | None) -> int | None:
    """Return the number of clients that the limit of open files allows, at most the default; None without a limit."""
    from kproxy.proxy.descriptors import most_clients

    return None if open_files is None else max(1, min(most_clients(open_files), Limits().max_connections))


async def _run(cluster: DevCluster, *, restart: bool) -> int:
    from kproxy.dev.cluster import ChildEnded

    stop = asyncio.Event()
    with stop_signals(stop.set, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)):
        stopping = asyncio.ensure_future(stop.wait())
        running = asyncio.ensure_future(_start_and_keep(cluster, restart=restart))
        try:
            await asyncio.wait((stopping, running), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running
            _say("\nkproxy dev: stopping the proxy, the brokers, etcd")
            return 0
        except ChildEnded as error:
            for line in error.last_lines:
                _say(f"  | {line}")
            _say(f"kproxy dev: {error}: stopping the rest")
            return 1
        finally:
            for task in (stopping, running):
                task.cancel()
            await asyncio.gather(stopping, running, return_exceptions=True)
            await cluster.stop()


async def _start_and_keep(cluster: DevCluster, *, restart: bool) -> None:
    """Start the cluster and keep it running. Raises ChildEnded when the cluster can no longer serve."""
    from kproxy.dev.restarter import Restarter

    await cluster.start()
    _say(f"Point any Kafka client at {cluster.kafka}. `kproxy table --admin {cluster.admin}` shows who owns what.")
    _say(f"See it at http://{cluster.admin}/")
    _say("Ctrl-C stops everything; topics and records stay.")
    sys.stdout.write(f"ready kafka={cluster.kafka} admin={cluster.admin} etcd={cluster.etcd}\n")
    sys.stdout.flush()
    await Restarter(cluster, lambda line: _say(f"kproxy dev: {line}"), restart=restart).keep()


def _say(line: str) -> None:
    click.echo(line, err=True)
