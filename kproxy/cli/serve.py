"""`kproxy serve`: run the proxy.

`kproxy worker`: run one process of `kproxy serve --workers N`, which starts this command.
"""

from __future__ import annotations

import contextlib
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import click

from kproxy.cli import run_async, start_logging, tell_of_exposed
from kproxy.cli.config_flags import config_flags
from kproxy.config import ProxyConfig, load_proxy_config
from kproxy.config.proxy import secret_files
from kproxy.errors import StartupError
from kproxy.runtime.process import PARENT_FD, ParentPipe, end_with_parent, raise_open_file_limit


@click.command(
    "serve",
    epilog="Prints one line when it serves: `ready kafka=H:P admin=H:P etcd=URL`. On SIGTERM and Ctrl-C it answers "
    "what it has read and ends; with --drain-delay it first serves on for that long, or until a second signal. On "
    "SIGHUP it reads the file again; the log names keys that need a restart.",
)
@click.option("--config", metavar="FILE", type=click.Path(path_type=Path), help="The TOML file with options.")
@config_flags()
@click.pass_context
def command(
    context: click.Context, /, config: Path | None, **flags: str | int | float | bool | list[str] | None
) -> int:
    """Run the proxy in front of existing brokers.

    Every option may also be in the file, and in the environment as KPROXY_SECTION__KEY. Flags override the environment,
    which overrides the file. `kproxy check-config` shows the options in force and their sources.

    \b
      kproxy serve --etcd http://127.0.0.1:2379
      kproxy serve --etcd https://etcd-0:2379,https://etcd-1:2379 --etcd-ca ca.pem
      kproxy serve --ownership kafka --bootstrap 10.0.0.1:9092,10.0.0.2:9092
      kproxy serve --ownership static --table owners.toml
      kproxy serve --etcd http://127.0.0.1:2379 --writer-group orders=writers
      kproxy serve --etcd http://127.0.0.1:2379 --audit-sink topic
      kproxy serve --config kproxy.toml --listen 0.0.0.0:9092 --advertise kafka.example.org:9092
    """
    from kproxy.observe.logging import set_level

    start_logging(context)
    raise_open_file_limit()
    options = load_proxy_config(config, flags={"log_level": context.find_root().params["log_level"], **flags})
    set_level(options.log_level)
    if options.given is not None:
        tell_of_exposed(secret_files(options, options.given.settings))
    end_with_parent()
    if options.workers > 1:
        return _serve_by_workers(context, options)
    from kproxy.proxy.run import run_proxy

    return run_async(lambda: run_proxy(options))


def _serve_by_workers(context: click.Context, options: ProxyConfig) -> int:
    from kproxy.workers.process import WorkerCommand
    from kproxy.workers.supervisor import run_workers

    given = context.find_root().params
    # -P: imports must not depend on the files in the working directory.
    arguments = [sys.executable, "-P", "-m", "kproxy"]
    arguments += ["--debug"] if given["debug"] else []
    for flag in ("log_level", "log_format"):
        arguments += [f"--{flag.replace('_', '-')}", given[flag]] if given[flag] else []
    with contextlib.ExitStack() as stack:
        parent = stack.enter_context(contextlib.closing(ParentPipe()))
        pages = Path(stack.enter_context(_private_directory())) if options.admin is not None else None
        launch = WorkerCommand((*arguments, "worker"), {PARENT_FD: str(parent.read_fd)}, (parent.read_fd,), pages)
        # asyncio's own loop is fast enough for the supervisor.
        return run_async(lambda: run_workers(options, launch), uvloop_wanted=False)


def _private_directory() -> AbstractContextManager[str]:
    """Make a directory that nobody else can enter. Raises StartupError."""
    import tempfile

    # The second place is writable even in a container whose root is read-only.
    for place in (None, "/dev/shm"):  # noqa: S108 -- the directory's name is random, and its mode 0700
        with contextlib.suppress(OSError):
            return tempfile.TemporaryDirectory(prefix="kproxy-", dir=place, ignore_cleanup_errors=True)
    raise StartupError("no directory is writable for the sockets of workers: name one in TMPDIR, or run 1 worker.")


@click.command("worker")
@click.option("--number", type=int, required=True)
@click.option("--channel", type=int, required=True, help="The file descriptor of its end.")
@click.option("--page", type=click.Path(path_type=Path), help="The socket of its admin page.")
@click.pass_context
def worker(context: click.Context, number: int, channel: int, page: Path | None) -> int:
    """Serve as a worker of `kproxy serve --workers`, which starts this command."""
    start_logging(context)
    raise_open_file_limit()
    import structlog

    from kproxy.workers.worker import run_worker

    structlog.contextvars.bind_contextvars(worker=number)

    end_with_parent(insist=True, remove=page.parent if page is not None else None)
    return run_async(lambda: run_worker(channel, page))
