"""`kproxy check-config`: is it right, and what is in force?"""

from __future__ import annotations

import json
from pathlib import Path

import click
from msgspec import UNSET

from kproxy.config import Owners, build_proxy_config, load_settings
from kproxy.config.etcd import SECRETS
from kproxy.config.owners import TABLE_ROOMS
from kproxy.config.proxy import OF_ONE_SOURCE


@click.command("check-config")
@click.option("--config", metavar="FILE", type=click.Path(path_type=Path), help="The TOML file. [environment alone]")
def command(config: Path | None) -> None:
    """Check a configuration and show what is in force.

    Reads the file and the environment as `kproxy serve` would and prints every option with where it comes from, as TOML
    that could be a file itself. Exit status 2, with one sentence, where `kproxy serve` would not take it.

    \b
      kproxy check-config --config kproxy.toml
    """
    settings = load_settings(config)
    owners = build_proxy_config(settings).owners
    room = ""
    for path, setting in settings.items():
        if path in TABLE_ROOMS:
            continue
        of_room, _, key = path.partition(".")
        if of_room != room:
            click.echo(f"{'' if not room else chr(10)}[{of_room}]")
            room = of_room
        if setting.value is UNSET:
            click.echo(f"# {key} is not set")
        elif path in SECRETS:
            click.echo(f"{f'# {key} is set and not shown':<48}# {setting.source}")
        elif OF_ONE_SOURCE.get(path, settings["ownership.ownership"].value) != settings["ownership.ownership"].value:
            click.echo(f"# {key} is for --ownership {OF_ONE_SOURCE[path]}")
        else:
            # JSON's strings, numbers and lists are TOML's too.
            click.echo(f"{f'{key} = {json.dumps(setting.value)}':<48}# {setting.source}")
    if owners is not None:
        inline = [settings[table].source for table in TABLE_ROOMS if table in settings]
        _echo_owners(owners, inline[0].partition(" in ")[2] if inline else "")


def _echo_owners(owners: Owners, file: str) -> None:
    """The static table; commented out where it stands in a file of its own, which the output names already."""
    mark = "" if file else "# "
    click.echo(f"\n{f'{mark}[brokers]':<48}# {file or 'in the table'}")
    for number, address in sorted(owners.brokers.items()):
        click.echo(f"{mark}{number} = {json.dumps(str(address))}")
    for topic in owners.topics:
        click.echo(f"\n{mark}[[topics]]\n{mark}name = {json.dumps(topic.name)}\n{mark}owners = {list(topic.owners)}")
