"""The flags with which `kproxy serve` is told what becomes of its audit trail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

_FLAGS = (
    click.option(
        "--audit-sink",
        metavar="none|topic[:NAME]|json:DIR|parquet:DIR",
        help="Where to ship the trail of what was acknowledged, for `kproxy pipeline audit`. [none]",
    ),
    click.option(
        "--audit-bootstrap",
        metavar="H:P[,H:P...]",
        help="For --audit-sink topic: some brokers of another cluster to ship to. [through this proxy itself]",
    ),
    click.option(
        "--audit-interval-s",
        metavar="SECONDS",
        type=float,
        help="How soon an acknowledgement is in the trail. [5]",
    ),
)


def audit_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds them."""
    for flag in reversed(_FLAGS):
        command = flag(command)
    return command
