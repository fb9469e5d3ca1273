"""The flag with which `kproxy serve` and `kproxy dev` are told which topics only owners write to."""

from __future__ import annotations

import click


def _given(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> list[str] | None:
    """None where it is not given, as with every other flag."""
    return list(values) or None


writer_group_flag = click.option(
    "--writer-group",
    metavar="TOPIC=GROUP",
    multiple=True,
    callback=_given,
    help="Let only those write to the topic who own what they write to, in this group (the Own API). May be repeated. "
    "[anybody writes]",
)
