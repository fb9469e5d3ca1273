"""`kproxy user`: add, list and remove users, in a file or in etcd."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kproxy.cli import run_async
from kproxy.cli.options import EtcdPlace, entries_in_etcd, etcd_client, etcd_place, etcd_place_flags, flag
from kproxy.config.parsing import check_prefix
from kproxy.errors import StartupError

if TYPE_CHECKING:
    from kproxy.security.users import Credentials

_MECHANISMS = ("SCRAM-SHA-256", "SCRAM-SHA-512")


@click.group("user")
def command() -> None:
    """Add, list and remove users who authenticate by SASL.

    Users are in a file, which sasl.users of the configuration names, or in etcd for all proxies together
    (sasl.users_in_etcd). Both have salted credentials for SCRAM and no passwords; PLAIN is checked against the same
    credentials. A proxy reads the file again when it changes, and follows etcd.

    \b
      kproxy user add --users users.toml alice
      kproxy user list --users users.toml
      kproxy user remove --etcd https://etcd-0:2379 --etcd-ca ca.pem alice
    """


def _where(kind: Callable[..., int | None]) -> Callable[..., int | None]:
    """Add the parameters of `_asked`."""
    kind = etcd_place_flags("The etcd of users whom all its proxies know.")(kind)
    return flag("--users file", "FILE", "The file of users.", type=click.Path(path_type=Path))(kind)


def _asked(file: Path | None, etcd: str | None, prefix: str, etcd_access: Mapping[str, str | None]) -> Path | EtcdPlace:
    """Return the place of the users. Raises StartupError."""
    place = etcd_place(etcd, check_prefix(prefix, "--prefix"), etcd_access)
    where = file if place is None else place
    if where is None or (file is not None and place is not None):
        raise StartupError("users are in a file or in etcd: give one of --users FILE and --etcd URL.")
    return where


@command.command("add")
@click.argument("name")
@_where
@click.option(
    "--mechanism",
    "mechanisms",
    metavar="|".join(_MECHANISMS),
    type=click.Choice(_MECHANISMS),
    multiple=True,
    help="The hash of a credential. May be repeated. [both]",
)
@flag("--iterations", "N", "Rounds of hashing.", type=click.IntRange(4_096, 100_000), default=8_192)
@flag(
    "--password-file",
    "FILE",
    "The file with the user's password. [asked for, or read from stdin]",
    type=click.Path(path_type=Path),
)
def add(
    name: str,
    file: Path | None,
    etcd: str | None,
    prefix: str,
    mechanisms: tuple[str, ...],
    iterations: int,
    password_file: Path | None,
    **etcd_access: str | None,
) -> int:
    """Add a user, or change its password.

    Makes the file, with mode 0600, if there is none. In etcd the user counts at once, on every proxy. The password is
    no argument: every user of the machine can read command lines.

    \b
      kproxy user add --users users.toml alice
      kproxy user add --users users.toml alice < password
      kproxy user add --users users.toml --mechanism SCRAM-SHA-512 --password-file password alice
      kproxy user add --etcd http://127.0.0.1:2379 --prefix /kafscale alice
    """
    from kproxy.security.users import SALT_BYTES, check_name, make_credential, write_users

    where = _asked(file, etcd, prefix, etcd_access)
    # The file is read before the password is asked for.
    users = {} if isinstance(where, EtcdPlace) else _read(where, may_be_new=True)
    password = _password(password_file)
    try:
        check_name(name)
        made = {
            mechanism: make_credential(mechanism, password, iterations, secrets.token_bytes(SALT_BYTES))
            for mechanism in mechanisms or _MECHANISMS
        }
    except ValueError as error:
        raise StartupError(f"the user is not added: {error}.") from None

    def told(is_new: bool) -> None:
        click.echo(f"{'added' if is_new else 'changed'} {name}: {', '.join(made)}")

    if isinstance(where, EtcdPlace):
        return run_async(lambda: _put(where, name, made, told))
    write_users(where, {**users, name: made})
    told(name not in users)
    return 0


async def _put(place: EtcdPlace, name: str, made: Credentials, told: Callable[[bool], None]) -> None:
    from kproxy.security.in_etcd import AccessKeys, encode_user
    from kproxy.security.users import MOST_USERS

    keys = AccessKeys(place.prefix)
    async with etcd_client(place) as client:
        is_new = await client.get(keys.user(name)) is None
        if is_new and len((await client.get_prefix(keys.users)).kvs) >= MOST_USERS:
            raise StartupError(f"{keys.users} has {MOST_USERS} users, and no more are allowed: remove some.")
        await client.put(keys.user(name), encode_user(made))
    told(is_new)


@command.command("list")
@_where
def list_users(file: Path | None, etcd: str | None, prefix: str, **etcd_access: str | None) -> int:
    """List users and their mechanisms.

    Exit status 1 if etcd has an entry that proxies ignore, which is named on stderr.
    """
    where = _asked(file, etcd, prefix, etcd_access)
    if isinstance(where, EtcdPlace):
        return run_async(lambda: _list_in_etcd(where))
    _show(_read(where))
    return 0


def _show(users: Mapping[str, Credentials]) -> None:
    for name, credentials in sorted(users.items()):
        click.echo(f"{name}\t{', '.join(credentials)}")


async def _list_in_etcd(place: EtcdPlace) -> int:
    from kproxy.security.in_etcd import AccessKeys, decode_user, parse_user_key

    users, ignored = await entries_in_etcd(place, AccessKeys(place.prefix).users, parse_user_key, decode_user)
    _show(users)
    return 1 if ignored else 0


@command.command("remove")
@click.argument("name")
@_where
def remove(name: str, file: Path | None, etcd: str | None, prefix: str, **etcd_access: str | None) -> int:
    """Remove a user.

    The user's connections are closed, after the answers that are due. A changed password closes none: if it was stolen,
    remove the user, and add it again, in a file once the proxies have read it (`reloaded` in their logs).
    """
    from kproxy.security.users import write_users

    where = _asked(file, etcd, prefix, etcd_access)
    if isinstance(where, EtcdPlace):
        return run_async(lambda: _delete(where, name))
    users = _read(where)
    if name not in users:
        raise _unknown(name, where)
    write_users(where, {each: credentials for each, credentials in users.items() if each != name})
    click.echo(f"removed {name}")
    return 0


async def _delete(place: EtcdPlace, name: str) -> None:
    from kproxy.security.in_etcd import AccessKeys

    keys = AccessKeys(place.prefix)
    async with etcd_client(place) as client:
        if not await client.delete(keys.user(name)):
            raise _unknown(name, keys.users)
    click.echo(f"removed {name}")


def _unknown(name: str, where: object) -> StartupError:
    return StartupError(f"unknown user {name[:100]!r} in {where}: `kproxy user list` shows all users.")


def _read(file: Path, *, may_be_new: bool = False) -> Mapping[str, Credentials]:
    from kproxy.security.users import read_users

    if may_be_new and not file.exists():
        return {}
    return read_users(file).by_name


def _password(file: Path | None) -> str:
    from kproxy.security.users import read_password

    if file is not None:
        return read_password(file)
    if sys.stdin.isatty():
        password: str = click.prompt("Password", hide_input=True, confirmation_prompt=True)
        return password
    return sys.stdin.readline().rstrip("\r\n")
