"""`kproxy check-config`: is it right, and what is in force?"""

from __future__ import annotations

import json
from pathlib import Path

import click
from msgspec import UNSET

from kproxy.config import build_proxy_config, load_settings


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
    build_proxy_config(settings)
    room = ""
    for path, setting in settings.items():
        of_room, _, key = path.partition(".")
        if of_room != room:
            click.echo(f"{'' if not room else chr(10)}[{of_room}]")
            room = of_room
        if setting.value is UNSET:
            click.echo(f"# {key} is not set")
        else:
            # JSON's strings, numbers and lists are TOML's too.
            click.echo(f"{f'{key} = {json.dumps(setting.value)}':<48}# {setting.source}")
