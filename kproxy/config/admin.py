"""Check the options of the admin page's protection and TLS: `[admin]`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from kproxy.config.parsing import Address, Secret, Texts, of_section, parse_address, read_file
from kproxy.config.tls import PageTls
from kproxy.errors import StartupError

LOOPBACK = "127.0.0.1"
LEAST_TOKEN_CHARACTERS = 16
# The answer of a page with TLS to HTTP in plain text.
SPEAKS_TLS = "this page speaks TLS: ask https:// instead of http://"
_MOST_TOKEN_BYTES = 4_096


class AdminOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The section `[admin]`.

    With neither `token` nor `token_file`, which is read again when it changes, no token is required. `token_for_all`:
    also `/livez`, `/readyz` and `/metrics` require the token. `hosts` are names under which the page is called, beside
    addresses and this machine's own name. Without `tls.cert` the page is in plain text.
    """

    token: Secret | None = None
    token_file: Path | None = None
    token_for_all: bool = False
    hosts: Texts | None = None
    tls: PageTls = msgspec.field(default_factory=PageTls)

    def check(self, sources: Mapping[str, str], *, has_page: bool) -> None:
        """Check the options. Raises StartupError, which never shows the token."""
        if self.token is not None and self.token_file is not None:
            raise StartupError(
                f"the admin page's token is given twice: {sources['token']} has one and {sources['token_file']} names "
                f"a file; keep one of them."
            )
        self.tls.checked(of_section(sources, "tls"))
        for key in ("token_file", "token", "tls.cert"):
            if sources[key] != "default" and not has_page:
                raise StartupError(f"{sources[key]} needs an admin page: give its address with --admin H:P.")
        if self.token_file is not None:
            read_page_token(self.token_file, sources["token_file"])
        elif self.token is not None:
            _checked_token(self.token, sources["token"])
        elif self.token_for_all:
            raise StartupError(f"{sources['token_for_all']} needs a token: name its file in admin.token_file.")


def parse_admin(text: str, source: str) -> Address:
    """Parse the page's address; the default host is this machine's loopback. Raises StartupError."""
    port = text.strip().removeprefix(":")
    return parse_address(f"{LOOPBACK}:{port}" if port.isascii() and port.isdigit() else text, source)


def read_page_token(file: Path, source: str) -> str:
    """Return the page's token in a file. Raises StartupError, which names `source` and never shows the token."""
    return _checked_token(read_token(file, "admin.token_file"), source, f"the token in {file}")


def _checked_token(token: str, source: str, named: str = "the admin page's token") -> str:
    if len(token) >= LEAST_TOKEN_CHARACTERS and token.isascii() and token.isprintable():
        return token
    raise StartupError(
        f"{source}: {named} must have at least {LEAST_TOKEN_CHARACTERS} printable ASCII characters: make one with "
        f"`head -c 32 /dev/urandom | base64`."
    )


def read_token(file: Path, named: str) -> str:
    """Return the token in a file. Raises StartupError, which never shows it."""
    try:
        return read_file(file, named, _MOST_TOKEN_BYTES, "that is not a token").decode("ascii").strip()
    except UnicodeDecodeError:
        raise StartupError(f"{named} {file} is not ASCII text: name the file that has the token.") from None
