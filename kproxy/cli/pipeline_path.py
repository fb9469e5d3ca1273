"""`kproxy pipeline path`: what spark-submit is to be given."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import click

from kproxy.errors import StartupError


@click.command("path")
@click.option(
    "--py-files",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the archive that executors need to DIR, and print its path.",
)
def command(py_files: Path | None) -> None:
    """Print the file to give to spark-submit.

    Where spark-submit runs the job's driver on this machine the job hands its executors all they need of kproxy by
    itself. With --deploy-mode cluster the driver's machine must have kproxy installed.

    \b
      spark-submit $(kproxy pipeline path) ingest --help
      spark-submit --py-files $(kproxy pipeline path --py-files /tmp) $(kproxy pipeline path) audit ...
    """
    if py_files is None:
        click.echo(str(resources.files("kproxy.cli.submitted") / "kproxy_pipeline.py"))
        return
    from kproxy.pipeline.session import package_archive

    try:
        py_files.mkdir(parents=True, exist_ok=True)
        archive = package_archive(py_files)
    except OSError as error:
        raise StartupError(
            f"--py-files: nothing can be written to {py_files} ({error.strerror or error}): name another directory."
        ) from error
    click.echo(str(archive))
