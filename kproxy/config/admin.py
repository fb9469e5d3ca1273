"""Options of the admin page's protection: `[admin]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

from kproxy.config.parsing import Address, parse_address, read_file, split_list
from kproxy.errors import StartupError

LOOPBACK = "127.0.0.1"
LEAST_TOKEN_CHARACTERS = 16
_MOST_TOKEN_BYTES = 4_096
# Options that have no flag and are never shown.
SECRETS = frozenset({"admin.token"})


class AdminSection(msgspec.Struct, kw_only=True):
    """`[admin]` as given."""

    token: str | UnsetType = UNSET
    token_file: str | UnsetType = UNSET
    token_for_all: bool = False
    hosts: str | list[str] | UnsetType = UNSET


@dataclass(frozen=True)
class AdminOptions:
    """`[admin]`, checked.

    `token` empty: none is asked for. `token_for_all`: also for `/livez`, `/readyz` and `/metrics`. `hosts`: names under
    which the page is called, beside addresses and this machine's own name.
    """

    token: str = field(default="", repr=False)
    token_for_all: bool = False
    hosts: tuple[str, ...] = ()


def parse_admin(text: str, source: str) -> Address:
    """Parse the page's address; without a host it is this machine's loopback. Raises StartupError."""
    port = text.strip().removeprefix(":")
    return parse_address(f"{LOOPBACK}:{port}" if port.isascii() and port.isdigit() else text, source)


def admin_options(given: AdminSection, sources: Mapping[str, str], *, has_page: bool) -> AdminOptions:
    """Check the options. Raises StartupError, which never has the token in it."""
    if given.token is not UNSET and given.token_file is not UNSET:
        raise StartupError(
            f"the admin page's token stands twice: {sources['admin.token']} has one and {sources['admin.token_file']} "
            f"names a file; keep one of them."
        )
    token, source = "", ""
    if given.token_file is not UNSET:
        token, source = read_token(Path(given.token_file), "admin.token_file"), sources["admin.token_file"]
    elif given.token is not UNSET:
        token, source = given.token, sources["admin.token"]
    if source and not has_page:
        raise StartupError(f"{source}: there is no admin page: give its address with --admin H:P.")
    if source and not (len(token) >= LEAST_TOKEN_CHARACTERS and token.isascii() and token.isprintable()):
        raise StartupError(
            f"{source}: the admin page's token is at least {LEAST_TOKEN_CHARACTERS} printable ASCII characters."
        )
    if given.token_for_all and not token:
        raise StartupError(f"{sources['admin.token_for_all']}: there is no token: name its file in admin.token_file.")
    hosts = split_list(given.hosts, sources["admin.hosts"]) if given.hosts is not UNSET else ()
    return AdminOptions(token, given.token_for_all, tuple(host.lower() for host in hosts))


def read_token(file: Path, named: str) -> str:
    """The token in a file. Raises StartupError, which never shows it."""
    try:
        return read_file(file, named, _MOST_TOKEN_BYTES, "that is no token").decode("ascii").strip()
    except UnicodeDecodeError:
        raise StartupError(f"{named} {file} is not ASCII text.") from None
