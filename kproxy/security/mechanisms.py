"""Check the credentials of clients, as the server side of SASL's mechanisms. One object serves one exchange.

| mechanism | messages of the client | source |
| --- | --- | --- |
| PLAIN | name and password | RFC 4616 |
| SCRAM-SHA-256, SCRAM-SHA-512 | first, final | RFC 5802, RFC 7677 |
| OAUTHBEARER | a token; after a refusal one byte, which ends the exchange | RFC 7628, KIP-255 |

States of each: open, done (`step` returned a principal), failed (`step` raised). `step` is not called again after done
or failed (kproxy.security.sasl ensures this).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol

from scramp import ScramException, ScramMechanism

from kproxy.config.security import OAUTHBEARER, PLAIN
from kproxy.security.principals import Principal
from kproxy.security.tokens import InvalidToken, TokenVerifier, name_in
from kproxy.security.users import SCRAM_MECHANISMS, Users
from kproxy_codec.control import MOST_SCRAM_BYTES


class Refused(Exception):
    """The client is refused. `to_client` is the text of Kafka's broker; the message, for the log, has no secret."""

    def __init__(self, reason: str, to_client: str) -> None:
        super().__init__(reason)
        self.to_client = to_client


class Step(NamedTuple):
    """The answer to one message; `principal` is set once the exchange is done.

    `expires_at` is in seconds since the epoch, None if the credential has no end. `lifetime_s` is the time for which
    brokers accept a credential that was passed on to them, in seconds, if they report it. `user_creation` is as
    `Users.creation`, None if the client is none of these users.
    """

    token: bytes
    principal: Principal | None = None
    expires_at: float | None = None
    lifetime_s: float | None = None
    user_creation: int | None = None


class Mechanism(Protocol):
    """One exchange. `is_slow`: a step may take milliseconds of hashing. `user`: the name that the client gave."""

    is_slow: bool
    user: str

    def step(self, token: bytes) -> Step:
        """Process a message of the client, and return the answer. Raises Refused."""
        ...


class Plain:
    """Checks PLAIN: a name and a password, in plain text. With `users` None brokers alone check them."""

    def __init__(self, users: Users | None) -> None:
        self._users = users
        self.is_slow = users is not None
        self.user = ""

    def step(self, token: bytes) -> Step:
        try:
            authorization_id, name, password = token.decode().split("\x00")
        except ValueError:
            # The error is not chained, because its cause has the message.
            raise Refused("its PLAIN message is malformed", "Invalid SASL/PLAIN response") from None
        self.user = name
        if not name or not password:
            missing = "username" if not name else "password"
            raise Refused(f"its {missing} is empty", f"Authentication failed: {missing} not specified")
        if authorization_id not in ("", name):
            raise Refused(
                "it asks for the rights of another user",
                "Authentication failed: Client requested an authorization id that is different from username",
            )
        if self._users is not None and not self._users.check(name, password):
            raise Refused(
                f"the user {name[:100]!r} or its password is wrong",
                "Authentication failed: Invalid username or password",
            )
        creation = self._users.creation(name) if self._users is not None else None
        return Step(b"", Principal(name), user_creation=creation)


class Scram:
    """SCRAM, by scramp. An unknown user fails at the last message, like a wrong password."""

    is_slow = False

    def __init__(self, mechanism: str, users: Users) -> None:
        self._mechanism = mechanism
        self._users = users
        self.user = ""
        self._is_known = False
        self._server = ScramMechanism(mechanism).make_server(self._find)
        self._has_begun = False

    def _find(self, name: str) -> tuple[bytes, bytes, bytes, int]:
        self.user = name
        credential = self._users.find(name, self._mechanism)
        self._is_known = credential is not None
        return (credential or self._users.stand_in(name, self._mechanism))[1:]

    def step(self, token: bytes) -> Step:
        if len(token) > MOST_SCRAM_BYTES:
            raise self._refused()
        try:
            text = token.decode()
            if not self._has_begun:
                self._has_begun = True
                self._server.set_client_first(text)
                return Step(str(self._server.get_server_first()).encode())
            self._server.set_client_final(text)
            final = str(self._server.get_server_final()).encode()
        except (ScramException, ValueError, IndexError, KeyError, TypeError) as error:
            raise self._refused() from error
        if not self._is_known:
            raise self._refused()
        return Step(final, Principal(self.user), user_creation=self._users.creation(self.user))

    def _refused(self) -> Refused:
        return Refused(
            f"the user {self.user[:100]!r}, its password or its message is wrong",
            "Authentication failed during authentication due to invalid credentials with SASL mechanism "
            + self._mechanism,
        )


# GS2's header, one pair, and the pair with the token. No text matches one of them in two ways.
_HEADER: Final = re.compile(r"n,(?:a=((?:[^=,\x00]|=2C|=3D)+))?,")
_PAIR: Final = re.compile(r"[A-Za-z]+=[\x21-\x7e \t\r\n]+")
_BEARER: Final = re.compile(r"auth=(?i:bearer) +([-_.+/=A-Za-z0-9]+)")


def _parse_bearer(text: str) -> tuple[str | None, str] | None:
    """Return the authorization id, if any, and the token of a client's first message; None for another text."""
    header, *pairs = text.split("\x01")
    gs2 = _HEADER.fullmatch(header)
    if gs2 is None or pairs[-2:] != ["", ""] or not all(map(_PAIR.fullmatch, pairs[:-2])):
        return None
    token = next(filter(None, map(_BEARER.fullmatch, pairs)), None)
    return None if token is None else (gs2[1], token[1])


_INVALID_TOKEN: Final = b'{"status":"invalid_token"}'
_GIVES_UP: Final = b"\x01"


class Oauthbearer:
    """OAUTHBEARER: a token. The server first sends a refusal in JSON; the client's next message ends the exchange.

    `verify` returns the principal that the token names, and the token's end if that is known. Raises InvalidToken.
    """

    def __init__(self, verify: Callable[[str], tuple[Principal, float | None]], *, is_slow: bool = True) -> None:
        self._verify = verify
        self._failure = ""
        self.is_slow = is_slow
        self.user = ""

    def step(self, token: bytes) -> Step:
        if self._failure:
            says = _INVALID_TOKEN.decode() if token == _GIVES_UP else "Invalid OAUTHBEARER client second message"
            raise Refused(self._failure, says)
        parsed = _parse_bearer(token.decode("ascii", "replace"))
        if parsed is None:
            raise Refused("its OAUTHBEARER message is malformed", "Invalid OAUTHBEARER client first message")
        wanted, bearer = parsed
        try:
            principal, expires_at = self._verify(bearer)
        except InvalidToken as error:
            self._failure = str(error)
            return Step(_INVALID_TOKEN)
        self.user = principal.name
        if wanted is not None and wanted.replace("=2C", ",").replace("=3D", "=") != principal.name:
            raise Refused(
                "it asks for the rights of another user",
                "Authentication failed: Client requested an authorization id that is different from the token's "
                "principal name",
            )
        return Step(b"", principal, expires_at)


Servers = Mapping[str, Callable[[], Mechanism]]
"""Functions that begin an exchange, by mechanism, in the order in which clients get the mechanisms."""


def servers(
    mechanisms: tuple[str, ...],
    users: Callable[[], Users | None],
    tokens: Callable[[], TokenVerifier | None],
    *,
    unverified_claim: str | None = None,
) -> Servers:
    """Return the servers of these mechanisms; `users` and `tokens` return the data read last.

    With `unverified_claim` brokers check the credentials that cannot be checked here, and this claim of a token names
    its principal. With None all credentials are checked here.
    """

    def begin(name: str) -> Mechanism:
        known, verifier = users(), tokens()
        if name == OAUTHBEARER and verifier is not None:
            return Oauthbearer(verifier.verify)
        if unverified_claim is not None and name == OAUTHBEARER:
            return Oauthbearer(lambda token: (name_in(token, unverified_claim), None), is_slow=False)
        if unverified_claim is not None and name == PLAIN:
            return Plain(known)
        if known is None:
            raise ValueError(f"no users are configured to check {name}")
        return Scram(name, known) if name in SCRAM_MECHANISMS else Plain(known)

    return {name: lambda name=name: begin(name) for name in mechanisms}  # type: ignore[misc]
