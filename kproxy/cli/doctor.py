"""`kproxy doctor`: is etcd fit for kproxy, and does a proxy serve?"""

from __future__ import annotations

import click

from kproxy.cli import run_async
from kproxy.cli.etcd_flags import etcd_flags
from kproxy.config import DEFAULT_ADMIN, DEFAULT_PREFIX, Address, parse_address, split_list
from kproxy.config.etcd import EtcdOptions, etcd_options_from
from kproxy.errors import StartupError


@click.command("doctor", epilog="Exit status: 0 where all is well or only warned of, 1 where something fails.")
@click.option("--etcd", metavar="URL[,URL...]", help="Look at this etcd, each member by itself.")
@etcd_flags
@click.option("--prefix", default=DEFAULT_PREFIX, show_default=True, help="With --etcd: the root of the keys.")
@click.option("--admin", metavar="H:P", help=f"Look at the proxy with this admin page. [{DEFAULT_ADMIN}, if no --etcd]")
def command(etcd: str | None, prefix: str, admin: str | None, **etcd_access: str | None) -> int:
    """Look at etcd and at a proxy, and say what is not as it should be.

    One line for each finding, which begins with `ok`, `warn` or `FAIL`.

    \b
      kproxy doctor
      kproxy doctor --etcd https://etcd-0:2379,https://etcd-1:2379 --etcd-ca ca.pem --admin 127.0.0.1:9644
    """
    if etcd is None and any(value is not None for value in etcd_access.values()):
        raise StartupError("the flags --etcd-... say how to ask etcd: name it with --etcd URL.")
    endpoints = () if etcd is None else split_list(etcd, "--etcd")
    options = EtcdOptions() if etcd is None else etcd_options_from(etcd_access)
    page = parse_address(admin or DEFAULT_ADMIN, "--admin") if admin is not None or not endpoints else None
    return run_async(lambda: _examine(endpoints, options, prefix, page))


async def _examine(endpoints: tuple[str, ...], options: EtcdOptions, prefix: str, page: Address | None) -> int:
    from kproxy.cli.doctor_checks import examine_etcd, examine_proxy
    from kproxy.observe.logging import configure_logging

    configure_logging("error")
    findings = await examine_etcd(endpoints, options, prefix) if endpoints else []
    findings += await examine_proxy(page) if page is not None else []
    for finding in findings:
        click.echo(f"{finding.mark:<4}  {finding.text}")
    return int(any(finding.mark == "FAIL" for finding in findings))
