"""`kproxy completion`: what has a shell complete commands and flags."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print what has SHELL complete kproxy's commands and flags.

    \b
      kproxy completion bash > ~/.local/share/bash-completion/completions/kproxy
      kproxy completion zsh > "${fpath[1]}/_kproxy"
      kproxy completion fish > ~/.config/fish/completions/kproxy.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"click completes nothing in {shell}")
    click.echo(kind(context.find_root().command, {}, "kproxy", "_KPROXY_COMPLETE").source())
