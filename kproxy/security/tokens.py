"""Verify the tokens of OAUTHBEARER, which are JSON Web Tokens, by keys from a file or from the issuer's URL.

A token is accepted if a key of the set has signed it by an asymmetric algorithm, if it has the configured issuer and
one of the configured audiences, and if it has not expired, give or take the clock skew. `TokenVerifier` trusts nothing
in a token before these checks. A token's header only names a key: it supplies no key and no address of keys.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from kproxy.config.parsing import read_file
from kproxy.errors import StartupError
from kproxy.installed import install_command
from kproxy.security.principals import MOST_NAME_CHARACTERS, Principal

# These are asymmetric, as a symmetric algorithm would use the public key as a password.
ALGORITHMS: Final = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA"),
)
MOST_FILE_BYTES: Final = 1 << 20
MOST_KEYS: Final = 100
MOST_GROUPS: Final = 1_000
# The end of the year 9999: a later end of a token counts as this one.
LATEST_S: Final = 253_402_300_800


class InvalidToken(Exception):
    """A token is not accepted. The message states the reason, without a part of the token."""


class Verified(NamedTuple):
    """The principal that a token names, and the token's end, in seconds since the epoch."""

    principal: Principal
    expires_at: float


class TokenOptions(NamedTuple):
    """The requirements for a token, and its claims that name the principal and its groups."""

    issuer: str
    audience: Sequence[str]
    principal_claim: str = "sub"
    groups_claim: str | None = None
    clock_skew_s: float = 30.0


@dataclass(frozen=True)
class TokenVerifier:
    """Verifies tokens by `keys`, by id. The id None, for tokens without a key id, has the only key or one without id.

    `on_unknown_key` is called, on any thread, if no key fits a token's id.
    """

    keys: Mapping[str | None, Any]
    options: TokenOptions
    on_unknown_key: Callable[[], None] = lambda: None

    def verify(self, token: str) -> Verified:
        """Verify a token, by the machine's clock. Raises InvalidToken."""
        import jwt

        options = self.options
        try:
            key_id = jwt.get_unverified_header(token).get("kid")
            key = self.keys.get(key_id if isinstance(key_id, str) else None)
            if key is None:
                self.on_unknown_key()
                raise InvalidToken("no key of the set has the id that the token names")
            claims = jwt.decode(
                token,
                key,
                algorithms=list(ALGORITHMS),
                audience=list(options.audience),
                issuer=options.issuer,
                leeway=options.clock_skew_s,
                options={"require": ["exp", "iss", "aud", options.principal_claim]},
            )
        except jwt.PyJWTError as error:
            raise InvalidToken(f"the token is refused ({type(error).__name__})") from error
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidToken("the token cannot be read") from error
        name = _checked(claims[options.principal_claim], options.principal_claim)
        # PyJWT has read `exp` as a number.
        return Verified(Principal(name, self._groups(claims)), float(min(int(claims["exp"]), LATEST_S)))

    def _groups(self, claims: Mapping[str, Any]) -> frozenset[str]:
        claim = self.options.groups_claim
        groups = claims.get(claim, ()) if claim is not None else ()
        groups = [groups] if isinstance(groups, str) else groups
        if not isinstance(groups, list | tuple) or not all(isinstance(group, str) for group in groups):
            raise InvalidToken(f"the claim {claim} is not a list of names")
        if len(groups) > MOST_GROUPS:
            raise InvalidToken(f"the token names {len(groups)} groups; at most {MOST_GROUPS} are read")
        return frozenset(groups)


def name_in(token: str, claim: str) -> Principal:
    """Return the principal of a token that is not verified here, which counts once a broker has accepted the token.

    Raises InvalidToken.
    """
    try:
        payload = token.split(".")[1]
        claims = json.loads(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        name = claims[claim]
    except (ValueError, TypeError, LookupError, RecursionError):
        # The error is not chained, because its cause has a part of the token.
        raise InvalidToken(f"the token cannot be read, so its {claim} is unknown") from None
    return Principal(_checked(name, claim))


def _checked(name: object, claim: str) -> str:
    if not isinstance(name, str) or not name or len(name) > MOST_NAME_CHARACTERS or not name.isprintable():
        raise InvalidToken(f"the claim {claim} is not a name")
    return name


def require_jwt() -> None:
    """Check that PyJWT is installed. Raises StartupError."""
    if find_spec("jwt") is None or find_spec("cryptography") is None:
        raise StartupError(
            f"OAUTHBEARER needs PyJWT with cryptography, which is not installed: run `{install_command('oauth')}`."
        )


def read_verifier(file: Path, options: TokenOptions) -> TokenVerifier:
    """Read a file with a JSON Web Key Set (RFC 7517). Raises StartupError."""
    require_jwt()
    return parse_verifier(read_file(file, "oauth.jwks", MOST_FILE_BYTES, "that is not a key set"), str(file), options)


def parse_verifier(
    content: bytes, source: str, options: TokenOptions, on_unknown_key: Callable[[], None] = lambda: None
) -> TokenVerifier:
    """Parse a JSON Web Key Set (RFC 7517). Raises StartupError."""
    import jwt
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        given = json.loads(content)["keys"]
        if not isinstance(given, list) or not 0 < len(given) <= MOST_KEYS:
            raise ValueError(f"`keys` is not a list of 1 to {MOST_KEYS} keys")
        keys: dict[str | None, Any] = {}
        for each in given:
            if each.get("use", "sig") != "sig":
                continue
            if each.get("kty") not in ("RSA", "EC", "OKP"):
                raise ValueError(f"a key of the type {str(each.get('kty'))[:20]} cannot verify the issuer's signatures")
            key = jwt.PyJWK.from_dict(each)
            if key.algorithm_name not in ALGORITHMS:
                raise ValueError(f"a key is for {str(key.algorithm_name)[:20]}, which is not supported")
            if key.key_id in keys:
                raise ValueError("two keys have the same id")
            keys[key.key_id] = key
    except (
        jwt.PyJWTError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        UnsupportedAlgorithm,
    ) as error:
        reason = str(error) if type(error) is ValueError else type(error).__name__
        if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
            reason = "it is not JSON"
        raise StartupError(
            f"oauth.jwks {source} is not a set of public keys ({reason[:200]}): give the issuer's JSON Web Key Set."
        ) from error
    if not keys:
        raise StartupError(f"oauth.jwks {source} has no key for signatures: give the issuer's JSON Web Key Set.")
    if len(keys) == 1:
        keys[None] = next(iter(keys.values()))
    return TokenVerifier(keys, options, on_unknown_key)
