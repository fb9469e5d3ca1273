"""What is read from files for authentication and authorisation, and read again when it changes.

A file is read again when its status differs (inode, size, time), which is looked at every LOOK_S, and on SIGHUP. What
cannot be read changes nothing: the last good content stays in force, and one line in the log says so.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

import structlog

from kproxy.config.access import AccessOptions, read_acls
from kproxy.config.quotas import QuotaOptions, read_quotas
from kproxy.config.security import SaslOptions
from kproxy.errors import StartupError
from kproxy.security.acls import Rules, acls_of
from kproxy.security.quotas import Quotas
from kproxy.security.tokens import TokenOptions, TokenVerifier, read_verifier
from kproxy.security.users import Users, read_users

log = structlog.get_logger(__name__)

LOOK_S: Final = 1.0
_NO_RULES: Final = Rules(())
_NO_QUOTAS: Final = Quotas(())
Content = TypeVar("Content")


class KeptFile(Generic[Content]):
    """The content of one file as last read by `read`, which raises StartupError, as does the constructor."""

    def __init__(self, file: Path, read: Callable[[Path], Content], what: str) -> None:
        self._file = file
        self._read = read
        self._what = what
        self._stamp = _stamp(file)
        self.current = read(file)

    def look(self, *, anyway: bool = False) -> bool:
        """Read the file if it has changed; return whether there is new content."""
        stamp = _stamp(self._file)
        if stamp == self._stamp and not anyway:
            return False
        self._stamp = stamp
        try:
            self.current = self._read(self._file)
        except StartupError as error:
            log.error(f"{self._what} not reloaded", consequence="what was read last stays in force", reason=str(error))
            return False
        log.info(f"{self._what} reloaded", file=str(self._file))
        return True


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


class SecurityFiles:
    """The files of one process. Raises StartupError if one cannot be used."""

    def __init__(
        self, sasl: SaslOptions | None, access: AccessOptions | None = None, quotas: QuotaOptions | None = None
    ) -> None:
        stand_in_key = secrets.token_bytes(32)
        self._users = self._tokens = self._rules = self._quotas = None
        if sasl is not None and sasl.users is not None:
            self._users = KeptFile[Users](sasl.users, lambda file: read_users(file, stand_in_key), "users")
        if sasl is not None and sasl.oauth is not None:
            oauth = sasl.oauth
            options = TokenOptions(
                oauth.issuer, oauth.audience, oauth.principal_claim, oauth.groups_claim, oauth.clock_skew_s
            )
            self._tokens = KeptFile[TokenVerifier](
                oauth.jwks, lambda file: read_verifier(file, options), "keys of tokens"
            )

        if access is not None and access.file is not None:
            self._rules = KeptFile[Rules](access.file, lambda file: Rules(acls_of(read_acls(file))), "acls")

        if quotas is not None:
            share = quotas.share
            self._quotas = KeptFile[Quotas](quotas.file, lambda file: Quotas(read_quotas(file), share), "quotas")

    @property
    def quotas(self) -> Quotas:
        return self._quotas.current if self._quotas is not None else _NO_QUOTAS

    @property
    def rules(self) -> Rules:
        """Without any nothing is allowed."""
        return self._rules.current if self._rules is not None else _NO_RULES

    @property
    def users(self) -> Users | None:
        return self._users.current if self._users is not None else None

    @property
    def tokens(self) -> TokenVerifier | None:
        return self._tokens.current if self._tokens is not None else None

    def look(self, *, anyway: bool = False) -> None:
        """Read again what has changed."""
        for kept in (self._users, self._tokens, self._rules, self._quotas):
            if kept is not None:
                kept.look(anyway=anyway)

    async def keep(self) -> None:
        """Follow changes until cancelled. A large file is read on another thread."""
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self.look)
