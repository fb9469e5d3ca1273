"""Define the command line `kproxy`: its commands, its global options and its exit status.

The module of a command is imported only when the command runs, so that `kproxy --help` loads no Spark.

Exit status: 0 done, 1 failed after the start, 2 not started (a sentence on stderr names the remedy), 3 `kproxy own
claim` lost its claims or an audit leaves something unproven, 130 interrupted before the command started anything.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import click
from click.shell_completion import get_completion_class

from kproxy.errors import StartupError
from kproxy.runtime.interrupts import INTERRUPTED, hold_hangups, interruptible

# name -> module, or module:attribute if that is not `command`; and the line in `kproxy --help`
COMMANDS = {
    "serve": ("kproxy.cli.serve", "Run the proxy in front of existing brokers."),
    "broker": ("kproxy.cli.broker", "Run one reference broker, for development and tests."),
    "dev": ("kproxy.cli.dev", "Run etcd, brokers and the proxy on this machine."),
    "demo": ("kproxy.cli.demo", "Write real data through the proxy with Spark, read it back, check it."),
    "table": ("kproxy.cli.table", "Show which broker owns which partition."),
    "top": ("kproxy.cli.top", "Show brokers, partitions, clients and rates in the terminal, live."),
    "pipeline": ("kproxy.cli.pipeline", "Ingest data with Spark, or audit acknowledged records."),
    "own": ("kproxy.cli.own", "Show, take and free claims of the Own API."),
    "user": ("kproxy.cli.user", "Add, list and remove users who authenticate by SASL."),
    "acl": ("kproxy.cli.acl", "Test the rules of access, and change those in etcd."),
    "doctor": ("kproxy.cli.doctor", "Diagnose etcd, proxy and Kafka problems."),
    "check-config": ("kproxy.cli.check_config", "Check a configuration and show the values in force."),
    "completion": ("kproxy.cli:completion", "Print the completion script for bash, zsh or fish."),
}
# Commands started by other commands, not by users.
INTERNAL = {"worker": "kproxy.cli.serve:worker"}
# Commands without `run_async` that must stop what they have started even if they are interrupted early.
RUN_BY_THEMSELVES = ("demo", "pipeline")
# Commands that read their configuration again on SIGHUP, which never ends them.
RELOAD = ("serve", "worker")
SHELLS = ("bash", "zsh", "fish")
NEEDS_POSIX = ("serve", "broker", "dev", "demo", "pipeline")


class LazyGroup(click.Group):
    """Commands by name, from `commands_by_name` and `internal`.

    A module is imported when its command is used.
    """

    commands_by_name: ClassVar[Mapping[str, tuple[str, str]]] = {}
    internal: ClassVar[Mapping[str, str]] = {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands_by_name)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        modules = {name: module for name, (module, _) in self.commands_by_name.items()} | dict(self.internal)
        if cmd_name not in modules:
            return None
        module, _, attribute = modules[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute or "command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.commands_by_name.items()])


class _Commands(LazyGroup):
    commands_by_name = COMMANDS
    internal = INTERNAL

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # With `kproxy table | head` the reader ends first, which click treats as a failure. The rest of the buffer
            # must not be written again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 0


def _show_version(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from kproxy.installed import commit, version

        built = commit()
        click.echo(f"kproxy, version {version()}{f' ({built})' if built else ''}")
        context.exit()


@click.command(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with `kproxy dev`, then point any Kafka client at 127.0.0.1:9092.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and the commit, and exit.",
)
@click.option("--debug", is_flag=True, envvar="KPROXY_DEBUG", help="Show the traceback of an unexpected error.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    envvar="KPROXY_LOG_LEVEL",
    help="The least severe level to log, on stderr. [info; dev and demo: warning]",
)
@click.option(
    "--log-format",
    type=click.Choice(["json", "text"]),
    envvar="KPROXY_LOG_FORMAT",
    help="How to log. [text on a terminal, json elsewhere]",
)
@click.pass_context
def cli(context: click.Context, debug: bool, log_level: str | None, log_format: str | None) -> None:
    """A Kafka-protocol produce proxy: one address before many brokers.

    Any Kafka client uses the proxy as its only bootstrap server. The proxy learns from etcd, from Kafka or from a
    table which broker owns which partition, splits produce requests by owner, and answers as one broker.
    """
    if context.invoked_subcommand in RUN_BY_THEMSELVES:
        interruptible()
    if context.invoked_subcommand in RELOAD:
        hold_hangups()
    if context.invoked_subcommand in NEEDS_POSIX and sys.platform == "win32":
        raise StartupError(
            f"kproxy {context.invoked_subcommand} runs on Linux and macOS: on Windows run it in WSL 2 (wsl --install)."
        )


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script for SHELL.

    \b
      kproxy completion bash > ~/.local/share/bash-completion/completions/kproxy
      kproxy completion zsh > "${fpath[1]}/_kproxy"
      kproxy completion fish > ~/.config/fish/completions/kproxy.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"click has no completion for {shell}")
    click.echo(kind(context.find_root().command, {}, "kproxy", "_KPROXY_COMPLETE").source())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    try:
        result = cli.main(arguments, prog_name="kproxy", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except StartupError as error:
        sentence = str(error)
        click.echo(f"kproxy: {sentence if sentence.endswith(('.', '?', '!')) else f'{sentence}.'}", err=True)
        return 2
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the outermost boundary: a person reads it
        tell_unexpected(error, arguments)
        return 1


def tell_unexpected(error: Exception, arguments: Sequence[str] | None = None) -> None:
    """Print the error being handled, in one line or with its traceback."""
    if _wants_traceback(arguments):
        traceback.print_exception(error)
    else:
        click.echo(f"kproxy: unexpected {_named(error)} (--debug before the command shows the traceback).", err=True)


def _wants_traceback(arguments: Sequence[str] | None) -> bool:
    given = sys.argv[1:] if arguments is None else arguments
    return "--debug" in given or os.environ.get("KPROXY_DEBUG", "").lower() not in ("", "0", "false", "no", "off")


def _named(error: BaseException) -> str:
    """Return an error in one line; for a group, its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def run_async(make: Callable[[], Coroutine[Any, Any, int | None]], *, uvloop_wanted: bool = True) -> int:
    """Run `make()` to its end, on uvloop if installed.

    Return its exit status, 0 for None.
    """
    import asyncio

    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if uvloop_wanted:
        try:
            import uvloop
        except ImportError:
            # uvloop does not support this platform; asyncio's own loop works too, but is slower.
            pass
        else:
            factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.get_loop()
        # Before this an interrupt ends the process at once; from here on it cancels the coroutine.
        interruptible()
        return runner.run(make()) or 0


def start_logging(context: click.Context, default: str = "info") -> None:
    """Configure logging by `--log-level` and `--log-format`; serving commands call it first."""
    from kproxy.observe.logging import configure_logging

    given = context.find_root().params
    configure_logging(given["log_level"] or default, given["log_format"])


def tell_of_exposed(secrets: Iterable[tuple[str, Path | None]]) -> None:
    """Log the files with secrets that others can read or change."""
    import structlog

    from kproxy.config.exposure import exposed

    for each in exposed(secrets):
        structlog.get_logger(__name__).warning(
            "others can read a secret",
            secret=each.what,
            file=str(each.file),
            mode=f"{each.mode:04o}",
            advice=each.advice,
        )
