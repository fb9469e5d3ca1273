"""`kproxy worker`: one of the processes of `kproxy serve --workers N`, which starts it; nothing for people."""

from __future__ import annotations

import click
import structlog

from kproxy.cli import run_async, start_logging
from kproxy.runtime.process import end_with_parent, raise_open_file_limit


@click.command("worker")
@click.option("--number", type=int, required=True)
@click.option("--channel", type=int, required=True, help="The file descriptor of its end.")
@click.pass_context
def command(context: click.Context, number: int, channel: int) -> int:
    """Serve as `kproxy serve --workers` says, which starts this."""
    start_logging(context)
    raise_open_file_limit()
    structlog.contextvars.bind_contextvars(worker=number)
    from kproxy.workers.worker import run_worker

    end_with_parent(insist=True)
    return run_async(lambda: run_worker(channel))
