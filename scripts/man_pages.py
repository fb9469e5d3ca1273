"""Write a man page for every command into docs/man, from its `--help`; `--check` only reports which pages differ."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from kproxy.cli import cli
from kproxy.installed import version

PAGES = Path(__file__).parents[1] / "docs" / "man"
# click's mark of a paragraph that keeps its line breaks.
AS_IT_STANDS = "\b"


def commands(command: click.Command, context: click.Context) -> Iterator[click.Context]:
    """Yield every visible command, from the top."""
    yield context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from commands(below, click.Context(below, parent=context, info_name=name))


def escaped(text: str) -> str:
    """Return one line of roff with exactly this text."""
    line = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{line}" if line.startswith((".", "'")) else line


def paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        lines = paragraph.strip("\n").split("\n")
        if lines[0].strip() == AS_IT_STANDS:
            yield from (".PP", ".nf", ".RS", *(escaped(line.strip()) for line in lines[1:]), ".RE", ".fi")
        else:
            yield from (".PP", *(escaped(line.strip()) for line in lines))


def page(context: click.Context) -> str:
    """Return the man page of one command."""
    command, path = context.command, context.command_path
    usage = " ".join(command.collect_usage_pieces(context))
    help_text = command.help or ""
    first = command.get_short_help_str(120)
    lines = [
        f'.TH "{path.replace(" ", "-").upper()}" "1" "" "kproxy {version()}" "kproxy"',
        ".SH NAME",
        f"{escaped(path.replace(' ', '-'))} \\- {escaped(first.rstrip('.'))}",
        ".SH SYNOPSIS",
        f".B {escaped(path)}",
        escaped(usage),
        ".SH DESCRIPTION",
        *paragraphs(help_text),
        ".SH OPTIONS",
    ]
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            lines += [".TP", f"\\fB{escaped(record[0])}\\fP", escaped(record[1])]
    if isinstance(command, click.Group):
        lines.append(".SH COMMANDS")
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                lines += [".TP", f"\\fB{escaped(f'{path}-{name}'.replace(' ', '-'))}\\fP(1)"]
                lines.append(escaped(below.get_short_help_str(120)))
    if command.epilog:
        lines += [".SH NOTES", *paragraphs(command.epilog)]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Return status 1 if `--check` finds a page that differs from the generated one."""
    written = {
        f"{context.command_path.replace(' ', '-')}.1": page(context)
        for context in commands(cli, click.Context(cli, info_name="kproxy"))
    }
    there = {path.name: path.read_text() for path in PAGES.glob("*.1")}
    if "--check" in sys.argv[1:]:
        differing = sorted(name for name in {*written, *there} if written.get(name) != there.get(name))
        if differing:
            sys.stderr.write(f"docs/man is not up to date ({', '.join(differing)}): run make docs\n")
        return 1 if differing else 0
    for name in there.keys() - written.keys():
        (PAGES / name).unlink()
    for name, text in written.items():
        (PAGES / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
