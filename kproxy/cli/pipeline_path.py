"""`kproxy pipeline path`: what spark-submit is to be given."""

from __future__ import annotations

from importlib import resources

import click


@click.command("path")
def command() -> None:
    """Print the file to give to spark-submit.

    \b
      spark-submit $(kproxy pipeline path) ingest --help
    """
    click.echo(str(resources.files("kproxy.cli.submitted") / "kproxy_pipeline.py"))
