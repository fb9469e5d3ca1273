"""Make flags for the keys of the configuration: all keys for `kproxy serve`, some sections for other commands.

A flag's name and type come from the key's section (`kproxy.config`); this module has the help texts, in the order of
`--help`. A key without a text has no flag. Secrets have none, as all users can read command lines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, get_args

import click
from msgspec import inspect

from kproxy.config import DEFAULT_LISTEN, DEFAULT_PREFIX
from kproxy.config.proxy import KEYS, flag_of

Command = Callable[..., Any]

_TEXTS: Final = {
    "listen.listen": ("H:P", f"Where clients connect; port 0: any free one. [{DEFAULT_LISTEN}]"),
    "listen.advertise": (
        "H:P",
        "The address announced to clients; of several listeners NAME=H:P[,NAME=H:P...]. [as --listen]",
    ),
    "ownership.ownership": ("etcd|kafka|static", "The ownership source. [etcd]"),
    "ownership.etcd": ("URL[,URL...]", "The etcd with the partition leases and the list of proxies."),
    "etcd.ca": ("FILE", "For https: the CA certificates that sign etcd's certificate. [the machine's]"),
    "etcd.cert": ("FILE", "For https: the client certificate for etcd, with its chain."),
    "etcd.key": ("FILE", "The private key of --etcd-cert."),
    "etcd.server_name": ("NAME", "The name in etcd's certificates. [the host in each URL]"),
    "etcd.username": ("NAME", "The etcd user. [none, or the name in --etcd-cert]"),
    "etcd.password_file": ("FILE", "The file with the password, or set KPROXY_ETCD__PASSWORD."),
    "ownership.prefix": (None, f"The prefix of the keys in etcd. [{DEFAULT_PREFIX}]"),
    "ownership.bootstrap": ("H:P[,H:P...]", "For --ownership kafka: some of the cluster's brokers."),
    "ownership.table": ("FILE", "For --ownership static: a TOML file with [brokers] and [[topics]]."),
    "fleet.alone": (None, "Name only this proxy to clients, not the others on the same etcd."),
    "fleet.lease_ttl": ("SECONDS", "How long clients still see a proxy that died. [10]"),
    "listen.admin": ("H:P", "Where to serve the admin page: /table, /metrics, /livez, /readyz. [none]"),
    "produce.confirm_acks0": (
        None,
        "Send acks=0 to brokers as acks=1, so that none is lost when owners change; clients still get no answer. [on]",
    ),
    "limits.drain_delay": (
        "SECONDS",
        "How long to keep serving after SIGTERM, while /readyz returns 503 and metadata names other proxies. [0]",
    ),
    "own.writer_group": (
        "TOPIC=GROUP",
        "Allow only claimants in this group (the Own API) to write to the topic. May be repeated. [any client writes]",
    ),
    "audit.sink": (
        "none|topic[:NAME]|json:DIR|parquet:DIR",
        "Where to ship the trail of acknowledged records, for `kproxy pipeline audit`. [none]",
    ),
    "audit.bootstrap": (
        "H:P[,H:P...]",
        "For --audit-sink topic: some brokers of another cluster to ship to. [through this proxy itself]",
    ),
    "audit.interval_s": ("SECONDS", "The longest time until an acknowledgement is in the trail. [5]"),
    "metrics.topics": ("N", "How many of the busiest topics have series of their own on /metrics. [0]"),
    "metrics.clients": ("N", "How many of the busiest clients have series of their own. [0]"),
    "tls.cert": ("FILE", "TLS for clients: the listener's certificate, with its chain. [none]"),
    "tls.key": ("FILE", "The private key of --tls-cert."),
    "tls.client_ca": ("FILE", "The CA certificates that sign clients' certificates. [none]"),
    "tls.client_auth": (
        "none|optional|required",
        "Whether clients show a certificate. [required with --tls-client-ca]",
    ),
    "tls.client_crl": ("FILE", "The revocation list of clients' certificates. [none]"),
    "listen.proxy_protocol": (None, "Expect the PROXY protocol, version 2, from a load balancer on every connection."),
    "broker_tls.enabled": (None, "Speak TLS to the brokers."),
    "broker_tls.ca": ("FILE", "The CA certificates that sign brokers' certificates. [the machine's]"),
    "broker_tls.cert": ("FILE", "The client certificate for brokers, with its chain. [none]"),
    "broker_tls.key": ("FILE", "The private key of --broker-tls-cert."),
    "broker_sasl.mechanism": (
        "PLAIN|SCRAM-SHA-256|SCRAM-SHA-512|OAUTHBEARER",
        "Authenticate to brokers as the proxy itself. [none]",
    ),
    "broker_sasl.username": ("NAME", "The proxy's user at the brokers."),
    "broker_sasl.password_file": ("FILE", "The file with its password, or set KPROXY_BROKER_SASL__PASSWORD."),
    "broker_sasl.token_file": ("FILE", "For OAUTHBEARER: the file with the token."),
    "listen.workers": ("N", "Processes that share the port; 0: one for each CPU. [1]"),
}
_NUMBERS: Final = {inspect.IntType: int, inspect.FloatType: float}


def config_flags(*sections: str) -> Callable[[Command], Command]:
    """Add the flags of these sections, or of all."""

    def add(command: Command) -> Command:
        for path in reversed(_TEXTS):
            if not sections or path.partition(".")[0] in sections:
                command = _flag(path)(command)
        return command

    return add


def _flag(path: str) -> Callable[[Command], Command]:
    (metavar, text), (kind, default) = _TEXTS[path], KEYS[path]
    name = flag_of(path).replace("_", "-")
    if kind is bool:
        names = f"--{name}/--no-{name}" if default else f"--{name}"
        return click.option(names, is_flag=True, default=None, help=text)
    if list[str] in get_args(kind):
        return click.option(f"--{name}", metavar=metavar, multiple=True, callback=_if_given, help=text)
    return click.option(f"--{name}", metavar=metavar, type=_NUMBERS.get(type(inspect.type_info(kind)), str), help=text)


def _if_given(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> list[str] | None:
    """Return None for a flag that is not given, like every other flag."""
    return list(values) or None
