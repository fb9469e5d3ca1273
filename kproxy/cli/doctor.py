"""`kproxy doctor`: diagnose etcd, a proxy, and Kafka as a client sees it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from kproxy.cli import run_async
from kproxy.cli.config_flags import config_flags
from kproxy.cli.options import (
    ADMIN_VARIABLE,
    AdminPlace,
    Asked,
    EtcdPlace,
    admin_option,
    admin_place,
    bootstrap_option,
    broker_auth,
    etcd_place,
)
from kproxy.config import DEFAULT_ADMIN, DEFAULT_PREFIX, Address
from kproxy.errors import StartupError

if TYPE_CHECKING:
    from kproxy.cli.doctor_checks import Finding
    from kproxy.security.broker_auth import BrokerAuth

PROBE_TOPIC = "kproxy-doctor"
_COLOURS = {"ok": "green", "warn": "yellow", "FAIL": "bold red"}


@click.command("doctor", epilog="Exit status: 0 when all checks pass, with or without warnings, 1 when a check fails.")
@bootstrap_option(
    "Check Kafka as a client: connect to every broker that metadata names, write a record and read it back.",
    default=None,
    otherwise="not checked",
)
@click.option("--topic", metavar="NAME", help=f"With --bootstrap: the topic for that record. [{PROBE_TOPIC}]")
@click.option("--no-write", is_flag=True, help="With --bootstrap: write no record and create no topic.")
@admin_option(
    "Check the proxy with this admin page.", default=None, otherwise=f"{DEFAULT_ADMIN} if nothing else is checked"
)
@click.option("--etcd", metavar="URL[,URL...]", help="Check each member of this etcd.")
@config_flags("etcd", "broker_tls", "broker_sasl")
@click.option("--prefix", default=DEFAULT_PREFIX, show_default=True, help="With --etcd: the prefix of the keys.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    bootstrap: Asked | None,
    topic: str | None,
    no_write: bool,
    admin: Asked | None,
    etcd: str | None,
    prefix: str,
    as_json: bool,
    **more: str | bool | None,
) -> int:
    """Diagnose etcd, proxy and Kafka problems.

    One line for each finding, which begins with `ok`, `warn` or `FAIL`. If a flag names a place, the places that the
    environment names are not checked.

    \b
      kproxy doctor
      kproxy doctor --bootstrap 127.0.0.1:9092
      kproxy doctor --bootstrap kafka.example.org:9093 --broker-tls-ca ca.pem
      kproxy doctor --etcd https://etcd-0:2379 --etcd-ca ca.pem
    """
    etcd_access = {key: str(value) for key, value in more.items() if key.startswith("etcd_") and value is not None}
    place = etcd_place(etcd, prefix, etcd_access)
    if place is not None or any(asked is not None and asked.rank == 2 for asked in (bootstrap, admin)):
        bootstrap, admin = (asked if asked and asked.rank == 2 else None for asked in (bootstrap, admin))
    if bootstrap is None and (topic is not None or no_write):
        flag = "--no-write" if topic is None else "--topic"
        raise StartupError(f"{flag} applies only with --bootstrap: give --bootstrap H:P as well.")
    if bootstrap is None and any(value is not None for key, value in more.items() if key.startswith("broker_")):
        raise StartupError("the flags --broker-... apply only with --bootstrap: give --bootstrap H:P as well.")
    access = broker_auth({key: value for key, value in more.items() if key.startswith("broker_")})
    of_page = {key: value for key, value in more.items() if key.startswith("admin_")}
    if admin is None and bootstrap is None and place is None:
        admin = Asked(DEFAULT_ADMIN, ADMIN_VARIABLE)
    if admin is None and any(value is not None for value in of_page.values()):
        raise StartupError("the flags --admin-... apply only with --admin: give --admin https://H:P as well.")
    page = admin_place(admin, of_page) if admin is not None else None
    brokers = bootstrap.addresses() if bootstrap is not None else ()
    written = None if no_write else topic or PROBE_TOPIC
    return run_async(lambda: _examine(place, page, brokers, written, access, as_json))


async def _examine(
    etcd: EtcdPlace | None,
    page: AdminPlace | None,
    brokers: Sequence[Address],
    topic: str | None,
    access: BrokerAuth,
    as_json: bool,
) -> int:
    from kproxy.cli.doctor_checks import (
        examine_etcd,
        examine_kafka,
        examine_proxy,
        replication_in_etcd,
        replication_of_proxy,
    )
    from kproxy.observe.logging import configure_logging

    configure_logging("error", "text")
    findings: list[Finding] = []

    def take(found: Sequence[Finding]) -> None:
        findings.extend(found)
        if not as_json:
            _show(found)

    if etcd is not None:
        take(await examine_etcd(*etcd))
        take(await replication_in_etcd(*etcd))
    if page is not None:
        take(await examine_proxy(page))
        take(await replication_of_proxy(page))
    if brokers:
        take(await examine_kafka(brokers, topic, access))
    failed = any(finding.mark == "FAIL" for finding in findings)
    if as_json:
        _show_json(findings, failed)
    return int(failed)


def _show(findings: Sequence[Finding]) -> None:
    """Print a line for each finding; on a terminal in two columns."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2, 0, 0))
        for finding in findings:
            grid.add_row(Text(f"{finding.mark:<4}", style=_COLOURS[finding.mark]), Text(finding.text))
        Console().print(grid)
        return
    for finding in findings:
        click.echo(f"{finding.mark:<4}  {finding.text}")
    sys.stdout.flush()


def _show_json(findings: Sequence[Finding], failed: bool) -> None:
    import msgspec

    told = [
        {"result": each.mark.lower(), "check": each.check, "at": each.at, "text": each.text, "facts": dict(each.facts)}
        for each in findings
    ]
    click.echo(msgspec.json.format(msgspec.json.encode({"ok": not failed, "findings": told}), indent=2).decode())
