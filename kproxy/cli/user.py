"""`kproxy user`: the file of users."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kproxy.errors import StartupError

if TYPE_CHECKING:
    from kproxy.security.users import Credential

_MECHANISMS = ("SCRAM-SHA-256", "SCRAM-SHA-512")


@click.group("user")
def command() -> None:
    """Add, list and remove users who authenticate by SASL.

    Users are in a file, which sasl.users of the configuration names, with salted credentials for SCRAM; PLAIN is
    checked against the same. A proxy reads the file again when it changes.

    \b
      kproxy user add --users users.toml alice
      kproxy user list --users users.toml
      kproxy user remove --users users.toml alice
    """


def _file(kind: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--users", "file", metavar="FILE", type=click.Path(path_type=Path), required=True, help="The file of users."
    )(kind)


@command.command("add")
@click.argument("name")
@_file
@click.option(
    "--mechanism",
    "mechanisms",
    metavar="|".join(_MECHANISMS),
    type=click.Choice(_MECHANISMS),
    multiple=True,
    help="The hash of a credential. May be repeated. [both]",
)
@click.option(
    "--iterations",
    metavar="N",
    type=click.IntRange(4_096, 100_000),
    default=8_192,
    show_default=True,
    help="Rounds of hashing.",
)
@click.option(
    "--password-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The file with the password. [asked for, or read from stdin]",
)
def add(name: str, file: Path, mechanisms: tuple[str, ...], iterations: int, password_file: Path | None) -> None:
    """Add a user, or change its password.

    Makes the file, with mode 0600, if there is none. The password is no argument: every user of the machine can read
    command lines.

    \b
      kproxy user add --users users.toml alice
      kproxy user add --users users.toml alice < password
      kproxy user add --users users.toml --mechanism SCRAM-SHA-512 --password-file password alice
    """
    from kproxy.security.users import SALT_BYTES, check_name, make_credential, write_users

    users = _read(file, may_be_new=True)
    password = _password(password_file)
    try:
        check_name(name)
        made = {
            mechanism: make_credential(mechanism, password, iterations, secrets.token_bytes(SALT_BYTES))
            for mechanism in mechanisms or _MECHANISMS
        }
    except ValueError as error:
        raise StartupError(f"the user is not added: {error}.") from None
    is_new = name not in users
    write_users(file, {**users, name: made})
    click.echo(f"{'added' if is_new else 'changed'} {name}: {', '.join(made)}")


@command.command("list")
@_file
def list_users(file: Path) -> None:
    """List users and their mechanisms."""
    for name, credentials in sorted(_read(file).items()):
        click.echo(f"{name}\t{', '.join(credentials)}")


@command.command("remove")
@click.argument("name")
@_file
def remove(name: str, file: Path) -> None:
    """Remove a user.

    A session that it has goes on until it ends (sasl.session_lifetime_s).
    """
    from kproxy.security.users import write_users

    users = _read(file)
    if name not in users:
        raise StartupError(f"there is no user {name[:100]!r} in {file}: `kproxy user list` shows them.")
    write_users(file, {each: credentials for each, credentials in users.items() if each != name})
    click.echo(f"removed {name}")


def _read(file: Path, *, may_be_new: bool = False) -> Mapping[str, Mapping[str, Credential]]:
    from kproxy.security.users import read_users

    if may_be_new and not file.exists():
        return {}
    return read_users(file, b"").by_name


def _password(file: Path | None) -> str:
    from kproxy.security.users import read_password

    if file is not None:
        return read_password(file)
    if sys.stdin.isatty():
        password: str = click.prompt("Password", hide_input=True, confirmation_prompt=True)
        return password
    return sys.stdin.readline().rstrip("\r\n")
