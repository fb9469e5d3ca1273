"""Read the data for authentication and authorisation, again when they change: files, and keys from a URL."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from kproxy.config.access import AccessOptions, read_acls
from kproxy.config.quotas import QuotaOptions, read_quotas
from kproxy.config.security import OauthOptions, SaslOptions
from kproxy.security.acls import Rules, acls_of
from kproxy.security.key_server import KeyServer
from kproxy.security.quotas import Accounts, Quotas
from kproxy.security.reloading import Reloading, Reloads
from kproxy.security.tokens import TokenOptions, TokenVerifier, read_verifier
from kproxy.security.users import Users, read_users

_NO_RULES: Final = Rules(())
_NO_QUOTAS: Final = Quotas(())
Content = TypeVar("Content")


class SecurityFiles:
    """The files of one process, which `reloads` follows. Raises StartupError if one cannot be used.

    `tells`: whether this process logs that they are read again, and not another worker.
    """

    def __init__(
        self,
        sasl: SaslOptions | None,
        access: AccessOptions | None,
        quotas: QuotaOptions | None,
        reloads: Reloads,
        *,
        counters: Counter[str],
        tells: bool = True,
    ) -> None:
        self._users = self._tokens = self._rules = self._quotas = None
        # The code that has this object runs it.
        self.key_server: KeyServer | None = None
        self.accounts = Accounts(quotas.share if quotas is not None else 1.0)
        # A salt must not show whether a user exists, so it must not change when the file is read again.
        stand_in_key = secrets.token_bytes(32)

        def follow(named: str, file: Path, read: Callable[[Path], Content]) -> Reloading[Content]:
            return reloads.add(Reloading(named, [file], lambda: read(file), counters=counters, tells=tells))

        if sasl is not None and sasl.users is not None:
            self._users = follow("users", sasl.users, lambda file: read_users(file, stand_in_key))
        if sasl is not None and sasl.oauth is not None:
            token_options = _token_options(sasl.oauth)
            if isinstance(sasl.oauth.jwks, str):
                self.key_server = KeyServer(
                    sasl.oauth.jwks, token_options, sasl.oauth.jwks_refresh_s, counters=counters, tells=tells
                )
            else:
                self._tokens = follow(
                    "keys of tokens", sasl.oauth.jwks, lambda file: read_verifier(file, token_options)
                )
        if access is not None and access.file is not None:
            self._rules = follow("acls", access.file, lambda file: Rules(acls_of(read_acls(file))))
        if quotas is not None:
            self._quotas = follow("quotas", quotas.file, lambda file: Quotas(read_quotas(file), self.accounts))

    @property
    def quotas(self) -> Quotas:
        return self._quotas.current if self._quotas is not None else _NO_QUOTAS

    @property
    def rules(self) -> Rules:
        """The rules; without any nothing is allowed."""
        return self._rules.current if self._rules is not None else _NO_RULES

    @property
    def users(self) -> Users | None:
        return self._users.current if self._users is not None else None

    @property
    def tokens(self) -> TokenVerifier | None:
        keys = self._tokens or self.key_server
        return keys.current if keys is not None else None


def _token_options(oauth: OauthOptions) -> TokenOptions:
    return TokenOptions(oauth.issuer, oauth.audience, oauth.principal_claim, oauth.groups_claim, oauth.clock_skew_s)
