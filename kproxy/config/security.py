"""Check the options of authentication: `[sasl]` and `[oauth]`.

The options are in the file and in the environment, and have no flags. None of them is a secret, because passwords and
keys are in files that the options name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from kproxy.config.listeners import Identity, ListenerConfig
from kproxy.config.parsing import Texts, given_keys
from kproxy.errors import StartupError

PLAIN: Final = "PLAIN"
SCRAM_256: Final = "SCRAM-SHA-256"
SCRAM_512: Final = "SCRAM-SHA-512"
OAUTHBEARER: Final = "OAUTHBEARER"
MECHANISMS: Final = (PLAIN, SCRAM_256, SCRAM_512, OAUTHBEARER)
# Whoever can read a connection can use the credentials that the client sends by these mechanisms.
NEED_TLS: Final = frozenset({PLAIN, OAUTHBEARER})
# The credentials that a client sends by these mechanisms can be presented to every broker.
CARRIED: Final = frozenset({PLAIN, OAUTHBEARER})


class OauthOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The section `[oauth]`: the checks of an OAUTHBEARER token, and the claims that name its principal and groups.

    `jwks` is a file or a URL, from which the keys are fetched again after `jwks_refresh_s`.
    """

    jwks: str | None = None
    jwks_refresh_s: Annotated[float, Meta(ge=10, le=86_400)] = 300.0
    issuer: str | None = None
    audience: Texts | None = None
    principal_claim: str = "sub"
    groups_claim: str | None = None
    clock_skew_s: Annotated[float, Meta(ge=0, le=600)] = 30.0


class SaslSection(msgspec.Struct, frozen=True, kw_only=True):
    """The section `[sasl]`, with times in seconds; with `session_lifetime_s` 0 sessions do not end by themselves."""

    mechanisms: Texts | None = None
    users: Path | None = None
    users_in_etcd: bool = False
    identity: Identity = "proxy"
    without_tls: bool = False
    handshake_v0: bool = False
    timeout_s: Annotated[float, Meta(gt=0, le=600)] = 10.0
    session_lifetime_s: Annotated[float, Meta(ge=0, le=31_536_000)] = 0.0


class SaslOptions(SaslSection, frozen=True, kw_only=True):
    """The checked options of `[sasl]` and `[oauth]`.

    `users`, or `users_in_etcd`, and `oauth` are set if a mechanism needs them. Identities that are passed on to brokers
    need neither, as brokers alone judge them. `principal_claim` then names the principal of a token that a broker has
    accepted.
    """

    mechanisms: Texts
    oauth: OauthOptions | None = None
    principal_claim: str = "sub"

    def carries(self, listener: ListenerConfig) -> bool:
        """Whether broker connections of the listener's clients have the client's identity."""
        return (listener.identity or self.identity) == "client"

    def offered(self, listener: ListenerConfig) -> tuple[str, ...]:
        """Return the mechanisms of a listener; if there are none, its clients need not authenticate."""
        wanted = self.wanted(listener)
        if self.carries(listener):
            wanted = tuple(name for name in wanted if name in CARRIED)
        if listener.tls is not None or self.without_tls:
            return wanted
        return tuple(name for name in wanted if name not in NEED_TLS)

    def wanted(self, listener: ListenerConfig) -> tuple[str, ...]:
        """Return the mechanisms that the configuration names for a listener."""
        return self.mechanisms if listener.sasl is None else listener.sasl


def sasl_options(
    given: SaslSection, oauth: OauthOptions, sources: Mapping[str, str], listeners: Sequence[ListenerConfig]
) -> SaslOptions | None:
    """Check the options; return None without SASL. Raises StartupError."""
    if given.mechanisms is None:
        for listener in listeners:
            if listener.identity == "client":
                raise StartupError(f"{_named(listener)} has {_NOTHING_TO_CARRY}")
            if listener.sasl:
                raise StartupError(
                    f"{_named(listener)} is to offer {listener.sasl[0][:80]!r}, and there is no SASL: name mechanisms "
                    f"in sasl.mechanisms ({', '.join(MECHANISMS)})."
                )
        for path in [f"sasl.{key}" for key in given_keys(given)] + [f"oauth.{key}" for key in given_keys(oauth)]:
            raise StartupError(
                f"{sources[path]} has no effect without SASL: name mechanisms in sasl.mechanisms "
                f"({', '.join(MECHANISMS)})."
            )
        return None
    source = sources["sasl.mechanisms"]
    mechanisms = Texts(dict.fromkeys(given.mechanisms))
    for name in mechanisms:
        if name not in MECHANISMS:
            raise StartupError(f"{source}: unknown mechanism {name[:80]!r}; expected {', '.join(MECHANISMS)}.")
    values = {**msgspec.structs.asdict(given), "mechanisms": mechanisms}
    options = SaslOptions(**values, principal_claim=oauth.principal_claim)
    for listener in listeners:
        _refuse_what_is_not_carried(options, listener, source)
        _refuse_what_does_not_fit(options, listener, source)
    # The proxy itself must judge the credentials that no broker judges.
    judged = {name for each in listeners if not options.carries(each) for name in options.wanted(each)}
    judged |= {name for name in mechanisms if name not in CARRIED}
    _refuse_missing_or_useless_users(given, mechanisms, judged - {OAUTHBEARER}, sources)
    is_judged = OAUTHBEARER in judged or any(each is not None for each in (oauth.jwks, oauth.issuer, oauth.audience))
    if OAUTHBEARER not in mechanisms:
        for key in given_keys(oauth):
            raise StartupError(f"{sources[f'oauth.{key}']} applies only to {OAUTHBEARER}, which is not offered.")
    elif is_judged:
        _refuse_incomplete_oauth(oauth, sources)
        return msgspec.structs.replace(options, oauth=oauth)
    return options


def _refuse_missing_or_useless_users(
    given: SaslSection, mechanisms: tuple[str, ...], judged: set[str], sources: Mapping[str, str]
) -> None:
    """Check the users; `judged` has the mechanisms whose credentials the proxy judges. Raises StartupError."""
    of_users = {"sasl.users": given.users is not None, "sasl.users_in_etcd": given.users_in_etcd}
    named = [sources[path] for path, is_set in of_users.items() if is_set]
    if len(named) > 1:
        raise StartupError(f"{named[1]}: users are in a file as well ({named[0]}): keep one of them.")
    if judged and not named:
        raise StartupError(
            f"{sources['sasl.mechanisms']}: {', '.join(name for name in mechanisms if name in judged)} needs users: "
            f"name their file in sasl.users, or keep them in etcd (sasl.users_in_etcd = true), and write them with "
            f"`kproxy user add`."
        )
    if mechanisms == (OAUTHBEARER,) and named:
        raise StartupError(f"{named[0]} does not apply to {OAUTHBEARER}: leave the key out.")


def _refuse_what_does_not_fit(options: SaslOptions, listener: ListenerConfig, source: str) -> None:
    for name in listener.sasl or ():
        if name not in options.mechanisms:
            raise StartupError(
                f"{_named(listener)} is to offer {name[:80]!r}, which is not among sasl.mechanisms "
                f"({', '.join(options.mechanisms)})."
            )
    offered = options.offered(listener)
    wanted = options.wanted(listener)
    # Each mechanism named for this listener must be usable; of those named for all listeners, at least one.
    if len(offered) < len(wanted) and (listener.sasl is not None or not offered):
        exposed = " and ".join(name for name in wanted if name in NEED_TLS)
        raise StartupError(
            f"{source}: {exposed} would send secrets that anybody on the network can read, as {_named(listener)} has "
            f"no TLS: use SCRAM-SHA-512, or allow it with sasl.without_tls = true."
        )


_NOTHING_TO_CARRY: Final = (
    'identity = "client" and no SASL, so that its clients show nothing that could be carried on to brokers (the key of '
    'a certificate stays with its client): offer PLAIN or OAUTHBEARER there, or set its identity to "proxy".'
)


def _refuse_what_is_not_carried(options: SaslOptions, listener: ListenerConfig, source: str) -> None:
    if not options.carries(listener):
        return
    wanted = options.wanted(listener)
    if not wanted:
        raise StartupError(f"{_named(listener)} has {_NOTHING_TO_CARRY}")
    bound = [name for name in wanted if name in options.mechanisms and name not in CARRIED]
    # Each mechanism named for this listener must be usable; of those named for all listeners, at least one.
    is_meant = listener.sasl is not None or listener.identity is None
    if bound and (is_meant or len(bound) == len(wanted)):
        raise StartupError(
            f"{source if listener.sasl is None else _named(listener)}: {' and '.join(bound)} cannot be carried on to "
            f"brokers, since its proof is bound to one exchange with one server and a client has connections to "
            f'several: offer PLAIN or OAUTHBEARER, or have the proxy\'s own identity there (identity = "proxy").'
        )


def refuse_unsafe_identity(
    options: SaslOptions | None,
    listeners: Sequence[ListenerConfig],
    source: str,
    *,
    has_own: bool,
    is_secret: bool,
) -> None:
    """Check that broker connections allow clients' identities to be passed on.

    `has_own`: the proxy has an identity at brokers; `is_secret`: the connections are encrypted, or need not be.

    Raises StartupError.
    """
    for listener in listeners:
        if options is None or not options.carries(listener) or not options.offered(listener):
            continue
        says = source if listener.identity is None else f"identity of {_named(listener)}"
        if not has_own:
            raise StartupError(
                f"{says}: the proxy also needs an identity of its own at the brokers, which reads metadata and probes: "
                f"set broker_sasl.mechanism."
            )
        if not is_secret:
            raise StartupError(
                f"{says}: the passwords and tokens of clients would be shown to everybody on the network: "
                f"set broker_tls.enabled, or allow it with broker_sasl.allow_plain_text = true."
            )


def _named(listener: ListenerConfig) -> str:
    return f"the listener {listener.name}" if listener.name else "the listener"


def is_url(jwks: str) -> bool:
    """Whether the keys are at a URL, and not in a file."""
    return "://" in jwks


def _refuse_unsafe_url(given: str, source: str) -> None:
    """Refuse an unsecured connection: another server could answer for the issuer, and then make valid tokens."""
    try:
        parts = urlsplit(given)
        is_safe = parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(parts.hostname))
        is_whole = bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise StartupError(f"{source}: invalid URL: {error}.") from error
    if parts.username is not None or parts.password is not None:
        raise StartupError(f"{source}: the URL contains a user or a password: remove it.")
    if not is_safe or not is_whole:
        raise StartupError(f"{source}: invalid value {given[:300]!r}: give a file, or a URL that begins with https://.")


def _is_loopback(host: str | None) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def _refuse_incomplete_oauth(given: OauthOptions, sources: Mapping[str, str]) -> None:
    if given.jwks is None or given.issuer is None or given.audience is None:
        raise StartupError(
            f"{sources['sasl.mechanisms']}: {OAUTHBEARER} needs oauth.jwks (the issuer's keys, a file or a URL), "
            f"oauth.issuer and oauth.audience: without these, tokens made for other services would be accepted."
        )
    if is_url(given.jwks):
        _refuse_unsafe_url(given.jwks, sources["oauth.jwks"])
