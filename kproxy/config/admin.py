"""Options of the admin page's protection, and of its TLS: `[admin]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

from kproxy.config.parsing import Address, parse_address, read_file, split_list
from kproxy.config.tls import ListenerTls, PageTlsSection, listener_tls
from kproxy.errors import StartupError

LOOPBACK = "127.0.0.1"
LEAST_TOKEN_CHARACTERS = 16
# The answer of a page with TLS to HTTP in plain text.
SPEAKS_TLS = "this page speaks TLS: ask https:// instead of http://"
_MOST_TOKEN_BYTES = 4_096
# Options that have no flag and are never shown.
SECRETS = frozenset({"admin.token"})


class AdminSection(msgspec.Struct, kw_only=True):
    """`[admin]` as given."""

    token: str | UnsetType = UNSET
    token_file: str | UnsetType = UNSET
    token_for_all: bool = False
    hosts: str | list[str] | UnsetType = UNSET
    tls: PageTlsSection = msgspec.field(default_factory=PageTlsSection)


@dataclass(frozen=True)
class AdminOptions:
    """`[admin]`, checked.

    `token` empty: none is asked for. `token_file`: the file that has it, which is read again when it changes.
    `token_for_all`: the token is asked for also by `/livez`, `/readyz` and `/metrics`. `hosts`: names under which the
    page is called, beside addresses and this machine's own name. `tls` None: the page is in plain text.
    """

    token: str = field(default="", repr=False)
    token_file: Path | None = None
    token_for_all: bool = False
    hosts: tuple[str, ...] = ()
    tls: ListenerTls | None = None


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
    token, token_file = "", None
    tls_sources = {key: sources[f"admin.tls.{key}"] for key in PageTlsSection.__struct_fields__}
    tls = listener_tls(given.tls, tls_sources, "admin.tls.")
    for key in ("token_file", "token", "tls.cert"):
        if sources[f"admin.{key}"] != "default" and not has_page:
            raise StartupError(f"{sources[f'admin.{key}']}: there is no admin page: give its address with --admin H:P.")
    if given.token_file is not UNSET:
        token_file = Path(given.token_file)
        token = read_page_token(token_file, sources["admin.token_file"])
    elif given.token is not UNSET:
        token = _checked_token(given.token, sources["admin.token"])
    if given.token_for_all and not token:
        raise StartupError(f"{sources['admin.token_for_all']}: there is no token: name its file in admin.token_file.")
    hosts = split_list(given.hosts, sources["admin.hosts"]) if given.hosts is not UNSET else ()
    return AdminOptions(token, token_file, given.token_for_all, tuple(host.lower() for host in hosts), tls)


def read_page_token(file: Path, source: str) -> str:
    """The page's token in a file. Raises StartupError, which names `source` and never has the token in it."""
    return _checked_token(read_token(file, "admin.token_file"), source, f"the token in {file}")


def _checked_token(token: str, source: str, named: str = "the admin page's token") -> str:
    if len(token) >= LEAST_TOKEN_CHARACTERS and token.isascii() and token.isprintable():
        return token
    raise StartupError(
        f"{source}: {named} must have at least {LEAST_TOKEN_CHARACTERS} characters, printable ASCII: make one with "
        f"`head -c 32 /dev/urandom | base64`."
    )


def read_token(file: Path, named: str) -> str:
    """The token in a file. Raises StartupError, which never shows it."""
    try:
        return read_file(file, named, _MOST_TOKEN_BYTES, "that is no token").decode("ascii").strip()
    except UnicodeDecodeError:
        raise StartupError(f"{named} {file} is not ASCII text: name the file that has the token.") from None
