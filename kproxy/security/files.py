"""Hold the data for authentication and authorisation, and read them again on changes: files, keys from a URL, etcd."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

import structlog

from kproxy.config.access import AccessOptions, read_acls
from kproxy.config.quotas import QuotaOptions, read_quotas
from kproxy.config.security import OauthOptions, SaslOptions, is_url
from kproxy.security.acls import Acl, Rules, acls_of
from kproxy.security.events import NO_EVENTS, SecurityEvents
from kproxy.security.in_etcd import AccessInEtcd
from kproxy.security.key_server import KeyServer
from kproxy.security.quotas import Accounts, Quotas
from kproxy.security.reloading import Reloading, Reloads
from kproxy.security.tokens import TokenOptions, TokenVerifier, read_verifier
from kproxy.security.users import Users, read_users

log = structlog.get_logger(__name__)

_NO_QUOTAS: Final = Quotas(())
Content = TypeVar("Content")


class SecurityFiles:
    """The data of one process. Raises StartupError if a file cannot be used.

    `reloads` follows the files, and the caller that opens `in_etcd` follows etcd. Users are in a file or in etcd; rules
    of both apply together. `tells`: this process, and not another worker, logs that files are read again.
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
        in_etcd: AccessInEtcd | None = None,
        events: SecurityEvents = NO_EVENTS,
    ) -> None:
        self._users = self._tokens = None
        self._acls: Reloading[list[Acl]] | None = None
        self._quotas: Reloading[Quotas] | None = None
        self._in_etcd = in_etcd
        self._reloads = reloads
        self._counters = counters
        self._tells = tells
        # The owner of this object runs the key server.
        self.key_server: KeyServer | None = None
        self.accounts = Accounts()
        self._add_users = "add one with `kproxy user add --etcd`"
        if sasl is not None and sasl.users is not None:
            self._add_users = f"add one with `kproxy user add --users {sasl.users} NAME`"
            self._users = reloads.add(
                self._follow(
                    "users", sasl.users, read_users, lambda users: self.tell_of_no_users(), lambda users: users.by_name
                )
            )
        if sasl is not None and sasl.oauth is not None:
            token_options, jwks = _token_options(sasl.oauth), str(sasl.oauth.jwks)
            if is_url(jwks):
                self.key_server = KeyServer(
                    jwks,
                    token_options,
                    sasl.oauth.jwks_refresh_s,
                    counters=counters,
                    tells=tells,
                    events=events,
                )
            else:
                self._tokens = reloads.add(
                    self._follow("keys of tokens", Path(jwks), lambda file: read_verifier(file, token_options))
                )
        if in_etcd is not None:
            in_etcd.on_acls = self._combine
        # Each change of the rules makes another object, which open connections compare with theirs.
        self.rules = Rules([])
        self.prepare(access, quotas)()

    def prepare(self, access: AccessOptions | None, quotas: QuotaOptions | None) -> Callable[[], None]:
        """Read the files of rules and quotas, unless they are followed; return a function that starts to follow them.

        Raises StartupError.
        """
        acls, limits = self._acls, self._quotas
        if acls is None and access is not None and access.file is not None:
            acls = self._follow(
                "acls",
                access.file,
                lambda file: acls_of(read_acls(file)),
                lambda acls: self._combine(),
                lambda acls: {str(acl): acl for acl in acls},
            )
        if limits is None and quotas is not None:
            limits = self._follow("quotas", quotas.file, lambda file: Quotas(read_quotas(file), self.accounts))

        def follow() -> None:
            if quotas is not None:
                self.accounts.part = quotas.share
            if limits is not None and limits is not self._quotas:
                self._quotas = self._reloads.add(limits)
            if acls is not None and acls is not self._acls:
                self._acls = self._reloads.add(acls)
                self._combine()

        return follow

    def _follow(
        self,
        named: str,
        file: Path,
        read: Callable[[Path], Content],
        on_change: Callable[[Content], None] = lambda content: None,
        entries: Callable[[Content], Mapping[str, object]] = lambda content: {},
    ) -> Reloading[Content]:
        return Reloading(
            named,
            [file],
            lambda: read(file),
            counters=self._counters,
            tells=self._tells,
            on_change=on_change,
            entries=entries,
        )

    @property
    def quotas(self) -> Quotas:
        return self._quotas.current if self._quotas is not None else _NO_QUOTAS

    @property
    def has_acls(self) -> bool:
        """Whether there is a rule; without rules nothing is allowed."""
        return bool(self._all_acls())

    def _all_acls(self) -> list[Acl]:
        of_file = self._acls.current if self._acls is not None else []
        return of_file + self._in_etcd.acls if self._in_etcd is not None else of_file

    def _combine(self) -> None:
        self.rules = Rules(self._all_acls(), self.rules)

    @property
    def users(self) -> Users | None:
        if self._in_etcd is not None and self._in_etcd.has_users:
            return self._in_etcd.users
        return self._users.current if self._users is not None else None

    @property
    def lacks_users(self) -> str | None:
        """The advice if users are required and none exist, so that nobody can log in; None otherwise."""
        return self._add_users if self.users is not None and not self.users.by_name else None

    def tell_of_no_users(self) -> None:
        """Log a warning if users are required and there are none."""
        if self.lacks_users is not None and self._tells:
            log.warning("user list is empty", consequence="nobody can log in with a password", advice=self.lacks_users)

    @property
    def tokens(self) -> TokenVerifier | None:
        keys = self._tokens or self.key_server
        return keys.current if keys is not None else None


def _token_options(oauth: OauthOptions) -> TokenOptions:
    issuer, audience = str(oauth.issuer), oauth.audience or ()
    return TokenOptions(issuer, audience, oauth.principal_claim, oauth.groups_claim, oauth.clock_skew_s)
