"""`kproxy broker`: run one reference broker, for development and tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kproxy.broker.config import FLUSH_POLICIES
from kproxy.cli import run_async, start_logging, tell_of_exposed
from kproxy.cli.config_flags import config_flags
from kproxy.cli.options import flag, listener_tls_from, replication_tls_from
from kproxy.config import DEFAULT_PREFIX, advertised, parse_address, split_list
from kproxy.config.etcd import etcd_options_from
from kproxy.runtime.process import end_with_parent

# The variable of the key listen.admin in the configuration of `kproxy serve`.
ADMIN_VARIABLE = "KPROXY_LISTEN__ADMIN"


@click.command("broker", epilog="Prints one line when it serves: `ready kafka=H:P admin=H:P etcd=URL`.")
@flag("--node-id", "N", "The broker id, unique among live brokers.", type=int, required=True)
@flag("--listen", "H:P", "Where clients connect.", default="127.0.0.1:0")
@flag("--advertise", "H:P", "The address announced to clients. [as --listen]")
@config_flags("tls")
@flag(
    "--replication-listen",
    "H:P",
    "Where other brokers connect to replicate, at the host of --advertise. [the host of --listen, any free port]",
)
@flag(
    "--replication-tls-cert",
    "FILE",
    "TLS between brokers, on all of them: this broker's certificate, with its chain. [none]",
)
@flag("--replication-tls-key", "FILE", "The private key of --replication-tls-cert.")
@flag("--replication-tls-ca", "FILE", "The CA certificates that sign the certificates of all brokers.")
@flag("--data-dir", "DIR", "The directory of its logs.", type=click.Path(path_type=Path), required=True)
@flag("--etcd", "URL[,URL...]", "The etcd that holds the partition leases.", required=True)
@config_flags("etcd")
@flag(
    "--admin",
    "H:P",
    f"Where to serve the admin page: /metrics, /livez, /readyz. [${ADMIN_VARIABLE}, else none]",
    envvar=ADMIN_VARIABLE,
)
@flag("--prefix", None, "The prefix of the keys in etcd.", default=DEFAULT_PREFIX)
@flag(
    "--lease-ttl lease_ttl_s",
    "SECONDS",
    "How long a dead broker keeps its partitions.",
    type=click.IntRange(1, 3600),
    default=10,
)
@flag(
    "--replication-factor default_replication_factor",
    "N",
    "Copies of each partition of topics created without a number; as many as brokers live, where fewer do.",
    type=click.IntRange(1, 1000),
    default=3,
)
@flag(
    "--min-insync-replicas",
    "N",
    "Least in-sync replicas for acks=all, for topics without a setting of their own. [2 of 3 and more, else 1]",
    type=click.IntRange(1, 1000),
)
@flag(
    "--isr-lag isr_lag_s",
    "SECONDS",
    "How long a replica may lag before it counts as out of sync.",
    type=click.FloatRange(0.5, 3600),
    default=10.0,
)
@flag(
    "--follower-grace follower_grace_s",
    "SECONDS",
    "How long a disconnected replica stays in sync, where enough others are in sync.",
    type=click.FloatRange(0, 3600),
    default=0.5,
)
@flag(
    "--flush",
    None,
    "When to flush appended records to disk: before the acknowledgement, every second, or when the system decides.",
    type=click.Choice(FLUSH_POLICIES),
    default="interval",
)
@flag(
    "--retention-ms",
    "MS",
    "Remove records older than this; -1 keeps them. A topic's setting takes precedence.",
    type=click.IntRange(-1),
    default=-1,
)
@flag(
    "--retention-bytes",
    "BYTES",
    "The least size that a partition keeps; older records beyond it are removed, -1 keeps them. A topic's "
    "setting takes precedence.",
    type=click.IntRange(-1),
    default=-1,
)
@click.pass_context
def command(
    context: click.Context,
    /,
    listen: str,
    advertise: str | None,
    replication_listen: str | None,
    etcd: str,
    admin: str | None,
    **given: Any,
) -> int:
    """Run one reference broker, for development and tests.

    The broker keeps partitions on disk and holds them by leases in etcd. It is not a production store: Apache Kafka and
    KafScale are. `kproxy dev` starts three such brokers.

    \b
      kproxy broker --node-id 1 --data-dir /tmp/broker-1 --etcd http://127.0.0.1:2379
    """
    start_logging(context)
    address = parse_address(listen, "--listen")
    told = advertised(address, None if advertise is None else parse_address(advertise, "--advertise"))
    followers_address = parse_address(replication_listen, "--replication-listen") if replication_listen else None
    endpoints = split_list(etcd, "--etcd")
    options = etcd_options_from({name: given.pop(name) for name in list(given) if name.startswith("etcd_")})
    client_tls = listener_tls_from({name: given.pop(name) for name in list(given) if name.startswith("tls_")})
    replication_tls = replication_tls_from(
        {name: given.pop(name) for name in list(given) if name.startswith("replication_tls_")}
    )
    tell_of_exposed(
        [
            ("--tls-key", client_tls.key if client_tls is not None else None),
            ("--replication-tls-key", replication_tls.key if replication_tls is not None else None),
            ("--etcd-key", options.key),
            ("--etcd-password-file", options.password_file),
        ]
    )
    from kproxy.broker.server import BrokerConfig, run_broker

    end_with_parent()
    config = BrokerConfig(
        etcd=endpoints,
        etcd_options=options,
        listen=address,
        advertise=told,
        replication_listen=followers_address,
        tls=client_tls,
        replication_tls=replication_tls,
        admin=parse_address(admin, "--admin") if admin else None,
        **given,
    )
    return run_async(lambda: run_broker(config))
