"""The flags with which every command that talks to etcd is told how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

# No password: what is on a command line, everybody on the machine can read.
_FLAGS = (
    click.option("--etcd-ca", metavar="FILE", help="For https: whose certificates etcd shows. [the machine's]"),
    click.option("--etcd-cert", metavar="FILE", help="For https: the certificate to show to etcd, with its chain."),
    click.option("--etcd-key", metavar="FILE", help="The private key of --etcd-cert."),
    click.option("--etcd-server-name", metavar="NAME", help="Whom etcd's certificates name. [the host in each URL]"),
    click.option("--etcd-username", metavar="NAME", help="Who to be in etcd. [nobody, or whom --etcd-cert names]"),
    click.option(
        "--etcd-password-file", metavar="FILE", help="The file of the password, or set KPROXY_ETCD__PASSWORD."
    ),
)


def etcd_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds them. What they are given as, `kproxy.config.etcd.etcd_options_from` takes."""
    for flag in reversed(_FLAGS):
        command = flag(command)
    return command
